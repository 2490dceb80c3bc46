"""The page behind a gateway: it speaks to one replica at a time. Run by node, without a browser: what it asks for."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

from octavo.engine.server.endpoints.ui import ASSETS

FOLDER: Final = Path(__file__).parents[3] / "engine" / "server" / "ui"
NODE: Final = shutil.which("node")
PATIENCE: Final = 30.0
"""Seconds after which a script that hangs is told so."""
WORLD: Final = """
const kept = new Map();
globalThis.sessionStorage = {
  getItem: (name) => kept.get(name) ?? null,
  setItem: (name, value) => kept.set(name, value),
  removeItem: (name) => kept.delete(name),
};
const made = new Map();
const nothing = new Proxy(() => nothing, { get: () => nothing });
const fresh = () => ({
  hidden: false, value: "", listeners: {}, dataset: {}, style: {}, children: [], classList: { toggle() {} },
  addEventListener(name, listener) { this.listeners[name] = listener; },
  setAttribute(name, value) { this[name] = value; },
  append(...parts) { this.children.push(...parts); },
  replaceChildren(...parts) { this.children = parts; },
  getContext: () => nothing,
});
export const byId = (id) => made.get(id) ?? made.set(id, fresh()).get(id);
globalThis.document = { getElementById: byId, createElement: fresh, addEventListener() {}, hidden: false };
globalThis.addEventListener = () => {};
globalThis.setTimeout = () => 0;
globalThis.ResizeObserver = class { observe() {} };
globalThis.matchMedia = fresh;
export const asked = [];
export const answers = {};
globalThis.fetch = async (path, { headers = {} } = {}) => {
  const replica = headers["X-Octavo-Replica"] ?? null;
  asked.push([path.split("?")[0], replica, headers.Authorization ?? null]);
  const found = answers[path.split("?")[0]];
  return { ok: true, json: async () => (typeof found === "function" ? found(replica) : found) };
};
export const turns = async () => { for (let turn = 0; turn < 50; turn += 1) await null; };
"""

pytestmark = pytest.mark.skipif(NODE is None, reason="no node is installed")


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """A folder with the scripts, as modules."""
    (tmp_path / "package.json").write_text('{"type": "module"}', encoding="utf-8")
    (tmp_path / "world.js").write_text(WORLD, encoding="utf-8")
    for name in ASSETS:
        if name.endswith(".js"):
            shutil.copy(FOLDER / name, tmp_path / name)
    return tmp_path


def told(page: Path, script: str) -> object:
    """What ``script`` tells, by ``tell(value)``."""
    head = 'import { answers, asked, byId, turns } from "./world.js";\n'
    head += "const tell = (it) => console.log(JSON.stringify(it));\n"
    (page / "main.js").write_text(head + script, encoding="utf-8")
    done = subprocess.run(  # noqa: S603  # ours
        [str(NODE), "main.js"], cwd=page, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr
    found: object = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("ready", "expected"),
    [
        ({"status": "loading", "share": 0.5}, {"status": "loading", "share": 0.5, "replicas": []}),
        (
            {"replicas": {"b": {"status": "loading", "share": 0.5}, "a": {"status": "ready", "share": 1}}},
            {"status": "ready", "share": 1, "replicas": ["b", "a"]},
        ),
        (
            {"replicas": {"a": {"status": "dead"}, "b": {"status": "loading", "share": 0.5}}},
            {"status": "loading", "share": 0.5, "replicas": ["a", "b"]},
        ),
        (
            {"replicas": {"a": {"error": {"code": "replica_lost"}}, "b": {"status": "dead"}}},
            {"status": "dead", "replicas": ["b"]},
        ),
        ({"replicas": {}}, {"status": "away", "replicas": []}),
    ],
)
def test_a_gateway_is_as_ready_as_the_best_of_its_replicas(
    page: Path, ready: dict[str, object], expected: dict[str, object]
) -> None:
    script = 'const { readiness } = await import("./api.js");\n'
    assert told(page, f"{script}answers.ready = {json.dumps(ready)};\ntell(await readiness());") == expected


def test_there_is_a_choice_from_two_on_and_it_stays(page: Path) -> None:
    script = """
    const { Replicas } = await import("./replicas.js");
    const { replica } = await import("./api.js");
    let turned = 0;
    const replicas = new Replicas(() => { turned += 1; });
    const seen = [];
    const offer = (...names) => {
      replicas.offer(names);
      seen.push([replica.value, !byId("replica-choice").hidden, byId("replica").value, turned]);
    };
    offer();
    offer("b");
    offer("b", "a");
    byId("replica").listeners.change({ target: { value: "a" } });
    offer("b", "a", "c");
    offer("c", "b");
    offer();
    tell(seen);
    """
    assert told(page, script) == [
        ["", False, "", 0],
        ["b", False, "b", 1],
        ["b", True, "b", 1],
        ["a", True, "a", 2],
        ["b", True, "b", 3],
        ["", False, "", 4],
    ]


def test_only_operators_questions_go_to_one_replica(page: Path) -> None:
    script = """
    const { adminToken, apiKey, ask, replica } = await import("./api.js");
    [adminToken.value, apiKey.value, replica.value] = ["operator", "client", "r1"];
    await ask("GET", "v1/models");
    await ask("GET", "admin/pins", { secret: adminToken });
    replica.value = "";
    await ask("GET", "admin/pins", { secret: adminToken });
    tell(asked);
    """
    assert told(page, script) == [
        ["v1/models", None, "Bearer client"],
        ["admin/pins", "r1", "Bearer operator"],
        ["admin/pins", None, "Bearer operator"],
    ]


@pytest.mark.parametrize("is_gateway", [True, False])
def test_the_cache_is_that_of_one_replica(page: Path, *, is_gateway: bool) -> None:
    """The first answer of a gateway is of all: it is asked again at once, for one of them. A server is not."""
    script = """
    const { Cache } = await import("./cache.js");
    const { adminToken } = await import("./api.js");
    adminToken.value = "operator";
    const isGateway = %s;
    answers["admin/cache"] = (replica) => (isGateway && replica === null ? { replicas: { r1: {}, r0: {} } } : {});
    const cache = new Cache({ messages: [] });
    cache.start();
    await turns();
    if (isGateway) byId("replica").listeners.change({ target: { value: "r1" } });
    await turns();
    tell(asked.map(([path, replica]) => [path, replica]));
    """
    expected = [["admin/cache", replica] for replica in ((None, "r0", "r1") if is_gateway else (None,))]
    assert told(page, script % json.dumps(is_gateway)) == expected

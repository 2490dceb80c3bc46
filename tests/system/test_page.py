"""The page at ``/ui`` in a real browser: what people see is what the API says, and what strangers write stays text."""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Literal, TypeAlias

import httpx
import matplotlib.image
import pytest
import pytest_asyncio
import torch
from playwright.async_api import Browser, ConsoleMessage, Page, Request, async_playwright, expect

from octavo import AsyncEngine, EngineConfig
from octavo.engine.model.runner import Row, StepInput
from octavo.engine.server.access import Caller, Keys
from octavo.engine.server.running import serving
from octavo.engine.server.settings import ServerSettings
from octavo.engine.testing import FakeRunner
from octavo.tests.engine.server.http_rig import until
from octavo.tests.engine.server.scripted import ASCII, AsciiCodec, Scripted

pytestmark = [pytest.mark.system, pytest.mark.asyncio(loop_scope="module")]

CHROMIUM = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)
TOKEN = "operators-only"  # noqa: S105  # of tests
PATIENCE = 20_000
"""Milliseconds after which a test that hangs is told so; no result depends on it."""
BLOCK = 4
HOSTILE = "<img src=x onerror=p()><script>p()</script>"
SYSTEM = "Be brief."
SET = "values => { for (const [id, value] of Object.entries(values)) document.getElementById(id).value = value; }"
BREAK_IN = "() => { try { document.body.innerHTML = '<b></b>'; return ''; } catch (error) { return error.name; } }"
WAYS: tuple[tuple[int, Literal["light", "dark"]], ...] = ((1280, "light"), (1280, "dark"), (400, "light"))


class Printable(FakeRunner):
    """Says letters and digits, which come back the same in the next turn. ``gate``: holds it up before a step."""

    def __init__(self, hold_at: int | None = None) -> None:
        super().__init__(vocab_size=ASCII, before_step=self._wait)
        self.gate = threading.Event()
        self._hold_at = hold_at

    def _wait(self, step: StepInput) -> None:
        if self._hold_at is not None and self.steps >= self._hold_at:
            assert self.gate.wait(PATIENCE / 1000)

    def _logits(self, row: Row, length: int) -> torch.Tensor:
        logits = super()._logits(row, length)
        logits[:48] = logits[123:] = -1000.0
        return logits


@dataclass
class Visit:
    """A page that shows an engine."""

    page: Page
    engine: AsyncEngine
    api: httpx.AsyncClient
    url: str
    troubles: list[str]
    """What the browser complained about, and requests to others."""
    asked: list[str]
    """Paths of its requests."""

    async def say(self, text: str) -> None:
        await self.page.fill("#prompt", text)
        await self.page.press("#prompt", "Enter")

    async def converse(self, *texts: str) -> None:
        for text in texts:
            turns = await self.page.locator(".took .completion").count()
            await self.say(text)
            await expect(self.page.locator(".took .completion")).to_have_count(turns + 1)

    async def view(self) -> dict[str, object]:
        """What ``/admin/cache`` says."""
        answer = await self.api.get("/admin/cache?text=true")
        found = answer.json()
        assert isinstance(found, dict)
        return found

    async def until_shown(self, legend: dict[str, int]) -> None:
        """Until the page has asked for the cache since it is like this."""
        for state, blocks in legend.items():
            await expect(self.page.locator(f'#legend [data-state="{state}"] b')).to_have_text(f"{blocks:,}")


VisitOf: TypeAlias = Callable[..., AbstractAsyncContextManager[Visit]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    async with async_playwright() as playwright:
        opened = await playwright.chromium.launch(executable_path=CHROMIUM)
        yield opened
        await opened.close()


@pytest.fixture
def visit_of(browser: Browser) -> VisitOf:
    """``async with visit_of(runner, settings=, token=, max_tokens=, refused=, **config) as visit``.

    On leaving, the browser must have had nothing to complain about but ``refused``: statuses that were provoked.
    """

    @asynccontextmanager
    async def opened(
        runner: FakeRunner | None = None,
        *,
        settings: ServerSettings | None = None,
        token: str | None = TOKEN,
        max_tokens: int = 8,
        refused: tuple[int, ...] = (),
        **config: object,
    ) -> AsyncIterator[Visit]:
        wanted = {"num_blocks": 64, "block_size": BLOCK, **config}
        engine = AsyncEngine(runner=runner or Printable(), codec=AsciiCodec(), config=EngineConfig(**wanted))  # type: ignore[arg-type]  # names and values come from the tests
        own = settings or ServerSettings(admin_token=TOKEN)
        async with (
            engine,
            serving(engine, settings=own) as address,
            httpx.AsyncClient(base_url=address.url, headers={"Authorization": f"Bearer {TOKEN}"}) as api,
            await browser.new_context(viewport={"width": 1280, "height": 800}) as context,
        ):
            page = await context.new_page()
            page.set_default_timeout(PATIENCE)
            expect.set_options(timeout=PATIENCE)
            visit = Visit(page, engine, api, address.url, [], [])
            listen(visit, refused)
            await page.add_init_script("window.p = () => console.error('pwned')")
            await page.goto(f"{address.url}/ui" + (f"#token={token}" if token else ""))
            await page.evaluate(SET, {"system": SYSTEM, "temperature": "0", "max-tokens": str(max_tokens)})
            yield visit
            assert visit.troubles == []

    return opened


def listen(visit: Visit, refused: tuple[int, ...]) -> None:
    expected = [f"status of {status} " for status in refused]

    def console(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not any(words in message.text for words in expected):
            visit.troubles.append(message.text)

    def request(sent: Request) -> None:
        visit.asked.append(sent.url.removeprefix(visit.url))
        if not sent.url.startswith(visit.url + "/"):
            visit.troubles.append(sent.url)

    visit.page.on("console", console)
    visit.page.on("pageerror", lambda error: visit.troubles.append(str(error)))
    visit.page.on("request", request)


def body(*spoken: str, **fields: object) -> dict[str, object]:
    roles = ("user", "assistant")
    said = [{"role": roles[index % 2], "content": text} for index, text in enumerate(spoken)]
    return {"messages": [{"role": "system", "content": SYSTEM}, *said], "temperature": 0, "max_tokens": 8, **fields}


# the chat


async def test_a_chat_streams_what_the_api_says(visit_of: VisitOf) -> None:
    runner = Printable(hold_at=4)
    async with visit_of(runner) as visit:
        answers = visit.page.locator(".answer")
        await visit.say("Tell me more.")
        await expect(answers).to_have_text(re.compile(r"^.{1,7}$"))  # some of it, while the rest is not there yet
        await expect(visit.page.locator("#stop")).to_be_visible()
        await expect(visit.page.locator("#running")).to_have_text("1")
        runner.gate.set()
        await expect(visit.page.locator(".completion")).to_have_text("8 tokens")
        first = await answers.inner_text()
        answer = (await visit.api.post("/v1/chat/completions", json=body("Tell me more."))).json()
        assert first == answer["choices"][0]["message"]["content"]

        await visit.converse("And then?")
        await expect(answers).to_have_count(2)
        again = (await visit.api.post("/v1/chat/completions", json=body("Tell me more.", first, "And then?"))).json()
        assert await answers.last.inner_text() == again["choices"][0]["message"]["content"]
        cached = await visit.page.locator(".cached-tokens").all_inner_texts()
        length = len(SYSTEM + "Tell me more." + first + "And then?")
        whole = (len(SYSTEM + "Tell me more." + first) - 1) // BLOCK * BLOCK  # of the last token there is no K/V yet
        assert cached == [
            f"0 of {length - len(first + 'And then?')} prompt tokens cached",
            f"{whole} of {length} prompt tokens cached",
        ]
        await expect(visit.page.locator(".ttft").last).to_have_text(re.compile(r"^first token after [\d,.]+ m?s$"))
        await expect(visit.page.locator(".took .rate").first).to_have_text(re.compile(r"^[\d,.]+ tokens/s$"))


async def test_stop_aborts_and_keeps_what_there_is(visit_of: VisitOf) -> None:
    runner = Printable(hold_at=4)
    async with visit_of(runner) as visit:
        await visit.say("Tell me more.")
        await expect(visit.page.locator(".answer")).not_to_be_empty()
        await visit.page.press("#prompt", "Escape")
        await expect(visit.page.locator(".ending")).to_have_text("stopped")
        kept = await visit.page.locator(".answer").inner_text()
        runner.gate.set()
        await until(lambda: not visit.engine.requests())
        assert visit.engine.stats().finished == {"abort": 1}
        await visit.converse("Go on.")
        said = len(SYSTEM + "Tell me more." + kept + "Go on.")
        await expect(visit.page.locator(".cached-tokens")).to_contain_text(f"of {said} prompt tokens")
        await visit.page.click("#new-chat")
        await expect(visit.page.locator(".turn")).to_have_count(0)
        await expect(visit.page.locator("#opening")).to_be_visible()


async def test_a_refusal_is_shown_and_can_be_mended(visit_of: VisitOf) -> None:
    async with visit_of(refused=(400,)) as visit:
        await visit.say("é")
        problem = visit.page.locator(".turn .problem")
        await expect(problem).to_contain_text("not in range(128)")
        await visit.page.click("text=Try again")
        await expect(problem).to_have_count(1)
        await visit.converse("Hello.")  # what failed is no part of the conversation
        length = len(SYSTEM + "Hello.")
        await expect(visit.page.locator(".cached-tokens")).to_have_text(f"0 of {length} prompt tokens cached")


async def test_a_server_with_keys_gets_one(visit_of: VisitOf) -> None:
    keys = Keys({sha256(b"secret").digest(): Caller(tenant="acme")})
    async with visit_of(settings=ServerSettings(keys=keys, admin_token=TOKEN), refused=(401,)) as visit:
        await expect(visit.page.locator("#model")).to_have_text("needs an API key")
        await visit.page.fill("#api-key", "secret")
        await visit.page.press("#api-key", "Tab")
        await expect(visit.page.locator("#model")).to_have_text("fake")
        await visit.converse("Hello.")
        await expect(visit.page.locator("#tree .tenant")).to_have_text("acme")
        await visit.page.select_option("#tenant", "acme")
        await visit.page.click("#pin")
        await expect(visit.page.locator("#pin-list li")).to_contain_text("tenant acme")
        assert [pin.tenant for pin in visit.engine.pins()] == ["acme"]


# the cache


async def test_the_pool_map_shows_every_block(visit_of: VisitOf) -> None:
    async with visit_of() as visit:
        await visit.engine.pin(list(range(50, 50 + 5 * BLOCK)))
        await visit.converse("Tell me more about all of this.")
        pool = (await visit.view())["pool"]
        assert isinstance(pool, dict)
        assert (pool["pinned"], pool["held"], pool["total"]) == (5, 0, 64)
        await visit.until_shown({name: pool[name] for name in ("free", "idle", "held", "pinned", "in_transfer")})
        letters = "".join(letter * int(times or 1) for letter, times in re.findall(r"([a-z])(\d*)", pool["map"]))
        drawn = await visit.page.evaluate(
            """async (letters) => {
              const { STATES, layout } = await import("./ui/pool.js");
              const canvas = document.getElementById("pool-map");
              const style = getComputedStyle(canvas);
              const { cell, columns, blocks } = layout(letters.length, canvas.width, 152, 1);
              const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
              const hex = (at) => "#" + [0, 1, 2].map((part) => data[at + part].toString(16).padStart(2, "0")).join("");
              const places = Array.from(letters, (_, id) => [(id % columns) * cell, Math.floor(id / columns) * cell]);
              const names = Object.fromEntries(
                Object.entries(STATES).map(([letter, { color }]) => [style.getPropertyValue(color).trim(), letter]));
              const seen = places.map(([x, y]) => names[hex(4 * ((y + 2) * canvas.width + x + 2))]).join("");
              return { blocks, seen };
            }""",
            letters,
        )
        assert drawn == {"blocks": 1, "seen": letters}
        assert Counter(letters)["i"] == pool["idle"] > 0


async def test_the_tree_shows_the_prefix_and_who_found_it(visit_of: VisitOf) -> None:
    async with visit_of() as visit:
        rows = visit.page.locator("#tree [role=treeitem]")
        await visit.converse("Tell me more.")
        await expect(rows).to_have_count(1)
        await expect(rows.locator(".count")).to_have_text("0\u00d7")
        await expect(rows.locator(".text")).to_have_text(re.compile("^" + re.escape(SYSTEM + "Tell me")))
        await visit.converse("And then?")
        await expect(rows.first.locator(".count")).to_have_text("1\u00d7")
        await visit.page.click("#new-chat")
        await visit.converse("Something else.")
        await expect(rows).to_have_count(3)  # what all have in common, and how each goes on
        nodes = (await visit.view())["nodes"]
        assert isinstance(nodes, list)
        assert await rows.locator(".count").all_inner_texts() == [f"{node['hits']}\u00d7" for node in nodes]
        assert await visit.page.locator("#hit-rate").inner_text() == f"{visit_hit_rate(visit):.0%}"

        await rows.first.focus()
        await visit.page.keyboard.press("ArrowLeft")
        await expect(rows).to_have_count(1)
        await expect(rows).to_have_attribute("aria-expanded", "false")
        await visit.page.keyboard.press("ArrowRight")
        await visit.page.keyboard.press("End")
        await expect(rows.last).to_be_focused()
        await expect(visit.page.locator("#tree-detail")).to_contain_text(f"found {nodes[-1]['hits']} time")


def visit_hit_rate(visit: Visit) -> float:
    cache = visit.engine.stats().cache
    return cache.prefix_hit_tokens / cache.prefix_query_tokens


async def test_evictions_and_tiers_fill(visit_of: VisitOf) -> None:
    config = {"num_blocks": 24, "tiers": ("host",), "host_bytes": 2**16, "eviction_policy": "lru"}
    async with visit_of(**config) as visit:
        await expect(visit.page.locator("#eviction-list")).to_have_text("Nothing had to go so far.")
        for letter in "abc":
            await visit.converse(letter * 40)
            await visit.page.click("#new-chat")
        gone = sum(visit.engine.stats().cache.evictions.values())
        assert gone > 0
        await expect(visit.page.locator("#evicted")).to_contain_text(f"{gone} blocks")
        evictions = visit.page.locator("#eviction-list .eviction")
        await expect(evictions.first).to_contain_text("Lru")
        shown = await evictions.locator("b").all_inner_texts()
        assert sum(int(text.split()[0]) for text in shown) == gone
        await expect(visit.page.locator("#tier-list .tier")).to_contain_text(
            re.compile(r"host.*of 64 KiB.*[1-9]\d* blocks")
        )


async def test_operators_can_do_what_the_buttons_say(visit_of: VisitOf, tmp_path: Path) -> None:
    settings = ServerSettings(admin_token=TOKEN, snapshot_dir=tmp_path)
    async with visit_of(settings=settings, eviction_policy="lru") as visit:
        page, told = visit.page, visit.page.locator("#told")
        await expect(page.locator("#policy")).to_have_value("lru")
        await page.select_option("#policy", "s3_fifo")
        await expect(told).to_contain_text("until now it was Lru")
        assert visit.engine.stats().cache.policy == "S3Fifo"
        await expect(page.locator("#pin")).to_be_disabled()
        await visit.converse("Tell me more.")
        await page.click("#pin")
        await visit.until_shown({"pinned": 7})
        await page.click("text=Unpin")
        await visit.until_shown({"pinned": 0})
        await page.click("#snapshot")
        await expect(told).to_contain_text("are in the snapshot page-")
        assert [name.startswith("page-") for name in os.listdir(tmp_path)] == [True]  # noqa: PTH208
        await page.click("#evict")
        await expect(told).to_contain_text("7 blocks left the device")
        await visit.until_shown({"idle": 0})


async def test_without_the_token_there_is_a_chat_and_a_door(visit_of: VisitOf) -> None:
    async with visit_of(token=None, refused=(403,)) as visit:
        page = visit.page
        await expect(page.locator("#door")).to_contain_text("needs the admin token")
        await visit.converse("Hello.")
        assert not [path for path in visit.asked if path.startswith("/admin")]
        await page.fill("#token", "something else")
        await page.press("#token", "Enter")
        await expect(page.locator("#door-reason")).to_contain_text("ADMIN_TOKEN")
        await page.fill("#token", TOKEN)
        await page.press("#token", "Enter")
        await expect(page.locator("#live")).to_be_visible()
        await expect(page.locator("#tree [role=treeitem]")).to_have_count(1)
        await page.reload()
        await expect(page.locator("#live")).to_be_visible()  # it lasts as long as the tab
        await page.click("#leave")
        await expect(page.locator("#door")).to_be_visible()
        await page.goto(f"{visit.url}/ui#token={TOKEN}")
        await expect(page.locator("#live")).to_be_visible()
        assert page.url == f"{visit.url}/ui"  # and is in no bookmark


# strangers


async def test_hostile_text_stays_text(visit_of: VisitOf) -> None:
    prompt = HOSTILE + "\n" + HOSTILE
    async with visit_of(Scripted(HOSTILE, len(SYSTEM + prompt)), max_tokens=100, num_blocks=128) as visit:
        await visit.engine.complete(list(f"{HOSTILE}..".encode()), tenant=HOSTILE)
        await visit.converse(prompt)
        await expect(visit.page.locator(".turn .asked")).to_have_text(prompt)
        await expect(visit.page.locator(".answer")).to_have_text(HOSTILE)
        await expect(visit.page.locator("#tree .text", has_text="<img src=x onerror=p()>")).to_have_count(1)
        await expect(visit.page.locator("#tree .tenant")).to_have_text(HOSTILE)
        await expect(visit.page.locator("#tenant option").last).to_have_text(HOSTILE)
        assert await visit.page.locator("main :is(img, script)").count() == 0
        assert await visit.page.evaluate(BREAK_IN) == "TypeError"  # not even by mistake
        visit.troubles[:] = [trouble for trouble in visit.troubles if "TrustedHTML" not in trouble]


async def test_event_streams_are_read_in_whatever_pieces_they_come(visit_of: VisitOf) -> None:
    stream = (
        "\ufeffdata: one\n\n: nothing\nevent: named\r\ndata:two\r\ndata: \u00fc\U0001f642\r\n\r\n"
        "data\rid: 7\r\rretry: 9\n\nevent: empty\n\ndata:  three\n\ndata: cut off"
    )
    expected = [["message", "one"], ["named", "two\n\u00fc\U0001f642"], ["message", ""], ["message", " three"]]
    async with visit_of() as visit:
        found = await visit.page.evaluate(
            """async (bytes) => {
              const { events } = await import("./ui/sse.js");
              const read = async (pieces) => {
                const found = [];
                const stream = new ReadableStream({ start(controller) {
                  for (const piece of pieces) controller.enqueue(new Uint8Array(piece));
                  controller.close();
                } });
                for await (const { name, data } of events(stream)) found.push([name, data]);
                return JSON.stringify(found);
              };
              const all = [bytes.map((byte) => [byte])];
              for (let at = 0; at <= bytes.length; at += 1) all.push([bytes.slice(0, at), bytes.slice(at)]);
              return [...new Set(await Promise.all(all.map(read)))].map(JSON.parse);
            }""",
            list(stream.encode()),
        )
        assert found == [expected]


async def test_pools_of_any_size_fit(visit_of: VisitOf) -> None:
    async with visit_of() as visit:
        cases = [
            [total, width, ratio] for total in (1, 16, 1000, 65536, 10**7) for width in (280, 540) for ratio in (1, 2)
        ]
        found = await visit.page.evaluate(
            """async (cases) => {
              const { layout } = await import("./ui/pool.js");
              return cases.map(([total, width, ratio]) => layout(total, width, 152, ratio));
            }""",
            cases,
        )
        for (total, width, ratio), fit in zip(cases, found, strict=True):
            assert fit["columns"] * fit["cell"] <= width * ratio
            assert fit["rows"] * fit["cell"] <= 152 * ratio
            assert fit["columns"] * fit["rows"] * fit["blocks"] >= total
            assert (fit["blocks"] == 1) or fit["cell"] == 4 * ratio  # cells are shared only where they are small


async def test_a_large_pool_is_shown(visit_of: VisitOf) -> None:
    async with visit_of(num_blocks=65536) as visit:
        await visit.converse("Hello.")
        await visit.until_shown({"idle": 5, "free": 65531})
        await visit.page.hover("#pool-map", position={"x": 1, "y": 1})
        await expect(visit.page.locator("#pool-hint")).to_have_text(re.compile("^blocks 0\u2013\\d+: "))


# how it looks


async def test_it_looks_like_something(visit_of: VisitOf, tmp_path: Path) -> None:
    async with visit_of() as visit:
        page = visit.page
        await visit.converse("Tell me more.", "And then?")
        await visit.until_shown({"held": 0})
        for width, scheme in WAYS:
            await page.set_viewport_size({"width": width, "height": 800})
            await page.emulate_media(color_scheme=scheme)
            picture = tmp_path / f"{scheme}-{width}.png"
            await page.screenshot(path=picture, full_page=True)
            pixels = matplotlib.image.imread(picture)[..., :3]
            assert pixels.shape[1] == width  # nothing sticks out
            assert pixels.shape[0] >= 800
            assert await page.evaluate("document.documentElement.scrollWidth") == width
            assert len(set(map(bytes, (pixels[::3, ::3] * 255).astype("uint8").reshape(-1, 3)))) > 50  # not blank
            assert (pixels.mean() < 0.5) == (scheme == "dark")

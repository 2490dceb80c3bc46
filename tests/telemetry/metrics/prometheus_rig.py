"""What the tests of dashboards and rules share: their files, a reader of PromQL, promtool, and a Prometheus to ask.

The reader knows as much of PromQL as these tests need: which series an expression selects, by which labels, over which
ranges, and by which labels it groups. Whether an expression is PromQL at all, promtool decides.
"""

from __future__ import annotations

import http.client
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlencode

import msgspec
import pytest

from octavo.telemetry.metrics.catalogue import CATALOGUE, Kind, Metric

FILES = Path(__file__).parents[3] / "examples" / "observability"
DASHBOARD = FILES / "dashboard.json"
RECORDING = FILES / "recording_rules.yaml"
ALERTS = FILES / "alert_rules.yaml"
CONFIG = FILES / "prometheus.yml"
TARGET_LABELS = frozenset({"job", "instance", "engine"})
"""What Prometheus adds, and the label by which engines of one process are told apart."""
MISSING = "no {} on PATH: install Prometheus to run the tests of what it reads (Debian: apt-get install prometheus)"

GROUPING = frozenset({"by", "without", "on", "ignoring", "group_left", "group_right"})
OPERATORS = frozenset({"and", "or", "unless", "bool", "offset"})
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|\[[^\]]*\]|\{[^}]*\}|[A-Za-z_:][\w:]*|[\d.][\w.]*|\S')
_MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"')


# files


class Rule(msgspec.Struct, forbid_unknown_fields=True):
    """A recording or an alerting rule."""

    expr: str
    record: str | None = None
    alert: str | None = None
    duration: str | None = msgspec.field(default=None, name="for")
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class Group(msgspec.Struct, forbid_unknown_fields=True):
    """Rules that are evaluated one after the other."""

    name: str
    rules: list[Rule]


class RuleFile(msgspec.Struct, forbid_unknown_fields=True):
    """A file of rules."""

    groups: list[Group]


class Target(msgspec.Struct):
    """One query of a panel."""

    expr: str
    refId: str  # noqa: N815  # Grafana's name
    legendFormat: str  # noqa: N815
    datasource: dict[str, str]
    exemplar: bool = False


class Place(msgspec.Struct):
    """Where a panel is, on a grid of 24 columns."""

    x: int
    y: int
    w: int
    h: int


class Panel(msgspec.Struct):
    """A panel, or the heading of a row."""

    id: int
    type: str
    title: str
    gridPos: Place  # noqa: N815
    description: str = ""
    targets: list[Target] = []
    datasource: dict[str, str] = {}
    fieldConfig: dict[str, object] = {}  # noqa: N815


class Variable(msgspec.Struct):
    """A variable that queries may name."""

    name: str
    type: str
    query: str | dict[str, str | int]


class Templating(msgspec.Struct):
    """All variables."""

    variables: list[Variable] = msgspec.field(name="list")


class Dashboard(msgspec.Struct):
    """As much of Grafana's model of a dashboard as the tests look at."""

    title: str
    uid: str
    schemaVersion: int  # noqa: N815
    panels: list[Panel]
    templating: Templating


def rules_of(path: Path) -> list[Rule]:
    """All rules of a file."""
    return [rule for group in msgspec.yaml.decode(path.read_bytes(), type=RuleFile).groups for rule in group.rules]


def dashboard() -> Dashboard:
    return msgspec.json.decode(DASHBOARD.read_bytes(), type=Dashboard)


def expressions(window: str = "1m", instance: str = ".*") -> dict[str, str]:
    """Every query of the dashboard with its variables filled in, by panel and letter."""
    values = {"$__rate_interval": window, "$__range": window, "$instance": instance}
    found: dict[str, str] = {}
    for panel in dashboard().panels:
        for target in panel.targets:
            found[f"{panel.title} {target.refId}"] = _filled(target.expr, values)
    return found


def _filled(expr: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        expr = expr.replace(name, value)
    return expr


# names


class Series(NamedTuple):
    """What may stand in a query."""

    metric: Metric
    labels: frozenset[str]
    """Without those that Prometheus adds."""

    @property
    def kind(self) -> Kind:
        """``counter`` for the parts of a histogram, too: they only grow."""
        return "counter" if self.metric.kind == "histogram" else self.metric.kind


def series_of(metric: Metric) -> dict[str, Series]:
    """The names under which Prometheus stores a family."""
    labels = frozenset(metric.labels)
    if metric.kind == "info":
        return {f"{metric.name}_info": Series(metric, labels)}
    if metric.kind != "histogram":
        return {metric.name: Series(metric, labels)}
    plain = {f"{metric.name}_{part}": Series(metric, labels) for part in ("sum", "count")}
    return plain | {f"{metric.name}_bucket": Series(metric, labels | {"le"})}


def known_series() -> dict[str, Series]:
    """All of them."""
    return {name: series for metric in CATALOGUE for name, series in series_of(metric).items()}


# PromQL


class Selector(NamedTuple):
    """A name in an expression, with what narrows it."""

    name: str
    matchers: dict[str, str]
    window: str | None
    """Of a range selector, without the brackets."""


class Reading(NamedTuple):
    """What an expression mentions."""

    selectors: list[Selector]
    grouping: set[str]
    """Labels in ``by``, ``on`` and their like."""
    functions: set[str]
    strings: list[str]
    """Those outside of matchers: arguments of functions."""


def read(expr: str) -> Reading:
    """Take an expression apart."""
    tokens = [*_TOKEN.findall(expr), "", ""]
    reading = Reading([], set(), set(), [])
    at = 0
    while tokens[at]:
        at = _read_one(tokens, at, reading)
    return reading


def _read_one(tokens: Sequence[str], at: int, reading: Reading) -> int:
    """Sort the token at ``at``; returns where the next one is."""
    token, after = tokens[at], tokens[at + 1]
    if token.startswith('"'):
        reading.strings.append(token[1:-1])
    elif not re.match(r"[A-Za-z_:]", token) or token in OPERATORS:
        pass
    elif token in GROUPING:
        end = tokens.index(")", at) if after == "(" else at
        reading.grouping.update(label for label in tokens[at + 2 : end] if label != ",")
        return end + 1
    elif after == "(" or after in GROUPING:
        reading.functions.add(token)
    else:
        return _read_selector(tokens, at, reading)
    return at + 1


def _read_selector(tokens: Sequence[str], at: int, reading: Reading) -> int:
    name, matchers, window, at = tokens[at], {}, None, at + 1
    if tokens[at].startswith("{"):
        matchers, at = dict(_MATCHER.findall(tokens[at])), at + 1
    if tokens[at].startswith("["):
        window, at = tokens[at][1:-1], at + 1
    reading.selectors.append(Selector(name, matchers, window))
    return at


# programs


def program(name: str) -> str:
    """The path of ``promtool`` or ``prometheus``; without it the test is skipped."""
    path = shutil.which(name)
    if path is None:
        pytest.skip(MISSING.format(name))
    return path


def promtool(*arguments: str | Path, text: str | None = None) -> str:
    """What promtool prints; the test fails with it when promtool is not content."""
    command = [program("promtool"), *map(str, arguments)]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)  # noqa: S603  # ours
    if done.returncode:
        pytest.fail(f"promtool {' '.join(command[1:])}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


class Sample(msgspec.Struct):
    """One element of an instant vector."""

    metric: dict[str, str]
    value: tuple[float, str]

    @property
    def number(self) -> float:
        return float(self.value[1])


class TracedValue(msgspec.Struct):
    """An exemplar."""

    labels: dict[str, str]
    value: str
    timestamp: float


class Traced(msgspec.Struct):
    """The exemplars of one series."""

    seriesLabels: dict[str, str]  # noqa: N815  # Prometheus's name
    exemplars: list[TracedValue]


class _Vector(msgspec.Struct):
    result: list[Sample]


class _VectorAnswer(msgspec.Struct):
    data: _Vector


class _ExemplarAnswer(msgspec.Struct):
    data: list[Traced]


class Prometheus:
    """A running server. Calls block, so the engine must live in another thread."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self._process = process
        self._port = port
        self._log = log

    def value(self, expr: str) -> float:
        """The only sample of an expression."""
        samples = self.query(expr)
        assert len(samples) == 1, (expr, samples)
        return samples[0].number

    def query(self, expr: str) -> list[Sample]:
        """What an expression is now."""
        return msgspec.json.decode(self._get("/api/v1/query", {"query": expr}), type=_VectorAnswer).data.result

    def wait_for(self, expr: str) -> None:
        """Until an expression has an answer."""
        self.until(lambda: bool(self.query(expr)), expr)

    def exemplars(self, expr: str, seconds: float = 300.0) -> list[Traced]:
        """The exemplars of the last ``seconds``."""
        now = time.time()
        asked = {"query": expr, "start": str(now - seconds), "end": str(now + 1.0)}
        return msgspec.json.decode(self._get("/api/v1/query_exemplars", asked), type=_ExemplarAnswer).data

    def until(self, holds: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
        """Ask again and again until ``holds()``; the test fails after ``seconds``."""
        deadline = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > deadline or self._process.poll() is not None:
                pytest.fail(f"Prometheus did not come to this: {what}\n{self._log.read_text()[-3000:]}")
            time.sleep(0.05)

    def is_ready(self) -> bool:
        """Whether it answers."""
        try:
            self._get("/-/ready", {})
        except (OSError, http.client.HTTPException):
            return False
        return True

    def _get(self, path: str, asked: Mapping[str, str]) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=10.0)
        try:
            connection.request("GET", f"{path}?{urlencode(asked)}")
            answer = connection.getresponse()
            body = answer.read()
        finally:
            connection.close()
        if answer.status != http.client.OK:
            raise http.client.HTTPException(f"{answer.status} for {asked}: {body[:500]!r}")
        return body


@contextmanager
def running_prometheus(folder: Path, target: str) -> Iterator[Prometheus]:
    """A server with the configuration of the example, which scrapes ``target`` each second. It is killed in the end."""
    config = _configured(folder, target)
    port = free_port()
    log = folder / "prometheus.log"
    command = [
        program("prometheus"),
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--enable-feature=exemplar-storage",
    ]
    with log.open("wb") as errors:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)  # noqa: S603  # ours
    try:
        server = Prometheus(process, port, log)
        server.until(server.is_ready, "ready")
        yield server
    finally:
        process.kill()
        process.wait()


def _configured(folder: Path, target: str) -> Path:
    """A copy of the example's files for ``target``, with shorter intervals."""
    for rules in (RECORDING, ALERTS):
        shutil.copy(rules, folder)
    text = CONFIG.read_text()
    for old, new in (("127.0.0.1:9464", target), ("_interval: 5s", "_interval: 1s")):
        assert old in text
        text = text.replace(old, new)
    config = folder / CONFIG.name
    config.write_text(text)
    return config


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def write_rules(path: Path, exprs: Iterable[str]) -> Path:
    """A file of recording rules, one for each expression, for promtool to read."""
    rules = [{"record": f"test:{number}", "expr": expr} for number, expr in enumerate(exprs)]
    path.write_bytes(msgspec.json.encode({"groups": [{"name": "test", "rules": rules}]}))
    return path

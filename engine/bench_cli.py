"""The command ``octavo bench``: load for any OpenAI-compatible server, and what it did with it (extra ``bench``)."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, Self

import anyio
import msgspec
import typer
from rich.console import Console

from ..errors import InvalidRequest
from ..policies.simulator.plot import check_plot
from .bench import options as opt
from .bench.clock import running_clock
from .bench.compare import show_comparison
from .bench.plot import save_plot
from .bench.report import Report, read_report, save_report, with_rows
from .bench.rows import Row
from .bench.screen import BarScreen, LineScreen
from .bench.settings import (
    DEFAULT_CONCURRENCY,
    Arrivals,
    Endpoint,
    Form,
    Kind,
    Lengths,
    Load,
    Pace,
    Prefix,
    Prompts,
    Settings,
    Target,
)
from .bench.slo import parse_slo
from .bench.tables import show_report

if TYPE_CHECKING:
    from .bench.run import Bench

DEFAULT_URL = "http://127.0.0.1:8000"
INTERRUPTED = 130

bench_app = typer.Typer(invoke_without_command=True)


@bench_app.callback()
def bench(
    context: typer.Context,
    url: opt.Url = DEFAULT_URL,
    model: opt.Model = None,
    endpoint: opt.EndpointOption = Endpoint.CHAT,
    api_key: opt.ApiKey = None,
    header: opt.Header = None,
    extra_body: opt.ExtraBody = None,
    temperature: opt.Temperature = None,
    ignore_eos: opt.IgnoreEos = False,
    timeout: opt.Timeout = 600.0,
    retry: opt.Retry = 0,
    wait: opt.Wait = 0.0,
    concurrency: opt.Concurrency = None,
    rate: opt.Rate = None,
    arrivals: opt.ArrivalsOption = Arrivals.POISSON,
    trace: opt.TraceFile = None,
    speed: opt.Speed = 1.0,
    requests: opt.Requests = None,
    duration: opt.Duration = None,
    warmup: opt.Warmup = 0,
    max_in_flight: opt.MaxInFlight = None,
    seed: opt.Seed = 0,
    workload: opt.KindOption = Kind.RANDOM,
    form: opt.PromptForm = Form.TEXT,
    prompt_tokens: opt.PromptTokens = 256,
    prompt_spread: opt.PromptSpread = 0.0,
    output_tokens: opt.OutputTokens = 128,
    output_spread: opt.OutputSpread = 0.0,
    prefix_tokens: opt.PrefixTokens = None,
    prefixes: opt.Prefixes = 1,
    share: opt.Share = 1.0,
    turns: opt.Turns = 4,
    think: opt.Think = 0.0,
    file: opt.WorkloadFile = None,
    slo: opt.Slo = "",
    no_tui: opt.NoTui = False,
    json: opt.JsonFile = None,
    per_request: opt.PerRequest = False,
    plot: opt.PlotFile = None,
) -> None:
    """Drive an OpenAI-compatible server and measure it: TTFT, TPOT, throughput, prefix cache hits, errors."""
    if context.invoked_subcommand is not None:
        return
    saving = _Saving(json, plot, per_request).checked()
    fields = _fields(extra_body, temperature, ignore_eos=ignore_eos)
    target = Target(url=url, model=model, endpoint=endpoint, fields=fields, timeout=timeout, retries=retry)
    closed = DEFAULT_CONCURRENCY if (concurrency, rate, trace) == (None, None, None) else concurrency
    pace = Pace(concurrency=closed, rate=rate, arrivals=arrivals, trace=trace, speed=speed)
    load = Load(pace=pace, requests=requests, duration=duration, warmup=warmup, max_in_flight=max_in_flight, seed=seed)
    lengths = Lengths(
        prompt_tokens=prompt_tokens,
        prompt_spread=prompt_spread,
        output_tokens=output_tokens,
        output_spread=output_spread,
    )
    prefix = Prefix(tokens=prefix_tokens, prefixes=prefixes, share=share)
    prompts = Prompts(kind=workload, form=form, lengths=lengths, prefix=prefix, turns=turns, think=think, file=file)
    settings = Settings(target=target, load=load, prompts=prompts, slo=parse_slo(slo))
    _run(settings, _headers(header or [], api_key), wait, saving, plain=no_tui)


@bench_app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="A report of --json.")],
    second: Annotated[Path, typer.Argument(help="Another one.")],
) -> None:
    """Set two reports beside each other: the ratio is second by first."""
    show_comparison(Console(), read_report(first), read_report(second), (first.name, second.name))


class _Saving(NamedTuple):
    """Where the results go, beside the terminal."""

    json: Path | None
    plot: Path | None
    per_request: bool

    def checked(self) -> Self:
        """Itself. Tells before a long run what could not be saved after it."""
        if self.plot is not None:
            check_plot(self.plot)
        if self.json is not None and not self.json.parent.is_dir():
            raise InvalidRequest(f"there is no folder {self.json.parent} for the report")
        if self.per_request and self.json is None:
            raise InvalidRequest("--per-request belongs to --json")
        return self

    def save(self, report: Report, rows: list[Row]) -> None:
        if self.json is not None:
            save_report(with_rows(report, rows) if self.per_request else report, self.json)
        if self.plot is not None:
            save_plot(rows, f"{report.environment.model}, {report.environment.began}", self.plot)


def _run(settings: Settings, headers: Mapping[str, str], wait: float, saving: _Saving, *, plain: bool) -> None:
    """To the end, or to an interruption: what there is by then is reported.

    :raises typer.Exit: 1 when no request succeeded, 130 after an interruption.
    """
    if find_spec("httpx") is None:
        raise InvalidRequest("octavo bench needs httpx: pip install 'octavo[bench]'")
    from .bench.run import Bench  # noqa: PLC0415  # an extra

    began = dt.datetime.now(dt.UTC)
    bench = Bench(settings, headers, running_clock(), began, wait=wait)
    interrupted = _finish(bench, plain=plain)
    report = bench.report(interrupted=interrupted)
    if report is not None:
        show_report(Console(), report)
        saving.save(report, bench.recorder.rows)
    succeeded = report is not None and report.requests.ok > 0
    raise typer.Exit(INTERRUPTED if interrupted else int(not succeeded))


def _finish(bench: Bench, *, plain: bool) -> bool:
    """Whether it was interrupted."""
    console = Console(stderr=True)
    try:
        with LineScreen(console) if plain or not console.is_terminal else BarScreen(console) as screen:
            anyio.run(bench.run, screen)
    except KeyboardInterrupt:
        return True
    return False


def _headers(lines: list[str], api_key: str | None) -> dict[str, str]:
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name.strip():
            raise InvalidRequest("--header must be like 'X-Name: value'")  # without its text, which may be a secret
        headers[name.strip().lower()] = value.strip()
    return headers


def _fields(extra_body: str | None, temperature: float | None, *, ignore_eos: bool) -> dict[str, object]:
    """What the options say of every request."""
    fields: dict[str, object] = {}
    if temperature is not None:
        fields["temperature"] = temperature
    if ignore_eos:
        fields["ignore_eos"] = True
    try:
        return fields | msgspec.json.decode(extra_body or "{}", type=dict[str, object])
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"--extra-body must be a JSON object: {error}") from error

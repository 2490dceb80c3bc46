"""The options of ``octavo bench``, in groups as its help shows them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from .settings import Arrivals, Endpoint, Form, Kind

SERVER = "Server"
LOAD = "Load"
WORKLOAD = "Workload"
OUTPUT = "Output"

Url: TypeAlias = Annotated[str, typer.Option(help="Of any OpenAI-compatible server.", rich_help_panel=SERVER)]
Model: TypeAlias = Annotated[
    str | None, typer.Option("--model", "-m", help="Default: the first that it lists.", rich_help_panel=SERVER)
]
EndpointOption: TypeAlias = Annotated[Endpoint, typer.Option(help="Which form of the API.", rich_help_panel=SERVER)]
ApiKey: TypeAlias = Annotated[
    str | None, typer.Option(envvar="OCTAVO_API_KEY", help="Sent as a bearer token.", rich_help_panel=SERVER)
]
Header: TypeAlias = Annotated[
    list[str] | None, typer.Option("--header", "-H", help="NAME: VALUE; repeatable.", rich_help_panel=SERVER)
]
ExtraBody: TypeAlias = Annotated[
    str | None,
    typer.Option(help="JSON object: more fields of each request; null takes one away.", rich_help_panel=SERVER),
]
Temperature: TypeAlias = Annotated[float | None, typer.Option(help="Default: the server's.", rich_help_panel=SERVER)]
IgnoreEos: TypeAlias = Annotated[
    bool, typer.Option("--ignore-eos", help="Ask for all output tokens (vLLM, Octavo).", rich_help_panel=SERVER)
]
Timeout: TypeAlias = Annotated[float, typer.Option(help="Seconds that one answer may take.", rich_help_panel=SERVER)]
Retry: TypeAlias = Annotated[
    int, typer.Option(help="Send again so often after 429, when Retry-After is over.", rich_help_panel=SERVER)
]
Wait: TypeAlias = Annotated[
    float, typer.Option(min=0, help="Seconds for the server to come up before it begins.", rich_help_panel=SERVER)
]

Concurrency: TypeAlias = Annotated[
    int | None,
    typer.Option("--concurrency", "-c", help="Closed loop: conversations at a time. Default: 8.", rich_help_panel=LOAD),
]
Rate: TypeAlias = Annotated[
    float | None, typer.Option("--rate", "-r", help="Open loop: requests a second.", rich_help_panel=LOAD)
]
ArrivalsOption: TypeAlias = Annotated[Arrivals, typer.Option(help="How they are spread.", rich_help_panel=LOAD)]
TraceFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(help="Open loop: moments of arrival of a trace, as octavo simulate reads.", rich_help_panel=LOAD),
]
Speed: TypeAlias = Annotated[float, typer.Option(help="How much faster than the trace.", rich_help_panel=LOAD)]
Requests: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--requests", "-n", help="In all. Default: 100, or the file once, or the trace.", rich_help_panel=LOAD
    ),
]
Duration: TypeAlias = Annotated[
    float | None, typer.Option("--duration", "-d", help="Seconds; then none is sent any more.", rich_help_panel=LOAD)
]
Warmup: TypeAlias = Annotated[int, typer.Option(help="Requests before, which do not count.", rich_help_panel=LOAD)]
MaxInFlight: TypeAlias = Annotated[
    int | None, typer.Option(help="Most requests at the server; more wait here (queue).", rich_help_panel=LOAD)
]
Seed: TypeAlias = Annotated[int, typer.Option(help="Of prompts, lengths and arrivals.", rich_help_panel=LOAD)]

KindOption: TypeAlias = Annotated[
    Kind, typer.Option("--workload", "-w", help="What is asked.", rich_help_panel=WORKLOAD)
]
PromptForm: TypeAlias = Annotated[
    Form,
    typer.Option("--prompt-form", help="Words, or ids from /tokenize for exact lengths.", rich_help_panel=WORKLOAD),
]
PromptTokens: TypeAlias = Annotated[int, typer.Option(help="Of each question, on average.", rich_help_panel=WORKLOAD)]
PromptSpread: TypeAlias = Annotated[
    float, typer.Option(help="0 to 1: uniform in mean * (1 ± spread).", rich_help_panel=WORKLOAD)
]
OutputTokens: TypeAlias = Annotated[
    int, typer.Option(help="Most of each answer, on average.", rich_help_panel=WORKLOAD)
]
OutputSpread: TypeAlias = Annotated[float, typer.Option(help="The same of answers.", rich_help_panel=WORKLOAD)]
PrefixTokens: TypeAlias = Annotated[
    int | None,
    typer.Option(help="Before the question. Default: 512 for shared-prefix, else none.", rich_help_panel=WORKLOAD),
]
Prefixes: TypeAlias = Annotated[int, typer.Option(help="Different shared prefixes.", rich_help_panel=WORKLOAD)]
Share: TypeAlias = Annotated[
    float, typer.Option(help="0 to 1: of conversations that begin with one of them.", rich_help_panel=WORKLOAD)
]
Turns: TypeAlias = Annotated[int, typer.Option(help="Of each multi-turn conversation.", rich_help_panel=WORKLOAD)]
Think: TypeAlias = Annotated[
    float, typer.Option(help="Seconds between answer and next question, on average.", rich_help_panel=WORKLOAD)
]
WorkloadFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(help="For --workload file: JSON lines with messages or a prompt.", rich_help_panel=WORKLOAD),
]

Slo: TypeAlias = Annotated[
    str, typer.Option(help="Objectives for goodput, in seconds: ttft:0.5,tpot:0.05.", rich_help_panel=OUTPUT)
]
NoTui: TypeAlias = Annotated[bool, typer.Option("--no-tui", help="Plain lines, no bar.", rich_help_panel=OUTPUT)]
JsonFile: TypeAlias = Annotated[
    Path | None, typer.Option("--json", help="Save the report in this file.", rich_help_panel=OUTPUT)
]
PerRequest: TypeAlias = Annotated[
    bool, typer.Option("--per-request", help="With a row for each request in it.", rich_help_panel=OUTPUT)
]
PlotFile: TypeAlias = Annotated[
    Path | None, typer.Option(help="Save a picture in this PNG file.", rich_help_panel=OUTPUT)
]

"""``octavo simulate --replicas``: from options to fleets, and what came of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

import msgspec
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Column, Table

from ..errors import InvalidRequest
from ..policies.simulator.capacity import Capacity
from ..policies.simulator.fleet.grid import Eviction, Fleets, Routing
from ..policies.simulator.fleet.report import HEADINGS, cells, fleet_of, notes, trace_of
from ..policies.simulator.fleet.rows import FleetRow
from ..policies.simulator.fleet.setting import FleetSetting, Kill, TierSetting, TierWrites
from ..policies.simulator.service import Service
from .fleet.routing import ROUTING_POLICIES, made_router

DEFAULT_ROUTING = "prefix"
NONE, ALL = "none", "all"
REPEATABLE = ("routing", "kill")
OF_THE_TIER = ("tier_writes", "tier_bandwidth", "store_bandwidth", "tier_latency", "tier_lost_at", "token_bytes")


class FleetOptions(NamedTuple):
    """What the command line says of fleets beyond the number of replicas, as it was typed."""

    routing: tuple[str, ...] = ()
    routing_options: str = "{}"
    max_running: int | None = None
    own_prefill: bool = False
    news_delay: str = "0"
    shared_tier: str = NONE
    tier_writes: TierWrites = TierWrites.BACK
    tier_bandwidth: float = math.inf
    store_bandwidth: float = math.inf
    tier_latency: float = 0.0
    tier_lost_at: float = math.inf
    token_bytes: int = TierSetting().token_bytes
    kill: tuple[str, ...] = ()
    balance_window: float = 60.0


def read_options(given: Mapping[str, object]) -> FleetOptions:
    """From the arguments of the command, by their names."""
    return msgspec.convert(
        [given[name] or () if name in REPEATABLE else given[name] for name in FleetOptions._fields], FleetOptions
    )


def fleets_of(
    options: FleetOptions,
    *,
    replicas: str,
    capacities: Sequence[Capacity],
    evictions: Sequence[Eviction],
    service: Service,
) -> Fleets:
    """The fleets that were asked for.

    :raises InvalidRequest: when an option says nothing sensible.
    :raises PluginError: when a routing policy is unknown or cannot be made.
    """
    routings = _routings(routing_names(options.routing or [DEFAULT_ROUTING]), _options_of(options.routing_options))
    common = FleetSetting(
        replicas=1,
        capacity=1,
        routing=routings[0].policy,
        service=service,
        max_running=options.max_running,
        shares_prefill=not options.own_prefill,
        news_delay=None if options.news_delay == NONE else _number(options.news_delay, "--news-delay"),
        tier=_tier(options),
        kills=tuple(_kill(text) for text in options.kill),
        window=options.balance_window,
    )
    return Fleets(common, _counts(replicas), capacities, routings, evictions)


def check_unused(options: FleetOptions) -> None:
    """:raises InvalidRequest: when there are options for a fleet, but there is none."""
    if used := _used(options, options._fields):
        raise InvalidRequest(f"{used[0]} is for fleets: say how many --replicas there are")


def _used(options: FleetOptions, names: Sequence[str]) -> list[str]:
    """Those of ``names`` that were given something else than the default, as they are typed."""
    default = FleetOptions()
    return [f"--{name.replace('_', '-')}" for name in names if getattr(options, name) != getattr(default, name)]


def shown(rows: Sequence[FleetRow]) -> list[Table | str]:
    """For a console: a table for each size and eviction policy, with a line for each routing policy."""
    tables = [_table(fleet, list(group)) for fleet, group in groupby(rows, key=fleet_of)]
    return [escape(trace_of(rows)), *tables, *map(escape, notes(rows))]


def _table(title: str, rows: Sequence[FleetRow]) -> Table:
    table = Table(
        Column(HEADINGS[0], no_wrap=True),
        *[Column(heading, justify="right", min_width=6) for heading in HEADINGS[1:]],
        title=escape(title),
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for row, line in zip(rows, cells(rows), strict=True):
        table.add_row(*map(escape, line), style="red" if row.error is not None else "")
    return table


def _routings(names: Sequence[str], options: Mapping[str, Mapping[str, object]]) -> list[Routing]:
    unused = set(options) - set(names)
    if unused:
        raise InvalidRequest(f"--routing-options are for {min(unused)!r}, which does not run: see --routing")
    for name in names:
        made_router(name, options.get(name, {}))  # says what is wrong with it, before any work
    return [
        Routing(name, partial(ROUTING_POLICIES.resolve(name), **options.get(name, {}))) for name in dict.fromkeys(names)
    ]


def routing_names(texts: Sequence[str]) -> list[str]:
    """``["prefix,round_robin", "pkg.module:Class"]`` and the like, each once; ``all``: every one that is installed."""
    given = [part.strip() for text in texts for part in text.split(",")]
    installed = [report.name for report in ROUTING_POLICIES.report() if report.error is None]
    return list(dict.fromkeys(name for part in given for name in (installed if part == ALL else [part])))


def _options_of(text: str) -> Mapping[str, Mapping[str, object]]:
    try:
        return msgspec.json.decode(text, type=dict[str, dict[str, object]])
    except msgspec.DecodeError as error:
        raise InvalidRequest(
            f'--routing-options is JSON such as {{"prefix": {{...}}}}, not {text!r}: {error}'
        ) from error


def _tier(options: FleetOptions) -> TierSetting | None:
    if options.shared_tier == NONE:
        if used := _used(options, OF_THE_TIER):
            raise InvalidRequest(f"{used[0]} is for a store that all share: say how large the --shared-tier is")
        return None
    return TierSetting(
        None if options.shared_tier == ALL else _whole(options.shared_tier, "--shared-tier"),
        options.tier_writes,
        options.token_bytes,
        options.tier_bandwidth,
        options.store_bandwidth,
        options.tier_latency,
        options.tier_lost_at,
    )


def _kill(text: str) -> Kill:
    parts = text.split(":")
    if not 2 <= len(parts) <= 3:
        raise InvalidRequest(f"--kill is AT:REPLICA or AT:REPLICA:BACK_AFTER (seconds, number, seconds), not {text!r}")
    back = _number(parts[2], "--kill") if len(parts) == 3 else math.inf
    return Kill(_number(parts[0], "--kill"), _whole(parts[1], "--kill"), back)


def _counts(text: str) -> list[int]:
    return list(dict.fromkeys(_whole(part, "--replicas") for part in text.split(",")))


def _whole(text: str, option: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise InvalidRequest(f"{option}: {text!r} is no whole number") from error


def _number(text: str, option: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise InvalidRequest(f"{option}: {text!r} is no number") from error

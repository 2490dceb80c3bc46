"""Board: everything that the picture shows, as plain values; what an engine does not tell is ``None``."""

from __future__ import annotations

from typing import Final, NamedTuple

from ..metrics import catalogue as c
from ..metrics.catalogue import Metric
from .rates import Estimate, Increase, by, mean, quantile, total
from .reading import Scrape, Series, Values

MIDDLE: Final = 0.5
HIGH: Final = 0.95
DEVICE: Final = "device"
"""The label ``tier`` of what happens in the pool itself."""


class Counted(NamedTuple):
    """A counter."""

    total: float | None
    rate: float | None
    """By second, over the window; ``None`` before there are two scrapes."""


class Pool(NamedTuple):
    """Blocks of the device."""

    used: float
    pinned: float
    """Among the used."""
    idle: float
    free: float

    @property
    def blocks(self) -> float:
        return self.used + self.idle + self.free

    @property
    def usage(self) -> float | None:
        """Share that is referenced now."""
        return self.used / self.blocks if self.blocks else None


class Cache(NamedTuple):
    """What the prefix cache saves and loses."""

    recent_hit_rate: float | None
    """Over the window; ``None`` where nothing was asked for."""
    hit_rate: float | None
    """Since the start."""
    hit_tokens: dict[str, Counted]
    """By tier."""
    evictions: dict[str, Counted]
    """Blocks by reason; those of tiers with the name of the tier in front."""
    cow_forks: Counted
    partial_copies: Counted
    evicted_then_wanted: Counted


class Requests(NamedTuple):
    """Who is served and who waits."""

    running: float | None
    loading: float | None
    waiting: float | None
    waiting_reasons: dict[str, float]
    preemptions: dict[str, Counted]
    finished: dict[str, Counted]
    rejected: Counted
    prefill: Counted
    """Tokens."""
    decode: Counted
    """Tokens."""


class Latency(NamedTuple):
    """A histogram over the window, in seconds."""

    name: str
    middle: Estimate | None
    high: Estimate | None


class Tier(NamedTuple):
    """One storage tier."""

    name: str
    blocks: float | None
    bytes: float | None
    capacity: float | None
    queued: float | None
    """Bytes."""
    read: Counted
    """Bytes."""
    written: Counted
    """Bytes."""
    read_seconds: float | None
    """Mean of a batch, over the window."""
    write_seconds: float | None
    errors: Counted
    corrupt: Counted
    dropped: Counted
    healthy: bool | None
    open_breakers: tuple[str, ...]
    """Directions in which the tier is left alone."""


class Restart(NamedTuple):
    """What a restart would keep, and what the last one kept."""

    ready: bool | None
    snapshot_age: float | None
    """Seconds, of the engine whose snapshot is oldest."""
    snapshot_bytes: float | None
    restored_tokens: Counted
    checkpoints: Counted
    loads: dict[str, Counted]


class Upkeep(NamedTuple):
    """What should be 0 or small."""

    lag: Latency
    stuck_seconds: float | None
    spans_dropped: Counted
    policy_faults: Counted
    failed_rows: Counted


class Board(NamedTuple):
    """One moment of one endpoint."""

    engines: tuple[dict[str, str], ...]
    """Name, model and so on of each engine."""
    window: float | None
    """Seconds over which rates and quantiles are taken; ``None`` before there are two scrapes."""
    pool: Pool | None
    cache: Cache
    requests: Requests
    latencies: tuple[Latency, ...]
    tiers: tuple[Tier, ...]
    restart: Restart
    upkeep: Upkeep


class _Numbers(NamedTuple):
    """The two readings that a board is made of."""

    now: Values
    grown: Increase | None

    def counted(self, metric: Metric) -> Counted:
        return Counted(total(self.now, metric), self._rate(total(self._growth, metric)))

    def counted_by(self, metric: Metric, *labels: str) -> dict[tuple[str, ...], Counted]:
        grown = by(self._growth, metric, *labels)
        return {key: Counted(value, self._rate(grown.get(key))) for key, value in by(self.now, metric, *labels).items()}

    def counted_by_one(self, metric: Metric, label: str) -> dict[str, Counted]:
        return {key: counted for (key,), counted in self.counted_by(metric, label).items()}

    def gauges(self, metric: Metric, label: str) -> dict[str, float]:
        return {key: value for (key,), value in by(self.now, metric, label).items()}

    def latency(self, name: str, metric: Metric) -> Latency:
        return Latency(name, quantile(self._growth, metric, MIDDLE), quantile(self._growth, metric, HIGH))

    def mean(self, metric: Metric, tier: str) -> float | None:
        return mean(self._growth, metric, frozenset({("tier", tier)}))

    def growth(self, metric: Metric) -> float | None:
        return total(self._growth, metric)

    @property
    def _growth(self) -> Values:
        return {} if self.grown is None else self.grown.values

    def _rate(self, growth: float | None) -> float | None:
        if growth is None or self.grown is None or self.grown.seconds <= 0:
            return None
        return growth / self.grown.seconds


def board(scrape: Scrape, grown: Increase | None) -> Board:
    """What ``scrape`` shows, with what grew over the window before it."""
    numbers = _Numbers(scrape.values, grown)
    return Board(
        engines=_engines(scrape.values),
        window=None if grown is None else grown.seconds,
        pool=_pool(numbers),
        cache=_cache(numbers),
        requests=_requests(numbers),
        latencies=(
            numbers.latency("TTFT", c.TIME_TO_FIRST_TOKEN),
            numbers.latency("TPOT", c.TIME_PER_TOKEN),
            numbers.latency("queue", c.QUEUE_SECONDS),
            numbers.latency("step", c.STEP_SECONDS),
            numbers.latency("request", c.END_TO_END),
        ),
        tiers=_tiers(numbers),
        restart=_restart(numbers),
        upkeep=_upkeep(numbers),
    )


def _engines(values: Values) -> tuple[dict[str, str], ...]:
    """Constant labels and what the info says, in the order of the constant labels."""
    series = values.get(f"{c.INFO.name}_info", {})
    return tuple(dict(sorted(one.engine)) | dict(one.labels) for one in sorted(series, key=_order))


def _order(series: Series) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    return sorted(series.engine), sorted(series.labels)


def _pool(numbers: _Numbers) -> Pool | None:
    states = numbers.gauges(c.POOL_BLOCKS, "state")
    if not states:
        return None
    used = states.get("used", 0.0)
    pinned = total(numbers.now, c.PINNED_BLOCKS) or 0.0
    return Pool(used, min(pinned, used), states.get("idle", 0.0), states.get("free", 0.0))


def _cache(numbers: _Numbers) -> Cache:
    evictions = numbers.counted_by(c.EVICTIONS, "tier", "reason")
    return Cache(
        recent_hit_rate=_share(numbers.growth(c.PREFIX_HIT_TOKENS), numbers.growth(c.PREFIX_QUERY_TOKENS)),
        hit_rate=_share(total(numbers.now, c.PREFIX_HIT_TOKENS), total(numbers.now, c.PREFIX_QUERY_TOKENS)),
        hit_tokens=numbers.counted_by_one(c.PREFIX_HIT_TOKENS, "tier"),
        evictions={_where(tier, reason): counted for (tier, reason), counted in evictions.items()},
        cow_forks=numbers.counted(c.COW_FORKS),
        partial_copies=numbers.counted(c.PARTIAL_COPIES),
        evicted_then_wanted=numbers.counted(c.EVICTED_THEN_WANTED),
    )


def _requests(numbers: _Numbers) -> Requests:
    return Requests(
        running=total(numbers.now, c.RUNNING),
        loading=total(numbers.now, c.LOADING),
        waiting=total(numbers.now, c.WAITING),
        waiting_reasons=numbers.gauges(c.WAITING_BY_REASON, "reason"),
        preemptions=numbers.counted_by_one(c.PREEMPTIONS, "kind"),
        finished=numbers.counted_by_one(c.FINISHED, "reason"),
        rejected=numbers.counted(c.REJECTED),
        prefill=numbers.counted(c.PREFILL_TOKENS),
        decode=numbers.counted(c.GENERATED_TOKENS),
    )


def _tiers(numbers: _Numbers) -> tuple[Tier, ...]:
    """In the order in which the engine lists them, which is fastest first."""
    blocks = numbers.now.get(c.TIER_BLOCKS.name, {})
    names = dict.fromkeys(dict(series.labels).get("tier", "") for series in blocks)
    return tuple(_tier(numbers, name) for name in names)


def _tier(numbers: _Numbers, name: str) -> Tier:
    def gauge(metric: Metric) -> float | None:
        return numbers.gauges(metric, "tier").get(name)

    def counter(metric: Metric) -> Counted:
        return numbers.counted_by_one(metric, "tier").get(name, Counted(None, None))

    healthy = by(numbers.now, c.TIER_HEALTHY, "tier", fold=min).get((name,))
    breakers = by(numbers.now, c.TIER_BREAKER, "tier", "direction", fold=max)
    return Tier(
        name=name,
        blocks=gauge(c.TIER_BLOCKS),
        bytes=gauge(c.TIER_BYTES),
        capacity=gauge(c.TIER_CAPACITY),
        queued=gauge(c.TIER_QUEUED),
        read=counter(c.TIER_READ_BYTES),
        written=counter(c.TIER_WRITTEN_BYTES),
        read_seconds=numbers.mean(c.TIER_READ_SECONDS, name),
        write_seconds=numbers.mean(c.TIER_WRITE_SECONDS, name),
        errors=counter(c.TIER_ERRORS),
        corrupt=counter(c.TIER_CORRUPT),
        dropped=counter(c.TIER_DROPPED),
        healthy=None if healthy is None else healthy > 0,
        open_breakers=tuple(direction for (tier, direction), value in breakers.items() if tier == name and value > 0),
    )


def _restart(numbers: _Numbers) -> Restart:
    ready = total(numbers.now, c.READY, min)
    return Restart(
        ready=None if ready is None else ready > 0,
        snapshot_age=total(numbers.now, c.SNAPSHOT_AGE, max),
        snapshot_bytes=total(numbers.now, c.SNAPSHOT_BYTES),
        restored_tokens=numbers.counted(c.RESTORED_TOKENS),
        checkpoints=numbers.counted(c.CHECKPOINTS),
        loads=numbers.counted_by_one(c.LOADS, "outcome"),
    )


def _upkeep(numbers: _Numbers) -> Upkeep:
    return Upkeep(
        lag=numbers.latency("loop lag", c.LOOP_LAG),
        stuck_seconds=total(numbers.now, c.STUCK, max),
        spans_dropped=numbers.counted(c.SPANS_DROPPED),
        policy_faults=numbers.counted(c.POLICY_FAULTS),
        failed_rows=numbers.counted(c.FAILED_ROWS),
    )


def _where(tier: str, reason: str) -> str:
    return reason if tier == DEVICE else f"{tier} {reason}"


def _share(part: float | None, whole: float | None) -> float | None:
    """``part`` may be absent where nothing was hit yet."""
    return (part or 0.0) / whole if whole else None

"""What an engine did, told three times: by its spans, by its own books, by its metrics. Each as numbers by name, which
can be compared, and a difference says what it is about.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.trace import format_span_id
from prometheus_client.metrics_core import Metric as Family

from octavo import AsyncEngine
from octavo.engine.counters import EngineStats
from octavo.engine.kv import Census
from octavo.telemetry import names
from octavo.tests.telemetry.metrics.scraping import openmetrics, parse_openmetrics, parse_text
from octavo.tests.telemetry.metrics.scraping import text as shown

Numbers: TypeAlias = dict[str, float]


class Account:
    """The spans of one engine, and what they say when they are added up."""

    def __init__(self, spans: Sequence[ReadableSpan], block_size: int) -> None:
        self._spans = spans
        self._block_size = block_size
        self._by_id = {id_of(span): span for span in spans}
        self._requests = [span for span in spans if names.OPERATION_NAME in attributes(span)]
        self._taken = [span for span in self._requests if names.RESPONSE_FINISH_REASONS in attributes(span)]

    def numbers(self) -> Numbers:
        """All of it."""
        said = Counter[str]()
        for part in (self._evictions, self._copies, self._transfers, self._writes, self._requests_told, self._hits):
            for name, count in part():
                said[name] += count
        return nonzero(said)

    def _named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._spans if span.name == name]

    def _events(self, name: str) -> Iterator[Event]:
        for request in self._requests:
            yield from (event for event in request.events if event.name == name)

    def _evictions(self) -> Iterator[tuple[str, int]]:
        for span in self._named(names.EVICT):
            yield f"evictions by {text(span, names.REASON)}", number(span, names.BLOCKS)

    def _copies(self) -> Iterator[tuple[str, int]]:
        for span in self._named(names.COW_FORK):
            yield f"copies of a {text(span, names.KIND)}", number(span, names.BLOCKS)

    def _transfers(self) -> Iterator[tuple[str, int]]:
        for span in self._named(names.SWAP_OUT):
            yield "failed exports" if has_failed(span) else "exports", number(span, names.BLOCKS)
        for span in self._named(names.SWAP_IN):
            if not has_failed(span):
                yield f"loaded from {text(span, names.TIER)}", number(span, names.BLOCKS) * self._block_size
        for span in self._named(names.RESTORE):
            if attributes(span)[names.KIND] == "warming":
                yield "warmed", number(span, names.BLOCKS)

    def _writes(self) -> Iterator[tuple[str, int]]:
        for span in self._named(names.PERSIST):
            if attributes(span).get(names.KIND) == "checkpoint":
                yield "checkpoints", not has_failed(span)
                continue
            tier = text(span, names.TIER)
            yield f"calls of put in {tier}", 1
            yield f"blocks put into {tier}", number(span, names.BLOCKS)
            yield f"bytes put into {tier}", number(span, names.BYTES)

    def _requests_told(self) -> Iterator[tuple[str, int]]:
        yield "taken", len(self._taken)
        yield "refused", len(self._requests) - len(self._taken)
        for span in self._taken:
            yield f"finished by {finish_reason(span)}", 1
            yield "prompt tokens", number(span, names.USAGE_INPUT_TOKENS)
            yield "generated tokens", number(span, names.TOKENS)
            yield "preemptions of requests", number(span, names.PREEMPTIONS)
        for event in self._events(names.PREEMPT):
            yield f"preemptions by {said(event, names.KIND)}", 1
        yield "prefill tokens", sum(number(span, names.TOKENS) for span in self._named(names.PREFILL))
        for span in self._named(names.PREFILL_CHUNK):
            if self._above(span).name != names.PREFILL:  # which tells of its chunks itself
                yield "prefill tokens", number(span, names.TOKENS)

    def _hits(self) -> Iterator[tuple[str, int]]:
        yield "hits", sum(number(span, names.USAGE_CACHE_READ) > 0 for span in self._taken)
        yield "hit tokens", sum(number(span, names.USAGE_CACHE_READ) for span in self._taken)
        for span in self._named(names.QUEUE):
            if names.CACHED_TOKENS in attributes(span) and self._is_first(span):
                yield "queried tokens", number(self._above(span), names.USAGE_INPUT_TOKENS)
            elif names.CACHED_TOKENS in attributes(span) and names.RESUMED not in attributes(span):
                yield "tokens found again", number(span, names.CACHED_TOKENS)
        for event in self._events(names.RESUME):
            yield "tokens found again", int(said(event, names.CACHED_TOKENS))
        for span in self._named(names.SWAP_IN):
            if span.parent is None or has_failed(span):  # warming uses nothing
                continue
            tokens, above = number(span, names.BLOCKS) * self._block_size, self._above(span)
            if above.name == names.LOAD and self._is_first(above):
                yield f"hit tokens from {text(span, names.TIER)}", tokens
            else:
                yield "tokens found again", tokens

    def _is_first(self, phase: ReadableSpan) -> bool:
        """Whether nothing of the request was computed before, by itself or by whom it was forked from."""
        return names.RESUMED not in attributes(phase) and not begins_with_tokens(self._above(phase))

    def _above(self, span: ReadableSpan) -> ReadableSpan:
        assert span.parent is not None
        return self._by_id[format_span_id(span.parent.span_id)]

    @property
    def first_tokens(self) -> int:
        """Requests that came so far."""
        return sum(1 for _ in self._events(names.FIRST_TOKEN))

    @property
    def admitted(self) -> int:
        """Requests that came out of the queue. A fork that began with tokens was never in it."""
        out = [span for span in self._taken if names.QUEUE_SECONDS in attributes(span)]
        return sum(not begins_with_tokens(span) for span in out)

    def steps(self) -> Numbers:
        """What the spans of steps say; they are complete only where every step is asked for."""
        steps = self._named(names.STEP)
        for span in steps:
            assert number(span, names.PREFILL_ROWS) + number(span, names.DECODE_ROWS) == number(span, names.ROWS)
            assert len(span.links) <= number(span, names.ROWS)
        return {"steps": len(steps), "batch tokens": sum(number(span, names.TOKENS) for span in steps)}


def booked(stats: EngineStats) -> Numbers:
    """The same as :meth:`Account.numbers`, from the engine's own books."""
    cache, transfers = stats.cache, stats.transfers
    found = {
        "copies of a fork": cache.cow_forks,
        "copies of a partial": cache.partial_copies,
        "exports": transfers.exported_blocks,
        "failed exports": transfers.failed_exports,
        "warmed": stats.restore.warmed_blocks,
        "checkpoints": transfers.checkpoints,
        "taken": stats.submitted,
        "refused": stats.rejected,
        "prompt tokens": stats.prompt_tokens,
        "generated tokens": stats.generated_tokens,
        "preemptions of requests": stats.preemptions,
        "prefill tokens": stats.prefill_tokens,
        "hits": cache.prefix_hits,
        "hit tokens": cache.prefix_hit_tokens,
        "queried tokens": cache.prefix_query_tokens,
        "tokens found again": cache.resume_hit_tokens,
    }
    found |= {f"evictions by {reason}": blocks for reason, blocks in cache.evictions.items()}
    found |= {f"loaded from {tier}": tokens for tier, tokens in transfers.loaded_tokens.items()}
    found |= {f"hit tokens from {tier}": tokens for tier, tokens in cache.hit_tokens_by_tier.items()}
    found |= {f"finished by {reason}": count for reason, count in stats.finished.items()}
    found |= {f"preemptions by {kind}": count for kind, count in stats.preemptions_by_kind.items()}
    for report in stats.tiers:
        found[f"calls of put in {report.name}"] = report.puts
        found[f"blocks put into {report.name}"] = report.put_blocks
        found[f"bytes put into {report.name}"] = report.put_bytes
    return nonzero(found)


ONE_TO_ONE = {
    "octavo_cow_forks_total": "copies of a fork",
    "octavo_partial_copies_total": "copies of a partial",
    "octavo_exported_blocks_total": "exports",
    "octavo_failed_exports_total": "failed exports",
    "octavo_checkpoints_total": "checkpoints",
    "octavo_requests_submitted_total": "taken",
    "octavo_requests_rejected_total": "refused",
    "octavo_requests_finished_total": "finished by {reason}",
    "octavo_prompt_tokens_total": "prompt tokens",
    "octavo_generated_tokens_total": "generated tokens",
    "octavo_preemptions_total": "preemptions by {kind}",
    "octavo_prefill_tokens_total": "prefill tokens",
    "octavo_prefix_hits_total": "hits",
    "octavo_prefix_query_tokens_total": "queried tokens",
    "octavo_resume_hit_tokens_total": "tokens found again",
    "octavo_tier_written_blocks_total": "blocks put into {tier}",
    "octavo_tier_written_bytes_total": "bytes put into {tier}",
}
"""Samples of a scrape that say what a number of an account says; braces stand for labels."""


class Scrape:
    """What a scrape brought."""

    def __init__(self, families: Sequence[Family]) -> None:
        samples = [sample for family in families for sample in family.samples]
        self.samples = {(each.name, *sorted(each.labels.items())): each.value for each in samples}
        self.labelled = [(each.name, each.labels, each.value) for each in samples]

    def value(self, name: str, **labels: str) -> float:
        """One sample."""
        return self.samples[(name, *sorted(labels.items()))]

    def total(self, name: str) -> float:
        """Of all its samples."""
        return sum(value for each, _, value in self.labelled if each == name)

    def numbers(self) -> Numbers:
        """What it says of the numbers of an account."""
        found = Counter[str]()
        for name, labels, value in self.labelled:
            if name in ONE_TO_ONE:
                found[ONE_TO_ONE[name].format(**labels)] += int(value)
            elif name == "octavo_evictions_total" and labels["tier"] == "device":
                found[f"evictions by {labels['reason']}"] += int(value)
            elif name == "octavo_prefix_hit_tokens_total":
                found["hit tokens"] += int(value)
                found[f"hit tokens from {labels['tier']}"] += int(value) * (labels["tier"] != "device")
        return nonzero(found)


def comparable(numbers: Numbers) -> Numbers:
    """Those of ``numbers`` of which a scrape can say anything."""
    known = [text.partition("{")[0] for text in ONE_TO_ONE.values()]
    known += ["evictions by ", "hit tokens"]
    return {name: value for name, value in numbers.items() if any(name.startswith(each) for each in known)}


def check_histograms(stats: EngineStats, scrape: Scrape, account: Account) -> None:
    """A histogram counts as often as what it is of happened, and its sum is the counter's."""
    finished, evicted = sum(stats.finished.values()), stats.cache.evictions
    for_room = sum(evicted.get(reason, 0) for reason in ("allocate", "watermark", "call"))
    expected = {
        "octavo_step_seconds_count": stats.steps,
        "octavo_step_tokens_count": stats.steps,
        "octavo_step_tokens_sum": stats.batch_tokens,
        "octavo_block_pool_utilization_count": stats.steps,
        "octavo_request_prompt_tokens_count": finished,
        "octavo_request_prompt_tokens_sum": stats.prompt_tokens,
        "octavo_request_generated_tokens_count": finished,
        "octavo_request_generated_tokens_sum": stats.generated_tokens,
        "octavo_request_seconds_count": finished - stats.finished.get("abort", 0),
        "octavo_time_to_first_token_seconds_count": account.first_tokens,
        "octavo_prefill_seconds_count": account.first_tokens,
        "octavo_queue_seconds_count": account.admitted,
        "octavo_block_lifetime_seconds_count": for_room,
        "octavo_block_idle_before_evict_seconds_count": for_room,
        "octavo_evicted_then_wanted_seconds_count": stats.cache.evicted_then_wanted,
    }
    assert {name: scrape.total(name) for name in expected} == expected


def check_gauges(stats: EngineStats, census: Census, scrape: Scrape) -> None:
    """What is true now is what a count finds."""
    pool = {state: scrape.value("octavo_pool_blocks", state=state) for state in ("used", "idle", "free")}
    assert pool == {"used": census.held + census.in_transfer, "idle": census.idle, "free": census.free}
    assert scrape.total("octavo_pool_capacity_blocks") == census.total
    assert scrape.total("octavo_block_pool_usage_ratio") == stats.cache.utilization
    assert scrape.total("octavo_requests_running") == stats.running == 0
    assert scrape.total("octavo_requests_waiting") == stats.waiting == 0
    assert scrape.total("octavo_requests_loading") == stats.loading == 0
    assert scrape.total("octavo_requests_waiting_by_reason") == 0
    assert scrape.total("octavo_pins") == stats.pins
    assert scrape.total("octavo_pinned_blocks") == stats.cache.pinned
    assert scrape.total("octavo_spans_dropped_total") == 0
    for report in stats.tiers:
        assert scrape.value("octavo_tier_blocks", tier=report.name) == report.tier.blocks
        assert scrape.value("octavo_tier_queued_bytes", tier=report.name) == 0


def finish_reason(request: ReadableSpan) -> str:
    """How the engine counts its end."""
    error = attributes(request).get(names.ERROR_TYPE)
    if error is not None:
        return "abort" if error == "aborted" else "error"
    reasons = attributes(request)[names.RESPONSE_FINISH_REASONS]
    assert isinstance(reasons, Sequence)
    return str(reasons[0])


def begins_with_tokens(request: ReadableSpan) -> bool:
    """Whether it was forked off one that had some."""
    is_fork = any((link.attributes or {}).get(names.RELATION) == "forked_from" for link in request.links)
    return is_fork and number(request, names.USAGE_OUTPUT_TOKENS) > number(request, names.TOKENS)


def id_of(span: ReadableSpan) -> str:
    context = span.get_span_context()
    assert context is not None
    return format_span_id(context.span_id)


def attributes(span: ReadableSpan) -> dict[str, object]:
    return dict(span.attributes or {})


def number(span: ReadableSpan, name: str) -> int:
    value = attributes(span)[name]
    assert isinstance(value, int)
    return value


def said(event: Event, name: str) -> str:
    found: Mapping[str, object] = event.attributes or {}
    return str(found[name])


def text(span: ReadableSpan, name: str) -> str:
    return str(attributes(span)[name])


def has_failed(span: ReadableSpan) -> bool:
    return names.ERROR_TYPE in attributes(span)


def nonzero(numbers: dict[str, int] | Counter[str]) -> Numbers:
    """Without what never happened: spans know nothing of that."""
    return {name: count for name, count in numbers.items() if count}


def check_agreement(engine: AsyncEngine, spans: Sequence[ReadableSpan]) -> Numbers:
    """Of an engine at rest, all of whose requests are traced; returns what was agreed on."""
    account, stats = Account(spans, engine.config.block_size), engine.stats()
    told = account.numbers()
    assert differences(told, booked(stats)) == {}
    for parsed in (parse_text(shown(engine.registry)), parse_openmetrics(openmetrics(engine.registry))):
        scrape = Scrape(parsed)
        assert differences(scrape.numbers(), comparable(told)) == {}
        check_histograms(stats, scrape, account)
        check_gauges(stats, engine.census(), scrape)
    steps = {"steps": stats.steps, "batch tokens": stats.batch_tokens}
    if engine.config.trace_decode_steps == 1:
        assert differences(account.steps(), steps) == {}
    else:
        assert all(count <= steps[name] for name, count in account.steps().items())
    return told


def check_end(engine: AsyncEngine, spans: Sequence[ReadableSpan]) -> Numbers:
    """Of an engine that is closed: what it shows last has what closing it brought about."""
    told = comparable(Account(spans, engine.config.block_size).numbers())
    assert differences(Scrape(parse_text(shown(engine.registry))).numbers(), told) == {}
    return told


def differences(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """Where two accounts do not say the same."""
    pairs = {name: (one.get(name, 0), other.get(name, 0)) for name in sorted({*one, *other})}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

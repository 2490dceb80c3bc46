"""What there is to see in a trace, told from its spans."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from octavo.telemetry import names

if TYPE_CHECKING:
    from octavo.examples.jaeger.saved_spans import Span
else:
    sys.path.insert(0, str(Path(__file__).parent))  # this folder is no package
    from saved_spans import Span

MOST = 4
"""Traces of requests that are named."""
MOST_FAILED = 2
MOST_OWNERS = 4


class Sight(NamedTuple):
    """One trace and what to look for in it."""

    name: str
    trace: str
    lines: tuple[str, ...]


def is_request(span: Span) -> bool:
    """Whether it is the span of a whole request."""
    return names.REQUEST_ID in span.attributes and names.OPERATION_NAME in span.attributes


def request_names(spans: Sequence[Span]) -> dict[str, str]:
    """By id of a request's span, the id of the request."""
    return {span.id: span.text(names.REQUEST_ID) for span in spans if is_request(span)}


def worth_opening(spans: Sequence[Span]) -> list[Sight]:
    """The requests to which most different things happened, the first that failed, and one of each kind of the rest."""
    traces: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        traces[span.trace].append(span)
    called = request_names(spans)
    sights = [
        Sight(span.text(names.REQUEST_ID), span.trace, tuple(_Story(span, traces[span.trace], called).lines()))
        for span in spans
        if is_request(span)
    ]
    failed = [span.trace for span in spans if is_request(span) and span.failed][:MOST_FAILED]
    fullest = sorted(sights, key=lambda sight: -len(sight.lines))[:MOST]
    chosen = [sight for sight in sights if sight in fullest or sight.trace in failed]
    return [*chosen, *_roots(spans)]


class _Story(NamedTuple):
    """What can be said of one request."""

    request: Span
    trace: Sequence[Span]
    called: Mapping[str, str]

    def lines(self) -> Iterator[str]:
        yield from self._found()
        yield from self._copied()
        yield from self._evicted()
        yield from self._interrupted()

    def _all(self, name: str) -> list[Span]:
        return [span for span in self.trace if span.name == name]

    def _found(self) -> Iterator[str]:
        if cached := self.request.number(names.USAGE_CACHE_READ):
            tokens = self.request.number(names.USAGE_INPUT_TOKENS)
            yield f"queue: {cached} of its {tokens} prompt tokens were found in the cache"
        if chunks := self._all(names.PREFILL_CHUNK):
            yield f"prefill: computed in {len(chunks)} chunks, each with a link to its {names.STEP}"

    def _copied(self) -> Iterator[str]:
        if forks := self._all(names.COW_FORK):
            yield f"cow_fork: {_blocks(forks)} copied, where samples or requests that share a block part"
        for name, where in ((names.SWAP_OUT, "down to"), (names.SWAP_IN, "back from")):
            if moved := self._all(name):
                tiers = dict.fromkeys(span.text(names.TIER) for span in moved)
                yield f"{name}: {_blocks(moved)} went {where} {' and '.join(tiers)}"

    def _evicted(self) -> Iterator[str]:
        if evictions := self._all(names.EVICT):
            links = [link.span for span in evictions for link in span.links]
            owners = list(dict.fromkeys(self.called.get(link, "somebody") for link in links))
            listed = ", ".join(owners[:MOST_OWNERS])
            yield f"evict: {_blocks(evictions)} pushed out; the links lead to who used them last: {listed}"

    def _interrupted(self) -> Iterator[str]:
        preemptions = [event for event in self.request.events if event.name == names.PREEMPT]
        for kind in sorted({str(event.attributes.get(names.KIND)) for event in preemptions}):
            yield f"preempt ({kind}) is an event, and a second queue follows the decode; so is resume, at its end"
        if self.request.failed:
            yield f"its status is an error, error.type is {self.request.text(names.ERROR_TYPE)}"


def _blocks(spans: Sequence[Span]) -> str:
    count = sum(span.number(names.BLOCKS) for span in spans)
    return f"{count} block" if count == 1 else f"{count} blocks"


def _roots(spans: Sequence[Span]) -> Iterator[Sight]:
    """The fullest of what belongs to no request."""
    tellers: tuple[tuple[str, Callable[[Span], str]], ...] = (
        (names.STEP, lambda span: f"links to {len(span.links)} requests, {span.number(names.TOKENS)} tokens"),
        (names.SNAPSHOT, _moved),
        (names.PERSIST, _moved),
    )
    for name, tell in tellers:
        found = [span for span in spans if span.name == name and span.parent is None]
        if found:
            best = max(found, key=lambda span: (len(span.links), span.number(names.BLOCKS), span.number(names.TOKENS)))
            yield Sight(name, best.trace, (tell(best),))


def _moved(span: Span) -> str:
    seconds = (span.end - span.start) / 1e9
    kind = f"{span.text(names.KIND)}, " if span.text(names.KIND) else ""
    return f"{kind}{_blocks([span])} in {seconds:.3f} s"

"""Pictures of a trace, from the spans that ``load.py --save`` has written.

    python examples/jaeger/picture.py spans.jsonl                      # request.svg and steps.svg, here
    python examples/jaeger/picture.py spans.jsonl --request hugo-1 --to pictures

``request.svg``: the waterfall of one request, as a trace viewer shows it, with its events above and its links named.
``steps.svg``: some steps that follow each other, and what each request did in them. The same spans give the same bytes.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from octavo.telemetry import names

if TYPE_CHECKING:
    from octavo.examples.jaeger.drawing import FONT, Box, Scale, Sheet, cut, in_words, marks, width_of
    from octavo.examples.jaeger.saved_spans import Span, read
    from octavo.examples.jaeger.sights import is_request, request_names, worth_opening
else:
    sys.path.insert(0, str(Path(__file__).parent))  # this folder is no package
    from drawing import FONT, Box, Scale, Sheet, cut, in_words, marks, width_of
    from saved_spans import Span, read
    from sights import is_request, request_names, worth_opening

WIDTH = 980.0
EDGE = 14.0
LEFT = 200.0
"""Names are to the left of it."""
CHART = 590.0
RIGHT = WIDTH - EDGE
ROW = 19.0
BAR = 14.0
TIER = 13.0
TOP = 34.0
"""Below the title."""
FOLD = 3
"""So many acts with one name below one span share a row."""
STRIP = 8.0
"""Of one sample's phases."""
FOOT = 24.0
"""Below the charts: the times."""
MOST_STEPS = 6


_SMALL = frozenset({*names.ACTS, names.PREFILL_CHUNK})


class Row(NamedTuple):
    """Spans that share a line of the waterfall; mostly one."""

    depth: int
    spans: tuple[Span, ...]


# one request


def request_picture(spans: Sequence[Span], request: str | None = None) -> str:
    """The waterfall of ``request``, or of the one to which most happened, as SVG.

    :raises ValueError: there is no such request.
    """
    called = request_names(spans)
    wanted = request or _fullest(spans)
    whole = next((span for span in spans if called.get(span.id) == wanted), None)
    if whole is None:
        raise ValueError(f"there is no request {wanted!r}; there are: {', '.join(sorted(called.values())) or 'none'}")
    rows = list(_rows([span for span in spans if span.trace == whole.trace]))
    scale = _scale([span for row in rows for span in row.spans])
    sheet = Sheet(WIDTH)
    sheet.text(EDGE, 22, f"{wanted}: {whole.name}, {in_words(whole.end - whole.start)}", "title")
    placed = marks([(scale.at(event.when), event.name) for event in whole.events])
    top = TOP + TIER * (1 + max((mark.tier for mark in placed), default=-1))
    bottom = top + ROW * len(rows) + 4
    sheet.axis(scale, top, bottom)
    foot = top + ROW * next((line for line, row in enumerate(rows) if whole in row.spans), 0) + 2
    for mark in placed:
        height = top - 4 - TIER * mark.tier
        sheet.line((mark.x, height - FONT + 2), (mark.x, foot), "mark")
        sheet.text(mark.x + 4, height, mark.words, "quiet")
    linked = called | _step_names(spans)
    for number, row in enumerate(rows):
        _draw_row(sheet, scale, row, top + ROW * number + 2, linked)
    return sheet.svg(bottom + FOOT, f"Waterfall of the request {wanted}: its phases and what the cache did in them")


def _rows(trace: Sequence[Span]) -> Iterator[Row]:
    """The spans of one trace, each below its parent; many alike become one row."""
    below: dict[str | None, list[Span]] = defaultdict(list)
    known = {span.id for span in trace}
    for span in trace:
        below[span.parent if span.parent in known else None].append(span)

    def walk(parent: str | None, depth: int) -> Iterator[Row]:
        alike: dict[str, list[Span]] = defaultdict(list)
        for span in below[parent]:
            alike[span.name if span.name in _SMALL else span.id].append(span)
        for group in alike.values():
            for part in [tuple(group)] if len(group) >= FOLD else [(span,) for span in group]:
                yield Row(depth, part)
                yield from walk(part[0].id, depth + 1) if len(part) == 1 else ()

    yield from walk(None, 0)


def _draw_row(sheet: Sheet, scale: Scale, row: Row, y: float, linked: Mapping[str, str]) -> None:
    first, indent = row.spans[0], EDGE + 12 * row.depth
    sheet.text(indent, y + BAR - 3, cut(first.name, LEFT - 8 - indent))
    boxes = [_box(scale, span, y, BAR) for span in row.spans]
    for span, box in zip(row.spans, boxes, strict=True):
        sheet.bar(box, span.name, _tip(span))
    owners = dict.fromkeys(linked[link.span] for span in row.spans for link in span.links if link.span in linked)
    ends = f" \N{RIGHTWARDS ARROW} {', '.join(owners)}" if owners else ""
    note = ", ".join(_facts(row.spans)) + ends
    style = "bad" if first.failed else "link" if owners else "quiet"
    last = max(boxes, key=lambda box: box.x + box.width)
    around = boxes[0]._replace(width=last.x + last.width - boxes[0].x)
    sheet.beside(around, note, (LEFT, RIGHT), style, may_be_inside=len(boxes) == 1)


def _facts(alike: Sequence[Span]) -> Iterator[str]:
    """What is most worth knowing of some acts of one kind, or of one span of any kind."""
    span = alike[0]
    blocks, tokens = (sum(each.number(name) for each in alike) for name in (names.BLOCKS, names.TOKENS))
    if len(alike) > 1:
        yield f"{len(alike)} of them"
    elif span.end > span.start:  # a copy-on-write is noted when it is decided, and done by the next step
        yield in_words(span.end - span.start)
    if is_request(span):
        yield f"{span.number(names.USAGE_INPUT_TOKENS)} tokens in, {span.number(names.USAGE_OUTPUT_TOKENS)} out"
    if cached := span.number(names.CACHED_TOKENS):
        yield f"{cached} tokens found"
    elif span.name in (names.PREFILL, names.PREFILL_CHUNK) and tokens:
        yield f"{tokens} tokens"
    elif blocks:
        yield "1 block" if blocks == 1 else f"{blocks} blocks"
    if span.name == names.DECODE and names.FIRST_STEP in span.attributes:
        first, last = span.number(names.FIRST_STEP), span.number(names.LAST_STEP)
        yield f"sample {span.number(names.SAMPLE)}, steps {first} to {last}"
    for name in (names.TIER, names.ERROR_TYPE):
        if (value := span.text(name)) and value != "device":
            yield value


# steps


class Lane(NamedTuple):
    """What is shown of one request beside the steps."""

    name: str
    samples: Mapping[int, list[Span]]
    """The phases of each."""
    cells: Mapping[str, str]
    """By id of a step in which it took part, what it did there."""
    acts: list[Span]

    @property
    def height(self) -> float:
        return STRIP * len(self.samples) + BAR + 16


def steps_picture(spans: Sequence[Span]) -> str:
    """Up to six steps that follow each other, those with most requests in them, as SVG.

    :raises ValueError: there are no steps.
    """
    steps = _busiest(spans)
    if not steps:
        raise ValueError("there are no steps among these spans")
    scale, sheet = _scale(steps), Sheet(WIDTH)
    lanes = _lanes(spans, steps)
    numbers = [step.number(names.STEP_NUMBER) for step in steps]
    sheet.text(EDGE, 22, f"Steps {numbers[0]} to {numbers[-1]}, and what each request did in them", "title")
    tops = [TOP + 2 * ROW + 14 + sum(lane.height for lane in lanes[:count]) for count in range(len(lanes) + 1)]
    sheet.axis(scale, TOP, tops[-1])
    for step in steps:
        _draw_ties(sheet, scale, step, [top for lane, top in zip(lanes, tops, strict=False) if step.id in lane.cells])
    _draw_steps(sheet, scale, steps)
    for lane, top in zip(lanes, tops, strict=False):
        _draw_lane(sheet, scale, lane, {step.id: step for step in steps}, top)
    return sheet.svg(tops[-1] + FOOT, "Consecutive steps, each linked to the requests in it")


def _busiest(spans: Sequence[Span]) -> list[Span]:
    """The window of steps with consecutive numbers that has the most links; the first of those."""
    numbered = {span.number(names.STEP_NUMBER): span for span in spans if span.name == names.STEP}

    def window(first: int) -> list[Span]:
        steps: list[Span] = []
        while len(steps) < MOST_STEPS and (step := numbered.get(first + len(steps))) is not None:
            steps.append(step)
        return steps

    windows = [window(number) for number in sorted(numbered)]
    return max(windows, key=lambda steps: sum(len(step.links) for step in steps), default=[])


def _lanes(spans: Sequence[Span], steps: Sequence[Span]) -> list[Lane]:
    """One for each request that one of ``steps`` links to, in the order in which they came."""
    seen = {link.span for step in steps for link in step.links}
    start, end = steps[0].start, steps[-1].end
    lanes = []
    for request in (span for span in spans if span.id in seen):
        inside = [span for span in spans if span.trace == request.trace and span.end >= start and span.start <= end]
        samples: dict[int, list[Span]] = defaultdict(list)
        for span in inside:
            if span.name in names.PHASES:
                samples[span.number(names.SAMPLE)].append(span)
        computed = {link.span: span for span in inside for link in span.links if link.relation == "step"}
        cells = {
            step.id: f"{computed[step.id].number(names.TOKENS)} tokens" if step.id in computed else names.DECODE
            for step in steps
            if any(link.span == request.id for link in step.links)
        }
        acts = [span for span in inside if span.name in names.ACTS]
        lanes.append(Lane(request.text(names.REQUEST_ID), samples, cells, acts))
    return lanes


def _draw_steps(sheet: Sheet, scale: Scale, steps: Sequence[Span]) -> None:
    sheet.text(EDGE, TOP + BAR - 1, names.STEP)
    sheet.text(EDGE, TOP + ROW + BAR - 1, "tokens computed", "quiet")
    for step in steps:
        box = _box(scale, step, TOP + 2, BAR)
        sheet.bar(box, "step", _tip(step))
        _inside(sheet, box, f"{step.number(names.STEP_NUMBER)}", "in")
        _inside(sheet, box._replace(y=box.y + ROW), f"{step.number(names.TOKENS)}", "quiet")


def _draw_ties(sheet: Sheet, scale: Scale, step: Span, tops: Sequence[float]) -> None:
    """The links of ``step``: a line down to the last of the lanes, with a dot in each. Drawn first, under the rest."""
    if tops:
        x = (scale.at(step.start) + scale.at(step.end)) / 2
        sheet.line((x, TOP + 2 * ROW), (x, tops[-1]), "tie")
        for top in tops:
            sheet.dot(x, top)


def _draw_lane(sheet: Sheet, scale: Scale, lane: Lane, steps: Mapping[str, Span], top: float) -> None:
    sheet.text(EDGE, top + 4 + BAR - 3, cut(lane.name, LEFT - 8 - EDGE))
    for step, words in lane.cells.items():
        box = _box(scale, steps[step], top + 4, BAR)
        sheet.bar(box, names.DECODE if words == names.DECODE else names.PREFILL, words)
        _inside(sheet, box, words, "in")
    sheet.text(
        EDGE + 12, top + 4 + 2 * BAR - 2, "phases of its samples" if len(lane.samples) > 1 else "phases", "quiet"
    )
    for strip, phases in enumerate(lane.samples.values()):
        for phase in phases:
            sheet.bar(_box(scale, phase, top + 4 + BAR + 3 + STRIP * strip, STRIP - 3), phase.name, _tip(phase))
    for act in lane.acts:
        sheet.bar(_box(scale, act, top + 4, BAR), act.name, _tip(act))
    blocks = dict.fromkeys((act.name for act in lane.acts), 0)
    for act in lane.acts:
        blocks[act.name] += act.number(names.BLOCKS)
    told = ", ".join(f"{name} {count}" for name, count in blocks.items())
    sheet.text(LEFT + CHART + 8, top + 4 + BAR - 3, cut(told, RIGHT - LEFT - CHART - 8), "quiet")


# both


def _fullest(spans: Sequence[Span]) -> str | None:
    requests = [sight for sight in worth_opening(spans) if sight.name in request_names(spans).values()]
    return max(requests, key=lambda sight: len(sight.lines)).name if requests else None


def _step_names(spans: Sequence[Span]) -> dict[str, str]:
    return {span.id: f"step {span.number(names.STEP_NUMBER)}" for span in spans if span.name == names.STEP}


def _scale(spans: Sequence[Span]) -> Scale:
    return Scale(min(span.start for span in spans), max(span.end for span in spans), LEFT, CHART)


def _box(scale: Scale, span: Span, y: float, height: float) -> Box:
    x = scale.at(span.start)
    return Box(x, y, scale.at(span.end) - x, height)


def _inside(sheet: Sheet, box: Box, words: str, style: str) -> None:
    """In the middle of ``box``, or not at all."""
    if width_of(words) + 4 <= box.width:
        sheet.text(box.x + box.width / 2, box.y + box.height - 3, words, style, "middle")


def _tip(span: Span) -> str:
    """For the mouse: what it took and what is known of it, without ids."""
    shown = [f"{name}: {value}" for name, value in span.attributes.items() if name.startswith("octavo.")]
    return "\n".join(
        (f"{span.name}, {in_words(span.end - span.start)}", *(line for line in shown if "_id:" not in line))
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spans", type=Path, help="what load.py --save has written")
    parser.add_argument("--request", help="its id; the one to which most happened")
    parser.add_argument("--to", type=Path, default=Path(), help="the folder for the pictures (this one)")
    chosen = parser.parse_args(arguments)
    try:
        spans = read(chosen.spans)
        pictures = {"request.svg": request_picture(spans, chosen.request), "steps.svg": steps_picture(spans)}
    except (OSError, ValueError, msgspec.DecodeError) as error:
        sys.exit(f"error: {error}")
    chosen.to.mkdir(parents=True, exist_ok=True)
    for name, drawn in pictures.items():
        (chosen.to / name).write_text(drawn, encoding="utf-8")
        print(chosen.to / name)


if __name__ == "__main__":
    main()

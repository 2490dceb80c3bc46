from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.bench.sse import Event, MalformedStream, SseReader

LINE = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=20)
EVENT = st.tuples(LINE, st.lists(LINE, min_size=1, max_size=3))


def read(*chunks: bytes) -> list[Event]:
    reader = SseReader()
    events = [event for chunk in chunks for event in reader.feed(chunk)]
    reader.close()
    return events


@given(st.lists(EVENT, max_size=4), st.sampled_from(["\n", "\r\n", "\r"]), st.data())
def test_whatever_the_pieces_and_line_ends_the_events_are_the_same(
    events: list[tuple[str, list[str]]], end: str, data: st.DataObject
) -> None:
    lines = [line for name, parts in events for line in (f"event: {name}", *(f"data: {part}" for part in parts), "")]
    stream = "".join(line + end for line in lines).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    pieces = [stream[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    reader = SseReader()
    found = [event for piece in pieces for event in reader.feed(piece)]
    found += reader.feed(b": one more line settles a line end of one character\n\n")
    assert found == [Event(name, "\n".join(parts)) for name, parts in events]


def test_one_space_after_the_colon_goes_and_comments_are_no_events() -> None:
    assert read(b": hello\n\ndata:a\ndata:  b\n\n") == [Event("", "a\n b")]


def test_ids_and_retries_are_read_over() -> None:
    assert read(b"id: 1\nretry: 5\ndata: x\n\n") == [Event("", "x")]


@pytest.mark.parametrize("stream", [b'{"choices": []}\n\n', b"dat: x\n\n", b"data: \xff\n\n"])
def test_a_line_that_a_lenient_reader_drops_is_an_error(stream: bytes) -> None:
    with pytest.raises(MalformedStream):
        read(stream)


@pytest.mark.parametrize("stream", [b"data: x", b"data: x\n", b"data: x\n\nda"])
def test_an_end_inside_an_event_is_an_error(stream: bytes) -> None:
    with pytest.raises(MalformedStream, match="inside"):
        read(stream)


def test_a_line_end_in_two_pieces_is_one() -> None:
    assert read(b"data: x\r", b"\n\r", b"\n") == [Event("", "x")]

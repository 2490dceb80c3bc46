from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import StorageError
from octavo.storage.base import Listed, Meta, Stored
from octavo.storage.manager import verification
from octavo.storage.record import Opened
from octavo.tests.storage.manager_rig import RECORD, SAMPLES, SHELF, Clock, names_of

junk = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=3) | st.binary(max_size=3)
)


@given(st.tuples(junk, junk, junk, junk, junk, junk))
def test_a_cleaned_meta_has_only_sensible_values(
    values: tuple[object, object, object, object, object, object],
) -> None:
    meta = verification.clean_meta(Meta(*values))  # type: ignore[arg-type]  # what a tier may return
    for seconds in (meta.written, meta.idle, meta.recompute_seconds, 0.0 if meta.ttl is None else meta.ttl):
        assert isinstance(seconds, float)
        assert math.isfinite(seconds)
        assert seconds >= 0
    assert type(meta.hits) is int
    assert meta.hits >= 0
    assert type(meta.priority) is int
    assert verification.clean_meta(meta) == meta


def test_a_sensible_meta_stays_and_a_broken_time_to_live_is_over() -> None:
    meta = Meta(5.0, 1.0, 3, -2, 9.0, 0.25)
    assert verification.clean_meta(meta) == meta
    assert verification.clean_meta(meta._replace(ttl=None)).ttl is None
    assert verification.clean_meta(meta._replace(ttl=math.nan)).ttl == 0.0
    assert verification.clean_meta("meta") == Meta()


STORED = Stored(memoryview(b"x"), Meta())


@pytest.mark.parametrize(
    ("check", "answer"),
    [
        (lambda answer: verification.as_stored(answer, 2), [STORED]),
        (lambda answer: verification.as_stored(answer, 1), [(memoryview(b""), Meta())]),
        (lambda answer: verification.as_stored(answer, 1), None),
        (lambda answer: verification.as_stored(answer, 1), {STORED: 1}),
        (lambda answer: verification.as_flags(answer, 1), [1]),
        (lambda answer: verification.as_flags(answer, 1), [True, True]),
        (lambda answer: verification.as_flags(answer, 0), 0),
        (verification.as_count, -1),
        (verification.as_count, "3"),
        (verification.as_count, 2.0),
        (verification.as_listed, "x"),
        (verification.as_iterator, []),
    ],
)
def test_an_answer_of_the_wrong_shape_is_refused(check: Callable[[object], object], answer: object) -> None:
    with pytest.raises(StorageError):
        check(answer)


def test_answers_of_the_right_shape_pass() -> None:
    assert verification.as_stored((STORED, None), 2) == [STORED, None]
    assert verification.as_flags([True, False], 2) == [True, False]
    assert verification.as_count(3) == 3


def test_malformed_entries_of_listings_and_spills_are_left_out() -> None:
    (record,) = SAMPLES.chain(SHELF, 1)
    good = Listed(SHELF, record.head, Meta())
    bad: list[object] = [
        good._replace(head=record.head._replace(name=b"short")),
        good._replace(head=record.head._replace(start=-4)),
        good._replace(shelf=("a", "b")),  # type: ignore[arg-type]  # what a tier may return
        None,
        (SHELF, record.head),
    ]
    assert verification.as_listed([*bad, good]) == [good]
    wrong: list[object] = [
        (SHELF, record._replace(data=record.data[:-1])),
        (SHELF, record._replace(data=bytes(record.data))),  # type: ignore[arg-type]  # as above
        (SHELF, record._replace(head=record.head._replace(parent=b""))),
        (SHELF, None),
        (SHELF,),
        record,
    ]
    assert verification.as_spilled([*wrong, (SHELF, record)], RECORD) == [(SHELF, record)]


def test_records_are_opened_one_by_one_and_no_fault_of_one_touches_another() -> None:
    records = SAMPLES.chain(SHELF, 4)
    released = memoryview(bytearray(records[1].data))
    released.release()
    data = [records[0].data, released, memoryview(bytes(RECORD * 4)).cast("i"), records[2].data]
    checked = verification.open_records(SAMPLES.codec, SHELF, names_of(records), data, Clock())
    assert isinstance(checked.opened[0], Opened)
    assert all(isinstance(block, str) for block in checked.opened[1:])  # the last one is another block's

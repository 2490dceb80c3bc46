from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.engine.kv import CacheManager, ImageRun, Namespace, Retention, Sequence, encode_tokens, most_valuable
from octavo.engine.kv.image import meta_of
from octavo.policies.eviction import Entry, Lru
from octavo.storage.base import Meta

SPACE = Namespace("m")


def run(number: int, parent: int | None, meta: Meta) -> ImageRun:
    before = SPACE.shelf().namespace if parent is None else bytes([parent] * 32)
    return ImageRun(SPACE, 0, before, (bytes([number] * 32),), bytes(16), array("i", [number]), meta)


METAS = st.builds(
    Meta,
    idle=st.floats(0, 1e6),
    hits=st.integers(0, 9),
    priority=st.integers(-1, 2),
    ttl=st.sampled_from((None, 0.0, 5.0)),
    recompute_seconds=st.sampled_from((0.0, 0.01, 3.0)),
)


@given(st.lists(st.tuples(METAS, st.integers(-1, 50)), min_size=1, max_size=40))
def test_no_run_comes_before_the_one_it_continues(parts: list[tuple[Meta, int]]) -> None:
    image = [
        run(number, None if above < 0 or not number else above % number, meta)
        for number, (meta, above) in enumerate(parts)
    ]
    order = most_valuable(image)
    assert sorted(order) == list(range(len(image)))
    place = {image[index].names[-1]: at for at, index in enumerate(order)}
    for index in order:
        assert (
            image[index].parent == SPACE.shelf().namespace or place[image[index].parent] < place[image[index].names[-1]]
        )


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        (Meta(priority=1, idle=1e6), Meta(hits=9)),
        (Meta(), Meta(priority=-1, hits=9)),
        (Meta(priority=1, ttl=1.0), Meta(priority=1, ttl=0.0, hits=9)),
        (Meta(hits=2), Meta(hits=1)),
        (Meta(idle=1.0), Meta(idle=2.0)),
        (Meta(recompute_seconds=0.2), Meta(recompute_seconds=0.1)),
        (Meta(recompute_seconds=0.3), Meta()),  # an unmeasured one is worth the mean
        (Meta(hits=9, idle=1.0), Meta(idle=0.0)),
    ],
)
def test_what_is_worth_more_comes_first(better: Meta, worse: Meta) -> None:
    cheap = run(9, None, Meta(recompute_seconds=0.1, idle=1e9))
    order = most_valuable([cheap, run(1, None, worse), run(2, None, better)])
    assert order.index(2) < order.index(1)


def test_a_parent_is_worth_as_much_as_its_dearest_child() -> None:
    image = [run(0, None, Meta(idle=1e6)), run(1, None, Meta(idle=5.0)), run(2, 0, Meta(hits=9))]
    assert most_valuable(image) == [0, 2, 1]


def test_an_image_is_complete_and_in_order_and_does_not_change() -> None:
    now = 100.0
    manager = CacheManager(32, 4, Lru(32), clock=lambda: now, on_fault=lambda *_: None)
    for number, tokens in enumerate(([1] * 12, [1] * 8 + [2] * 8, [3] * 4)):
        retention = (Retention(0, 4, 2, 50),)
        sequence = Sequence(number, encode_tokens(tokens), SPACE, block_size=4, retention=retention)
        manager.copied(manager.admit(sequence).copies)
        manager.measured(sequence, 0.5)
        manager.commit(sequence, sequence.uncomputed, 0)
        manager.finish(sequence)
    now = 110.0
    image = manager.image(wall_now=1e9)
    known = {SPACE.shelf().namespace}
    for each in image:
        assert each.parent in known
        known.update(each.names)
        assert len(each.tokens) == 16 * len(each.ids) == 16 * len(each.names)
        assert (each.meta.written, each.meta.idle) == (1e9, 10.0)
        assert (each.meta.priority, each.meta.ttl) == ((2, 40.0) if each.start == 0 else (0, None))
    assert sum(len(each.ids) for each in image) == manager.tree.blocks
    assert [list(each.ids) for each in image if each.start == 0 and each.tokens[:4] == b"\x03\0\0\0"] == [[5]]
    before = [(each.tokens, list(each.ids)) for each in image]
    manager.evict(32)
    assert [(each.tokens, list(each.ids)) for each in image] == before


def test_a_meta_is_in_durations() -> None:
    """TIME-01."""
    entry = Entry(1, 4, 0.0, last_use=90.0, hits=3, recompute_seconds=0.25, priority=2, expires=95.0)
    assert meta_of(entry, 100.0, 5.0) == Meta(5.0, 10.0, 3, 2, 0.0, 0.25)
    entry.expires = None
    entry.last_use = 101.0  # never in the future
    assert meta_of(entry, 100.0, 5.0) == Meta(5.0, 0.0, 3, 2, None, 0.25)

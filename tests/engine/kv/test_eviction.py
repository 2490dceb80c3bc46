from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from octavo.engine.kv import CacheManager, EvictedRun, EvictionHook, Namespace, Retention, Sequence, encode_tokens
from octavo.engine.kv.containment import ContainedPolicy
from octavo.engine.kv.ghosts import Ghost, Ghosts
from octavo.engine.kv.node import Node
from octavo.errors import OutOfBlocks
from octavo.policies.eviction import Entry, EvictionPolicy, Lru, Returned
from octavo.policies.returning import Return
from octavo.storage.naming import name_after

SPACE = Namespace("w")
BLOCK = 4


class Fault(NamedTuple):
    where: str
    error: BaseException | str


class Stage:
    """A manager whose clock counts, and what it reported."""

    def __init__(self, blocks: int, policy: EvictionPolicy | None = None, hook: EvictionHook | None = None) -> None:
        self.now = 0.0
        self.faults: list[Fault] = []
        self.manager = CacheManager(
            blocks,
            BLOCK,
            policy or Lru(blocks),
            clock=self.clock,
            on_fault=lambda where, error: self.faults.append(Fault(where, error)),
        )
        if hook is not None:
            self.manager.watch(hook)
        self._ids = 0

    def clock(self) -> float:
        self.now += 1.0
        return self.now

    def admit(self, tokens: list[int]) -> Sequence:
        self._ids += 1
        sequence = Sequence(self._ids, encode_tokens(tokens), SPACE, block_size=BLOCK)
        self.manager.copied(self.manager.admit(sequence).copies)
        return sequence

    def serve(self, *tokens: int, blocks: int = 1) -> None:
        """Compute and finish a prompt of ``blocks`` blocks that begins with ``tokens``."""
        prompt = [*tokens, *[0] * (blocks * BLOCK - len(tokens))]
        sequence = self.admit(prompt)
        self.manager.commit(sequence, sequence.uncomputed, 1)
        self.manager.finish(sequence)

    def cached(self, *tokens: int) -> int:
        """Whole cached blocks of a prompt, without touching anything."""
        prompt = [*tokens, *[0] * (4 * BLOCK)]
        return len(self.manager.tree.match(SPACE, encode_tokens(prompt).tobytes(), len(prompt)).ids)


class Hook:
    """Keeps what it was told; raises ``error`` each time, if there is one."""

    def __init__(self, error: Exception | None = None) -> None:
        self.runs: list[EvictedRun] = []
        self.gone: list[int] = []
        self.look: Callable[[EvictedRun], None] = lambda _: None
        self._error = error

    def evicted(self, run: EvictedRun) -> None:
        self.look(run)
        self.runs.append(run)
        if self._error is not None:
            raise self._error

    def dropped(self, run: EvictedRun) -> None:
        self.gone += run.blocks
        if self._error is not None:
            raise self._error


KINDS = ("insert", "extend", "split", "hit", "candidate", "held", "evict", "ghost", "victims")


class Broken(Lru):
    """Raises at every event of some kinds, after it did its work."""

    def __init__(self, capacity: int, *kinds: str) -> None:
        super().__init__(capacity)
        self._kinds = kinds or KINDS

    def on_insert(self, entry: Entry, now: float) -> None:
        super().on_insert(entry, now)
        self._break("insert")

    def on_extend(self, entry: Entry, blocks: int, now: float) -> None:
        self._break("extend")

    def on_split(self, upper: Entry, lower: Entry, now: float) -> None:
        self._break("split")

    def on_hit(self, entry: Entry, now: float) -> None:
        super().on_hit(entry, now)
        self._break("hit")

    def on_candidate(self, entry: Entry, now: float) -> None:
        super().on_candidate(entry, now)
        self._break("candidate")

    def on_held(self, entry: Entry) -> None:
        super().on_held(entry)
        self._break("held")

    def on_evict(self, entry: Entry, blocks: int, now: float) -> None:
        super().on_evict(entry, blocks, now)
        self._break("evict")

    def on_ghost_hit(self, entry: Entry, returned: Returned, now: float) -> None:
        self._break("ghost")

    def victims(self, count: int, now: float) -> Iterator[Entry]:
        self._break("victims")
        return super().victims(count, now)

    def _break(self, kind: str) -> None:
        if kind in self._kinds:
            raise RuntimeError(kind)


def test_the_least_recently_used_goes_first_and_a_hit_makes_young() -> None:
    stage = Stage(4)
    for first in (1, 2, 3):
        stage.serve(first)
    stage.manager.finish(stage.admit([1, 0, 0, 0, 9]))  # a hit on 1 and nothing else; 2 is the oldest now
    assert stage.manager.evict(1) == 1
    assert [stage.cached(first) for first in (1, 2, 3)] == [1, 0, 1]


def test_only_what_is_missing_is_evicted_and_from_the_tail() -> None:
    stage = Stage(6)
    stage.serve(1, blocks=4)
    stage.serve(2)
    stage.admit([7] * 9)  # three blocks, one is free
    assert stage.cached(1) == 2
    assert stage.cached(2) == 1
    assert stage.manager.stats().evictions == {"allocate": 2}


def test_a_parent_follows_when_its_children_are_gone() -> None:
    stage = Stage(8)
    stage.serve(1, 0, 0, 0, 5, blocks=2)
    stage.serve(1, 0, 0, 0, 6, blocks=2)
    assert stage.manager.evict(8) == 3
    assert stage.manager.census().free == 8


def test_what_is_referenced_stays() -> None:
    stage = Stage(4)
    sequence = stage.admit([1] * 5)
    stage.manager.commit(sequence, 5, 1)
    stage.serve(2)
    assert stage.manager.evict(4) == 1
    assert stage.cached(1, 1, 1, 1) == 1
    with pytest.raises(OutOfBlocks):
        stage.admit([3] * 13)
    stage.manager.census()


@pytest.mark.parametrize("count", [0, -1])
def test_evicting_nothing_evicts_nothing(count: int) -> None:
    stage = Stage(4)
    stage.serve(1)
    assert stage.manager.evict(count) == 0
    assert stage.cached(1) == 1


@pytest.mark.parametrize(("low", "high", "freed"), [(2, 3, 0), (3, 3, 1), (3, 4, 2), (5, 9, 4), (3, 2, 0)])
def test_the_background_tick_keeps_watermarks(low: int, high: int, freed: int) -> None:
    stage = Stage(6)
    for first in (1, 2, 3, 4):
        stage.serve(first)
    assert stage.manager.pool.free == 2
    assert stage.manager.maybe_evict(low, high) == freed
    assert stage.manager.pool.free == 2 + freed
    assert stage.manager.stats().evictions == ({"watermark": freed} if freed else {})


def test_the_hook_sees_what_leaves_before_it_can_be_reused() -> None:
    def held(run: EvictedRun) -> None:
        assert all(not stage.manager.pool.block(block).is_free for block in run.blocks)

    hook = Hook()
    hook.look = held
    stage = Stage(4, hook=hook)
    stage.serve(1, 2, 3, 4, 5, blocks=3)
    root = SPACE.shelf().namespace
    first = name_after(root, encode_tokens([1, 2, 3, 4]).tobytes())
    second = name_after(first, encode_tokens([5, 0, 0, 0]).tobytes())
    third = name_after(second, encode_tokens([0, 0, 0, 0]).tobytes())
    stage.manager.evict(2)
    stage.manager.evict(1)
    late, early = hook.runs
    assert list(memoryview(late.tokens).cast("i")) == [5, 0, 0, 0, 0, 0, 0, 0]
    assert (late.namespace, late.start, late.blocks, late.reason) == (SPACE, 4, (1, 2), "call")
    assert (late.parent, late.names) == (first, (second, third))
    assert (early.parent, early.names, early.start, early.blocks) == (root, (first,), 0, (0,))
    assert stage.manager.census().free == 4, "evicted blocks are free at once"


def test_nobody_pays_for_names_without_a_hook() -> None:
    stage = Stage(8)
    stage.serve(1, 2, 3, 4, 5, blocks=4)
    stage.manager.evict(1)
    assert [bytes(node.names) for node in stage.manager.tree.nodes()] == [b""]


def test_the_hook_hears_of_blocks_whose_contents_are_bad() -> None:
    hook = Hook()
    stage = Stage(8, hook=hook)
    bad = stage.admit([1] * 9)
    stage.manager.commit(bad, 9, 1)
    published = list(bad.table.blocks[:2])
    names = stage.manager.discard(bad)
    assert (hook.gone, hook.runs) == (published, [])
    first = name_after(SPACE.shelf().namespace, encode_tokens([1] * 4).tobytes())
    assert names == [first, name_after(first, encode_tokens([1] * 4).tobytes())]
    assert stage.manager.stats().evictions == {"distrust": 2}


def test_blocks_that_a_copy_reads_are_in_transfer_and_others_go_in_their_place() -> None:
    stage = Stage(4)
    for first in (1, 2, 3, 4):
        stage.serve(first)
    for block in range(4):
        stage.manager.pool.pin(block)
    assert stage.manager.evict(2) == 0
    assert stage.manager.census().in_transfer == 4
    assert stage.manager.try_admit(Sequence(99, encode_tokens([9]), SPACE, block_size=BLOCK)) is None
    for block in range(4):
        stage.manager.pool.unpin(block)
    assert stage.manager.census().free == 4


def test_a_raising_hook_costs_nothing_but_a_report() -> None:
    stage = Stage(1, hook=Hook(OSError("disk full")))
    stage.serve(1)
    stage.manager.finish(stage.admit([2]))
    stage.serve(3)
    stage.manager.forget(SPACE, encode_tokens([3]))
    assert [fault.where for fault in stage.faults] == ["eviction hook"] * 2
    assert (stage.manager.stats().hook_faults, stage.manager.stats().policy_faults) == (2, 0)
    assert stage.manager.census().free == 1


def test_the_stand_in_for_a_faulty_policy_respects_retention() -> None:
    stage = Stage(4, Broken(4))
    dear = Sequence(90, encode_tokens([7] * 5), SPACE, block_size=BLOCK, retention=(Retention(0, None, 1, None),))
    stage.manager.admit(dear)
    stage.manager.commit(dear, 5, 1)
    stage.manager.finish(dear)
    stage.serve(8)
    stage.manager.evict(1)
    assert (stage.cached(7, 7, 7, 7), stage.cached(8)) == (1, 0)


@pytest.mark.parametrize("kind", [*KINDS, "everything"])
def test_a_policy_that_raises_is_contained(kind: str) -> None:
    stage = Stage(5, Broken(5, *(() if kind == "everything" else (kind,))))
    stage.serve(1, 0, 0, 0, 5, blocks=2)
    stage.serve(1, 0, 0, 0, 6, blocks=2)
    growing = stage.admit([3])
    for _ in range(8):
        stage.manager.extend(growing, 1)
        stage.manager.commit(growing, 1, 3)
    stage.manager.finish(growing)
    stage.serve(1, 0, 0, 0, 6, blocks=3)
    stage.manager.evict(3)
    stage.serve(1, 0, 0, 0, 5, blocks=2)
    stage.manager.census()
    heard = {str(fault.error) for fault in stage.faults if isinstance(fault.error, RuntimeError)}
    stats = stage.manager.stats()
    if kind == "everything":
        assert (stats.policy, stats.policy_set_aside, stats.policy_faults) == ("Lru", "Broken", 8)
        assert [fault.where for fault in stage.faults][-1] == "eviction policy Broken is set aside"
    else:
        assert heard == {kind}
        assert (stats.policy, stats.policy_set_aside, stats.policy_faults) == ("Broken", None, len(stage.faults))


@pytest.mark.parametrize("kind", ["nothing", "no entry", "held", "foreign", "gone"])
def test_a_policy_that_names_the_wrong_thing_is_replaced_by_lru_for_that_call(kind: str) -> None:
    class Wrong(Lru):
        def victims(self, count: int, now: float) -> Iterator[Entry]:
            wrong: dict[str, list[Entry | None]] = {
                "nothing": [],
                "no entry": [None],
                "held": [held.node],
                "foreign": [next(iter(other.manager.tree.candidates))],
                "gone": [gone],
            }
            yield from wrong[kind]  # type: ignore[misc]  # the breach that is tested

    other = Stage(4)
    other.serve(1)
    stage = Stage(6, Wrong(6))
    stage.serve(8)
    gone = next(iter(stage.manager.tree.candidates))
    stage.manager.evict(1)
    stage.faults.clear()
    held = stage.admit([9] * 4)
    stage.manager.commit(held, 4, 1)
    for first in (1, 2, 3):
        stage.serve(first)
    assert stage.manager.evict(2) == 2
    assert [stage.cached(first) for first in (1, 2, 3)] == [0, 0, 1]
    assert stage.cached(9, 9, 9, 9) == 1
    assert [fault.where for fault in stage.faults] == ["victims"]
    stage.manager.census()


def test_a_policy_that_raises_is_reported_once() -> None:
    stage = Stage(2, Broken(2))
    stage.serve(1)
    stage.faults.clear()
    assert stage.manager.evict(1) == 1
    assert [fault.where for fault in stage.faults] == ["victims", "on_evict"]


def test_a_policy_is_asked_again_while_it_makes_progress() -> None:
    class OneByOne(Lru):
        def victims(self, count: int, now: float) -> Iterator[Entry]:
            for entry in super().victims(count, now):
                yield entry
                return

    stage = Stage(6, OneByOne(6))
    for first in (1, 2, 3):
        stage.serve(first)
    assert stage.manager.evict(3) == 3
    assert stage.faults == []


def test_interrupts_pass_through() -> None:
    class Interrupted(Lru):
        def on_insert(self, entry: Entry, now: float) -> None:
            raise KeyboardInterrupt

    contained = ContainedPolicy(Interrupted(1), lambda *_: None, clock=lambda: 0.0)
    with pytest.raises(KeyboardInterrupt):
        contained.on_insert(Entry(1, 4, 0.0, 0.0), 0.0)


def test_ghosts_tell_when_something_evicted_is_wanted_again() -> None:
    heard: list[tuple[int, float, object, int]] = []

    class Listening(Lru):
        def on_evict(self, entry: Entry, blocks: int, now: float) -> object:
            super().on_evict(entry, blocks, now)
            return blocks, entry.blocks

        def on_ghost_hit(self, entry: Entry, returned: Returned, now: float) -> None:
            heard.append((returned.depth, returned.idle, returned.memory, entry.blocks))

    stage = Stage(4, Listening(4))
    stage.serve(1, 0, 0, 0, 2, blocks=2)
    before = stage.now
    stage.manager.evict(1)
    stage.serve(1, 0, 0, 0, 2, blocks=2)
    assert [(depth, memory, blocks) for depth, _, memory, blocks in heard] == [(BLOCK, (1, 1), 2)]
    assert 0 < heard[0][1] <= stage.now - before
    stats = stage.manager.stats()
    assert (stats.evicted_then_wanted, stats.evicted_then_wanted_seconds) == (1, heard[0][1])


def test_a_ghost_stands_for_all_that_comes_before_it() -> None:
    """The same block at the same depth after another beginning was never here."""
    ghosts = Ghosts(bound=8)
    gone, other = array("i", [1, 2, 3, 3]), array("i", [1, 9, 3, 3])
    ghosts.remember(SPACE, [gone.tobytes()], Ghost(0.0, "call", "Lru"))
    assert ghosts.recall(SPACE, other, 1, 2, 1.0) == []
    assert ghosts.recall(SPACE, gone, 1, 2, 1.0) == [Return(None, 1, 1, 1.0)]


def test_ghosts_are_bounded_and_forget_the_oldest() -> None:
    """GROWTH-01."""
    ghosts = Ghosts(bound=3)
    prompts = [array("i", [number, 7]) for number in range(5)]
    for number, prompt in enumerate(prompts):
        ghosts.remember(SPACE, [prompt[:1].tobytes(), prompt[1:].tobytes()], Ghost(float(number), "call", "Lru"))
    assert len(ghosts) == 3
    assert ghosts.recall(SPACE, prompts[1], 1, 1, 9.0) == []
    assert ghosts.peek(SPACE, prompts[2].tobytes()) == Ghost(2.0, "call", "Lru")
    assert ghosts.recall(SPACE, prompts[2], 1, 1, 9.0) == [Return(None, 1, 1, 7.0)]
    assert ghosts.recall(SPACE, prompts[2], 1, 1, 9.0) == []
    assert ghosts.recall(Namespace("v"), prompts[3], 1, 1, 9.0) == []
    assert (ghosts.hits, ghosts.gap_seconds) == (1, 7.0)
    ghosts.forget("s")
    assert len(ghosts) == 2
    ghosts.forget(None)
    assert len(ghosts) == 0


def test_thousands_of_prompts_leave_nothing_behind() -> None:
    """GROWTH-01: after many more prompts than fit, every container is bound by the pool."""
    stage = Stage(8)
    for number in range(3000):
        stage.serve(number, blocks=1 + number % 3)
    manager = stage.manager
    nodes = list(manager.tree.nodes())
    assert len(nodes) <= 8
    assert len(manager.tree.candidates) <= 8
    assert len(manager._ghosts) <= 4 * 8
    assert len(manager._in_flight) == len(manager._sequences) == 0
    assert all(isinstance(node, Node) and not node.locks for node in nodes)
    assert manager.census().held == 0

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hypothesis import given
from hypothesis import strategies as st

from octavo.policies.eviction import Entry, Lru, Returned
from octavo.policies.returning import Return, tell_returns

BLOCK = 16


class Listener(Lru):
    """Writes down what it is told."""

    def __init__(self) -> None:
        super().__init__(8)
        self.told: list[tuple[Entry, Returned]] = []

    def on_ghost_hit(self, entry: Entry, returned: Returned, now: float) -> None:
        self.told.append((entry, returned))


class Path:
    """Entries of a request, one behind the other."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.entries = [Entry(size, 0, 0.0, 0.0) for size in sizes]

    def at(self, block: int) -> tuple[Entry, int]:
        begins = 0
        for entry in self.entries:
            if block < begins + entry.blocks:
                return entry, begins
            begins += entry.blocks
        raise IndexError(block)

    @property
    def blocks(self) -> int:
        return sum(entry.blocks for entry in self.entries)


def tell(policy: Listener, returns: Sequence[Return], path: Path, new_from: int, stop: int) -> Sequence[Return]:
    return tell_returns(policy, returns, new_from=new_from, stop=stop, block_tokens=BLOCK, entry_at=path.at, now=9.0)


def spelled(policy: Listener, path: Path) -> Iterator[tuple[object, int]]:
    """The memory and the number in the request, of each block that was told."""
    for entry, back in policy.told:
        begins = sum(other.blocks for other in path.entries[: path.entries.index(entry)])
        for number in range(back.blocks):
            yield back.memory, begins + back.at + number


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    runs=st.lists(st.integers(1, 6), max_size=5),
    chunks=st.lists(st.integers(1, 7)),
)
def test_every_block_that_is_back_is_told_once_in_order(sizes: list[int], runs: list[int], chunks: list[int]) -> None:
    path, policy, returns, at = Path(sizes), Listener(), list[Return](), 0
    for number, blocks in enumerate(runs):
        returns.append(Return(number, at, blocks, 1.0))
        at += blocks
    expected = [(back.memory, back.first + n) for back in returns for n in range(back.blocks)]
    published, left = 0, list[Return](returns)
    for chunk in [*chunks, path.blocks]:
        stop = min(published + chunk, path.blocks)
        left = list(tell(policy, left, path, published, stop))
        published = stop
    assert list(spelled(policy, path)) == expected[: path.blocks]
    assert sum(back.blocks for back in left) == max(len(expected) - path.blocks, 0)
    for entry, back in policy.told:
        assert 0 < back.blocks <= entry.blocks - back.at


def test_what_is_told_says_where_and_how_long() -> None:
    path, policy = Path([2, 5]), Listener()
    assert tell(policy, [Return("memory", 3, 4, 7.5)], path, new_from=1, stop=7) == ()
    assert policy.told == [(path.entries[1], Returned("memory", 3 * BLOCK, 7.5, 1, 4))]


def test_a_run_whose_head_was_there_already_is_not_told_not_even_its_rest() -> None:
    """Its memory begins at a block that this request has not brought."""
    path, policy = Path([9]), Listener()
    returns = [Return("first", 1, 4, 0.0), Return("second", 5, 3, 0.0)]
    left = tell(policy, returns, path, new_from=2, stop=4)
    assert [back.memory for back in left] == ["second"]
    assert tell(policy, left, path, new_from=4, stop=9) == ()
    assert [back.memory for _, back in policy.told] == ["second"]


def test_what_is_not_yet_there_waits() -> None:
    path, policy = Path([4]), Listener()
    later = [Return("later", 4, 2, 0.0)]
    assert list(tell(policy, later, path, new_from=0, stop=4)) == later
    assert policy.told == []


@given(
    size=st.integers(1, 12),
    runs=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 6)), max_size=4),
    stop=st.integers(0, 12),
)
def test_who_does_not_want_to_hear_of_it_is_told_nothing_and_the_rest_is_the_same(
    size: int, runs: list[tuple[int, int]], stop: int
) -> None:
    path, listener, deaf = Path([size]), Listener(), Lru(8)
    returns = [Return(None, first, blocks, 1.0) for first, blocks in sorted(runs) if first + blocks <= size]
    assert listener.wants_returns
    assert not deaf.wants_returns

    def told(policy: Lru) -> Sequence[Return]:
        return tell_returns(
            policy, returns, new_from=0, stop=min(stop, size), block_tokens=BLOCK, entry_at=path.at, now=9.0
        )

    assert list(told(deaf)) == list(told(listener))

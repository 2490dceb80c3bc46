"""Each book is falsified in turn; the census must notice, and say what."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from octavo.engine.kv import CacheManager, Namespace, Sequence, encode_tokens
from octavo.engine.kv.census import Census
from octavo.engine.kv.keep import Keep
from octavo.engine.kv.names import names_of
from octavo.engine.kv.node import Node
from octavo.errors import CensusFailed
from octavo.policies.eviction import Lru


class Books:
    """A cache with an idle branch, a running sequence, its fork, a pinned prefix, and a block in transfer."""

    def __init__(self) -> None:
        self.manager = CacheManager(16, 4, Lru(16), clock=lambda: 0.0, on_fault=lambda *_: None)
        space = Namespace("w")
        done = Sequence(1, encode_tokens(range(8)), space, block_size=4)
        self.manager.admit(done)
        self.manager.commit(done, 8, 0)
        self.manager.finish(done)
        self.running = Sequence(2, encode_tokens([0, 1, 2, 3, 9, 9, 9, 9, 9]), space, block_size=4)
        self.manager.admit(self.running)
        self.manager.commit(self.running, 5, 1)
        self.child = self.manager.fork(self.running, 3)
        lease = self.manager.pin(space, self.running.tokens[:4])
        assert lease is not None
        self.lease = lease
        gone = Sequence(4, encode_tokens([7]), space, block_size=4)
        self.manager.admit(gone)
        self.manager.pool.pin(gone.table.blocks[0])
        self.manager.finish(gone)

    @property
    def idle(self) -> Node:
        return next(iter(self.manager.tree.candidates))

    @property
    def held(self) -> Node:
        assert self.running.node is not None
        return self.running.node


def test_the_sound_cache_adds_up() -> None:
    census = Books().manager.census()
    assert census == Census(free=11, idle=1, held=3, in_transfer=1, total=16, references=5)


FALSIFICATIONS: dict[str, Callable[[Books], object]] = {
    "references and": lambda books: books.manager.pool.retain([books.idle.ids[0]]),
    "owners": lambda books: books.manager.pool.release(books.idle.ids[:1]),
    "the free list": lambda books: books.manager.pool.free_runs.give(books.idle.ids[0], 1),
    "disagree": lambda books: books.manager.pool.free_runs.take(1),
    "locks": lambda books: books.manager.tree.lock(books.idle),
    "in the tree 2 times": lambda books: books.idle.ids.__setitem__(0, books.held.ids[0]),
    "other shared blocks": lambda books: books.running.table.blocks.__setitem__(0, 15),
    "does not follow from its parent's end": lambda books: setattr(books.idle, "end", 5),
    "bytes of tokens": lambda books: books.idle.tokens.extend(b"1234"),
    "tree counts": lambda books: setattr(books.manager.tree, "idle_blocks", 0),
    "wrongly no candidate": lambda books: books.manager.tree.candidates.clear(),
    "and its children disagree": lambda books: _clear_keys(books.held.parent),
    "is registered": lambda books: books.manager._sequences.update({9: _stranger()}),
    "of them shared": lambda books: setattr(books.running, "computed", 3),
    "of them shared ": lambda books: setattr(books.running, "computed", 11),
    "wrong names": lambda books: _spoil_names(books.idle),
    "is named and its parent is not": lambda books: books.idle.names.extend(bytes(32)),
    "wrongly filed": lambda books: setattr(books.idle, "keep", Keep(1, 9.0)),
    "nodes ends some time": lambda books: setattr(books.idle, "keep", Keep(1, 9.0)),
    "was given back": lambda books: setattr(books.lease, "is_held", False),
    "another number": lambda books: books.manager._leases.held.clear(),
    "a root without a use": lambda books: books.manager.tree._root(Namespace("nobody")),
    "does not add up": lambda books: books.manager.pool._pins.clear(),
}


def _spoil_names(node: Node) -> None:
    names_of(node)
    node.names[0] ^= 1


def _clear_keys(node: Node | None) -> None:
    if node is not None:
        node.keys.clear()


def _stranger() -> Sequence:
    return Sequence(9, encode_tokens([1]), Namespace("w"), block_size=4)


@pytest.mark.parametrize("message", FALSIFICATIONS)
def test_each_contradiction_is_found_and_named(message: str) -> None:
    books = Books()
    FALSIFICATIONS[message](books)
    with pytest.raises(CensusFailed, match=message.strip()):
        books.manager.census()

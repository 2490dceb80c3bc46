"""Learned: what the eviction policy knows, saved beside the blocks and taken over after a restart.

One JSON object: ``version``, ``policy`` (its class) and ``api`` (the major version of the contract that it was written
for), ``written`` (wall clock), ``ends`` (the names of the last blocks of the runs that it tells of, whose keys are
their places in this list) and ``state``, which is the policy's own. It is taken over by the same class only, and
nothing in it is trusted: a policy that cannot do with it starts afresh.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from functools import cache

import msgspec

from ..errors import InvalidRequest
from ..policies.eviction.base import NAME_BYTES, Entry, Json
from ..storage.base import MOST_NOTES
from ..storage.naming import BlockName
from .choosing import Chosen, chosen
from .kv import CacheManager
from .kv.names import end_name, names_of
from .kv.node import Node
from .surroundings import Surroundings

VERSION = 1


class _Saved(msgspec.Struct, frozen=True):
    version: int
    policy: str
    api: int
    written: float
    ends: list[int]
    state: dict[str, msgspec.Raw]


class Learned:
    """The policy of one engine: which one it is, and what it has learned."""

    def __init__(self, cache: CacheManager, first: Chosen, outside: Surroundings) -> None:
        self._cache = cache
        self.is_back = False
        """Whether the policy in charge has what was saved in an earlier run."""
        self._chosen = first
        _, self._wall, self._logger, _ = outside

    def choose(self, spec: str) -> Chosen:
        """A new policy, that nobody asks yet.

        :raises PluginError: when it cannot be had.
        :raises InvalidRequest: when ``spec`` is no name.
        """
        if not isinstance(spec, str) or not spec:
            raise InvalidRequest(f"an eviction policy is chosen by its name or package.module:Class, not {spec!r:.80}")
        return chosen(spec, self._cache.pool.num_blocks, self._cache.quotas)

    def switch(self, to: Chosen) -> str:
        """From now on it is ``to``; returns the name of the one before. At a step edge."""
        before = self._cache.policy.name
        self._chosen, self.is_back = to, False
        self._cache.use_policy(to.policy)
        self._logger.info("the eviction policy was changed", policy=to.policy.name, before=before)
        return before

    def dump(self) -> bytes | None:
        """What is to be saved; ``None``: nothing. At a step edge."""
        kind = self._chosen
        if self._cache.policy.set_aside:
            return None
        ends = dict[int, int]()

        def key(entry: Entry) -> int:
            return ends.setdefault(_key(entry), len(ends))

        state = self._cache.policy.dump(key)
        try:
            if _is_empty(state):
                return None
            saved = {
                "version": VERSION,
                "policy": kind.kind,
                "api": kind.major,
                "written": self._wall(),
                "ends": list(ends),
                "state": state,
            }
            data = msgspec.json.encode(saved)
        except Exception as error:  # noqa: BLE001  # whatever the policy has put into it
            self._cache.policy.fault("dump", error)
            return None
        if len(data) <= MOST_NOTES:
            return data
        self._logger.warning("the state of the eviction policy is not saved", bytes=len(data), most=MOST_NOTES)
        return None

    def load(self, found: Sequence[bytes]) -> None:
        """Take over the newest of what was ``found`` that is of the same class as the policy in charge. At a step edge,
        when what can be cached again is. A policy that fails at it starts afresh.
        """
        kind, now = self._chosen, self._wall()
        fitting = [
            saved
            for data in found
            if (saved := _read(data)) is not None and (saved.policy, saved.api) == (kind.kind, kind.major)
        ]
        if not fitting or self._cache.policy.set_aside:
            return
        newest = max(fitting, key=lambda saved: min(saved.written, now))
        state: Mapping[str, Json] = {name: msgspec.json.decode(value) for name, value in newest.state.items()}
        self._cut(set(newest.ends))
        faults = self._cache.policy.all_faults
        self._cache.policy.load(state, self._finder(newest.ends))
        self.is_back = self._cache.policy.all_faults == faults
        if not self.is_back:
            self.switch(self.choose(kind.kind))

    def _cut(self, ends: Container[int]) -> None:
        """What was two runs and came back as one is cut again where one of them ended."""
        tree = self._cache.tree
        for node in list(tree.nodes()):
            cut = 0
            for number, name in enumerate(names_of(node)[:-1], 1):
                if _short(name) in ends:
                    tree.split(node, number - cut)
                    cut = number

    def _finder(self, ends: Sequence[int]) -> Callable[[int], Entry | None]:
        """Entries by their place in ``ends``. They are looked for when the first one is asked for."""

        @cache
        def entries() -> Mapping[int, Entry | None]:
            living = {_key(node): node for node in self._cache.tree.nodes()}
            return {number: living.get(end) for number, end in enumerate(ends)}

        return lambda key: entries().get(key)


def _is_empty(state: Json) -> bool:
    return isinstance(state, Mapping) and all(_is_empty(value) for value in state.values())


def _key(entry: Entry) -> int:
    """From the name of its last block, which is the same in the next process.

    :raises TypeError: when it is none of this cache.
    """
    if type(entry) is not Node or not entry.ids:
        raise TypeError(f"a key is for a living entry, not for {entry!r:.80}")
    return _short(end_name(entry))


def _short(name: BlockName) -> int:
    return int.from_bytes(name[-NAME_BYTES:], "little")


def _read(data: bytes) -> _Saved | None:
    try:
        saved = msgspec.json.decode(data, type=_Saved)
        for value in saved.state.values():  # so far nobody has looked at what is in them
            msgspec.json.decode(value)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return saved if saved.version == VERSION else None

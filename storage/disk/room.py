"""How the disk tier stays within its bound: it removes what is dead, rewrites what is half dead, evicts the rest."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from ..files.frame import ALIGN
from ..naming import BlockName
from .entries import Entry
from .folder import remove
from .state import DiskState
from .writer import BATCH_ROWS, DiskWriter, writable

_WORTH_SQUEEZING = 3  # a segment is rewritten when one part in so many is dead: the rest costs twice that much to copy


class DiskRoom:
    """Makes room in one folder. One thread at a time."""

    def __init__(self, state: DiskState, writer: DiskWriter, *, capacity: int, reserve: int, free_floor: int) -> None:
        """All in bytes. ``reserve``: kept free so that a segment can be rewritten; ``free_floor``: left free on the
        file system for others.
        """
        self._state = state
        self._writer = writer
        self._capacity = capacity
        self._reserve = reserve
        self._free_floor = free_floor

    def make(self, need: int, tokens_bytes: int, keep: frozenset[BlockName]) -> bool:
        """Make room for ``need`` bytes of frames, evicting if need be, none of ``keep``; whether there is room now.

        While others have filled the disk below the floor, the tier does not grow, and does not shrink either.

        :raises OSError, sqlite3.Error: when something could not be removed or rewritten.
        """
        if not self._could_fit(need, tokens_bytes) and not self._start_over(need, tokens_bytes):
            return False
        folder = self._state.folder.home
        free = self._state.fs.free_bytes(folder)
        freed_at = self._state.bytes - need
        floor = min(self._free_floor, free)
        while True:
            is_over = self._bytes_with(need, tokens_bytes) > self._capacity
            # bytes that a reader still has open are not free yet, but will be
            is_low = self._state.fs.free_bytes(folder) - need < floor and self._state.bytes > freed_at
            if not is_over and not is_low:
                return True
            if not self._free_some(need, keep, is_over=is_over):
                return False

    def drop_segment(self, keep: frozenset[BlockName]) -> bool:
        """Remove the oldest segment with which none of ``keep`` would go, and its blocks: what helps when the disk is
        full, since it writes nothing. Whether there was one.

        :raises OSError: when it cannot be removed; nothing is lost then.
        """
        state = self._state
        for number in sorted(state.segments.live, key=lambda each: (state.segments.live[each] > 0, each)):
            doomed = self._trees(state.entries.in_segment(number))
            if not any(entry.head.name in keep for entry in doomed):
                state.segments.drop(number)
                state.counters.evicted += sum(state.forget(entry) for entry in doomed)
                return True
        return False

    def free(self, wanted: int, keep: frozenset[BlockName]) -> None:
        """Remove the oldest segments until ``wanted`` bytes are free that were not.

        :raises OSError: when one cannot be removed.
        """
        until = self._state.segments.bytes - wanted
        while self._state.segments.bytes > until and self.drop_segment(keep):
            pass

    def remove_dead(self) -> bool:
        """Remove all segments in which nothing is of use; whether there were any."""
        dead = self._state.segments.dead()
        for number in dead:
            self._state.segments.drop(number)
        return bool(dead)

    def remove_strays(self) -> bool:
        """Remove what was left over or set aside; whether there was anything."""
        state = self._state
        before, state.stray_bytes = state.stray_bytes, 0
        for item in state.folder.strays():
            with contextlib.suppress(OSError):
                remove(state.fs, state.folder.home / item.name, item)
        state.stray_bytes = sum(item.bytes for item in state.folder.strays())
        return state.stray_bytes < before

    def remove_others(self, idle: float = 0.0) -> bool:
        """Remove folders of other identities that nobody has used for ``idle`` seconds; whether there were any."""
        state = self._state
        before = state.other_bytes
        for other in state.folder.others():
            if other.idle >= idle:
                with contextlib.suppress(OSError):
                    state.folder.remove_other(other)
        state.other_bytes = sum(other.bytes for other in state.folder.others())
        return state.other_bytes < before

    def compact(self) -> int:
        """Rewrite every segment that has dead bytes in it, one at a time; returns how many there were."""
        state = self._state
        wasteful = [number for number in list(state.segments.sizes) if state.segments.waste(number) > 0]
        for number in wasteful:
            self._writer.compact(number)
        self.remove_dead()
        return len(wasteful)

    def _free_some(self, need: int, keep: frozenset[BlockName], *, is_over: bool) -> bool:
        """One step towards more room; whether there was any left to take."""
        state = self._state
        if self.remove_dead() or (state.stray_bytes and self.remove_strays()):
            return True
        if state.other_bytes and self.remove_others():
            return True
        return (self._squeeze() or self._evict(need, keep)) if is_over else self.drop_segment(keep)

    def _squeeze(self) -> bool:
        segments = self._state.segments
        number = max(segments.sizes, key=segments.waste, default=None)
        if number is None or segments.waste(number) * _WORTH_SQUEEZING < segments.sizes[number]:
            return False
        self._writer.compact(number)
        return True

    def _evict(self, need: int, keep: frozenset[BlockName]) -> bool:
        freed = 0
        while freed < max(need, self._reserve // 4) and (entry := self._state.entries.coldest(keep)) is not None:
            self._state.strike(entry)
            self._state.counters.evicted += 1
            freed += entry.location.length
        return freed > 0

    def _trees(self, entries: Iterable[Entry]) -> list[Entry]:
        """With all that comes after them here: nobody could reach that any more."""
        found = {id(entry): entry for entry in entries}
        waiting = list(found.values())
        while waiting:
            each = waiting.pop()
            below = self._state.entries.children(each.shelf, each.head.name)
            fresh = {id(child): child for child in below if id(child) not in found}
            found |= fresh
            waiting += fresh.values()
        return list(found.values())

    def _start_over(self, need: int, tokens_bytes: int) -> bool:
        """A database never gets smaller by itself. When it alone is too large (the bound is a smaller one now), all
        goes. Whether ``need`` fits then.
        """
        while self.drop_segment(frozenset()):
            pass
        self._writer.flush()
        writable(self._state).scrub()
        return self._could_fit(need, tokens_bytes)

    def _could_fit(self, need: int, tokens_bytes: int) -> bool:
        """Whether it would fit if nothing else were there."""
        return need + self._overhead(tokens_bytes) <= self._capacity

    def _bytes_with(self, need: int, tokens_bytes: int) -> int:
        state = self._state
        others = state.notes_bytes + state.stray_bytes + state.other_bytes
        return state.segments.bytes + others + need + self._overhead(tokens_bytes)

    def _overhead(self, tokens_bytes: int) -> int:
        return self._reserve + ALIGN + writable(self._state).room(BATCH_ROWS, tokens_bytes)

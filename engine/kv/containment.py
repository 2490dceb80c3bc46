"""ContainedPolicy: a policy in a box. What it raises is counted and reported, never passed on.

So is a call that takes longer than it may: it is noticed when it returns, and what came out of it is not used. A call
that never returns holds up the loop, and with it the engine: nothing inside a process can interrupt it. The watchdog of
the loop reports that (:meth:`~octavo.engine.loop.StepLoop.watch`).

A policy that breaks its contract again and again is set aside: it hears of nothing any more, and the least recently
used goes until another policy is chosen. A policy without a fault for a while is trusted as on its first day.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping

from ...policies.eviction.base import Entry, EvictionPolicy, Json, Returned, Tail
from ...telemetry import names as shown_as
from ...telemetry.record import NO_TRACK, Track
from .node import Node
from .standby import Standby

WINDOW = 64
"""Calls in a row that are looked at: long enough that one slow turn of the machine is forgotten, short enough that a
policy which fails one time in ten is found out within seconds."""
MOST_FAULTS = 8
"""Faults among them with which a policy is set aside. One, such as a slow call while the machine was busy, is none of
its doing; eight in 64 are no accident."""
STAND_IN = "Lru"
"""Under what name evictions show while a policy is set aside."""
SAMPLED = 8
"""One event in so many is timed while all is well: looking at the clock twice takes as long as many an event."""
VICTIMS = "victims"


class _Record:
    """The last faults among calls of one kind, by number of the call."""

    __slots__ = ("_faults",)

    def __init__(self) -> None:
        self._faults: deque[int] = deque((-WINDOW,), maxlen=MOST_FAULTS)

    def is_clean(self, call: int) -> bool:
        """Whether there was no fault for a while."""
        return call - self._faults[-1] > WINDOW

    def failed(self, call: int) -> bool:
        """Note a fault; whether it is one too many."""
        self._faults.append(call)
        return len(self._faults) == MOST_FAULTS and call - self._faults[0] < WINDOW


class _Nobody(EvictionPolicy):
    """Hears and says nothing: who is told and asked while the policy is set aside."""

    def victims(self, count: int, now: float) -> Iterator[Entry | Tail]:
        return iter(())


class ContainedPolicy(EvictionPolicy):
    """Passes events on to ``policy``; ``on_fault(where, error)`` hears of each breach of its contract."""

    name: str = ""
    """Who chooses: the policy, or who stands in for it."""
    wants_returns: bool = False
    """As the policy."""

    def __init__(
        self,
        policy: EvictionPolicy,
        on_fault: Callable[[str, BaseException | str], None],
        *,
        clock: Callable[[], float],
        timeout: float = math.inf,
        background: Track = NO_TRACK,
        standby: Callable[[Mapping[Node, None]], Standby] = Standby,
    ) -> None:
        """``timeout``: seconds that one call may take, each entry that ``victims`` names being one. Of events, one in
        ``SAMPLED`` is timed, and all of them for a while after a fault. ``background``: where faults are noted; those
        of ``victims`` are on the eviction itself. ``standby(candidates)``: who goes while the policy is of no use.
        """
        super().__init__(policy.capacity)
        self.faults: Counter[str] = Counter()
        """By name of the policy, since the start."""
        self.all_faults = 0
        """Of all policies so far."""
        self.last_fault = ""
        """Where the newest one was and what, in short."""
        self._on_fault = on_fault
        self._clock = clock
        self._timeout = timeout
        self._background = background
        self._make_standby = standby
        self.use(policy)

    def use(self, policy: EvictionPolicy) -> None:
        """From now on it is ``policy``, which starts without a fault. What is cached has to be told to it."""
        self.policy = policy
        self.set_aside = False
        """Whether it is asked and told nothing any more."""
        self._heard = policy
        self._standby: Standby | None = None
        self._told = self._asked = 0
        """Events and choices so far."""
        self._timed_at = SAMPLED if self._timeout < math.inf else math.inf
        """Number of the next event that is timed."""
        self._events, self._choices = _Record(), _Record()
        self._own_name = self.name = str(policy.name)
        self.wants_requests, self.wants_returns = bool(policy.wants_requests), bool(policy.wants_returns)

    @property
    def discarded(self) -> str | None:
        """Name of the policy that is set aside; ``None``: it is not."""
        return self._own_name if self.set_aside else None

    def fault(self, where: str, error: BaseException | str) -> None:
        """Count and report one breach of the contract; with too many the policy is set aside."""
        self.faults[self._own_name] += 1
        self.all_faults += 1
        self.last_fault = f"{where}: {error if isinstance(error, str) else type(error).__name__}"
        self.report(where, error)
        self._note(where)
        is_choice = where == VICTIMS
        is_too_much = self._choices.failed(self._asked) if is_choice else self._events.failed(self._told)
        if is_too_much and not self.set_aside:
            self.set_aside, self._heard, self.name = True, _Nobody(self.capacity), STAND_IN
            self.wants_requests = self.wants_returns = False
            told = f"{MOST_FAULTS} faults within {WINDOW} calls: {STAND_IN} decides until another policy is chosen"
            self.report(f"eviction policy {self._own_name} is set aside", told)

    def report(self, where: str, error: BaseException | str) -> None:
        """Tell of a fault that is not the policy's."""
        self._on_fault(where, error)

    def _note(self, where: str) -> None:
        if where != VICTIMS and self._background.is_on:
            now = self._clock()
            shown = {shown_as.POLICY: self._own_name, shown_as.POLICY_FAULT: self.last_fault}
            self._background.act(shown_as.POLICY_FAULTED, now, now, shown)

    def least_recently_used(self, candidates: Mapping[Node, None]) -> Node | None:
        """Who goes instead of what the policy names; ``candidates``: of the whole tree. O(n) the first time after a
        while, O(log n) from then on.
        """
        if self._standby is None:
            self._standby = self._make_standby(candidates)
        return self._standby.first()

    # events

    # those on the path of every request do what ``_tell`` does themselves

    def on_insert(self, entry: Entry, now: float) -> None:
        self._told += 1
        if self._told >= self._timed_at:
            self._tell_timed("on_insert", self._heard.on_insert, entry, now)
            return
        try:
            self._heard.on_insert(entry, now)
        except BaseException as error:  # noqa: BLE001  # a plug-in may raise anything
            self._failed("on_insert", error)

    def on_extend(self, entry: Entry, blocks: int, now: float) -> None:
        self._tell("on_extend", self._heard.on_extend, entry, blocks, now)

    def on_split(self, upper: Entry, lower: Entry, now: float) -> None:
        self._tell("on_split", self._heard.on_split, upper, lower, now)

    def on_hit(self, entry: Entry, now: float) -> None:
        self._told += 1
        if self._told >= self._timed_at:
            self._tell_timed("on_hit", self._heard.on_hit, entry, now)
            return
        try:
            self._heard.on_hit(entry, now)
        except BaseException as error:  # noqa: BLE001  # as there
            self._failed("on_hit", error)

    def on_candidate(self, entry: Entry, now: float) -> None:
        if self._standby is not None and isinstance(entry, Node):
            self._standby.offer(entry)
        self._told += 1
        if self._told >= self._timed_at:
            self._tell_timed("on_candidate", self._heard.on_candidate, entry, now)
            return
        try:
            self._heard.on_candidate(entry, now)
        except BaseException as error:  # noqa: BLE001  # as there
            self._failed("on_candidate", error)

    def on_held(self, entry: Entry) -> None:
        self._tell("on_held", self._heard.on_held, entry)

    def on_evict(self, entry: Entry, blocks: int, now: float) -> object:
        self._told += 1
        if self._told >= self._timed_at:
            return self._tell_timed("on_evict", self._heard.on_evict, entry, blocks, now)
        try:
            return self._heard.on_evict(entry, blocks, now)
        except BaseException as error:  # noqa: BLE001  # as there
            self._failed("on_evict", error)
            return None

    def on_forget(self, entry: Entry) -> None:
        self._tell("on_forget", self._heard.on_forget, entry)

    def on_ghost_hit(self, entry: Entry, returned: Returned, now: float) -> None:
        self._tell("on_ghost_hit", self._heard.on_ghost_hit, entry, returned, now)

    def on_request(self, number: int, names: bytes, now: float) -> None:
        self._tell("on_request", self._heard.on_request, number, names, now)

    def on_complete(self, number: int, names: bytes, now: float) -> None:
        self._tell("on_complete", self._heard.on_complete, number, names, now)

    # state, which may take its time: it is asked for when snapshots are made

    def dump(self, key: Callable[[Entry], int]) -> Mapping[str, Json]:
        """Empty when it fails."""
        state = self._call("dump", self._heard.dump, key)
        if state is None or isinstance(state, Mapping):
            return state or {}
        self.fault("dump", f"returned {type(state).__name__}, no mapping")
        return {}

    def load(self, state: Mapping[str, Json], entry: Callable[[int], Entry | None]) -> None:
        self._call("load", self._heard.load, state, entry)

    # choosing

    def victims(self, count: int, now: float) -> Iterator[Entry | Tail]:
        """What the policy names, whatever that is, until it fails, and nothing while it is set aside."""
        self._asked += 1
        if self._standby is not None and self._choices.is_clean(self._asked):
            self._standby = None  # nobody needed it for a while, and keeping it up to date costs
        clock, named = self._clock, None
        try:
            while not self.set_aside:
                began = clock()
                try:
                    if named is None:
                        named = iter(self._heard.victims(count, now))
                    entry = next(named, None)
                except BaseException as error:  # noqa: BLE001  # as above
                    self._failed(VICTIMS, error)
                    return
                if (seconds := clock() - began) > self._timeout:
                    self._was_slow(VICTIMS, seconds)
                    return
                if entry is None:
                    return
                yield entry
        finally:  # whatever has become of it: nobody else would hear what closing it raises
            if (close := getattr(named, "close", None)) is not None:
                began = clock()
                try:
                    close()
                except BaseException as error:  # noqa: BLE001  # as above
                    self._failed(VICTIMS, error)
                if (seconds := clock() - began) > self._timeout:
                    self._was_slow(VICTIMS, seconds)

    def _tell(self, where: str, event: Callable[..., object], *args: object) -> object:
        """What comes of an event; ``None`` when it fails."""
        self._told += 1
        if self._told >= self._timed_at:
            return self._tell_timed(where, event, *args)
        return self._call(where, event, *args)

    def _tell_timed(self, where: str, event: Callable[..., object], *args: object) -> object:
        """The same of one of those that are timed."""
        self._timed_at = self._told + (SAMPLED if self._events.is_clean(self._told) else 1)
        return self._timed(where, event, *args)

    def _timed(self, where: str, call: Callable[..., object], *args: object) -> object:
        """What comes of a call within the time; ``None`` otherwise."""
        began = self._clock()
        answer = self._call(where, call, *args)
        seconds = self._clock() - began
        if seconds <= self._timeout:
            return answer
        self._was_slow(where, seconds)
        return None

    def _call(self, where: str, call: Callable[..., object], *args: object) -> object:
        try:
            return call(*args)
        except BaseException as error:  # noqa: BLE001  # as above
            self._failed(where, error)
            return None

    def _failed(self, where: str, error: BaseException) -> None:
        if isinstance(error, KeyboardInterrupt):  # the user's, who wants to stop everything
            raise error
        self.fault(where, error)

    def _was_slow(self, where: str, seconds: float) -> None:
        self._timed_at = self._told + 1
        self.fault(where, f"took {seconds:.3g} s, more than {self._timeout:g}")

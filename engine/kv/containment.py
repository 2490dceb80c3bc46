"""ContainedPolicy: a policy in a box. What it raises is counted and reported, never passed on."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ...policies.eviction.base import Entry, EvictionPolicy, Returned


class ContainedPolicy(EvictionPolicy):
    """Passes events on to ``policy``; ``on_fault(where, error)`` hears of each breach of its contract."""

    def __init__(self, policy: EvictionPolicy, on_fault: Callable[[str, BaseException | str], None]) -> None:
        super().__init__(policy.capacity)
        self.policy = policy
        self.faults = 0
        self._on_fault = on_fault

    def fault(self, where: str, error: BaseException | str) -> None:
        """Count and report one breach of the contract."""
        self.faults += 1
        self.report(where, error)

    def report(self, where: str, error: BaseException | str) -> None:
        """Tell of a fault that is not the policy's."""
        self._on_fault(where, error)

    def on_insert(self, entry: Entry, now: float) -> None:
        self._tell("on_insert", self.policy.on_insert, entry, now)

    def on_extend(self, entry: Entry, blocks: int, now: float) -> None:
        self._tell("on_extend", self.policy.on_extend, entry, blocks, now)

    def on_split(self, upper: Entry, lower: Entry, now: float) -> None:
        self._tell("on_split", self.policy.on_split, upper, lower, now)

    def on_hit(self, entry: Entry, now: float) -> None:
        self._tell("on_hit", self.policy.on_hit, entry, now)

    def on_candidate(self, entry: Entry, now: float) -> None:
        self._tell("on_candidate", self.policy.on_candidate, entry, now)

    def on_held(self, entry: Entry) -> None:
        self._tell("on_held", self.policy.on_held, entry)

    def on_evict(self, entry: Entry, blocks: int, now: float) -> object:
        return self._tell("on_evict", self.policy.on_evict, entry, blocks, now)

    def on_ghost_hit(self, entry: Entry, returned: Returned, now: float) -> None:
        self._tell("on_ghost_hit", self.policy.on_ghost_hit, entry, returned, now)

    def victims(self, count: int, now: float) -> Iterator[Entry]:
        try:
            yield from self.policy.victims(count, now)
        except Exception as error:  # noqa: BLE001  # as below
            self.fault("victims", error)

    def _tell(self, where: str, event: Callable[..., object], *args: object) -> object:
        try:
            return event(*args)
        except Exception as error:  # noqa: BLE001  # a plug-in may raise anything
            self.fault(where, error)
            return None

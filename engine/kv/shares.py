"""TenantShares: an eviction policy for each group of tenants, and quotas between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, closing
from hashlib import blake2b

from ...policies.eviction.base import Entry, EvictionPolicy, Json, Returned, Tail
from .quotas import Quotas

KEY_BYTES = 8


class TenantShares(EvictionPolicy):
    """The group that is furthest beyond its quota gives first, and what it gives, a policy of its own says. Only when
    nobody who is beyond his quota has a candidate left, others give: those with most of their quota in use.

    O(1) per event on top of the policies, O(groups) per victim. Every policy hears of all requests, as their events do
    not say whose they are.
    """

    def __init__(self, capacity: int, make: Callable[[int], EvictionPolicy], quotas: Quotas) -> None:
        """``make(capacity)`` gives the policy of one group."""
        super().__init__(capacity)
        self._quotas = quotas
        self._policies = {group: make(capacity) for group in quotas.blocks}
        self._groups: dict[Entry, str] = {}
        self._candidates: Counter[str] = Counter()
        self._evictions = 0
        any_policy = next(iter(self._policies.values()))
        self.wants_requests, self._name = any_policy.wants_requests, any_policy.name

    @property
    def name(self) -> str:
        """Of the policies underneath: that is what users chose."""
        return self._name

    def on_insert(self, entry: Entry, now: float) -> None:
        group = self._groups[entry] = self._quotas.group(entry.tenant)
        self._policies[group].on_insert(entry, now)

    def on_extend(self, entry: Entry, blocks: int, now: float) -> None:
        self._policy(entry).on_extend(entry, blocks, now)

    def on_split(self, upper: Entry, lower: Entry, now: float) -> None:
        self._groups[upper] = self._groups[lower]
        self._policy(lower).on_split(upper, lower, now)

    def on_hit(self, entry: Entry, now: float) -> None:
        self._policy(entry).on_hit(entry, now)

    def on_candidate(self, entry: Entry, now: float) -> None:
        self._candidates[self._groups[entry]] += 1
        self._policy(entry).on_candidate(entry, now)

    def on_held(self, entry: Entry) -> None:
        self._candidates[self._groups[entry]] -= 1
        self._policy(entry).on_held(entry)

    def on_evict(self, entry: Entry, blocks: int, now: float) -> object:
        self._evictions += 1
        policy = self._policy(entry)
        if entry.blocks == 0:
            self._candidates[self._groups.pop(entry)] -= 1
        return policy.on_evict(entry, blocks, now)

    def on_forget(self, entry: Entry) -> None:
        policy = self._policy(entry)
        del self._groups[entry]
        policy.on_forget(entry)

    def on_ghost_hit(self, entry: Entry, returned: Returned, now: float) -> None:
        self._policy(entry).on_ghost_hit(entry, returned, now)

    def on_request(self, number: int, names: bytes, now: float) -> None:
        for policy in self._policies.values():
            policy.on_request(number, names, now)

    def on_complete(self, number: int, names: bytes, now: float) -> None:
        for policy in self._policies.values():
            policy.on_complete(number, names, now)

    def dump(self, key: Callable[[Entry], int]) -> Mapping[str, Json]:
        """By a digest of the tenant: names of tenants do not get into files."""
        return {_digest(group): policy.dump(key) for group, policy in self._policies.items()}

    def load(self, state: Mapping[str, Json], entry: Callable[[int], Entry | None]) -> None:
        for group, policy in self._policies.items():
            saved = state.get(_digest(group), {})
            if not isinstance(saved, Mapping):
                raise TypeError(f"the state of a tenant's policy must be a mapping, not {type(saved).__name__}")
            policy.load(saved, self._among(group, entry))

    def victims(self, count: int, now: float) -> Iterator[Entry | Tail]:
        with ExitStack() as open_turns:
            turns: dict[str, Iterator[Entry | Tail]] = {}
            spent: set[str] = set()
            while (group := self._next(spent)) is not None:
                if group not in turns:
                    turns[group] = open_turns.enter_context(closing(self._turn(group, count, now)))
                named = next(turns[group], None)
                if named is None:
                    spent.add(group)
                else:
                    yield named

    def _next(self, spent: set[str]) -> str | None:
        ready = [group for group, candidates in self._candidates.items() if candidates and group not in spent]
        return max(ready, key=self._quotas.excess, default=None)

    def _turn(self, group: str, count: int, now: float) -> Generator[Entry | Tail, None, None]:
        """What the policy of ``group`` names, asked again as long as that gets anywhere."""
        evictions = -1
        while evictions != self._evictions and self._candidates[group]:
            evictions = self._evictions
            yield from self._policies[group].victims(count, now)

    def _policy(self, entry: Entry) -> EvictionPolicy:
        return self._policies[self._groups[entry]]

    def _among(self, group: str, entry: Callable[[int], Entry | None]) -> Callable[[int], Entry | None]:
        def find(key: int) -> Entry | None:
            found = entry(key)
            return found if found is not None and self._groups.get(found) == group else None

        return find


def _digest(group: str) -> str:
    return blake2b(group.encode(errors="surrogatepass"), digest_size=KEY_BYTES).hexdigest()

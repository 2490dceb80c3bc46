from __future__ import annotations

from octavo_tenant_fair import TenantFairLru

from octavo.policies.eviction import Entry, EvictionPolicy
from octavo.policies.testing import EvictionPolicyContract, PrefixModel


class TestTenantFairLru(EvictionPolicyContract):
    """All that every policy must hold."""

    def make(self, capacity: int) -> EvictionPolicy:
        return TenantFairLru(capacity)


class Town:
    """A cache that several tenants share."""

    def __init__(self) -> None:
        self.model = PrefixModel(TenantFairLru(64), new_entry=self._new)
        self._tenant = ""

    def _new(self, blocks: int, depth: int, insert_time: float, last_use: float) -> Entry:
        return Entry(blocks, depth, insert_time, last_use, tenant=self._tenant)

    def cache(self, tenant: str, blocks: int) -> Entry:
        self._tenant = tenant
        entry = self.model.insert(blocks)
        self.model.release(entry)
        return entry

    def victims(self, count: int) -> list[str]:
        """Whose blocks go, one by one."""
        return [act.entry.tenant for act in self.model.evict(count, most=1)]


def test_who_fills_the_cache_makes_room() -> None:
    town = Town()
    for _ in range(3):
        town.cache("quiet", 1)
    for _ in range(9):
        town.cache("loud", 2)
    assert town.victims(15) == ["loud"] * 15
    assert sorted(town.victims(6)) == ["loud"] * 3 + ["quiet"] * 3


def test_within_a_tenant_the_least_recently_used_goes() -> None:
    town = Town()
    first, second, third = (town.cache("one", 1) for _ in range(3))
    town.model.glance(first)
    assert [act.entry for act in town.model.evict(3)] == [second, third, first]


def test_what_is_held_counts_and_cannot_go() -> None:
    town = Town()
    held = town.cache("busy", 5)
    town.model.hit(held)
    kept = town.cache("busy", 1)
    other = town.cache("idle", 2)
    assert [act.entry for act in town.model.evict(3)] == [kept, other]
    assert town.model.entries == [held]

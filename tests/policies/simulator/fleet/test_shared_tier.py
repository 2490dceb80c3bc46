"""The store that replicas share, against a list."""

from __future__ import annotations

import math

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from octavo.policies.simulator.fleet.setting import TierSetting
from octavo.policies.simulator.fleet.tier import Line, SharedTier

PATHS = st.lists(st.sampled_from([bytes([letter]) for letter in b"abcdefgh"]), max_size=5, unique=True)


class TierMachine(RuleBasedStateMachine):
    @initialize(capacity=st.none() | st.integers(1, 6), lost_at=st.sampled_from([math.inf, 8.0]))
    def open(self, capacity: int | None, lost_at: float) -> None:
        setting = TierSetting(capacity, token_bytes=1, store_bytes_per_second=8.0, lost_at=lost_at)
        self.tier = SharedTier(setting, block_tokens=4)
        self.links = {rate: Line(rate) for rate in (4.0, math.inf)}
        self.link_free_at = 0.0  # of the slow one
        self.capacity, self.lost_at = capacity, lost_at
        self.model: list[bytes] = []  # the least recently used first
        self.now = 0.0
        self.up = self.down = 0
        self.free_at = 0.0

    @rule(seconds=st.sampled_from([0.0, 0.5, 3.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        if self.now >= self.lost_at:
            self.model.clear()

    @rule(names=PATHS)
    def write(self, names: list[bytes]) -> None:
        self.tier.write(names, self.now)
        if self.now >= self.lost_at:
            return
        before = self.up
        for name in reversed(names):
            self.up += name not in self.model
            self.use([name])
            if self.capacity is not None:
                self.model = self.model[-self.capacity :]
        self.free_at = max(self.free_at, self.now) + (self.up - before) * 4 / 8.0

    @rule(names=PATHS, rate=st.sampled_from([4.0, math.inf]))
    def load(self, names: list[bytes], rate: float) -> None:
        found = self.tier.leading(names, self.now)
        assert found == next((at for at, name in enumerate(names) if name not in self.model), len(names))
        done = self.tier.load(names[:found], self.now, self.links[rate])
        self.free_at = max(self.free_at, self.now) + found * 4 / 8.0
        if rate == math.inf:
            assert done == self.free_at
        else:
            self.link_free_at = max(self.link_free_at, self.now) + found * 4 / rate
            assert done == max(self.free_at, self.link_free_at)
        self.down += found
        self.use(names[:found])

    def use(self, names: list[bytes]) -> None:
        self.model = [name for name in self.model if name not in names] + names[::-1]

    @invariant()
    def nothing_is_lost_on_the_way(self) -> None:
        if hasattr(self, "tier"):
            assert self.tier.blocks_up == self.up == len(self.tier) + self.tier.dropped
            assert self.tier.blocks_down == self.down
            assert self.tier.leading(self.model, self.now) == len(self.model) == len(self.tier)


TestTier = TierMachine.TestCase
TestTier.settings = settings(max_examples=100, stateful_step_count=20, deadline=None)

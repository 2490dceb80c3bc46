"""Whole caches of pages of one size, as the papers write them down: nothing held, no tree, room is made one by one."""

from __future__ import annotations

import math


def fifo_hits(capacity: int, pages: list[int]) -> list[bool]:
    queue: list[int] = []
    hits: list[bool] = []
    for page in pages:
        hits.append(page in queue)
        if page not in queue:
            queue = [*queue, page][-capacity:]
    return hits


def lru_2_hits(capacity: int, pages: list[int]) -> list[bool]:
    """History is kept of all pages; no references are correlated."""
    cached: set[int] = set()
    times: dict[int, list[float]] = {}
    hits: list[bool] = []
    for now, page in enumerate(pages):
        hits.append(page in cached)
        if page not in cached and len(cached) == capacity:
            cached.remove(min(cached, key=lambda other: ([-math.inf, *times[other]][-2], times[other][-1])))
        cached.add(page)
        times.setdefault(page, []).append(now)
    return hits


def slru_hits(capacity: int, pages: list[int]) -> list[bool]:
    probation: list[int] = []
    protected: list[int] = []
    hits: list[bool] = []
    for page in pages:
        hits.append(page in probation + protected)
        if page in probation + protected:
            (probation if page in probation else protected).remove(page)
            protected.append(page)
            if len(protected) > int(0.8 * capacity):
                probation.append(protected.pop(0))
            continue
        if len(probation + protected) == capacity:
            (probation or protected).pop(0)
        probation.append(page)
    return hits


class TwoQCache:
    """Section 3.2 of the paper, "2Q, full version"."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.kin, self.kout = max(capacity // 4, 1), max(capacity // 2, 1)
        self.a1_in: list[int] = []
        self.a1_out: list[int] = []
        self.am: list[int] = []

    def use(self, page: int) -> bool:
        if page in self.am:
            self.am.remove(page)
            self.am.append(page)
            return True
        if page in self.a1_out:
            self.reclaim()
            self.a1_out = [other for other in self.a1_out if other != page]
            self.am.append(page)
            return False
        if page in self.a1_in:
            return True
        self.reclaim()
        self.a1_in.append(page)
        return False

    def reclaim(self) -> None:
        if len(self.a1_in + self.am) < self.capacity:
            return
        if len(self.a1_in) > self.kin or not self.am:
            self.a1_out.append(self.a1_in.pop(0))
            if len(self.a1_out) > self.kout:
                self.a1_out.pop(0)
        else:
            self.am.pop(0)


class ArcCache:
    """Figure 4 of the paper, except that the target moves after the replacement instead of before, and that it is not
    known then whether the page comes from B2: the order in which an engine does it."""

    def __init__(self, capacity: int) -> None:
        self.c = capacity
        self.p = 0.0
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1: list[int] = []
        self.b2: list[int] = []

    def use(self, page: int) -> bool:
        if page in self.t1 + self.t2:  # case I
            (self.t1 if page in self.t1 else self.t2).remove(page)
            self.t2.append(page)
            return True
        if page in self.b1:  # case II
            self.replace()
            self.p = min(self.p + max(len(self.b2) / len(self.b1), 1.0), float(self.c))
            self.b1.remove(page)
            self.t2.append(page)
        elif page in self.b2:  # case III
            self.replace()
            self.p = max(self.p - max(len(self.b1) / len(self.b2), 1.0), 0.0)
            self.b2.remove(page)
            self.t2.append(page)
        else:  # case IV
            self.make_room_for_a_new_one()
            self.t1.append(page)
        return False

    def make_room_for_a_new_one(self) -> None:
        if len(self.t1 + self.b1) == self.c:
            if len(self.t1) < self.c:
                self.b1.pop(0)
                self.replace()
            else:
                self.t1.pop(0)
        elif len(self.t1 + self.t2 + self.b1 + self.b2) >= self.c:
            if len(self.t1 + self.t2 + self.b1 + self.b2) == 2 * self.c:
                self.b2.pop(0)
            self.replace()

    def replace(self) -> None:
        if self.t1 and len(self.t1) > self.p:
            self.b1.append(self.t1.pop(0))
        elif self.t2:
            self.b2.append(self.t2.pop(0))
        else:
            self.b1.append(self.t1.pop(0))

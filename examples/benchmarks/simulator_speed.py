"""How fast the simulator is on ``lru``, beside libcachesim driving an LRU written in Python.

    pip install 'octavo[bench]'
    python examples/benchmarks/simulator_speed.py
    python examples/benchmarks/simulator_speed.py --trace examples/traces/ragpulse.jsonl.xz --share 0.05 --repeats 5

Both get the same blocks in the same order: request by request, each from the root of its prefix on, one at a time,
nothing overlapping. Both ask policy code in Python: Octavo the ``lru`` of the live engine, libcachesim a
``PluginCache`` with an ``OrderedDict``. libcachesim is shown twice: fed from Python, block by block, and fed by its own
reader in C from its own binary format, which is the fastest way into it. Octavo is shown twice too: from the
compressed trace file, and from requests that lie in memory as the blocks of the other side do.

The hit ratios say that both do the same work. They differ a little on purpose: Octavo evicts tails of prefixes and
counts a block as found only when all before it are; a flat LRU evicts beginnings as well, and finds blocks that no
engine could use.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.policies.eviction.lru import Lru
from octavo.policies.simulator.readers import open_trace
from octavo.policies.simulator.replay import replay
from octavo.policies.simulator.service import ATOMIC
from octavo.policies.simulator.trace import Request, Trace

try:
    import libcachesim
except ImportError:
    libcachesim = None

TRACE = Path(__file__).parents[1] / "traces" / "mooncake_conversation.jsonl.xz"
RECORD = np.dtype([("time", "<u4"), ("id", "<u8"), ("size", "<u4"), ("next", "<i8")])
"""One request of libcachesim's ``oracleGeneral`` format."""
SMALL_TABLE = 18
"""Its hash table begins with 2 ** 18 places; the default of 2 ** 24 costs it half a second before the first request."""

Blocks = npt.NDArray[np.uint64]
LruState = OrderedDict[int, None]


class Measured(NamedTuple):
    """One way through the trace."""

    way: str
    seconds: list[float]
    hit_ratio: float


class InMemory(Trace):
    """The requests of a trace, read beforehand."""

    def __init__(self, trace: Trace) -> None:
        self.info = trace.info
        self._requests = list(trace)
        self.requests = len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)


def block_sequence(trace: Trace) -> Blocks:
    """Every block that is asked for, in order, as numbers from 1 on."""
    names = np.frombuffer(b"".join(request.names for request in trace), dtype="<u8")
    return np.unique(names, return_inverse=True)[1].astype(np.uint64) + np.uint64(1)


def octavo_lru(trace: Trace, capacity: int) -> float:
    """Hit ratio of the simulator."""
    return replay(trace, Lru(capacity), capacity, ATOMIC).hit_ratio


def plugin_lru(capacity: int) -> libcachesim.PluginCache:
    """An LRU in Python, the shortest that its interface allows."""

    def start(_: object) -> LruState:
        return OrderedDict()

    def hit(order: LruState, request: libcachesim.Request) -> None:
        order.move_to_end(request.obj_id)

    def miss(order: LruState, request: libcachesim.Request) -> None:
        order[request.obj_id] = None

    def evict(order: LruState, _: object) -> int:
        return order.popitem(last=False)[0]

    def remove(order: LruState, block: int) -> None:
        order.pop(block, None)

    def free(order: LruState) -> None:
        order.clear()

    return libcachesim.PluginCache(
        capacity, start, hit, miss, evict, remove, free, cache_name="lru in Python", hashpower=SMALL_TABLE
    )


def fed_from_python(blocks: Sequence[int], capacity: int) -> float:
    """Hit ratio of libcachesim, asked for one block after the other."""
    get = plugin_lru(capacity).get
    request = libcachesim.Request()
    request.obj_size = 1
    hits = 0
    for block in blocks:
        request.obj_id = block
        hits += get(request)
    return hits / len(blocks)


def fed_by_its_reader(file: Path, capacity: int) -> float:
    """Hit ratio of libcachesim with a file in its own format."""
    settings = libcachesim.ReaderInitParam(ignore_obj_size=True)
    reader = libcachesim.TraceReader(str(file), libcachesim.TraceType.ORACLE_GENERAL_TRACE, settings)
    missed, _ = plugin_lru(capacity).process_trace(reader)
    return 1.0 - float(missed)


def write_its_format(blocks: Blocks, file: Path) -> None:
    """The same blocks for its reader."""
    records = np.zeros(len(blocks), dtype=RECORD)
    records["time"], records["id"], records["size"], records["next"] = np.arange(len(blocks)), blocks, 1, -1
    records.tofile(file)


def measure(ways: dict[str, Callable[[], float]], repeats: int) -> list[Measured]:
    """Every way ``repeats`` times, in turns, so that what else the machine does meets all of them."""
    measured = {name: Measured(name, [], 0.0) for name in ways}
    for _ in range(repeats):
        for name, run in ways.items():
            start = time.perf_counter()
            ratio = run()
            measured[name].seconds.append(time.perf_counter() - start)
            measured[name] = measured[name]._replace(hit_ratio=ratio)
    return list(measured.values())


def ways_through(path: Path, share: float, folder: Path) -> tuple[dict[str, Callable[[], float]], str]:
    """What is measured, and on what."""
    trace = open_trace(path)
    in_memory = InMemory(trace)
    blocks = block_sequence(in_memory)
    unique = int(blocks.max())
    capacity = max(1, round(share * unique))
    numbers = blocks.tolist()
    file = folder / "blocks.oracleGeneral"
    write_its_format(blocks, file)
    ways: dict[str, Callable[[], float]] = {
        "octavo, from the file": lambda: octavo_lru(trace, capacity),
        "octavo, from memory": lambda: octavo_lru(in_memory, capacity),
        "libcachesim, fed from Python": lambda: fed_from_python(numbers, capacity),
        "libcachesim, fed by its reader": lambda: fed_by_its_reader(file, capacity),
    }
    what = f"{trace.info.name}: {len(blocks):,} block uses, {unique:,} different, capacity {capacity:,}"
    return ways, what


def report(measured: Sequence[Measured]) -> str:
    """Median and fastest seconds, and how many times longer the others took than Octavo from the file."""
    base = median(measured[0].seconds)
    lines = [f"{'':<32}{'median s':>10}{'fastest s':>11}{'ratio':>8}{'hit ratio':>11}"]
    for one in measured:
        middle, fastest = median(one.seconds), min(one.seconds)
        lines.append(f"{one.way:<32}{middle:>10.3f}{fastest:>11.3f}{middle / base:>8.2f}{one.hit_ratio:>11.4f}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, default=TRACE)
    parser.add_argument("--share", type=float, default=0.05, help="capacity, of the different blocks")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    if libcachesim is None:
        sys.exit("this comparison needs libcachesim: pip install 'octavo[bench]'")
    with tempfile.TemporaryDirectory() as folder:
        ways, what = ways_through(options.trace, options.share, Path(folder))
        print(what)
        print(report(measure(ways, options.repeats)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

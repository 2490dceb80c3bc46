"""Octavo beside the managers of other engines, for ``bookkeeping.py``."""

from __future__ import annotations

import sys
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from octavo.examples.benchmarks.bookkeeping_acts import one_round
    from octavo.examples.benchmarks.bookkeeping_peers import PEERS, Peer
    from octavo.examples.benchmarks.bookkeeping_sides import Octavo
    from octavo.examples.benchmarks.report import Sheet, Spread, Target, turns
else:
    sys.path.insert(0, str(Path(__file__).parent))  # this folder is no package
    from bookkeeping_acts import one_round
    from bookkeeping_peers import PEERS, Peer
    from bookkeeping_sides import Octavo
    from report import Sheet, Spread, Target, turns

LONG = 2_048
"""From so many tokens on octavo has to be 10 times faster than vLLM's manager, below 5 times."""
WARM_UP_TOKENS = 512
PEER_FOLDER = Path.home() / ".cache" / "octavo" / "peers"
PeerTimes: TypeAlias = "dict[tuple[int, str], dict[str, Spread]]"
"""Prompt length and act -> side -> medians of the rounds in microseconds."""


def measure_peers(names: list[str], folder: Path, lengths: list[int], rounds: int) -> PeerTimes:
    """Octavo and the managers of other engines, round by round in turn, on the same prompts."""
    values: dict[tuple[int, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with ExitStack() as open_peers:
        peers: dict[str, Peer] = {}
        for name in names:
            log = open_peers.enter_context(TemporaryFile("w+"))
            peers[name] = open_peers.enter_context(Peer(name, folder / name, log))
        sides = {"octavo": _octavo_round} | {name: peer.one_round for name, peer in peers.items()}
        for warm_up in (*reversed(sides.values()), *sides.values()):  # nobody is measured while others start
            warm_up(WARM_UP_TOKENS, 0)
        for tokens in lengths:
            seeds = dict.fromkeys(sides, 0)
            for name in turns(list(sides), rounds):
                seeds[name] += 1
                for act, microseconds in sides[name](tokens, seeds[name]).items():
                    values[tokens, act][name].append(microseconds)
    return {row: {name: Spread.of(each) for name, each in found.items()} for row, found in values.items()}


def peer_sheet(times: PeerTimes) -> Sheet:
    """With the ratio of each peer to octavo."""
    names = list(next(iter(times.values())))
    rows = [
        (
            f"{act} at {tokens}",
            *(sides[name].text(2) for name in names),
            *(f"{sides[name].over(sides['octavo']):.1f}" for name in names[1:]),
        )
        for (tokens, act), sides in times.items()
    ]
    return Sheet("Other engines' managers, us", ["act", *names, *(f"{name} / octavo" for name in names[1:])], rows)


def peer_targets(times: PeerTimes) -> list[Target]:
    """How many times faster than vLLM's manager each act has to be."""
    return [
        Target(f"{act} at {tokens} tokens, times faster than vllm", sides["vllm"].over(sides["octavo"]), limit)
        for (tokens, act), sides in times.items()
        if "vllm" in sides and not act.endswith("packed") and (limit := 5 if tokens < LONG else 10)
    ]


def installed_peers(folder: Path) -> tuple[list[str], list[str]]:
    """Names of the peers that have an environment in ``folder``, and a word on each that has none."""
    there = [name for name in PEERS if (folder / name / "bin" / "python").exists()]
    return there, [f"{name} skipped: no environment in {folder / name}" for name in PEERS if name not in there]


def _octavo_round(tokens: int, seed: int) -> dict[str, float]:
    return one_round(Octavo, tokens, seed)

"""Run as a script with a folder and names of families: jobs of two ranks, one after another. What each rank found is in
``JOB-RANK.json`` in the folder.

The ranks are forked from here, so that torch and Transformers are imported once for all of them.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # as torch has it

from octavo.tests.system.ranks_families import RANKS, Found, alone, families, pressed, refused, reread
from octavo.tests.system.ranks_faults import faults, frozen, killed, left_alone, stuck

LIMIT = 60.0
"""Seconds after which a rank that hangs is killed; no result depends on it."""
Job: TypeAlias = Callable[[Path, int], Found]

ALONE: tuple[Job, ...] = (alone, reread)
ORDER: tuple[Job, ...] = (alone, families, reread, pressed, refused, faults, stuck, killed, frozen, left_alone)


def run(job: Job, folder: Path) -> None:
    """Fork the ranks, and wait for them. They meet in a store that is kept here, as it is with ``torchrun``."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = 1 if job in ALONE else RANKS
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=be, args=(job, folder, rank, ranks, store.port)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT)
        process.kill()
        process.join()


def be(job: Job, folder: Path, rank: int, ranks: int, port: int) -> None:
    """One rank."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    os.environ.update({**where, "RANK": str(rank), "LOCAL_RANK": str(rank), "TORCHELASTIC_USE_AGENT_STORE": "True"})
    try:
        found = job(folder, rank)
    except BaseException:  # noqa: BLE001  # it is shown where the results are looked at
        found = {"failed": traceback.format_exc()}
    (folder / f"{job.__name__}-{rank}.json").write_text(json.dumps(found))


def main(folder: Path, families_asked: Sequence[str]) -> None:
    torch.set_num_threads(1)
    (folder / "families.json").write_text(json.dumps(families_asked))
    for job in ORDER:
        run(job, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

"""Tasks for tests of worker processes, which import them by name."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable


class Fragile:
    """Cannot be read in another process."""

    def __reduce__(self) -> tuple[type[int], tuple[str]]:
        return int, ("nonsense",)


def work(task: object, tell: Callable[[int], None]) -> object:
    """Twice the number; the words do what they say."""
    tell(1)
    if task == "raise":
        raise ValueError("no such number")
    if task == "exit":
        sys.exit("enough")
    if task == "die":
        os._exit(3)
    if task == "hang":
        tell(7)
        time.sleep(600)
    tell(2)
    return task * 2 if isinstance(task, int) else None

"""Small traces in files, for tests of what reads them."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

HEADER = {
    "format": "kvtrace-1",
    "name": "small",
    "block_tokens": 16,
    "arrivals": "absolute",
    "source": "",
    "commit": "",
    "license": "",
}


def write_small_trace(path: Path, requests: int = 120, seed: int = 1) -> Path:
    """Chats that come back with more, and some that do not: every policy has something to win and to lose."""
    random = Random(seed)  # noqa: S311  # not for secrets
    chats: list[list[list[int]]] = []
    next_id, lines = 0, [json.dumps(HEADER)]
    for number in range(requests):
        chat = random.choice(chats) if chats and random.random() < 0.6 else []
        if not chat:
            chats.append(chat)
        fresh = random.randint(1, 6)
        chat.append([next_id, fresh])
        next_id += fresh
        blocks = sum(count for _, count in chat)
        lines.append(json.dumps([number * 0.5, blocks * 16, random.randint(1, 80), -1, "", chat]))
    path.write_text("\n".join(lines) + "\n")
    return path

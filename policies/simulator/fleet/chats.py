"""Chats of several turns, made up: the workload of measured runs, without a file.

Every chat begins with the same system prompt. Each turn asks again with everything that was said so far and something
new, and is answered; what the answer leaves in the cache is there for the next turn.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from random import Random
from typing import NamedTuple

from ....errors import InvalidRequest
from ...eviction.base import NAME_BYTES
from ..lined import names_of_range
from ..trace import Request, Trace, TraceInfo

_CHAT_IDS = 2**24  # block ids that belong to one chat
FORM = "CHATS:TURNS or CHATS:FEWEST-MOST, and after colons system=, user=, answer=, block= (tokens), rate=, think="
"""Of what ``parse_chats`` reads."""


class Chats(NamedTuple):
    """What is said."""

    chats: int
    fewest_turns: int = 5
    most_turns: int = 5
    """Each chat has a number of turns between the two, all equally likely."""
    system_tokens: int = 64
    """Of the prompt that all share."""
    turn_tokens: int = 64
    """That a turn adds."""
    answer_tokens: int = 64
    chats_per_second: float = 1.0
    """That begin, at random moments (a Poisson process). Infinite: all at once."""
    think_seconds: float = 10.0
    """From one turn to the next, on average (exponentially distributed)."""
    block_tokens: int = 16
    seed: int = 0


def parse_chats(text: str, seed: int = 0) -> Chats:
    """``200:5`` or ``200:3-8:system=512:user=64:answer=128:rate=2:think=10:block=16``.

    :raises InvalidRequest: when it is something else.
    """
    numbers = {"system": "system_tokens", "user": "turn_tokens", "answer": "answer_tokens", "block": "block_tokens"}
    seconds = {"rate": "chats_per_second", "think": "think_seconds"}
    count, turns, *rest = *text.split(":"), ""
    try:
        fewest, _, most = turns.partition("-")
        chats = Chats(int(count), int(fewest), int(most or fewest), seed=seed)
        for name, _, value in (part.partition("=") for part in rest if part):
            field = {numbers[name]: int(value)} if name in numbers else {seconds[name]: float(value)}
            chats = chats._replace(**field)
    except (ValueError, KeyError) as error:
        raise InvalidRequest(f"{text!r} describes no chats: give {FORM}") from error
    return chats


class ChatTrace(Trace):
    """These chats as a trace. In memory: the chats that are going on."""

    def __init__(self, chats: Chats, name: str = "chats") -> None:
        """:raises InvalidRequest: when a number of ``chats`` is out of range."""
        _check(chats)
        self.info = TraceInfo(name, chats.block_tokens, "made up")
        self._chats = chats

    def __iter__(self) -> Iterator[Request]:
        chats, random = self._chats, Random(self._chats.seed)  # noqa: S311  # not for secrets
        going_on: list[tuple[float, int, int, int]] = []  # next turn, chat, number of the turn, turns
        start = 0.0
        for chat in range(chats.chats):
            start += random.expovariate(1.0) / chats.chats_per_second
            while going_on and going_on[0][0] <= start:
                yield self._next_turn(going_on, random)
            heapq.heappush(going_on, (start, chat, 0, random.randint(chats.fewest_turns, chats.most_turns)))
        while going_on:
            yield self._next_turn(going_on, random)

    def _next_turn(self, going_on: list[tuple[float, int, int, int]], random: Random) -> Request:
        now, chat, turn, turns = going_on[0]
        if turn + 1 < turns:
            think = random.expovariate(1.0) * self._chats.think_seconds
            heapq.heapreplace(going_on, (now + think, chat, turn + 1, turns))
        else:
            heapq.heappop(going_on)
        return self._request(now, chat, turn)

    def _request(self, now: float, chat: int, turn: int) -> Request:
        chats = self._chats
        tokens = chats.system_tokens + turn * (chats.turn_tokens + chats.answer_tokens) + chats.turn_tokens
        asked = tokens // chats.block_tokens
        kept = (tokens + chats.answer_tokens - 1) // chats.block_tokens  # the last token of an answer is never computed
        shared = min(chats.system_tokens // chats.block_tokens, asked)
        own = _range((chat + 1) * _CHAT_IDS + shared, max(kept, asked) - shared)
        names = _range(0, shared) + own
        return Request(
            now, tokens, chats.answer_tokens, names[: asked * NAME_BYTES], names[asked * NAME_BYTES :], session=chat
        )


def _range(first: int, count: int) -> bytes:
    return names_of_range(first, count) if count else b""


def _check(chats: Chats) -> None:
    if not (chats.chats >= 1 and 1 <= chats.fewest_turns <= chats.most_turns and chats.block_tokens >= 1):
        raise InvalidRequest("chats, their turns and the tokens of a block are 1 at least, the fewest turns first")
    if chats.system_tokens < 0 or chats.answer_tokens < 0 or chats.turn_tokens < 1:
        raise InvalidRequest("a turn adds a token at least; system prompt and answers have 0 or more")
    if not (chats.chats_per_second > 0 and 0 <= chats.think_seconds < math.inf):
        raise InvalidRequest("chats begin at a rate above 0, and a turn follows after 0 seconds or more")
    longest = chats.system_tokens + chats.most_turns * (chats.turn_tokens + chats.answer_tokens)
    if longest // chats.block_tokens >= _CHAT_IDS:
        raise InvalidRequest(f"a chat has {longest} tokens at most: these are more than {_CHAT_IDS} blocks")

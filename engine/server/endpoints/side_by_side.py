"""Several generations of one HTTP request, side by side: submitted together, read as one, ended together."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import NamedTuple

from ...generation import Generation
from ...request import FinishReason, RequestOutput
from ..errors import unavailable


class Heard(NamedTuple):
    """An output, and which of the generations it is from."""

    number: int
    output: RequestOutput


async def start_all(generations: Iterable[Generation]) -> None:
    """Submit them in this order, all or none.

    :raises RequestRejected: when one is refused; none runs then. :raises EngineClosed: when the engine takes none.
    """
    begun = list(generations)
    try:
        for generation in begun:
            await generation.start()
    except BaseException:  # cancellation, too
        _close(begun)
        raise


async def outputs_of(generations: Sequence[Generation]) -> AsyncGenerator[Heard, None]:
    """The outputs of all, as they come. When the iteration ends, however it ends, all are ended.

    :raises ApiError: 503 when the server has ended one. :raises OctavoError: when one has failed.
    """
    try:
        async with aclosing(_of_one(generations[0]) if len(generations) == 1 else _of_many(generations)) as source:
            async for heard in source:
                yield heard._replace(output=_checked(heard.output))
    finally:
        _close(generations)


async def _of_one(generation: Generation) -> AsyncGenerator[Heard, None]:
    async for output in generation:
        yield Heard(0, output)


async def _of_many(generations: Sequence[Generation]) -> AsyncGenerator[Heard, None]:
    """Not with a task group: one must not be left open over a ``yield``."""
    waiting = {asyncio.ensure_future(_next(each)): number for number, each in enumerate(generations)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                number, found = waiting.pop(task), task.result()
                if isinstance(found, Exception):
                    raise found
                if found is not None:
                    yield Heard(number, found)
                    waiting[asyncio.ensure_future(_next(generations[number]))] = number
    finally:
        for task in waiting:
            task.cancel()


async def _next(generation: Generation) -> RequestOutput | Exception | None:
    """The next output, or the error; ``None`` at the end."""
    try:
        return await anext(generation, None)
    except Exception as error:  # noqa: BLE001  # it is raised where the outputs are read
        return error


def _checked(output: RequestOutput) -> RequestOutput:
    """An output that a client may take at its word: it ends a sample only if that is well."""
    if output.finish_reason is FinishReason.ABORT:
        raise unavailable("the server ended this request before it was done", "aborted")
    if output.finish_reason is FinishReason.ERROR:  # the error itself comes next
        return dataclasses.replace(output, finish_reason=None)
    return output


def _close(generations: Iterable[Generation]) -> None:
    for generation in generations:
        generation.close()

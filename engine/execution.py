"""Execution of a plan, with faults kept to the rows that cause them.

A step can be repeated: it writes the same K and V to the same slots, and draws depend on seed and position alone. So when a
step of several rows fails, its halves are tried on their own, down to the single rows at fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from ..errors import DeviceOutOfMemory, EngineClosed, ModelError
from .model.runner import ModelRunner, RowOutput
from .model_thread import ModelThread
from .plan import PlannedRow, pack

RowResult: TypeAlias = RowOutput | ModelError


async def execute(runner: ModelRunner, thread: ModelThread, rows: Sequence[PlannedRow]) -> list[RowResult]:
    """What came out for each row, in order: its output, or the error that only this row is to blame for.

    :raises EngineClosed: when the model thread was closed.
    """
    try:
        output = await thread.call(runner.execute, pack(rows))
        if len(output.rows) != len(rows):
            raise ModelError(f"the runner returned {len(output.rows)} rows for {len(rows)}")
    except EngineClosed:
        raise
    except Exception as error:
        if len(rows) == 1:
            return [_as_model_error(error)]
        half = len(rows) // 2
        first = await execute(runner, thread, rows[:half])
        return first + await execute(runner, thread, rows[half:])
    return [ModelError(row.error) if row.error is not None else row for row in output.rows]


def _as_model_error(error: Exception) -> ModelError:
    if isinstance(error, ModelError):
        return error
    kind = DeviceOutOfMemory if isinstance(error, MemoryError) else ModelError
    wrapped = kind(f"the model failed in a step: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped

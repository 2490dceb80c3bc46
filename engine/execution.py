"""Execution of a plan, with faults kept to the rows that cause them.

A step can be repeated: it writes the same K and V to the same slots, and draws depend on seed and position alone. So
when a step of several rows fails, its halves are tried on their own, down to the single rows at fault.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from ..errors import CannotContinue, DeviceOutOfMemory, EngineClosed, ModelError, caused, describe
from .model.runner import ModelRunner, Row, RowOutput, StepInput, StepOutput
from .model_thread import ModelThread
from .plan import PlannedRow, pack

RowResult: TypeAlias = RowOutput | ModelError | CannotContinue


class StepExecutor:
    """Runs the rows of a plan in the model thread."""

    def __init__(self, runner: ModelRunner, thread: ModelThread) -> None:
        self._runner = runner
        self._thread = thread
        self._vocab_size = runner.info.vocab_size

    async def execute(
        self,
        rows: Sequence[PlannedRow],
        *,
        on_out_of_memory: Callable[[int], None],
        meanwhile: Callable[[], bool] | None = None,
    ) -> list[RowResult]:
        """What came out for each row, in order: its output, or the error that only this row is to blame for.

        ``on_out_of_memory`` is told the tokens of every try that the device had no memory for. ``meanwhile``: work for
        the time in which the model is busy, as :meth:`~.model_thread.ModelThread.call_beside` has it.

        :raises EngineClosed: when the model thread was closed.
        """
        try:
            step = pack(rows)
            return self._row_results(step, await self._thread.call_beside(meanwhile, self._runner.execute, step))
        except EngineClosed:
            raise
        except Exception as error:  # noqa: BLE001  # whatever a model raises, only the rows at fault shall end
            mapped = _as_model_error(error)
            if isinstance(mapped, DeviceOutOfMemory):
                on_out_of_memory(sum(row.count for row in rows))
            if len(rows) == 1:
                return [mapped]
            half = len(rows) // 2
            first = await self.execute(rows[:half], on_out_of_memory=on_out_of_memory, meanwhile=meanwhile)
            return first + await self.execute(rows[half:], on_out_of_memory=on_out_of_memory, meanwhile=meanwhile)

    def _row_results(self, step: StepInput, output: StepOutput) -> list[RowResult]:
        if len(output.rows) != len(step.rows):
            raise ModelError(f"the runner returned {len(output.rows)} rows for {len(step.rows)}")
        return [self._row_result(row, result) for row, result in zip(step.rows, output.rows, strict=True)]

    def _row_result(self, row: Row, result: RowOutput) -> RowResult:
        """The result itself when it can be used: a bad id would spoil the next step, perhaps for all."""
        if result.refusal is not None:
            return CannotContinue(result.refusal)
        fault = result.error or self._fault(row, result)
        return result if fault is None else ModelError(fault)

    def _fault(self, row: Row, result: RowOutput) -> str | None:
        """What is wrong with the shape of a result."""
        targets = 0 if row.prompt_targets is None else len(row.prompt_targets)
        if len(result.prompt_scores) != targets:
            return f"the runner returned {len(result.prompt_scores)} prompt scores for {targets} targets"
        wanted = row.sampling
        if wanted is None:
            return None
        if len(result.sampled) != len(wanted.seeds):
            return f"the runner returned {len(result.sampled)} draws for the {len(wanted.seeds)} of a row"
        if wanted.beam_candidates and not result.beam:
            return "the runner returned no candidates for a beam"
        for token_id, *_ in (*result.sampled, *result.beam):
            if not isinstance(token_id, int) or not 0 <= token_id < self._vocab_size:
                return f"the runner returned {token_id!r:.40} as a token of a vocabulary of {self._vocab_size}"
        return None


def _as_model_error(error: Exception) -> ModelError:
    if isinstance(error, ModelError):
        return error
    kind = DeviceOutOfMemory if isinstance(error, MemoryError) else ModelError
    return caused(kind(f"the model failed in a step: {describe(error)}"), error)

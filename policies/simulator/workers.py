"""Processes that share a list of tasks: results in the order of the tasks, whichever is finished first.

A pool of the standard library is lost as a whole when one of its processes dies, and leaves no public way to stop one
that does not come back. What runs here is anybody's policy, so a process that dies takes one task with it, and leaving
early ends them all.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from ...errors import describe

GRACE_SECONDS = 5.0
"""What a process has to end when it is told to, before it is killed."""

T = TypeVar("T")
R = TypeVar("R")

Work: TypeAlias = Callable[[T, Callable[[int], None]], R]
"""Does one task; it may tell how far it is, in a unit of its own."""


class _Worker(NamedTuple):
    process: BaseProcess
    pipe: Connection


class _Done(NamedTuple, Generic[R]):
    result: R


class _Failed(NamedTuple):
    why: str


def run_tasks(
    work: Work[T, R],
    tasks: Sequence[T],
    *,
    jobs: int,
    lost: Callable[[str], R],
    on_progress: Callable[[int, int], None] | None = None,
) -> list[R]:
    """Do every task, ``jobs`` at a time, and return the results in the order of ``tasks``.

    With one job all happens in this process. With more, ``work``, the tasks and the results travel between processes:
    ``work`` is a function of a module, and the rest can be pickled. ``lost(why)`` gives the result of a task whose
    process died or whose work raised. ``on_progress(index, done)``: task ``index`` is at ``done``.
    """
    tell = on_progress or _silent
    if jobs <= 1 or len(tasks) <= 1:
        return [_do_here(work, task, lost, index, tell) for index, task in enumerate(tasks)]
    crew = _Crew(work, tasks, lost, tell)
    try:
        return crew.run(jobs)
    finally:
        crew.end()


def _do_here(work: Work[T, R], task: T, lost: Callable[[str], R], index: int, tell: Callable[[int, int], None]) -> R:
    try:
        return work(task, lambda done: tell(index, done))
    except (Exception, SystemExit) as error:  # noqa: BLE001  # as in a process of its own, one does not end the others
        return lost(describe(error))


class _Crew(Generic[T, R]):
    """The processes, and who does what."""

    def __init__(
        self,
        work: Work[T, R],
        tasks: Sequence[T],
        lost: Callable[[str], R],
        tell: Callable[[int, int], None],
    ) -> None:
        self._work = work
        self._tasks = tasks
        self._lost = lost
        self._tell = tell
        self._waiting = deque(range(len(tasks)))
        self._busy: dict[Connection, int] = {}
        self._workers: dict[Connection, _Worker] = {}
        self._results: dict[int, R] = {}

    def run(self, jobs: int) -> list[R]:
        """Until every task has a result."""
        while len(self._results) < len(self._tasks):
            while self._waiting and len(self._workers) < jobs:
                self._hand_out(self._hire())
            ready = wait(list(self._busy))
            for pipe in [pipe for pipe in self._busy if pipe in ready]:
                self._listen(self._workers[pipe])
        return [self._results[index] for index in range(len(self._tasks))]

    def end(self) -> None:
        """No process is left when this returns."""
        for worker in self._workers.values():
            worker.pipe.close()
            worker.process.terminate()
        for worker in self._workers.values():
            _bury(worker.process)
        self._workers.clear()

    def _hire(self) -> _Worker:
        context = multiprocessing.get_context("spawn")  # a fork would copy locks that other threads hold
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self._work), daemon=True)
        process.start()
        theirs.close()
        worker = self._workers[ours] = _Worker(process, ours)
        return worker

    def _hand_out(self, worker: _Worker) -> None:
        index = self._waiting.popleft()
        self._busy[worker.pipe] = index
        try:
            worker.pipe.send(self._tasks[index])
        except OSError:
            self._dismiss(worker)

    def _listen(self, worker: _Worker) -> None:
        index = self._busy[worker.pipe]
        try:
            message: object = worker.pipe.recv()
        except (EOFError, OSError):
            self._dismiss(worker)
            return
        if isinstance(message, int):
            self._tell(index, message)
            return
        del self._busy[worker.pipe]
        if isinstance(message, _Done):
            self._results[index] = message.result
        elif isinstance(message, _Failed):
            self._results[index] = self._lost(message.why)
        if self._waiting:
            self._hand_out(worker)

    def _dismiss(self, worker: _Worker) -> None:
        index = self._busy.pop(worker.pipe)
        del self._workers[worker.pipe]
        worker.pipe.close()
        _bury(worker.process)
        why = f"its process ended with status {worker.process.exitcode}"
        self._results[index] = self._lost(why)


def _serve(pipe: Connection, work: Work[T, R]) -> None:
    """What a process does: tasks, until the other end of the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it as well, and ends this process
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            pipe.send(_next_result(work, pipe))


def _next_result(work: Work[T, R], pipe: Connection) -> _Done[R] | _Failed:
    try:
        task: T = pipe.recv()
    except EOFError:
        raise
    except Exception as error:  # noqa: BLE001  # a class from a module that cannot be imported here, for one
        return _Failed(describe(error))
    try:
        return _Done(work(task, pipe.send))
    except Exception as error:  # noqa: BLE001  # the task is lost, not the process
        return _Failed(describe(error))


def _bury(process: BaseProcess) -> None:
    process.join(GRACE_SECONDS)
    if process.exitcode is None:
        process.kill()
        process.join()


def _silent(index: int, done: int) -> None:
    """Nobody wants to know."""

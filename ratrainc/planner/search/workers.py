"""Worker processes that evaluate plans in parallel, and end with the process that started them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from multiprocessing import get_context
from typing import TYPE_CHECKING

from attrs import frozen

from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.support.time_limit import end_early, is_ended, passing_the_end_on
from ratrain.ratrainc.console.terminal import warnings_of_worker
from ratrain.ratrainc.planner.search.plan_evaluation import PlanEvaluation, evaluate

if TYPE_CHECKING:
    from multiprocessing.synchronize import Event

    from ratrain.ratrainc.planner.search.plan_evaluation import Task

_WATCH_SECONDS = 2.0


@frozen
class WorkerPool:
    """A pool of processes; without processes, tasks run at once."""

    executor: ProcessPoolExecutor | None
    width: int

    def submit(self, task: Task) -> Future[PlanEvaluation]:
        """Start a task; without a pool it is done when this returns."""
        if self.executor is not None:
            # A worker may start now. It has this mask until it can take an interruption without a traceback.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            try:
                return self.executor.submit(evaluate, task)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        done: Future[PlanEvaluation] = Future()
        try:
            done.set_result(evaluate(task))
        except DiagnosticError as error:
            done.set_exception(error)
        return done


@contextmanager
def workers(jobs: int) -> Iterator[WorkerPool]:
    """Provide a pool of `jobs` processes; for one job, this process."""
    if jobs <= 1:
        yield WorkerPool(None, 1)
        return
    context = get_context("spawn")
    end = context.Event()
    # spawned: a fork of a process with threads may inherit a lock that nobody releases
    with (
        passing_the_end_on(end.set),
        ProcessPoolExecutor(jobs, context, initializer=_start_worker, initargs=(os.getpid(), end)) as executor,
    ):
        yield WorkerPool(executor, jobs)


def evaluate_all(
    tasks: Sequence[Task], jobs: int, hear: Callable[[int, PlanEvaluation | DiagnosticError], None]
) -> list[PlanEvaluation | DiagnosticError]:
    """Return the evaluation of each task, or the error that refused it; `hear` gets each as it is found."""
    found: dict[int, PlanEvaluation | DiagnosticError] = {}
    waiting = deque(enumerate(tasks))
    running: dict[Future[PlanEvaluation], int] = {}
    with workers(jobs) as run:
        while waiting or running:
            while waiting and len(running) < run.width:
                number, task = waiting.popleft()
                running[run.submit(task)] = number
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                number = running.pop(future)
                try:
                    found[number] = future.result()
                except DiagnosticError as error:
                    found[number] = error
                hear(number, found[number])
    return [found[number] for number in range(len(tasks))]


def _start_worker(parent: int, end: Event) -> None:
    """Make a worker end its work early if `end` is set, or if it is interrupted; at once if it is interrupted again.

    It ends at once if its parent is gone, too.
    """

    def interrupted(_signal: int, _frame: object) -> None:
        signal.signal(signal.SIGINT, lambda _signal, _frame: os._exit(1))
        end_early()

    signal.signal(signal.SIGINT, interrupted)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])

    def watch() -> None:
        # a worker whose parent was killed is adopted by another process
        while os.getppid() == parent:
            if is_ended():
                time.sleep(_WATCH_SECONDS)
            elif end.wait(_WATCH_SECONDS):
                end_early()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    warnings_of_worker()

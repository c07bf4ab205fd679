"""Processes that evaluate plans side by side, and end with the one that started them."""

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
from ratrain.ratrainc.console.terminal import warnings_of_worker
from ratrain.ratrainc.planner.search.evaluation import Evaluation, evaluate

if TYPE_CHECKING:
    from ratrain.ratrainc.planner.search.evaluation import Task

_WATCH_SECONDS = 2.0


@frozen
class Runner:
    """Runs tasks in a pool, or at once."""

    executor: ProcessPoolExecutor | None
    width: int

    def submit(self, task: Task) -> Future[Evaluation]:
        """Start a task; without a pool it is done when this returns."""
        if self.executor is not None:
            # A worker may start now. It has this mask until it can take an interruption without a traceback.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            try:
                return self.executor.submit(evaluate, task)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        done: Future[Evaluation] = Future()
        try:
            done.set_result(evaluate(task))
        except DiagnosticError as error:
            done.set_exception(error)
        return done


@contextmanager
def workers(jobs: int) -> Iterator[Runner]:
    """So many workers, or this process where one job is asked for."""
    if jobs <= 1:
        yield Runner(None, 1)
        return
    with ProcessPoolExecutor(
        jobs, get_context("spawn"), initializer=_start_worker, initargs=(os.getpid(),)
    ) as executor:
        yield Runner(executor, jobs)


def evaluate_all(
    tasks: Sequence[Task], jobs: int, tick: Callable[[], None] = lambda: None
) -> list[Evaluation | DiagnosticError]:
    """What each task came to, or why it could not be evaluated; `tick` is called after each."""
    found: dict[int, Evaluation | DiagnosticError] = {}
    waiting = deque(enumerate(tasks))
    running: dict[Future[Evaluation], int] = {}
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
                tick()
    return [found[number] for number in range(len(tasks))]


def _start_worker(parent: int) -> None:
    """A worker ends at once when it is interrupted, and when its parent is gone."""
    signal.signal(signal.SIGINT, lambda _signal, _frame: os._exit(1))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_WATCH_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    warnings_of_worker()

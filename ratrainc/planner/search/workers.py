"""Worker processes that evaluate plans in parallel, and end with the process that started them.

A worker imports the compiler, which takes about as long as a small plan. So all searches of a command share one pool
(`workers` within `workers`), and on Linux workers are forks of a server that imports it once, beside the first search's
bounds:

    command      | bounds of families ........ | first plans | bounds of the next search ...
    fork server  | imports | forks              ^ worker 1, worker 2 ........................
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from contextvars import ContextVar
from multiprocessing import forkserver, get_context, parent_process
from typing import TYPE_CHECKING

from attrs import frozen

from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.support.loops import unkept
from ratrain.ratrain_ir.support.time_limit import end_early, is_ended, passing_the_end_on
from ratrain.ratrainc.console.terminal import warnings_of_worker
from ratrain.ratrainc.planner.search.plan_evaluation import STOPPED, PlanEvaluation, evaluate

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
            with _interruptions_held_back():  # a worker may start now
                return self.executor.submit(evaluate, task)
        done: Future[PlanEvaluation] = Future()
        try:
            done.set_result(evaluate(task))
        except DiagnosticError as error:
            done.set_exception(error)
        return done


@contextmanager
def _interruptions_held_back() -> Iterator[None]:
    """Block interruptions: a process that starts here has this mask until it can take one without a traceback."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_OPEN: ContextVar[WorkerPool | None] = ContextVar("open", default=None)
"""The pool of the innermost `workers` block."""


@contextmanager
def workers(jobs: int) -> Iterator[WorkerPool]:
    """Provide a pool of `jobs` processes, for one job this process; within a block of as many jobs, that one's pool."""
    shared = _OPEN.get()
    if jobs <= 1:
        yield WorkerPool(None, 1)
    elif shared is not None and shared.width == jobs:
        yield shared
    else:
        context = get_context(_START)
        if _START == "forkserver":
            forkserver.set_forkserver_preload([evaluate.__module__])
            with _interruptions_held_back():
                forkserver.ensure_running()
        end, is_unkept = context.Event(), context.Event()
        with (
            passing_the_end_on(end.set),
            ProcessPoolExecutor(jobs, context, initializer=_start_worker, initargs=(end, is_unkept)) as executor,
        ):
            token = _OPEN.set(pool := WorkerPool(executor, jobs))
            try:
                yield pool
            finally:
                _OPEN.reset(token)
                if is_unkept.is_set():
                    unkept()


_START = "forkserver" if sys.platform == "linux" else "spawn"
"""Start method of workers. Never forks of this process: beside threads, a fork may inherit a lock held for ever."""


def evaluate_all(
    tasks: Sequence[Task],
    jobs: int,
    hear: Callable[[int, PlanEvaluation | DiagnosticError], None],
    begin: Callable[[int], None] = lambda _number: None,
) -> list[PlanEvaluation | DiagnosticError]:
    """Return the evaluation of each task, or the error that refused it; stopped ones after an early end.

    `begin` hears the number of a task that begins, `hear` that of one that is found.
    """
    found: dict[int, PlanEvaluation | DiagnosticError] = {}
    waiting = deque(enumerate(tasks))
    running: dict[Future[PlanEvaluation], int] = {}
    with workers(jobs) as run:
        while (waiting and not is_ended()) or running:
            while waiting and len(running) < run.width and not is_ended():
                number, task = waiting.popleft()
                begin(number)
                running[run.submit(task)] = number
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                number = running.pop(future)
                try:
                    found[number] = future.result()
                except DiagnosticError as error:
                    found[number] = error
                hear(number, found[number])
    return [found.get(number, STOPPED) for number in range(len(tasks))]


def _start_worker(end: Event, is_unkept: Event) -> None:
    """Make a worker end its work early if `end` is set, or if it is interrupted; at once if it is interrupted again.

    It ends at once if its parent is gone, too. It sets `is_unkept` where its loops cannot be kept on disk.
    """

    def interrupted(_signal: int, _frame: object) -> None:
        signal.signal(signal.SIGINT, lambda _signal, _frame: os._exit(1))
        end_early()

    signal.signal(signal.SIGINT, interrupted)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])

    parent = parent_process()  # the command, not the server that the worker is a fork of
    assert parent is not None

    def watch() -> None:
        while parent.is_alive():
            if is_ended():
                time.sleep(_WATCH_SECONDS)
            elif end.wait(_WATCH_SECONDS):
                end_early()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    warnings_of_worker(is_unkept.set)

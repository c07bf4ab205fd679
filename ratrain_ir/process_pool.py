"""Independent work on several processes: a function over items, in forked processes that end with the call.

    with processes(4):
        texts = each(text_of, module.stages, work=ops)

Nothing is forked unless the user allows it: a command with `--jobs`, or a program that calls the API. Results and
errors do not depend on the number of processes.

Scheme: all processes, this one included, take the next item number from a shared file, so a free one takes more. Each
child pickles its results into a file of its own, which the parent reads when the child has ended:

    tickets   0 1 2 3 4 5 ...    one read position for all processes
    parent    0     3            results stay here
    child     1 2 4              results -> pickle file

An item without a result (an exception, a killed child) is computed again in the parent, so exceptions arise there.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from multiprocessing import parent_process
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar
from warnings import catch_warnings, simplefilter

from attrs import frozen

from ratrain.ratrain_ir.support.time_limit import is_limited

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Stage

T = TypeVar("T")
R = TypeVar("R")

_WORTH = 50_000
"""Least work, in ops, for which processes are forked: a fork and the pages it copies cost tens of milliseconds of
CPU."""
_TICKET = 4
"""Bytes of an item's number."""
_PR_SET_PDEATHSIG = 1
"""Option of `linux/prctl.h`: the signal that a process gets when its parent ends."""


@frozen
class _Allowed:
    count: int
    least_work: int


_ALONE = _Allowed(1, _WORTH)
_ALLOWED = ContextVar("allowed", default=_ALONE)


@contextmanager
def processes(count: int, *, least_work: int = _WORTH) -> Iterator[None]:
    """Let `each` use up to `count` processes in the block, this one included, for work of `least_work` ops or more."""
    token = _ALLOWED.set(_Allowed(count, least_work))
    try:
        yield
    finally:
        _ALLOWED.reset(token)


def usable_cores() -> set[int]:
    """Return the numbers of the cores that this process may use."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def each(function: Callable[[T], R], items: Sequence[T], *, work: int) -> list[R]:
    """Return a function's results for all items, in their order; `work`: about how many ops it visits in all.

    Items may be computed in forked processes (`processes`). A forked function sees everything that exists at the call.
    Its side effects are lost, and its result is a pickled copy, so return something small compared with the work: a
    choice, offsets, a text, not ops. Types, blocks and other interned objects keep their identity; tensors and ops do
    not. Terminal output and warnings of a forked process are dropped.

    Runs in this process alone if `processes` allows no more or the work is too small, under a time limit (which counts
    the time of this thread), within another `each`, in a child of `multiprocessing`, and on systems other than Linux.

    Raises what the function raises for the first failing item, which is computed again here for that. The children end
    before an interruption leaves this call, and whenever this process ends.
    """
    count = processes_for(len(items), work=work)
    if count < 2:
        return [function(item) for item in items]
    found = _shared_out(function, items, count)
    # An item is missing if the function raised, or if the system killed its process, perhaps for lack of memory.
    # In order, so that the first exception here is the one a plain loop would raise.
    return [found[number] if number in found else function(item) for number, item in enumerate(items)]


def each_stage(function: Callable[[Stage], R], stages: Sequence[Stage]) -> list[R]:
    """Return `each` over stages, for a function that visits their ops about once."""
    return each(function, stages, work=sum(len(stage.ops) for stage in stages))


def processes_for(items: int, *, work: int) -> int:
    """Return the number of processes, this one included, that `each` uses for a number of items."""
    allowed = _ALLOWED.get()
    if work < allowed.least_work or is_limited() or sys.platform != "linux" or parent_process() is not None:
        return 1
    return max(1, min(allowed.count, items))


@contextmanager
def meanwhile(*functions: Callable[[], object]) -> Iterator[None]:
    """Run functions in a child process each while the block runs; the children are killed when the block ends.

    Only their effects on disk remain. Their results and exceptions are dropped. Nothing is called if there is one core,
    or where forking is not allowed (a time limit, not Linux, a child of `multiprocessing`).
    """
    children: list[int] = []
    try:
        if not is_limited() and sys.platform == "linux" and parent_process() is None and len(usable_cores()) > 1:
            for function in functions:
                if not (child := _fork()):
                    _call(function)
                children.append(child)
        yield
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _call(function: Callable[[], object]) -> NoReturn:
    """Call a function in a child, and end the child."""
    try:
        _ALLOWED.set(_ALONE)
        function()
    finally:
        os._exit(0)


def _shared_out(function: Callable[[T], R], items: Sequence[T], count: int) -> dict[int, R]:
    """Compute items on `count` processes, this one included; return the results by item number.

    Results may be missing from the first item on for which the function raised, and for items of a killed child.
    """
    # Forked processes share the open file, so its read position too: each read takes the next number atomically.
    tickets = os.memfd_create("tickets")
    children: list[int] = []
    results = [os.memfd_create("results") for _ in range(count - 1)]
    try:
        os.write(tickets, b"".join(number.to_bytes(_TICKET, "little") for number in range(len(items))))
        os.lseek(tickets, 0, os.SEEK_SET)
        for place in results:
            if not (child := _fork()):
                _work(function, items, tickets, place)
            children.append(child)
        alone = _ALLOWED.set(_ALONE)
        try:
            found = dict(_done(function, items, tickets))
        finally:
            _ALLOWED.reset(alone)
        for child, place in zip(children, results, strict=True):
            # WNOWAIT keeps the child a zombie, so its process id is not reused before the kill below
            ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
            if ended is not None and ended.si_code == os.CLD_EXITED and not ended.si_status:
                found.update(_received(place))
        return found
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        for place in (tickets, *results):
            os.close(place)


def _done(function: Callable[[T], R], items: Sequence[T], tickets: int) -> Iterator[tuple[int, R]]:
    """Take items and yield (number, result) until none are left. An exception ends this for all processes."""
    while ticket := os.read(tickets, _TICKET):
        number = int.from_bytes(ticket, "little")
        try:
            result = function(items[number])
        except Exception:  # noqa: BLE001 - the parent calls the function again, which raises it there
            # Leave no items to anybody. All items before this one are already done or taken, so the parent finds the
            # first failure in order.
            os.lseek(tickets, 0, os.SEEK_END)
            return
        yield number, result


def _received(place: int) -> Iterator[tuple[int, R]]:
    """Read the results of a child that has ended from its file."""
    os.lseek(place, 0, os.SEEK_SET)
    with os.fdopen(place, "rb", closefd=False) as stream:
        while stream.peek(1):
            yield pickle.load(stream)  # noqa: S301 - written by a child of this process


def _fork() -> int:
    """Fork.

    Return the child's process id, and 0 in the child, which is detached from the terminal and ends with its parent.
    """
    import ctypes

    parent, prctl = os.getpid(), ctypes.CDLL(None).prctl
    # Blocked until the child has set its own handlers: before that it would run the parent's.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        with catch_warnings():
            # Python warns of forking while threads run, as locks they hold stay locked in the child. The only other
            # thread draws on the terminal, which a child does not use.
            simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if not child:
            _set_apart(parent, prctl)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return child


_ENDING = (signal.SIGINT, signal.SIGTERM)


def _set_apart(parent: int, prctl: Callable[[int, int], int]) -> None:
    """Make a child end with its parent and not at Ctrl-C; detach it from the terminal; freeze its garbage collector."""
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before `prctl` took effect
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which kills its children
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    nowhere = Path(os.devnull).open("w")  # noqa: SIM115 - for the rest of the child's life
    sys.stdout = sys.stderr = nowhere
    os.dup2(nowhere.fileno(), 1)
    os.dup2(nowhere.fileno(), 2)
    gc.freeze()  # a collection would write to every object, and so copy its page


def _work(function: Callable[[T], R], items: Sequence[T], tickets: int, place: int) -> NoReturn:
    """Compute items in a child, pickle the results into its file, and end the child."""
    code = 1
    try:
        _ALLOWED.set(_ALONE)
        with os.fdopen(place, "wb") as stream:
            for result in _done(function, items, tickets):
                pickle.dump(result, stream, pickle.HIGHEST_PROTOCOL)
        code = 0
    finally:
        os._exit(code)  # exit handlers are the parent's to run

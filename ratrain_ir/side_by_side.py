"""Independent work side by side: a function over items, in processes that are forked for it and are gone when it is done.

    with processes(4):
        texts = each(text_of, module.stages, work=ops)

Nothing is forked unless somebody says how many processes there may be: a command that its user told (`--jobs`), or a program that calls
the API. Whatever their number, the results are the same, and so is what is raised.
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
"""Ops that are worth processes of their own: tens of milliseconds of CPU each go into forking them and into the pages that they copy."""
_TICKET = 4
"""Bytes of an item's number."""
_PR_SET_PDEATHSIG = 1
"""Of `linux/prctl.h`: the signal that a process gets when its parent is gone."""


@frozen
class _Allowed:
    count: int
    least_work: int


_ALONE = _Allowed(1, _WORTH)
_ALLOWED = ContextVar("allowed", default=_ALONE)


@contextmanager
def processes(count: int, *, least_work: int = _WORTH) -> Iterator[None]:
    """Let `each` take up to so many processes within the block, this one among them, for work of so many ops or more."""
    token = _ALLOWED.set(_Allowed(count, least_work))
    try:
        yield
    finally:
        _ALLOWED.reset(token)


def usable_cores() -> set[int]:
    """The cores that this process may use, by number."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def each(function: Callable[[T], R], items: Sequence[T], *, work: int) -> list[R]:
    """What a function returns for each item, in their order; `work` is about how many ops it goes through for all of them.

    Many items may be taken by other processes (`processes`), each by whoever is free, in their order. What a process has when this is called,
    the function has too; what it changes may be lost, so that only what it returns counts, and that may be a copy: it is pickled on its
    way. So return what is small beside the work: a choice, offsets, a text, and not ops. Types, blocks and other interned objects stay
    what they are; tensors and ops of the module do not. What a forked process writes to the terminal, or warns of, is not seen.

    The function runs here alone where `processes` or the work asks for no more, under a time limit (which counts the time of this thread),
    within another `each`, in processes of `multiprocessing`, and on systems other than Linux, where forking is not there, or not safe.

    Raises what the function raises for the first item that it raises something for; it is called for that one again, here. An
    interruption ends the other processes first, and so does the end of this one, whatever its reason.
    """
    count = processes_for(len(items), work=work)
    if count < 2:
        return [function(item) for item in items]
    found = _shared_out(function, items, count)
    # an item is missing where the function raised something, or where the system ended a process, for want of memory perhaps
    return [found[number] if number in found else function(item) for number, item in enumerate(items)]


def each_stage(function: Callable[[Stage], R], stages: Sequence[Stage]) -> list[R]:
    """`each` for stages, where the function goes through their ops about once."""
    return each(function, stages, work=sum(len(stage.ops) for stage in stages))


def processes_for(items: int, *, work: int) -> int:
    """How many processes, this one among them, `each` takes for so many items."""
    allowed = _ALLOWED.get()
    if work < allowed.least_work or is_limited() or sys.platform != "linux" or parent_process() is not None:
        return 1
    return max(1, min(allowed.count, items))


@contextmanager
def beside(*functions: Callable[[], object]) -> Iterator[None]:
    """While the block runs, call functions for what they leave on disk, each in a process of its own that ends with the block.

    Whether they come to their end or raise something, nobody hears of it; where `each` would fork nothing, they are not called.
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
    """The life of a child that only calls a function."""
    try:
        _ALLOWED.set(_ALONE)
        function()
    finally:
        os._exit(0)


def _shared_out(function: Callable[[T], R], items: Sequence[T], count: int) -> dict[int, R]:
    """What so many processes, this one among them, found for items, by their numbers; nothing from the first one on that it raised something for."""
    tickets = os.memfd_create("tickets")  # whoever reads moves the place that all of them read at
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
            ended = os.waitid(
                os.P_PID, child, os.WEXITED | os.WNOWAIT
            )  # its number stays its own for as long as it may be killed
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
    """Take items for as long as there are any, and the function raises nothing for them."""
    while ticket := os.read(tickets, _TICKET):
        number = int.from_bytes(ticket, "little")
        try:
            result = function(items[number])
        except Exception:  # noqa: BLE001 - whatever it is, the one who asked raises it again
            os.lseek(tickets, 0, os.SEEK_END)  # all items before this one are done, or somebody is at them
            return
        yield number, result


def _received(place: int) -> Iterator[tuple[int, R]]:
    os.lseek(place, 0, os.SEEK_SET)
    with os.fdopen(place, "rb", closefd=False) as stream:
        while stream.peek(1):
            yield pickle.load(stream)  # noqa: S301 - a child of this very process wrote it


def _fork() -> int:
    """Fork; 0 in the child, which is apart from its parent then, and ends with it."""
    import ctypes

    parent, prctl = os.getpid(), ctypes.CDLL(None).prctl
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)  # the child has its parent's ways with them for a moment
    try:
        with catch_warnings():
            # Python warns of forks beside threads, whose locks stay locked in a child: what draws on a terminal has a thread, and nothing else
            simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if not child:
            _set_apart(parent, prctl)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return child


_ENDING = (signal.SIGINT, signal.SIGTERM)


def _set_apart(parent: int, prctl: Callable[[int, int], int]) -> None:
    """Let a child end when its parent does, and only then; it does not reach the terminal, and leaves old objects where they are."""
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its children
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    nowhere = Path(os.devnull).open("w")  # noqa: SIM115 - for the rest of the child's life
    sys.stdout = sys.stderr = nowhere
    os.dup2(nowhere.fileno(), 1)
    os.dup2(nowhere.fileno(), 2)
    gc.freeze()  # a collection would write to every object, and copy its page


def _work(function: Callable[[T], R], items: Sequence[T], tickets: int, place: int) -> NoReturn:
    """The life of a child."""
    code = 1
    try:
        _ALLOWED.set(_ALONE)
        with os.fdopen(place, "wb") as stream:
            for result in _done(function, items, tickets):
                pickle.dump(result, stream, pickle.HIGHEST_PROTOCOL)
        code = 0
    finally:
        os._exit(code)  # what is to be done at the end of the process is for the parent to do

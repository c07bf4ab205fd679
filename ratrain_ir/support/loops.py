"""Loops that numba compiles, kept on disk from one process to the next where there is a place for that.

Importing this module does not import numba, which takes a second.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from threading import RLock
from types import CodeType, FunctionType
from typing import Any, TypeVar

from attrs import define, field

from ratrain.ratrain_ir.support.gc import paused_gc

try:
    import fcntl
except ImportError:  # there is none on this system: processes that start together compile the same
    fcntl = None  # type: ignore[assignment]


@define
class _Sizes:
    any: bool = False


_SIZES = _Sizes()
"""Of inputs that loops are compiled for."""


@contextmanager
def at_any_size() -> Iterator[None]:
    """Have loops compiled, and taken, that small inputs do without."""
    before, _SIZES.any = _SIZES.any, True
    try:
        yield
    finally:
        _SIZES.any = before


@define
class Allowance:
    """How many ops a process may still run without the compiler. Many small runs are one large one: it pays then."""

    ops: int

    def take(self, ops: int) -> bool:
        """Whether so many were left; they are used up."""
        if _SIZES.any or ops > self.ops:
            return False
        self.ops -= ops
        return True


F = TypeVar("F", bound=Callable[..., Any])

WAY_OUT = "set NUMBA_CACHE_DIR to a directory that can be written"


_LOOPS: list[Any] = []
"""What this process has of them."""


def compiled_anew() -> int:
    """Loops that this process compiled, and did not read from disk: that takes seconds, and memory that stays."""
    return sum(sum(loop.stats.cache_misses.values()) for loop in _LOOPS)


def kept_in() -> tuple[str, ...]:
    """The folders in which this process's loops are kept, where they can be."""
    return tuple(sorted({loop.stats.cache_path for loop in _LOOPS if loop.stats.cache_path is not None}))


class UncachedWarning(RuntimeWarning):
    """Compiled loops cannot be kept: every process compiles them anew."""


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    """The function, compiled by numba when it is first called from Python, without Python's lock; `options` are those of `njit`.

    Where neither the package's folder, nor one in the user's home, nor NUMBA_CACHE_DIR can be written, it is not kept on disk, and
    an `UncachedWarning` says so, once. Of processes that need it at once, one compiles it, and the others read what that has kept.
    """
    # a function that says no fast-math options takes those of the caller that has it compiled first in a process
    rules = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True, "fastmath": False}
    loop = _kept_or_not(function, rules | options)
    # without its compiler, numba leaves functions as they are
    return counted(loop) if hasattr(loop, "stats") else loop


def counted(loop: Any) -> Any:
    """A loop whose `stats` say what was compiled anew, and where it is kept; it is counted from now on."""
    _LOOPS.append(loop)
    return loop


@define
class _Parts:
    all: set[FunctionType] = field(factory=set)
    new: list[FunctionType] = field(factory=list)
    """which numba does not know yet"""
    told: bool = False
    """whether it has been told of any, so that it is imported"""
    lock: RLock = field(factory=RLock)


_PARTS = _Parts()


PART_OPTIONS: dict[str, Any] = {
    "error_model": "numpy",
    "no_cfunc_wrapper": True,
    "forceinline": True,
    "fastmath": False,
}
"""Parts are called with all that a loop holds: more arguments than a call is worth."""


def part(function: F) -> F:
    """A function that loops call: compiled into them, without an entry from Python of its own. Called from Python it is Python."""
    assert isinstance(function, FunctionType)
    _PARTS.all.add(function)
    _PARTS.new.append(function)
    if _PARTS.told:
        with_parts()
    return function


def with_parts() -> None:
    """Make all parts known to numba, which is imported for that, before it compiles what calls them."""
    from numba.extending import register_jitable

    with _PARTS.lock:
        _PARTS.told = True
        while _PARTS.new:
            register_jitable(**PART_OPTIONS)(_PARTS.new.pop())


def _kept_or_not(function: Callable[..., Any], options: dict[str, Any]) -> Any:
    import numba as nb

    with_parts()
    njit: Any = nb.njit
    try:
        return _by_one_process(_with_what_it_freezes(njit(cache=True, **options)(function)))
    except RuntimeError as error:  # numba has tried to write in each of these
        if "cannot cache" not in str(error):
            raise
    unkept()
    return njit(**options)(function)


def _with_what_it_freezes(function: Any) -> Any:
    """A function that numba has made, kept for the numbers that it compiles in and the functions that it calls, besides its own file.

    Numba looks at the time of that file alone: a constant that changed in another one would go on with its old value.
    """
    kept = getattr(getattr(function, "_cache", None), "_cache_file", None)
    if kept is not None:  # without its compiler, numba leaves functions as they are
        kept._source_stamp = kept._source_stamp, frozen_in(function.py_func)  # noqa: SLF001
    return function


def frozen_in(function: Any, seen: set[Any] | None = None) -> tuple[str, ...]:
    """Globals that a function compiles in, and of those that are compiled themselves their code and globals."""
    found: list[str] = []
    seen = set() if seen is None else seen
    for name in sorted(_names(function.__code__)):
        value = function.__globals__.get(name)
        if isinstance(value, bool | int | float | str | tuple):
            found.append(f"{name} = {value!r}")
        called = value if isinstance(value, FunctionType) and value in _PARTS.all else getattr(value, "py_func", None)
        if called is not None and called not in seen:
            seen.add(called)
            found += [name, digest_of_code(called.__code__), *frozen_in(called, seen)]
    return tuple(found)


def digest_of_code(code: CodeType) -> str:
    """Of what a function does, the same in every process."""
    constants = [digest_of_code(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts]
    return sha256(code.co_code + repr(constants).encode()).hexdigest()


def _names(code: CodeType) -> set[str]:
    """Names that a function, and those within it, look up elsewhere."""
    inner = (_names(each) for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*inner)


def _by_one_process(function: Any) -> Any:
    """A function that numba has made, which no two processes compile at the same time."""
    from numba.core.compiler_lock import global_compiler_lock

    folder = function.stats.cache_path if hasattr(function, "stats") else None
    if folder is None or fcntl is None:  # without its compiler, numba leaves functions as they are
        return function
    path = Path(folder) / f"{function.py_func.__module__}.{function.py_func.__qualname__}.lock"
    anew = function.compile

    def compile_alone(signature: Any) -> Any:
        # numba's own lock first: a thread that waits for it must not keep other processes from the function; what a compiler makes stays
        # until it is done, and collections in between are a tenth of its time
        with global_compiler_lock, locked(path), paused_gc():
            return anew(signature)

    function.compile = compile_alone
    return function


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock file, which stays; where none can be held, go on without."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:
        yield
        return
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@cache
def unkept() -> None:
    """Warn, once, that loops are not kept."""
    text = (
        "compiled loops are not kept, and every process compiles them anew: neither the package's folder nor one in the home "
        f"directory can be written; {WAY_OUT}"
    )
    warnings.warn(UncachedWarning(text), stacklevel=3)

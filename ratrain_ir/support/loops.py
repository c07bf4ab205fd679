"""Loops that numba compiles and, where a folder can be written, keeps on disk for later processes.

Importing this module does not import numba, which takes a second.

    @part                      a helper: inlined into loops, plain Python when called from Python
    compiled(function)         a loop: numba compiles it at its first call, or reads it from disk

Compiling takes seconds. So it is done by one process at a time (`_by_one_process`), what is kept is keyed by all that
was compiled in (`frozen_in`), and runs too small to pay for it interpret the same function (`Allowance`).
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
except ImportError:  # not on this system: processes that start together each compile the loop
    fcntl = None  # type: ignore[assignment]


@define
class _Sizes:
    any: bool = False


_SIZES = _Sizes()
"""Setting of `at_any_size`: if `any`, loops are compiled even for inputs too small to pay for it."""


@contextmanager
def at_any_size() -> Iterator[None]:
    """Compile loops within the block even for inputs too small to pay for it."""
    before, _SIZES.any = _SIZES.any, True
    try:
        yield
    finally:
        _SIZES.any = before


@define
class Allowance:
    """Number of ops that a process may still run without the compiler.

    Many small runs together are a large one, for which compiling pays.
    """

    ops: int
    few: int = 5_000
    """Ops that plain Python runs in the time that a kept loop takes to load, some 30 ms."""

    def take(self, ops: int, is_kept: Callable[[], bool] | None = None) -> bool:
        """Use up `ops` of the allowance and return True; return False if fewer are left, or in `at_any_size`.

        More than a few ops also go to the compiled loop if it `is_kept` on disk, which takes milliseconds to load.
        """
        if _SIZES.any or ops > self.ops or (ops > self.few and is_kept is not None and is_kept()):
            return False
        self.ops -= ops
        return True


F = TypeVar("F", bound=Callable[..., Any])

WAY_OUT = "set NUMBA_CACHE_DIR to a directory that can be written"


_LOOPS: list[Any] = []
"""All compiled loops of this process."""


def compiled_anew() -> int:
    """Count the loops that this process compiled instead of reading them from disk.

    Each takes seconds, and memory that is not freed.
    """
    return sum(sum(loop.stats.cache_misses.values()) for loop in _LOOPS)


def is_kept(loop: Any) -> bool:
    """Tell whether a loop has been compiled in this process, or some version of it is kept on disk.

    A version for other types, or by another processor, counts too: then it may be compiled all the same. A plain
    function (NUMBA_DISABLE_JIT) is never compiled, and counts as kept.
    """
    if not hasattr(loop, "stats") or loop.signatures:
        return True
    kept = getattr(getattr(loop, "_cache", None), "_cache_file", None)
    return kept is not None and bool(kept._load_index())  # noqa: SLF001 - numba has no other way to ask


def kept_in() -> tuple[str, ...]:
    """Return the folders in which this process's loops are kept, sorted; empty if none is."""
    return tuple(sorted({loop.stats.cache_path for loop in _LOOPS if loop.stats.cache_path is not None}))


class UncachedWarning(RuntimeWarning):
    """Warning that compiled loops cannot be kept: every process compiles them again."""


def compiled(function: F, **options: Any) -> F:
    """Return the function as numba compiles it at its first call from Python; it runs without Python's lock (GIL).

    `options` are further options of `njit`. The result is kept on disk; if neither the package's folder, nor one in the
    user's home, nor NUMBA_CACHE_DIR can be written, it is not, and one `UncachedWarning` says so. If several processes
    need it at once, one compiles it and the others read the result.
    """
    # State `fastmath` explicitly: numba otherwise compiles a function with the fast-math options of whichever caller
    # compiles it first in the process.
    rules = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True, "fastmath": False}
    loop: F = _kept_or_not(function, rules | options)
    # with NUMBA_DISABLE_JIT, `njit` returns the plain function, which has no `stats`
    return counted(loop) if hasattr(loop, "stats") else loop


def counted(loop: F) -> F:
    """Register a loop for `compiled_anew` and `kept_in`, which read its `stats`; return it."""
    _LOOPS.append(loop)
    return loop


@define
class _Parts:
    all: set[FunctionType] = field(factory=set)
    new: list[FunctionType] = field(factory=list)
    """parts that numba does not know yet"""
    told: bool = False
    """True once parts have been registered with numba, so that numba is imported"""
    lock: RLock = field(factory=RLock)


_PARTS = _Parts()


PART_OPTIONS: dict[str, Any] = {
    "error_model": "numpy",
    "no_cfunc_wrapper": True,
    "forceinline": True,
    "fastmath": False,
}
"""Options that parts are compiled with.

Parts are inlined: they take most variables of a loop as arguments, so that a call would cost more than their work.
"""


def part(function: F) -> F:
    """Mark a function as a part: loops that call it have it compiled into them.

    It has no compiled entry of its own; called from Python, it runs as Python.
    """
    assert isinstance(function, FunctionType)
    _PARTS.all.add(function)
    _PARTS.new.append(function)
    # numba is imported already, and a loop may be compiled at any time: register the part at once.
    if _PARTS.told:
        with_parts()
    return function


def with_parts() -> None:
    """Register all new parts with numba (importing it), so that loops that call them can be compiled."""
    from numba.extending import register_jitable

    with _PARTS.lock:
        _PARTS.told = True
        while _PARTS.new:
            register_jitable(**PART_OPTIONS)(_PARTS.new.pop())


def _kept_or_not(function: Callable[..., Any], options: dict[str, Any]) -> Any:
    """Compile a function, kept on disk if a folder can be written; otherwise warn once, and keep it in memory only."""
    import numba as nb

    with_parts()
    njit: Any = nb.njit
    try:
        return _by_one_process(_with_what_it_freezes(njit(cache=True, **options)(function)))
    except RuntimeError as error:  # numba tried to write in each of its folders
        if "cannot cache" not in str(error):
            raise
    unkept()
    return njit(**options)(function)


def _with_what_it_freezes(function: Any) -> Any:
    """Make numba's cache of a function depend on the constants and functions that are compiled into it.

    Numba itself checks only the time stamp of the function's own file: after a change of a constant in another file it
    would load code with the old value.
    """
    kept = getattr(getattr(function, "_cache", None), "_cache_file", None)
    if kept is not None:  # a plain function with NUMBA_DISABLE_JIT
        # numba compares this stamp with the one in its index file, and drops all entries of the file if they differ.
        kept._source_stamp = kept._source_stamp, frozen_in(function.py_func)  # noqa: SLF001
    return function


def frozen_in(function: Any, seen: set[Any] | None = None) -> tuple[str, ...]:
    """List the globals that are compiled into a function: constants as `name = value`, functions as a digest.

    The globals of these functions follow, and so on; `seen` holds functions that are listed already.
    """
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
    """Return a digest of a function's byte code and constants, equal in every process."""
    # `repr` of a code object contains its address, so nested functions are digested in turn.
    constants = [digest_of_code(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts]
    return sha256(code.co_code + repr(constants).encode()).hexdigest()


def _names(code: CodeType) -> set[str]:
    """Return the names that a function, or one nested in it, looks up as globals or attributes."""
    inner = (_names(each) for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*inner)


def _by_one_process(function: Any) -> Any:
    """Let only one process at a time compile a function that numba has wrapped; return the function."""
    from numba.core.compiler_lock import global_compiler_lock

    folder = function.stats.cache_path if hasattr(function, "stats") else None
    if folder is None or fcntl is None:  # a plain function, or no locks
        return function
    path = Path(folder) / f"{function.py_func.__module__}.{function.py_func.__qualname__}.lock"
    anew = function.compile

    def compile_alone(signature: Any) -> Any:
        # numba's own lock comes first: a thread that waits for it must not keep other processes from the function.
        # Collections are paused because the compiler frees nothing until it is done; they take a tenth of its time.
        with global_compiler_lock, locked(path), paused_gc():
            return anew(signature)

    function.compile = compile_alone
    return function


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, which is made and stays; go on without a lock if none can be had."""
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
    """Warn that loops are not kept on disk; only the first call does."""
    text = (
        "compiled loops are not kept, and every process compiles them anew: neither the package's folder nor "
        "one in the home "
        f"directory can be written; {WAY_OUT}"
    )
    warnings.warn(UncachedWarning(text), stacklevel=3)

"""Loops over numbers and arrays whose machine code is kept by itself: a process that finds it loads it in milliseconds, without numba.

To import numba and all that it needs before it can load one function takes most of a second. What it has made of a loop that allocates nothing is
one object with a C function in it, which llvmlite links alone. Its arguments are those of numba's calling convention: where the result is put, where
an exception would be, then an array as owner, parent, elements, bytes of one, data, shape and strides, numbers as they are, and the fields of tuples
one after the other.

The name of what is kept is the digest of all that it was made from: the code of the loop and of what it calls, the constants that are compiled in,
the types of its arguments, this module, versions, the processor, and what numba was told by variables.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
from attrs import define, field

from ratrain.ratrain_ir.support import loops
from ratrain.ratrain_ir.support.gc import paused_gc
from ratrain.ratrain_ir.support.loops import F, compiled, counted, digest_of_code, frozen_in, locked, unkept, with_parts

_NUMBERS: dict[type, str] = {bool: "?", int: "q", float: "d", np.bool_: "?", np.int64: "q", np.float64: "d"}
"""Types of numbers that loops take, by the letter of what they are to it."""
_C_TYPES: dict[str, Any] = {"?": ctypes.c_bool, "q": ctypes.c_int64, "d": ctypes.c_double, "p": ctypes.c_void_p}
_OF_LLVM = {"?": "i8", "q": "i64", "d": "double"}
_RESULTS: dict[str, str] = {"none": "", "int64": "q", "float64": "d", "bool": "?"}
"""By numba's name of a result, its letter."""
_OUTSIDE = frozenset({"memset", "memcpy", "memmove"})
"""What machine code may need from outside itself: parts of any C library."""
_MATHEMATICS = frozenset((
    "sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "tanh", "exp", "exp2", "exp10", "log", "log2", "log10",
    "pow", "powi", "ldexp", "frexp",
))  # fmt: skip
_OPTIONS = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True, "no_cpython_wrapper": True, "_nrt": False}
"""Loops own no arrays, so that nothing counts who holds one: in loops that call parts with many that took half of the time."""
_LOCK = threading.Lock()
_OBJECTS: list[Any] = []
"""What is linked into this process, and stays."""


_Entry: TypeAlias = Callable[[tuple[Any, ...], list[Any]], Any]
"""A loop, given its arguments as they are and as they are handed to machine code."""


class NotAloneWarning(RuntimeWarning):
    """A loop is not what can be loaded without numba."""


class _NotAloneError(Exception):
    """The machine code of a loop is not all that it needs."""


@define
class _Stats:
    """As numba's, of one loop."""

    cache_path: str | None = None
    cache_hits: dict[str, int] = field(factory=dict)
    cache_misses: dict[str, int] = field(factory=dict)


@define(eq=False)
class NativeLoop:
    """A loop, called as the function it is made of. Other loops that numba compiles may not call it; parts are for that (`loops.part`)."""

    __wrapped__: Callable[..., Any]
    stats: _Stats = field(factory=_Stats)
    _entries: dict[Any, _Entry] = field(factory=dict)

    def __call__(self, *arguments: Any) -> Any:
        """Run the loop. The first call with arguments of some types loads it, or has numba compile it.

        What needs more than itself, or was made by a numba whose insides are other ones, is left to numba, with a warning.
        """
        forms: list[Any] = []
        values: list[Any] = []
        for argument in arguments:
            _flatten(argument, forms, values)
        key = tuple(forms)
        entry = self._entries.get(key)
        if entry is None:
            if _is_disabled():
                return self.__wrapped__(*arguments)
            with _LOCK:
                entry = self._entries.get(key) or self._made(arguments, key)
                self._entries[key] = entry
        return entry(arguments, values)

    def _made(self, arguments: tuple[Any, ...], key: tuple[Any, ...]) -> _Entry:
        try:
            return self._alone(arguments, key)
        except (AttributeError, ImportError, _NotAloneError) as error:
            name = self.__wrapped__.__qualname__
            text = f"the loop '{name}' is loaded by numba itself, which takes a second: {error}"
            warnings.warn(NotAloneWarning(text), stacklevel=3)
            loop = compiled(self.__wrapped__)
            return lambda given, _values: loop(*given)

    def _alone(self, arguments: tuple[Any, ...], key: tuple[Any, ...]) -> _Entry:
        name = f"{self.__wrapped__.__module__}.{self.__wrapped__.__qualname__}"
        folder = _folder(self.__wrapped__.__code__.co_filename)
        if folder is None:
            unkept()
            self.stats.cache_misses[name] = self.stats.cache_misses.get(name, 0) + 1
            return _linked(_compiled(self.__wrapped__, arguments, key), key)
        self.stats.cache_path = str(folder)
        path = folder / f"{name}-{self._digest(key)}.loop"
        kept = _read(path)
        if kept is None:
            with locked(folder / f"{name}.lock"):  # of processes that need it at once, one compiles it
                kept = _read(path)
                if kept is None:
                    kept = _compiled(self.__wrapped__, arguments, key)
                    _write(path, kept)
                    self.stats.cache_misses[name] = self.stats.cache_misses.get(name, 0) + 1
                    return _linked(kept, key)
        self.stats.cache_hits[name] = self.stats.cache_hits.get(name, 0) + 1
        return _linked(kept, key)

    def _digest(self, key: tuple[Any, ...]) -> str:
        made_from = [
            digest_of_code(self.__wrapped__.__code__),
            *frozen_in(self.__wrapped__),
            *(repr(form.descr) if isinstance(form, np.dtype) else repr(form) for form in key),
            *_circumstances(),
        ]
        return sha256("\n".join(made_from).encode()).hexdigest()[:32]


def native(function: F) -> F:
    """A loop over numbers, arrays and named tuples of them, which returns a number or nothing, raises nothing and allocates nothing.

    It is compiled without Python's lock, with IEEE division, as by `loops.compiled`.
    """
    return cast("F", counted(NativeLoop(function)))


def _flatten(argument: Any, forms: list[Any], values: list[Any]) -> None:
    """The forms of an argument, on which machine code depends, and what is handed to it."""
    if isinstance(argument, np.ndarray):
        flags = argument.flags
        layout = "C" if flags.c_contiguous else "A"
        forms += (argument.dtype, f"{argument.ndim}{layout}{flags.writeable:d}{flags.aligned:d}")
        values += (
            None,
            None,
            argument.size,
            argument.itemsize,
            argument.ctypes.data,
            *argument.shape,
            *argument.strides,
        )
    elif isinstance(argument, tuple):
        forms.append(f"({type(argument).__qualname__}{len(argument)}")
        for each in argument:
            _flatten(each, forms, values)
        forms.append(")")
    else:
        letter = _NUMBERS.get(type(argument))
        if letter is None:
            raise TypeError(f"a loop takes arrays, numbers and tuples of them, no {type(argument).__name__}")
        forms.append(letter)
        values.append(argument)


def _letters(key: tuple[Any, ...]) -> str:
    """The C types of all that is handed over, as letters."""
    found = ""
    for before, form in zip((None, *key), key, strict=False):
        if isinstance(before, np.dtype):
            dimensions = int(form[:-3])
            found += "ppqqp" + "q" * 2 * dimensions
        elif isinstance(form, str) and form in _C_TYPES:
            found += form
    return found


@define
class _Kept:
    """What is kept of a loop."""

    symbol: str
    result: str
    """a letter, or empty"""
    machine_code: bytes


def _read(path: Path) -> _Kept | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    digest, _, rest = data.partition(b"\n")
    if digest.decode("ascii", "replace") != sha256(rest).hexdigest():  # half of it, after a full disk
        return None
    head, _, machine_code = rest.partition(b"\n")
    symbol, _, result = head.decode("ascii").partition(" ")
    return _Kept(symbol, result, machine_code)


def _write(path: Path, kept: _Kept) -> None:
    """Whole or not at all."""
    rest = f"{kept.symbol} {kept.result}\n".encode("ascii") + kept.machine_code
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    with suppress(OSError):  # where it cannot be kept it is compiled again
        beside.write_bytes(sha256(rest).hexdigest().encode("ascii") + b"\n" + rest)
        beside.replace(path)


def _linked(kept: _Kept, key: tuple[Any, ...]) -> _Entry:
    """The loop."""
    import llvmlite.binding as llvm

    _prepare_linking()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(kept.machine_code))
    engine.finalize_object()
    _OBJECTS.append(engine)
    letters = _letters(key)
    made = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, *(_C_TYPES[each] for each in letters))
    function = made(engine.get_function_address(kept.symbol))
    result_type = _C_TYPES[kept.result or "p"]

    def call(_arguments: tuple[Any, ...], values: list[Any]) -> Any:
        result, problem = result_type(), ctypes.c_void_p()
        if function(ctypes.addressof(result), ctypes.addressof(problem), *values):
            raise RuntimeError(f"{kept.symbol}: a loop that raises nothing has raised")
        return result.value if kept.result else None

    return call


@cache
def _prepare_linking() -> None:
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()


@cache
def _machine() -> Any:
    import llvmlite.binding as llvm

    return llvm.Target.from_default_triple().create_target_machine(jit=True, codemodel="jitdefault")


def _compiled(function: Callable[..., Any], arguments: tuple[Any, ...], key: tuple[Any, ...]) -> _Kept:
    """Have numba compile a loop, and take the machine code. Raises `_NotAloneError` where that is not all of it."""
    import numba
    from numba.core import callconv, errors

    with_parts()
    nb: Any = numba
    conventions: Any = callconv
    made = nb.njit(**_OPTIONS)(function)
    try:
        with paused_gc():  # what a compiler makes stays until it is done
            made.compile(tuple(nb.typeof(each) for each in arguments))
    except errors.NumbaError as error:  # it allocates, perhaps
        raise _NotAloneError(" ".join(str(error).split())) from error
    (whole,) = made.overloads.values()
    name, types, result = function.__qualname__, whole.signature.args, whole.signature.return_type
    module = whole.library._final_module  # noqa: SLF001
    lacking = {_called(each.name) for each in module.functions if each.is_declaration} - _OUTSIDE
    if lacking:
        raise _NotAloneError(f"{name} needs more than itself: {', '.join(sorted(lacking))}")
    if str(result) not in _RESULTS:
        raise _NotAloneError(f"{name} returns {result}")
    wanted = [
        str(each) for each in conventions.CPUCallConv(whole.target_context).get_function_type(result, types).args[2:]
    ]
    letters = _letters(key)
    if len(wanted) != len(letters) or any(
        not (given == _OF_LLVM[letter] if letter in _OF_LLVM else given.endswith("*"))
        for given, letter in zip(wanted, letters, strict=True)
    ):
        raise _NotAloneError(f"{name} takes {', '.join(wanted)}, and would be given {letters}")
    return _Kept(whole.fndesc.llvm_func_name, _RESULTS[str(result)], whole.library._get_compiled_object())  # noqa: SLF001


def _called(name: str) -> str:
    """The function that machine code calls for a declared one; an intrinsic is none, but of those of C's mathematics."""
    intrinsic = name.split(".")
    if intrinsic[0] != "llvm":
        return name
    return intrinsic[1] if intrinsic[1] in _MATHEMATICS else "memset"


def _is_disabled() -> bool:
    """Whether numba is told to leave functions as they are."""
    return os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0")


@cache
def _circumstances() -> tuple[str, ...]:
    """What machine code depends on besides the loop."""
    import llvmlite.binding as llvm

    told = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("NUMBA_")]
    return (
        *(sha256(Path(file).read_bytes()).hexdigest() for file in (__file__, loops.__file__)),
        platform.python_version(),
        *(f"{library} {version(library)}" for library in ("numba", "llvmlite")),
        llvm.get_process_triple(),
        llvm.get_host_cpu_name(),
        llvm.get_host_cpu_features().flatten(),
        *(each for each in told if not each.startswith("NUMBA_CACHE_DIR=")),
    )


@cache
def _folder(source: str) -> Path | None:
    """Where loops of a file are kept: the first place of numba's that can be written. None where there is none."""
    beside = Path(source).resolve().parent
    told = os.environ.get("NUMBA_CACHE_DIR")
    mark = f"{beside.name}_{sha256(str(beside).encode()).hexdigest()[:16]}"
    places = [Path(told) / mark] if told else [beside / "__pycache__"]
    if not told:
        with suppress(RuntimeError):  # no home
            places.append(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ratrain" / "loops" / mark)
    return next((place for place in places if can_be_written(place)), None)


def can_be_written(folder: Path) -> bool:
    """Whether files can be put there; it is made if it is not there."""
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}-{threading.get_ident()}"
        probe.write_bytes(b"")
        probe.unlink()
        return True
    return False

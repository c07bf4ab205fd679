"""Loops over numbers and arrays whose machine code is kept on disk and loaded in milliseconds, without numba.

Importing numba, with all that it needs to load one function, takes most of a second. But the compiled form of a loop
that allocates nothing is one object file with one C function, which llvmlite alone can link:

    call -> forms of the arguments -> known in this process? -> call the C function
                                      kept in a file?        -> link it (milliseconds), call it
                                      else                   -> numba compiles it (seconds), write the file, link, call

The function takes its arguments by numba's calling convention: a pointer to the result, a pointer to an exception, then
each argument flattened. An array is owner, parent, number of elements, bytes of an element, data, shape and strides; a
number is itself; a tuple is its fields one after the other.

The name of the file contains a digest of everything that the code was made from: the code of the loop and of the
functions it calls, the constants that are compiled in, the types of its arguments, this module, versions, the
processor, and the NUMBA_ environment variables. So a stale file is never found, and nothing is ever invalidated.
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
"""Letter of each type of number that loops take: `?` bool, `q` 64-bit integer, `d` double."""
_C_TYPES: dict[str, Any] = {"?": ctypes.c_bool, "q": ctypes.c_int64, "d": ctypes.c_double, "p": ctypes.c_void_p}
_OF_LLVM = {"?": "i8", "q": "i64", "d": "double"}
_RESULTS: dict[str, str] = {"none": "", "int64": "q", "float64": "d", "bool": "?"}
"""Letter of a result by numba's name of its type; empty for none."""
_OUTSIDE = frozenset({"memset", "memcpy", "memmove"})
"""Functions that machine code may call outside itself; every C library has them."""
_MATHEMATICS = frozenset((
    "sin", "cos", "tan", "asin", "acos", "atan", "atan2", "sinh", "cosh", "tanh", "exp", "exp2", "exp10", "log",
    "log2", "log10", "pow", "powi", "ldexp", "frexp",
))  # fmt: skip
_OPTIONS = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True, "no_cpython_wrapper": True, "_nrt": False}
"""Options of `njit`.

`_nrt` is off because loops own no arrays, so references need not be counted; in loops that call parts with many arrays
the counting took half of the time.
"""
_LOCK = threading.Lock()
_OBJECTS: list[Any] = []
"""Linked objects of this process; a reference is kept so that their code is not freed."""


_Entry: TypeAlias = Callable[[tuple[Any, ...], list[Any]], Any]
"""Callable loop; takes the Python arguments and the flattened values that machine code takes."""


class NotAloneWarning(RuntimeWarning):
    """Warning that a loop cannot be loaded without numba."""


class _NotAloneError(Exception):
    """Error of a loop whose machine code needs more than itself."""


@define
class _Stats:
    """Counts of one loop, with the names that numba gives them."""

    cache_path: str | None = None
    cache_hits: dict[str, int] = field(factory=dict)
    cache_misses: dict[str, int] = field(factory=dict)


@define(eq=False)
class NativeLoop:
    """A compiled loop, called like the function it is made of.

    Other compiled loops cannot call it; parts serve that purpose (`loops.part`).
    """

    __wrapped__: Callable[..., Any]
    stats: _Stats = field(factory=_Stats)
    _entries: dict[Any, _Entry] = field(factory=dict)

    def __call__(self, *arguments: Any) -> Any:
        """Run the loop; the first call for given types of arguments loads it, or has numba compile it.

        A loop that needs more than itself is left to numba, with a warning; so is every loop if numba's internals
        differ from those expected here.
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
            # One thread links a loop; the others find its entry when they get the lock.
            with _LOCK:
                entry = self._entries.get(key) or self._made(arguments, key)
                self._entries[key] = entry
        return entry(arguments, values)

    def is_kept(self, *arguments: Any) -> bool:
        """Tell whether a call with arguments of these types compiles nothing: the loop is loaded, or kept on disk."""
        forms: list[Any] = []
        for argument in arguments:
            _flatten(argument, forms, [])
        if tuple(forms) in self._entries:
            return True
        folder = None if _is_disabled() else _folder(self.__wrapped__.__code__.co_filename)
        return folder is not None and self._file(folder, tuple(forms)).is_file()

    def _file(self, folder: Path, key: tuple[Any, ...]) -> Path:
        return folder / f"{self._name}-{self._digest(key)}.loop"

    @property
    def _name(self) -> str:
        return f"{self.__wrapped__.__module__}.{self.__wrapped__.__qualname__}"

    def _made(self, arguments: tuple[Any, ...], key: tuple[Any, ...]) -> _Entry:
        """Load or compile the loop for arguments of these forms; fall back to numba's own loader, with a warning."""
        try:
            return self._alone(arguments, key)
        # AttributeError and ImportError: `_compiled` uses private parts of numba, which another version may not have.
        except (AttributeError, ImportError, _NotAloneError) as error:
            name = self.__wrapped__.__qualname__
            text = f"the loop '{name}' is loaded by numba itself, which takes a second: {error}"
            warnings.warn(NotAloneWarning(text), stacklevel=3)
            loop = compiled(self.__wrapped__)
            return lambda given, _values: loop(*given)

    def _alone(self, arguments: tuple[Any, ...], key: tuple[Any, ...]) -> _Entry:
        """Link the loop from its file, or compile it and write the file.

        Raises `_NotAloneError` if its machine code needs more than itself.
        """
        name = self._name
        folder = _folder(self.__wrapped__.__code__.co_filename)
        if folder is None:
            unkept()
            self.stats.cache_misses[name] = self.stats.cache_misses.get(name, 0) + 1
            return _linked(_compiled(self.__wrapped__, arguments, key), key)
        self.stats.cache_path = str(folder)
        path = self._file(folder, key)
        kept = _read(path)
        if kept is None:
            with locked(folder / f"{name}.lock"):  # one process compiles, the others wait and then read
                kept = _read(path)
                if kept is None:
                    kept = _compiled(self.__wrapped__, arguments, key)
                    _write(path, kept)
                    self.stats.cache_misses[name] = self.stats.cache_misses.get(name, 0) + 1
                    return _linked(kept, key)
        self.stats.cache_hits[name] = self.stats.cache_hits.get(name, 0) + 1
        return _linked(kept, key)

    def _digest(self, key: tuple[Any, ...]) -> str:
        """Return the digest that names the file: of everything that the machine code is made from."""
        made_from = [
            digest_of_code(self.__wrapped__.__code__),
            *frozen_in(self.__wrapped__),
            *(repr(form.descr) if isinstance(form, np.dtype) else repr(form) for form in key),
            *_circumstances(),
        ]
        return sha256("\n".join(made_from).encode()).hexdigest()[:32]


def native(function: F) -> F:
    """Make a native loop of a function over numbers, arrays and named tuples of them.

    The function must return a number or nothing, raise nothing and allocate nothing. It runs without Python's lock,
    with IEEE division, as loops by `loops.compiled` do.
    """
    return cast("F", counted(NativeLoop(function)))


def _flatten(argument: Any, forms: list[Any], values: list[Any]) -> None:
    """Append to `forms` what machine code depends on (types, dimensions, layout), to `values` what it is given.

    Raises TypeError for an argument that is no array, number or tuple.
    """
    if isinstance(argument, np.ndarray):
        flags = argument.flags
        # numba specialises on contiguity, and on whether the array is writable and aligned.
        layout = "C" if flags.c_contiguous else "A"
        forms += (argument.dtype, f"{argument.ndim}{layout}{flags.writeable:d}{flags.aligned:d}")
        # The fields of numba's array structure. Owner (meminfo) and parent are None: the caller keeps the array alive.
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
    """Return the C types of the flattened values, one letter each."""
    found = ""
    for before, form in zip((None, *key), key, strict=False):
        # An array has two forms, its dtype and then e.g. `2C11`: the dimensions, and three characters of layout and
        # flags.
        if isinstance(before, np.dtype):
            dimensions = int(form[:-3])
            found += "ppqqp" + "q" * 2 * dimensions
        elif isinstance(form, str) and form in _C_TYPES:
            found += form
    return found


@define
class _Kept:
    """Machine code of a loop, as it is kept in a file."""

    symbol: str
    result: str
    """letter of the result's type; empty for none"""
    machine_code: bytes


def _read(path: Path) -> _Kept | None:
    """Read a loop's file; None if it is missing or damaged."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    digest, _, rest = data.partition(b"\n")
    if digest.decode("ascii", "replace") != sha256(rest).hexdigest():  # incomplete, for example after a full disk
        return None
    head, _, machine_code = rest.partition(b"\n")
    symbol, _, result = head.decode("ascii").partition(" ")
    return _Kept(symbol, result, machine_code)


def _write(path: Path, kept: _Kept) -> None:
    """Write a loop's file, complete or not at all; failing to write is no error."""
    rest = f"{kept.symbol} {kept.result}\n".encode("ascii") + kept.machine_code
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    with suppress(OSError):  # the next process compiles it again
        temporary.write_bytes(sha256(rest).hexdigest().encode("ascii") + b"\n" + rest)
        temporary.replace(path)


def _linked(kept: _Kept, key: tuple[Any, ...]) -> _Entry:
    """Link the machine code of a loop into this process; return a callable for arguments of these forms."""
    import llvmlite.binding as llvm

    _prepare_linking()
    # An engine needs a module to start from; an empty one serves, as the code comes from the object file.
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
        # The C function returns a status: 0, or another number if it raised.
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
    """Have numba compile a loop for these arguments, and return its machine code.

    Raises `_NotAloneError` if numba cannot compile it so, or the code needs anything outside itself.
    """
    import numba
    from numba.core import callconv, errors

    with_parts()
    nb: Any = numba
    conventions: Any = callconv
    made = nb.njit(**_OPTIONS)(function)
    try:
        with paused_gc():  # the compiler frees nothing until it is done
            made.compile(tuple(nb.typeof(each) for each in arguments))
    except errors.NumbaError as error:  # for example because it allocates
        raise _NotAloneError(" ".join(str(error).split())) from error
    (whole,) = made.overloads.values()
    name, types, result = function.__qualname__, whole.signature.args, whole.signature.return_type
    module = whole.library._final_module  # noqa: SLF001
    # Functions that are declared but not defined would have to be found at link time; numba's helpers would not be.
    lacking = {_called(each.name) for each in module.functions if each.is_declaration} - _OUTSIDE
    if lacking:
        raise _NotAloneError(f"{name} needs more than itself: {', '.join(sorted(lacking))}")
    if str(result) not in _RESULTS:
        raise _NotAloneError(f"{name} returns {result}")
    # Compare the C signature with what `_flatten` passes, argument by argument (after result and exception pointers).
    # A numba that lays out arguments differently is noticed here, not by a crash.
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
    """Return the outside function that machine code calls for a declared one.

    An LLVM intrinsic calls none (`memset` stands for those), except intrinsics of C's mathematics such as
    `llvm.exp.f64`.
    """
    intrinsic = name.split(".")
    if intrinsic[0] != "llvm":
        return name
    return intrinsic[1] if intrinsic[1] in _MATHEMATICS else "memset"


def _is_disabled() -> bool:
    """Tell whether numba is told not to compile (NUMBA_DISABLE_JIT)."""
    return os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0")


@cache
def _circumstances() -> tuple[str, ...]:
    """Return everything apart from the loop itself that its machine code depends on, as texts."""
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
    """Return the folder where loops of a source file are kept; None if none can be written.

    It is the first writable one of those that numba would use: NUMBA_CACHE_DIR alone if set; otherwise `__pycache__`
    next to the file, then the user's cache.
    """
    folder = Path(source).resolve().parent
    told = os.environ.get("NUMBA_CACHE_DIR")
    mark = f"{folder.name}_{sha256(str(folder).encode()).hexdigest()[:16]}"
    places = [Path(told) / mark] if told else [folder / "__pycache__"]
    if not told:
        with suppress(RuntimeError):  # the user has no home
            places.append(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ratrain" / "loops" / mark)
    return next((place for place in places if can_be_written(place)), None)


def can_be_written(folder: Path) -> bool:
    """Tell whether files can be written in a folder; make it if it does not exist."""
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}-{threading.get_ident()}"
        probe.write_bytes(b"")
        probe.unlink()
        return True
    return False

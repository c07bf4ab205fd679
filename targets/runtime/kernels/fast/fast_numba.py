"""Building blocks of the numba kernels: 16-bit conversions, exponentials that vectorise, compiler options.

Numba has no 16-bit floats on the CPU, so arrays of them are given as their bits: float16 as uint16, bfloat16 as int16.

    float16   uint16 --bitcast--> half --fpext--> float32      by the processor's instructions
    bfloat16  int16 --zext, << 16-->              float32      the upper half of a float32

Loops run from 0 over slices of one row: other index forms are not vectorised.

`ratrain.ratrain_ir.support.loops` caches compiled kernels on disk. It notices changes of a kernel's file, of the
compiled functions that it calls and of plain numbers that it uses. It does not notice changes of the intrinsics and
float32 constants of this file: after editing these, delete the `__pycache__` folders.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numba as nb
import numpy as np
from llvmlite import ir
from numba import extending
from numba.core import cgutils, types
from numba.np import arrayobj
from numpy.typing import NDArray

from ratrain.ratrain_ir.support.inner_functions import Inner
from ratrain.ratrain_ir.support.loops import compiled
from ratrain.targets.runtime.arena.dtypes import BFLOAT16

intrinsic: Callable[[Callable[..., Any]], Any] = extending.intrinsic
_populate: Callable[..., Any] = arrayobj.populate_array


exact = functools.partial(functools.partial, compiled, _nrt=False)
"""Decorator, called with options, that compiles a kernel whose every operation rounds as IEEE 754 says.

An element's result does not depend on its place in an array. Kernels own no arrays, so references are not counted
(`_nrt`), which takes a fifth off attention's compilation: a kernel may not allocate, nor call numpy's reductions.
"""


SPLIT_SUMS = {"reassoc", "contract", "nsz"}
"""Fast-math flags that let sums be split over vector lanes, by the length alone.

Infinities and NaNs keep their meaning.
"""

reducing = functools.partial(exact, fastmath=SPLIT_SUMS)

inlined = functools.partial(
    nb.njit,
    fastmath=False,
    forceinline=True,
    error_model="numpy",
    no_cfunc_wrapper=True,
    no_cpython_wrapper=True,
    _nrt=False,
    pipeline_class=Inner,
)
"""Decorator, called with options, of functions for use inside kernels; each keeps its own rounding rules there.

They are inlined unless they are exact (`called`). A kernel that calls another has a copy of it, optimised again, and
the linker takes any copy in the process: after compiling that of the function itself, after loading from the cache that
of the kernel.
"""

called = functools.partial(inlined, forceinline=False)
"""Decorator, called with options, of exact functions of which a kernel has one copy, whatever the number of calls."""

_HALF, _FLOAT, _DOUBLE = ir.HalfType(), ir.FloatType(), ir.DoubleType()
_I16, _I32 = ir.IntType(16), ir.IntType(32)


_UPPER_HALF = ir.Constant(_I32, 16)  # bits to shift by
_QUIET_NAN = ir.Constant(_I16, 0x7FC0)


def _widen_bfloat(builder: Any, bits: Any) -> Any:
    return builder.bitcast(builder.shl(builder.zext(bits, _I32), _UPPER_HALF), _FLOAT)


def _narrow_to_bfloat(builder: Any, value: Any) -> Any:
    """Round to the nearest, ties to even; a NaN becomes the NaN of its sign that `ml_dtypes` uses.

    The processor's own instruction is not used: not all processors have it, and it flushes subnormal numbers to zero.
    """
    bits = builder.bitcast(value, _I32)
    upper = builder.lshr(bits, _UPPER_HALF)
    # Adding 0x7FFF, and 1 more if the kept half is odd, carries into the kept half exactly when it must round up. Only
    # for NaNs is that wrong: they could become infinities, so they are selected apart.
    odd = builder.and_(upper, ir.Constant(_I32, 1))
    nearest = builder.add(bits, builder.add(odd, ir.Constant(_I32, 0x7FFF)))
    sign = builder.and_(builder.trunc(upper, _I16), ir.Constant(_I16, 0x8000))
    is_nan = builder.fcmp_unordered("uno", value, value)
    rounded = builder.trunc(builder.lshr(nearest, _UPPER_HALF), _I16)
    return builder.select(is_nan, builder.or_(sign, _QUIET_NAN), rounded)


_WIDEN: dict[Any, Callable[[Any, Any], Any]] = {
    types.float32: lambda _builder, value: value,
    types.uint16: lambda builder, bits: builder.fpext(builder.bitcast(bits, _HALF), _FLOAT),
    types.int16: _widen_bfloat,
}
"""Conversion of an element to float32, by the type in which loops see it."""
_NARROW: dict[Any, Callable[[Any, Any], Any]] = {
    types.float32: lambda _builder, value: value,
    types.float64: lambda builder, value: builder.fpext(value, _DOUBLE),
    types.uint16: lambda builder, value: builder.bitcast(builder.fptrunc(value, _HALF), _I16),
    types.int16: _narrow_to_bfloat,
}
"""Conversion of a float32 to an element, by the same types, or to a float64."""


@intrinsic
def load(_context: Any, stored: Any) -> Any:
    """Load a stored element (float32, or the bits of a float16 or bfloat16) as float32."""
    widen = _WIDEN.get(stored)
    return widen and (types.float32(stored), lambda _c, builder, _s, args: widen(builder, args[0]))


@intrinsic
def narrow(_context: Any, value: Any, dtype: Any) -> Any:
    """Round a float32 to an element of an array of `dtype`: itself, or the bits of the nearest float16 or bfloat16."""
    stored = dtype.dtype
    to_stored = _NARROW.get(stored) if value == types.float32 else None
    return to_stored and (stored(types.float32, dtype), lambda _c, builder, _s, args: to_stored(builder, args[0]))


@intrinsic
def half_of(_context: Any, value: Any) -> Any:
    """Round a float32 to the bits of the nearest float16."""
    if value != types.float32:
        return None
    return types.uint16(value), lambda _c, builder, _s, args: _NARROW[types.uint16](builder, args[0])


@intrinsic
def float_of_bits(_context: Any, _bits: Any) -> Any:
    """Return the float32 of 32 bits, an int32."""
    return types.float32(types.int32), lambda _c, b, _s, args: b.bitcast(args[0], _FLOAT)


@intrinsic
def bits_of_float(_context: Any, _value: Any) -> Any:
    """Return the 32 bits of a float32, as an int32."""
    return types.int32(types.float32), lambda _c, b, _s, args: b.bitcast(args[0], _I32)


@intrinsic
def round_even(_context: Any, _value: Any) -> Any:
    """Round to the nearest whole number, ties to even."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        function = builder.module.declare_intrinsic("llvm.rint", [_FLOAT])
        return builder.call(function, args)

    return types.float32(types.float32), generate


@intrinsic
def maximum(_context: Any, _a: Any, _b: Any) -> Any:
    """Return the larger of two float32; NaN if either is. Loops of it vectorise; loops of a comparison do not."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        function = builder.module.declare_intrinsic("llvm.maximum", [_FLOAT], ir.FunctionType(_FLOAT, [_FLOAT, _FLOAT]))
        return builder.call(function, args)

    return types.float32(types.float32, types.float32), generate


def _select(a: Any, b: Any, operator: str) -> Any:
    """Return the signature and the code of `b if b <operator> a else a`, for two float32 or two integers."""
    kind = types.float32 if types.float32 in (a, b) else types.int64

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        a, b = args
        compare = builder.fcmp_ordered if kind == types.float32 else builder.icmp_signed
        return builder.select(compare(operator, b, a), b, a)

    return kind(kind, kind), generate


@intrinsic
def larger(_context: Any, a: Any, b: Any) -> Any:
    """Return max(a, b). Of the built-in one numba compiles a function for each pair of types, which takes 0.03 s."""
    return _select(a, b, ">")


@intrinsic
def smaller(_context: Any, a: Any, b: Any) -> Any:
    """Return min(a, b); see `larger`."""
    return _select(a, b, "<")


@intrinsic
def span(_context: Any, array: Any, start: Any, stop: Any) -> Any:
    """Return array[start:stop], where 0 <= start <= stop <= len(array), which is not checked.

    A slice by Python's rules (negative ends, ends out of range) takes a hundred instructions, this one five.
    """
    del start, stop

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        given, start, stop = args
        of = context.make_array(signature.return_type)
        array, view = of(context, builder, given), of(context, builder)
        strides, shape = (cgutils.unpack_tuple(builder, each) for each in (array.strides, array.shape))
        data = cgutils.pointer_add(builder, array.data, builder.mul(start, strides[0]), array.data.type)
        shape[0] = builder.sub(stop, start)
        # no owner: the caller of a loop keeps its arrays
        _populate(view, data, shape, strides, array.itemsize, meminfo=None)
        return view._getvalue()  # noqa: SLF001

    return array(array, types.int64, types.int64), generate


@intrinsic
def matrix(_context: Any, line: Any, rows: Any, columns: Any) -> Any:
    """View the beginning of a contiguous line as a matrix of rows and columns, as `span` does without a check."""
    del rows, columns

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        given, rows, columns = args
        line = context.make_array(signature.args[0])(context, builder, given)
        view = context.make_array(signature.return_type)(context, builder)
        strides = [builder.mul(columns, line.itemsize), line.itemsize]
        _populate(view, line.data, [rows, columns], strides, line.itemsize, meminfo=None)
        return view._getvalue()  # noqa: SLF001

    return line.copy(ndim=2)(line, types.int64, types.int64), generate


_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)  # 9 significant bits: times an exponent it is exact
_LN2_LOW = np.float32(-2.12194440e-4)
_INFINITY = np.float32(np.inf)
_LOW = np.float32(-86.5)
_HIGH = np.float32(88.72283)
_ZERO, _ONE = np.float32(0), np.float32(1)
# minimax polynomial of (exp(r) - 1 - r) / r^2 on |r| <= ln(2) / 2 (Cephes, expf)
_C0, _C1, _C2, _C3, _C4, _C5 = (
    np.float32(c)
    for c in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
)


@inlined(fastmath={"contract"})
def exp32(x: Any) -> Any:
    """Return exp(x) of a float32, within 2 units in the last place; 0 below -86.5 (results under 2.7e-38)."""
    # exp(x) = 2^n * exp(r) with n = round(x / ln 2), |r| <= ln(2) / 2. n comes from a clamped copy, so that a NaN is
    # never converted to an integer; r keeps the NaN.
    clamped = smaller(_HIGH, larger(_LOW, x))
    n = round_even(clamped * _LOG2_E)
    # ln 2 in two parts (Cody and Waite): the first product is exact, so r loses nothing to cancellation
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    p = ((((_C0 * r + _C1) * r + _C2) * r + _C3) * r + _C4) * r + _C5
    p = p * (r * r) + r + _ONE
    # n reaches 128, which has no float32: half of the power of two, times 2
    half_power = float_of_bits((np.int32(n) + np.int32(126)) << np.int32(23))
    value = (p + p) * half_power
    if x < _LOW:
        value = _ZERO
    if x > _HIGH:
        value = _INFINITY
    return value


_LEAST_POWER = np.float32(-126)
# minimax polynomial of (2^r - 1) / r on |r| <= 1/2 (Cephes, exp2f)
_D0, _D1, _D2, _D3, _D4, _D5 = (
    np.float32(c)
    for c in (1.535336188e-4, 1.339887440e-3, 9.618437357e-3, 5.550332471e-2, 2.402264791e-1, 6.931472028e-1)
)


@inlined(fastmath={"contract"})
def power_of_two(x: Any) -> Any:
    """Return 2^x of a float32 of at most 127, within 2 units in the last place; 0 below -126 (under 1.2e-38)."""
    n = round_even(larger(_LEAST_POWER, x))
    r = x - n
    p = (((((_D0 * r + _D1) * r + _D2) * r + _D3) * r + _D4) * r + _D5) * r + _ONE
    # n + 127 in the exponent bits of a float32 is 2^n
    value = p * float_of_bits((np.int32(n) + np.int32(127)) << np.int32(23))
    if x < _LEAST_POWER:
        value = _ZERO
    return value


_TANH_END = np.float32(7.90531110763549805)  # beyond it the result is 1
# minimax quotient of tanh(x) on |x| <= _TANH_END: x * P(x^2) / Q(x^2) (Eigen, ptanh_float)
_P0, _P1, _P2, _P3, _P4, _P5, _P6 = (
    np.float32(c)
    for c in (
        *(-2.76076847742355e-16, 2.00018790482477e-13, -8.60467152213735e-11, 5.12229709037114e-08),
        *(1.48572235717979e-05, 6.37261928875436e-04, 4.89352455891786e-03),
    )
)
_Q0, _Q1, _Q2, _Q3 = (
    np.float32(c) for c in (1.19825839466702e-06, 1.18534705686654e-04, 2.26843463243900e-03, 4.89352518554385e-03)
)


@inlined(fastmath={"contract"})
def tanh32(x: Any) -> Any:
    """Return tanh(x) of a float32, with a relative error of at most 3 * 2^-23."""
    clamped = smaller(_TANH_END, larger(-_TANH_END, x))
    s = clamped * clamped
    p = (((((_P0 * s + _P1) * s + _P2) * s + _P3) * s + _P4) * s + _P5) * s + _P6
    q = ((_Q0 * s + _Q1) * s + _Q2) * s + _Q3
    value = clamped * (p / q)
    if x > _TANH_END:
        value = _ONE
    if x < -_TANH_END:
        value = -_ONE
    if np.isnan(x):
        value = x
    return value


@inlined()
def soft_capped(x: Any, softcap: Any) -> Any:
    """Return softcap * tanh(x / softcap)."""
    return softcap * tanh32(x / softcap)


@inlined()
def soft_cap_slope(capped: Any, softcap: Any) -> Any:
    """Return the derivative of `soft_capped`, given its result: 1 - tanh^2."""
    share = capped / softcap
    return _ONE - share * share


def multiplier(scale: float) -> np.float32 | None:
    """Convert a factor for `times`: None for 1, for which loops are compiled without a product."""
    return None if scale == 1 else np.float32(scale)


@inlined()
def times(value: Any, factor: Any) -> Any:
    """Return value * factor, where the factor is a `multiplier`."""
    if factor is None:
        return value
    return value * factor


_BITS: dict[np.dtype[Any], np.dtype[Any]] = {
    np.dtype(np.float16): np.dtype(np.uint16),
    BFLOAT16: np.dtype(np.int16),
}


def bits(a: NDArray[Any]) -> NDArray[Any]:
    """View an array as numba takes it: 16-bit floats as their bits, anything else unchanged.

    Raises:
        ValueError: it is not C-contiguous; the loops would be slow, and a flat view of it would be a copy.
    """
    if not a.flags.c_contiguous:
        raise ValueError(f"an array of shape {a.shape} is not C-contiguous")
    seen_as = _BITS.get(a.dtype)
    return a if seen_as is None else a.view(seen_as)


def flat(a: NDArray[Any]) -> NDArray[Any]:
    """View `bits(a)` as one row."""
    return bits(a).reshape(-1)

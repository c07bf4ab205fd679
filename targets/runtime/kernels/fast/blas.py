"""Matrix products in float32 by sgemm, from Python and from numba loops, always on the calling thread.

All go through `openblas.SGEMM`, which is read at each call of a kernel, so that a profile can replace it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from llvmlite import ir
from numba.core import types

from ratrain.targets.runtime.kernels import openblas
from ratrain.targets.runtime.kernels.fast.fast_numba import inlined, intrinsic
from ratrain.targets.runtime.kernels.openblas import AS_IS, ROWS_FIRST, TRANSPOSED
from ratrain.targets.runtime.kernels.team import PRODUCT_ROWS

if TYPE_CHECKING:
    from ratrain.targets.runtime.kernels.interface import F32
    from ratrain.targets.runtime.kernels.team import Team

_I32, _I64, _FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()
_FUNCTION = ir.FunctionType(ir.VoidType(), [_I32] * 3 + [_I64] * 3 + [_FLOAT] + [_I64] * 4 + [_FLOAT] + [_I64] * 2)


_KEEP_BITS_OF_COLUMNS = ("SkylakeX",)
"""Processor types of OpenBLAS by whose kernels a product cut at whole groups of columns has the bits of the whole.

Each thread packs its part of one factor and all of the other, so the larger factor is the one to cut. Found by trial:
2,949 products of 48 to 600 rows had the same bits by parts with SkylakeX; with Haswell a third of them had not.
"""
_LEAST_ROWS = 2 * PRODUCT_ROWS
"""Rows below which kernels for small products differ with the number of columns."""


@intrinsic
def _call(
    _context: Any,
    address: Any,
    transpose_a: Any,
    transpose_b: Any,
    m: Any,
    n: Any,
    k: Any,
    a: Any,
    lda: Any,
    b: Any,
    ldb: Any,
    beta: Any,
    c: Any,
    ldc: Any,
) -> Any:
    """Emit a call of `cblas_sgemm` at an address, for row-major matrices given by their addresses."""
    del address, transpose_a, transpose_b, m, n, k, a, lda, b, ldb, beta, c, ldc
    sizes = [types.int64] * 7
    signature = types.void(types.int64, types.int32, types.int32, *sizes, types.float32, types.int64, types.int64)

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        address, transpose_a, transpose_b, m, n, k, a, lda, b, ldb, beta, c, ldc = arguments
        function = builder.inttoptr(address, _FUNCTION.as_pointer())
        # an ordinary C call without a wrapper: the loop that has it needs no interpreter
        order, alpha = _I32(ROWS_FIRST), _FLOAT(1.0)
        builder.call(function, [order, transpose_a, transpose_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc])
        return context.get_dummy_value()

    return signature, generate


@inlined()
def multiply(sgemm: Any, a: Any, b: Any, keep: Any, out: Any) -> None:
    """Set out = keep * out + a @ b; `out` is not read if `keep` is 0. Rows may be strided, their elements not."""
    _multiply(sgemm, np.int32(AS_IS), a, a.shape[1], np.int32(AS_IS), b, keep, out)


@inlined()
def multiply_by(sgemm: Any, a: Any, b: Any, trans_b: Any, keep: Any, out: Any) -> None:
    """Set out = keep * out + a @ b, or a @ b^T if `trans_b`, as `multiply` does."""
    transpose_b = np.int32(TRANSPOSED) if trans_b else np.int32(AS_IS)
    _multiply(sgemm, np.int32(AS_IS), a, a.shape[1], transpose_b, b, keep, out)


@inlined()
def multiply_transposed(sgemm: Any, a: Any, b: Any, keep: Any, out: Any) -> None:
    """Set out = keep * out + a^T @ b, as `multiply` does."""
    _multiply(sgemm, np.int32(TRANSPOSED), a, a.shape[0], np.int32(AS_IS), b, keep, out)


@inlined()
def _multiply(sgemm: Any, transpose_a: Any, a: Any, depth: Any, transpose_b: Any, b: Any, keep: Any, out: Any) -> None:
    _call(
        sgemm,
        transpose_a,
        transpose_b,
        out.shape[0],
        out.shape[1],
        depth,
        a.ctypes.data,
        a.strides[0] // a.itemsize,
        b.ctypes.data,
        b.strides[0] // b.itemsize,
        keep,
        out.ctypes.data,
        out.strides[0] // out.itemsize,
    )


def share_product(team: Team, a: F32, b: F32, out: F32, then: Callable[[slice], None] | None = None) -> None:
    """Compute out = a @ b by ranges of rows, each followed by `then(rows)`; a and b may be transposed.

    Without `then`, columns are cut in place of rows where that moves fewer elements and keeps the product's bits.
    """
    if then is None and b.size > a.size and len(a) >= _LEAST_ROWS and openblas.core_type() in _KEEP_BITS_OF_COLUMNS:
        team.run(lambda columns: _matmul(a, b[:, columns], out[:, columns]), team.product_columns(out.shape[1], a.size))
        return

    def part(rows: slice) -> None:
        _matmul(a[rows], b, out[rows])
        if then is not None:
            then(rows)

    team.run(part, team.product_rows(len(out), b.size))


def _matmul(a: F32, b: F32, out: F32) -> None:
    (transpose_a, lda), (transpose_b, ldb), (_, ldc) = _layout(a), _layout(b), _layout(out)
    openblas.Sgemm(openblas.SGEMM)(
        ROWS_FIRST,
        transpose_a,
        transpose_b,
        *out.shape,
        a.shape[1],
        1.0,
        a.ctypes.data,
        lda,
        b.ctypes.data,
        ldb,
        0.0,
        out.ctypes.data,
        ldc,
    )


def _layout(matrix: F32) -> tuple[int, int]:
    """Return BLAS's constant for a stored transposition, and the distance of stored rows in elements."""
    (rows, columns), (down, right) = matrix.shape, matrix.strides
    # BLAS refuses a row distance below the row's length, which numpy may give for a single row
    if right == matrix.itemsize:
        return AS_IS, max(down // matrix.itemsize, columns)
    return TRANSPOSED, max(right // matrix.itemsize, rows)

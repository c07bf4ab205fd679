"""Matrix products in float32 by sgemm, from Python and from numba loops, always on the calling thread.

All go through `openblas.SGEMM`, which is read at each call of a kernel, so that a profile can replace it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from llvmlite import ir
from numba.core import types

from ratrain.targets.runtime.kernels import openblas
from ratrain.targets.runtime.kernels.fast.fast_numba import intrinsic
from ratrain.targets.runtime.kernels.openblas import AS_IS, ROWS_FIRST, TRANSPOSED
from ratrain.targets.runtime.kernels.team import LINE_BYTES, PRODUCT_ROWS

if TYPE_CHECKING:
    from ratrain.targets.runtime.kernels.interface import F32
    from ratrain.targets.runtime.kernels.team import Team

_I32, _I64, _FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()
_FUNCTION = ir.FunctionType(ir.VoidType(), [_I32] * 3 + [_I64] * 3 + [_FLOAT] + [_I64] * 4 + [_FLOAT] + [_I64] * 2)


_KEEP_BITS = ("SkylakeX",)
"""Processor types of OpenBLAS by whose kernels a product has the bits of the whole wherever it is cut.

Found by trial with SkylakeX: the same bits in 2,949 products of 48 to 600 rows cut at whole groups of columns, and in
1,200 of 48 to 700 rows cut at rows. With Haswell a third of the former had not; of the latter, a tenth of those not cut
at `PRODUCT_ROWS` had. Each thread packs its part of one factor and all of the other, so the larger is the one to cut.
"""
_LINE_ROWS = LINE_BYTES // 4
"""Float32 elements of a cache line, so rows at whose multiples a factor that is stored transposed is cut."""
_LEAST_ROWS = 2 * PRODUCT_ROWS
"""Rows below which kernels for small products differ with the number of columns."""


def _product(address: Any, a: Any, b: Any, keep: Any, out: Any, *options: Any, transpose_a: int) -> tuple[Any, Any]:
    """Return the signature and the code of a call of `cblas_sgemm` at an address, for row-major matrices.

    The code is emitted whole: as numba would compile it from Python, the shapes and strides of three arrays take more
    of a first start than the loops around a product. An option, if given, is true for b^T.
    """
    del address, keep
    signature = types.void(types.int64, a, b, types.float32, out, *options)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, a, b, keep, out, *transposed = arguments
        places, shapes, strides = zip(
            *(_laid_out(context, builder, signature.args[n], matrix) for n, matrix in ((1, a), (2, b), (4, out))),
            strict=True,
        )
        rows, columns = shapes[2]
        depth = shapes[0][0] if transpose_a == TRANSPOSED else shapes[0][1]
        transpose_b = builder.select(transposed[0], _I32(TRANSPOSED), _I32(AS_IS)) if transposed else _I32(AS_IS)
        # an ordinary C call without a wrapper: the loop that has it needs no interpreter
        order = [_I32(ROWS_FIRST), _I32(transpose_a), transpose_b, rows, columns, depth, _FLOAT(1.0)]
        arrays = [places[0], strides[0], places[1], strides[1], keep, places[2], strides[2]]
        builder.call(builder.inttoptr(address, _FUNCTION.as_pointer()), order + arrays)
        return context.get_dummy_value()

    return signature, generate


def _laid_out(context: Any, builder: Any, given: Any, matrix: Any) -> tuple[Any, list[Any], Any]:
    """Return the address of a float32 matrix, its shape, and the elements from row to row."""
    array = context.make_array(given)(context, builder, matrix)
    stride = builder.ashr(builder.extract_value(array.strides, 0), _I64(2))  # bytes to elements
    shape = [builder.extract_value(array.shape, axis) for axis in range(2)]
    return builder.ptrtoint(array.data, _I64), shape, stride


@intrinsic
def multiply(_context: Any, sgemm: Any, a: Any, b: Any, keep: Any, out: Any) -> Any:
    """Set out = keep * out + a @ b; `out` is not read if `keep` is 0. Rows may be strided, their elements not."""
    return _product(sgemm, a, b, keep, out, transpose_a=AS_IS)


@intrinsic
def multiply_by(_context: Any, sgemm: Any, a: Any, b: Any, keep: Any, out: Any, trans_b: Any) -> Any:
    """Set out = keep * out + a @ b, or a @ b^T if `trans_b`, as `multiply` does."""
    return _product(sgemm, a, b, keep, out, trans_b, transpose_a=AS_IS)


@intrinsic
def multiply_transposed(_context: Any, sgemm: Any, a: Any, b: Any, keep: Any, out: Any) -> Any:
    """Set out = keep * out + a^T @ b, as `multiply` does."""
    return _product(sgemm, a, b, keep, out, transpose_a=TRANSPOSED)


def has_bits_of_whole() -> bool:
    """Tell whether this processor's kernels give a product the same bits wherever it is cut."""
    return openblas.core_type() in _KEEP_BITS


def share_product(team: Team, a: F32, b: F32, out: F32, then: Callable[[slice], None] | None = None) -> None:
    """Compute out = a @ b by ranges of rows, each followed by `then(rows)`; a and b may be transposed.

    Without `then`, columns are cut in place of rows where that moves fewer elements and keeps the product's bits.
    """
    if then is None and b.size > a.size and len(a) >= _LEAST_ROWS and has_bits_of_whole():
        team.run(lambda columns: product(a, b[:, columns], out[:, columns]), team.product_columns(out.shape[1], a.size))
        return

    def part(rows: slice) -> None:
        product(a[rows], b, out[rows])
        if then is not None:
            then(rows)

    team.run(part, product_rows(team, len(out), b.size))


def product_rows(team: Team, rows: int, size: int) -> list[slice]:
    """Cut the rows of a product into the ranges of threads; `size` is the number of elements of its other factor."""
    return team.product_rows(rows, size, _LINE_ROWS if has_bits_of_whole() else PRODUCT_ROWS)


def product(a: F32, b: F32, out: F32, *, add: bool = False) -> None:
    """Set out = [out +] a @ b on this thread; a and b may be transposed."""
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
        float(add),
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

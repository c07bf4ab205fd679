"""Products on tensors, accumulated in float32 and rounded once.

If both factors have 16 bits and the device is a GPU, the library multiplies them into float32 directly. Otherwise they
are first copied to float32, which changes no product, block by block, so that scratch does not grow with the matrices.

Gradients of a router are float32, its inputs and weights bfloat16. On a GPU the float32 factor is written as the sum of
three bfloat16, high + middle + low, which have all its 24 bits, and the library multiplies these side by side:

    [high middle low] @ [b b b]^T,   or   [high middle low]^T @ b, whose three products are then added
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen

from ratrain.targets.program.kernel_options import ProductOptions
from ratrain.targets.pytorch.device.device_common import (
    Array,
    add_wide,
    chunk_buffers,
    chunk_rows,
    fits_chunk,
    row_chunks,
    row_steps,
    shaped,
    size,
    store_sum,
    stored,
    sum_rows,
    wide,
)
from ratrain.targets.runtime.arena.scratch import Buffer

if TYPE_CHECKING:
    from ratrain.targets.pytorch.device.device_common import F32
    from ratrain.targets.runtime.arena.scratch import Plan


def stores_float32() -> bool:
    """Return whether this PyTorch multiplies 16-bit factors into float32 on a GPU, and adds to it: from 2.10 on.

    Before (pull request 167931 of pytorch/pytorch) what is added had to have the factors' type.
    """
    return bool(torch.__version__ >= "2.10")  # compared as versions


def multiply_halves(a: Array, b: Array, out: Array, added: Array | None = None) -> Array:
    """Set out = a @ b [+ added] of 16-bit matrices, or batches of them, summed in float32 and rounded once.

    `out` is float32 or of their type, and so is `added`. PyTorch stores float32 on CUDA only.
    """
    options: dict[str, Any] = {} if out.dtype == a.dtype else {"out_dtype": torch.float32}
    if added is not None:
        return torch.addmm(added, a, b, out=out, **options)
    product = torch.mm if a.dim() == 2 else torch.bmm
    return product(a, b, out=out, **options)


def multiply(a: Array, b: Array, out: F32) -> F32:
    """Set out = a @ b of matrices, or batches of them: both float32, or both as `factor` returns them."""
    if a.dtype != torch.float32:
        return multiply_halves(a, b, out)
    return torch.mm(a, b, out=out) if a.dim() == 2 else torch.bmm(a, b, out=out)


def factor(buffer: Array, source: Array, *, halves: bool) -> Array:
    """Copy a factor contiguously into a float32 buffer for `multiply`: in 16 bits if stored so and `halves`."""
    if halves and source.dtype != torch.float32:
        return stored(buffer, source.shape, source.dtype).copy_(source)
    return wide(buffer, source)


def operand(buffer: Array, source: Array, *, halves: bool) -> Array:
    """Return a factor that is a matrix as `multiply` takes it: the matrix itself if possible, else a float32 copy."""
    return source if halves or source.dtype == torch.float32 else wide(buffer, source)


def product_shape(a: Array, b: Array, *, trans_a: bool, trans_b: bool) -> tuple[int, int, int]:
    """Return rows, columns and inner dimension of op(a) @ op(b)."""
    rows, inner = tuple(a.shape)[::-1] if trans_a else a.shape
    return rows, b.shape[0] if trans_b else b.shape[1], inner


def _is_half(x: Array) -> bool:
    """Return whether a tensor, or an array that stands for one, has 16-bit elements."""
    return bool(x.dtype.itemsize == 2)


def _is_stored_by_library(a: Array, out: Array, added: list[Array]) -> bool:
    """Return whether a product of 16-bit factors, with at most one matrix added, can be stored as it is multiplied."""
    if len(added) > 1 or (out.dtype != a.dtype and out.dtype.itemsize != 4):
        return False
    return all(each.dtype == out.dtype and len(each.shape) > 1 for each in added)  # a bias has one dimension


def gemm_plan(a: Array, b: Array, out: Array, *, halves: bool, **options: Any) -> Plan:
    """Plan rows of op(a), columns of op(b), their product and an addend, each empty if not needed."""
    given = ProductOptions(**options)
    rows, columns, inner = product_shape(a, b, trans_a=given.trans_a, trans_b=given.trans_b)
    added = [out] * given.accumulate + [each for each in (given.bias, given.residual) if each is not None]
    if (parts := Parts.plan(a, b, out, halves=halves, **options)) is not None:
        return parts
    if halves and _is_half(a) and a.dtype == b.dtype:
        if _is_stored_by_library(a, out, added):
            return []
        product = chunk_buffers(1, rows, columns)
        return [Buffer((0,)), Buffer((0,)), *product, *(product if added else [Buffer((0,))])]
    some_rows, some_columns = _block(rows, columns, inner)
    product = [Buffer((some_rows * some_columns,))]
    return [
        Buffer((some_rows * inner if _is_half(a) else 0,)),
        Buffer((some_columns * inner if _is_half(b) else 0,)),
        *product,
        *(product if added else [Buffer((0,))]),
    ]


def _block(rows: int, columns: int, inner: int) -> tuple[int, int]:
    """Return rows and columns of a block of a product whose copied factors, like it, fit a chunk if possible."""
    some_columns = chunk_rows(columns, inner)
    return chunk_rows(rows, max(inner, some_columns)), some_columns


PARTS = 3
"""Bfloat16 numbers that have the 24 bits of a float32."""


@frozen
class Parts:
    """Buffers of a product of a float32 matrix `a`, as three bfloat16, with a bfloat16 matrix `b`."""

    rows: Array
    """Some rows of `a`, float32."""
    parts: Array
    """Their parts, side by side."""
    repeated: Array
    """Matrix `b`, three times one below the other, if `a` is not transposed."""
    products: Array
    """Products of the parts of a transposed `a`, float32."""
    term: Array
    """An addend of their sum."""

    @staticmethod
    def plan(a: Array, b: Array, out: Array, *, halves: bool, **options: Any) -> Plan | None:
        """Plan the buffers; None if the product is made another way."""
        if not halves or _is_half(a) or not str(b.dtype).endswith("bfloat16"):
            return None
        given = ProductOptions(**options)
        rows, columns, inner = product_shape(a, b, trans_a=given.trans_a, trans_b=given.trans_b)
        added = [out] * given.accumulate + [each for each in (given.bias, given.residual) if each is not None]
        if not given.trans_a:
            if not fits_chunk(PARTS * inner * columns) or not _is_stored_by_library(b, out, added):
                return None
            some = chunk_rows(rows, PARTS * inner)
            repeated = _floats(PARTS * inner * columns)
            return [Buffer((some * inner,)), Buffer((_floats(some * PARTS * inner),)), Buffer((repeated,)), *_NONE]
        if not fits_chunk(PARTS * max(size(a), rows * columns)) or len(added) > given.accumulate:
            return None
        term = [Buffer((rows * columns if given.accumulate else 0,))]
        of_parts = Buffer((_floats(PARTS * size(a)),))
        return [Buffer((size(a),)), of_parts, Buffer((0,)), Buffer((PARTS * rows * columns,)), *term]

    def split(self, a: F32) -> Array:
        """Return the parts of some rows [rows, 3 * columns]."""
        rest, parts = wide(self.rows, a), stored(self.parts, (len(a), PARTS, a.shape[1]), torch.bfloat16)
        for index in range(PARTS):
            part = parts[:, index].copy_(rest)
            rest.sub_(part)
        return parts.view(len(a), PARTS * a.shape[1])

    def multiply(self, a: F32, b: Array, out: Array, given: ProductOptions) -> None:
        """Set out = op(a) @ op(b), with what is added."""
        right = b.T if given.trans_b else b
        if given.trans_a:
            products = multiply_halves(self.split(a).T, right, shaped(self.products, (PARTS * a.shape[1], len(out.T))))
            total, *others = products.view(PARTS, *out.shape)
            for each in others:
                total.add_(each)
            store_sum(total, self.term, out, accumulate=given.accumulate)
            return
        repeated = stored(self.repeated, (PARTS, *right.shape), b.dtype).copy_(right)
        added = out if given.accumulate else given.residual
        for rows in row_chunks(len(a), PARTS * a.shape[1]):
            some = None if added is None else added[rows]
            multiply_halves(self.split(a[rows]), repeated.view(-1, right.shape[1]), out[rows], some)


_NONE = [Buffer((0,)), Buffer((0,))]


def _floats(halves: int) -> int:
    """Return the float32 numbers that hold some 16-bit ones."""
    return -(-halves // 2)


def column_sum_plan(a: Array, **_: object) -> Plan:
    """Plan some rows, their sum, the sum of all."""
    return [*chunk_buffers(1, *a.shape), Buffer((a.shape[1],)), Buffer((a.shape[1],))]


class DeviceProducts:
    """The kernels of `TorchDevice` that multiply matrices or sum rows."""

    halves: bool
    """True if 16-bit factors are multiplied without conversion."""

    def gemm(self, a, b, out, *, scratch, **options):
        given = ProductOptions(**options)
        assert given.half_run is None, "refused where scratch is sized"
        buffers = scratch.take_all(gemm_plan(a, b, out, halves=self.halves, **options))
        trans_a, trans_b = given.trans_a, given.trans_b
        rows, columns, inner = product_shape(a, b, trans_a=trans_a, trans_b=trans_b)
        if not buffers:
            left, right = a.T if trans_a else a, b.T if trans_b else b
            multiply_halves(left, right, out, out if given.accumulate else given.residual)
            return
        if Parts.plan(a, b, out, halves=self.halves, **options) is not None:
            Parts(*buffers).multiply(a, b, out, given)
            return
        # empty buffers stand for copies that are not needed
        of_a, of_b, of_product, term = buffers
        direct = self.halves and _is_half(a) and a.dtype == b.dtype
        # uncopied factors are cut by rows only; copied ones into blocks whose copies fit a chunk
        some_rows, some_columns = (chunk_rows(rows, columns), columns) if direct else _block(rows, columns, inner)
        stores_itself = out.dtype == torch.float32 and given.is_plain
        for across in row_steps(columns, some_columns):
            right = b[across] if trans_b else b[:, across]
            right = operand(of_b, right, halves=direct)
            for down in row_steps(rows, some_rows):
                left = a[:, down] if trans_a else a[down]
                left = operand(of_a, left, halves=direct)
                target = out[down, across]
                product = target if stores_itself else shaped(of_product, target.shape)
                multiply(left.T if trans_a else left, right.T if trans_b else right, product)
                # float32 results with nothing to add are multiplied in place
                if stores_itself:
                    continue
                if given.accumulate:
                    add_wide(product, term, target)
                if given.bias is not None:
                    add_wide(product, term, given.bias[across])
                if given.residual is not None:
                    add_wide(product, term, given.residual[down, across])
                target.copy_(product)

    def column_sum(self, a, out, *, scratch, accumulate):
        buffer, part, total = scratch.take_all(column_sum_plan(a))
        total.zero_()
        for rows in row_chunks(*a.shape):
            total.add_(sum_rows(wide(buffer, a[rows]), part))
        store_sum(total, part, out, accumulate=accumulate)

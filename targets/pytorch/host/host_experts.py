"""Products of experts' rows in bfloat16 on the host: by oneDNN, in blocks of `ROW_BLOCK` rows, gathered as they are.

Each product is rounded to bfloat16, as in `gemm` of this set; `expert_sums` adds them in float32. Other types are
multiplied as in `fast`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ratrain.targets.program.expert_kernels import ROW_BLOCK
from ratrain.targets.pytorch.device.tensors import are_multiplied_here, multiply, tensor_of
from ratrain.targets.pytorch.host.product_loops import add_rows, add_to_product, copy_rows
from ratrain.targets.runtime.arena.dtypes import BFLOAT16
from ratrain.targets.runtime.arena.scratch import Buffer, Plan
from ratrain.targets.runtime.kernels.fast.expert_loops import STORE_WORK
from ratrain.targets.runtime.kernels.fast.fast_experts import (
    FastExperts,
    expert_gradients_plan,
    expert_rows_plan,
    expert_sums_plan,
)
from ratrain.targets.runtime.kernels.fast.fast_numba import bits
from ratrain.targets.runtime.kernels.shared import expert_runs, rows_of_experts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ratrain.targets.runtime.kernels.interface import F32, I32, Array

_PANEL = 512
"""Columns of a sum that are computed at a time: oneDNN is near its full speed."""
_TILE_ROWS = 256
"""Rows of an expert's gradient that are computed at a time."""


def rows_plan(a: Array, b: Array, out: Array, *, threads: int, trans_b: bool = False, **_: object) -> Plan:
    """Plan for each thread a block of rows and its product, in bfloat16."""
    if not are_multiplied_here(a, b):
        return expert_rows_plan(a, out, threads=threads, trans_b=trans_b)
    return _block_plan(a.shape[1], out.shape[1], threads)


def sums_plan(a: Array, b: Array, out: Array, *, threads: int, trans_b: bool = False, **_: object) -> Plan:
    """Plan the same buffers for the columns of a panel."""
    if not are_multiplied_here(a, b):
        return expert_sums_plan(a, out, threads=threads, trans_b=trans_b)
    return _block_plan(a.shape[1], min(_PANEL, out.shape[1]), threads)


def _block_plan(inner: int, width: int, threads: int) -> Plan:
    return [Buffer((threads, ROW_BLOCK, inner), BFLOAT16), Buffer((threads, ROW_BLOCK, width), BFLOAT16)]


def gradients_plan(
    a: Array,
    b: Array,
    out: Array,
    *,
    threads: int,
    gathers_a: bool,
    order: I32 | None = None,
    accumulate: bool = False,
    **_: object,
) -> Plan:
    """Plan for each thread an expert's rows of the factor with an order, and a tile unless `out` is in bfloat16."""
    if not are_multiplied_here(a, b):
        return expert_gradients_plan(a, b, out, threads=threads, accumulate=accumulate)
    gathered = a if gathers_a else b
    rows = [] if order is None else [Buffer((threads, *gathered.shape), BFLOAT16)]
    tile = Buffer((threads, min(_TILE_ROWS, out.shape[1]), out.shape[2]), BFLOAT16)
    return rows if out.dtype == BFLOAT16 else [*rows, tile]


class ExpertsOnHost(FastExperts):
    """The kernels of `TorchOnHost` that multiply experts' rows."""

    def expert_rows(self, a, b, bounds, out, *, order=None, scratch, trans_b=False, accumulate=False):
        if not are_multiplied_here(a, b):
            options = {"order": order, "trans_b": trans_b, "accumulate": accumulate}
            super().expert_rows(a, b, bounds, out, scratch=scratch, **options)
            return
        blocks, products = scratch.take_all(rows_plan(a, b, out, threads=self.team.threads))
        choices, runs = len(out) // len(a), list(expert_runs(bounds, ROW_BLOCK))
        source, stored, at_once = bits(a), bits(out), out.dtype == BFLOAT16 and not accumulate

        def part(numbered: tuple[int, slice]) -> None:
            number, mine = numbered
            block, product = blocks[number], products[number]
            for expert, rows in runs[mine]:
                copy_rows(source, order, choices, rows.start, rows.stop, bits(block))
                matrix = tensor_of(b[expert])
                direct = at_once and rows.stop - rows.start == ROW_BLOCK
                to = out[rows] if direct else product
                multiply(tensor_of(block), matrix.T if trans_b else matrix, tensor_of(to))
                if not direct:
                    add_to_product(bits(product), stored[rows] if accumulate else None, None, None, stored[rows])

        size = ROW_BLOCK * a.shape[1] * out.shape[1]
        self.team.run(part, list(enumerate(self.team.products(len(runs), size))))

    def expert_sums(self, a, b, order, bounds, sums, out, *, residual=None, scratch, trans_b=False, accumulate=False):
        if not are_multiplied_here(a, b):
            options = {"residual": residual, "trans_b": trans_b, "accumulate": accumulate}
            super().expert_sums(a, b, order, bounds, sums, out, scratch=scratch, **options)
            return
        blocks, products = scratch.take_all(sums_plan(a, b, out, threads=self.team.threads))
        columns, width = out.shape[1], products.shape[2]

        def part(numbered: tuple[int, slice]) -> None:
            number, mine = numbered
            for panel in range(mine.start, mine.stop):
                at = slice(panel * width, min((panel + 1) * width, columns))
                product = products[number].reshape(-1)[: ROW_BLOCK * (at.stop - at.start)].reshape(ROW_BLOCK, -1)
                _sum_panel(a, b, order, bounds, sums, at, blocks[number], product, trans_b=trans_b)

        panels = self.team.products(-(-columns // width), len(a) * a.shape[1] * width)
        self.team.run(part, list(enumerate(panels)))
        self._store_sums(sums, out, residual, accumulate)

    def expert_gradients(self, a, b, bounds, out, *, order=None, scratch, gathers_a, accumulate):
        if not are_multiplied_here(a, b):
            options = {"order": order, "gathers_a": gathers_a, "accumulate": accumulate}
            super().expert_gradients(a, b, bounds, out, scratch=scratch, **options)
            return
        plan = gradients_plan(a, b, out, threads=self.team.threads, gathers_a=gathers_a, order=order)
        buffers = scratch.take_all(plan)
        gathered, products = buffers[: order is not None], buffers[order is not None :]
        source, choices = bits(a if gathers_a else b), max(len(a), len(b)) // min(len(a), len(b))
        tiles = list(_tiles(bounds, out))
        work = sum(rows.stop - rows.start + STORE_WORK for _, rows, _ in tiles)

        def part(numbered: tuple[int, slice]) -> None:
            number, mine = numbered
            position, held, left, right = 0, -1, a, b
            for expert, rows, at in tiles:
                is_mine = mine.start <= position < mine.stop
                position += rows.stop - rows.start + STORE_WORK
                if not is_mine:
                    continue
                if expert != held:
                    held, left, right = expert, a[rows], b[rows]
                    if order is not None:
                        taken = gathered[0][number, : rows.stop - rows.start]
                        copy_rows(source, order, choices, rows.start, rows.stop, bits(taken))
                        left, right = (taken, right) if gathers_a else (left, taken)
                _store_tile(left, right, at, out[expert], products[0][number] if products else None, accumulate)

        shares = self.team.products(work, min(_TILE_ROWS, out.shape[1]) * out.shape[2])
        self.team.run(part, list(enumerate(shares)))


def _sum_panel(
    a: Array, b: Array, order: I32, bounds: I32, sums: F32, at: slice, block: Array, product: Array, *, trans_b: bool
) -> None:
    """Set columns of `sums` = the sums of products of all experts' rows, in ascending order of experts."""
    sums[:, at] = 0
    choices, to = len(a) // len(sums), tensor_of(product)
    for expert, rows in expert_runs(bounds, ROW_BLOCK):
        left = a[rows]
        if len(left) < ROW_BLOCK:
            copy_rows(bits(a), None, choices, rows.start, rows.stop, bits(block))
            left = block
        matrix = tensor_of(b[expert])
        multiply(tensor_of(left), matrix[at].T if trans_b else matrix[:, at], to)
        add_rows(bits(product), order, choices, rows.start, rows.stop, sums, at.start)


def _tiles(bounds: I32, out: Array) -> Iterator[tuple[int, slice, slice]]:
    """Yield each tile of the gradients: its expert, that one's rows, and the rows of its gradient."""
    for expert, rows in enumerate(rows_of_experts(bounds)):
        for start in range(0, out.shape[1], _TILE_ROWS):
            yield expert, rows, slice(start, min(start + _TILE_ROWS, out.shape[1]))


def _store_tile(left: Array, right: Array, at: slice, out: Array, product: Any, accumulate: bool) -> None:
    """Set rows of out = [out +] left^T @ right, through `product` unless it is None. Without rows, the product is 0."""
    factor = tensor_of(left)[:, at].T
    if product is None:
        to = tensor_of(out[at])
        multiply(factor, tensor_of(right), to, to if accumulate else None)
        return
    product = product[: at.stop - at.start]
    multiply(factor, tensor_of(right), tensor_of(product))
    stored = bits(out[at])
    add_to_product(bits(product), stored if accumulate else None, None, None, stored)

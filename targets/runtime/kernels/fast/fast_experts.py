"""Kernels of expert blocks in `fast`: products by BLAS in blocks of `ROW_BLOCK` rows, all else in fused loops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ratrain.targets.program.expert_kernels import ROW_BLOCK
from ratrain.targets.program.kernel_options import RouterOptions
from ratrain.targets.runtime.arena.scratch import Buffer, Plan
from ratrain.targets.runtime.kernels import openblas
from ratrain.targets.runtime.kernels.fast import expert_loops, fast_rows, router_loops
from ratrain.targets.runtime.kernels.fast.expert_loops import (
    STORE_WORK,
    TILE_COLUMNS,
    TILE_DEPTH,
    TILE_ROWS,
)
from ratrain.targets.runtime.kernels.fast.fast_mlp import gated_backward_plan
from ratrain.targets.runtime.kernels.fast.fast_numba import bits, flat
from ratrain.targets.runtime.kernels.shared import check_experts, counted_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from ratrain.targets.runtime.kernels.interface import F32, I32, Array
    from ratrain.targets.runtime.kernels.team import Team

_PANEL, _SUM_PANEL = 512, 256
"""Columns of a panel: BLAS is near its full speed. Fewer for sums, where threads share out nothing but panels."""

_NO_BIAS = np.zeros(0, np.float32)

_LINE = 2048
"""Most columns of a token that are summed at a time: a line of them stays in the first cache."""

_PAD = 16
"""Elements behind each row of a buffer: rows a multiple of 4 KiB apart would compete for the same cache lines."""


def expert_rows_plan(a: Array, out: Array, *, threads: int, trans_b: bool = False, **_: object) -> Plan:
    """Plan for each thread a panel of an expert's matrix, a block of rows and their product, in float32."""
    return _product_plan(a.shape[1], min(_PANEL, out.shape[1]), threads, trans_b)


def expert_sums_plan(a: Array, out: Array, *, threads: int, trans_b: bool = False, **_: object) -> Plan:
    """Plan the same buffers with a narrower panel."""
    return _product_plan(a.shape[1], min(_SUM_PANEL, out.shape[1]), threads, trans_b)


def _product_plan(inner: int, width: int, threads: int, trans_b: bool) -> Plan:
    panel = (width, inner + _PAD) if trans_b else (inner, width + _PAD)
    return [Buffer((threads, *panel)), Buffer((threads, ROW_BLOCK, inner + _PAD)), Buffer((threads, ROW_BLOCK, width))]


def expert_gradients_plan(
    a: Array, b: Array, out: Array, *, threads: int, accumulate: bool = False, **_: object
) -> Plan:
    """Plan for each thread rows of both factors, and a tile unless it can be stored at once, in float32."""
    _, rows, columns = out.shape
    height, width, depth = min(TILE_ROWS, rows), min(TILE_COLUMNS, columns), min(TILE_DEPTH, len(a), len(b))
    factors = [Buffer((threads, depth, height + _PAD)), Buffer((threads, depth, width + _PAD))]
    at_once = out.dtype == np.float32 and not accumulate
    return factors if at_once else [*factors, Buffer((threads, height, width + _PAD))]


def choice_sums_plan(out: Array, *, threads: int, **_: object) -> Plan:
    """Plan for each thread a line of sums, in float32."""
    return [Buffer((threads, min(_LINE, out.shape[1])))]


class FastExperts:
    """The kernels of `Fast` for blocks of experts."""

    team: Team

    def route_forward(self, logits, chosen, weights, *, bias=None, scratch, normalise):
        added = _NO_BIAS if bias is None else bias

        def part(rows: slice) -> None:
            router_loops.route_forward(logits[rows], chosen[rows], weights[rows], added, normalise)

        self.team.run(part, self.team.rows(logits.shape))

    def route_backward(self, logits, chosen, weights, dweights, bounds, dlogits, *, scratch, **options):
        given = RouterOptions(**options)
        tokens, experts = logits.shape
        step = 1.0 if given.scale is None else float(given.scale[0])
        pull = np.float32(given.pull(tokens, experts, chosen.shape[1]) * step)
        push = np.float32(given.push(tokens) * step)

        def part(rows: slice) -> None:
            operands = logits[rows], chosen[rows], weights[rows], dweights[rows]
            router_loops.route_backward(*operands, bounds, dlogits[rows], given.normalise, pull, push)

        self.team.run(part, self.team.rows(logits.shape))

    def group_rows(self, chosen, order, bounds, *, scratch):
        check_experts(chosen, len(bounds) - 1)
        router_loops.group_rows(chosen.reshape(-1), order, bounds)

    def add_rows(self, bounds, counts, *, scratch):
        counts += bounds[1:]
        counts -= bounds[:-1]

    def expert_rows(self, a, b, bounds, out, *, order=None, scratch, trans_b=False, accumulate=False):
        buffers = scratch.take_all(expert_rows_plan(a, out, threads=self.team.threads, trans_b=trans_b))
        products = int(-(-np.diff(bounds) // ROW_BLOCK).sum()) * -(-out.shape[1] // _PANEL)
        shares = self.team.products(products, ROW_BLOCK * buffers[0][0].size)
        operands = (bits(a), bits(b), order, len(out) // len(a), bounds, bits(out), bool(trans_b), bool(accumulate))
        self._share_products(expert_loops.expert_rows, operands, shares, buffers)

    def expert_sums(self, a, b, order, bounds, sums, out, *, residual=None, scratch, trans_b=False, accumulate=False):
        buffers = scratch.take_all(expert_sums_plan(a, out, threads=self.team.threads, trans_b=trans_b))
        shares = self.team.products(-(-out.shape[1] // _SUM_PANEL), len(a) * buffers[0][0].size)
        operands = (bits(a), bits(b), order, len(a) // len(out), bounds, sums, bool(trans_b))
        self._share_products(expert_loops.expert_sums, operands, shares, buffers)
        self._store_sums(sums, out, residual, accumulate)

    def _store_sums(self, sums: F32, out: Array, residual: Array | None, accumulate: bool) -> None:
        """Set out = [out +] sums [+ residual], rounded; `sums` is overwritten."""
        stored = bits(out)
        extra = stored if residual is None else bits(residual)

        def store(rows: slice) -> None:
            at = stored[rows]
            fast_rows.store_product(sums[rows], at, stored[0], False, extra[rows], residual is not None, accumulate)

        self.team.run(store, self.team.rows(out.shape))

    def choice_sums(self, a, out, *, residual=None, scratch, accumulate=False):
        (lines,) = scratch.take_all(choice_sums_plan(out, threads=self.team.threads))
        source, stored, choices = bits(a), bits(out), len(a) // len(out)
        extra = stored if residual is None else bits(residual)

        def part(numbered: tuple[int, slice]) -> None:
            number, rows = numbered
            own = source[rows.start * choices : rows.stop * choices], stored[rows], extra[rows]
            expert_loops.choice_sums(*own, residual is not None, bool(accumulate), lines[number])

        self.team.run(part, list(enumerate(self.team.rows(out.shape))))

    def expert_gradients(self, a, b, bounds, out, *, order=None, scratch, gathers_a, accumulate):
        plan = expert_gradients_plan(a, b, out, threads=self.team.threads, accumulate=accumulate)
        left, right, *tiles = scratch.take_all(plan)
        experts, rows, columns = out.shape
        work = (
            -(-rows // TILE_ROWS) * -(-columns // TILE_COLUMNS) * (int(bounds[-1] - bounds[0]) + experts * STORE_WORK)
        )
        shares = self.team.products(work, left.shape[2] * right.shape[2])
        orders = (order, None) if gathers_a else (None, order)
        choices = max(len(a), len(b)) // min(len(a), len(b))
        operands = (bits(a), bits(b), orders, choices, bounds, bits(out), bool(accumulate))

        def part(numbered: tuple[int, slice]) -> None:
            number, mine = numbered
            buffers, tile = (left[number], right[number]), tiles[0][number] if tiles else None
            expert_loops.expert_gradients(openblas.SGEMM, *operands, (mine.start, mine.stop), buffers, tile)

        self.team.run(part, list(enumerate(shares)))

    def _share_products(
        self, loop: Callable[..., None], operands: tuple[Any, ...], shares: list[slice], buffers: list[F32]
    ) -> None:
        """Call a loop around products for each share of them, on the threads, each with its own buffers."""

        def part(numbered: tuple[int, slice]) -> None:
            number, mine = numbered
            loop(openblas.SGEMM, *operands, (mine.start, mine.stop), tuple(each[number] for each in buffers))

        self.team.run(part, list(enumerate(shares)))

    def weighted_swiglu_forward(self, gate, up, weights, prod, *, order=None, bounds=None, scratch):
        arrays = [bits(x) for x in (gate, up, prod)]

        def part(rows: slice) -> None:
            gates, ups, out = (x[rows] for x in arrays)
            router_loops.weighted_swiglu_forward(gates, ups, flat(weights), order, rows.start, out)

        self.team.run(part, self._counted_ranges(gate, bounds))

    def weighted_swiglu_backward(
        self, gate, up, weights, dprod, dgate, dup, dweights, *, order=None, bounds=None, scratch
    ):
        lines = scratch.take_all(gated_backward_plan(gate, threads=self.team.threads))
        arrays = [bits(x) for x in (gate, up, dprod, dgate, dup)]

        def part(numbered: tuple[int, slice]) -> None:
            number, rows = numbered
            gates, ups, grads, *outs = (x[rows] for x in arrays)
            shared = flat(dweights), order, rows.start, *(line[number] for line in lines)
            router_loops.weighted_swiglu_backward(gates, ups, flat(weights), grads, *outs, *shared)

        self.team.run(part, list(enumerate(self._counted_ranges(gate, bounds))))

    def _counted_ranges(self, rows: Array, bounds: I32 | None) -> list[slice]:
        """Share out the rows that count to the threads: all, or those within the bounds of experts."""
        first, count = counted_rows(len(rows), bounds)
        return [slice(first + own.start, first + own.stop) for own in self.team.rows((count, *rows.shape[1:]))]

    def sigmoid_forward(self, x, y, *, scratch):
        router_loops.sigmoid_forward(flat(x), flat(y))

    def sigmoid_backward(self, y, dy, dx, *, scratch):
        router_loops.sigmoid_backward(flat(y), flat(dy), flat(dx))

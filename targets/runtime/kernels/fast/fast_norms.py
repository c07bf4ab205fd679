"""RMSNorm in fused numba loops, of whole rows and of each head of a row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ratrain.targets.runtime.arena.scratch import Buffer, Plan
from ratrain.targets.runtime.kernels.fast import fast_rows
from ratrain.targets.runtime.kernels.fast.fast_numba import bits
from ratrain.targets.runtime.kernels.fast.row_sums import row_groups, store_sums, sum_groups

if TYPE_CHECKING:
    from ratrain.targets.runtime.kernels.interface import Array
    from ratrain.targets.runtime.kernels.team import Team


def rmsnorm_backward_plan(x: Array, gamma: Array, **_: object) -> Plan:
    """Plan for each group of rows its part of dgamma and a line; then the whole dgamma."""
    groups = Buffer((row_groups(x.size // gamma.size), gamma.size))
    return [groups, groups, Buffer(gamma.shape)]


def summed_norm_backward_plan(x: Array, gamma: Array, **_: object) -> Plan:
    """Plan for each group of rows its part of dgamma; then the whole dgamma."""
    return [Buffer((row_groups(len(x)), gamma.size)), Buffer(gamma.shape)]


def _offset(unit_offset: bool) -> np.float32 | None:
    """Return the number that loops add to a weight; None for nothing."""
    return np.float32(1) if unit_offset else None


class FastNorms:
    """The RMSNorm kernels of `Fast`."""

    team: Team

    def rmsnorm_forward(self, x, gamma, xn, rstd, *, scratch, eps, unit_offset=False):
        source, scale, stored, offset = bits(x), bits(gamma), bits(xn), _offset(unit_offset)

        def part(rows: slice) -> None:
            fast_rows.rmsnorm_forward(source[rows], scale, offset, stored[rows], rstd[rows], np.float32(eps))

        self.team.run(part, self.team.rows(x.shape))

    def rmsnorm_backward(
        self, dxn, x, gamma, rstd, dx, dgamma, *, scratch, residual=None, accumulate, unit_offset=False
    ):
        sums, lines, total = scratch.take_all(rmsnorm_backward_plan(x, gamma))
        grad, source, factor, stored = bits(dxn), bits(x), bits(gamma), bits(dx)
        extra, offset = stored if residual is None else bits(residual), _offset(unit_offset)

        def group_of_rows(group: int, rows: slice) -> None:
            fast_rows.rmsnorm_backward(
                grad[rows],
                source[rows],
                factor,
                offset,
                rstd[rows],
                stored[rows],
                extra[rows],
                residual is not None,
                sums[group],
                lines[group],
            )

        sums.fill(0)
        sum_groups(self.team, group_of_rows, len(x))
        store_sums(sums, total, dgamma, accumulate)

    def head_norm_forward(self, x, gamma, xn, rstd, *, scratch, heads, head_dim, eps, unit_offset=False):
        source, out = (bits(array).reshape(-1, head_dim) for array in (x, xn))
        self.rmsnorm_forward(source, gamma, out, rstd, scratch=scratch, eps=eps, unit_offset=unit_offset)

    def head_norm_backward(
        self, dxn, x, gamma, rstd, dx, dgamma, *, scratch, heads, head_dim, accumulate, unit_offset=False
    ):
        grad, source, out = (bits(array).reshape(-1, head_dim) for array in (dxn, x, dx))
        self.rmsnorm_backward(
            grad, source, gamma, rstd, out, dgamma, scratch=scratch, accumulate=accumulate, unit_offset=unit_offset
        )

    def row_squares(self, x, squares, *, scratch, share):
        source, factor = bits(x), np.float32(share)

        def part(rows: slice) -> None:
            fast_rows.row_squares(source[rows], squares[rows], factor)

        self.team.run(part, self.team.rows(x.shape))

    def row_products(self, dxn, x, gamma, products, *, scratch):
        grad, source, weight = bits(dxn), bits(x), bits(gamma)

        def part(rows: slice) -> None:
            fast_rows.row_products(grad[rows], source[rows], weight, products[rows])

        self.team.run(part, self.team.rows(x.shape))

    def summed_norm_forward(self, x, gamma, squares, xn, *, scratch, width, eps):
        source, weight, stored = bits(x), bits(gamma), bits(xn)
        numbers = np.float32(width), np.float32(eps)

        def part(rows: slice) -> None:
            fast_rows.summed_norm_forward(source[rows], weight, squares[rows], stored[rows], *numbers)

        self.team.run(part, self.team.rows(x.shape))

    def summed_norm_backward(
        self, dxn, x, gamma, squares, products, dx, dgamma, *, scratch, width, eps, share, accumulate
    ):
        sums, total = scratch.take_all(summed_norm_backward_plan(x, gamma))
        grad, source, weight, stored = bits(dxn), bits(x), bits(gamma), bits(dx)
        numbers = np.float32(width), np.float32(eps), np.float32(share / width)

        def group_of_rows(group: int, rows: slice) -> None:
            of_row = grad[rows], source[rows], weight, squares[rows], products[rows], stored[rows]
            fast_rows.summed_norm_backward(*of_row, *numbers, sums[group])

        sums.fill(0)
        sum_groups(self.team, group_of_rows, len(x))
        store_sums(sums, total, dgamma, accumulate)

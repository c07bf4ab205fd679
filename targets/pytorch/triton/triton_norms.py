"""Norms of rows, and of heads of rows, in one pass.

A program holds whole rows. Gradients of weights are summed by groups of rows, then over the groups in order:

    norm_backward, program g:  dx of its rows, parts[g] = sum of their dxn * normalised x
    sum_groups:                dgamma = [dgamma +] parts[0] + parts[1] + ...
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton.language as tl
from attrs import frozen

from ratrain.targets.pytorch.device.device_norms import DeviceNorms
from ratrain.targets.pytorch.triton.triton_common import (
    jit,
    launch,
    load_wide,
    power_of_two,
    programs,
    store_rounded,
    warps_for,
)
from ratrain.targets.pytorch.triton.triton_sums import MOST_GROUPS, sum_parts
from ratrain.targets.runtime.arena.scratch import Buffer

if TYPE_CHECKING:
    from ratrain.targets.pytorch.device.device_common import F32, Array
    from ratrain.targets.pytorch.device.tensor_scratch import TensorScratch as Scratch
    from ratrain.targets.runtime.arena.scratch import Plan

_TILE = 4096
"""Elements that a program holds of each operand: some rows, or one that is longer."""


@frozen
class _Shape:
    """Cut of the rows into tiles and groups."""

    rows: int
    width: int

    @property
    def block(self) -> int:
        """Columns of a tile: the whole row, up to a power of two."""
        return power_of_two(self.width)

    @property
    def tile(self) -> int:
        """Rows of a tile."""
        return max(1, _TILE // self.block)

    @property
    def rows_of_group(self) -> int:
        """Rows of a group, in whole tiles."""
        return self.tile * programs(programs(self.rows, self.tile), MOST_GROUPS)

    @property
    def groups(self) -> int:
        """Number of groups."""
        return programs(self.rows, self.rows_of_group)

    @property
    def constants(self) -> dict[str, int]:
        """Constants that kernels are compiled for."""
        return {"width": self.width, "tile": self.tile, "block": self.block, "warps": warps_for(self.tile * self.block)}


@jit
def norm_forward(
    x: tl.tensor,
    gamma: tl.tensor,
    beta: tl.tensor,
    xn: tl.tensor,
    mean: tl.tensor,
    rstd: tl.tensor,
    rows: tl.tensor,
    eps: tl.tensor,
    centred: tl.constexpr,
    unit_offset: tl.constexpr,
    width: tl.constexpr,
    tile: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Compute the norm of a tile of rows: RMS, or with `centred` a layer norm, which has a mean and beta."""
    row, column = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile), tl.arange(0, block)
    there, within = row < rows, column < width
    inside = there[:, None] & within[None, :]
    at = row[:, None] * width + column[None, :]
    value = load_wide(x + at, inside)
    if centred:
        # two passes over the values held, first the mean: mean(x^2) - mean^2 would cancel
        centre = tl.div_rn(tl.sum(value, axis=1), width * 1.0)
        tl.store(mean + row, centre, mask=there)
        # padding columns are 0, and must stay so: their square would count
        value = tl.where(inside, value - centre[:, None], 0.0)
    # divisions and roots as IEEE 754 rounds them, not the GPU's fast approximations
    scale = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(value * value, axis=1), width * 1.0) + eps))
    tl.store(rstd + row, scale, mask=there)
    weight = load_wide(gamma + column, within)
    if unit_offset:
        weight += 1
    value = value * scale[:, None] * weight[None, :]
    if centred:
        value += load_wide(beta + column, within)[None, :]
    store_rounded(xn + at, value, inside)


@jit
def norm_backward(
    dxn: tl.tensor,
    x: tl.tensor,
    gamma: tl.tensor,
    mean: tl.tensor,
    rstd: tl.tensor,
    residual: tl.tensor,
    dx: tl.tensor,
    of_gamma: tl.tensor,
    of_beta: tl.tensor,
    rows: tl.tensor,
    rows_of_group: tl.tensor,
    centred: tl.constexpr,
    unit_offset: tl.constexpr,
    adds: tl.constexpr,
    width: tl.constexpr,
    tile: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Compute gradients of a group of rows: dx [+ residual], and the group's part of dgamma and dbeta."""
    column = tl.arange(0, block)
    within = column < width
    weight = load_wide(gamma + column, within)
    if unit_offset:
        weight += 1
    products = tl.zeros((block,), tl.float32)
    grads = tl.zeros((block,), tl.float32)
    group = tl.program_id(0).to(tl.int64)
    # With n the normalised row and g = dxn * weight: dx = rstd * (g - n * mean(g * n) [- mean(g)]). A program goes over
    # the tiles of its group in order, so the order of the sums is fixed.
    for first in range(0, rows_of_group, tile):
        row = group * rows_of_group + first + tl.arange(0, tile)
        there = row < rows
        inside = there[:, None] & within[None, :]
        at = row[:, None] * width + column[None, :]
        grad, normed = load_wide(dxn + at, inside), load_wide(x + at, inside)
        scale = tl.load(rstd + row, mask=there, other=0.0)[:, None]
        if centred:
            normed = tl.where(inside, normed - tl.load(mean + row, mask=there, other=0.0)[:, None], 0.0)
        normed *= scale
        products += tl.sum(grad * normed, axis=0)
        if centred:
            grads += tl.sum(grad, axis=0)
        # sums for gamma and beta are taken from dxn, before the weight
        grad *= weight[None, :]
        along = tl.div_rn(tl.sum(grad * normed, axis=1), width * 1.0)
        change = grad - normed * along[:, None]
        if centred:
            change -= tl.div_rn(tl.sum(grad, axis=1), width * 1.0)[:, None]
        change *= scale
        if adds:
            change += load_wide(residual + at, inside)
        # all reads of this tile are done: dx may be dxn or the residual
        store_rounded(dx + at, change, inside)
    tl.store(of_gamma + group * width + column, products, mask=within)
    if centred:
        tl.store(of_beta + group * width + column, grads, mask=within)


def _shape_of(x: Array, gamma: Array) -> _Shape:
    width = gamma.shape[0]
    return _Shape(x.shape[0] * x.shape[1] // width, width)


def rms_backward_plan(x: Array, gamma: Array, **_: object) -> Plan:
    """Plan the groups' parts of the gradient of gamma."""
    shape = _shape_of(x, gamma)
    return [Buffer((shape.groups, shape.width))]


def layer_backward_plan(x: Array, gamma: Array, **_: object) -> Plan:
    """Plan the groups' parts of the gradients of gamma and beta."""
    return [*rms_backward_plan(x, gamma)] * 2


def _rms_forward(x: Array, gamma: Array, xn: Array, rstd: F32, eps: float, *, unit_offset: bool) -> None:
    shape = _shape_of(x, gamma)
    grid, flags = (programs(shape.rows, shape.tile),), {"centred": False, "unit_offset": unit_offset}
    launch(norm_forward, grid, x, gamma, gamma, xn, rstd, rstd, shape.rows, eps, **flags, **shape.constants)


def _rms_backward(
    dxn: Array,
    x: Array,
    gamma: Array,
    rstd: F32,
    dx: Array,
    dgamma: Array,
    residual: Array | None,
    scratch: Scratch,
    *,
    accumulate: bool,
    unit_offset: bool,
) -> None:
    (parts,) = scratch.take_all(rms_backward_plan(x, gamma))
    shape = _shape_of(x, gamma)
    added = x if residual is None else residual
    sizes, flags = (shape.rows, shape.rows_of_group), {"centred": False, "unit_offset": unit_offset}
    tensors = (dxn, x, gamma, rstd, rstd, added, dx, parts, parts)
    launch(norm_backward, (shape.groups,), *tensors, *sizes, **flags, adds=residual is not None, **shape.constants)
    sum_parts(parts, dgamma, accumulate=accumulate)


class TritonNorms(DeviceNorms):
    """The norms of `TorchTriton`. A program holds whole rows; each head of a row counts as a row."""

    def rmsnorm_forward(self, x, gamma, xn, rstd, *, scratch, eps, unit_offset=False):
        _rms_forward(x, gamma, xn, rstd, eps, unit_offset=unit_offset)

    def rmsnorm_backward(
        self, dxn, x, gamma, rstd, dx, dgamma, *, scratch, residual=None, accumulate, unit_offset=False
    ):
        flags = {"accumulate": accumulate, "unit_offset": unit_offset}
        _rms_backward(dxn, x, gamma, rstd, dx, dgamma, residual, scratch, **flags)

    def head_norm_forward(self, x, gamma, xn, rstd, *, scratch, heads, head_dim, eps, unit_offset=False):
        _rms_forward(x, gamma, xn, rstd, eps, unit_offset=unit_offset)

    def head_norm_backward(
        self, dxn, x, gamma, rstd, dx, dgamma, *, scratch, heads, head_dim, accumulate, unit_offset=False
    ):
        flags = {"accumulate": accumulate, "unit_offset": unit_offset}
        _rms_backward(dxn, x, gamma, rstd, dx, dgamma, None, scratch, **flags)

    def layernorm_forward(self, x, gamma, beta, xn, mean, rstd, *, scratch, eps):
        shape = _shape_of(x, gamma)
        grid, flags = (programs(shape.rows, shape.tile),), {"centred": True, "unit_offset": False}
        launch(norm_forward, grid, x, gamma, beta, xn, mean, rstd, shape.rows, eps, **flags, **shape.constants)

    def layernorm_backward(self, dxn, x, gamma, mean, rstd, dx, dgamma, dbeta, *, scratch, residual=None, accumulate):
        of_gamma, of_beta = scratch.take_all(layer_backward_plan(x, gamma))
        shape = _shape_of(x, gamma)
        added = x if residual is None else residual
        tensors = (dxn, x, gamma, mean, rstd, added, dx, of_gamma, of_beta)
        sizes, flags = (shape.rows, shape.rows_of_group), {"centred": True, "unit_offset": False}
        launch(norm_backward, (shape.groups,), *tensors, *sizes, **flags, adds=residual is not None, **shape.constants)
        sum_parts(of_gamma, dgamma, accumulate=accumulate)
        sum_parts(of_beta, dbeta, accumulate=accumulate)

"""Routers in fused kernels: the choice of experts, its gradient, and the order of rows by expert.

    choose_experts       a program some tokens:    their experts and weights
    gradients_of_choice  a program some tokens:    the gradient of their logits
    count_rows           a program a chunk of rows and some experts:  rows of each expert in the chunk
    place_chunks         one program:              first place of each chunk among an expert's rows, and `bounds`
    place_rows           a program a chunk:        `order`

Rows are counted twice rather than added up atomically: a row's place is the first of its expert, plus the rows of its
expert in chunks before, plus those before it in its chunk. Chunks of 2 rows, three experts:

    experts of rows   2 0 | 0 2 | 0 1      counts by chunk   1 0 1 | 1 0 1 | 1 1 0      bounds   0 3 4 6
    first place of chunks                                    0 0 0 | 1 0 1 | 2 0 2
    row 3             expert 2, chunk 1: 4 + 1 + 0 = place 5
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import triton.language as tl

from ratrain.targets.program.kernel_options import RouterOptions
from ratrain.targets.pytorch.device.device_router import DeviceRouter, check_experts, route_forward_plan
from ratrain.targets.pytorch.triton.triton_common import jit, launch, power_of_two, programs, warps_for
from ratrain.targets.runtime.arena.scratch import Buffer

if TYPE_CHECKING:
    from ratrain.targets.pytorch.device.device_common import F32, I32
    from ratrain.targets.runtime.arena.scratch import Plan

_LOGITS = 1024
"""Logits that a program takes: of several tokens, or of one with more."""
_CHUNK, _EXPERTS, _COUNTS = 128, 64, 1024
"""Rows of a chunk, and experts that a program counts."""
_LEAST = tl.constexpr(-(1 << 63))
"""Below the key of every logit."""


@jit
def keys_of(value: tl.tensor, lane: tl.tensor, inside: tl.tensor, experts: tl.tensor) -> tl.tensor:
    """Return distinct 64-bit numbers that sort as logits do, equal ones by descending lane; `_LEAST` outside.

    The upper half is the logit's: a NaN is below all numbers. The lower half is `experts - lane`.
    """
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)  # -0 equals 0
    # a negative float32 is smaller with a larger magnitude: its other bits are turned round
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    bits = tl.where(value != value, -0x80000000, bits)  # noqa: PLR0124  a NaN is unlike itself
    return tl.where(inside, (bits.to(tl.int64) << 32) + (experts - lane), _LEAST)


@jit
def choose_experts(
    logits: tl.tensor,
    chosen: tl.tensor,
    weights: tl.tensor,
    tokens: tl.tensor,
    experts: tl.tensor,
    choices: tl.tensor,
    normalise: tl.constexpr,
    rows: tl.constexpr,
    lanes: tl.constexpr,
) -> None:
    """Choose the experts of some tokens, and compute their weights; a lane is an expert."""
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    lane = tl.arange(0, lanes)[None, :]
    inside = (row < tokens)[:, None] & (lane < experts)
    value = tl.load(logits + row[:, None] * experts + lane, mask=inside, other=float("-inf"))
    keys = keys_of(value, lane, inside, experts)
    for _ in range(choices):
        best = tl.max(keys, axis=1)
        keys = tl.where(keys == best[:, None], _LEAST, keys)
    taken = inside & (keys == _LEAST)
    place = row[:, None] * choices + tl.cumsum(taken.to(tl.int32), axis=1) - 1
    tl.store(chosen + place, lane + tl.zeros((rows, lanes), tl.int32), mask=taken)
    summed = taken if normalise else inside
    peak = tl.max(tl.where(summed, value, float("-inf")), axis=1)
    total = tl.sum(tl.where(summed, tl.exp(value - peak[:, None]), 0.0), axis=1)
    tl.store(weights + place, tl.exp(value - (peak + tl.log(total))[:, None]), mask=taken)


@jit
def gradients_of_choice(
    logits: tl.tensor,
    chosen: tl.tensor,
    weights: tl.tensor,
    dweights: tl.tensor,
    bounds: tl.tensor,
    dlogits: tl.tensor,
    step: tl.tensor,
    tokens: tl.tensor,
    experts: tl.tensor,
    choices: tl.tensor,
    balance: tl.tensor,
    z: tl.tensor,
    normalise: tl.constexpr,
    balances: tl.constexpr,
    flattens: tl.constexpr,
    rows: tl.constexpr,
    lanes: tl.constexpr,
) -> None:
    """Compute the gradient of some tokens' logits; `balance` and `z` are the factors of the two losses' gradients."""
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    there = row < tokens
    lane = tl.arange(0, lanes)
    inside = there[:, None] & (lane < experts)[None, :]
    place = row[:, None] * experts + lane[None, :]
    value = tl.load(logits + place, mask=inside, other=float("-inf"))
    peak = tl.max(value, axis=1)
    total = tl.sum(tl.where(inside, tl.exp(value - peak[:, None]), 0.0), axis=1)
    log = peak + tl.log(total)
    share = tl.where(inside, tl.exp(value - log[:, None]), 0.0)
    mean = tl.zeros((rows,), tl.float32)
    for choice in range(choices):
        at = row * choices + choice
        mean += tl.load(weights + at, mask=there, other=0.0) * tl.load(dweights + at, mask=there, other=0.0)
    gradient = tl.zeros((rows, lanes), tl.float32) if normalise else -share * mean[:, None]
    for choice in range(choices):
        at = row * choices + choice
        above = tl.load(dweights + at, mask=there, other=0.0)
        if normalise:
            above -= mean
        own = tl.load(weights + at, mask=there, other=0.0) * above
        expert = tl.load(chosen + at, mask=there, other=-1)
        gradient += tl.where(lane[None, :] == expert[:, None], own[:, None], 0.0)
    unit = tl.load(step)
    if balances:
        start = tl.load(bounds + lane, mask=lane < experts, other=0)
        end = tl.load(bounds + lane + 1, mask=lane < experts, other=0)
        pull = (end - start).to(tl.float32)[None, :] * balance * unit
        gradient += share * (pull - tl.sum(share * pull, axis=1)[:, None])
    if flattens:
        gradient += (z * unit * log)[:, None] * share
    tl.store(dlogits + place, gradient, mask=inside)


@jit
def count_rows(
    chosen: tl.tensor, counts: tl.tensor, rows: tl.tensor, experts: tl.tensor, chunk: tl.constexpr, lanes: tl.constexpr
) -> None:
    """Set counts[chunk, e] = the rows of some experts in a chunk."""
    row, lane = tl.program_id(0) * chunk + tl.arange(0, chunk), tl.program_id(1) * lanes + tl.arange(0, lanes)
    expert = tl.load(chosen + row, mask=row < rows, other=-1)
    count = tl.sum((expert[:, None] == lane[None, :]).to(tl.int32), axis=0)
    tl.store(counts + tl.program_id(0) * experts + lane, count, mask=lane < experts)


@jit
def place_chunks(
    counts: tl.tensor,
    places: tl.tensor,
    bounds: tl.tensor,
    chunks: tl.tensor,
    experts: tl.tensor,
    lanes: tl.constexpr,
    step: tl.constexpr,
) -> None:
    """Set places[chunk, e] = the rows of an expert in all chunks before, and the bounds; a lane is an expert."""
    lane = tl.arange(0, lanes)
    inside = lane < experts
    total = tl.zeros((lanes,), tl.int32)
    for first in range(0, chunks, step):
        chunk = first + tl.arange(0, step)
        at = chunk[:, None] * experts + lane[None, :]
        there = (chunk < chunks)[:, None] & inside[None, :]
        count = tl.load(counts + at, mask=there, other=0)
        tl.store(places + at, total[None, :] + tl.cumsum(count, axis=0) - count, mask=there)
        total += tl.sum(count, axis=0)
    tl.store(bounds + lane, tl.zeros((lanes,), tl.int32), mask=lane == 0)
    tl.store(bounds + lane + 1, tl.cumsum(total, axis=0), mask=inside)


@jit
def place_rows(
    chosen: tl.tensor,
    places: tl.tensor,
    bounds: tl.tensor,
    order: tl.tensor,
    rows: tl.tensor,
    experts: tl.tensor,
    chunk: tl.constexpr,
) -> None:
    """Store each row of a chunk at its place; a number that is no expert is left out."""
    first = tl.program_id(0) * chunk
    row, other = first + tl.arange(0, chunk), first + tl.arange(0, chunk)
    expert = tl.load(chosen + row, mask=row < rows, other=-1)
    held = (expert >= 0) & (expert < experts)
    neighbour = tl.load(chosen + other, mask=other < rows, other=-1)
    before = (expert[:, None] == neighbour[None, :]) & (other[None, :] < row[:, None])
    place = tl.sum(before.to(tl.int32), axis=1)
    place += tl.load(places + tl.program_id(0) * experts + expert, mask=held, other=0)
    place += tl.load(bounds + expert, mask=held, other=0)
    tl.store(order + place, row, mask=held)


def fused_route_forward_plan(logits: F32, bias: F32 | None = None, **_: object) -> Plan:
    """Plan nothing; with a bias the kernel of `DeviceRouter` chooses."""
    return [] if bias is None else route_forward_plan(logits, bias)


def fused_route_backward_plan(**_: object) -> Plan:
    """Plan the factor of both losses."""
    return [Buffer((1,))]


def fused_group_plan(order: I32, bounds: I32, **_: object) -> Plan:
    """Plan counts and places of chunks, by expert."""
    return [Buffer((programs(order.shape[0], _CHUNK), bounds.shape[0] - 1), np.int32)] * 2


def _tokens_of_program(experts: int) -> tuple[int, int]:
    """Return the tokens and lanes of a program over logits."""
    lanes = power_of_two(experts)
    return max(1, _LOGITS // lanes), lanes


class TritonRouter(DeviceRouter):
    """The kernels of `TorchTriton` that choose experts."""

    def route_forward(self, logits, chosen, weights, *, bias=None, scratch, normalise):
        if bias is not None:  # chosen by sums of softmax and bias, which no program computes
            super().route_forward(logits, chosen, weights, bias=bias, scratch=scratch, normalise=normalise)
            return
        (tokens, experts), (rows, lanes) = logits.shape, _tokens_of_program(logits.shape[1])
        numbers = (tokens, experts, chosen.shape[1])
        constants = {"normalise": normalise, "rows": rows, "lanes": lanes, "warps": warps_for(rows * lanes)}
        launch(choose_experts, (programs(tokens, rows),), logits, chosen, weights, *numbers, **constants)

    def route_backward(self, logits, chosen, weights, dweights, bounds, dlogits, *, scratch, **options):
        given = RouterOptions(**options)
        (step,) = scratch.take_all(fused_route_backward_plan())
        step.fill_(1)
        if given.scale is not None:
            step.copy_(given.scale[:1])
        (tokens, experts), choices = logits.shape, chosen.shape[1]
        rows, lanes = _tokens_of_program(experts)
        launch(
            gradients_of_choice,
            (programs(tokens, rows),),
            *(logits, chosen, weights, dweights, bounds, dlogits, step, tokens, experts, choices),
            *(given.pull(tokens, experts, choices), given.push(tokens)),
            normalise=given.normalise,
            balances=given.balance != 0,
            flattens=given.z != 0,
            rows=rows,
            lanes=lanes,
            warps=warps_for(rows * lanes),
        )

    def group_rows(self, chosen, order, bounds, *, scratch):
        """Sort rows by expert; numbers of experts are checked on the CPU only."""
        check_experts(chosen, len(bounds) - 1)
        counts, places = scratch.take_all(fused_group_plan(order, bounds))
        (chunks, experts), rows = counts.shape, len(order)
        grid = (chunks, programs(experts, _EXPERTS))
        launch(count_rows, grid, chosen, counts, rows, experts, chunk=_CHUNK, lanes=_EXPERTS)
        lanes = power_of_two(experts)
        step = max(1, _COUNTS // lanes)
        launch(place_chunks, (1,), counts, places, bounds, chunks, experts, lanes=lanes, step=step)
        launch(place_rows, (chunks,), chosen, places, bounds, order, rows, experts, chunk=_CHUNK, warps=8)

"""Routers on tensors: the choice of experts, its gradient, and the order of rows by expert.

The k best experts of a token are found as numbers that are all distinct, so that equal logits are no special case:

    logit as an integer that sorts alike << 32 | experts - e        NaNs below all numbers

k times the largest is taken from the row. What was taken is then listed by k smallest numbers. A choice of k among E
takes 2 k passes over a row of E, which for usual k <= 8 is less than a sort; `torch.topk` promises no order of equals.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from ratrain.targets.program.kernel_options import RouterOptions
from ratrain.targets.pytorch.device.device_common import chunk_rows, row_chunks, shaped
from ratrain.targets.pytorch.device.device_sums import first_key, sort_by_key, sort_plan
from ratrain.targets.runtime.arena.scratch import Buffer
from ratrain.targets.runtime.kernels import shared

if TYPE_CHECKING:
    from ratrain.targets.pytorch.device.device_common import F32, I32, I64, Array
    from ratrain.targets.runtime.arena.scratch import Plan

_LEAST = -(1 << 63)
"""Below the key of every logit."""
_MAGNITUDE, _BELOW_ALL = (1 << 31) - 1, -(1 << 31)
"""Bits of a float32 without its sign; the integer of a NaN, which no other logit has."""


def check_experts(chosen: I32, experts: int) -> None:
    """Do `shared.check_experts` on the CPU; on a GPU numbers are not checked, as the host would have to wait for it."""
    if chosen.device.type == "cpu":
        shared.check_experts(chosen.numpy(), experts)


def route_forward_plan(logits: F32, bias: F32 | None = None, **_: object) -> Plan:
    """Plan keys and numbers of some rows; logits and flags of them; a line of numbers; three numbers a row; scores."""
    tokens, experts = logits.shape
    rows = chunk_rows(tokens, experts)
    keys, values = Buffer((rows * experts,), np.int64), Buffer((rows * experts,))
    flags, line = Buffer((rows * experts,), np.bool_), Buffer((experts,), np.int64)
    column = Buffer((rows, 1))
    scores = [] if bias is None else [values]
    return [keys, keys, values, flags, line, Buffer((rows, 1), np.int64), column, column, *scores]


def route_backward_plan(logits: F32, chosen: I32, **_: object) -> Plan:
    """Plan three chunks of rows; counts and pulls of experts; three numbers a row; choices, twice; the step."""
    tokens, experts = logits.shape
    rows = chunk_rows(tokens, experts)
    choices, values, column = rows * chosen.shape[1], Buffer((rows * experts,)), Buffer((rows, 1))
    return [
        *[values] * 3,
        *(Buffer((experts,), np.int32), Buffer((experts,))),
        *[column] * 3,
        *(Buffer((choices,)), Buffer((choices,)), Buffer((choices,), np.int64)),
        Buffer((1,)),
    ]


def group_rows_plan(order: I32, bounds: I32, **_: object) -> Plan:
    """Plan the sort, and a line of bounds."""
    return [*sort_plan(order.shape[0]), Buffer((bounds.shape[0],), np.int64)]


class DeviceRouter:
    """The kernels of `TorchDevice` that choose experts."""

    def route_forward(self, logits, chosen, weights, *, bias=None, scratch, normalise):
        of_keys, of_numbers, of_values, of_flags, line, of_best, of_peak, of_sums, *of_scores = scratch.take_all(
            route_forward_plan(logits, bias)
        )
        for rows in row_chunks(*logits.shape):
            block, best = logits[rows], of_best[: rows.stop - rows.start]
            keys, numbers, flags = (shaped(each, block.shape) for each in (of_keys, of_numbers, of_flags))
            values, sums = shaped(of_values, block.shape), of_sums[: len(block)]
            scores = block
            for held in of_scores:
                scores = shaped(held, block.shape)
                _put_log_sums(block, scores, of_peak[: len(block)], sums)
                torch.sub(block, sums, out=scores).exp_().add_(bias)
            _put_keys(scores, keys, numbers, values, flags, line)
            _list_best(keys, chosen[rows], numbers, flags, line, best)
            index = shaped(of_keys, chosen[rows].shape).copy_(chosen[rows])
            if normalise:
                taken = torch.gather(block, 1, index, out=weights[rows])
                _put_log_sums(taken, shaped(values, taken.shape), of_peak[: len(block)], sums)
            else:
                _put_log_sums(block, values, of_peak[: len(block)], sums)
                taken = torch.gather(block, 1, index, out=weights[rows])
            taken.sub_(sums).exp_()

    def route_backward(self, logits, chosen, weights, dweights, bounds, dlogits, *, scratch, **options):
        given = RouterOptions(**options)
        of_share, of_value, of_term, counts, pull, *columns, own, other, index, step = scratch.take_all(
            route_backward_plan(logits, chosen)
        )
        (tokens, experts), choices = logits.shape, chosen.shape[1]
        step.fill_(1)
        if given.scale is not None:
            step.copy_(given.scale[:1])
        torch.sub(bounds[1:], bounds[:-1], out=counts)
        pull.copy_(counts).mul_(float(np.float32(given.pull(tokens, experts, choices)))).mul_(step)
        for rows in row_chunks(*logits.shape):
            block = logits[rows]
            share, value, term = (shaped(each, block.shape) for each in (of_share, of_value, of_term))
            sums, mean, peak = (each[: len(block)] for each in columns)
            _put_log_sums(block, share, peak, sums)
            torch.sub(block, sums, out=share).exp_()
            some = chosen[rows].shape
            at, product = shaped(index, some).copy_(chosen[rows]), shaped(own, some)
            torch.sum(torch.mul(weights[rows], dweights[rows], out=product), dim=1, keepdim=True, out=mean)
            if given.normalise:
                here = torch.sub(dweights[rows], mean, out=shaped(other, some)).mul_(weights[rows])
                value.zero_()
            else:
                torch.mul(share, mean, out=value).neg_()
                here = torch.gather(value, 1, at, out=shaped(other, some)).add_(product)
            value.scatter_(1, at, here)
            if given.balance:
                torch.sum(torch.mul(share, pull, out=term), dim=1, keepdim=True, out=mean)
                value.add_(torch.sub(pull, mean, out=term).mul_(share))
            if given.z:
                value.add_(torch.mul(share, sums.mul_(given.push(tokens)).mul_(step), out=term))
            dlogits[rows].copy_(value)

    def add_rows(self, bounds, counts, *, scratch):
        counts.add_(bounds[1:]).sub_(bounds[:-1])

    def group_rows(self, chosen, order, bounds, *, scratch):
        """Sort rows by expert; numbers of experts are checked on the CPU only."""
        check_experts(chosen, len(bounds) - 1)
        *of_sort, line = scratch.take_all(group_rows_plan(order, bounds))
        keys, rows = sort_by_key(chosen.view(-1), of_sort)
        order.copy_(rows)
        # the number of keys below the least one of an expert
        firsts = first_key(torch.arange(len(bounds), out=line))
        torch.searchsorted(keys, firsts, out_int32=True, out=bounds)


def _put_keys(logits: F32, keys: I64, spare: I64, values: F32, flags: Array, line: I64) -> None:
    """Set keys = numbers that sort as the logits of each row do, equal ones by descending number of their expert."""
    keys.copy_(values.copy_(logits).add_(0.0).view(torch.int32))  # -0 + 0 is 0, which -0 equals
    # a negative float32 is smaller with a larger magnitude: its other bits are turned round
    keys.bitwise_xor_(torch.bitwise_right_shift(keys, 63, out=spare).bitwise_and_(_MAGNITUDE))
    keys.masked_fill_(torch.ne(values, values, out=flags), _BELOW_ALL)
    keys.mul_(1 << 32).add_(torch.arange(len(line), 0, -1, out=line))


def _list_best(keys: I64, chosen: I32, numbers: I64, flags: Array, line: I64, best: I64) -> None:
    """Set chosen [rows, k] = the columns with the k largest keys of each row, ascending; keys change."""
    (_, experts), count = keys.shape, chosen.shape[1]
    for _ in range(count):
        torch.amax(keys, dim=1, keepdim=True, out=best)
        keys.masked_fill_(torch.eq(keys, best, out=flags), _LEAST)
    torch.ne(keys, _LEAST, out=flags)
    numbers.copy_(torch.arange(experts, out=line)).masked_fill_(flags, experts)
    for place in range(count):
        torch.amin(numbers, dim=1, keepdim=True, out=best)
        chosen[:, place, None].copy_(best)
        numbers.masked_fill_(torch.eq(numbers, best, out=flags), experts)


def _put_log_sums(logits: F32, spare: F32, peak: F32, out: F32) -> None:
    """Set out [rows, 1] = the log-sum-exp of each row."""
    torch.amax(logits, dim=1, keepdim=True, out=peak)
    torch.sum(torch.sub(logits, peak, out=spare).exp_(), dim=1, keepdim=True, out=out).log_().add_(peak)

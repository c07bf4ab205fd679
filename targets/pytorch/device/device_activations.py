"""Activations on tensors: SwiGLU, GEGLU, GELU, squared ReLU."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from ratrain.targets.pytorch.device.device_common import (
    chunk_buffers,
    chunk_rows,
    complement,
    flat_chunks,
    shaped,
    size,
    wide,
)
from ratrain.targets.runtime.arena.scratch import Buffer

if TYPE_CHECKING:
    from ratrain.targets.pytorch.device.device_common import F32, F64, Array
    from ratrain.targets.runtime.arena.scratch import Plan

_SLOPE, _CUBE = math.sqrt(8 / math.pi), 0.044715
"""Constants of GELU: (1 + tanh(z)) / 2 is the sigmoid of 2 z = _SLOPE * (up + _CUBE * up^3)."""


def swiglu_forward_plan(gate: Array, **_: object) -> Plan:
    """Plan gate, its sigmoid, up."""
    return chunk_buffers(3, size(gate))


def swiglu_backward_plan(gate: Array, **_: object) -> Plan:
    """Plan gate, up, the gradient; the gate's sigmoid, a product."""
    return chunk_buffers(5, size(gate))


def swiglu(g: F32, u: F32, share: F32) -> F32:
    """Compute g * sigmoid(g) * u in g; `share` becomes the sigmoid."""
    return g.mul_(torch.sigmoid(g, out=share)).mul_(u)


def put_swiglu_gradients(factors: tuple[F32, F32, F32], share: F32, term: F32, dgate: Array, dup: Array) -> None:
    """Store the gradients of `swiglu` from gate, up and the gradient above, and the gate's sigmoid.

    The gradient above and `term` change.
    """
    g, u, d = factors
    dup.copy_(torch.mul(d, g, out=term).mul_(share))
    # d u share (1 + g (1 - share))
    complement(share, term).mul_(g).add_(1)
    dgate.copy_(d.mul_(u).mul_(share).mul_(term))


def relu2_forward_plan(up: Array, **_: object) -> Plan:
    """Plan the input."""
    return chunk_buffers(1, size(up))


def relu2_backward_plan(up: Array, **_: object) -> Plan:
    """Plan the input, the gradient."""
    return chunk_buffers(2, size(up))


def _gelu_plan(x: Array, chunks: int, *, exact: bool) -> Plan:
    """Plan `chunks` chunks; with the error function also one in float64, where its argument loses nothing."""
    doubles = [Buffer((chunk_rows(size(x), 1),), np.float64)] if exact else []
    return [*chunk_buffers(chunks, size(x)), *doubles]


def gelu_forward_plan(up: Array, *, exact: bool = False, **_: object) -> Plan:
    """Plan the input, the value."""
    return _gelu_plan(up, 2, exact=exact)


def gelu_backward_plan(up: Array, *, exact: bool = False, **_: object) -> Plan:
    """Plan the input, the value, the slope, the gradient."""
    return _gelu_plan(up, 4, exact=exact)


def geglu_forward_plan(gate: Array, *, exact: bool = False, **_: object) -> Plan:
    """Plan gate, its value, up."""
    return _gelu_plan(gate, 3, exact=exact)


def geglu_backward_plan(gate: Array, *, exact: bool = False, **_: object) -> Plan:
    """Plan gate, its value, its slope, the gradient, up."""
    return _gelu_plan(gate, 5, exact=exact)


def _share(u: F32, out: F32, doubles: list[F64]) -> F32:
    """Compute the factor of u in gelu(u): by the error function if there is a float64 buffer, else by tanh."""
    if doubles:  # (1 + erf(u / sqrt(2))) / 2 without its cancellation
        return out.copy_(shaped(doubles[0], u.shape).copy_(u).mul_(-1 / math.sqrt(2)).erfc_().mul_(0.5))
    return torch.mul(u, u, out=out).mul_(u).mul_(_CUBE).add_(u).mul_(_SLOPE).sigmoid_()


def _gelu(u: F32, buffer: F32, doubles: list[F64]) -> F32:
    """Compute gelu(u) in a buffer."""
    return _share(u, shaped(buffer, u.shape), doubles).mul_(u)


def _gelu_and_slope(u: F32, buffers: tuple[F32, F32, F32], doubles: list[F64]) -> tuple[F32, F32]:
    """Compute gelu(u) and its derivative, in the first two buffers."""
    value, slope, term = (shaped(each, u.shape) for each in buffers)
    share = _share(u, value, doubles)
    if doubles:  # share + u e^(-u^2 / 2) / sqrt(2 pi)
        density = shaped(doubles[0], u.shape).copy_(u).square_().mul_(-0.5).exp_().mul_(1 / math.sqrt(2 * math.pi))
        torch.add(share, term.copy_(density).mul_(u), out=slope)
    else:  # share + u share (1 - share) _SLOPE (1 + 3 _CUBE u^2)
        torch.mul(u, u, out=term).mul_(3 * _CUBE).add_(1).mul_(_SLOPE)
        complement(share, slope).mul_(share).mul_(u).mul_(term).add_(share)
    return value.mul_(u), slope


class DeviceActivations:
    """The activations of `TorchDevice`.

    All inputs of a chunk are loaded before an output is stored, so an output may have the bytes of an input.
    """

    def swiglu_forward(self, gate, up, prod, *, scratch):
        buffers = scratch.take_all(swiglu_forward_plan(gate))
        for of_gate, of_up, of_prod in flat_chunks(gate, up, prod):
            g, u = wide(buffers[0], of_gate), wide(buffers[1], of_up)
            of_prod.copy_(swiglu(g, u, shaped(buffers[2], g.shape)))

    def swiglu_backward(self, gate, up, dprod, dgate, dup, *, scratch):
        buffers = scratch.take_all(swiglu_backward_plan(gate))
        for of_gate, of_up, of_dprod, of_dgate, of_dup in flat_chunks(gate, up, dprod, dgate, dup):
            g, u, d = (wide(buffer, each) for buffer, each in zip(buffers, (of_gate, of_up, of_dprod), strict=False))
            share, term = shaped(buffers[3], g.shape), shaped(buffers[4], g.shape)
            put_swiglu_gradients((g, u, d), torch.sigmoid(g, out=share), term, of_dgate, of_dup)

    def geglu_forward(self, gate, up, prod, *, scratch, exact=False):
        of_g, value, of_u, *doubles = scratch.take_all(geglu_forward_plan(gate, exact=exact))
        for of_gate, of_up, of_prod in flat_chunks(gate, up, prod):
            of_prod.copy_(_gelu(wide(of_g, of_gate), value, doubles).mul_(wide(of_u, of_up)))

    def geglu_backward(self, gate, up, dprod, dgate, dup, *, scratch, exact=False):
        of_g, of_value, of_slope, of_d, of_u, *doubles = scratch.take_all(geglu_backward_plan(gate, exact=exact))
        for of_gate, of_up, of_dprod, of_dgate, of_dup in flat_chunks(gate, up, dprod, dgate, dup):
            value, slope = _gelu_and_slope(wide(of_g, of_gate), (of_value, of_slope, of_d), doubles)
            d, u = wide(of_d, of_dprod), wide(of_u, of_up)
            of_dup.copy_(value.mul_(d))
            of_dgate.copy_(d.mul_(u).mul_(slope))

    def gelu_forward(self, up, act, *, scratch, exact=False):
        of_u, value, *doubles = scratch.take_all(gelu_forward_plan(up, exact=exact))
        for of_up, of_act in flat_chunks(up, act):
            of_act.copy_(_gelu(wide(of_u, of_up), value, doubles))

    def gelu_backward(self, up, dact, dup, *, scratch, exact=False):
        of_u, value, slope, of_d, *doubles = scratch.take_all(gelu_backward_plan(up, exact=exact))
        for of_up, of_dact, of_dup in flat_chunks(up, dact, dup):
            _, factor = _gelu_and_slope(wide(of_u, of_up), (value, slope, of_d), doubles)
            of_dup.copy_(wide(of_d, of_dact).mul_(factor))

    def relu2_forward(self, up, act, *, scratch):
        (buffer,) = scratch.take_all(relu2_forward_plan(up))
        for of_up, of_act in flat_chunks(up, act):
            of_act.copy_(wide(buffer, of_up).clamp_(min=0).square_())

    def relu2_backward(self, up, dact, dup, *, scratch):
        of_u, of_d = scratch.take_all(relu2_backward_plan(up))
        for of_up, of_dact, of_dup in flat_chunks(up, dact, dup):
            of_dup.copy_(wide(of_u, of_up).clamp_(min=0).mul_(2).mul_(wide(of_d, of_dact)))

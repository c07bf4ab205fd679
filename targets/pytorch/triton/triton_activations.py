"""Activations in one pass: SwiGLU, GEGLU, GELU, squared ReLU."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import triton.language as tl

from ratrain.targets.pytorch.device.device_common import size
from ratrain.targets.pytorch.triton.triton_common import (
    BLOCK,
    jit,
    launch,
    load_wide,
    own_elements,
    programs,
    store_rounded,
)

if TYPE_CHECKING:
    from ratrain.targets.pytorch.device.device_common import Array

_SLOPE, _CUBE = tl.constexpr(math.sqrt(8 / math.pi)), tl.constexpr(0.044715)
"""Constants of GELU: (1 + tanh(z)) / 2 is the sigmoid of 2 z = _SLOPE * (u + _CUBE * u^3)."""
_ROOT_HALF, _DENSITY = tl.constexpr(math.sqrt(0.5)), tl.constexpr(1 / math.sqrt(2 * math.pi))
_FAR, _FRACTIONS = tl.constexpr(4.0), tl.constexpr(12)
"""From z = _FAR on, erfc(z) is a continued fraction with _FRACTIONS terms: 1 - erf(z) would cancel."""


@jit
def _upper_tail(u: tl.tensor) -> tl.tensor:
    """Compute the normal distribution's probability above |u| in float64: erfc(|u| / sqrt(2)) / 2."""
    z = tl.abs(u).to(tl.float64) * tl.full((), _ROOT_HALF, tl.float64)
    # below _FAR, 1 - erf keeps enough of float64's digits for a float32 result
    near = 0.5 - 0.5 * tl.erf(z)
    # erfc(z) = e^(-z^2) / sqrt(pi) / (z + 1/2 / (z + 1 / (z + 3/2 / (z + ...)))) (Abramowitz and Stegun, 7.1.14)
    least = z.to(tl.float32)
    # evaluated from the innermost term outwards
    fraction = least
    for number in tl.static_range(_FRACTIONS):
        fraction = least + tl.div_rn(fraction * 0 + (_FRACTIONS - number) * 0.5, fraction)
    density = tl.exp(-z * z) * tl.full((), _DENSITY * _ROOT_HALF, tl.float64)
    return tl.where(z < _FAR, near, density / fraction.to(tl.float64))


@jit
def share_of(u: tl.tensor, kind: tl.constexpr) -> tl.tensor:
    """Compute the factor of u in an activation of this kind; for "relu2", max(u, 0)."""
    if kind == "silu":
        return tl.sigmoid(u)
    if kind == "relu2":
        return tl.maximum(u, 0.0, propagate_nan=tl.PropagateNan.ALL)
    if kind == "gelu-exact":
        # for u < 0 the tail is the share itself: 1 - (1 - tail) would cancel
        tail = _upper_tail(u)
        return tl.where(u < 0, tail, 1 - tail).to(tl.float32)
    return tl.sigmoid((u + u * u * u * _CUBE) * _SLOPE)


@jit
def slope_of(u: tl.tensor, share: tl.tensor, kind: tl.constexpr) -> tl.tensor:
    """Compute the derivative of an activation, given its share."""
    if kind == "silu":
        return share * (1 + u * (1 - share))
    if kind == "relu2":
        return 2 * share
    if kind == "gelu-exact":
        wide = u.to(tl.float64)
        return share + u * (tl.exp(-0.5 * wide * wide) * tl.full((), _DENSITY, tl.float64)).to(tl.float32)
    return share + u * share * (1 - share) * ((1 + u * u * (3 * _CUBE)) * _SLOPE)


@jit
def value_of(u: tl.tensor, share: tl.tensor, kind: tl.constexpr) -> tl.tensor:
    """Compute an activation, given its share."""
    return share * share if kind == "relu2" else u * share


@jit
def gated_forward(
    gate: tl.tensor, up: tl.tensor, prod: tl.tensor, count: tl.tensor, kind: tl.constexpr, block: tl.constexpr
) -> None:
    """Set prod = f(gate) * up."""
    at = own_elements(block)
    inside = at < count
    g, u = load_wide(gate + at, inside), load_wide(up + at, inside)
    store_rounded(prod + at, value_of(g, share_of(g, kind), kind) * u, inside)


@jit
def gated_backward(
    gate: tl.tensor,
    up: tl.tensor,
    dprod: tl.tensor,
    dgate: tl.tensor,
    dup: tl.tensor,
    count: tl.tensor,
    kind: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Set the gradients of `gated_forward`."""
    at = own_elements(block)
    inside = at < count
    g, u, d = load_wide(gate + at, inside), load_wide(up + at, inside), load_wide(dprod + at, inside)
    # all inputs are loaded: outputs may be the same bytes
    share = share_of(g, kind)
    store_rounded(dup + at, d * value_of(g, share, kind), inside)
    store_rounded(dgate + at, d * u * slope_of(g, share, kind), inside)


@jit
def plain_forward(up: tl.tensor, act: tl.tensor, count: tl.tensor, kind: tl.constexpr, block: tl.constexpr) -> None:
    """Set act = f(up)."""
    at = own_elements(block)
    inside = at < count
    u = load_wide(up + at, inside)
    store_rounded(act + at, value_of(u, share_of(u, kind), kind), inside)


@jit
def plain_backward(
    up: tl.tensor, dact: tl.tensor, dup: tl.tensor, count: tl.tensor, kind: tl.constexpr, block: tl.constexpr
) -> None:
    """Set the gradient of `plain_forward`."""
    at = own_elements(block)
    inside = at < count
    u, d = load_wide(up + at, inside), load_wide(dact + at, inside)
    store_rounded(dup + at, d * slope_of(u, share_of(u, kind), kind), inside)


def _run(kernel: Any, *tensors: Array, kind: str) -> None:
    """Launch a kernel by blocks of elements. Programs load their inputs before they store, so outputs may be inputs."""
    count = size(tensors[0])
    launch(kernel, (programs(count, BLOCK),), *tensors, count, kind=kind, block=BLOCK)


def _gelu(*, exact: bool) -> str:
    return "gelu-exact" if exact else "gelu"


class TritonActivations:
    """The activations of `TorchTriton`; they take no scratch."""

    def swiglu_forward(self, gate, up, prod, *, scratch):
        _run(gated_forward, gate, up, prod, kind="silu")

    def swiglu_backward(self, gate, up, dprod, dgate, dup, *, scratch):
        _run(gated_backward, gate, up, dprod, dgate, dup, kind="silu")

    def geglu_forward(self, gate, up, prod, *, scratch, exact=False):
        _run(gated_forward, gate, up, prod, kind=_gelu(exact=exact))

    def geglu_backward(self, gate, up, dprod, dgate, dup, *, scratch, exact=False):
        _run(gated_backward, gate, up, dprod, dgate, dup, kind=_gelu(exact=exact))

    def gelu_forward(self, up, act, *, scratch, exact=False):
        _run(plain_forward, up, act, kind=_gelu(exact=exact))

    def gelu_backward(self, up, dact, dup, *, scratch, exact=False):
        _run(plain_backward, up, dact, dup, kind=_gelu(exact=exact))

    def relu2_forward(self, up, act, *, scratch):
        _run(plain_forward, up, act, kind="relu2")

    def relu2_backward(self, up, dact, dup, *, scratch):
        _run(plain_backward, up, dact, dup, kind="relu2")

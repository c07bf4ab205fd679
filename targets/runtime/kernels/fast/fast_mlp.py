"""Activations of MLP blocks in fused numba loops: SwiGLU, GEGLU, GELU, squared ReLU.

GELU is u * share(u). The share is the normal distribution's probability below u (by the error function), or its tanh
approximation.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ratrain.targets.runtime.arena.scratch import Buffer, Plan, Scratch
from ratrain.targets.runtime.kernels.fast import fast_flat, fast_rows
from ratrain.targets.runtime.kernels.fast.fast_numba import exact, exp32, flat, inlined, load, maximum, narrow

if TYPE_CHECKING:
    from ratrain.targets.runtime.kernels.interface import Array
    from ratrain.targets.runtime.kernels.team import Team

_ZERO, _ONE, _HALF = np.float32(0), np.float32(1), np.float32(0.5)
_SLOPE, _CUBE, _THREE_CUBES = np.float32(math.sqrt(8 / math.pi)), np.float32(0.044715), np.float32(3 * 0.044715)
"""Constants of GELU: (1 + tanh(z)) / 2 is the sigmoid of 2 z = _SLOPE * (up + _CUBE * up^3)."""

_PEAK = np.float32(1 / math.sqrt(2 * math.pi))
"""Density of the normal distribution at 0."""
_QUARTER = np.float32(0.25)
# polynomial in t = 1 / (1 + a / 4), a >= 0, of exp(a^2 / 2) * P(x > a) / t for a normal x, to a relative 3.4e-8: fitted
# by weighted least squares to `scipy.special.erfcx`
_T0, _T1, _T2, _T3, _T4, _T5, _T6, _T7, _T8, _T9 = (
    np.float32(c)
    for c in (
        *(9.973556672e-02, 9.973643158e-02, 9.346635623e-02, 8.160309869e-02, 5.897520488e-02),
        *(6.369894411e-02, -3.171722634e-02, 9.559677844e-02, -8.087714129e-02, 1.978197004e-02),
    )
)


@inlined()
def _gelu_by_tanh(u: Any) -> Any:
    """Return GELU at u and its derivative, by the tanh approximation."""
    share = _ONE / (_ONE + exp32(-(_SLOPE * (u + _CUBE * u * u * u))))
    slope = _SLOPE * (_ONE + _THREE_CUBES * u * u)
    return u * share, share + u * share * (_ONE - share) * slope


@inlined()
def _gelu_by_erf(u: Any) -> Any:
    """Return GELU at u and its derivative, by the error function.

    The share below u < 0 has a relative error of at most (4 + u^2 / 2) * 2^-23.
    """
    fall = exp32(-_HALF * u * u)
    t = _ONE / (_ONE + _QUARTER * abs(u))
    p = ((((_T9 * t + _T8) * t + _T7) * t + _T6) * t + _T5) * t + _T4
    p = (((p * t + _T3) * t + _T2) * t + _T1) * t + _T0
    # The probability beyond |u|. For u < 0 it is the share itself: 1 - (1 - beyond) would cancel.
    beyond = fall * t * p
    share = beyond
    if u > _ZERO:
        share = _ONE - beyond
    return u * share, share + u * fall * _PEAK


@exact()
def _gelu_forward(up: Any, act: Any, by_erf: Any) -> None:
    """Set act = gelu(up), for flat arrays."""
    if by_erf:
        for i in range(act.size):
            act[i] = narrow(_gelu_by_erf(load(up[i]))[0], act.dtype)
    else:
        for i in range(act.size):
            act[i] = narrow(_gelu_by_tanh(load(up[i]))[0], act.dtype)


@exact()
def _gelu_backward(up: Any, dact: Any, dup: Any, by_erf: Any) -> None:
    """Set dup = dact * gelu'(up), for flat arrays."""
    if by_erf:
        for i in range(dup.size):
            dup[i] = narrow(load(dact[i]) * _gelu_by_erf(load(up[i]))[1], dup.dtype)
    else:
        for i in range(dup.size):
            dup[i] = narrow(load(dact[i]) * _gelu_by_tanh(load(up[i]))[1], dup.dtype)


@exact()
def _geglu_forward(gate: Any, up: Any, prod: Any, by_erf: Any) -> None:
    """Set prod = gelu(gate) * up, for flat arrays."""
    if by_erf:
        for i in range(prod.size):
            prod[i] = narrow(_gelu_by_erf(load(gate[i]))[0] * load(up[i]), prod.dtype)
    else:
        for i in range(prod.size):
            prod[i] = narrow(_gelu_by_tanh(load(gate[i]))[0] * load(up[i]), prod.dtype)


@exact()
def _geglu_backward(
    gate: Any, up: Any, dprod: Any, dgate: Any, dup: Any, gate_line: Any, up_line: Any, by_erf: Any
) -> None:
    """Set both gradients, for flat arrays; block by block through two lines, so that an output may be an input."""
    for start in range(0, gate.size, gate_line.size):
        stop = min(start + gate_line.size, gate.size)
        gates, ups, grads = gate[start:stop], up[start:stop], dprod[start:stop]
        if by_erf:
            for i in range(stop - start):
                value, slope = _gelu_by_erf(load(gates[i]))
                gate_line[i] = load(grads[i]) * load(ups[i]) * slope
                up_line[i] = load(grads[i]) * value
        else:
            for i in range(stop - start):
                value, slope = _gelu_by_tanh(load(gates[i]))
                gate_line[i] = load(grads[i]) * load(ups[i]) * slope
                up_line[i] = load(grads[i]) * value
        fast_rows.store_line(gate_line, dgate[start:stop])
        fast_rows.store_line(up_line, dup[start:stop])


@exact()
def _relu2_forward(up: Any, act: Any) -> None:
    """Set act = max(up, 0)^2, for flat arrays."""
    for i in range(act.size):
        u = maximum(load(up[i]), _ZERO)
        act[i] = narrow(u * u, act.dtype)


@exact()
def _relu2_backward(up: Any, dact: Any, dup: Any) -> None:
    """Set dup = dact * 2 max(up, 0), for flat arrays."""
    for i in range(dup.size):
        u = maximum(load(up[i]), _ZERO)
        dup[i] = narrow(load(dact[i]) * (u + u), dup.dtype)


def gated_backward_plan(gate: Array, *, threads: int, **_: object) -> Plan:
    """Plan for each thread a block of both gradients."""
    lines = Buffer((threads, min(gate.size, fast_flat.BLOCK)))
    return [lines, lines]


class FastMlp:
    """The kernels of `Fast` for the activations of MLP blocks."""

    team: Team

    def swiglu_forward(self, gate, up, prod, *, scratch):
        self._shared(fast_rows.swiglu_forward, (gate, up, prod))

    def swiglu_backward(self, gate, up, dprod, dgate, dup, *, scratch):
        self._gated_backward(fast_rows.swiglu_backward, (gate, up, dprod, dgate, dup), scratch)

    def geglu_forward(self, gate, up, prod, *, scratch, exact=False):
        self._shared(_geglu_forward, (gate, up, prod), exact)

    def geglu_backward(self, gate, up, dprod, dgate, dup, *, scratch, exact=False):
        self._gated_backward(_geglu_backward, (gate, up, dprod, dgate, dup), scratch, exact)

    def gelu_forward(self, up, act, *, scratch, exact=False):
        self._shared(_gelu_forward, (up, act), exact)

    def gelu_backward(self, up, dact, dup, *, scratch, exact=False):
        self._shared(_gelu_backward, (up, dact, dup), exact)

    def relu2_forward(self, up, act, *, scratch):
        self._shared(_relu2_forward, (up, act))

    def relu2_backward(self, up, dact, dup, *, scratch):
        self._shared(_relu2_backward, (up, dact, dup))

    def _shared(self, loop: Any, arrays: tuple[Array, ...], *options: bool) -> None:
        """Call a loop over flat arrays, with the elements shared out to the threads."""
        rows = [flat(x) for x in arrays]
        self.team.run(lambda part: loop(*(x[part] for x in rows), *options), self.team.rows(rows[0].shape))

    def _gated_backward(self, loop: Any, arrays: tuple[Array, ...], scratch: Scratch, *options: bool) -> None:
        """Call a loop in the same way that needs two lines of scratch."""
        gate_lines, up_lines = scratch.take_all(gated_backward_plan(arrays[0], threads=self.team.threads))
        rows = [flat(x) for x in arrays]

        def part(numbered: tuple[int, slice]) -> None:
            number, elements = numbered
            loop(*(x[elements] for x in rows), gate_lines[number], up_lines[number], *options)

        self.team.run(part, list(enumerate(self.team.rows(rows[0].shape))))

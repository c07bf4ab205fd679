"""Numba loops over whole arrays as one row: casts, sums, finiteness, the optimizer. All round as numpy does."""

from __future__ import annotations

from typing import Any

import numpy as np

from ratrain.targets.runtime.kernels.fast.fast_numba import bits_of_float, exact, load, narrow, smaller, span, times

BLOCK = 4096
"""Elements that pass through several loops while they stay in the first-level cache."""

_ZERO = np.float32(0)
_MAGNITUDE = np.int32(0x7FFFFFFF)
_INFINITY_BITS = np.int32(0x7F800000)


@exact()
def cast(src: Any, dst: Any) -> None:
    """Set dst = src, rounded to its type."""
    for i in range(src.size):
        dst[i] = narrow(load(src[i]), dst.dtype)


@exact()
def add(a: Any, b: Any, scale: Any, out: Any) -> None:
    """Set out = a + scale * b; `out` must not overlap a or b."""
    for i in range(out.size):
        out[i] = narrow(load(a[i]) + times(load(b[i]), scale), out.dtype)


@exact()
def add_into(out: Any, kept: Any, b: Any, scale: Any) -> None:
    """Set out = kept * out + scale * b.

    It is a loop of its own: an array that is read and written under two names is not vectorised.
    """
    for i in range(out.size):
        out[i] = narrow(times(load(out[i]), kept) + times(load(b[i]), scale), out.dtype)


@exact()
def add_itself(out: Any, scale: Any) -> None:
    """Set out = out + scale * out."""
    for i in range(out.size):
        value = load(out[i])
        out[i] = narrow(value + times(value, scale), out.dtype)


@exact()
def scale(a: Any, out: Any, factor: Any) -> None:
    """Set out = factor * a; `out` must not overlap a."""
    for i in range(out.size):
        out[i] = narrow(load(a[i]) * factor, out.dtype)


@exact()
def scale_itself(out: Any, factor: Any) -> None:
    """Set out = factor * out."""
    for i in range(out.size):
        out[i] = narrow(load(out[i]) * factor, out.dtype)


@exact()
def all_finite(a: Any) -> Any:
    """Return whether no element is infinite or NaN."""
    # Without their sign, the bits of a float32 order as integers as its magnitudes do, with infinity and then NaNs on
    # top. The maximum of integers vectorises; blocks allow an early end.
    for start in range(0, a.size, BLOCK):
        block = span(a, start, smaller(start + BLOCK, a.size))
        worst = np.int32(0)
        for i in range(block.size):
            worst = max(worst, bits_of_float(load(block[i])) & _MAGNITUDE)
        if worst >= _INFINITY_BITS:
            return False
    return True


@exact()
def add_part(acc: Any, part: Any) -> None:
    """Add part to acc."""
    for i in range(acc.size):
        acc[i] += load(part[i])


@exact()
def store_scaled(total: Any, out: Any, factor: Any, accumulate: Any) -> None:
    """Set out = [out +] (0 + total) * factor: a sum begins with 0, so that one of -0 alone is 0."""
    if accumulate:
        for i in range(out.size):
            out[i] = narrow((load(total[i]) + _ZERO) * factor + load(out[i]), out.dtype)
    else:
        for i in range(out.size):
            out[i] = narrow((load(total[i]) + _ZERO) * factor, out.dtype)


@exact()
def adamw(
    master: Any,
    m: Any,
    v: Any,
    grad: Any,
    multiplier: Any,
    keep: Any,
    step_size: Any,
    root: Any,
    beta2: Any,
    rest1: Any,
    rest2: Any,
    eps: Any,
) -> None:
    """Update elements by AdamW (Loshchilov and Hutter, 2019).

    `keep` = 1 - lr * weight_decay, `step_size` = lr / (1 - beta1^step), `root` = sqrt(1 - beta2^step), `rest1` and
    `rest2` = 1 - beta.
    """
    for i in range(master.size):
        g = load(grad[i]) * multiplier
        # Same order of operations as `ReferenceKernels.adamw`: a step gives the same bits with either set.
        m_new = m[i] + (g - m[i]) * rest1
        v_new = v[i] * beta2 + g * g * rest2
        m[i] = m_new
        v[i] = v_new
        master[i] = master[i] * keep - step_size * (m_new / (np.sqrt(v_new) / root + eps))

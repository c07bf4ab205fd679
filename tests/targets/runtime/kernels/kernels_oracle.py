"""Formulas of the kernels in float64, each with the size of its rounding error, and the harness that calls a kernel.

The error bounds are those of Higham, "Accuracy and Stability of Numerical Algorithms", section 3.1: n roundings of
float32 in a row change a result by at most n * eps times the same formula with every term's magnitude (eps is twice
the unit roundoff, so the bound holds with room for the second order).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from attrs import frozen

from ratrain.targets.runtime.kernels import Scratch, kernel_set

if TYPE_CHECKING:
    from ratrain.targets.program.attention_spec import AttentionSpec

EPS = float(np.finfo(np.float32).eps)
DTYPES = (np.float16, ml_dtypes.bfloat16, np.float32)
HOST_SETS = ("fast", "reference")
"""Kernel sets of numpy arrays that compute as all kernels are declared."""
ON_TENSORS = "torch-device"
"""The one of tensors, which are handed the bytes of the arrays."""
FUSED = "torch-triton"
"""The one of tensors with kernels of Triton, which are interpreted."""
_NO_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: pip install triton")


def of_set(name: str) -> list[pytest.MarkDecorator]:
    """The marks of a test of a kernel set."""
    return {ON_TENSORS: [pytest.mark.parity], FUSED: [pytest.mark.parity, pytest.mark.full, _NO_TRITON]}.get(name, [])


SETS = tuple(pytest.param(name, marks=of_set(name)) for name in (*HOST_SETS, ON_TENSORS, FUSED))
"""All of these, as values of a parameter."""


def attention_grid(capped: Mapping[str, bool], sets: Sequence[str] = (*HOST_SETS, ON_TENSORS)) -> list[Any]:
    """Kernel set, element type, name of a case. Loops with a cap are compiled apart, for seconds: in the gate of float16 alone."""

    def marks(name: str, dtype: Any, has_cap: bool) -> list[pytest.MarkDecorator]:
        slow = has_cap and dtype != np.float16 and name == "fast"
        return of_set(name) + [pytest.mark.full] * slow

    return [
        pytest.param(name, dtype, case, marks=marks(name, dtype, has_cap))
        for name in sets
        for dtype in DTYPES
        for case, has_cap in capped.items()
    ]


def call(name: str, kernel: str, /, **arguments: Any) -> Any:
    """Run a kernel with a scratch of exactly the size it asks for, full of NaNs.

    The size is asked for with arrays that have a shape and a dtype but no memory.
    """
    kernels = kernel_set(name)

    def hollow(x: Any) -> Any:
        if isinstance(x, list) and x and isinstance(x[0], np.ndarray):
            return [hollow(item) for item in x]
        return np.broadcast_to(np.zeros((), x.dtype), x.shape) if isinstance(x, np.ndarray) else x

    size = kernels.scratch_bytes(kernel, **{key: hollow(value) for key, value in arguments.items()})
    if name in (ON_TENSORS, FUSED):
        from tests.targets.pytorch.tensor_calls import call_on_tensors

        return call_on_tensors(kernels, kernel, size, arguments)
    scratch = Scratch(size)
    scratch.take(size, np.uint8).fill(0xFF)
    scratch.reset()
    return getattr(kernels, kernel)(**arguments, scratch=scratch)


@frozen
class FactorRounding:
    """Rounding of numbers that become factors of a product: none, or to a type of 16 bits."""

    relative: float = 0.0
    least_normal: float = 0.0
    """below it a type's numbers lie evenly: a probability of 1e-9 is 0 in float16"""

    def error(self, factors: np.ndarray) -> np.ndarray:
        return self.relative * (np.abs(factors) + self.least_normal)


EXACT_FACTORS = FactorRounding()


def factor_rounding(name: str, dtype: Any) -> FactorRounding:
    """Rounding of a probability in a product: the fused kernels round one to a type of 16 bits."""
    if name != FUSED or np.dtype(dtype).itemsize != 2:
        return EXACT_FACTORS
    info = ml_dtypes.finfo(dtype)
    return FactorRounding(float(info.eps) / 2, float(info.smallest_normal))


def close(actual: np.ndarray, expected: np.ndarray, magnitude: np.ndarray | float, roundings: float) -> None:
    """Compare a stored result: `roundings` float32 roundings of terms of `magnitude`, then one to storage."""
    info = ml_dtypes.finfo(actual.dtype)
    bound = (
        roundings * EPS * np.asarray(magnitude, np.float64)
        + float(info.eps) / 2 * np.abs(expected) * (1 + 1e-6)
        + float(info.smallest_subnormal)
    )
    assert np.isfinite(actual).all()
    error = np.abs(actual.astype(np.float64) - expected)
    assert (error <= bound).all(), f"error {error.max():.3g}, {np.max(error / bound):.3g} of the bound"


def same_bits(a: np.ndarray, b: np.ndarray) -> None:
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(a.view(f"u{a.itemsize}"), b.view(f"u{b.itemsize}"))


def numeric_gradient(loss: Callable[[], float], x: np.ndarray, step: float = 1e-5) -> np.ndarray:
    """Central differences of `loss`, a function of the float64 array x, in every element."""
    gradient = np.empty_like(x)
    for index in np.ndindex(*x.shape):
        kept = x[index]
        x[index] = kept + step
        above = loss()
        x[index] = kept - step
        gradient[index] = (above - loss()) / (2 * step)
        x[index] = kept
    return gradient


def f64(*arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    return tuple(x.astype(np.float64) for x in arrays)


def rmsnorm(x: np.ndarray, gamma: np.ndarray, eps: float) -> tuple[np.ndarray, np.ndarray]:
    rstd = 1 / np.sqrt((x**2).mean(axis=1) + eps)
    return x * rstd[:, None] * gamma, rstd


def rmsnorm_gradient(dxn, x, gamma, rstd):
    """dx, dgamma."""
    weighted = dxn * gamma
    inner = (weighted * x).sum(axis=1, keepdims=True)
    r = rstd[:, None]
    return r * weighted - r**3 * x * inner / x.shape[1], (dxn * x * r).sum(axis=0)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return np.where(x >= 0, 1 / (1 + np.exp(-np.abs(x))), np.exp(-np.abs(x)) / (1 + np.exp(-np.abs(x))))


def swiglu(gate, up):
    return gate * sigmoid(gate) * up


def swiglu_gradient(gate, up, dprod):
    """dgate, dup."""
    s = sigmoid(gate)
    return dprod * up * (s + gate * s * (1 - s)), dprod * gate * s


def published_slopes(heads: int) -> list[float]:
    """The paper's own recursion."""

    def power_of_two(n: int) -> list[float]:
        start = 2 ** (-(2 ** -(np.log2(n) - 3)))
        return [start * start**i for i in range(n)]

    if np.log2(heads).is_integer():
        return power_of_two(heads)
    below = 2 ** int(np.floor(np.log2(heads)))
    return power_of_two(below) + published_slopes(2 * below)[0::2][: heads - below]


def attention_inputs(spec: AttentionSpec, dtype: type, seed: int = 0) -> dict[str, np.ndarray]:
    """Stored q, k, v and do of an attention, random."""
    rng = np.random.default_rng(seed)
    tokens, wide, narrow = spec.batch * spec.seq_len, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    shapes = {"q": wide, "k": narrow, "v": narrow, "do": wide}
    return {name: rng.normal(size=(tokens, width)).astype(dtype) for name, width in shapes.items()}


def packed_starts(spec: AttentionSpec, seed: int = 0) -> np.ndarray:
    """Of each row where its document starts: sequences that documents of 1 token to all of one are packed into."""
    rng = np.random.default_rng((seed, spec.seq_len))
    begins = rng.random((spec.batch, spec.seq_len)) < rng.choice([0.5, 0.1, 0.01], (spec.batch, 1))
    begins[:, 0] = True
    starts = np.maximum.accumulate(np.where(begins, np.arange(spec.seq_len), 0), axis=1)
    return starts.astype(np.int32).reshape(-1)


def at_other_addresses(arrays: dict[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
    """Copies of the arrays, each time elsewhere."""
    arena = Scratch(1 << 22)
    for offset in (64, 192, 4096):
        arena.reset()
        arena.take(offset, np.uint8)
        moved = {key: arena.take(value.shape, value.dtype) for key, value in arrays.items()}
        for key, value in arrays.items():
            moved[key][:] = value
        yield moved


def nan_is_visible(spec: AttentionSpec, forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
    """A query that is not finite: in its own row of the output, and in the gradients of the keys that it sees; nowhere else.

    `forward(x)` gives o and lse, `backward(x, o, lse)` gradients by name; of two sequences of 130 tokens and one head.
    """
    x = attention_inputs(spec, np.float16)
    o, _ = forward(x)
    x["q"][129] = np.nan
    broken, broken_lse = forward(x)
    assert np.isnan(broken[129]).all()
    assert np.isnan(broken_lse[0, 129])
    same_bits(np.delete(broken, 129, axis=0), np.delete(o, 129, axis=0))
    gradient = backward(x, broken, broken_lse)
    assert np.isnan(gradient["dq"][129]).all()
    assert np.isnan(gradient["dk"][:130]).all()
    assert np.isfinite(gradient["dk"][130:]).all()


def soft_cap(x: np.ndarray, softcap: float | None) -> tuple[np.ndarray, np.ndarray]:
    """softcap * tanh(x / softcap), and its derivative."""
    if softcap is None:
        return x, np.ones_like(x)
    return softcap * np.tanh(x / softcap), 1 / np.cosh(x / softcap) ** 2


class Attention:
    """The whole score matrix of every sequence and head: arrays of [batch, heads, queries, keys or head_dim]."""

    def __init__(self, spec: AttentionSpec, q, k, v, documents=None) -> None:
        self.spec = spec
        self.q = self.split(q)
        self.k, self.v = self.repeat(k), self.repeat(v)
        i, j = np.arange(spec.seq_len)[:, None], np.arange(spec.seq_len)[None, :]
        self.bias = np.zeros((spec.heads, spec.seq_len, spec.seq_len))
        if spec.alibi:
            self.bias += np.array(published_slopes(spec.heads))[:, None, None] * (j - i)
        self.seen = (j <= i) & (j > i - (spec.window or spec.seq_len))
        if documents is not None:
            self.seen = self.seen & (j >= documents.reshape(spec.batch, 1, spec.seq_len, 1))
        self.scale = spec.scale or 1 / np.sqrt(spec.head_dim)
        scores, self.slope = soft_cap(self.q @ self.k.swapaxes(2, 3) * self.scale, spec.softcap)
        self.scores = np.where(self.seen, scores + self.bias, -np.inf)
        peak = self.scores.max(axis=-1, keepdims=True)
        self.lse = (peak + np.log(np.exp(self.scores - peak).sum(axis=-1, keepdims=True)))[..., 0]
        self.prob = np.exp(self.scores - self.lse[..., None])
        self.o = self.prob @ self.v
        # largest error of a score: the product's, the bias's, and that of subtracting a maximum or an lse
        terms = np.abs(self.q) @ np.abs(self.k).swapaxes(2, 3) * self.scale + np.abs(self.bias)
        self.score_error = (spec.head_dim + 8) * EPS * (np.where(self.seen, terms, 0).max() + np.abs(self.lse).max())
        # a cap makes no error larger; its tanh and the product add some of their own, and the slope, 1 - tanh^2, has twice the tanh's
        self.score_error += 6 * EPS * (spec.softcap or 0)
        self.slope_error = 2 * (self.score_error / spec.softcap + 6 * EPS) if spec.softcap else 0.0

    def split(self, x):
        """[T, n * head_dim] as [batch, n, seq_len, head_dim]."""
        return x.reshape(self.spec.batch, self.spec.seq_len, -1, self.spec.head_dim).swapaxes(1, 2)

    def join(self, x):
        return x.swapaxes(1, 2).reshape(self.spec.batch * self.spec.seq_len, -1)

    def repeat(self, x):
        return np.repeat(self.split(x), self.spec.group, axis=1)

    def fold(self, x):
        """Sum over the query heads that share a key-value head; [T, kv_heads * head_dim]."""
        spec = self.spec
        grouped = x.reshape(spec.batch, spec.kv_heads, spec.group, spec.seq_len, spec.head_dim)
        return self.join(grouped.sum(axis=2))

    def rows(self, x):
        """[batch, heads, seq_len] as [heads, T]."""
        return x.swapaxes(0, 1).reshape(self.spec.heads, -1)

    def output_error(self, rounding):
        """Error of o by the rounding of probabilities, of which the largest of a row is 1 until the row is divided."""
        return self.join((rounding.error(self.prob) * self.seen) @ np.abs(self.v))

    def gradient(self, do, o, lse, rounding=EXACT_FACTORS):
        """dq, dk, dv and delta, each with its error bound, of a backward that is given o and lse [heads, T].

        `rounding` is that of a probability, or of a score's gradient, as a factor of a product.
        """
        spec = self.spec
        do, o = self.split(do), self.split(o)
        prob = np.exp(self.scores - lse.reshape(spec.heads, spec.batch, spec.seq_len).swapaxes(0, 1)[..., None])
        dprob = do @ self.v.swapaxes(2, 3)
        delta = (do * o).sum(axis=-1, keepdims=True)
        dscore = prob * (dprob - delta)
        size = np.abs(do) @ np.abs(self.v).swapaxes(2, 3) + (np.abs(do) * np.abs(o)).sum(axis=-1, keepdims=True)
        sums = spec.seq_len * spec.group + spec.head_dim + 8
        error = prob * (self.score_error * np.abs(dprob - delta) + (spec.head_dim + 8) * EPS * size)
        prob_error = prob * (self.score_error + sums * EPS) + rounding.error(prob) * self.seen
        error += (sums * EPS + self.slope_error) * np.abs(dscore)
        dscore = dscore * self.slope
        error = (error + rounding.error(dscore) * self.seen) * self.scale
        values = {
            "dq": self.join(dscore @ self.k) * self.scale,
            "dk": self.fold(dscore.swapaxes(2, 3) @ self.q) * self.scale,
            "dv": self.fold(prob.swapaxes(2, 3) @ do),
            "delta": self.rows(delta[..., 0]),
        }
        bounds = {
            "dq": self.join(error @ np.abs(self.k)),
            "dk": self.fold(error.swapaxes(2, 3) @ np.abs(self.q)),
            "dv": self.fold(prob_error.swapaxes(2, 3) @ np.abs(do)),
            "delta": self.rows((np.abs(do) * np.abs(o)).sum(axis=-1)) * (spec.head_dim + 2) * EPS,
        }
        return values, bounds


def head(xn, table, labels, normalise, scale=1.0, softcap=None):
    """Logits, lse and the sum of the losses."""
    if normalise:
        table = table / np.maximum(np.linalg.norm(table, axis=1, keepdims=True), 1e-12)
    logits, _ = soft_cap(scale * (xn @ table.T), softcap)
    peak = logits.max(axis=1, keepdims=True)
    lse = (peak + np.log(np.exp(logits - peak).sum(axis=1, keepdims=True)))[:, 0]
    return logits, lse, float((lse - logits[np.arange(len(labels)), labels]).sum())


def head_gradient(xn, table, labels, factor, normalise, scale=1.0, softcap=None):
    """dxn and dtable of factor * the loss."""
    logits, lse, _ = head(xn, table, labels, normalise, scale, softcap)
    dlogit = np.exp(logits - lse[:, None])
    dlogit[np.arange(len(labels)), labels] -= 1
    dlogit *= factor
    if not normalise:
        dlogit *= scale * soft_cap(scale * (xn @ table.T), softcap)[1]
        return dlogit @ table, dlogit.T @ xn
    norm = np.maximum(np.linalg.norm(table, axis=1, keepdims=True), 1e-12)
    unit = table / norm
    dunit = dlogit.T @ xn
    along = np.where(norm > 1e-12, (dunit * unit).sum(axis=1, keepdims=True), 0)
    return dlogit @ unit, (dunit - along * unit) / norm

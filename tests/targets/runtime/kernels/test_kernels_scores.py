"""Attention whose score matrix is whole: each kernel of both sets against float64, and all together against the fused kernels."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.targets.mt3000.kernels.tiled import Tiled
from ratrain.targets.program.attention_spec import AttentionSpec
from tests.targets.runtime.kernels.kernels_oracle import (
    DTYPES,
    EPS,
    SETS,
    Attention,
    call,
    close,
    f64,
    packed_starts,
    same_bits,
)

CASES = {
    "one-token": AttentionSpec(batch=1, seq_len=1, heads=2, kv_heads=1, head_dim=8),
    "grouped": AttentionSpec(batch=2, seq_len=37, heads=6, kv_heads=2, head_dim=16),
    "alibi-12": AttentionSpec(batch=1, seq_len=50, heads=12, kv_heads=12, head_dim=4, alibi=True),
    "window": AttentionSpec(batch=2, seq_len=70, heads=2, kv_heads=1, head_dim=8, window=17),
    "window-1": AttentionSpec(batch=1, seq_len=40, heads=1, kv_heads=1, head_dim=8, window=1),
    "several-blocks": AttentionSpec(batch=2, seq_len=530, heads=2, kv_heads=1, head_dim=8, window=300, alibi=True),
}


class Whole:
    """Stored operands of a case, and the same in float64 as [batch, heads, queries, keys or head_dim]."""

    def __init__(self, spec: AttentionSpec, dtype: type, seed: int = 0, *, packed: bool = False) -> None:
        rng = np.random.default_rng(seed)
        self.spec, self.dtype = spec, dtype
        tokens, wide, narrow = spec.batch * spec.seq_len, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        shapes = {"q": wide, "k": narrow, "v": narrow, "do": wide}
        self.x = {name: rng.normal(size=(tokens, width)).astype(dtype) for name, width in shapes.items()}
        self.matrix = (spec.heads * tokens, spec.seq_len)
        self.documents = packed_starts(spec, seed) if packed else None
        self.exact = Attention(spec, *f64(self.x["q"], self.x["k"], self.x["v"]), self.documents)

    def empty(self, like: str | None = None) -> np.ndarray:
        """An operand to be written, full of NaNs: a matrix, or one of a name's shape."""
        return np.full(self.matrix if like is None else self.x[like].shape, np.nan, self.dtype)

    def square(self, matrix: np.ndarray) -> np.ndarray:
        """A stored matrix as [batch, heads, queries, keys] in float64."""
        spec = self.spec
        return matrix.astype(np.float64).reshape(spec.heads, spec.batch, spec.seq_len, -1).swapaxes(0, 1)

    def stored(self, square: np.ndarray) -> np.ndarray:
        """[batch, heads, queries, keys] as a matrix in the storage type."""
        return np.ascontiguousarray(square.swapaxes(0, 1).reshape(self.matrix).astype(self.dtype))

    def close(self, matrix: np.ndarray, expected: np.ndarray, magnitude: np.ndarray, roundings: float) -> None:
        close(
            matrix,
            *(np.broadcast_to(each, expected.shape).swapaxes(0, 1).reshape(self.matrix) for each in (expected, magnitude)),
            roundings,
        )  # fmt: skip


@pytest.fixture(params=CASES)
def spec(request: Any) -> AttentionSpec:
    return CASES[request.param]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETS)
def test_scores(name: str, dtype: type, spec: AttentionSpec) -> None:
    of = Whole(spec, dtype)
    exact, scores = of.exact, of.empty()
    call(name, "attention_scores_forward", q=of.x["q"], k=of.x["k"], scores=scores, spec=spec)
    terms = np.abs(exact.q) @ np.abs(exact.k).swapaxes(2, 3) * exact.scale
    of.close(scores, exact.q @ exact.k.swapaxes(2, 3) * exact.scale, terms, spec.head_dim + 4)


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETS)
@pytest.mark.sampled(2, first=1)
def test_softmax(name: str, dtype: type, spec: AttentionSpec, in_place: bool, packed: bool) -> None:
    of = Whole(spec, dtype, packed=packed)
    scores = of.stored(3 * of.exact.q @ of.exact.k.swapaxes(2, 3))
    biased = np.where(of.exact.seen, of.square(scores) + of.exact.bias, -np.inf)
    weight = np.exp(biased - biased.max(axis=-1, keepdims=True))
    scores[~of.stored(np.broadcast_to(of.exact.seen, biased.shape)).astype(bool)] = np.nan  # of keys that nobody sees
    probs = scores if in_place else of.empty()
    call(name, "attention_softmax_forward", scores=scores, probs=probs, documents=of.documents, spec=spec)
    expected = weight / weight.sum(axis=-1, keepdims=True)
    size = np.abs(np.where(of.exact.seen, biased, 0)).max() + np.abs(of.exact.bias).max()
    exponentials = expected + 1e-30  # below 2.7e-38 they may be 0
    of.close(probs, expected, exponentials, 4 * size + spec.seq_len + 16)
    assert not of.square(probs)[~np.broadcast_to(of.exact.seen, biased.shape)].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETS)
def test_values(name: str, dtype: type, spec: AttentionSpec) -> None:
    of = Whole(spec, dtype)
    exact, probs = of.exact, of.stored(of.exact.prob)
    o, dprobs, dv = of.empty("q"), of.empty(), of.empty("v")
    call(name, "attention_values_forward", probs=probs, v=of.x["v"], o=o, spec=spec)
    close(o, exact.join(of.square(probs) @ exact.v), exact.join(of.square(probs) @ np.abs(exact.v)), spec.seq_len + 4)
    operands = {"probs": probs, "v": of.x["v"], "do": of.x["do"], "dprobs": dprobs, "dv": dv}
    call(name, "attention_values_backward", **operands, spec=spec)
    do = exact.split(*f64(of.x["do"]))
    values_t = exact.v.swapaxes(2, 3)
    of.close(dprobs, do @ values_t, np.abs(do) @ np.abs(values_t), spec.head_dim + 4)
    turned = of.square(probs).swapaxes(2, 3)
    close(dv, exact.fold(turned @ do), exact.fold(turned @ np.abs(do)), spec.seq_len * spec.group + 4)


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETS)
@pytest.mark.sampled(2)
def test_softmax_gradient(name: str, dtype: type, spec: AttentionSpec, in_place: bool, packed: bool) -> None:
    of = Whole(spec, dtype, packed=packed)
    probs = of.stored(of.exact.prob)
    dprobs = of.stored(of.exact.split(*f64(of.x["do"])) @ of.exact.v.swapaxes(2, 3))
    p, seen = of.square(probs), np.broadcast_to(of.exact.seen, of.exact.prob.shape)
    dp = np.where(seen, of.square(dprobs), 0)
    dprobs[~of.stored(seen).astype(bool)] = np.inf
    dscores = dprobs if in_place else of.empty()
    operands = {"probs": probs, "dprobs": dprobs, "dscores": dscores, "documents": of.documents}
    call(name, "attention_softmax_backward", **operands, spec=spec)
    size = p * (np.abs(dp) + (p * np.abs(dp)).sum(axis=-1, keepdims=True))
    of.close(dscores, p * (dp - (p * dp).sum(axis=-1, keepdims=True)), size, spec.seq_len + 8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETS)
def test_scores_gradient(name: str, dtype: type, spec: AttentionSpec) -> None:
    of = Whole(spec, dtype)
    exact = of.exact
    dscores = of.stored(np.random.default_rng(3).normal(size=exact.prob.shape))
    dq, dk, ds = of.empty("q"), of.empty("k"), of.square(dscores)
    operands = {"q": of.x["q"], "k": of.x["k"], "dscores": dscores, "dq": dq, "dk": dk}
    call(name, "attention_scores_backward", **operands, spec=spec)
    expected, size = (exact.join(a @ b) * exact.scale for a, b in ((ds, exact.k), (np.abs(ds), np.abs(exact.k))))
    close(dq, expected, size, spec.seq_len + 4)
    turned = ds.swapaxes(2, 3)
    expected, size = exact.fold(turned @ exact.q), exact.fold(np.abs(turned) @ np.abs(exact.q))
    close(dk, expected * exact.scale, size * exact.scale, spec.seq_len * spec.group + 4)


def whole(name: str, of: Whole) -> dict[str, np.ndarray]:
    """Output and gradients by the kernels one after the other, as routines call them."""
    spec, x, probs, scores = of.spec, of.x, of.empty(), of.empty()
    results = {"o": of.empty("q"), "dq": of.empty("q"), "dk": of.empty("k"), "dv": of.empty("v")}
    call(name, "attention_scores_forward", q=x["q"], k=x["k"], scores=probs, spec=spec)
    call(name, "attention_softmax_forward", scores=probs, probs=probs, documents=of.documents, spec=spec)
    call(name, "attention_values_forward", probs=probs, v=x["v"], o=results["o"], spec=spec)
    operands = {"probs": probs, "v": x["v"], "do": x["do"], "dprobs": scores, "dv": results["dv"]}
    call(name, "attention_values_backward", **operands, spec=spec)
    operands = {"probs": probs, "dprobs": scores, "dscores": scores, "documents": of.documents}
    call(name, "attention_softmax_backward", **operands, spec=spec)
    operands = {"q": x["q"], "k": x["k"], "dscores": scores, "dq": results["dq"], "dk": results["dk"]}
    call(name, "attention_scores_backward", **operands, spec=spec)
    return results


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETS)
def test_they_agree_with_the_fused_kernels(name: str, dtype: type, spec: AttentionSpec, packed: bool) -> None:
    of = Whole(spec, dtype, seed=1, packed=packed)
    found = whole(name, of)
    o, lse = of.empty("q"), np.empty((spec.heads, len(of.x["q"])), np.float32)
    read, told = {key: of.x[key] for key in ("q", "k", "v")}, {"documents": of.documents, "spec": spec}
    call(name, "attention_forward", **read, o=o, lse=lse, **told)
    fused = {"o": o, "dq": of.empty("q"), "dk": of.empty("k"), "dv": of.empty("v")}
    gradients = {key: fused[key] for key in ("dq", "dk", "dv")}
    call(name, "attention_backward", **of.x, o=o, lse=lse, **gradients, delta=np.empty_like(lse), **told)
    tolerance = 20 * (float(ml_dtypes.finfo(dtype).eps) + spec.seq_len * EPS)
    for key, expected in zip(fused, f64(*fused.values()), strict=True):
        size = max(1.0, float(np.abs(expected).max()))  # of a single key all gradients of scores are 0
        np.testing.assert_allclose(found[key].astype(np.float64), expected, atol=tolerance * size, err_msg=key)


@pytest.mark.parametrize("name", SETS)
def test_scores_that_no_query_sees_are_not_read(name: str) -> None:
    of = Whole(CASES["grouped"], np.float16, seed=2)
    expected = whole(name, of)
    of.x["k"][36] = np.nan  # seen by the last query of its sequence alone
    found = whole(name, of)
    same_bits(np.delete(found["o"], 36, axis=0), np.delete(expected["o"], 36, axis=0))
    assert np.isnan(found["o"][36]).all()


def test_the_tiled_set_refuses_whole_scores() -> None:
    with pytest.raises(DiagnosticError, match=r"RT093.*no tile schedules for 'attention_scores_forward'"):
        Tiled().scratch_bytes("attention_scores_forward", spec=CASES["grouped"])

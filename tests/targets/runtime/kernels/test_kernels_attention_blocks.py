"""Attention block by block, of both kernel sets: sequences cut anywhere, against the whole score matrix in float64."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from attrs import evolve, field, frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.targets.mt3000.kernels.tiled import Tiled
from ratrain.targets.program.attention_spec import AttentionBlockSpec, AttentionSpec
from tests.targets.runtime.kernels.kernels_oracle import (
    DTYPES,
    EPS,
    SETS,
    Attention,
    at_other_addresses,
    attention_grid,
    attention_inputs,
    call,
    close,
    f64,
    factor_rounding,
    nan_is_visible,
    packed_starts,
    same_bits,
)

Values = npt.NDArray[Any]


@frozen
class Cut:
    """Rows of whole sequences, and the slices they are cut into: queries and keys each for themselves."""

    spec: AttentionSpec
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    """where slices begin, and the end of the last one"""
    documents: Values | None = field(default=None, eq=False)
    """of each row where its document starts"""

    @classmethod
    def of(cls, spec: AttentionSpec, *lengths: int) -> Cut:
        """Queries and keys cut alike, as slices of a micro-batch are."""
        bounds = tuple(int(bound) for bound in np.cumsum((0, *lengths)))
        assert bounds[-1] == spec.seq_len
        return cls(spec, bounds, bounds)

    def block(self, of_queries: int, of_keys: int) -> AttentionBlockSpec:
        (first, last), (start, stop) = self.queries[of_queries : of_queries + 2], self.keys[of_keys : of_keys + 2]
        return evolve(self.spec.block, queries=last - first, keys=stop - start, first_query=first, first_key=start)

    def _parts(self, x: Values, bounds: tuple[int, ...]) -> list[Values]:
        by_sequence = x.reshape(self.spec.batch, self.spec.seq_len, -1)
        return [by_sequence[:, low:high].reshape(-1, x.shape[1]).copy() for low, high in pairwise(bounds)]

    def by_queries(self, x: Values) -> list[Values]:
        """[T, n] in slices."""
        return self._parts(x, self.queries)

    def starts(self) -> list[Values | None]:
        """Where documents start, by slices of queries."""
        if self.documents is None:
            return [None] * len(self.queries)
        return [part[:, 0] for part in self.by_queries(self.documents[:, None])]

    def by_keys(self, x: Values) -> list[Values]:
        return self._parts(x, self.keys)

    def lines(self, x: Values) -> list[Values]:
        """[heads, T] in slices."""
        return [np.ascontiguousarray(part.T) for part in self.by_queries(np.ascontiguousarray(x.T))]

    def join(self, parts: list[Values]) -> Values:
        """The inverse of `by_queries` or `by_keys`."""
        by_sequence = [part.reshape(self.spec.batch, -1, part.shape[1]) for part in parts]
        return np.concatenate(by_sequence, axis=1).reshape(-1, parts[0].shape[1])

    def join_lines(self, parts: list[Values]) -> Values:
        return np.ascontiguousarray(self.join([np.ascontiguousarray(part.T) for part in parts]).T)


def nans(like: Values, dtype: Any = np.float32) -> Values:
    return np.full(like.shape, np.nan, dtype)


def forward(name: str, cut: Cut, x: dict[str, Values]) -> tuple[Values, Values]:
    """o and lse, slice after slice, each from its first keys to its last."""
    spec, outs, lses = cut.spec, [], []
    starts = cut.starts()
    for j, q in enumerate(cut.by_queries(x["q"])):
        line = np.full((spec.heads, len(q)), np.nan, np.float32)
        acc, peak, total, o, lse = nans(q), line.copy(), line.copy(), nans(q, q.dtype), line.copy()
        state = {"acc": acc, "peak": peak, "total": total}
        for i, (k, v) in enumerate(zip(cut.by_keys(x["k"]), cut.by_keys(x["v"]), strict=True)):
            block = {"q": q, "k": k, "v": v, **state, "spec": cut.block(j, i), "accumulate": i > 0}
            call(name, "attention_partial_forward", **block, documents=starts[j])
        call(name, "attention_partial_finish", **state, o=o, lse=lse, heads=spec.heads, head_dim=spec.head_dim)
        outs.append(o)
        lses.append(lse)
    return cut.join(outs), cut.join_lines(lses)


def backward(name: str, cut: Cut, x: dict[str, Values], o: Values, lse: Values) -> dict[str, Values]:
    """Gradients in float32, slices of queries from the last to the first."""
    spec = cut.spec
    keys, values = cut.by_keys(x["k"]), cut.by_keys(x["v"])
    dk, dv = [nans(k) for k in keys], [nans(v) for v in values]
    queries, outs, douts, lses = cut.by_queries(x["q"]), cut.by_queries(o), cut.by_queries(x["do"]), cut.lines(lse)
    dq, delta = [np.zeros(q.shape, np.float32) for q in queries], [nans(line) for line in lses]
    for j in reversed(range(len(queries))):
        width = {"heads": spec.heads, "head_dim": spec.head_dim}
        call(name, "attention_delta", o=outs[j], do=douts[j], delta=delta[j], **width)
        for i, (k, v) in enumerate(zip(keys, values, strict=True)):
            read = {"q": queries[j], "k": k, "v": v, "lse": lses[j], "do": douts[j], "delta": delta[j]}
            read["documents"] = cut.starts()[j]
            sums = {"dq": dq[j], "dk": dk[i], "dv": dv[i]}
            adds = j + 1 < len(queries)
            call(name, "attention_partial_backward", **read, **sums, spec=cut.block(j, i), accumulate=adds)
    return {"dq": cut.join(dq), "dk": cut.join(dk), "dv": cut.join(dv), "delta": cut.join_lines(delta)}


def check(name: str, cut: Cut, dtype: Any, seed: int) -> None:
    """Forward and backward against the oracle."""
    spec, x = cut.spec, attention_inputs(cut.spec, dtype, seed)
    exact = Attention(spec, *f64(x["q"], x["k"], x["v"]), cut.documents)
    o, lse = forward(name, cut, x)
    rounding = factor_rounding(name, dtype)
    roundings = 2 * exact.score_error / EPS + spec.seq_len + 8 + 4 * len(cut.keys)
    of_values = roundings * EPS * exact.join(exact.prob @ np.abs(exact.v))
    close(o, exact.join(exact.o), of_values + exact.output_error(rounding), 1 / EPS)
    close(lse, exact.rows(exact.lse), 1.0, roundings)
    o, lse = exact.join(exact.o).astype(dtype), exact.rows(exact.lse).astype(np.float32)
    values, bounds = exact.gradient(*f64(x["do"], o, lse), rounding)
    for key, actual in backward(name, cut, x, o, lse).items():
        assert actual.dtype == np.float32
        close(actual, values[key], bounds[key] / EPS, 1)


@st.composite
def cuts(draw: st.DrawFn) -> Cut:
    """One to three uneven slices, of queries and keys alike or not."""
    lengths = draw(st.lists(st.integers(1, 60), min_size=1, max_size=3))
    kv_heads = draw(st.integers(1, 3))
    spec = AttentionSpec(
        batch=draw(st.integers(1, 2)),
        seq_len=sum(lengths),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from((4, 6, 16))),
        window=draw(st.none() | st.integers(1, 80)),
        alibi=draw(st.booleans()),
        scale=draw(st.none() | st.sampled_from((0.2, 1.0))),
        softcap=draw(st.none() | st.sampled_from((0.7, 30.0))),
    )
    cut = Cut.of(spec, *lengths)
    inner = st.sets(st.integers(1, spec.seq_len - 1), max_size=2) if spec.seq_len > 1 else st.just(set())
    others = st.builds(lambda bounds: (0, *sorted(bounds), spec.seq_len), inner)
    documents = packed_starts(spec, draw(st.integers(0, 99))) if draw(st.booleans()) else None
    return evolve(cut, keys=draw(st.just(cut.keys) | others), documents=documents)


@settings(max_examples=25)
@given(cuts(), st.sampled_from(DTYPES), st.integers(0, 99))
@pytest.mark.parametrize("name", SETS)
def test_slices_add_up_to_the_whole_score_matrix(name: str, cut: Cut, dtype: Any, seed: int) -> None:
    check(name, cut, dtype if cut.spec.softcap is None else np.float16, seed)


WIDE = AttentionSpec(batch=1, seq_len=900, heads=2, kv_heads=1, head_dim=8)
CASES = {
    "slices-of-several-tiles": Cut.of(WIDE, 300, 600),
    "a-window-shorter-than-a-slice": Cut.of(evolve(WIDE, window=70), 400, 300, 200),
    "a-window-longer-than-a-slice": Cut.of(evolve(WIDE, window=450, alibi=True), 300, 290, 310),
    "capped-scores": Cut.of(evolve(WIDE, softcap=1.5, scale=0.5, window=500), 300, 290, 310),
    "keys-cut-where-queries-are-not": evolve(Cut.of(evolve(WIDE, batch=2), 500, 400), keys=(0, 130, 777, 900)),
}
GRID = attention_grid({case: cut.spec.softcap is not None for case, cut in CASES.items()})


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize(("name", "dtype", "case"), GRID)
@pytest.mark.sampled(3)
def test_blocks_of_several_tiles(name: str, dtype: Any, case: str, packed: bool) -> None:
    cut = CASES[case]
    check(name, evolve(cut, documents=packed_starts(cut.spec)) if packed else cut, dtype, seed=1)


UNCUT = {
    "alibi": evolve(WIDE, alibi=True),
    "a-window": evolve(WIDE, batch=2, seq_len=270, window=90),
    "capped": evolve(WIDE, softcap=1.5, alibi=True),
}


@pytest.mark.parametrize(
    ("name", "dtype", "case"),
    attention_grid({case: spec.softcap is not None for case, spec in UNCUT.items()}, sets=("fast",)),
)
def test_the_bits_are_those_of_the_whole_kernels_where_nothing_is_cut(name: str, dtype: Any, case: str) -> None:
    spec = UNCUT[case]
    x, cut = attention_inputs(spec, dtype, seed=2), Cut.of(spec, spec.seq_len)
    o, lse = np.empty_like(x["q"]), np.empty((spec.heads, len(x["q"])), np.float32)
    call(name, "attention_forward", q=x["q"], k=x["k"], v=x["v"], o=o, lse=lse, spec=spec)
    for one, other in zip(forward(name, cut, x), (o, lse), strict=True):
        same_bits(one, other)
    expected = {"dq": np.empty_like(x["q"]), "dk": np.empty_like(x["k"]), "dv": np.empty_like(x["v"])}
    expected["delta"] = np.empty_like(lse)
    call(name, "attention_backward", **x, o=o, lse=lse, **expected, spec=spec)
    for key, found in backward(name, cut, x, o, lse).items():
        rounded = np.empty_like(expected[key])
        call(name, "cast", src=found, dst=rounded)
        same_bits(rounded, expected[key])


@pytest.mark.parametrize("first_key", [0, 90], ids=["too far back", "later"])
@pytest.mark.parametrize("name", SETS)
def test_a_block_that_no_query_sees_changes_nothing(name: str, first_key: int) -> None:
    block = AttentionBlockSpec(2, 30, 20, 60, first_key, heads=2, kv_heads=1, head_dim=8, window=35)
    rng = np.random.default_rng(3)

    def some(*shape: int) -> Values:
        return rng.normal(size=shape).astype(np.float32)

    x = {"q": some(60, 16), "k": some(40, 8), "v": some(40, 8), "spec": block}
    state = {"acc": some(60, 16), "peak": some(2, 60), "total": some(2, 60)}
    before = {key: value.copy() for key, value in state.items()}
    call(name, "attention_partial_forward", **x, **state, accumulate=True)
    for key, value in state.items():
        same_bits(value, before[key])
    call(name, "attention_partial_forward", **x, **state, accumulate=False)
    for key, start in {"acc": 0, "peak": -np.inf, "total": 0}.items():
        same_bits(state[key], np.full_like(state[key], start))
    sums = {"dq": some(60, 16), "dk": some(40, 8), "dv": some(40, 8)}
    before = {key: value.copy() for key, value in sums.items()}
    read = {**x, "lse": some(2, 60), "do": some(60, 16), "delta": some(2, 60)}
    call(name, "attention_partial_backward", **read, **sums, accumulate=True)
    for key, value in sums.items():
        np.testing.assert_array_equal(value, before[key])
    call(name, "attention_partial_backward", **read, **sums, accumulate=False)
    np.testing.assert_array_equal(sums["dq"], before["dq"])
    assert not sums["dk"].any()
    assert not sums["dv"].any()


SPEC = AttentionSpec(batch=2, seq_len=130, heads=1, kv_heads=1, head_dim=8)
CUT = Cut.of(SPEC, 50, 60, 20)


@pytest.mark.parametrize("name", SETS)
def test_overflow_and_nan_are_visible(name: str) -> None:
    """As of the whole kernels: in the rows and keys that they belong to, in later slices too."""
    x = attention_inputs(SPEC, np.float16)
    o, lse = forward(name, CUT, x)
    x["do"][:] = np.float16(60000)  # the first value is seen by all queries: their sum is over 65504
    dv, rounded = backward(name, CUT, x, o, lse)["dv"], np.empty_like(x["v"])
    assert np.isfinite(dv).all()
    call(name, "cast", src=dv, dst=rounded)
    assert np.isinf(rounded).any()
    nan_is_visible(SPEC, partial(forward, name, CUT), partial(backward, name, CUT))
    x = attention_inputs(SPEC, np.float16)
    x["k"][3] = np.nan  # seen by the queries from 3 on, of all slices
    broken, broken_lse = forward(name, CUT, x)
    assert np.isnan(broken[3:130]).all()
    assert np.isnan(broken_lse[0, 3:130]).all()
    same_bits(np.delete(broken, np.s_[3:130], axis=0), np.delete(o, np.s_[3:130], axis=0))


@pytest.mark.parametrize("name", SETS)
def test_large_scores_do_not_overflow(name: str) -> None:
    x = attention_inputs(SPEC, np.float16, seed=4)
    x["q"] *= np.float16(1000)
    x["k"] *= np.float16(1000)
    o, lse = forward(name, CUT, x)
    assert lse.max() > 1e6
    # each row's softmax is one-hot here: the output is the value of the key with the largest score
    q, k, v = (value.reshape(2, 130, 8) for value in (x["q"], x["k"], x["v"]))
    score = np.where(np.tri(130, dtype=bool), q.astype(np.float64) @ k.astype(np.float64).swapaxes(1, 2), -np.inf)
    same_bits(o.reshape(2, 130, 8), np.take_along_axis(v, score.argmax(axis=2)[..., None], axis=1))


@pytest.mark.parametrize("name", SETS)
def test_result_does_not_depend_on_the_address(name: str) -> None:
    block = AttentionBlockSpec(2, 70, 150, 100, 10, heads=6, kv_heads=2, head_dim=16)
    rng = np.random.default_rng(5)
    shapes = {"q": (140, 96), "k": (300, 32), "v": (300, 32), "do": (140, 96)}
    lines = {"lse": (6, 140), "delta": (6, 140), "peak": (6, 140), "total": (6, 140)}
    sums = {"acc": (140, 96), "dq": (140, 96), "dk": (300, 32), "dv": (300, 32)}
    start = {key: rng.normal(size=shape).astype(np.float16) for key, shape in shapes.items()}
    start |= {key: np.abs(rng.normal(size=shape)).astype(np.float32) for key, shape in (lines | sums).items()}

    def run(x: dict[str, Values]) -> None:
        read = {key: x[key] for key in ("q", "k", "v")}
        state = {key: x[key] for key in ("acc", "peak", "total")}
        call(name, "attention_partial_forward", **read, **state, spec=block, accumulate=True)
        read |= {key: x[key] for key in ("lse", "do", "delta", "dq", "dk", "dv")}
        call(name, "attention_partial_backward", **read, spec=block, accumulate=True)

    expected = {key: value.copy() for key, value in start.items()}
    run(expected)
    for moved in at_other_addresses(start):
        run(moved)
        for key, value in moved.items():
            same_bits(value, expected[key])


def test_the_tiled_set_refuses_blocks() -> None:
    for kernel in ("attention_partial_forward", "attention_partial_backward"):
        with pytest.raises(DiagnosticError, match=f"RT093.*no tile schedules for '{kernel}'.*slices"):
            Tiled().scratch_bytes(kernel, spec=SPEC.block, accumulate=False)


def test_spec_refuses_what_no_block_is() -> None:
    with pytest.raises(ValueError, match="3 query heads cannot share 2"):
        AttentionBlockSpec(1, 1, 1, 0, 0, heads=3, kv_heads=2, head_dim=8)
    for wrong in ({"first_query": -1}, {"first_key": -1}, {"queries": 0}, {"keys": 0}, {"window": 0}):
        with pytest.raises(ValueError, match=f"'{next(iter(wrong))}' must be >="):
            evolve(SPEC.block, **wrong)

"""Tiled kernels against float64 and the fast kernels, with transfers that are early and late; training with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain.ratrain_ir.config.types import Dtype
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.targets.mt3000.kernels.tiled import Tiled
from ratrain.targets.mt3000.tiling.attention import PARTS, AttentionShape
from ratrain.targets.mt3000.tiling.gemm import GemmShape
from ratrain.targets.mt3000.tiling.tile_search import attention_tiles, gemm_tiles
from ratrain.targets.program.attention_spec import AttentionSpec
from ratrain.targets.program.rtx import parse_program, program_bytes
from ratrain.targets.runtime.arena.dtypes import NUMPY_DTYPES
from ratrain.targets.runtime.kernels import Scratch, kernel_set
from ratrain.targets.verifier.program_verifier import check_program
from tests.end_to_end.tiny_runs import MODEL, losses, make_program, train
from tests.end_to_end.toys import GPT2, NEOX
from tests.targets.mt3000.tile_shapes import MT3000, SMALL, attention_shapes, gemm_shapes
from tests.targets.runtime.kernels.kernels_oracle import Attention, f64, packed_starts

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.targets.mt3000.tiling.core import Cluster
    from ratrain.targets.program.routine import Routine

CLUSTERS = st.sampled_from([MT3000, SMALL])


def tiled(tiles, *, late: bool) -> Tiled:
    kernels = Tiled(tiles)
    kernels.late = late
    return kernels


def scratch_for(kernels, kernel: str, **arguments) -> Scratch:
    """Exactly what is asked for, full of NaNs."""
    size = kernels.scratch_bytes(kernel, **arguments)
    scratch = Scratch(size)
    scratch.take(size, np.uint8).fill(0xFF)
    scratch.reset()
    return scratch


@settings(max_examples=20, deadline=None)
@given(gemm_shapes(), CLUSTERS, st.booleans(), st.integers(0, 99))
def test_products(shape: GemmShape, cluster: Cluster, late: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    a = rng.normal(size=(shape.k, shape.m) if shape.trans_a else (shape.m, shape.k)).astype(NUMPY_DTYPES[shape.a])
    b = rng.normal(size=(shape.n, shape.k) if shape.trans_b else (shape.k, shape.n)).astype(NUMPY_DTYPES[shape.b])
    out = rng.normal(size=(shape.m, shape.n)).astype(NUMPY_DTYPES[shape.out])
    added = {
        name: rng.normal(size=shape.n if name == "bias" else (shape.m, shape.n)).astype(NUMPY_DTYPES[dtype])
        for name, dtype in shape.added
        if name != "out"
    }
    left, right = a.T if shape.trans_a else a, b.T if shape.trans_b else b
    expected = left.astype(float) @ right.astype(float)
    size = np.abs(left.astype(float)) @ np.abs(right.astype(float))
    for name, _ in shape.added:
        term = (out if name == "out" else added[name]).astype(float)
        expected, size = expected + term, size + np.abs(term)
    kernels = tiled({"gemm": gemm_tiles(shape, cluster)}, late=late)
    kernels.gemm(a, b, out, scratch=scratch_for(kernels, "gemm"), **added)
    info = ml_dtypes.finfo(out.dtype)
    bound = (shape.k + 3) * 1.2e-7 * size + float(info.eps) / 2 * np.abs(expected) + float(info.smallest_subnormal)
    assert (np.abs(out.astype(float) - expected) <= bound).all()


def attention(kernels, spec: AttentionSpec, x, documents=None):
    """All results of forward and backward."""
    rows = spec.batch * spec.seq_len
    o, lse = np.empty_like(x["q"]), np.empty((spec.heads, rows), np.float32)
    out = {"dq": np.empty_like(x["q"]), "dk": np.empty_like(x["k"]), "dv": np.empty_like(x["v"])}
    delta = np.empty_like(lse)
    q, k, v = x["q"], x["k"], x["v"]
    scratch = scratch_for(kernels, "attention_forward", spec=spec)
    kernels.attention_forward(q, k, v, o, lse, documents=documents, scratch=scratch, spec=spec)
    scratch = scratch_for(kernels, "attention_backward", spec=spec)
    told = {"documents": documents, "scratch": scratch, "spec": spec}
    kernels.attention_backward(q, k, v, o, lse, x["do"], **out, delta=delta, **told)
    return {"o": o, "lse": lse, "delta": delta, **out}


@settings(max_examples=15, deadline=None)
@given(attention_shapes(), CLUSTERS, st.booleans(), st.booleans(), st.integers(0, 99))
def test_attention(shape: AttentionShape, cluster: Cluster, late: bool, alibi: bool, seed: int) -> None:
    """Against float64: every probability and score gradient is rounded once to storage, beside the result."""
    spec = AttentionSpec(shape.batch, shape.seq_len, shape.heads, shape.kv_heads, shape.head_dim, shape.window, alibi)
    rng = np.random.default_rng(seed)
    rows = spec.batch * spec.seq_len
    heads = {"q": spec.heads, "k": spec.kv_heads, "v": spec.kv_heads, "do": spec.heads}
    x = {
        name: rng.normal(size=(rows, n * spec.head_dim)).astype(NUMPY_DTYPES[shape.dtype]) for name, n in heads.items()
    }
    parts = {kernel: attention_tiles(kernel, shape, cluster) for kernel in PARTS}
    documents = packed_starts(spec, seed) if shape.documents else None
    found = attention(tiled(parts, late=late), spec, x, documents)
    exact = Attention(spec, *f64(x["q"], x["k"], x["v"]), documents)
    eps = float(ml_dtypes.finfo(NUMPY_DTYPES[shape.dtype]).eps)
    score_error = exact.score_error + 1e-6
    magnitude = exact.join(exact.prob @ np.abs(exact.v))
    slack = 2.0**-23 if shape.dtype is Dtype.F16 else 1e-30  # of probabilities that are subnormal halves
    bound = (score_error + eps) * magnitude + eps * np.abs(exact.join(exact.o)) + slack * spec.seq_len * 8
    assert (np.abs(found["o"] - exact.join(exact.o)) <= bound).all()
    assert (np.abs(found["lse"] - exact.rows(exact.lse)) <= score_error + 1e-5).all()
    values, errors = exact.gradient(*f64(x["do"], found["o"], found["lse"]))
    do = exact.split(x["do"].astype(float))
    dscore = exact.prob * (np.abs(do @ exact.v.swapaxes(2, 3)) + np.abs(values["delta"]).max())
    stored = {
        "dq": exact.join(dscore @ np.abs(exact.k)) * exact.scale,
        "dk": exact.fold(dscore.swapaxes(2, 3) @ np.abs(exact.q)) * exact.scale,
        "dv": exact.fold(exact.prob.swapaxes(2, 3) @ np.abs(do)),
        "delta": 0.0,
    }
    for name, expected in values.items():
        room = 2 * errors[name] + eps * (stored[name] + np.abs(expected)) + slack * spec.seq_len * spec.group * 8
        assert (np.abs(found[name] - expected) <= room).all(), name


@pytest.mark.parametrize("window", [None, 40])
def test_tiled_equals_fast_within_half_rounding(window: int | None) -> None:
    spec = AttentionSpec(batch=1, seq_len=130, heads=4, kv_heads=2, head_dim=16, window=window)
    shape = AttentionShape(1, 130, 4, 2, 16, window, Dtype.F16)
    rng = np.random.default_rng(3)
    x = {
        name: rng.normal(size=(130, n * 16)).astype(np.float16) for name, n in {"q": 4, "k": 2, "v": 2, "do": 4}.items()
    }
    mine = attention(Tiled({kernel: attention_tiles(kernel, shape, MT3000) for kernel in PARTS}), spec, x)
    fast = attention(kernel_set("fast"), spec, x)
    for name, expected in fast.items():
        np.testing.assert_allclose(mine[name].astype(float), expected.astype(float), atol=8e-3, err_msg=name)


def test_nan_and_overflow_are_visible() -> None:
    shape = GemmShape(3, 2, 4, Dtype.F16, Dtype.F16, Dtype.F16)
    kernels = Tiled({"gemm": gemm_tiles(shape, MT3000)})
    a, b, out = np.full((3, 4), 300, np.float16), np.full((4, 2), 300, np.float16), np.empty((3, 2), np.float16)
    a[1, 2] = np.nan
    kernels.gemm(a, b, out, scratch=scratch_for(kernels, "gemm"))
    assert np.isnan(out[1]).all()
    assert np.isinf(out[[0, 2]]).all()


@pytest.mark.parametrize(
    ("model", "mask", "dtype", "tolerance"),
    [
        pytest.param(MODEL, "causal", "f16", 2e-4, id="llama-f16"),
        pytest.param(GPT2, "causal", "bf16", 1e-3, id="gpt2-bf16"),
        pytest.param(NEOX, "causal", "f16", 2e-4, id="neox-f16"),
        pytest.param(MODEL, "document", "f16", 2e-4, id="packed-f16"),
        pytest.param(MODEL, "causal", "bf16", 1e-3, id="llama-bf16", marks=pytest.mark.full),
        pytest.param(GPT2, "causal", "f16", 2e-4, id="gpt2-f16", marks=pytest.mark.full),
        pytest.param(NEOX, "causal", "bf16", 1e-3, id="neox-bf16", marks=pytest.mark.full),
        pytest.param(MODEL, "document", "bf16", 1e-3, id="packed-bf16", marks=pytest.mark.full),
    ],
)
@pytest.mark.sampled(4)
def test_training_is_that_of_the_fast_kernels(model: ModelConfig, mask: str, dtype: str, tolerance: float) -> None:
    program = make_program(model, machine="mt3000-tiles", view_dtype=dtype, attention_mask=mask)
    again = parse_program(program_bytes(program), "again.rtx")
    assert again.routines == program.routines
    assert any(step.on_chip for routine in again.routines for step in routine.steps)
    check_program(again)
    np.testing.assert_allclose(losses(train(again, 2, kernels="tiled")), losses(train(program, 2)), rtol=tolerance)


def test_a_program_without_tiles_is_refused() -> None:
    program = make_program()
    assert not any(step.on_chip for routine in program.routines for step in routine.steps)
    with pytest.raises(DiagnosticError, match=r"RT093.*no tile schedule"):
        train(program, 1, kernels="tiled")


def test_tiles_of_another_step_are_refused() -> None:
    from attrs import evolve

    program = parse_program(program_bytes(make_program(machine="mt3000-tiles")), "a.rtx")
    routine = next(r for r in program.routines if r.key == "mlp.forward" or "mlp" in r.key)
    gemms = [n for n, step in enumerate(routine.steps) if step.kernel == "gemm"]
    wrong = routine.steps[gemms[-1]].on_chip
    first = routine.steps[gemms[0]]
    assert first.on_chip != wrong
    steps = list(routine.steps)
    steps[gemms[0]] = evolve(first, on_chip=wrong)
    changed: Routine = evolve(routine, steps=tuple(steps))
    program.routines[program.routines.index(routine)] = changed
    with pytest.raises(DiagnosticError, match=r"RT080.*tiles"):
        check_program(program)

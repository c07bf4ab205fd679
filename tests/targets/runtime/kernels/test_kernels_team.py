"""Threads that share out a kernel: the parts cover it once, and results do not depend on how many there are."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from ratrain.ratrain_ir.config.quantised import block_count, packed_bytes
from ratrain.targets.program.attention_spec import AttentionBlockSpec, AttentionSpec
from ratrain.targets.program.kernels import KERNELS
from ratrain.targets.runtime.kernels import Scratch, kernel_set, team
from ratrain.targets.runtime.kernels.reference.reference_nf4 import pack_nf4
from ratrain.targets.runtime.kernels.team import Team
from tests.targets.runtime.kernels.expert_calls import expert_calls
from tests.targets.runtime.kernels.kernels_oracle import same_bits

ROWS, WIDTH, OUT = 600, 24, 48
"""Three groups of rows; parts that are no multiple of anything."""


@pytest.fixture
def tiny_parts(monkeypatch):
    """Small arrays are shared out too."""
    monkeypatch.setattr(team, "ELEMENTS", 1)
    monkeypatch.setattr(team, "PRODUCTS", 1)


@given(threads=st.integers(1, 5), count=st.integers(0, 200), unit=st.integers(1, 30), least=st.integers(1, 60))
def test_ranges_cover_everything_once(threads, count, unit, least):
    # the pool is not started for this
    shared = Team(1)
    shared.threads = threads
    ranges = shared.ranges(count, unit=unit, least=least)
    assert [n for part in ranges for n in range(part.start, part.stop)] == list(range(count))
    assert len(ranges) <= threads
    assert all(part.start % unit == 0 for part in ranges)
    if count < 2 * least:
        assert len(ranges) <= 1


def test_parts_run_at_the_same_time_and_results_keep_their_order():
    both = threading.Barrier(2, timeout=10)
    assert Team(2).run(lambda part: (both.wait(), part)[1], ["first", "second"]) == ["first", "second"]


def test_the_caller_does_the_first_part_which_need_not_wait_for_a_thread():
    first, *others = Team(3).run(lambda _: threading.get_ident(), [0, 1, 2])
    assert first == threading.get_ident()
    assert first not in others


def test_kernels_of_several_ranks_have_threads_of_their_own():
    shared, all_parts = Team(2), threading.Barrier(4, timeout=10)
    ranks = [threading.Thread(target=shared.run, args=(lambda _: all_parts.wait(), [0, 1])) for _ in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(timeout=10)
    assert not all_parts.broken
    assert not any(rank.is_alive() for rank in ranks)


def test_a_part_that_fails_is_heard_of_after_the_others_are_done():
    done = []

    def work(part):
        if part == 0:
            raise ArithmeticError("part 0")
        done.append(part)

    shared = Team(3)
    with pytest.raises(ArithmeticError, match="part 0"):
        shared.run(work, [0, 1, 2])
    assert sorted(done) == [1, 2]


def test_a_team_needs_a_thread():
    with pytest.raises(ValueError, match="needs a thread"):
        Team(0)


def random(seed, *shape, dtype=np.float16):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def packed_at_random(seed, elements):
    """Elements in packed form, of eight bits."""
    codes = np.random.default_rng(seed).integers(0, 256, packed_bytes(elements, 8)).astype(np.uint8)
    codes[: block_count(elements) * 4].view(np.float32)[:] = 0.5
    return codes


def cases():
    """For each kernel arguments that a team shares out; those that it writes come from the same seeds."""
    spec = AttentionSpec(batch=2, seq_len=150, heads=4, kv_heads=2, head_dim=12, alibi=True)
    tokens = 2 * 150
    x, gamma, dx = random(0, ROWS, WIDTH), random(1, WIDTH), random(2, ROWS, WIDTH)
    rstd = np.abs(random(3, ROWS, dtype=np.float32))
    q, k, do = random(4, tokens, 48), random(5, tokens, 24), random(6, tokens, 48)
    matrix = random(26, 4 * tokens, 150)
    block = AttentionBlockSpec(
        batch=2, queries=150, keys=90, first_query=60, first_key=10, heads=4, kv_heads=2, head_dim=12, alibi=True
    )
    keys, wide_sum, narrow_sum = random(30, 180, 24), random(31, tokens, 48), random(32, 180, 24)
    sums = {"dq": wide_sum.astype(np.float32), "dk": narrow_sum.astype(np.float32), "dv": narrow_sum.astype(np.float32)}
    state = {
        "acc": wide_sum.astype(np.float32),
        "peak": np.full((4, tokens), 3, np.float32),
        "total": np.ones((4, tokens), np.float32),
    }
    lines = np.full((4, tokens), 3, np.float32)
    table, labels = random(7, 130, WIDTH), np.arange(ROWS, dtype=np.int32) % 130
    lse, loss = np.full(ROWS, 20, np.float32), np.zeros(1)
    logits = np.empty((256, 130), np.float32)
    flat = [random(seed, 5000, dtype=np.float32) for seed in (8, 9, 10)]
    wide = [random(seed, 70_000) for seed in (11, 12)]
    packed = [packed_at_random(seed, 70_000) for seed in (33, 34)]
    head = {"xn": x, "table": table, "labels": labels, "lse": lse, "logits": logits, "accumulate": False}
    return {
        "gemm": {"a": x, "b": random(13, WIDTH, OUT), "out": random(14, ROWS, OUT), "accumulate": True},
        "column_sum": {"a": x, "out": random(15, WIDTH), "accumulate": True},
        "rmsnorm_forward": {"x": x, "gamma": gamma, "xn": dx, "rstd": rstd, "eps": 1e-5},
        "rmsnorm_backward": {
            "dxn": random(16, ROWS, WIDTH), "x": x, "gamma": gamma, "rstd": rstd, "dx": dx,
            "dgamma": random(17, WIDTH), "residual": random(18, ROWS, WIDTH), "accumulate": True,
        },
        "layernorm_forward": {
            "x": x, "gamma": gamma, "beta": random(26, WIDTH), "xn": dx, "mean": rstd, "rstd": rstd.copy(), "eps": 1e-5,
        },
        "layernorm_backward": {
            "dxn": random(16, ROWS, WIDTH), "x": x, "gamma": gamma, "mean": rstd, "rstd": rstd, "dx": dx,
            "dgamma": random(17, WIDTH), "dbeta": random(27, WIDTH), "residual": random(18, ROWS, WIDTH),
            "accumulate": True,
        },
        "head_norm_forward": {
            "x": x, "gamma": gamma[:8], "xn": dx, "rstd": np.empty(3 * ROWS, np.float32), "heads": 3, "head_dim": 8, "eps": 1e-5,
            "unit_offset": True,
        },
        "head_norm_backward": {
            "dxn": random(16, ROWS, WIDTH), "x": x, "gamma": gamma[:8], "rstd": np.repeat(rstd, 3), "dx": dx,
            "dgamma": random(17, 8), "heads": 3, "head_dim": 8, "unit_offset": True, "accumulate": True,
        },
        "row_squares": {"x": x, "squares": rstd, "share": 0.5},
        "row_products": {"dxn": random(16, ROWS, WIDTH), "x": x, "gamma": gamma, "products": rstd},
        "summed_norm_forward": {"x": x, "gamma": gamma, "squares": rstd, "xn": dx, "width": 2 * WIDTH, "eps": 1e-5},
        "summed_norm_backward": {
            "dxn": random(16, ROWS, WIDTH), "x": x, "gamma": gamma, "squares": rstd, "products": rstd.copy(), "dx": dx,
            "dgamma": random(17, WIDTH), "width": 2 * WIDTH, "eps": 1e-5, "share": 0.5, "accumulate": True,
        },
        "gelu_forward": {"up": x, "act": dx, "exact": True},
        "gelu_backward": {"up": x, "dact": random(20, ROWS, WIDTH), "dup": dx, "exact": True},
        "relu2_forward": {"up": x, "act": dx},
        "relu2_backward": {"up": x, "dact": random(20, ROWS, WIDTH), "dup": dx},
        "scale": {"a": x, "out": x, "scale": 0.3},
        "position_forward": {"positions": random(28, 300, WIDTH), "y": x, "seq_len": 300},
        "position_backward": {"dy": x, "dpositions": random(29, 310, WIDTH), "seq_len": 300, "accumulate": True},
        "rope": {"x": x, "heads": 2, "head_dim": 12, "seq_len": 300, "theta": 1e4, "inverse": False},
        "attention_forward": {"q": q, "k": k, "v": k, "o": do, "lse": lines, "spec": spec},
        "attention_backward": {
            "q": q, "k": k, "v": k, "o": do, "lse": lines, "do": do, "dq": np.empty_like(q), "dk": np.empty_like(k),
            "dv": np.empty_like(k), "delta": np.empty_like(lines), "spec": spec,
        },
        "attention_partial_forward": {"q": q, "k": keys, "v": keys, **state, "spec": block, "accumulate": True},
        "attention_partial_finish": {**state, "o": do, "lse": lines, "heads": 4, "head_dim": 12},
        "attention_delta": {"o": q, "do": do, "delta": lines, "heads": 4, "head_dim": 12},
        "attention_partial_backward": {
            "q": q, "k": keys, "v": keys, "lse": lines, "do": do, "delta": np.ones_like(lines), **sums, "spec": block,
            "accumulate": True,
        },
        "attention_scores_forward": {"q": q, "k": k, "scores": matrix, "spec": spec},
        "attention_softmax_forward": {"scores": matrix, "probs": matrix, "spec": spec},
        "attention_values_forward": {"probs": matrix, "v": k, "o": do, "spec": spec},
        "attention_values_backward": {
            "probs": matrix, "v": k, "do": do, "dprobs": np.empty_like(matrix), "dv": np.empty_like(k), "spec": spec,
        },
        "attention_softmax_backward": {"probs": matrix, "dprobs": matrix, "dscores": np.empty_like(matrix), "spec": spec},
        "attention_scores_backward": {
            "q": q, "k": k, "dscores": matrix, "dq": np.empty_like(q), "dk": np.empty_like(k), "spec": spec,
        },
        "geglu_forward": {"gate": x, "up": dx, "prod": random(19, ROWS, WIDTH)},
        "geglu_backward": {"gate": x, "up": dx, "dprod": random(20, ROWS, WIDTH), "dgate": x, "dup": dx},
        "swiglu_forward": {"gate": x, "up": dx, "prod": random(19, ROWS, WIDTH)},
        "swiglu_backward": {"gate": x, "up": dx, "dprod": random(20, ROWS, WIDTH), "dgate": x, "dup": dx},
        "head_forward": {**head, "loss": loss, "normalise": False},
        "head_backward": {
            **head, "scale": np.ones(1, np.float32), "dxn": dx, "dtable": random(21, 130, WIDTH), "denominator": 8.0,
            "normalise": True,
        },
        "head_backward_from_logits": {
            **head, "logits": random(27, ROWS, 130, dtype=np.float32), "dlogits": np.empty((ROWS, 130), np.float32),
            "scale": np.ones(1, np.float32), "dxn": dx, "dtable": random(28, 130, WIDTH), "denominator": 8.0, "normalise": True,
        },
        "adamw": {
            "master": flat[0], "m": flat[1], "v": np.abs(flat[2]), "grad": random(22, 5000), "view": random(23, 5000),
            "step": 3, "grad_multiplier": 0.5, "lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8,
            "weight_decay": 0.1, "decay": [(100, 4000)],
        },
        "quantise": {"a": wide[0], "packed": packed[0].copy(), "bits": 8},
        "dequantise": {"packed": packed[0], "out": random(29, 70_000), "bits": 8},
        "dequantise_nf4": {"packed": pack_nf4(wide[0].reshape(-1)), "out": random(31, 70_000)},
        "mean_of_quantised": {
            "parts": packed, "out": random(30, 70_000), "accumulate": True, "divisor": 2.0, "bits": 8,
        },
        "mean_of_replicas": {"parts": wide, "out": random(24, 70_000), "accumulate": True, "divisor": 2.0},
        "cast": {"src": random(25, ROWS, WIDTH, dtype=np.float32), "dst": x},
        "group_columns": {"src": x, "dst": random(32, 2 * ROWS, WIDTH // 2), "groups": 2, "inverse": False},
        **expert_calls(300, 5, 2, hidden=600, width=260),
    }  # fmt: skip


def capped():
    """Those with a soft cap, which loops are compiled apart for."""
    given = {
        kernel: arguments
        for kernel, arguments in cases().items()
        if {"spec", "softcap"} & KERNELS[kernel].parameters.keys()
    }
    for arguments in given.values():
        if "spec" in arguments:
            arguments["spec"] = evolve(arguments["spec"], softcap=2.0)
        else:
            arguments |= {"softcap": 2.0, "scale_of_logits": 0.5, "normalise": False}
    return {kernel: arguments for kernel, arguments in given.items() if "scores" not in kernel}


def results(arguments, kernel, threads):
    kernels = kernel_set("fast", threads)
    scratch = Scratch(kernels.scratch_bytes(kernel, **arguments))
    value = getattr(kernels, kernel)(**arguments, scratch=scratch)
    assert scratch.high_water == scratch.capacity
    arrays = [x for x in arguments.values() if isinstance(x, np.ndarray) and x is not arguments.get("logits")]
    return value, arrays


@pytest.mark.usefixtures("tiny_parts")
@pytest.mark.parametrize(
    ("made", "kernel"), [*((cases, kernel) for kernel in cases()), *((capped, kernel) for kernel in capped())]
)
@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.sampled(2)
def test_results_do_not_depend_on_the_threads(made, kernel, threads):
    expected, arrays = results(made()[kernel], kernel, 1)
    value, others = results(made()[kernel], kernel, threads)
    assert value == expected
    for one, other in zip(arrays, others, strict=True):
        if kernel in ("gemm", "head_forward", "head_backward", "head_backward_from_logits") and one.dtype.kind == "f":
            # BLAS may take another path for a matrix with fewer rows: a run's manifest names the threads
            np.testing.assert_allclose(other, one, rtol=2e-3, atol=1e-4)
        else:
            same_bits(one, other)


@pytest.mark.usefixtures("tiny_parts")
def test_overflow_in_another_thread_is_no_warning():
    big = np.full((64, 64), 60000, np.float16)
    out = np.empty((64, 64), np.float16)
    kernels = kernel_set("fast", 2)
    with np.errstate(all="ignore"):
        kernels.gemm(big, big, out, scratch=Scratch(kernels.scratch_bytes("gemm", a=big, b=big, out=out)))
    assert np.isinf(out).all()

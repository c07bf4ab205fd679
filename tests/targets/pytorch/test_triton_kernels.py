"""The kernel set `torch-triton`, interpreted: bits, addresses, what is not finite; and compiled for GPUs, without one.

What the kernels compute is held against the formulas in float64 with the other sets, in `tests/targets/runtime/kernels`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.targets.program.kernels import KERNELS
from ratrain.targets.runtime import settings as run_settings
from ratrain.targets.runtime.arena.kernel_memory import SQUARES_CHUNK
from ratrain.targets.runtime.kernels import KERNEL_SETS, kernel_set
from tests.end_to_end.tiny_runs import MODEL, losses, make_program, train
from tests.end_to_end.toys import GEMMA3, GPT2
from tests.targets.runtime.kernels.kernels_oracle import DTYPES, at_other_addresses, call, same_bits
from tests.targets.runtime.ranks.mpi_tools import ROOT

pytestmark = [pytest.mark.parity, pytest.mark.full]
torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

from ratrain.targets.pytorch.device import device_products  # noqa: E402
from ratrain.targets.pytorch.device.tensor_scratch import TensorScratch  # noqa: E402
from ratrain.targets.pytorch.triton import triton_experts, triton_head, triton_kernels, triton_sums  # noqa: E402
from ratrain.targets.pytorch.triton.triton_norms import _Shape  # noqa: E402
from tests.targets.pytorch.kernel_calls import VARIANTS, kernel_calls, run  # noqa: E402
from tests.targets.pytorch.tensor_calls import as_tensors  # noqa: E402
from tests.targets.pytorch.test_device_adamw import TYPES, check_bits_of_the_host, check_nothing_but_the_view  # noqa: E402

TorchTriton = triton_kernels.TorchTriton
FUSED = [
    "adamw",
    "rope",
    *(f"{name}_{way}" for name in ("rmsnorm", "head_norm", "layernorm", "head") for way in ("forward", "backward")),
    *(f"{name}_{way}" for name in ("swiglu", "geglu", "gelu", "relu2") for way in ("forward", "backward")),
    "head_backward_from_logits",
    *(f"attention_{name}" for name in ("forward", "backward", "partial_forward", "partial_backward", "delta")),
    "embedding_backward",
    *("all_finite", "column_sum", "mean_of_replicas"),
    *("route_forward", "route_backward", "group_rows", "expert_rows", "expert_sums", "choice_sums"),
    "expert_gradients",
    *("weighted_swiglu_forward", "weighted_swiglu_backward"),
]
LAUNCHED = {
    *("norm_forward", "norm_backward", "sum_groups", "turn_pairs", "prepare_numbers", "update"),
    *("gated_forward", "gated_backward", "plain_forward", "plain_backward"),
    *("shape_logits", "losses_of_rows", "add_sum", "logit_gradient_of_rows"),
    *("attend", "row_deltas", "gradients_of_keys", "gradients_of_queries", "squares_of_chunks", "split"),
    *("add_rows_of_token", "notice_elements", "sum_of_group", "add_part", "store_mean"),
    *("choose_experts", "gradients_of_choice", "count_rows", "place_chunks", "place_rows"),
    *("find_blocks", "grouped_product", "clear_others", "sum_choices", "grouped_gradients"),
    *("weighted_forward", "weighted_backward"),
}


@pytest.fixture(scope="module")
def kernels() -> Any:
    made = TorchTriton()
    for width, length in ((12, 300), (128, 256)):
        made.prepare_rope(length, width, 1e4)
    return made


@pytest.mark.parametrize(("capability", "dtype"), [(80, "f16"), (80, "f32"), (90, "bf16"), (90, "f32")])
def test_every_kernel_compiles_for_gpus(capability: int, dtype: str, tmp_path: Path) -> None:
    """To the code of the GPU, by ptxas. None adds atomically, and no product is fused with a sum."""
    variables = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.targets.pytorch.triton_compile", str(capability), dtype]
    environment = {**os.environ, **variables}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    made = [json.loads(line) for line in done.stdout.splitlines()]
    assert {each["kernel"] for each in made} == LAUNCHED
    assert all(each["cubin"] > 1000 for each in made)
    assert not [each for each in made if each["atomic"] or each["fused"]]
    assert max(each["shared"] for each in made) <= 99 * 1024


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_calls_take_the_scratch_they_ask_for_and_give_the_same_bits_twice(
    kernels: Any, dtype: Any, variant: str
) -> None:
    """Whatever scratch and outputs held before."""
    calls = kernel_calls(variant, dtype), kernel_calls(variant, dtype)
    for kernel in [kernel for kernel in calls[0] if kernel in FUSED]:
        (value, one, scratch), (again, other, _) = (run(kernels, kernel, made[kernel]) for made in calls)
        assert scratch.high_water == scratch.capacity, kernel
        assert value == again
        for a, b in zip(one, other, strict=True):
            same_bits(*(x.view(torch.int16 if x.element_size() == 2 else x.dtype).numpy() for x in (a, b)))


@pytest.mark.parametrize("kernel", sorted({*FUSED} - {"head_forward"}))
def test_results_do_not_depend_on_the_address(kernel: str) -> None:
    arguments = kernel_calls("plain")[kernel]
    arrays = {name: value.copy() for name, value in arguments.items() if isinstance(value, np.ndarray)}
    options = {name: value for name, value in arguments.items() if name not in arrays}
    expected = deepcopy(arrays)
    call("torch-triton", kernel, **expected, **options)
    for moved in at_other_addresses(arrays):
        call("torch-triton", kernel, **moved, **options)
        for name in KERNELS[kernel].outputs:
            if name in arrays:
                same_bits(moved[name], expected[name])


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_nothing_is_written_beside_what_is_given(kernels: Any, dtype: Any) -> None:
    """Operands of odd sizes, among bytes that stay as they were, before and behind."""
    for kernel in FUSED:
        arguments = kernel_calls("plain", dtype)[kernel]
        given = {name: as_tensors(value) for name, value in arguments.items()}
        frames = {}
        for name, value in given.items():
            if torch.is_tensor(value):
                frame = torch.full((value.nbytes + 512,), 0xA5, dtype=torch.uint8)
                inner = frame[256 : 256 + value.nbytes].view(value.dtype).view(value.shape)
                given[name], frames[name] = inner.copy_(value), frame
        scratch = TensorScratch(kernels.scratch_bytes(kernel, **arguments))
        getattr(kernels, kernel)(**given, scratch=scratch)
        for name, frame in frames.items():
            assert bool((frame[:256] == 0xA5).all()), (kernel, name)
            assert bool((frame[-256:] == 0xA5).all()), (kernel, name)


@pytest.mark.parametrize("variant", ["plain", "capped"])
@pytest.mark.parametrize("count", [1 << 26, 0])
def test_gradients_of_logits_in_two_parts_are_as_good_as_whole(
    variant: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The products of a GPU, in its place; where too many logits would be split, they are whole."""
    split: list[Any] = []

    def multiply_halves(a: Any, b: Any, out: Any, added: Any = None) -> Any:
        split.append(a.dtype == torch.bfloat16)
        return out.copy_(a.float() @ b.float() + (0 if added is None else added.float()))

    for module in (device_products, triton_head):
        monkeypatch.setattr(module, "multiply_halves", multiply_halves)
    monkeypatch.setattr(triton_head, "_MOST_SPLIT", count)
    native, plain = TorchTriton(), TorchTriton()
    native.halves = True
    for kernel in ("head_backward", "head_backward_from_logits"):
        if kernel not in kernel_calls(variant, ml_dtypes.bfloat16):
            continue
        split.clear()
        found, expected = (kernel_calls(variant, ml_dtypes.bfloat16)[kernel] for _ in range(2))
        run(native, kernel, found)
        assert all(split)
        assert len(split) > 2 or count == 0
        run(plain, kernel, expected)
        for name in ("dxn", "dtable"):
            near, right = (each[name].astype(np.float64) for each in (found, expected))
            # sums of several chunks are rounded at each: one of them may be the next bfloat16
            assert (np.abs(near - right) <= 2**-7 * np.abs(right).max()).all(), (kernel, name)


def test_two_bfloat16_keep_16_bits() -> None:
    value = torch.from_numpy(np.random.default_rng(0).normal(size=(3, 5000)).astype(np.float32))
    parts = torch.empty(2, 3, 5000, dtype=torch.bfloat16)
    triton_head.launch(triton_head.split, (5, 3), value, parts[0], parts[1], 5000, block=1024)
    assert torch.equal(parts[0], value.bfloat16())
    assert ((parts.double().sum(dim=0) - value.double()).abs() <= 2**-16 * value.abs()).all()


def test_squares_of_neighbours_are_those_of_all(kernels: Any) -> None:
    """Whole chunks that follow each other are one launch; others begin another."""
    values = torch.from_numpy(np.random.default_rng(0).normal(size=5 * SQUARES_CHUNK + 77).astype(np.float32))
    chunks = [values[at : at + SQUARES_CHUNK] for at in range(0, len(values), SQUARES_CHUNK)]
    chunks += [values[3:10], values[20:25], values[25:30].to(torch.bfloat16)]
    total, term, buffer = (torch.full((n,), 7.0, dtype=torch.float64) for n in (1, 1, SQUARES_CHUNK))
    runs = [len(each) for each in triton_sums._runs(chunks, SQUARES_CHUNK)]
    assert runs == [len(values), 7, 5, 5]
    assert [len(each) for each in triton_sums._runs(chunks[:4], 3)] == [3 * SQUARES_CHUNK, SQUARES_CHUNK]
    kernels.add_squares(chunks, total, term, buffer)
    expected = sum(float((each.double() ** 2).sum()) for each in chunks)
    assert abs(float(total) - expected) <= 1e-12 * expected


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_tokens_are_summed_wherever_they_are(kernels: Any, dtype: Any, accumulate: bool) -> None:
    """Far apart, negative, left out, and more than a program compares at a time."""
    rng = np.random.default_rng(0)
    tokens = np.maximum(rng.integers(-1, 5, 2500), 0).astype(np.int32)
    tokens[::7] = -2
    tokens[[0, 2499]] = 5
    dy, table = rng.normal(size=(2500, 3)).astype(dtype), rng.normal(size=(7, 3)).astype(dtype)
    expected = table.astype(np.float64) * accumulate
    for token, row in zip(tokens, dy.astype(np.float64), strict=True):
        if token >= 0 and token != 3:
            expected[token] += 0.5 * row
    given = {"tokens": tokens, "dy": dy, "dtable": table, "accumulate": accumulate, "scale": 0.5, "padding_token": 3}
    run(kernels, "embedding_backward", given)
    np.testing.assert_allclose(table.astype(np.float64), expected, rtol=float(ml_dtypes.finfo(dtype).eps), atol=1e-4)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("bad", [np.nan, np.inf, 0.0])
def test_a_mean_tells_whether_what_it_stores_is_finite(kernels: Any, parts: int, bad: float) -> None:
    made = [np.full(5000, 2.0, np.float16) for _ in range(parts)]
    made[-1][4321] += bad
    out = np.full(5000, 1.0, np.float16)
    told, _, _ = run(kernels, "mean_of_replicas", {"parts": made, "out": out, "accumulate": True, "divisor": parts})
    assert told == (bad == 0)
    np.testing.assert_array_equal(np.delete(out, 4321), 3)
    large = [np.full(10, 60000, np.float16)]
    told, _, _ = run(
        kernels, "mean_of_replicas", {"parts": large, "out": large[0].copy(), "accumulate": True, "divisor": 1}
    )
    assert not told  # 120,000 is an infinity in float16


@pytest.mark.parametrize("rows", [1, 2, 255, 256, 257, 1000, 70_000])
@pytest.mark.parametrize("width", [1, 3, 64, 100, 4096, 5120])
def test_groups_of_rows_are_whole_tiles_that_cover_all_rows_once(rows: int, width: int) -> None:
    shape = _Shape(rows, width)
    assert shape.rows_of_group % shape.tile == 0
    assert shape.groups * shape.rows_of_group >= rows > (shape.groups - 1) * shape.rows_of_group
    assert shape.groups <= 256
    assert shape.block >= width > shape.block // 2


@pytest.mark.parametrize("centred", [False, True])
def test_gradients_of_weights_over_many_groups_are_those_in_float64(centred: bool) -> None:
    """Rows of 4097 elements, one to a tile, in 300 rows: two to each group, the last with none of its own."""
    rng = np.random.default_rng(0)
    x, dxn = rng.normal(size=(2, 301, 4097)).astype(np.float32)
    mean = x.astype(float).mean(axis=1) if centred else np.zeros(301)
    centre = x - mean[:, None]
    rstd = 1 / np.sqrt((centre**2).mean(axis=1))
    gamma, dgamma, dbeta = np.ones((3, 4097), np.float32)
    options = {"dx": np.empty_like(x), "dgamma": dgamma, "rstd": rstd.astype(np.float32), "accumulate": True}
    if centred:
        call(
            "torch-triton",
            "layernorm_backward",
            dxn=dxn,
            x=x,
            gamma=gamma,
            mean=mean.astype(np.float32),
            dbeta=dbeta,
            **options,
        )
        np.testing.assert_allclose(dbeta, 1 + dxn.astype(float).sum(axis=0), atol=2e-5)
    else:
        call("torch-triton", "rmsnorm_backward", dxn=dxn, x=x, gamma=gamma, **options)
    np.testing.assert_allclose(dgamma, 1 + (dxn * centre * rstd[:, None]).sum(axis=0), atol=2e-4)


@pytest.mark.parametrize(
    "kernel", ["rmsnorm_forward", "swiglu_forward", "swiglu_backward", "relu2_forward", "gelu_forward"]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_shows_and_stays_in_its_row(kernel: str, dtype: Any) -> None:
    for bad in (np.nan, np.inf):
        arguments = kernel_calls("plain", dtype)[kernel]
        first = next(name for name in ("x", "gate", "up") if name in arguments)
        arguments[first] = arguments[first].copy()
        arguments[first][1, 2] = bad
        call("torch-triton", kernel, **arguments)
        out = arguments[next(name for name in ("xn", "dgate", "prod", "act") if name in arguments)].astype(float)
        assert not np.isfinite(out[1]).all()
        assert np.isfinite(out[0]).all()
        assert np.isfinite(out[2:]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("trans_b", [False, True])
def test_rounds_of_columns_change_no_bit_of_sums_of_experts(
    kernels: Any, dtype: Any, trans_b: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tile of columns at a time, the last of fewer; and all at once."""
    rng = np.random.default_rng(0)
    order = np.argsort(np.array([0, 2, 0, 3, 2, 3]), kind="stable").astype(np.int32)
    bounds = np.array([0, 2, 2, 4, 6], np.int32)
    a, b = (
        rng.normal(size=(6, 20)).astype(dtype),
        rng.normal(size=(4, 300, 20) if trans_b else (4, 20, 300)).astype(dtype),
    )
    before, residual = rng.normal(size=(2, 3, 300)).astype(dtype)
    found = []
    for most in (1 << 24, 1):
        monkeypatch.setattr(triton_experts, "MOST_PRODUCTS", most)
        out = before.copy()
        made = {"a": a, "b": b, "order": order, "bounds": bounds, "sums": np.empty((3, 300), np.float32), "out": out}
        _, _, scratch = run(
            kernels, "expert_sums", {**made, "residual": residual, "trans_b": trans_b, "accumulate": True}
        )
        found.append((out, scratch.capacity))
    same_bits(found[0][0], found[1][0])
    assert found[1][1] < found[0][1]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_logit_that_is_not_finite_makes_its_loss_none(kernels: Any, bad: float) -> None:
    x, table = np.ones((3, 4), np.float32), np.ones((5000, 4), np.float32)
    x[1, 0] = bad
    lse, loss, logits = np.empty(3, np.float32), np.zeros(1), np.empty((3, 5000), np.float32)
    made = {"xn": x, "table": table, "labels": np.zeros(3, np.int32), "lse": lse, "loss": loss, "logits": logits}
    run(kernels, "head_forward", {**made, "normalise": False, "accumulate": False})
    assert np.isnan(lse[1])
    assert np.isnan(loss[0])
    np.testing.assert_allclose(lse[[0, 2]], 4 + np.log(5000), rtol=1e-6)


@settings(max_examples=30)
@given(
    step=st.integers(1, 100_000),
    multiplier=st.floats(2.0**-20, 4, width=32),
    lr=st.floats(1e-7, 1),
    betas=st.tuples(st.sampled_from((0.0, 0.5, 0.9, 0.999)), st.sampled_from((0.0, 0.95, 0.9999))),
    types=st.tuples(TYPES, st.none() | TYPES),
    scalar=st.booleans(),
)
def test_an_update_by_numbers_of_the_device_has_the_bits_of_that_by_the_hosts(
    step, multiplier, lr, betas, types, scalar
):
    check_bits_of_the_host(
        TorchTriton(), step=step, multiplier=multiplier, lr=lr, betas=betas, types=types, scalar=scalar
    )


@pytest.mark.parametrize("skip", [True, 1, 2.0])
@pytest.mark.parametrize("view", [None, np.float16, ml_dtypes.bfloat16, np.float32])
def test_nothing_but_the_view_changes_where_an_update_is_skipped(skip: Any, view: Any) -> None:
    check_nothing_but_the_view(TorchTriton(), skip, view)


@pytest.mark.parametrize(
    ("model", "dtype", "near"),
    [(MODEL, "bf16", 4e-3), (GPT2, "f32", 2e-6), (GEMMA3, "f32", 2e-6)],
    ids=["llama", "gpt2", "gemma3"],
)
def test_models_train_near_the_numpy_kernels(model: Any, dtype: str, near: float) -> None:
    program = make_program(model, view_dtype=dtype)
    ours, fast = (losses(train(program, 2, kernels=kernels)) for kernels in ("torch-triton", "fast"))
    np.testing.assert_allclose(ours, fast, rtol=near)


def test_a_device_that_triton_does_not_compile_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernels, "interpreted", lambda: False)
    with pytest.raises(DiagnosticError, match=r"RT004.*compiled for GPUs of NVIDIA.*'cpu'"):
        TorchTriton("cpu")


def test_a_set_without_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_name: str) -> Any:
        raise ModuleNotFoundError(name="triton")

    monkeypatch.setattr(KERNEL_SETS, "load", missing)
    with pytest.raises(DiagnosticError, match=r"RT002.*'torch-triton' needs triton"):
        kernel_set("torch-triton")


def test_a_gpu_is_used_with_fused_kernels_where_triton_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [run_settings.default_kernels(device) for device in ("cpu", "cuda")] == ["fast", "torch-triton"]
    monkeypatch.setattr(run_settings, "find_spec", lambda _: None)
    assert [run_settings.default_kernels(device) for device in ("cpu", "cuda")] == ["fast", "torch-device"]

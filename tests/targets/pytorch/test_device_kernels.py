"""The kernel set `torch-device`: memory, determinism, chunks, factors of 16 bits. What the kernels compute is tested with the other sets."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.targets.program.attention_spec import AttentionSpec, alibi_slopes
from ratrain.targets.program.kernels import KERNELS
from ratrain.targets.runtime.arena.scratch import plan_bytes
from ratrain.targets.runtime.kernels import kernel_set
from ratrain.targets.runtime.kernels.shared import expert_runs
from tests.targets.runtime.kernels.kernels_oracle import DTYPES, at_other_addresses, call, same_bits

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")

from torch.autograd.profiler import profile  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from ratrain.targets.pytorch.device import device_common, device_experts, device_products, device_tiles  # noqa: E402
from ratrain.targets.pytorch.device.device_kernels import TorchDevice  # noqa: E402
from ratrain.targets.pytorch.device.tensor_scratch import TensorScratch  # noqa: E402
from tests.targets.pytorch.expert_calls import expert_calls  # noqa: E402
from tests.targets.pytorch.kernel_calls import VARIANTS, kernel_calls, run  # noqa: E402
from tests.targets.pytorch.recording import no_host_reads  # noqa: E402
from tests.targets.pytorch.tensor_calls import as_tensors  # noqa: E402

SMALL = 64
"""Bytes: a number that PyTorch makes a tensor of on the host is no more."""


@pytest.fixture(scope="module")
def kernels() -> TorchDevice:
    made = TorchDevice()
    for width, length in ((12, 300), (128, 256)):
        made.prepare_rope(length, width, 1e4)
    return made


class Storages(TorchDispatchMode):
    """Where the results of operations are stored."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, str] = {}
        self.sums_over_rows: list[str] = []
        """Reductions of matrices over another dimension than the last: a GPU allocates what it shares between blocks."""

    def __torch_dispatch__(self, operation, types, arguments=(), options=None):
        result = operation(*arguments, **(options or {}))
        if str(operation).startswith(("aten.sum", "aten.amax")) and arguments[0].dim() > 1:
            last = arguments[0].dim() - 1
            self.sums_over_rows += [str(operation)] * any(dim % (last + 1) != last for dim in arguments[1])
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor):
                self.found[each.untyped_storage().data_ptr()] = str(operation)
        return result


def test_every_kernel_is_called() -> None:
    assert kernel_calls("plain").keys() == KERNELS.keys()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.sampled(2)
def test_no_kernel_asks_for_memory(kernels: TorchDevice, dtype: Any, variant: str) -> None:
    """Every result is in the arena, in scratch or in a table; and the allocator hands out nothing meanwhile."""
    tables = [each for pair in kernels._rope.values() for each in pair]
    for kernel, arguments in kernel_calls(variant, dtype).items():
        _, given, scratch = run(kernels, kernel, arguments)
        assert scratch.high_water == scratch.capacity, kernel
        known = {each.untyped_storage().data_ptr() for each in (*given, *tables, scratch._bytes)}
        again = {name: as_tensors(value) for name, value in arguments.items()}
        scratch.reset()
        with Storages() as storages:
            getattr(kernels, kernel)(**again, scratch=scratch)
        assert storages.sums_over_rows == [], f"{kernel}: a GPU takes memory for these"
        assert {name for place, name in storages.found.items() if place not in known} == set(), kernel
        scratch.reset()
        with profile(profile_memory=True) as seen:
            getattr(kernels, kernel)(**again, scratch=scratch)
        events = seen.kineto_results.events()
        assert [e.nbytes() for e in events if e.name() == "[memory]" and e.nbytes() > SMALL] == [], kernel


def test_the_allocator_is_seen() -> None:
    with profile(profile_memory=True) as seen, Storages() as storages:
        x = torch.ones(100) * 2
    assert x.untyped_storage().data_ptr() in storages.found
    assert max(e.nbytes() for e in seen.kineto_results.events() if e.name() == "[memory]") >= 400


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_calls_give_the_same_bits(kernels: TorchDevice, variant: str) -> None:
    """Whatever scratch and outputs held before."""
    calls = (kernel_calls(variant), kernel_calls(variant))
    for kernel in calls[0]:
        (value, one, _), (again, other, _) = (run(kernels, kernel, made[kernel]) for made in calls)
        assert value == again
        for a, b in zip(one, other, strict=True):
            same_bits(*(x.view(torch.int16 if x.element_size() == 2 else x.dtype).numpy() for x in (a, b)))


def outputs(kernel: str, arguments: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
    """What a kernel has written, in float64."""
    return {name: tensors[name].double().numpy() for name in KERNELS[kernel].outputs if name in arguments}


def written(kernels: Any, kernel: str, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    scratch = TensorScratch(kernels.scratch_bytes(kernel, **arguments))
    tensors = {name: as_tensors(value) for name, value in arguments.items()}
    value = getattr(kernels, kernel)(**tensors, scratch=scratch)
    return value, outputs(kernel, arguments, tensors)


def agree(kernel: str, found: dict[str, Any], expected: dict[str, Any], error: float) -> None:
    for name, value in expected.items():
        if kernel == "head_backward" and name == "logits":
            continue  # a workspace
        np.testing.assert_allclose(
            found[name], value, rtol=error, atol=error * max(1, np.abs(value).max()), err_msg=kernel
        )


@pytest.mark.parametrize("variant", VARIANTS)
def test_chunks_change_nothing_but_the_order_of_sums(
    kernels: TorchDevice, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kernel of whole operands, and of a hundredth at a time; of one key-value head and small tiles at a time."""
    made = kernel_calls(variant, np.float32)
    expected = {kernel: written(kernels, kernel, deepcopy(made[kernel])) for kernel in made}
    monkeypatch.setattr(device_tiles, "QUERIES", 37)
    monkeypatch.setattr(device_tiles, "KEYS", 50)
    for kernel, (value, results) in expected.items():
        largest = max(x.size for x in made[kernel].values() if isinstance(x, np.ndarray))
        monkeypatch.setattr(device_common, "CHUNK_ELEMENTS", largest // 100)
        again, found = written(kernels, kernel, deepcopy(made[kernel]))
        assert again == value
        agree(kernel, found, results, 2e-5)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_factors_of_16_bits_are_as_good_as_their_copies(
    kernels: TorchDevice, variant: str, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The products of a GPU, in its place."""
    used = []

    def multiply_halves(a: Any, b: Any, out: Any, added: Any = None) -> Any:
        assert a.dtype == b.dtype
        assert a.element_size() == 2
        used.append(out)
        return out.copy_(a.float() @ b.float() + (0 if added is None else added.float()))

    monkeypatch.setattr(device_products, "multiply_halves", multiply_halves)
    native = TorchDevice()
    native.halves = True
    made = [kernel_calls(variant, dtype) for _ in range(2)]
    products = [kernel for kernel in made[0] if kernel.startswith(("attention", "head_f", "head_b", "gemm"))]
    without = {"attention_partial_finish", "attention_delta", "attention_softmax_forward", "attention_softmax_backward"}
    without |= {"head_backward_from_logits"}
    for kernel in products:
        used.clear()
        (_, expected), (_, found) = (
            written(k, kernel, m[kernel]) for k, m in zip((kernels, native), made, strict=True)
        )
        agree(kernel, found, expected, 2 * float(ml_dtypes.finfo(dtype).eps))
        assert bool(used) == (kernel not in without), kernel


@pytest.mark.parametrize("elements", [1 << 22, 900])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options", [{}, {"accumulate": True}, {"trans_b": True}, {"trans_a": True}, {"residual": True}]
)
def test_a_float32_factor_keeps_its_24_bits_beside_bfloat16(
    options: dict[str, Any], wanted: torch.dtype, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The products of a GPU, in its place; chunks of 900 elements hold some rows of a matrix, and no transposed one."""
    used = []

    def multiply_halves(a: Any, b: Any, out: Any, added: Any = None) -> Any:
        assert a.dtype == b.dtype == torch.bfloat16
        used.append(out)
        return out.copy_(a.double() @ b.double() + (0 if added is None else added.double()))

    monkeypatch.setattr(device_products, "multiply_halves", multiply_halves)
    monkeypatch.setattr(device_common, "CHUNK_ELEMENTS", elements)
    native = TorchDevice()
    native.halves = True
    drawn = torch.Generator().manual_seed(0)
    rows, columns, inner = 90, 12, 11
    a, b, out = (torch.randn(*shape, generator=drawn) for shape in ((rows, inner), (inner, columns), (rows, columns)))
    factors = {
        "a": a.T.contiguous() if "trans_a" in options else a,
        "b": b.T.contiguous() if "trans_b" in options else b,
    }
    factors["b"], out = factors["b"].bfloat16(), out.to(wanted)
    given = {**options, **({"residual": out.clone()} if "residual" in options else {})}
    adds = "accumulate" in options or "residual" in options
    right = factors["b"].double().T if "trans_b" in options else factors["b"].double()
    expected = a.double() @ right + (out.double() if adds else 0)
    scratch = TensorScratch(native.scratch_bytes("gemm", **factors, out=out, **given))
    native.gemm(**factors, out=out, scratch=scratch, **given)
    assert bool(used) == (elements > 900 or "trans_a" not in options)
    near = 2e-6 if wanted == torch.float32 else 2.0**-8 * float(expected.abs().max())
    assert float((out.double() - expected).abs().max()) <= near


@pytest.mark.parametrize(("version", "stores"), [("2.4.1", False), ("2.9.1+cu128", False), ("2.10.0", True)])
def test_a_pytorch_that_cannot_add_to_float32_is_not_asked_to(version, stores, monkeypatch):
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)(version))
    assert device_products.stores_float32() == stores


def test_sums_of_a_token_do_not_depend_on_the_others() -> None:
    """One with 1 to 40 rows, among others, in tables of any length."""
    rng = np.random.default_rng(0)
    for count in (1, 2, 3, 7, 8, 40):
        dy = rng.normal(size=(count, 5)).astype(np.float32)
        alone = np.empty((1, 5), np.float32)
        call(
            "torch-device",
            "embedding_backward",
            tokens=np.zeros(count, np.int32),
            dy=dy,
            dtable=alone,
            accumulate=False,
        )
        tokens = rng.integers(0, 9, 3 * count).astype(np.int32)
        tokens[tokens == 4] = 5
        at = np.sort(rng.permutation(3 * count)[:count])
        tokens[at] = 4
        more = rng.normal(size=(3 * count, 5)).astype(np.float32)
        more[at] = dy
        table = np.empty((9, 5), np.float32)
        call("torch-device", "embedding_backward", tokens=tokens, dy=more, dtable=table, accumulate=False)
        same_bits(table[4:5], alone)
        np.testing.assert_allclose(alone[0], dy.astype(float).sum(axis=0), rtol=1e-5, atol=1e-5)


def test_an_infinite_gradient_stays_in_the_row_of_its_token() -> None:
    dy, table = np.ones((6, 4), np.float16), np.empty((3, 4), np.float16)
    dy[3] = np.inf
    tokens = np.array([0, 1, 0, 1, 2, 0], np.int32)
    call("torch-device", "embedding_backward", tokens=tokens, dy=dy, dtable=table, accumulate=False)
    np.testing.assert_array_equal(table[:, 0].astype(float), [3, np.inf, 1])


@pytest.mark.parametrize("heads", [1, 3, 8, 12, 40, 71])
def test_slopes_are_those_of_the_other_sets(heads: int) -> None:
    out = torch.empty(heads)
    device_tiles.put_slopes(heads, torch.empty(heads, dtype=torch.float64), out)
    same_bits(out.numpy(), np.array(alibi_slopes(heads), np.float32))


def test_scratch_does_not_grow_with_the_square_of_the_sequence(kernels: TorchDevice) -> None:
    def needed(length: int, kernel: str) -> int:
        spec = AttentionSpec(batch=1, seq_len=length, heads=8, kv_heads=2, head_dim=64)
        return kernels.scratch_bytes(kernel, spec=spec)

    assert needed(1 << 15, "attention_forward") <= needed(1 << 13, "attention_forward") * 1.1
    assert needed(1 << 17, "attention_backward") < 5 * needed(1 << 15, "attention_backward")


def test_scratch_of_large_operands_is_some_chunks(kernels: TorchDevice) -> None:
    large = np.broadcast_to(np.zeros((), np.float16), (1 << 15, 1 << 14))
    chunk = 4 * device_common.CHUNK_ELEMENTS
    for kernel, names in {
        "swiglu_backward": ("gate", "up", "dprod", "dgate", "dup"),
        "gemm": ("a", "b", "out"),
    }.items():
        given = dict.fromkeys(names, large)
        assert kernels.scratch_bytes(kernel, **given) <= 6 * chunk


def test_rope_tables_are_built_before_the_first_step_and_counted() -> None:
    made = TorchDevice()
    assert made.constant_bytes == 0
    made.prepare_rope(10, 8, 1e4)
    assert made.constant_bytes == 2 * 10 * 4 * 4
    (tables,) = made._rope.values()
    assert all(isinstance(each, torch.Tensor) and each.device == made.device for each in tables)
    x = {"x": np.ones((20, 16), np.float32)}
    options = {"heads": 2, "head_dim": 8, "seq_len": 10, "theta": 1e4, "inverse": False}
    run(made, "rope", {**x, **options})
    assert made._rope.popitem()[1] is tables


@pytest.mark.parametrize("kernel", ["rmsnorm_backward", "gemm", "head_backward", "swiglu_backward"])
def test_results_do_not_depend_on_the_address(kernel: str) -> None:
    arguments = kernel_calls("plain")[kernel]
    arrays = {name: value.copy() for name, value in arguments.items() if isinstance(value, np.ndarray)}
    options = {name: value for name, value in arguments.items() if name not in arrays}
    expected = deepcopy(arrays)
    call("torch-device", kernel, **expected, **options)
    for moved in at_other_addresses(arrays):
        call("torch-device", kernel, **moved, **options)
        for name in KERNELS[kernel].outputs:
            same_bits(moved[name], expected[name])


def test_experts_are_found_without_a_look_from_the_host(kernels: TorchDevice) -> None:
    """Nothing of the router's choice is read outside the device."""
    for kernel, arguments in expert_calls().items():
        scratch = TensorScratch(kernels.scratch_bytes(kernel, **arguments))
        given = {name: as_tensors(value) for name, value in arguments.items()}
        with no_host_reads():
            getattr(kernels, kernel)(**given, scratch=scratch)


@pytest.mark.parametrize("number", [-1, 4])
def test_a_number_that_is_no_expert_is_refused_on_the_processor(number: int) -> None:
    chosen = np.array([[number]], np.int32)
    with pytest.raises(IndexError, match=f"expert {number} is outside 4 experts"):
        call("torch-device", "group_rows", chosen=chosen, order=np.empty(1, np.int32), bounds=np.empty(5, np.int32))


@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    outside=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    block=st.integers(1, 4),
)
def test_blocks_are_all_rows_of_each_expert_once(counts: list[int], outside: tuple[int, int], block: int) -> None:
    """Blocks behind the last repeat it, and all are repeated without one; the most blocks are as many as some router needs."""
    rows = max(1, sum(counts) + sum(outside))
    bounds = outside[0] + np.append(0, np.cumsum(counts)).astype(np.int32)
    order, tensor = torch.arange(rows, dtype=torch.int32), torch.from_numpy(bounds)
    scratch = TensorScratch(plan_bytes(device_experts.Blocks.plan(rows, tensor, block)))
    found = device_experts.Blocks.find((rows, rows), order, tensor, block, scratch)
    runs = list(expert_runs(bounds, block))
    assert len(runs) <= len(found.experts)
    assert all(0 <= row < rows for row in found.rows.view(-1).tolist())
    assert all(0 <= expert < len(counts) for expert in found.experts.view(-1).tolist())
    assert found.tokens.equal(found.rows)
    for number, expert in enumerate(found.experts.view(-1).tolist()):
        here = found.rows[number][~found.repeated[number]].tolist()
        begins = number == 0
        if runs:
            of_run, run = runs[min(number, len(runs) - 1)]
            begins = number < len(runs) and (number == 0 or runs[number - 1][0] != expert)
            assert set(found.rows[number].tolist()) == set(range(run.start, run.stop))
            assert expert == of_run
        assert here == (list(range(run.start, run.stop)) if number < len(runs) else [])
        assert found.begins[number, 0] == begins
    busy = min(rows, len(counts))
    worst = [rows - busy + 1, *[1] * (busy - 1)]  # one row each, and all others for one expert
    assert len(found.experts) == sum(-(-count // block) for count in worst)


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(DiagnosticError, match=r"RT093.*has no device 'cuda:77'"):
        kernel_set("torch-device", device="cuda:77")
    with pytest.raises(DiagnosticError, match=r"RT004.*'fast' works on this processor, not on the device 'cuda'"):
        kernel_set("fast", device="cuda")

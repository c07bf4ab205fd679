"""Whole trainings whose arenas are tensors of a device: near the numpy kernels, the same however they are scheduled, saved and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from ratrain.ratrain_ir.config.expert_keys import RouterLosses
from ratrain.ratrainc.running.run_display import say_start
from ratrain.targets.runtime.checkpoint.state import training_state
from tests.end_to_end.tiny_runs import MODEL, OPTIMIZER, losses, make_program, start, train
from tests.end_to_end.toys import EXPERTS, GEMMA3, GPT2, GRANITE, NEOX, OLMO2

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from ratrain.ratrain_ir.ops.base import Engine  # noqa: E402

NEAR = {"f32": 2e-6}
"""Of the losses, relative: sums in another order. Other types, families and schedules are those of `test_grid`."""
MODELS = {"llama": MODEL, "gpt2": GPT2, "gemma3": GEMMA3, "olmo2": OLMO2, "granite": GRANITE, "neox": NEOX}
SCHEDULES: dict[str, tuple[str, dict[str, Any]]] = {
    "ratrain": ("ratrain", {"zero": 2, "reduce": "each-micro-batch"}),
    "zero3": ("zero3", {"zero": 3}),
    "zb-h1": ("zb-h1", {}),
    "interleaved": ("interleaved", {"chunks": 2, "micro_batches": 4, "cuts": (1, 2, 3)}),
    "seq1f1b": ("seq1f1b", {"slices": (5, 5)}),
    "clipped": ("ratrain", {"optimizer": evolve(OPTIMIZER, clip="global", max_norm=0.3)}),
    "scores": ("ratrain", {"attention": "scores-kept"}),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.sampled(4, first=3)
def test_every_schedule_trains_near_the_numpy_kernels(schedule: str) -> None:
    name, keys = SCHEDULES[schedule]
    program = make_program(evolve(MODEL, layers=4, tied_embeddings=schedule == "zero3"), name, view_dtype="f32", **keys)
    device, fast = (train(program, 4, kernels=kernels) for kernels in ("torch-device", "fast"))
    np.testing.assert_allclose(losses(device), losses(fast), rtol=NEAR["f32"])
    assert [step.report.gradient_norm for step in device.done] == pytest.approx(
        [step.report.gradient_norm for step in fast.done], rel=1e-4
    )


def test_order_and_poison_change_no_bit_and_every_access_is_planned() -> None:
    program = make_program(view_dtype="bf16", zero=3)
    plain = losses(train(program, 3, kernels="torch-device"))
    assert losses(train(program, 3, kernels="torch-device", interleave_seed=4, poison=True)) == plain
    assert losses(train(program, 3, kernels="torch-device", threads=2)) == plain


@pytest.mark.full
def test_order_and_threads_change_no_bit_of_tensor_peers() -> None:
    program = make_program(view_dtype="bf16", zero=0, dp=1, tp=2, optimizer=evolve(OPTIMIZER, clip="global"))
    plain = losses(train(program, 3, kernels="torch-device"))
    assert losses(train(program, 3, kernels="torch-device", interleave_seed=4, poison=True)) == plain
    assert losses(train(program, 3, kernels="torch-device", threads=2)) == plain


def test_an_overflow_is_skipped_on_a_device_too() -> None:
    engine: Any = start(make_program(loss_scale=None), 1, kernels="torch-device").engine
    for rank in (rank for ranks in engine.ranks for rank in ranks):
        rank.fill("scale", "", (2.0**24, 0.0))
    report = engine.run_step(0)
    assert report.skipped_blocks
    assert report.loss_scale == 2.0**23


def test_checkpoints_go_from_kernels_to_kernels(tmp_path: Path) -> None:
    program = make_program(view_dtype="f32", zero=1)
    whole = losses(train(program, 6, kernels="fast"))
    train(program, 3, kernels="torch-device", save=str(tmp_path / "device"))
    rest = losses(train(program, 3, kernels="fast", resume=str(tmp_path / "device")))
    np.testing.assert_allclose(rest, whole[3:], rtol=NEAR["f32"])
    again = losses(train(program, 3, kernels="torch-device", resume=str(tmp_path / "device")))
    np.testing.assert_allclose(again, whole[3:], rtol=NEAR["f32"])


class _Outside(TorchDispatchMode):
    """Notes every operation whose result is in bytes that are not among those given."""

    def __init__(self, given: list[Any]) -> None:
        super().__init__()
        self._given = {tensor.untyped_storage().data_ptr() for tensor in given}
        self.found: list[str] = []
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls += 1
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if not isinstance(tensor, torch.Tensor) or (tensor.ndim == 0 and tensor.device.type == "cpu"):
                continue  # a number that the host writes, or reads
            if tensor.untyped_storage().data_ptr() not in self._given:
                self.found.append(str(func))
        return result


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.sampled(4)
def test_a_step_asks_no_allocator_for_tensors(model: Any) -> None:
    check_allocator(make_program(model, view_dtype="bf16", zero=2, reduce="each-micro-batch"))


@pytest.mark.parametrize("family", [family for family in MODELS if family != "granite"])
@pytest.mark.sampled(4)
def test_a_step_of_tensor_peers_asks_no_allocator_for_tensors(family: str) -> None:
    check_allocator(make_program(MODELS[family], view_dtype="bf16", pp=1, dp=1, tp=2, zero=0, micro_batches=2))


BIASED: dict[str, Any] = {"router": RouterLosses(bias_update=0.05), "optimizer": evolve(OPTIMIZER, clip="global")}


def test_a_step_that_moves_biases_of_routers_asks_no_allocator_for_tensors() -> None:
    check_allocator(make_program(EXPERTS, view_dtype="bf16", zero=2, **BIASED))


def test_biases_of_routers_are_those_of_a_host() -> None:
    """In f32 all kernels choose alike in this training, so that counts and biases have the same bits."""
    program = make_program(EXPERTS, view_dtype="f32", **BIASED)
    device, host = (
        training_state(train(program, 3, kernels=name).engine, 3).biases for name in ("torch-device", "fast")
    )
    assert all(bias.tobytes() == host[unit].tobytes() for unit, bias in device.items())
    assert all(bias.any() for bias in host.values())


def test_an_overflow_moves_no_bias_on_a_device() -> None:
    engine: Any = start(make_program(EXPERTS, loss_scale=None, **BIASED), 1, kernels="torch-device").engine
    for rank in (rank for ranks in engine.ranks for rank in ranks):
        rank.fill("scale", "", (2.0**40, 0.0))
    assert engine.run_step(0).skipped_blocks
    assert not any(bias.any() for bias in training_state(engine, 1).biases.values())


def check_allocator(program: Any) -> None:
    """After the first step, everything is in arenas, scratch, tables, messages, inputs and single numbers that are there."""
    engine: Any = start(program, 3, kernels="torch-device").engine
    engine.run_step(0)
    ranks = [rank for ranks in engine.ranks for rank in ranks]
    inputs = [feed.buffer for _, _, feed in engine.feeds.values()]
    scalars = engine.updater.scalars
    messages = [message for spare in engine.channels._spare.values() for message in spare]
    tables = [table for pair in engine.kernels._rope.values() for table in pair]
    given = [*(rank.arena for rank in ranks), engine.scratch._bytes, *inputs, *messages, *tables]
    given += [scalars._log, scalars._rate]
    given += [arguments["denominator"] for bound in engine.bound.values() for arguments, _ in bound._denominators]
    with _Outside(given) as outside:
        engine.run_step(1)
    assert outside.calls > 100 * len(ranks)
    assert not outside.found, sorted(set(outside.found))
    assert {head.engine for head in engine.heads} >= {Engine.COMPUTE, Engine.COLLECTIVE}


def test_arenas_are_bytes_of_the_device_exactly_as_planned() -> None:
    engine: Any = start(make_program(), 1, kernels="torch-device").engine
    for rank in (rank for ranks in engine.ranks for rank in ranks):
        assert rank.arena.dtype == torch.uint8
        assert rank.arena.nbytes == rank.stage.arena_bytes
        for view, tensor in zip(rank.views, rank.stage.tensors, strict=True):
            assert view.data_ptr() == rank.arena.data_ptr() + tensor.offset
            assert view.nbytes == tensor.type.nbytes


def test_a_run_says_which_kernels_it_has(capsys: pytest.CaptureFixture[str]) -> None:
    for kernels, said in (("torch-device", True), ("fast", False)):
        say_start(start(make_program(), 1, kernels=kernels))
        assert ("kernels: torch-device, arenas on cpu" in capsys.readouterr().out) == said

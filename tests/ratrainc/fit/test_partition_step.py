"""The optimizer's step of DeepSpeed's stages 1 and 2, run with PyTorch's own tensors, against the formulas.

The steps are those of deepspeed/runtime/zero/stage_1_and_2.py, `step`: gradients of a partition are joined, cast to the
masters' type, freed, and the optimizer updates the masters.
"""

from __future__ import annotations

import pytest

from ratrain.ratrainc.bridge.jobs.job import Sharding
from ratrain.ratrainc.fit.holdings.holdings import holdings
from ratrain.ratrainc.fit.holdings.part import Part
from ratrain.ratrainc.fit.holdings.state import GRADIENTS, gradients_at_step, moments, step_copies
from ratrain.ratrainc.fit.verdicts import most_bytes
from tests.ratrainc.fit.jobs import job_of
from tests.ratrainc.fit.test_steps import Live, model_with

torch = pytest.importorskip("torch")
from torch._utils import _flatten_dense_tensors  # noqa: E402 - after the skip

DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}


def peak_of_a_step(elements: int, gradient: str, foreach: bool | None) -> int:
    """Most bytes of a second step, with those of masters and moments; `foreach` is None for an update in one kernel."""
    masters = torch.zeros(elements)
    optimizer = torch.optim.AdamW([masters], foreach=bool(foreach), fused=foreach is None)
    live = Live()
    live.add(masters)
    with live:
        for _ in range(2):
            parts = (elements // 2, elements - elements // 2)
            averaged = [torch.zeros(each, dtype=DTYPES[gradient]) for each in parts]
            flat = _flatten_dense_tensors(averaged)
            masters.grad = flat.to(masters.dtype)
            del flat, averaged
            optimizer.step()
            masters.grad = None
    return live.peak


@pytest.mark.parametrize("stage", [Sharding.ZERO1, Sharding.ZERO2])
@pytest.mark.parametrize("gradient", ["bf16", "f32"])
@pytest.mark.parametrize(
    ("optimizer", "foreach"), [("adamw", True), ("adamw-foreach-off", False), ("adamw-fused", None)]
)
def test_a_step_holds_what_its_tensors_take(stage, gradient, optimizer, foreach) -> None:
    fields = {"master_dtype": "f32", "gradient_dtype": gradient, "optimizer": optimizer, "devices": 4}
    part = Part(job_of("deepspeed", model_with(1024), sharding=stage, **fields), 0)
    held = -(-part.model.parameters // 4)
    counted = 4 * held + moments(part, held) + gradients_at_step(part) + step_copies(part)
    assert counted == pytest.approx(peak_of_a_step(held, gradient, foreach), rel=1e-4)


def test_a_partition_has_whole_parameters_however_many_ranks() -> None:
    fields = {"master_dtype": "f32", "sharding": Sharding.ZERO2, "optimizer": "adamw-fused"}
    model = model_with(8192)
    held = {}
    for devices in (2, 64):
        (rank,) = holdings(job_of("deepspeed", model, devices=devices, **fields))
        (end,) = (each for each in rank.moments if each.name == "at the end of the backward")
        held[devices] = next(each.bytes for each in end.owners if each.name == GRADIENTS)
    assert held == {2: model.parameters, 64: 2 * 8192 * model.hidden_size}


@pytest.mark.parametrize("stage", [Sharding.ZERO1, Sharding.ZERO2])
def test_a_fused_update_never_takes_more(stage) -> None:
    fields = {"master_dtype": "f32", "sharding": stage, "devices": 8}
    peaks = [most_bytes(job_of("trl", model_with(256), optimizer=each, **fields)) for each in ("adamw-fused", "adamw")]
    assert peaks == sorted(peaks)

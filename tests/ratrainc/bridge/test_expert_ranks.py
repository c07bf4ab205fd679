"""Expert ranks of other frameworks become those of a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ratrain import api
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError

if TYPE_CHECKING:
    from pathlib import Path

    from ratrain.ratrain_ir.config.plan import Plan

AXOLOTL = """\
base_model: Qwen/Qwen3-30B-A3B
sequence_len: 2048
micro_batch_size: 1
gradient_accumulation_steps: 2
optimizer: adamw_torch
learning_rate: 1e-5
bf16: true
fsdp_version: 2
fsdp_config:
  reshard_after_forward: true
expert_parallel_size: {}
"""


def plan_of(folder: Path, ranks: int) -> Plan:
    (folder / "a.yml").write_text(AXOLOTL.format(ranks))
    asked = {"clusters": 16, "model": "qwen3-30b-a3b", "steps": 100, "f32_state": True}
    return api.import_plan("axolotl", folder / "a.yml", **asked).plan


@pytest.mark.parametrize("ranks", [1, 4])
def test_expert_ranks_of_a_job_become_those_of_the_plan(ranks: int, tmp_path: Path) -> None:
    plan = plan_of(tmp_path, ranks)
    assert (plan.dp, plan.ep, plan.zero) == (16, ranks, 3)


def test_expert_ranks_that_replicas_cannot_make_up_are_refused_at_their_place(tmp_path: Path) -> None:
    with pytest.raises(DiagnosticError, match="groups of 3 replicas that share out experts") as found:
        plan_of(tmp_path, 3)
    (error, *_) = found.value.diagnostics
    assert error.location is not None
    assert error.location.line == 11

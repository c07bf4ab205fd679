"""What peers gathered, kept for the backward: within any budget, no less for more bytes, no longer a step, and the same bits."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from ratrain.passes.manager import PassManager
from ratrain.ratrain_ir.analysis.lifetime import lifetimes
from ratrain.ratrain_ir.lowering import lower
from ratrain.ratrain_ir.ops.base import Phase
from ratrain.ratrain_ir.ops.collectives import GatherRows
from ratrain.targets.codegen.emitter import emit
from tests.end_to_end.tiny_runs import losses, make_plan, same_bits, train
from tests.end_to_end.toys import GEMMA3, NEOX, OLMO2
from tests.property.test_recompute_budget import LAYERS, TARGET

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.module import Module

KEYS = {"pp": 1, "dp": 1, "tp": 2, "micro_batches": 3, "seq_len": 48}


def compiled(options: str, capacity: int | None = None, model: ModelConfig = LAYERS, **keys: object) -> Module:
    module = lower(model, make_plan(model, **{**KEYS, **keys}))
    limit = "" if capacity is None else f"{{capacity={capacity}}}"
    PassManager(TARGET, verify_each=True).run(
        module, f"place-gpipe,recompute{{policy=auto {options}}},allocate-ddr{limit}"
    )
    return module


def gathered_again(module: Module) -> int:
    return sum(isinstance(op, GatherRows) and op.phase is Phase.BACKWARD for stage in module.stages for op in stage.ops)


def peak(module: Module) -> int:
    return max(lifetimes(stage).peak_bytes for stage in module.stages)


def test_more_bytes_keep_no_less_and_what_is_kept_stays_within_them() -> None:
    least, most = peak(compiled("gathered=again")), peak(compiled("gathered=auto"))
    assert least < most
    counts = []
    for budget in (least + (most - least) * part // 4 for part in range(6)):
        module = compiled(f"budget={budget}", budget)
        assert peak(module) <= budget
        assert all(stage.arena_bytes <= budget for stage in module.stages)
        counts.append(gathered_again(module))
    assert all(more >= fewer for more, fewer in pairwise(counts))
    assert counts[-1] == 0
    assert any(0 < count < counts[0] for count in counts)


@pytest.mark.parametrize(
    "model", [LAYERS, pytest.param(GEMMA3, marks=pytest.mark.full), pytest.param(NEOX, marks=pytest.mark.full), OLMO2]
)
def test_the_bits_are_those_of_gathering_again(model: ModelConfig) -> None:
    again, kept = (compiled(f"gathered={each}", model=model) for each in ("again", "auto"))
    assert gathered_again(again) > gathered_again(kept) == 0
    one, other = (train(emit(module, TARGET), 2, poison=True) for module in (again, kept))
    assert losses(one) == losses(other)
    same_bits(one, other)

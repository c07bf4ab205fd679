"""Ordering state together: in simulation never slower than the passes one by one; the buckets, and what `bytes=auto` fits them to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from attrs import evolve

from ratrain.passes.manager import PassManager
from ratrain.passes.pass_base import PassContext
from ratrain.passes.state import bucket_grad_sync
from ratrain.passes.state.bucket_grad_sync import LIMITS, BucketGradSyncPass
from ratrain.passes.state.prefetch_depth import DEPTHS
from ratrain.passes.trial.trial import Trials, step_seconds_at_own_addresses
from ratrain.ratrain_ir.analysis.lifetime import lifetimes
from ratrain.ratrain_ir.lowering import lower
from ratrain.ratrain_ir.ops.base import Engine
from ratrain.ratrain_ir.ops.collectives import ReduceScatter
from ratrain.ratrain_ir.ops.compute import Forward, Update
from ratrain.ratrain_ir.text.printer import print_module
from ratrain.targets.machine.machine import Machine, load_machine
from ratrain.targets.mt3000.mt3000_target import Mt3000Target
from tests.end_to_end.tiny_runs import MODEL, make_plan

if TYPE_CHECKING:
    from ratrain.passes.state.bucket_grad_sync import GradSync
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.module import Module
    from ratrain.ratrain_ir.ops.tensor import Tensors

MANY = evolve(MODEL, layers=60)
LAYERS = evolve(MODEL, layers=4)
WIDE = evolve(LAYERS, ffn_size=240)
"""An mlp is much longer than an attention, and so is its gather."""
ONE_BY_ONE = "place-{},bucket-grad-sync,schedule-update,insert-prefetch,recompute{{policy=auto placement=forward-side}}"
STATES = (
    {"zero": 1},
    {"zero": 0},
    {"zero": 2, "reduce": "each-micro-batch"},
    {"zero": 3},
)


def machine(**numbers: float) -> Machine:
    found = load_machine(None)
    changed = {name: evolve(found.constants[name], value=value) for name, value in numbers.items()}
    return evolve(found, constants=found.constants | changed)


MACHINES = {
    "as it is": machine(),
    "slow links": machine(link_bandwidth=2e6, collective_chunk=1024.0),
    "far links": machine(link_latency=1e-4, collective_chunk=1024.0),
    "links like compute": machine(link_latency=0.0, link_bandwidth=2e8, launch=0.0, collective_chunk=1024.0),
}


def placed(target: Mt3000Target, passes: str, keys: dict, model: ModelConfig = LAYERS) -> Module:
    module = lower(model, make_plan(model, micro_batches=3, **keys))
    PassManager(target).run(module, passes)
    return module


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.sampled(4)
def test_together_is_never_slower_than_one_by_one(name: str) -> None:
    gains = []
    for engine, state in zip((Engine.COMPUTE, Engine.HOST, Engine.COMPUTE, Engine.HOST), STATES, strict=True):
        target = Mt3000Target(evolve(MACHINES[name], update_engine=engine))
        for pp, dp, schedule in ((2, 2, "1f1b"), (3, 4, "zb-h1")):
            keys = {**state, "pp": pp, "dp": dp, "schedule": schedule}
            separate = placed(target, ONE_BY_ONE.format(schedule), keys)
            together = placed(target, f"place-{schedule},joint-order", keys)
            seconds = [step_seconds_at_own_addresses(module, PassContext(target)) for module in (together, separate)]
            assert seconds[0] <= seconds[1] * (1 + 1e-12)
            gains.append(seconds[1] / seconds[0] - 1)
    if name == "links like compute":
        assert max(gains) > 0.01, "one bucket a stage starts late where its blocks' reductions would hide"


@pytest.mark.parametrize(
    ("pp", "dp", "budget"), [(1, 4, 1 << 30), (2, 2, 1 << 30), (1, 4, 520 << 10), (2, 2, 590 << 10)]
)
def test_views_are_gathered_as_far_ahead_as_pays(pp: int, dp: int, budget: int) -> None:
    """Where a gather takes longer than the block before it, and bytes suffice, joint order looks further ahead than one block; no fixed depth that fits is faster."""
    slow = {"fp16_peak": 1e9, "link_latency": 0.0, "link_bandwidth": 2e7, "launch": 1e-6, "collective_chunk": 64.0}
    target = Mt3000Target(machine(**slow))
    keys = {"zero": 3, "reduce": "last", "pp": pp, "dp": dp}
    recovery = f"recompute{{policy=auto placement=forward-side budget={budget}}}"
    found = {}
    for depth in DEPTHS:
        one_by_one = f"bucket-grad-sync,schedule-update,insert-prefetch{{depth-blocks={depth}}},{recovery}"
        found[depth] = period_and_peak(target, f"place-1f1b,{one_by_one}", keys)
    fitting = {depth: period for depth, (period, peak) in found.items() if peak <= budget}
    together, peak = period_and_peak(target, f"place-1f1b,joint-order{{budget={budget}}}", keys)
    assert peak <= budget
    assert together <= min(fitting.values()) * (1 + 2e-3)
    if len(fitting) == len(DEPTHS):
        assert together < fitting[1] * 0.95
    else:
        assert 0 in fitting
        assert DEPTHS[-1] not in fitting


def period_and_peak(target: Mt3000Target, passes: str, keys: dict) -> tuple[float, int]:
    """The longest period and the highest peak of live bytes of the stages."""
    module = placed(target, passes, keys, WIDE)
    trials = Trials(module, PassContext(target))
    peaks = [lifetimes(trials.with_workspace(stage)).peak_bytes for stage in module.stages]
    return max(map(trials.period, module.stages)), max(peaks)


def test_a_trial_leaves_no_mark() -> None:
    """A module whose state was ordered together prints as one that was given the chosen passes; no tensor has an address."""
    target = Mt3000Target(MACHINES["far links"])
    module = placed(target, "place-1f1b,joint-order", {})
    assert all(tensor.offset is None for stage in module.stages for tensor in stage.tensors.values())
    assert not any("ws." in name for stage in module.stages for name in stage.tensors)
    again = placed(target, "place-1f1b,joint-order", {})
    assert print_module(module) == print_module(again)


@pytest.mark.parametrize("reduce", ["last", "each-micro-batch"])
def test_a_stage_reduced_in_bulk_has_one_collective_after_the_whole_backward(reduce: str) -> None:
    target = Mt3000Target(MACHINES["as it is"])
    module = placed(target, "place-1f1b,bucket-grad-sync{unit=stage}", {"zero": 2, "reduce": reduce})
    for stage in module.stages:
        reductions = [op for op in stage.ops if isinstance(op, ReduceScatter)]
        blocks = {op.block for op in stage.ops if type(op) is Forward}
        assert len(reductions) == (3 if reduce == "each-micro-batch" else 1)
        assert all(set(op.blocks) == blocks for op in reductions)
        if reduce == "last":
            last_work = max(
                at for at, op in enumerate(stage.ops) if op.engine is Engine.COMPUTE and type(op) is not Update
            )
            assert stage.ops.index(reductions[0]) > last_work


def test_auto_takes_small_buckets_where_they_hide_and_large_ones_where_latency_rules() -> None:
    fast = Mt3000Target(machine(link_latency=0.0, link_bandwidth=1e15))
    far = Mt3000Target(machine(link_latency=1e-2))
    module = placed(fast, "place-1f1b", {})
    (stage, _), auto = module.stages, BucketGradSyncPass(bytes="auto")
    assert auto.fitted(module, stage, PassContext(fast)) == LIMITS[0]
    assert auto.fitted(module, stage, PassContext(far)) > LIMITS[0]
    assert auto.rewrite(module, stage, PassContext(far)) == 1


def test_a_bucket_of_many_blocks_takes_no_quadratic_time(monkeypatch: pytest.MonkeyPatch) -> None:
    module = lower(MANY, make_plan(MANY, pp=1, micro_batches=1, zero=2, reduce="each-micro-batch"))
    reductions = sum(isinstance(op, ReduceScatter) for op in module.stages[0].ops)
    gradients, looked_at = bucket_grad_sync._gradients, 0

    def counted(op: GradSync) -> Tensors:
        nonlocal looked_at
        looked_at += 1
        return gradients(op)

    monkeypatch.setattr(bucket_grad_sync, "_gradients", counted)
    target = Mt3000Target(load_machine(None))
    assert BucketGradSyncPass(1 << 40).rewrite(module, module.stages[0], PassContext(target)) == 1
    assert looked_at <= 3 * reductions

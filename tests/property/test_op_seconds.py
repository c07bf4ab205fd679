"""What a pass remembers of its target: seconds, which are those of the target whatever ops share them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from ratrain.passes.manager import PassManager
from ratrain.passes.pass_base import PassContext
from ratrain.passes.state.schedule_update import ScheduleUpdatePass
from ratrain.passes.trial.trial import Trials
from ratrain.ratrain_ir.config.rank_mapping import RankMapping
from ratrain.ratrain_ir.lowering import lower
from ratrain.ratrain_ir.ops.base import Engine
from ratrain.ratrain_ir.ops.collectives import AllReduce, AllReduceScalar
from ratrain.ratrain_ir.ops.compute import Release, Update
from ratrain.ratrain_ir.ops.messages import Send
from ratrain.ratrain_ir.testing.strategies import Case, cases, for_plan
from ratrain.targets.machine.machine import load_machine
from ratrain.targets.mt3000.mt3000_target import Mt3000Target
from tests.end_to_end.tiny_runs import make_plan
from tests.end_to_end.toys import UNEVEN
from tests.targets.machine.test_links import group, machine

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module, Stage
    from ratrain.ratrain_ir.ops.base import Op

PIPELINES = ("place-1f1b", "place-zb-h1", "recompute,bucket-grad-sync{bytes=1KiB},insert-prefetch")


def target_of(engine: Engine) -> Mt3000Target:
    return Mt3000Target(evolve(load_machine(None), update_engine=engine))


@given(
    cases(max_layers=4, max_micro_batches=3), st.sampled_from(PIPELINES), st.sampled_from([Engine.COMPUTE, Engine.HOST])
)
def test_known_seconds_are_those_of_the_target(case: Case, pipeline: str, engine: Engine) -> None:
    module, target = case.module(), target_of(engine)
    PassManager(target).run(module, for_plan(pipeline, case.plan))
    context = PassContext(target)
    for stage in module.stages:
        for op in (*stage.ops, *Trials(module, context).with_workspace(stage).ops):
            if type(op) is not Release:
                assert context.op_seconds(module, stage, op) == target.op_seconds(module, stage, op)


@given(cases(max_layers=4, max_micro_batches=3))
def test_updates_are_ordered_by_the_seconds_of_the_engine_that_updates(case: Case) -> None:
    module, target = case.module(), target_of(Engine.HOST)
    asked = []

    class Watched(Mt3000Target):
        def op_seconds(self, module: Module, stage: Stage, op: Op) -> float:
            asked.append(op)
            return super().op_seconds(module, stage, op)

    ScheduleUpdatePass().run(module, PassContext(Watched(target.machine)))
    updates = [op for op in asked if type(op) is Update]
    assert updates
    assert {op.engine for op in updates} == {Engine.HOST}


def test_seconds_of_one_plan_are_not_those_of_another() -> None:
    """Nothing in a collective says how many take part in it."""
    target = target_of(Engine.COMPUTE)
    context = PassContext(target)
    for replicas in (2, 4, 2):
        module = lower(UNEVEN, make_plan(UNEVEN, pp=2, dp=replicas, zero=0))
        for stage in module.stages:
            for op in stage.ops:
                if isinstance(op, AllReduce | AllReduceScalar):
                    assert context.op_seconds(module, stage, op) == target.op_seconds(module, stage, op)


def test_messages_take_the_seconds_of_their_own_links() -> None:
    """Where two stages share a chip, equal messages between other stages take longer."""
    target = Mt3000Target(machine(group("chip", 2, 1e9, 0.0), group("system", None, 1e6, 0.0)))
    model = evolve(UNEVEN, layers=4)
    plan = make_plan(model, pp=4, dp=1, zero=0, mapping=RankMapping.parse("chip 2x1"))
    module = PassManager(target).run(lower(model, plan), "place-1f1b")
    context = PassContext(target)
    found = set()
    for stage in module.stages:
        for op in stage.ops:
            if isinstance(op, Send):
                assert context.op_seconds(module, stage, op) == target.op_seconds(module, stage, op)
                found.add(target.op_seconds(module, stage, op))
    assert len(found) > 1

"""Seconds that a pipeline asks once: whatever ops share an answer, it is that of the target."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from passes.manager import PassManager
from passes.pass_base import PassContext
from passes.schedule_update import ScheduleUpdatePass
from passes.trial import with_workspace
from ratrain_ir.ops import Engine, Release, Update
from ratrain_ir.testing.strategies import Case, cases
from targets.mt3000.machine import load_machine
from targets.mt3000.target import Mt3000Target

if TYPE_CHECKING:
    from ratrain_ir.module import Module, Stage
    from ratrain_ir.ops import Op

PIPELINES = ("place-1f1b", "place-zb-h1", "recompute,bucket-grad-sync{bytes=1KiB},insert-prefetch")


def target_of(engine: Engine) -> Mt3000Target:
    return Mt3000Target(evolve(load_machine(None), update_engine=engine))


@given(
    cases(max_layers=3, max_micro_batches=3), st.sampled_from(PIPELINES), st.sampled_from([Engine.COMPUTE, Engine.HOST])
)
def test_known_seconds_are_those_of_the_target(case: Case, pipeline: str, engine: Engine) -> None:
    module, target = case.module(), target_of(engine)
    PassManager(target).run(module, pipeline)
    context = PassContext(target)
    for stage in module.stages:
        for op in (*stage.ops, *with_workspace(module, stage, context).ops):
            if type(op) is not Release:
                assert context.op_seconds(module, stage, op) == target.op_seconds(module, stage, op)


@given(cases(max_layers=3, max_micro_batches=3))
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

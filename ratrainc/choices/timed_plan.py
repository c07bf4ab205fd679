"""One plan compiled, placed, emitted and simulated; levers, comparisons and the planner use it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from ratrain.passes.manager import PassManager
from ratrain.ratrain_ir.analysis.lifetime import lifetimes
from ratrain.ratrain_ir.config.plan_text import check_plan
from ratrain.ratrain_ir.lowering import lower
from ratrain.ratrain_ir.module import Module
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.support.gc import paused_gc
from ratrain.ratrain_ir.support.time_limit import go_on
from ratrain.targets.codegen.emitter import emit
from ratrain.targets.program.program import Program
from ratrain.targets.simulator.figures import Figures, simulated
from ratrain.targets.simulator.timeline import Timeline
from ratrain.targets.target import target_of

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.targets.machine.machine import Machine


@frozen
class TimedPlan:
    """A plan that every pass accepted, or a given schedule, with its simulated times."""

    module: Module
    program: Program
    figures: Figures
    timeline: Timeline

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """The most live bytes of each stage."""
        return tuple(stage.peak_bytes for stage in self.figures.stages)

    @property
    def exposed_tail_seconds(self) -> float:
        """Longest exposed tail of any stage."""
        return max(stage.exposed_tail_seconds for stage in self.figures.stages)


DOES_NOT_FIT = {"RT052", "RT053"}


@frozen
class RefusedPlan:
    """A plan that a pass refused, and the live bytes of each stage when it did."""

    error: DiagnosticError
    peak_bytes: tuple[int, ...]

    @property
    def is_for_bytes(self) -> bool:
        """True if it was refused because it does not fit."""
        return not DOES_NOT_FIT.isdisjoint(item.code for item in self.error.diagnostics)


def time_plan(model: ModelConfig, plan: Plan, pipeline: str, machine: Machine) -> TimedPlan | RefusedPlan:
    """Compile, place and simulate a plan under a pipeline.

    Return `RefusedPlan` if a pass refuses it. Raises `DiagnosticError` if the plan is not allowed for the model, and
    `OutOfTime` if a time limit has passed.
    """
    check_plan(plan, model)
    target = target_of(machine)
    with paused_gc():
        module = lower(model, plan)
        try:
            PassManager(target).run(module, pipeline)
        except DiagnosticError as error:
            return RefusedPlan(error, tuple(lifetimes(stage).peak_bytes for stage in module.stages))
        go_on()
        program = emit(module, target)
        return TimedPlan(module, program, *simulated(program, machine))

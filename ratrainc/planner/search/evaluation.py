"""Level two: one plan compiled, placed, verified by its passes and simulated; long steps are folded first.

Under 1F1B, of slices too, the micro-batches between warm-up and cool-down repeat. A folded plan has 2P + (M mod P) of M micro-batches
(3P + (M mod P) where P is small), and the pace of its last P backwards on the first stage stands for those left out. In k slices
it is not P but the micro-batches of the P + k - 1 slices that the first stage holds. That is an estimate, and
is called so; what a search reports as its answer is always simulated whole. Plans of several chunks a stage, whose cool-down is longer than
that, are not folded.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import attrs
from attrs import frozen

from ratrain.ratrain_ir.analysis.lifetime import lifetimes
from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrain_ir.config.plan_text import check_plan
from ratrain.ratrain_ir.config.types import StateKind
from ratrain.ratrain_ir.ops.base import Engine
from ratrain.ratrain_ir.ops.compute import InputGradientOp, WeightGradientOp
from ratrain.ratrain_ir.ops.kinds import OP_CLASSES
from ratrain.ratrain_ir.support.diagnostics import Diagnostics
from ratrain.ratrain_ir.support.gc import paused_gc
from ratrain.ratrain_ir.support.time_limit import OutOfTime, time_limit
from ratrain.ratrain_ir.verifier import verify
from ratrain.ratrainc.choices.timed_plan import RefusedPlan, time_plan
from ratrain.ratrainc.planner.search.disturbance import Disturbance, disturbance_of
from ratrain.targets.machine.machine import Machine
from ratrain.targets.simulator.figures import step_figures
from ratrain.targets.simulator.given_times import GivenTimes
from ratrain.targets.verifier.program_verifier import check_program

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module
    from ratrain.targets.program.instruction import Instruction
    from ratrain.targets.program.program import Program
    from ratrain.targets.simulator.figures import StepFigures
    from ratrain.targets.simulator.timeline import Timeline

_SMALL_PIPELINE = 8


@frozen
class Task:
    """A plan to be evaluated under a pipeline of passes."""

    model: ModelConfig
    plan: Plan
    pipeline: str
    machine: Machine
    folded: bool = False
    checked_below: float = 0.0
    """a step of fewer seconds is verified too, schedule and program"""
    disturbed: bool = False
    """whether to say how the step time bears a slow stage and jitter"""
    with_tail: bool = True
    """whether to say what idle time is the tail's: that takes a walk through all of it"""
    apportioned: bool = False
    """whether to say what of the bytes follows from the schedule"""
    times: GivenTimes | None = None
    """what ops take, in place of the machine's times; all of the evaluation is then in their unit"""
    seconds: float | None = None
    """after so many of computing it is stopped; None: it takes as long as it needs"""


@frozen
class Evaluation:
    """What a task came to. Without `step_seconds` it does not fit: `refusal` says why."""

    step_seconds: float | None
    peak_bytes: tuple[int, ...]
    """by stage; of a folded plan they are those of the folded step, which holds as many micro-batches in flight"""
    exposed_tail_seconds: float | None = None
    refusal: str = ""
    estimated: bool = False
    """whether the step was folded"""
    bubble_fraction: float = 0.0
    """idle share of the compute engines"""
    disturbance: Disturbance | None = None
    schedule_bytes: tuple[int, ...] = ()
    """by stage, of an apportioned task: checkpoints, what crosses cuts, inputs and scalars, the most at once"""
    verified: bool = False
    """whether schedule and program were proved, and nothing was folded"""
    stopped: bool = False
    """whether its time was over before anything was known"""
    taken: float = 0.0
    """seconds of computing that the evaluation itself took"""


def folded_micro_batches(plan: Plan) -> int:
    """Micro-batches of the folded plan; all of them where folding saves nothing, or a stage has several chunks."""
    if plan.chunks > 1:
        return plan.micro_batches
    depth = _depth(plan)
    turns = 3 if depth <= _SMALL_PIPELINE else 2
    return min(plan.micro_batches, turns * depth + plan.micro_batches % depth)


def _depth(plan: Plan) -> int:
    """Micro-batches that the first stage has in flight: P, or of k slices as many as P + k - 1 slices are of."""
    slices = max(1, len(plan.slices))
    return -(-(plan.pp + slices - 1) // slices)


def compiled_units(plan: Plan, layers: int, *, folded: bool, in_halves: bool) -> float:
    """About how much work the evaluation of a plan is: passes of micro-batches, or slices, through layers, and their halves and parts."""
    micro_batches = folded_micro_batches(plan) if folded else plan.micro_batches
    return layers * micro_batches * max(1, len(plan.slices)) * (1 + in_halves) * (2 if plan.tp > 1 else 1)


def evaluate(task: Task) -> Evaluation:
    """Compile, place and simulate a task, within its time.

    Raises `DiagnosticError` where the plan is not allowed for the model.
    """
    begin = time.thread_time()
    try:
        with time_limit(task.seconds):
            found = _evaluated(task)
    except OutOfTime:
        found = Evaluation(None, (), refusal="stopped: it takes longer than the search has time for it", stopped=True)
    return attrs.evolve(found, taken=time.thread_time() - begin)


def _evaluated(task: Task) -> Evaluation:
    """What a task comes to. Raises `OutOfTime` where its time is over, `DiagnosticError` where the plan is not allowed."""
    check_plan(task.plan, task.model)
    plan = task.plan
    if task.folded:
        plan = attrs.evolve(plan, micro_batches=folded_micro_batches(plan))
    timed = time_plan(task.model, plan, task.pipeline, task.machine)
    if isinstance(timed, RefusedPlan):
        if not timed.is_for_bytes:
            raise timed.error
        return Evaluation(None, timed.peak_bytes, refusal=timed.error.diagnostics[0].message)
    figures: StepFigures = timed.figures
    if verified := not task.folded and figures.step_seconds < task.checked_below:
        with paused_gc():
            _verify(timed.module, timed.program, task.machine)
    timeline = timed.timeline
    if task.times is not None:
        timeline = task.times.run(timed.program)
        figures = step_figures(timeline)
    left_out = task.plan.micro_batches - plan.micro_batches
    seconds = figures.step_seconds + (left_out * _pace(timeline, plan) if left_out else 0.0)
    return Evaluation(
        seconds,
        timed.peak_bytes,
        timed.exposed_tail_seconds if task.with_tail else None,
        estimated=left_out > 0,
        bubble_fraction=figures.bubble_fraction,
        disturbance=disturbance_of(timeline, figures) if task.disturbed else None,
        schedule_bytes=_schedule_bytes(timed.module) if task.apportioned else (),
        verified=verified,
    )


def _schedule_bytes(module: Module) -> tuple[int, ...]:
    """By stage, the most bytes live at once of what follows from the schedule and from what is recomputed."""
    kinds = (StateKind.BOUNDARY, StateKind.CHECKPOINT, StateKind.INPUT, StateKind.SCALAR)
    return tuple(lifetimes(stage).peak_bytes_of(kinds) for stage in module.stages)


def _verify(module: Module, program: Program, machine: Machine) -> None:
    """Raise `DiagnosticError` unless schedule and program are sound on a machine, which may be one of a what-if."""
    diagnostics = Diagnostics()
    verify(module, diagnostics)
    diagnostics.check()
    check_program(program, machine)


def _pace(timeline: Timeline, plan: Plan) -> float:
    """Seconds a micro-batch takes in the steady part: between the first stage's backwards of as many as are in flight."""
    spans = timeline.spans[0][Engine.COMPUTE]
    count = len(timeline.program.stages[0].streams[Engine.COMPUTE])
    ends: dict[int, float] = {}
    for span in spans[-count:]:
        if _is_backward(span.instruction) and span.instruction.micro_batch is not None:
            ends[span.instruction.micro_batch] = span.end
    depth = _depth(plan)
    last = plan.micro_batches - depth
    return (ends[last] - ends[last - depth]) / depth


def _is_backward(instruction: Instruction) -> bool:
    return issubclass(OP_CLASSES[instruction.keyword], InputGradientOp | WeightGradientOp)

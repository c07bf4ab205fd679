"""Evaluation of one plan (level two): compiled, placed, verified by its passes and simulated, long steps folded.

Under 1F1B, also with slices, the micro-batches between warm-up and cool-down repeat. A folded plan has 2P + (M mod P)
of M micro-batches (3P + (M mod P) if P is small), and the pace of its last P backwards on the first stage stands for
the others. With k slices, P is replaced by the micro-batches of the P + k - 1 slices that the first stage holds; under
1f1b-ahead by P + 1, under zb-h2 by 2P.
Example: P = 16, M = 100 is simulated with 36 micro-batches, and 64 times the pace is added. Plans of several chunks a
stage, whose backwards do not end evenly, are simulated with 4P + (M mod P) micro-batches and with 2P fewer: the
difference is the pace. Example: P = 4, M = 256 costs 16 + 8 micro-batches. A folded time is an estimate and is called
so.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import attrs
from attrs import frozen

from ratrain.passes.placed_by import placed_by
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
from ratrain.ratrainc.planner.space.plan_families import AHEAD
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
_TURNS_OF_CHUNKS = 4
"""Turns of the pipeline in the longer of the two steps that stand for one of several chunks."""
_WORTH_FOLDING = 0.7
"""Share of the micro-batches that these two steps may have together."""


@frozen
class Task:
    """A plan to evaluate under a pipeline of passes."""

    model: ModelConfig
    plan: Plan
    pipeline: str
    machine: Machine
    folded: bool = False
    checked_below: float = 0.0
    """a step of fewer seconds is verified too, both schedule and program"""
    disturbed: bool = False
    """simulate with a slow stage and with jitter too"""
    with_tail: bool = True
    """find the exposed tail, which takes a walk through all idle time"""
    apportioned: bool = False
    """find the bytes that follow from the schedule"""
    times: GivenTimes | None = None
    """times of ops that replace the machine's; the whole evaluation is then in their unit"""
    seconds: float | None = None
    """limit of computing time; None: no limit"""


@frozen
class PlanEvaluation:
    """The outcome of a task. Without `step_seconds` the plan does not fit, and `refusal` is the reason."""

    step_seconds: float | None
    peak_bytes: tuple[int, ...]
    """peak by stage; a folded step holds as many micro-batches in flight as the whole one"""
    exposed_tail_seconds: float | None = None
    refusal: str = ""
    estimated: bool = False
    """True if the step was folded"""
    bubble_fraction: float = 0.0
    """idle share of the compute engines"""
    disturbance: Disturbance | None = None
    schedule_bytes: tuple[int, ...] = ()
    """peak of checkpoints, boundary tensors, inputs and scalars by stage, for an apportioned task; else empty"""
    verified: bool = False
    """True if schedule and program were verified, and nothing was folded"""
    stopped: bool = False
    """True if the time limit passed"""
    taken: float = 0.0
    """seconds of computing time of the evaluation itself"""


STOPPED = PlanEvaluation(None, (), refusal="stopped: it takes longer than the search has time for it", stopped=True)
"""The outcome of a task whose time passed."""

_TWICE = "zb-h2"
"""Schedule with a warm-up that is twice as long as 1F1B's."""


def folded_micro_batches(plan: Plan, pipeline: str = "") -> int:
    """Return the micro-batches of the folded plan under a pipeline of passes; all if folding saves nothing."""
    if plan.chunks > 1:
        longer = _TURNS_OF_CHUNKS * plan.pp + plan.micro_batches % plan.pp
        return longer if 2 * longer - 2 * plan.pp <= _WORTH_FOLDING * plan.micro_batches else plan.micro_batches
    depth = _depth(plan, pipeline)
    turns = 3 if depth <= _SMALL_PIPELINE else 2
    # the remainder is kept, so that the last group of micro-batches is as full as in the whole step
    return min(plan.micro_batches, turns * depth + plan.micro_batches % depth)


def is_folded(plan: Plan, pipeline: str) -> bool:
    """Return True if folding the plan's step saves micro-batches."""
    return folded_micro_batches(plan, pipeline) < plan.micro_batches


def _depth(plan: Plan, pipeline: str) -> int:
    """Return the micro-batches in flight on the first stage: P, or with k slices as many as P + k - 1 slices make.

    It is one more where each stage has one more ahead, and twice as many under zb-h2.
    """
    slices = max(1, len(plan.slices))
    named = {plan.schedule, placed_by(pipeline) if pipeline else None}
    return -(-(plan.pp + slices - 1) // slices) + (AHEAD in named) + plan.pp * (_TWICE in named)


def compiled_units(plan: Plan, layers: int, *, folded: bool, in_halves: bool) -> float:
    """Estimate the work of an evaluation: passes of micro-batches or slices through layers, halves and peer parts."""
    micro_batches = folded_micro_batches(plan) if folded else plan.micro_batches
    if plan.chunks > 1 and micro_batches < plan.micro_batches:
        micro_batches += micro_batches - 2 * plan.pp
    return layers * micro_batches * max(1, len(plan.slices)) * (1 + in_halves) * _parts(plan)


def _parts(plan: Plan) -> float:
    """Return the factor by which exchanges of tensor-parallel, context or expert ranks make more ops of a layer."""
    groups = 0.25 * (plan.context_groups - 1)  # each gathers, attends and reduces for itself
    return groups + (2.0 if plan.tp > 1 else 1.5 if plan.cp > 1 or plan.ep > 1 else 1.0)


def evaluate(task: Task) -> PlanEvaluation:
    """Compile, place and simulate a task within its time limit.

    Raises `DiagnosticError` if the plan is not allowed for the model.
    """
    # computing time, so that other work on the machine changes no answer
    begin = time.thread_time()
    try:
        with time_limit(task.seconds):
            found = _evaluated(task)
    except OutOfTime:
        found = STOPPED
    return attrs.evolve(found, taken=time.thread_time() - begin)


def _evaluated(task: Task) -> PlanEvaluation:
    """Evaluate a task. Raises `OutOfTime` after its limit, `DiagnosticError` if the plan is not allowed."""
    check_plan(task.plan, task.model)
    plan = task.plan
    if task.folded:
        plan = attrs.evolve(plan, micro_batches=folded_micro_batches(plan, task.pipeline))
    timed = time_plan(task.model, plan, task.pipeline, task.machine)
    if isinstance(timed, RefusedPlan):
        if not timed.is_for_bytes:
            raise timed.error
        return PlanEvaluation(None, timed.peak_bytes, refusal=timed.error.diagnostics[0].message)
    figures: StepFigures = timed.figures
    # only a plan that may win is verified, as that takes time too
    if verified := not task.folded and figures.step_seconds < task.checked_below:
        with paused_gc():
            _verify(timed.module, timed.program, task.machine)
    timeline = timed.timeline
    if task.times is not None:
        timeline = task.times.run(timed.program)
        figures = step_figures(timeline)
    # the micro-batches that were left out would have passed at the steady pace
    left_out = task.plan.micro_batches - plan.micro_batches
    seconds = figures.step_seconds
    if left_out and plan.chunks > 1:
        shorter = _evaluated(
            attrs.evolve(task, plan=shorter_plan(plan), folded=False, checked_below=0.0, with_tail=False)
        )
        if shorter.step_seconds is None:
            return shorter
        seconds += left_out * (seconds - shorter.step_seconds) / turns_apart(plan)
    elif left_out:
        seconds += left_out * pace(timeline, plan, task.pipeline)
    return PlanEvaluation(
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
    """Return, by stage, the peak of the bytes that follow from the schedule and from recomputation."""
    kinds = (StateKind.BOUNDARY, StateKind.CHECKPOINT, StateKind.INPUT, StateKind.SCALAR)
    return tuple(lifetimes(stage).peak_bytes_of(kinds) for stage in module.stages)


def _verify(module: Module, program: Program, machine: Machine) -> None:
    """Raise `DiagnosticError` unless schedule and program are sound on a machine."""
    diagnostics = Diagnostics()
    verify(module, diagnostics)
    diagnostics.check()
    check_program(program, machine)


def shorter_plan(plan: Plan) -> Plan:
    """Return the plan with the micro-batches of two turns of the pipeline fewer."""
    return attrs.evolve(plan, micro_batches=plan.micro_batches - turns_apart(plan))


def turns_apart(plan: Plan) -> int:
    """Return the micro-batches of two turns of the pipeline, by which the two steps of several chunks differ."""
    return 2 * plan.pp


def pace(timeline: Timeline, plan: Plan, pipeline: str) -> float:
    """Return the seconds a micro-batch of the steady part, between first-stage backwards that are its depth apart."""
    spans = timeline.spans[0][Engine.COMPUTE]
    count = len(timeline.program.stages[0].streams[Engine.COMPUTE])
    ends: dict[int, float] = {}
    # spans of all simulated steps follow each other; the last `count` are the steady step
    for span in spans[-count:]:
        if _is_backward(span.instruction) and span.instruction.micro_batch is not None:
            ends[span.instruction.micro_batch] = span.end
    depth = _depth(plan, pipeline)
    last = plan.micro_batches - depth
    # over a whole turn of the pipeline, within which backwards are not evenly spaced
    return (ends[last] - ends[last - depth]) / depth


def _is_backward(instruction: Instruction) -> bool:
    return issubclass(OP_CLASSES[instruction.keyword], InputGradientOp | WeightGradientOp)

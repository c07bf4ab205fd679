"""Advice for a plan that does not fit: changes of it that fit, else the planner's plan for the same clusters and step.

The planner looks among plans for the same passes, then among plans of all schedules. The advice says that nothing fits
only if bounds on bytes rule out every plan of both searches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from attrs import evolve, field, frozen

from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrain_ir.config.plan_text import changes_text
from ratrain.ratrain_ir.schedules.named import default_schedule
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError, Note
from ratrain.ratrain_ir.support.files import write_text
from ratrain.ratrain_ir.support.quantities import number_of
from ratrain.ratrainc.choices.levers import CompileSetting, LeverOutcome, outcomes
from ratrain.ratrainc.choices.strategies import DEFAULT_STRATEGY
from ratrain.ratrainc.choices.strategies import strategy as strategy_named
from ratrain.ratrainc.console.console import seconds_text, size_text
from ratrain.ratrainc.planner.answer.no_plan import nearest_text
from ratrain.ratrainc.planner.answer.plan_files import plan_text
from ratrain.ratrainc.planner.search.plan_evaluation import evaluate
from ratrain.ratrainc.planner.search.plan_request import PlanRequest, without_schedule
from ratrain.ratrainc.planner.search.quick import estimated
from ratrain.ratrainc.planner.space.context_ranks import left_out
from ratrain.ratrainc.planner.space.plan_families import USUAL, PlanFamily, families, with_memories

if TYPE_CHECKING:
    from ratrain.ratrainc.choices.machine_choice import MachineChoice
    from ratrain.ratrainc.choices.strategies import Strategy
    from ratrain.ratrainc.planner.search.answer import Answer, Candidate
    from ratrain.ratrainc.planner.search.plan_evaluation import PlanEvaluation

SECONDS = 45.0
"""Seconds after which nothing new is tried."""
_PLANNER_SECONDS = 15.0
"""Seconds of these that are left to the planner if no change fits."""
_SHOWN = 5


@frozen
class Suggestion:
    """A plan that was compiled and placed, with the passes that were used."""

    model: ModelConfig
    plan: Plan
    pipeline: str
    how: str
    """its step time and highest peak, in words"""

    def save(self, path: str, model: str, machine: MachineChoice) -> None:
        """Write the plan's file, with how to compile it. Raises `DiagnosticError` RT002 if it cannot be written."""
        head = [f"In place of a plan that does not fit: {self.how}."]
        write_text(path, plan_text(self.plan, self.pipeline, self.model, model, head, machine, path))


@frozen
class Advice:
    """Notes about other plans, and the first one that fits."""

    notes: list[Note] = field(factory=list)
    suggestion: Suggestion | None = None


_UNCHANGED = "this plan as it is"


def advice(
    setting: CompileSetting,
    strategy: Strategy,
    peak_bytes: Sequence[int],
    commands: tuple[str | None, str | None],
    tick: Callable[[str], None] = lambda _text: None,
) -> Advice:
    """Find what fits in place of a setting that does not, whose stages hold `peak_bytes` at most.

    `commands` are command lines that plan for the setting's passes, and for any schedule, if there are any; they are
    only quoted. `tick` hears what is tried. Nothing new is tried after `SECONDS`, and nothing that was begun goes on
    much longer, but for one plan of the planner.
    """
    begin = time.monotonic()
    heaviest = max(range(len(peak_bytes)), key=peak_bytes.__getitem__)
    fitting = _fitting_changes(setting, heaviest, tick)
    if fitting:
        notes = [Note(f"tried, and fits: {o.name}: {_figures(o.step_seconds, o.peak_bytes)}") for o in fitting]
        first = fitting[0]
        how = f"{first.name}: {_figures(first.step_seconds, first.peak_bytes)}"
        return Advice(notes, Suggestion(setting.model, first.setting.plan, first.setting.pipeline, how))
    return _planned(setting, strategy, commands, begin + SECONDS, tick)


def _fitting_changes(setting: CompileSetting, heaviest: int, tick: Callable[[str], None]) -> list[LeverOutcome]:
    """Return the changes that fit, fastest first, at most `_SHOWN`; pairs are tried only until something fits."""
    fitting: list[LeverOutcome] = []
    for outcome in outcomes(setting, heaviest, SECONDS - _PLANNER_SECONDS, tick=tick):
        if outcome.fits:
            fitting.append(outcome)
        if len(fitting) >= _SHOWN or (fitting and " and " in outcome.name):
            break
    return sorted(fitting, key=lambda o: o.step_seconds or 0.0)


def _planned(
    setting: CompileSetting,
    strategy: Strategy,
    commands: tuple[str | None, str | None],
    deadline: float,
    tick: Callable[[str], None],
) -> Advice:
    """Suggest the planner's plan for the same passes, else for any schedule of the default strategy."""
    notes = [Note("no single change and no pair of changes that was tried fits")]
    plan, (command, whole_command) = setting.plan, commands
    schedule = plan.schedule or default_schedule(plan.shape)
    # a strategy without a schedule of its own takes the plan's; plain 1F1B needs no family to say so
    own = families(strategy, (schedule,)) if strategy.schedule is None and schedule != "1f1b" else ()
    usual = strategy_named(DEFAULT_STRATEGY)
    asked = [(strategy, own, command), (usual, families(usual, with_memories(USUAL, setting.machine)), whole_command)]
    empty = []
    told = set()
    for chosen, searched, asking in asked:
        tick(f"the planner's plans for {_same(plan)}")
        try:
            answer = estimated(_request(setting, chosen, searched))
        except DiagnosticError:  # the machine has too few clusters, or there is no such shape
            continue
        empty.append(answer.proven_empty)
        words = "" if chosen is strategy else f" with other passes than these, '{chosen.name}'"
        longer = "this is from a short search: a longer one may find a better plan"
        ask = f"; {longer}: {asking}" if asking else ""
        ask_on = f"; {longer}, or none: {asking}" if asking else ""
        said = ""
        placed = None if answer.proven_empty else _first_placed(answer, deadline, tick)
        if placed is not None:
            candidate, evaluation = placed
            how = "simulated"
            if evaluation.estimated:
                how = "estimated from fewer micro-batches; all of them were not placed here, which takes longer"
            figures = _figures(evaluation.step_seconds, evaluation.peak_bytes, how)
            changes = changes_text(plan, candidate.plan) or _UNCHANGED
            passes = "" if asking is command else f", passes {candidate.pipeline}"
            notes.append(Note(f"the planner's plan for {_same(plan)} fits{words}: {changes}{passes}: {figures}{ask}"))
            return Advice(notes, Suggestion(setting.model, candidate.plan, candidate.pipeline, figures))
        if answer.best is not None:
            best = answer.best
            figures = (
                f"step {seconds_text(best.seconds)} (estimate), highest peak at least {size_text(best.peak_bytes)}"
            )
            maybe = f"may fit, though it was not placed here: {changes_text(plan, best.plan) or _UNCHANGED}: {figures}"
            said = f"the planner's plan for {_same(plan)}{words} {maybe}"
        elif not answer.proven_empty:
            said = f"whether another plan of {_same(plan)} fits{words} is not known: bounds do not rule out all of them"
        elif all(empty) and len(empty) == len(asked) and command:
            # without `command` the passes are the user's own, for which the bounds prove nothing
            notes.append(Note(_proof(answer)))
        # both searches may find the same: the first command is then enough
        if said and said not in told:
            told.add(said)
            notes.append(Note(f"{said}{ask_on}"))
    return Advice(notes)


def _request(setting: CompileSetting, strategy: Strategy, searched: tuple[PlanFamily, ...]) -> PlanRequest:
    """Make the planner's request: the same clusters and step, with the dtypes and optimizer of the plan."""
    plan = setting.plan
    return PlanRequest(
        setting.model,
        setting.machine,
        plan.clusters,
        plan.global_batch,
        plan.seq_len,
        strategy,
        peers=(plan.tp,) if plan.tp > 1 and not searched else None,
        contexts=tuple(sorted({plan.cp, 1} if searched else {plan.cp})) if plan.cp > 1 else None,
        expert_ranks=tuple(sorted({plan.ep, 1} if searched else {plan.ep})) if plan.ep > 1 else None,
        plan_template=without_schedule(plan),
        families=searched,
        wide=bool(searched),
    )


def _first_placed(
    answer: Answer, deadline: float, tick: Callable[[str], None]
) -> tuple[Candidate, PlanEvaluation] | None:
    """Return the first candidate that compiles and fits, with its evaluation; None if none does in time.

    The first candidate is tried even after the deadline. One that fits with fewer micro-batches is placed with all of
    them, unless that takes too long.
    """
    request = answer.request
    for number, candidate in enumerate(answer.candidates):
        left = deadline - time.monotonic()
        if number and left < 0:
            return None
        tick(f"{candidate.plan.summary}, {candidate.family}")
        task = request.task(candidate.plan, candidate.pipeline)
        evaluation = evaluate(evolve(task, seconds=max(left, _PLANNER_SECONDS)))
        if evaluation.step_seconds is None:
            continue
        if evaluation.estimated:
            tick(f"{candidate.plan.summary}, {candidate.family}, with all its micro-batches")
            left = max(deadline - time.monotonic(), _PLANNER_SECONDS)
            whole = evaluate(evolve(task, folded=False, with_tail=False, seconds=left))
            if whole.stopped:
                return candidate, evaluation
            evaluation = whole
        if evaluation.step_seconds is not None:
            return candidate, evaluation
    return None


def _proof(answer: Answer) -> str:
    request = answer.request
    nearest = nearest_text(answer)
    unasked = left_out(request.setting, request.clusters, request.contexts)
    without = f" without {', '.join(map(str, unasked))} context ranks" if unasked else ""
    return (
        f"no plan of at most {number_of(request.clusters, 'cluster')}{without} fits "
        f"{number_of(request.global_batch, 'sequence')} of "
        f"{number_of(request.seq_len, 'token')} with these "
        f"dtypes, with these passes or under any schedule of '{request.strategy.name}': bounds on bytes rule "
        f"out all of them{f' ({nearest})' if nearest else ''}; the model needs more "
        f"clusters, or shorter sequences"
    )


def _same(plan: Plan) -> str:
    return (
        f"the same {number_of(plan.clusters, 'cluster')} and "
        f"{number_of(plan.global_batch, 'sequence')} of {number_of(plan.seq_len, 'token')}"
    )


def _figures(seconds: float | None, peaks: tuple[int, ...], how: str = "simulated") -> str:
    return f"step {seconds_text(seconds or 0.0)} ({how}), highest peak {size_text(max(peaks))}"

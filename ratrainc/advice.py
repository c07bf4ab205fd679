"""What fits instead of a plan that does not: changes of it, each tried, else the planner's plan for the same clusters and the same step.

That nothing fits is said only where the planner's bounds on bytes rule out every plan.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.diagnostics import DiagnosticError, Note
from ratrain.ratrain_ir.frontend.plan_text import changes_text
from ratrain.ratrainc.console import seconds_text, size_text
from ratrain.ratrainc.levers import Outcome, Setting, outcomes, try_setting
from ratrain.ratrainc.planner.answer import Request
from ratrain.ratrainc.planner.evaluation import Task, evaluate, folded_micro_batches
from ratrain.ratrainc.planner.quick import quick_answer
from ratrain.ratrainc.planner.report import nearest_text

if TYPE_CHECKING:
    from ratrain.ratrain_ir.frontend.plan import Plan
    from ratrain.ratrainc.planner.answer import Answer, Candidate
    from ratrain.ratrainc.planner.evaluation import Evaluation
    from ratrain.ratrainc.strategies import Strategy

SECONDS = 45.0
"""After so many nothing new is tried."""
_PLANNER_SECONDS = 15.0
"""of these are left to the planner, where no change fits"""
_SHOWN = 5


def advice(setting: Setting, strategy: Strategy, command: str | None) -> list[Note]:
    """Notes for a setting that does not fit; `command` asks the planner for a plan, where that can be asked for its passes."""
    begin = time.monotonic()
    now = try_setting(setting, "as it is")
    if now is None:
        return []
    heaviest = max(range(len(now.peak_bytes)), key=now.peak_bytes.__getitem__)
    fitting = _fitting_changes(setting, heaviest)
    if fitting:
        return [Note(f"tried, and fits: {o.name}: {_figures(o.step_seconds, o.peak_bytes)}") for o in fitting]
    return list(_planned(setting, strategy, command, begin + SECONDS))


def _fitting_changes(setting: Setting, heaviest: int) -> list[Outcome]:
    fitting: list[Outcome] = []
    for outcome in outcomes(setting, heaviest, SECONDS - _PLANNER_SECONDS):
        if outcome.fits:
            fitting.append(outcome)
        if len(fitting) >= _SHOWN or (fitting and " and " in outcome.name):
            break
    return sorted(fitting, key=lambda o: o.step_seconds or 0.0)


def _planned(setting: Setting, strategy: Strategy, command: str | None, deadline: float) -> Iterator[Note]:
    yield Note("no single change and no pair of changes that was tried fits")
    plan = setting.plan
    if plan.chunks > 1 or plan.slices:
        return  # the planner's shapes have one chunk a stage and whole micro-batches
    request = Request(
        setting.model,
        setting.machine,
        plan.clusters,
        plan.global_batch,
        plan.seq_len,
        strategy,
        peers=(plan.tp,) if plan.tp > 1 else None,
        plan_template=plan,
    )
    try:
        answer = quick_answer(request)
    except DiagnosticError:  # the machine has not so many clusters
        return
    asking = f"; ask for it with: {command}" if command else ""
    if answer.proven_empty and command:  # bounds are those of strategies; of any passes they prove nothing
        yield Note(_proof(answer))
    elif placed := _first_placed(answer, deadline):
        candidate, evaluation = placed
        how = "estimated from fewer micro-batches" if evaluation.estimated else "simulated"
        figures = _figures(evaluation.step_seconds, evaluation.peak_bytes, how)
        yield Note(
            f"the planner's plan for {_same(plan)} fits: {changes_text(plan, candidate.plan)}: {figures}{asking}"
        )
    elif answer.best is not None:
        best = answer.best
        figures = f"step {seconds_text(best.seconds)} (estimate), highest peak at least {size_text(best.peak_bytes)}"
        words = f"may fit, though it was not placed here: {changes_text(plan, best.plan)}: {figures}"
        yield Note(f"the planner's plan for {_same(plan)} {words}{asking}")
    else:
        yield Note(
            f"whether another plan of {_same(plan)} fits is not known: bounds do not rule out all of them{asking}"
        )


def _first_placed(answer: Answer, deadline: float) -> tuple[Candidate, Evaluation] | None:
    """The first of the candidates that is compiled and placed, and what it comes to."""
    request = answer.request
    for candidate in answer.candidates:
        if time.monotonic() > deadline:
            return None
        folded = folded_micro_batches(candidate.plan) < candidate.plan.micro_batches
        evaluation = evaluate(Task(request.model, candidate.plan, candidate.pipeline, request.machine, folded))
        if evaluation.step_seconds is not None:
            return candidate, evaluation
    return None


def _proof(answer: Answer) -> str:
    request = answer.request
    nearest = nearest_text(answer)
    return (
        f"no plan of at most {request.clusters} clusters fits {request.global_batch} sequences of {request.seq_len} tokens with these "
        f"dtypes, chunks and passes: bounds on bytes rule out all of them{f' ({nearest})' if nearest else ''}; the model needs more "
        f"clusters, or shorter sequences"
    )


def _same(plan: Plan) -> str:
    return f"the same {plan.clusters} clusters and {plan.global_batch} sequences of {plan.seq_len} tokens"


def _figures(seconds: float | None, peaks: tuple[int, ...], how: str = "simulated") -> str:
    return f"step {seconds_text(seconds or 0.0)} ({how}), highest peak {size_text(max(peaks))}"

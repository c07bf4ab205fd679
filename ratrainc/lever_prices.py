"""What levers free and cost, tried one by one in the time that is given for it.

A lever is compiled, placed and simulated: whole, where all of them are expected to end in time, else with its step folded to fewer
micro-batches (`ratrainc/planner/evaluation.py`), and is then called an estimate. Estimates are held against that of the plan as it is,
folded too. Time is the computing time of this thread: what others do on the machine changes no answer.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from ratrain.ratrain_ir.diagnostics import DiagnosticError
from ratrain.ratrainc.levers import Outcome, Setting, changes
from ratrain.ratrainc.planner.evaluation import Task, compiled_units, evaluate, folded_micro_batches

if TYPE_CHECKING:
    from ratrain.ratrainc.planner.evaluation import Evaluation

_OPS_A_SECOND = 8000.0
"""Ops of a schedule that are compiled, placed and simulated in a second, before anything is known: about as measured, on one core."""


@frozen
class Prices:
    """What the levers of a setting came to."""

    tried: list[Outcome]
    freed_bytes: list[int | None]
    """by each of these, of the stage asked for; None where the plan has no such stage"""
    estimated: bool
    """whether steps were folded"""
    left: list[str]
    """levers that there was no time for"""
    seconds: float
    """about how many would do for all of them"""
    refused: bool
    """whether no change of the setting can be compiled here: a file that its passes read may be gone"""


def lever_prices(setting: Setting, now: Outcome, stage: int, ops: int, seconds: float) -> Prices:
    """Try the levers for the bytes of a stage; `now` is what the setting comes to, with a schedule of so many ops."""
    rate = ops / _OPS_A_SECOND / _units(setting, folded=False)
    folds = folded_micro_batches(setting.plan) < setting.plan.micro_batches
    whole = sum(rate * _units(changed, folded=False) for _, changed in changes(setting, stage))
    return priced(setting, now, stage, rate, seconds, folded=folds and whole > seconds)


def priced(setting: Setting, now: Outcome, stage: int, rate: float, seconds: float, *, folded: bool) -> Prices:
    """The same with steps whole or folded, where a unit of work (`compiled_units`) is thought to take so many seconds at first."""
    levers = list(changes(setting, stage))
    begin = time.thread_time()
    units = [_units(changed, folded=folded) for _, changed in levers]
    needed = sum(units) + (_units(setting, folded=True) if folded else 0.0)
    tried: list[Outcome] = []
    left: list[str] = []
    refusals = 0

    def within_time(changed: Setting) -> Evaluation | None:
        """What a setting comes to; None where the time is not expected to last for it, or did not."""
        nonlocal rate
        remaining, wanted = seconds - (time.thread_time() - begin), _units(changed, folded=folded)
        if rate * wanted >= remaining:
            return None
        task = Task(changed.model, changed.plan, changed.pipeline, changed.machine, folded, with_tail=False)
        found = evaluate(evolve(task, seconds=remaining))
        rate = max(rate, found.taken / wanted) if tried else found.taken / wanted
        return None if found.stopped else found

    against = now
    if folded:
        try:
            own = within_time(setting)
        except DiagnosticError:
            return Prices([], [], folded, [], 0.0, refused=True)
        if own is None:
            levers, left = [], [name for name, _ in levers]
        elif own.step_seconds is not None:
            against = evolve(now, peak_bytes=own.peak_bytes, step_seconds=own.step_seconds)
    for name, changed in levers:
        try:
            found = within_time(changed)
        except DiagnosticError:  # not allowed, or refused for another reason than bytes
            refusals += 1
            continue
        if found is None:
            left.append(name)
            continue
        step = found.step_seconds
        if step is not None and now.step_seconds is not None and against.step_seconds is not None:
            step *= now.step_seconds / against.step_seconds
        tried.append(Outcome(name, changed, found.peak_bytes, step))
    had = against.peak_bytes[stage]
    freed = [had - each.peak_bytes[stage] if stage < len(each.peak_bytes) else None for each in tried]
    return Prices(tried, freed, folded, left, rate * needed, refused=bool(levers) and refusals == len(levers))


def _units(setting: Setting, *, folded: bool) -> float:
    """About how much work a setting is."""
    return compiled_units(setting.plan, setting.model.layers, folded=folded, in_halves=False)

"""What levers free and cost, tried one by one in the time that is given for it.

A lever is compiled, placed and simulated: whole, where all of them are expected to end in time, else with its step
folded to fewer micro-batches (`ratrainc/planner/search/plan_evaluation.py`), and is then called an estimate. Estimates
are held against that of the plan as it is, folded too. Time is the computing time of a process: what others do on the
machine changes no answer, and of several processes each has all of it, for levers and for what else it does beside
them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from attrs import define, evolve, field, frozen

from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrainc.choices.levers import CompileSetting, LeverOutcome, changes
from ratrain.ratrainc.planner.search.plan_evaluation import PlanEvaluation, Task, compiled_units, evaluate

_OPS_A_SECOND = 8000.0
"""Ops of a schedule that are compiled, placed and simulated in a second, before anything is known: about as measured, on one core."""
_EXPECTED_AT_MOST = 60.0
"""Seconds that all levers together are expected to take, where nobody says how many there are, for all of them to be tried."""
_GIVEN_TO_ALL = 120.0
"""Seconds that they have then: what is expected is a guess."""
QUICK_SECONDS = 8.0
"""Seconds where they are expected to take longer: the answer is there soon, with names of what was not tried. Whole steps beyond this are folded."""
_WORTH_FOLDING = 2 / 3
"""Of the work of whole steps, what folded ones may be: less is not worth an estimate."""


@frozen
class Prices:
    """What the levers of a setting came to."""

    tried: list[LeverOutcome]
    freed_bytes: list[int | None]
    """by each of these, of the stage asked for; None where the plan has no such stage"""
    estimated: bool
    """whether steps were folded"""
    left: list[str]
    """levers that there was no time for"""
    seconds: float
    """about how many would do for all of them, of each process"""
    refused: bool
    """whether no change of the setting can be compiled here: a file that its passes read may be gone"""


@frozen
class Found:
    """What a setting came to."""

    evaluation: PlanEvaluation | None
    """None where there was no time for it, or it was refused"""
    rate: float | None = None
    """seconds that a unit of its work took"""
    refused: bool = False


@define(eq=False)
class Pricing:
    """The levers for the bytes of a stage, to be tried one by one or side by side; each process has the time for itself."""

    setting: CompileSetting
    stage: int
    rate: float
    """seconds that a unit of work (`compiled_units`) is thought to take"""
    seconds: float
    """of computing, for each process"""
    folded: bool
    levers: list[tuple[str, CompileSetting]] = field(init=False)
    _begun: dict[int, float] = field(factory=dict, init=False)
    """by process, the computing time of its thread when it began"""
    _has_tried: bool = field(default=False, init=False)
    _given_up: bool = field(default=False, init=False)
    """whether there was no time for the setting as it is, or it was refused: no lever is to be held against it"""

    def __attrs_post_init__(self) -> None:
        self.levers = list(changes(self.setting, self.stage))

    @property
    def tasks(self) -> list[CompileSetting]:
        """What is to be tried, in this order: the setting as it is first, where steps are folded."""
        return [*([self.setting] if self.folded else []), *(changed for _, changed in self.levers)]

    def begin(self) -> None:
        """Let the time of this process begin; else it does with the first that is tried."""
        self._begun.setdefault(os.getpid(), time.thread_time())

    def found(self, setting: CompileSetting) -> Found:
        """What a setting comes to, within the time of this process."""
        own = setting is self.setting
        self.begin()
        remaining = self.seconds - (time.thread_time() - self._begun[os.getpid()])
        wanted = _units(setting, folded=self.folded)
        if self._given_up or self.rate * wanted >= remaining:
            self._given_up |= own
            return Found(None)
        task = Task(setting.model, setting.plan, setting.pipeline, setting.machine, self.folded, with_tail=False)
        try:
            evaluation = evaluate(evolve(task, seconds=remaining))
        except DiagnosticError:  # not allowed, or refused for another reason than bytes
            self._given_up |= own
            return Found(None, refused=True)
        rate = evaluation.taken / wanted
        self.rate = max(self.rate, rate) if self._has_tried else rate
        self._has_tried |= not own
        self._given_up |= own and evaluation.stopped
        return Found(evaluation, rate)

    def prices(self, now: LeverOutcome, found: Sequence[Found], processes: int = 1) -> Prices:
        """What the levers came to, by what so many processes `found` for the tasks; `now` is what the setting comes to."""
        of_levers = list(found)
        against = now
        if self.folded:
            own = of_levers.pop(0)
            if own.refused:
                return Prices([], [], self.folded, [], 0.0, refused=True)
            if own.evaluation is None or own.evaluation.stopped:
                of_levers = [Found(None)] * len(self.levers)
            elif own.evaluation.step_seconds is not None:
                evaluated = own.evaluation
                against = evolve(now, peak_bytes=evaluated.peak_bytes, step_seconds=evaluated.step_seconds)
        tried: list[LeverOutcome] = []
        left: list[str] = []
        for (name, changed), each in zip(self.levers, of_levers, strict=True):
            if each.refused:
                continue
            if each.evaluation is None or each.evaluation.stopped:
                left.append(name)
                continue
            step = each.evaluation.step_seconds
            if step is not None and now.step_seconds is not None and against.step_seconds is not None:
                step *= now.step_seconds / against.step_seconds
            tried.append(LeverOutcome(name, changed, each.evaluation.peak_bytes, step))
        had = against.peak_bytes[self.stage]
        freed = [had - each.peak_bytes[self.stage] if self.stage < len(each.peak_bytes) else None for each in tried]
        refused = bool(self.levers) and all(each.refused for each in of_levers)
        return Prices(tried, freed, self.folded, left, self._enough(found, processes), refused)

    def _enough(self, found: Sequence[Found], processes: int) -> float:
        """About how many seconds would do for all of them, of each of so many processes, in whatever order these take them."""
        of_levers = [each.rate for each in found[self.folded :] if each.rate is not None]
        own = [each.rate for each in found[: self.folded] if each.rate is not None]
        rate = max(of_levers or own, default=self.rate)
        units = [_units(task, folded=self.folded) for task in self.tasks]
        return rate * (sum(units) + (processes - 1) * max(units, default=0.0)) / processes


def pricing_of(setting: CompileSetting, stage: int, ops: int, seconds: float | None) -> Pricing:
    """The levers of a setting with a schedule of so many ops; steps are folded where the time is not expected to last for whole ones.

    Without a number of seconds there are enough where all levers take a minute or less, and few where they take longer.
    """
    rate = ops / _OPS_A_SECOND / _units(setting, folded=False)
    settings = [changed for _, changed in changes(setting, stage)]
    needed = {
        folded: rate * sum(_units(each, folded=folded) for each in [setting] * folded + settings)
        for folded in (False, True)
    }
    too_long = needed[False] > (QUICK_SECONDS if seconds is None else seconds)
    folded = too_long and needed[True] <= _WORTH_FOLDING * needed[False]
    if seconds is None:
        seconds = _GIVEN_TO_ALL if needed[folded] <= _EXPECTED_AT_MOST else QUICK_SECONDS
    return Pricing(setting, stage, rate, seconds, folded=folded)


def _units(setting: CompileSetting, *, folded: bool) -> float:
    """About how much work a setting is."""
    return compiled_units(setting.plan, setting.model.layers, folded=folded, in_halves=False)

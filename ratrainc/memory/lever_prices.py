"""Prices of levers: the bytes that each change of a plan frees and the time it costs, tried one by one in limited time.

A lever is compiled, placed and simulated. If whole steps of all levers are not expected to end in time, steps are
folded to fewer micro-batches (`ratrainc/planner/search/plan_evaluation.py`), and the results are called estimates. An
estimate is compared with that of the unchanged plan, folded too:

    unchanged plan, whole    10.0 s           measured before
    unchanged plan, folded    8.0 s           the first task
    lever, folded             8.4 s           so its step is given as 10.0 * 8.4 / 8.0 = 10.5 s

Time is the computing time of a process's thread, so other work on the machine changes no answer. Each of several
processes has the whole limit for itself.

Cost: one compilation a lever, at most 15 levers. No lever begins that is not expected to end in time, and one that
takes longer is stopped.
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
"""Assumed ops of a schedule that one core compiles, places and simulates in a second, until a lever is measured."""
_EXPECTED_AT_MOST = 60.0
"""Expected seconds up to which all levers are tried if no limit is given."""
_GIVEN_TO_ALL = 120.0
"""Limit in seconds in that case: more than expected, because the expectation is a guess."""
QUICK_SECONDS = 8.0
"""Limit in seconds if all levers are expected to take longer: a quick answer that names the levers left out.

Whole steps that are expected to take longer than this are folded.
"""
_WORTH_FOLDING = 2 / 3
"""Largest share of the work of whole steps at which folding is worth an estimate."""


@frozen
class Prices:
    """The results of the levers of a setting."""

    tried: list[LeverOutcome]
    freed_bytes: list[int | None]
    """bytes that each lever in `tried` frees on the stage asked for; None if its plan has no such stage"""
    estimated: bool
    """True if steps were folded"""
    left: list[str]
    """names of levers that there was no time for"""
    seconds: float
    """about how long all levers would take, in seconds of each process"""
    refused: bool
    """True if no change of the setting can be compiled here: a file that its passes read may be gone"""


@frozen
class Found:
    """The result of one setting."""

    evaluation: PlanEvaluation | None
    """None if there was no time for it, or it was refused"""
    rate: float | None = None
    """measured seconds a unit of work (`compiled_units`)"""
    refused: bool = False


@define(eq=False)
class Pricing:
    """The levers that free bytes of a stage, to be tried in one process or several; each process has its own time."""

    setting: CompileSetting
    stage: int
    rate: float
    """expected seconds a unit of work (`compiled_units`)"""
    seconds: float
    """limit of computing time, for each process"""
    folded: bool
    levers: list[tuple[str, CompileSetting]] = field(init=False)
    _begun: dict[int, float] = field(factory=dict, init=False)
    """computing time of the thread at its start, by process"""
    _has_tried: bool = field(default=False, init=False)
    _given_up: bool = field(default=False, init=False)
    """True if the unchanged setting had no time or was refused: no lever can be compared with it"""

    def __attrs_post_init__(self) -> None:
        self.levers = list(changes(self.setting, self.stage))

    @property
    def tasks(self) -> list[CompileSetting]:
        """The settings to try, in order; the unchanged one is first if steps are folded."""
        return [*([self.setting] if self.folded else []), *(changed for _, changed in self.levers)]

    def found(self, setting: CompileSetting) -> Found:
        """Evaluate one of the tasks within the remaining time of this process; its clock starts with its first task."""
        own = setting is self.setting
        # a forked process inherits the entries of its parent, so each looks for its own number
        begun = self._begun.setdefault(os.getpid(), time.thread_time())
        remaining = self.seconds - (time.thread_time() - begun)
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
        # The first lever replaces the guess. Later ones only raise it: a lever that is begun too late is time lost.
        self.rate = max(self.rate, rate) if self._has_tried else rate
        self._has_tried |= not own
        self._given_up |= own and evaluation.stopped
        return Found(evaluation, rate)

    def prices(self, now: LeverOutcome, found: Sequence[Found], processes: int = 1) -> Prices:
        """Put together the results of all tasks, in the order of `tasks`, that `processes` processes found.

        `now` is the outcome of the unchanged setting with whole steps.
        """
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
                # both sides are folded alike, so their ratio carries over to whole steps
                step *= now.step_seconds / against.step_seconds
            tried.append(LeverOutcome(name, changed, each.evaluation.peak_bytes, step))
        had = against.peak_bytes[self.stage]
        freed = [had - each.peak_bytes[self.stage] if self.stage < len(each.peak_bytes) else None for each in tried]
        refused = bool(self.levers) and all(each.refused for each in of_levers)
        return Prices(tried, freed, self.folded, left, self._enough(found, processes), refused)

    def _enough(self, found: Sequence[Found], processes: int) -> float:
        """Estimate the seconds that each process needs for all tasks, in whatever order they are taken."""
        of_levers = [each.rate for each in found[self.folded :] if each.rate is not None]
        own = [each.rate for each in found[: self.folded] if each.rate is not None]
        rate = max(of_levers or own, default=self.rate)
        units = [_units(task, folded=self.folded) for task in self.tasks]
        # Graham's bound for list scheduling: each process is busy until the last task begins, so before it the other
        # tasks are shared evenly, and the longest may be the last.
        return rate * (sum(units) + (processes - 1) * max(units, default=0.0)) / processes


def pricing_of(setting: CompileSetting, stage: int, ops: int, seconds: float | None) -> Pricing:
    """Set up the levers of a setting whose schedule has `ops` ops, and decide if steps are folded.

    Steps are folded if whole ones are not expected to end within `seconds`, and folding saves a third of the work or
    more. None sets the limit: enough for all levers if they are expected to take a minute or less, else 8 seconds.
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
    """Estimate the work of a setting."""
    return compiled_units(setting.plan, setting.model.layers, folded=folded, in_halves=False)

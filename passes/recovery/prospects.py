"""What the stages of a pipeline can do with more bytes or fewer than they have, and with guests of others among theirs."""

from __future__ import annotations

from bisect import bisect_left
from functools import cached_property
from typing import TYPE_CHECKING

from attrs import define, field, frozen

from ratrain.passes.memory.trial import Trials
from ratrain.passes.recovery.guests import take_in
from ratrain.passes.recovery.recompute_choice import Chosen, Front, StageShape, as_chosen
from ratrain.passes.recovery.rewriting import Rewriting
from ratrain.ratrain_ir.module import Module, Stage
from ratrain.ratrain_ir.ops.base import Engine

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ratrain.passes.recovery.guests import UnitTimes
    from ratrain.passes.recovery.rewriting import LayerChoice

WORTH = 1e-3
"""What a step must gain to move anything at all, and what is near enough to what was hoped."""


@frozen(eq=False)
class Prospect:
    """Choices for all stages, and the seconds that a step would take for each micro-batch."""

    seconds: float
    chosen: list[Chosen]
    periods: list[float]
    """of each stage"""


def step_seconds(module: Module, periods: Sequence[float]) -> float:
    """What a step takes: its longest period, and for filling and draining the pipeline what a micro-batch takes on each stage."""
    return max(periods) + sum(periods) / module.plan.micro_batches


@define(eq=False)
class Prospects:
    """What a stage can do with more bytes or fewer than it has: by its front of choices, of which its own was placed and timed."""

    stage: Stage
    trials: Trials
    capacity: int
    shape: StageShape = field(init=False)
    front: Front = field(init=False)
    alone: int = field(init=False)
    """its choice with the bytes that it has"""
    alone_period: float = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.shape = StageShape.of(self.stage, self.trials)
        self.front = Front.of(self.shape, self.shape.none_stored)
        self.alone = self.front.best_within(self.capacity, self.rewriting, self.trials)
        self.alone_period = self.trials.period(self.draft(self.front.chosen(self.alone)))

    def draft(self, chosen: Chosen) -> Stage:
        """The stage under a choice."""
        return as_chosen(self.rewriting, self.trials, chosen)

    @cached_property
    def rewriting(self) -> Rewriting:
        """The stage, to be written under one choice after another."""
        return Rewriting(self.stage)

    @cached_property
    def periods(self) -> list[float]:
        """The period under each choice of the front, were there room; falling."""
        plan = self.trials.module.plan
        passes = plan.micro_batches * self.shape.slices / self.shape.in_flight
        own = self.front.seconds[self.alone]
        return [self.alone_period + (seconds - own) * passes for seconds in self.front.seconds]

    @cached_property
    def bytes_it_has(self) -> int:
        """Bytes that it has for its front of choices."""
        if self.alone + 1 < len(self.front.points):
            return self.front.sizes[self.alone]
        peak = self.trials.occupancy(self.draft(self.front.chosen(self.alone))).peak_bytes(0)
        return self.front.sizes[self.alone] + max(0, self.capacity - peak)

    def choice_for(self, period: float) -> int:
        """The choice of the fewest bytes that keeps a period; the last where none does."""
        index = bisect_left(self.periods, -period, key=lambda each: -each)
        return min(index, len(self.periods) - 1)

    def room(self, period: float) -> int:
        """Bytes that it has beyond what keeps a period; negative where it lacks some."""
        return self.bytes_it_has - self.front.sizes[self.choice_for(period)]

    @cached_property
    def lag(self) -> float:
        """Seconds by which other engines may lag behind compute where it recovers all that it can."""
        return self.trials.occupancy(self.draft(self.front.chosen(0))).lag_within(self.capacity)

    def has_live_bytes(self, draft: Stage) -> bool:
        """Whether it has the bytes that are live at once."""
        return self.trials.occupancy(draft).peak_bytes(self.lag) <= self.capacity

    def excess(self, draft: Stage) -> int:
        """Bytes that it lacks to place a draft."""
        return self.trials.excess_bytes(draft, self.lag, self.capacity)

    def fits(self, draft: Stage) -> bool:
        """Whether a draft can be placed with whatever little lag."""
        return self.trials.fits(draft, 0.0, self.capacity)

    def lacking(self, counts: Sequence[Mapping[LayerChoice, int]]) -> int:
        """Bytes that it lacks for a choice."""
        sizes = [{option.choice: option.nbytes for option in options} for options in self.shape.options]
        wanted = sum(
            own[choice] * count for own, taken in zip(sizes, counts, strict=True) for choice, count in taken.items()
        )
        return max(0, wanted - self.bytes_it_has)

    @cached_property
    def other_messages(self) -> float:
        """Seconds of a step in which its link is taken by what it sends and reduces anyway."""
        engines = (Engine.SEND, Engine.COLLECTIVE)
        return sum(self.trials.op_seconds(self.stage, op) for op in self.stage.ops if op.engine in engines)


@frozen(eq=False)
class Beside:
    """What a stage keeps beside its guests."""

    chosen: Chosen
    period: float
    missing: int
    """bytes that it lacks even so, or for a period that it is to keep"""
    fits: bool = True

    @classmethod
    def of(cls, lender: Prospects, borrowers: Sequence[Stage], times: UnitTimes, limit: float) -> Beside:
        """That of a stage to which some others evict; `limit`: the period that it is to keep."""
        draft = lender.stage.draft()
        if not take_in(draft, borrowers, times):
            return cls(lender.front.chosen(lender.alone), lender.alone_period, 0)
        rewriting = Rewriting(draft)
        index = lender.front.best_within(lender.capacity, rewriting, lender.trials)
        chosen = lender.front.chosen(index)
        full = as_chosen(rewriting, lender.trials, chosen)
        live = lender.trials.occupancy(full).peak_bytes(0) - lender.capacity
        missing = live if live > 0 else lender.trials.excess_bytes(full, 0.0, lender.capacity)
        period, fits = lender.trials.period(full), not missing
        if fits and period > limit * (1 + WORTH):
            missing = max(0, lender.front.sizes[lender.choice_for(limit)] - lender.front.sizes[index])
        return cls(chosen, period, missing, fits)

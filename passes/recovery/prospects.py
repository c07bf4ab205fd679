"""Estimates of what a pipeline's stages can do with more or fewer bytes, and around remote buffers."""

from __future__ import annotations

from bisect import bisect_left
from functools import cached_property
from typing import TYPE_CHECKING

from attrs import define, field, frozen

from ratrain.passes.recovery.peer_offload import add_remote_buffers
from ratrain.passes.recovery.recompute_choice import Chosen, Front, StageShape, as_chosen
from ratrain.passes.recovery.rewriting import Rewriting
from ratrain.passes.trial.trial import Trials
from ratrain.ratrain_ir.module import Module, Stage
from ratrain.ratrain_ir.ops.base import Engine

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ratrain.passes.recovery.layer_choice import LayerChoice
    from ratrain.passes.recovery.peer_offload import UnitTimes

WORTH = 1e-3
"""Relative gain that makes moving anything worthwhile; also the tolerance of a period that is to be kept."""


@frozen(eq=False)
class Prospect:
    """Choices for all stages, with the estimated seconds of a step."""

    seconds: float
    chosen: list[Chosen]
    periods: list[float]
    """By stage, in seconds."""


def step_seconds(module: Module, periods: Sequence[float]) -> float:
    """Estimate the seconds of a step from the stages' periods.

    The longest period, plus the time to fill and drain the pipeline: on each stage the share of one micro-batch.
    """
    return max(periods) + sum(periods) / module.plan.micro_batches


@define(eq=False)
class Prospects:
    """Front of choices of one stage; the choice for its own bytes was placed and timed exactly."""

    stage: Stage
    trials: Trials
    capacity: int
    shape: StageShape = field(init=False)
    front: Front = field(init=False)
    alone: int = field(init=False)
    """Index of its choice with its own bytes."""
    alone_period: float = field(init=False)
    """Seconds from step to step with that choice."""

    def __attrs_post_init__(self) -> None:
        self.shape = StageShape.of(self.stage, self.trials)
        self.front = Front.of(self.shape, self.shape.none_stored)
        self.alone = self.front.best_within(self.capacity, self.rewriting, self.trials)
        self.alone_period = self.trials.period(self.draft(self.front.chosen(self.alone)))

    def draft(self, chosen: Chosen) -> Stage:
        """Return the stage under a choice."""
        return as_chosen(self.rewriting, self.trials, chosen)

    @cached_property
    def rewriting(self) -> Rewriting:
        """Rewriter of the stage, reused for one choice after another."""
        return Rewriting(self.stage)

    @cached_property
    def periods(self) -> list[float]:
        """Estimated period under each choice of the front, if there were room; descending."""
        plan = self.trials.module.plan
        # The front counts the items in flight once; a step recomputes them as often as its pieces refill the flight.
        passes = plan.micro_batches * self.shape.slices / self.shape.in_flight
        own = self.front.seconds[self.alone]
        return [self.alone_period + (seconds - own) * passes for seconds in self.front.seconds]

    @cached_property
    def bytes_it_has(self) -> int:
        """Bytes of the stage that its front of choices may use."""
        # If a larger choice exists, the stage's own choice used the bytes up. Else there may be room above the peak.
        if self.alone + 1 < len(self.front.points):
            return self.front.sizes[self.alone]
        peak = self.trials.occupancy(self.draft(self.front.chosen(self.alone))).peak_bytes(0)
        return self.front.sizes[self.alone] + max(0, self.capacity - peak)

    def choice_for(self, period: float) -> int:
        """Return the index of the choice with the fewest bytes that keeps a period; the last one if none does."""
        # Periods descend, so search their negatives.
        index = bisect_left(self.periods, -period, key=lambda each: -each)
        return min(index, len(self.periods) - 1)

    def room(self, period: float) -> int:
        """Return the bytes beyond those that keep a period; negative if some are lacking."""
        return self.bytes_it_has - self.front.sizes[self.choice_for(period)]

    @cached_property
    def lag(self) -> float:
        """Seconds by which other engines may lag when the stage recomputes all that it can."""
        return self.trials.occupancy(self.draft(self.front.chosen(0))).lag_within(self.capacity)

    def has_live_bytes(self, draft: Stage) -> bool:
        """Tell whether the live bytes of a draft fit the capacity."""
        return self.trials.occupancy(draft).peak_bytes(self.lag) <= self.capacity

    def excess(self, draft: Stage) -> int:
        """Return the bytes by which a draft's arena exceeds the capacity."""
        return self.trials.excess_bytes(self.trials.occupancy(draft), self.lag, self.capacity)

    def fits(self, draft: Stage) -> bool:
        """Tell whether a draft's arena fits the capacity without room for lag."""
        return self.trials.fits(draft, 0.0, self.capacity)

    def lacking(self, counts: Sequence[Mapping[LayerChoice, int]]) -> int:
        """Return the bytes that the stage lacks for a choice, given as counts by layer kind."""
        sizes = [{option.choice: option.nbytes for option in options} for options in self.shape.options]
        wanted = sum(
            own[choice] * count for own, taken in zip(sizes, counts, strict=True) for choice, count in taken.items()
        )
        return max(0, wanted - self.bytes_it_has)

    @cached_property
    def other_messages(self) -> float:
        """Seconds of a step for which its link is busy with sends and reductions anyway."""
        engines = (Engine.SEND, Engine.COLLECTIVE)
        return sum(self.trials.op_seconds(self.stage, op) for op in self.stage.ops if op.engine in engines)


@frozen(eq=False)
class DonorChoice:
    """Choice of a donor stage around its remote buffers."""

    chosen: Chosen
    period: float
    missing: int
    """Bytes that it lacks even so, or lacks for the period that it is to keep."""
    fits: bool = True

    @classmethod
    def of(cls, donor: Prospects, borrowers: Sequence[Stage], times: UnitTimes, limit: float) -> DonorChoice:
        """Return the choice of a donor to which `borrowers` offload.

        `limit`: the period in seconds that it is to keep.
        """
        draft = donor.stage.draft()
        if not add_remote_buffers(draft, borrowers, times):
            return cls(donor.front.chosen(donor.alone), donor.alone_period, 0)
        rewriting = Rewriting(draft)
        index = donor.front.best_within(donor.capacity, rewriting, donor.trials)
        chosen = donor.front.chosen(index)
        full = as_chosen(rewriting, donor.trials, chosen)
        # Live bytes above the capacity are a cheap first answer; only if they fit is a placement tried.
        live = donor.trials.occupancy(full).peak_bytes(0) - donor.capacity
        missing = live if live > 0 else donor.trials.excess_bytes(donor.trials.occupancy(full), 0.0, donor.capacity)
        period, fits = donor.trials.period(full), not missing
        if fits and period > limit * (1 + WORTH):
            missing = max(0, donor.front.sizes[donor.choice_for(limit)] - donor.front.sizes[index])
        return cls(chosen, period, missing, fits)

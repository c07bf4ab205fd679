"""Choice of donor stages: `recompute{policy=auto store=peer}` for all stages of a pipeline together.

The stage with the longest period (seconds from step to step) sets the pace. A faster stage can keep fewer activations
and recompute more at no cost, and lend the freed bytes:

    stage        @0       @1       @2       @3
    period        9        8        6        5         alone: @0 recomputes most and sets the pace
    bytes      lacks 3  lacks 1   has 1    has 4       for a common period of 7: the room of 5 covers the lack of 4
    offload    @0: 1 to @2 and 2 to @3;  @1: 1 to @3

For a common period each stage needs some bytes (the cheapest choice that recomputes little enough) and has some: some
stages lack bytes, others have room. The period is feasible if the room covers the lack and the links of both ends can
move the bytes in that time. Seconds and bytes come from each stage's front of choices, of which one was placed and
timed exactly.

Of 32 periods the one with the best closed form is written out. Borrowing stages offload as few items (a layer of one
micro-batch) as make them fit; items go to donors in stage order; donors choose their own activations anew around the
remote buffers. If the result is worse than hoped, longer periods are tried, at most six in all. This is a heuristic
with a guarantee: the result is never slower, by the same estimate, than without donors. For stages with few items the
closed forms are too coarse; `passes/recovery/donor_search.py` then improves the result.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from math import inf
from typing import TYPE_CHECKING

from attrs import define, evolve, field, frozen

from ratrain.passes.recovery.donor_search import DonorSearch
from ratrain.passes.recovery.kept_bytes import checkpoint_bytes
from ratrain.passes.recovery.layer_choice import Donor, LayerChoice
from ratrain.passes.recovery.peer_offload import UnitTimes
from ratrain.passes.recovery.prospects import WORTH, DonorChoice, Prospect, Prospects, step_seconds
from ratrain.passes.recovery.recompute_choice import Chosen, typical_slice
from ratrain.passes.trial.trial import Trials
from ratrain.ratrain_ir.model.slice_plan import slice_plan
from ratrain.ratrain_ir.module import Module, Stage
from ratrain.ratrain_ir.ops.messages import PeerOffload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ratrain.passes.pass_base import PassContext

_PERIODS = 32
"""Periods compared by closed form, evenly spaced from the shortest possible to the one without donors."""
_WRITTEN_OUT = 6
"""Most periods that are written out."""
_STRIDE = 8
"""After an infeasible period, the next is longer by one eighth of the rest up to the period without donors."""
_HALVINGS = 20
"""Steps of the bisection for the donors' level."""
_ROUNDS = 4
"""Times that items are assigned anew because a donor has less room than estimated."""


@frozen
class _Parcel:
    """Items of a stage with the same layer kind and choice, which may be offloaded together."""

    kind: int
    choice: LayerChoice
    count: int
    nbytes: int
    """Bytes of one item."""


@frozen(eq=False)
class _Offloaded:
    """Items that a stage has to keep elsewhere."""

    counts: list[dict[LayerChoice, int]]
    """By layer kind: how many items take each choice, all of them at home."""
    parcels: list[_Parcel]
    """Items to offload."""
    seconds: float
    """Seconds of link time per item and step, in one direction."""


@define
class _Quota:
    """Room that a donor has left."""

    donor: int
    nbytes: int
    seconds: float
    """Seconds of a step for which its link is free."""

    def takes(self, parcel: _Parcel, seconds: float) -> int:
        """Return how many items of a parcel the donor can take, with `seconds` of link time for each."""
        by_seconds = int(self.seconds / seconds) if seconds else parcel.count
        return max(0, min(parcel.count, self.nbytes // parcel.nbytes, by_seconds))

    def take(self, parcel: _Parcel, count: int, seconds: float) -> None:
        """Take `count` items of a parcel off the quota."""
        self.nbytes -= parcel.nbytes * count
        self.seconds -= seconds * count


def smallest_true_near(guess: int, most: int, holds: Callable[[int], bool]) -> int:
    """Return the smallest n in 0..`most` for which `holds(n)` is true; `most` + 1 if there is none.

    `holds` must be monotone: once true, it stays true. The search gallops away from `guess`, then bisects, so a close
    guess costs few calls.
    """
    high = guess = min(guess, most)
    step = 1
    # Gallop up until it holds.
    while not holds(high):
        if high == most:
            return most + 1
        high, step = min(most, high + step), 2 * step
    low, step = min(high, guess) - 1, 1
    # Gallop down until it does not. From here on `holds(high)` is true and `holds(low)` is false, or low is -1.
    while low >= 0 and holds(low):
        high, low, step = low, low - step, 2 * step
    low = max(low, -1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def choose_donors(module: Module, context: PassContext, capacity: int, times: UnitTimes) -> list[Chosen]:
    """Return the recovery choice of every stage, with offloads to donors and the donors' choices around remote buffers.

    `capacity`: bytes of each stage. `times`: unit times of the module's order.
    """
    prospects = [Prospects(stage, Trials(module, context), capacity) for stage in module.stages]
    best = _Choice(module, prospects, times).best()
    return DonorSearch(module, prospects, times).better(best).chosen


@define(eq=False)
class _Choice:
    """Search over common periods for one module."""

    module: Module
    prospects: list[Prospects]
    times: UnitTimes
    offloaded: dict[tuple[int, int], _Offloaded | None] = field(factory=dict)
    """Cache of `offloaded_by`, by stage and index in its front."""
    overhead: float = 1.0
    """Bytes offloaded per byte lacking (at least 1), learned from choices written out."""
    usable: float = 1.0
    """Usable part of the donors' room (at most 1), learned likewise."""

    def best(self) -> Prospect:
        """Return the best of the outcomes written out and of the one without offloads."""
        alone = [each.alone_period for each in self.prospects]
        best = self.outcome(alone, [each.front.chosen(each.alone) for each in self.prospects])
        enough = best.seconds * (1 - WORTH)
        shortest = max(each.periods[-1] for each in self.prospects)
        # Closed forms are cheap, written-out choices are not. So sort candidates by closed form and write out the best
        # few.
        untried = [shortest + (max(alone) - shortest) * number / _PERIODS for number in range(_PERIODS)]
        failed = above = 0.0
        for _ in range(_WRITTEN_OUT):
            candidates = ((self.hoped(period), period) for period in untried if period > above)
            hoped, period = min(candidates, default=(inf, inf))
            if hoped >= min(enough, best.seconds * (1 - WORTH)):
                break
            untried.remove(period)
            found = self.written_out(period)
            if found is None:
                # Too tight: skip ahead. Once a longer period works, periods between it and the failed one are
                # candidates again.
                failed, above = period, period + (max(alone) - period) / _STRIDE
                continue
            above = failed
            if found.seconds < min(enough, best.seconds):
                best = found
        return best

    def outcome(self, periods: list[float], chosen: list[Chosen]) -> Prospect:
        """Return the outcome of a period and a choice for each stage."""
        return Prospect(step_seconds(self.module, periods), chosen, periods)

    def lacks(self, each: Prospects, period: float) -> bool:
        """Tell whether a stage has too few bytes to keep a period on its own."""
        return each.alone_period > period

    def hoped(self, period: float) -> float:
        """Return the seconds of a step with a common period by closed form; infinite if there is too little room."""
        level = self.lending_level(period)
        if level is None:
            return inf
        periods = [
            each.periods[each.choice_for(period)]
            if self.lacks(each, period)
            else max(each.alone_period, each.periods[each.choice_for(level)])
            for each in self.prospects
        ]
        return step_seconds(self.module, periods)

    def lending_level(self, period: float) -> float | None:
        """Return the shortest period of the donors at which their room covers the bytes that others lack.

        None if not even `period` is long enough. A shorter level lets donors recompute less than the common period
        allows.
        """
        lacking = -sum(each.room(period) for each in self.prospects if self.lacks(each, period))
        donors = [each for each in self.prospects if not self.lacks(each, period)]

        def covers(level: float) -> bool:
            return self.usable * sum(max(0, each.room(level)) for each in donors) >= lacking * self.overhead

        if not covers(period):
            return None
        # A donor has more room at a longer period, so `covers` is monotone. `high` always covers.
        low, high = min(each.periods[-1] for each in self.prospects), period
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if covers(middle) else (middle, high)
        return high

    def written_out(self, period: float) -> Prospect | None:
        """Return the outcome of a common period with real lists; None where it does not fit.

        Donors may have less room than estimated. Then their quotas shrink by what was missing, and items are assigned
        anew.
        """
        away: dict[int, _Offloaded] = {}
        for each in self.prospects:
            if self.lacks(each, period):
                offloaded = self.offloaded_by(each, each.choice_for(period))
                if offloaded is None:
                    return None
                away[each.stage.index] = offloaded
        lacking = -sum(self.prospects[index].room(period) for index in away)
        moved = sum(parcel.nbytes * parcel.count for each in away.values() for parcel in each.parcels)
        # Whole items move, and they hold more than a stage lacks: remember by how much for later estimates.
        self.overhead = max(self.overhead, moved / lacking)
        spoilt: Counter[int] = Counter()
        lost = 0
        best: Prospect | None = None
        for _ in range(_ROUNDS):
            housed = self.housed(away, period, spoilt)
            if housed is None:
                break
            counts, left = housed
            chosen = {index: self.prospects[index].shape.chosen(each) for index, each in counts.items()}
            drafts = {index: self.prospects[index].draft(each) for index, each in chosen.items()}
            donors = {
                each.stage.index: DonorChoice.of(each, list(drafts.values()), self.times, period)
                for each in self.prospects
                if each.stage.index not in away
            }
            if all(each.fits for each in donors.values()):
                chosen |= {index: each.chosen for index, each in donors.items()}
                periods = {index: self.prospects[index].trials.period(draft) for index, draft in drafts.items()}
                periods |= {index: each.period for index, each in donors.items()}
                stages = range(len(self.prospects))
                found = self.outcome([periods[at] for at in stages], [chosen[at] for at in stages])
                best = found if best is None or found.seconds < best.seconds else best
            # A donor with missing bytes also gets no more of the room that it seemed to have left.
            missing = {index: each.missing + max(0, left[index]) for index, each in donors.items() if each.missing}
            if not missing:
                break
            spoilt.update(missing)
            lost += sum(each.missing for each in donors.values())
        if best is None:
            room = sum(max(0, each.room(period)) for each in self.prospects if each.stage.index not in away)
            # No assignment fitted: trust the estimated room less from now on.
            self.usable = min(self.usable, 1 - lost / room)
        return best

    def offloaded_by(self, each: Prospects, index: int) -> _Offloaded | None:
        """Return the fewest items that a stage must offload under a choice of its front.

        None if offloading all is too few.
        """
        key = each.stage.index, index
        if key not in self.offloaded:
            self.offloaded[key] = self._offloaded_by(each, each.front.counts(index))
        return self.offloaded[key]

    def _offloaded_by(self, each: Prospects, counts: list[dict[LayerChoice, int]]) -> _Offloaded | None:
        parcels = self.parcels(each, counts)
        items = sum(parcel.count for parcel in parcels)
        # The number of items does not depend on the donor, so any other stage will do here.
        anyone = next((other.stage.index for other in self.prospects if other is not each), each.stage.index)

        @cache
        def draft(count: int) -> Stage:
            homes = [(parcel, {anyone: parcel.count}) for parcel in _first(parcels, count)]
            return each.draft(each.shape.chosen(_housed(counts, homes)))

        # Live bytes are cheap to check and give a lower bound; then placements add items until the arena fits.
        count = smallest_true_near(
            each.lacking(counts) // parcels[0].nbytes, items, lambda count: each.has_live_bytes(draft(count))
        )
        while count <= items and (excess := each.excess(draft(count))):
            count += max(1, excess // parcels[0].nbytes)
        if not 0 < count <= items:
            return None
        ops = [op for op in draft(count).ops if type(op) is PeerOffload]
        seconds = sum(each.trials.op_seconds(each.stage, op) for op in ops) / count
        return _Offloaded(counts, _first(parcels, count), seconds)

    def parcels(self, each: Prospects, counts: list[dict[LayerChoice, int]]) -> list[_Parcel]:
        """Return all items of a stage as parcels, those with most bytes first."""
        plan = self.module.plan
        checkpoint = checkpoint_bytes(self.module.model, slice_plan(plan, typical_slice(plan)))
        sizes = [{option.choice: option.nbytes for option in options} for options in each.shape.options]
        found = [
            _Parcel(kind, choice, count, sizes[kind][choice] + checkpoint)
            for kind, taken in enumerate(counts)
            for choice, count in taken.items()
        ]
        return sorted(found, key=lambda parcel: -parcel.nbytes)

    def housed(
        self, away: Mapping[int, _Offloaded], period: float, spoilt: Mapping[int, int]
    ) -> tuple[dict[int, list[dict[LayerChoice, int]]], dict[int, int]] | None:
        """Assign offloaded items to donors.

        Returns the counts of borrowing stages with donors filled in, and the bytes that each donor has left; None where
        links or room are too small. Stages meet in stage order, so that each deals with few others. Donors first give
        up the bytes of the level that suffices together, and only then those of the full period. `spoilt`: bytes of
        donors that proved unusable.
        """
        level = self.lending_level(period)
        free = {each.stage.index: period - each.other_messages for each in self.prospects}
        if level is None or any(each.seconds * _items(each.parcels) > free[stage] for stage, each in away.items()):
            return None
        donors = [each for each in self.prospects if each.stage.index not in away]
        quotas = {
            each.stage.index: _Quota(each.stage.index, -spoilt[each.stage.index], free[each.stage.index])
            for each in donors
        }
        homes: dict[int, list[tuple[_Parcel, dict[int, int]]]] = {index: [] for index in away}
        waiting = {index: list(offloaded.parcels) for index, offloaded in away.items()}
        before = dict.fromkeys(quotas, 0)
        # The first round offers the room at `level`; the second adds the room that `period` allows, for items left
        # over.
        for limit in dict.fromkeys((level, period)):
            for each in donors:
                index = each.stage.index
                quotas[index].nbytes += each.room(limit) - before[index]
                before[index] = each.room(limit)
            for index, parcels in waiting.items():
                waiting[index] = []
                for parcel in parcels:
                    taken = _homes(parcel, quotas.values(), away[index].seconds)
                    homes[index].append((parcel, taken))
                    stays = parcel.count - sum(taken.values())
                    if stays:
                        waiting[index].append(evolve(parcel, count=stays))
        if any(waiting.values()):
            return None
        left = {index: quota.nbytes for index, quota in quotas.items()}
        return {index: _housed(away[index].counts, each) for index, each in homes.items()}, left


def _items(parcels: Sequence[_Parcel]) -> int:
    return sum(parcel.count for parcel in parcels)


def _first(parcels: Sequence[_Parcel], count: int) -> list[_Parcel]:
    """Return the first `count` items of some parcels."""
    found = []
    for parcel in parcels:
        taken = min(count, parcel.count)
        if taken:
            found.append(evolve(parcel, count=taken))
        count -= taken
    return found


def _homes(parcel: _Parcel, quotas: Iterable[_Quota], seconds: float) -> dict[int, int]:
    """Return how many items of a parcel each donor takes, and take them off the quotas."""
    homes: dict[int, int] = {}
    left = parcel
    for quota in quotas:
        count = quota.takes(left, seconds) if left.count else 0
        if count:
            quota.take(left, count, seconds)
            homes[quota.donor] = homes.get(quota.donor, 0) + count
            left = evolve(left, count=left.count - count)
    return homes


def _housed(
    counts: Sequence[Mapping[LayerChoice, int]], homes: Sequence[tuple[_Parcel, Mapping[int, int]]]
) -> list[dict[LayerChoice, int]]:
    """Return the counts of each kind with offloaded items first: these get the first layers, which wait longest."""
    away: list[dict[LayerChoice, int]] = [{} for _ in counts]
    left = [dict(taken) for taken in counts]
    for parcel, donors in homes:
        for donor, count in donors.items():
            home = evolve(parcel.choice, home=Donor(donor))
            away[parcel.kind][home] = away[parcel.kind].get(home, 0) + count
            # An offloaded item keeps its choice and changes only its home.
            left[parcel.kind][parcel.choice] -= count
    return [
        gone | {choice: count for choice, count in stays.items() if count}
        for gone, stays in zip(away, left, strict=True)
    ]

"""Who keeps how much with whom: the choice of `recompute{policy=auto store=peer}` for all stages of a pipeline together.

A step takes the longest period of a stage for each micro-batch, so stages with a shorter one recover for nothing when they keep less: their
bytes are room that others may borrow. For a period that all stages are to keep, each needs so many bytes (the cheapest choice of what is kept that
recovers little enough) and has so many: some lack bytes, others have room. A period can be had if room covers what is lacking and the links of
both can move it meanwhile. Seconds and bytes of this are those of each stage's front of choices, of which one was placed and timed exactly.

The best of some periods, by their closed forms, is written out: borrowers evict as few layers of micro-batches as make them fit, those go to
lenders by stage order, and lenders choose anew beside their guests. Where what comes out is longer than was hoped, longer periods are tried. What
closed forms cannot see, where a stage has few items, `passes/recovery/lender_search.py` looks for beside that.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from math import inf
from typing import TYPE_CHECKING

from attrs import define, evolve, field, frozen

from ratrain.passes.memory.trial import Trials
from ratrain.passes.recovery.guests import UnitTimes
from ratrain.passes.recovery.kept_bytes import checkpoint_bytes
from ratrain.passes.recovery.lender_search import LenderSearch
from ratrain.passes.recovery.prospects import WORTH, Beside, Prospect, Prospects, step_seconds
from ratrain.passes.recovery.recompute_choice import Chosen, typical_slice
from ratrain.passes.recovery.rewriting import LayerChoice, Lender
from ratrain.ratrain_ir.config.plan import slice_plan
from ratrain.ratrain_ir.module import Module, Stage
from ratrain.ratrain_ir.ops.messages import Evict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ratrain.passes.pass_base import PassContext

_PERIODS = 32
"""Periods between the shortest and that without guests whose closed forms are compared."""
_WRITTEN_OUT = 6
"""The most that are written out."""
_STRIDE = 8
"""Of what is left to the period without guests, the part by which one is longer that is tried after one that cannot be kept; then those between."""
_HALVINGS = 20
_ROUNDS = 4
"""Times that what goes where is changed as lenders turn out to have less room than was thought."""


@frozen
class _Parcel:
    """Items of a stage that may go away together: what a choice keeps of them."""

    kind: int
    choice: LayerChoice
    count: int
    nbytes: int
    """of one"""


@frozen(eq=False)
class _Evicted:
    """What a stage has to keep elsewhere."""

    counts: list[dict[LayerChoice, int]]
    """of each kind, how many items take which choice"""
    parcels: list[_Parcel]
    seconds: float
    """in which a link moves what passes of one item in a step, one way"""


@define
class _Quota:
    """What a lender has left to lend."""

    lender: int
    nbytes: int
    seconds: float
    """that its link is free in a step"""

    def takes(self, parcel: _Parcel, seconds: float) -> int:
        """How many items of a parcel it takes."""
        by_seconds = int(self.seconds / seconds) if seconds else parcel.count
        return max(0, min(parcel.count, self.nbytes // parcel.nbytes, by_seconds))

    def take(self, parcel: _Parcel, count: int, seconds: float) -> None:
        """Take so many of a parcel in."""
        self.nbytes -= parcel.nbytes * count
        self.seconds -= seconds * count


def least_beside(guess: int, most: int, holds: Callable[[int], bool]) -> int:
    """The least number from 0 to `most` of which something holds that goes on holding, near a guess; `most` + 1 where none is."""
    high = guess = min(guess, most)
    step = 1
    while not holds(high):
        if high == most:
            return most + 1
        high, step = min(most, high + step), 2 * step
    low, step = min(high, guess) - 1, 1
    while low >= 0 and holds(low):
        high, low, step = low, low - step, 2 * step
    low = max(low, -1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def choose_lenders(module: Module, context: PassContext, capacity: int, times: UnitTimes) -> list[Chosen]:
    """The choice of every stage; of a lender beside the guests that the others' choices send it."""
    prospects = [Prospects(stage, Trials(module, context), capacity) for stage in module.stages]
    best = _Choice(module, prospects, times).best()
    return LenderSearch(module, prospects, times).better(best).chosen


@define(eq=False)
class _Choice:
    module: Module
    prospects: list[Prospects]
    times: UnitTimes
    evicted: dict[tuple[int, int], _Evicted | None] = field(factory=dict)
    """by stage and choice of its front"""
    overhead: float = 1.0
    """bytes that borrowers evict for one that they lack; seen where choices were written out"""
    usable: float = 1.0
    """of the bytes that lenders have; seen likewise"""

    def best(self) -> Prospect:
        """The best of the outcomes that are written out, and of the one in which nothing moves."""
        alone = [each.alone_period for each in self.prospects]
        best = self.outcome(alone, [each.front.chosen(each.alone) for each in self.prospects])
        enough = best.seconds * (1 - WORTH)
        shortest = max(each.periods[-1] for each in self.prospects)
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
                failed, above = period, period + (max(alone) - period) / _STRIDE
                continue
            above = failed
            if found.seconds < min(enough, best.seconds):
                best = found
        return best

    def outcome(self, periods: list[float], chosen: list[Chosen]) -> Prospect:
        """That of a period and a choice of each stage."""
        return Prospect(step_seconds(self.module, periods), chosen, periods)

    def lacks(self, each: Prospects, period: float) -> bool:
        """Whether a stage has too few bytes to keep a period."""
        return each.alone_period > period

    def hoped(self, period: float) -> float:
        """What a step would take with a period, by closed forms; infinite where there is too little room."""
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
        """The shortest period up to which lenders have to go so that their room covers what others lack; None where `period` is not enough."""
        lacking = -sum(each.room(period) for each in self.prospects if self.lacks(each, period))
        lenders = [each for each in self.prospects if not self.lacks(each, period)]

        def covers(level: float) -> bool:
            return self.usable * sum(max(0, each.room(level)) for each in lenders) >= lacking * self.overhead

        if not covers(period):
            return None
        low, high = min(each.periods[-1] for each in self.prospects), period
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if covers(middle) else (middle, high)
        return high

    def written_out(self, period: float) -> Prospect | None:
        """Choices for a period, and how long a step they make; None where they do not fit."""
        away: dict[int, _Evicted] = {}
        for each in self.prospects:
            if self.lacks(each, period):
                evicted = self.evicted_by(each, each.choice_for(period))
                if evicted is None:
                    return None
                away[each.stage.index] = evicted
        lacking = -sum(self.prospects[index].room(period) for index in away)
        moved = sum(parcel.nbytes * parcel.count for each in away.values() for parcel in each.parcels)
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
            beside = {
                each.stage.index: Beside.of(each, list(drafts.values()), self.times, period)
                for each in self.prospects
                if each.stage.index not in away
            }
            if all(each.fits for each in beside.values()):
                chosen |= {index: each.chosen for index, each in beside.items()}
                periods = {index: self.prospects[index].trials.period(draft) for index, draft in drafts.items()}
                periods |= {index: each.period for index, each in beside.items()}
                stages = range(len(self.prospects))
                found = self.outcome([periods[at] for at in stages], [chosen[at] for at in stages])
                best = found if best is None or found.seconds < best.seconds else best
            missing = {index: each.missing + max(0, left[index]) for index, each in beside.items() if each.missing}
            if not missing:
                break
            spoilt.update(missing)
            lost += sum(each.missing for each in beside.values())
        if best is None:
            room = sum(max(0, each.room(period)) for each in self.prospects if each.stage.index not in away)
            self.usable = min(self.usable, 1 - lost / room)
        return best

    def evicted_by(self, each: Prospects, index: int) -> _Evicted | None:
        """The fewest items that a stage must keep elsewhere under a choice of its front; None where not even all are enough."""
        key = each.stage.index, index
        if key not in self.evicted:
            self.evicted[key] = self._evicted_by(each, each.front.counts(index))
        return self.evicted[key]

    def _evicted_by(self, each: Prospects, counts: list[dict[LayerChoice, int]]) -> _Evicted | None:
        parcels = self.parcels(each, counts)
        items = sum(parcel.count for parcel in parcels)
        anyone = next((other.stage.index for other in self.prospects if other is not each), each.stage.index)

        @cache
        def draft(count: int) -> Stage:
            homes = [(parcel, {anyone: parcel.count}) for parcel in _first(parcels, count)]
            return each.draft(each.shape.chosen(_housed(counts, homes)))

        count = least_beside(
            each.lacking(counts) // parcels[0].nbytes, items, lambda count: each.has_live_bytes(draft(count))
        )
        while count <= items and (excess := each.excess(draft(count))):
            count += max(1, excess // parcels[0].nbytes)
        if not 0 < count <= items:
            return None
        ops = [op for op in draft(count).ops if type(op) is Evict]
        seconds = sum(each.trials.op_seconds(each.stage, op) for op in ops) / count
        return _Evicted(counts, _first(parcels, count), seconds)

    def parcels(self, each: Prospects, counts: list[dict[LayerChoice, int]]) -> list[_Parcel]:
        """All items of a stage, those that take most bytes first."""
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
        self, away: Mapping[int, _Evicted], period: float, spoilt: Mapping[int, int]
    ) -> tuple[dict[int, list[dict[LayerChoice, int]]], dict[int, int]] | None:
        """The counts of those that borrow, with who keeps what for them, and bytes that lenders have left; None where links or room do not do.

        Borrowers and lenders meet in the order of stages, so that each has few of the other. Lenders give up no more than all have to, if that is
        enough. `spoilt`: bytes of lenders of which no use could be made.
        """
        level = self.lending_level(period)
        free = {each.stage.index: period - each.other_messages for each in self.prospects}
        if level is None or any(each.seconds * _items(each.parcels) > free[stage] for stage, each in away.items()):
            return None
        lenders = [each for each in self.prospects if each.stage.index not in away]
        quotas = {
            each.stage.index: _Quota(each.stage.index, -spoilt[each.stage.index], free[each.stage.index])
            for each in lenders
        }
        homes: dict[int, list[tuple[_Parcel, dict[int, int]]]] = {index: [] for index in away}
        waiting = {index: list(evicted.parcels) for index, evicted in away.items()}
        before = dict.fromkeys(quotas, 0)
        for limit in dict.fromkeys((level, period)):
            for each in lenders:
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
    """So many items of some parcels, the first ones."""
    found = []
    for parcel in parcels:
        taken = min(count, parcel.count)
        if taken:
            found.append(evolve(parcel, count=taken))
        count -= taken
    return found


def _homes(parcel: _Parcel, quotas: Iterable[_Quota], seconds: float) -> dict[int, int]:
    """How many items of a parcel each lender takes."""
    homes: dict[int, int] = {}
    left = parcel
    for quota in quotas:
        count = quota.takes(left, seconds) if left.count else 0
        if count:
            quota.take(left, count, seconds)
            homes[quota.lender] = homes.get(quota.lender, 0) + count
            left = evolve(left, count=left.count - count)
    return homes


def _housed(
    counts: Sequence[Mapping[LayerChoice, int]], homes: Sequence[tuple[_Parcel, Mapping[int, int]]]
) -> list[dict[LayerChoice, int]]:
    """The counts of each kind with items at lenders, these first: they are of the first layers, which wait longest."""
    away: list[dict[LayerChoice, int]] = [{} for _ in counts]
    left = [dict(taken) for taken in counts]
    for parcel, lenders in homes:
        for lender, count in lenders.items():
            home = evolve(parcel.choice, home=Lender(lender))
            away[parcel.kind][home] = away[parcel.kind].get(home, 0) + count
            left[parcel.kind][parcel.choice] -= count
    return [
        gone | {choice: count for choice, count in stays.items() if count}
        for gone, stays in zip(away, left, strict=True)
    ]

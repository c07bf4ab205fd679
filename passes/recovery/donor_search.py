"""Local search over offloads to donor stages, with every candidate written out as real lists.

It improves the result of `passes/recovery/donor_choice.py` where stages have few items, so that one more or less
decides. A candidate says how many items (a layer of one micro-batch) of each stage are offloaded, with which choice and
to which donor. The rest gets the cheapest choice that fits, on donors around their remote buffers.

    start:  @0: 4 items to @3                      period of @0 is the longest
    try:    @0: none | 3 | 5 to @3 | 1..8 to @2    take each one that shortens the step, go on with the next stage

Starts are the given choice, the one without offloads, and near misses. In each the stage with the longest period is
changed first, until no change gains or the work is used up. Work is counted in ops of written lists, so the same module
gets the same choice on any machine. The result is never slower than the given one, by the same estimate.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING

from attrs import define, evolve, field, frozen

from ratrain.passes.recovery.layer_choice import Donor, LayerChoice
from ratrain.passes.recovery.peer_offload import UnitTimes
from ratrain.passes.recovery.prospects import WORTH, DonorChoice, Prospect, Prospects, step_seconds
from ratrain.passes.recovery.recompute_choice import FEW, Chosen, Front
from ratrain.ratrain_ir.config.types import Home
from ratrain.ratrain_ir.module import Module, Stage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_WORK = 8_000
"""Ops of the lists written out, over all candidates."""
_NEAR = 0.03
"""Relative excess of a step that makes a candidate a near miss.

A second change may make it the best: two stages that share a link must change together.
"""
_NEAREST = 8
"""Near misses from which the search starts again."""

_Items = tuple[tuple[tuple[LayerChoice, int], ...], ...]
"""Offloaded items of a stage: by layer kind, how many take each choice."""
_Away = dict[int, _Items]
"""By borrowing stage: its offloaded items."""


@frozen(eq=False)
class _Borrowing:
    """Stage with some of its items offloaded."""

    chosen: Chosen
    draft: Stage
    period: float
    """Infinite where it does not fit."""


@define(eq=False)
class DonorSearch:
    """Search for one module."""

    module: Module
    prospects: Sequence[Prospects]
    times: UnitTimes
    work: int = field(default=_WORK, init=False)
    _borrowing: dict[tuple[int, _Items], _Borrowing] = field(factory=dict, init=False)
    _lending: dict[object, DonorChoice] = field(factory=dict, init=False)
    _near: dict[object, tuple[Prospect, _Away]] = field(factory=dict, init=False)
    """Candidates that were tried and came near the best at that time."""

    def better(self, found: Prospect) -> Prospect:
        """Return the best outcome found from three starts: the given one, the one without offloads, and near misses."""
        away = {index: items for index, chosen in enumerate(found.chosen) if any(items := _items_away(chosen))}
        best = self._descend(found, found, away)
        best = self._descend(self._nothing, best, {})
        for start, around in sorted(self._near.values(), key=lambda each: each[0].seconds)[:_NEAREST]:
            best = self._descend(start, best, around)
        return best

    @cached_property
    def _nothing(self) -> Prospect:
        """Outcome in which no stage offloads."""
        periods = [each.alone_period for each in self.prospects]
        chosen = [each.front.chosen(each.alone) for each in self.prospects]
        return Prospect(step_seconds(self.module, periods), chosen, periods)

    def _descend(self, start: Prospect, best: Prospect, away: _Away) -> Prospect:
        """Change one stage after another, starting at `start`, as long as the result is better than `best`.

        Return the best.
        """
        now, gained = start, True
        while gained:
            gained = False
            for index in sorted(range(len(self.prospects)), key=lambda index: -now.periods[index]):
                if not self._may_gain(now, index, best.seconds):
                    continue
                for items in self._changes(away, index):
                    changed = {**away, index: items} if any(items) else _without(away, index)
                    tried = self._tried(changed, best.seconds)
                    if tried is not None and self._gains(tried.periods, best.seconds):
                        # Take the first change that gains, and go on from there with the same stage's other changes.
                        best = now = tried
                        away, gained = changed, True
        return best

    def _may_gain(self, now: Prospect, index: int, seconds: float) -> bool:
        """Tell whether a change of a stage could make a shorter step than `seconds`.

        Optimistic bound: the stage keeps everything for free, and donors have no remote buffers.
        """
        periods = list(map(min, now.periods, self._nothing.periods))
        periods[index] = min(periods[index], self.prospects[index].periods[-1])
        return self._gains(periods, seconds)

    def _gains(self, periods: Sequence[float], seconds: float) -> bool:
        return step_seconds(self.module, periods) < seconds * (1 - WORTH)

    def _changes(self, away: _Away, index: int) -> Iterator[_Items]:
        """Yield other sets of items that a stage may offload.

        None at all; one more or less of a choice; and shares of all items with one choice to one donor.
        """
        # A donor does not borrow: its own offloads would compete with the buffers that it lends.
        if any(choice.home == Donor(index) for items in away.values() for kind in items for choice, _ in kind):
            return
        shape = self.prospects[index].shape
        mine = away.get(index, tuple(() for _ in shape.kinds))
        if any(mine):
            yield tuple(() for _ in shape.kinds)
        for kind, taken in enumerate(mine):
            left = shape.in_flight * len(shape.kinds[kind]) - sum(count for _, count in taken)
            for choice, count in taken:
                for more in (1, -1) if left else (-1,):
                    changed = {**dict(taken), choice: count + more}
                    kept = tuple((choice, count) for choice, count in changed.items() if count)
                    yield (*mine[:kind], kept, *mine[kind + 1 :])
        shares = min(FEW, shape.items)
        # The first option keeps least, and offloading it gains least; start with those that keep most.
        for option in reversed(shape.options[0][1:]):
            for donor in range(len(self.prospects)):
                if donor == index or donor in away:
                    continue
                choice = evolve(option.choice, home=Donor(donor))
                for share in range(1, shares + 1):
                    yield _items(shape.stored(shape.items * share // shares, choice))

    def _tried(self, away: _Away, seconds: float) -> Prospect | None:
        """Return the outcome of offloaded items.

        None if the step is clearly longer than `seconds`, if something does not fit, or if no work is left.
        """
        near = seconds * (1 + _NEAR)
        periods, chosen = list(self._nothing.periods), list(self._nothing.chosen)
        drafts = []
        for index, items in away.items():
            borrowing = self._borrower(index, items)
            if borrowing is None:
                return None
            periods[index], chosen[index] = borrowing.period, borrowing.chosen
            drafts.append(borrowing.draft)
        homes = {choice.home for items in away.values() for kind in items for choice, _ in kind}
        # Borrowers are written first: a donor's list needs their `peer_offload` ops. Stop as soon as the periods so far
        # are too long.
        for index in sorted(home.stage for home in homes if isinstance(home, Donor)):
            if step_seconds(self.module, periods) > near:
                return None
            donor = self._donor(index, away, drafts)
            if donor is None or not donor.fits:
                return None
            periods[index], chosen[index] = donor.period, donor.chosen
        found = Prospect(step_seconds(self.module, periods), chosen, periods)
        if found.seconds > near:
            return None
        self._near[_key(away)] = found, away
        return found

    def _borrower(self, index: int, items: _Items) -> _Borrowing | None:
        key = index, items
        if key not in self._borrowing:
            each = self.prospects[index]
            if not self._afford(each.stage):
                return None
            front = Front.of(each.shape, [dict(kind) for kind in items])
            at = front.best_within(each.capacity, each.rewriting, each.trials)
            chosen = front.chosen(at)
            draft = each.draft(chosen)
            self._borrowing[key] = _Borrowing(chosen, draft, each.trials.period(draft) if each.fits(draft) else inf)
        return self._borrowing[key]

    def _donor(self, index: int, away: _Away, drafts: Sequence[Stage]) -> DonorChoice | None:
        key = index, _key(away)
        if key not in self._lending:
            if not self._afford(self.prospects[index].stage):
                return None
            self._lending[key] = DonorChoice.of(self.prospects[index], drafts, self.times, inf)
        return self._lending[key]

    def _afford(self, stage: Stage) -> bool:
        """Spend the work of writing a stage's list; False, and nothing spent, if too little is left."""
        if len(stage.ops) > self.work:
            return False
        self.work -= len(stage.ops)
        return True


def _items_away(chosen: Chosen) -> _Items:
    return _items(
        [{choice: n for choice, n in kind.counts.items() if choice.home is not Home.DDR} for kind in chosen.kinds]
    )


def _items(counts: Sequence[Mapping[LayerChoice, int]]) -> _Items:
    return tuple(tuple((choice, count) for choice, count in taken.items() if count) for taken in counts)


def _without(away: _Away, index: int) -> _Away:
    return {borrower: items for borrower, items in away.items() if borrower != index}


def _key(away: _Away) -> object:
    return tuple(sorted(away.items()))  # stage indices are unique, so items are never compared

"""Numbers beside those of `passes/recovery/lender_choice.py`, each written out: where stages have few items, one more or less decides.

What is searched are the items that go away, of each stage so many of one choice to one lender; what stays is the cheapest choice that fits, of
lenders beside their guests. From what was chosen, from nothing, and from what came near the best, the stage is changed whose change gains, that with
the longest period first, until none gains or the work is used up. Work is counted in ops of the lists that are written, so the same module gets the same choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING

from attrs import define, evolve, field, frozen

from ratrain.passes.recovery.guests import UnitTimes
from ratrain.passes.recovery.prospects import WORTH, Beside, Prospect, Prospects, step_seconds
from ratrain.passes.recovery.recompute_choice import FEW, Chosen, Front
from ratrain.passes.recovery.rewriting import LayerChoice, Lender
from ratrain.ratrain_ir.config.types import Home
from ratrain.ratrain_ir.module import Module, Stage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_WORK = 8_000
"""Ops of the lists that are written out, of all choices that are tried."""
_NEAR = 0.03
"""By how much more a step may take for a second change to make it the best: two stages that use one link change together."""
_NEAREST = 8
"""Of those, how many a second change is tried with."""

_Items = tuple[tuple[tuple[LayerChoice, int], ...], ...]
"""Items of a stage that go away: of each kind, how many take which choice."""
_Away = dict[int, _Items]
"""Those of each stage that borrows."""


@frozen(eq=False)
class _Borrowing:
    """A stage some of whose items are away."""

    chosen: Chosen
    draft: Stage
    period: float
    """infinite where it does not fit"""


@define(eq=False)
class LenderSearch:
    """The search for one module."""

    module: Module
    prospects: Sequence[Prospects]
    times: UnitTimes
    work: int = field(default=_WORK, init=False)
    _borrowing: dict[tuple[int, _Items], _Borrowing] = field(factory=dict, init=False)
    _lending: dict[object, Beside] = field(factory=dict, init=False)
    _near: dict[object, tuple[Prospect, _Away]] = field(factory=dict, init=False)
    """what came of all that was tried and was not much longer than the best then"""

    def better(self, found: Prospect) -> Prospect:
        """The best outcome from one, from that in which nothing moves, and from those that came near the best."""
        away = {index: items for index, chosen in enumerate(found.chosen) if any(items := _items_away(chosen))}
        best = self._descend(found, found, away)
        best = self._descend(self._nothing, best, {})
        for start, around in sorted(self._near.values(), key=lambda each: each[0].seconds)[:_NEAREST]:
            best = self._descend(start, best, around)
        return best

    @cached_property
    def _nothing(self) -> Prospect:
        """What comes of each stage by itself."""
        periods = [each.alone_period for each in self.prospects]
        chosen = [each.front.chosen(each.alone) for each in self.prospects]
        return Prospect(step_seconds(self.module, periods), chosen, periods)

    def _descend(self, start: Prospect, best: Prospect, away: _Away) -> Prospect:
        """Change one stage after another of a start while that gives something better than the best."""
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
                        best = now = tried
                        away, gained = changed, True
        return best

    def _may_gain(self, now: Prospect, index: int, seconds: float) -> bool:
        """Whether a stage that kept everything for nothing, beside lenders that have no guests, would make a shorter step."""
        periods = list(map(min, now.periods, self._nothing.periods))
        periods[index] = min(periods[index], self.prospects[index].periods[-1])
        return self._gains(periods, seconds)

    def _gains(self, periods: Sequence[float], seconds: float) -> bool:
        return step_seconds(self.module, periods) < seconds * (1 - WORTH)

    def _changes(self, away: _Away, index: int) -> Iterator[_Items]:
        """Other items of a stage that may go away: none, one more or less of those that do, and so many of one choice to one lender."""
        if any(choice.home == Lender(index) for items in away.values() for kind in items for choice, _ in kind):
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
        for option in reversed(shape.options[0][1:]):
            for lender in range(len(self.prospects)):
                if lender == index or lender in away:
                    continue
                choice = evolve(option.choice, home=Lender(lender))
                for share in range(1, shares + 1):
                    yield _items(shape.stored(shape.items * share // shares, choice))

    def _tried(self, away: _Away, seconds: float) -> Prospect | None:
        """What comes of some items that go away; None where that is clearly longer than so many seconds, or without work left."""
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
        for index in sorted(home.stage for home in homes if isinstance(home, Lender)):
            if step_seconds(self.module, periods) > near:
                return None
            beside = self._lender(index, away, drafts)
            if beside is None or not beside.fits:
                return None
            periods[index], chosen[index] = beside.period, beside.chosen
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

    def _lender(self, index: int, away: _Away, drafts: Sequence[Stage]) -> Beside | None:
        key = index, _key(away)
        if key not in self._lending:
            if not self._afford(self.prospects[index].stage):
                return None
            self._lending[key] = Beside.of(self.prospects[index], drafts, self.times, inf)
        return self._lending[key]

    def _afford(self, stage: Stage) -> bool:
        """Spend what writing a list out takes, if so much is left."""
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
    return tuple(sorted(away.items()))  # a stage is there once, so items are not compared

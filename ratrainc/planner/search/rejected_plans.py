"""Rejected plans: why the best plan of another family, number of stages or of ranks, or state lost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from attrs import asdict, frozen

from ratrain.ratrain_ir.config.plan_summary import state_text
from ratrain.ratrainc.console.console import seconds_text, size_text
from ratrain.ratrainc.planner.search.answer import Candidate, RejectedPlan
from ratrain.ratrainc.planner.search.mechanisms import Mechanisms, mechanisms
from ratrain.ratrainc.planner.search.plan_request import PlanRequest
from ratrain.ratrainc.planner.space.objective import TIME, WORST, Cost

if TYPE_CHECKING:
    from ratrain.ratrainc.planner.search.family_spaces import FamilySpace
    from ratrain.ratrainc.planner.space.space import Shape

_SHOWN = 20
"""Rows without `explain`."""
_TRIED = 128
"""Shapes whose cuts are searched for the reason of one row."""
_SEEN = 5e-4
"""Share of the step below which a mechanism is not mentioned."""
WAITS = "waits"
"""Part of a difference between simulated steps that no mechanism's closed form has."""
NOT_BOUNDED = "waits of the best, and what the bound leaves out"
"""Remainder of a difference between the best plan's simulated step and another plan's bound."""


def rejected_plans(
    request: PlanRequest,
    spaces: Sequence[FamilySpace],
    best: Candidate,
    fitting: Sequence[Candidate] = (),
    refused: Sequence[Candidate] = (),
) -> list[RejectedPlan]:
    """Return rows for other families; then, of the best one's, for other stages, ranks and ZeRO levels.

    `fitting` and `refused` are the plans that were evaluated. Numbers of stages are the best plan's neighbours and
    powers of two; levels are those that occur with as many stages as the best. Rows of other tensor-parallel, context
    or expert ranks say by mechanism what makes them slower; with `explain` all do.
    """
    own = next(space for space in spaces if space.family.name == best.family)
    reference = mechanisms(own, best.shape)
    explain = request.explain
    rows = _Rows(request, best, fitting, refused)

    def row(name: str, space: FamilySpace, shapes: Sequence[Shape], *, explained: bool = explain) -> RejectedPlan:
        return rows.row(name, space, shapes, reference if explained else None)

    lost = [row(space.family.name, space, space.shapes) for space in spaces if space is not own]
    near = {best.shape.pp - 1, best.shape.pp + 1, *(1 << power for power in range(12))} - {best.shape.pp}
    stages, peers = {shape.pp for shape in own.shapes}, {shape.tp for shape in own.shapes}
    lost += [row(f"P{pp}", own, [s for s in own.shapes if s.pp == pp]) for pp in sorted(stages & near)]
    others = sorted(peers - {best.shape.tp})
    lost += [row(f"T{tp}", own, [s for s in own.shapes if s.tp == tp], explained=True) for tp in others]
    for cp in sorted({shape.cp for shape in own.shapes} - {best.shape.cp}):
        lost.append(row(f"C{cp}", own, [s for s in own.shapes if s.cp == cp], explained=True))
    lost += [row(name, own, some, explained=True) for name, some in _of_context_exchanges(own.shapes, best.shape)]
    lost += [row(name, own, some, explained=True) for name, some in _of_expert_ranks(own.shapes, best.shape.ep)]
    as_deep = [shape for shape in own.shapes if shape.pp == best.shape.pp]
    for mode in sorted({_mode(shape) for shape in as_deep} - {_mode(best.shape)}):
        shapes = [shape for shape in as_deep if _mode(shape) == mode]
        lost.append(row(f"P{best.shape.pp} {state_text(shapes[0])}", own, shapes))
    return lost if explain else lost[:_SHOWN]


def _of_context_exchanges(shapes: Sequence[Shape], best: Shape) -> Iterator[tuple[str, list[Shape]]]:
    """Yield the shapes with as many context ranks as the best plan that exchange otherwise, by name."""
    if best.cp == 1:
        return
    as_many = [shape for shape in shapes if shape.cp == best.cp]
    for what in sorted({(shape.exchange, shape.groups) for shape in as_many} - {(best.exchange, best.groups)}):
        of, groups = what
        name = f"C{best.cp} with {of}" + (f" in {groups} groups" if groups > 1 else "")
        yield name, [shape for shape in as_many if (shape.exchange, shape.groups) == what]


def _of_expert_ranks(shapes: Sequence[Shape], own: int) -> Iterator[tuple[str, list[Shape]]]:
    """Yield the shapes without expert ranks, and those with other numbers than the best plan's, by name."""
    others = sorted({shape.ep for shape in shapes} - {1, own})
    if own > 1 and any(shape.ep == 1 for shape in shapes):
        yield "E1", [shape for shape in shapes if shape.ep == 1]
    if others:
        name = f"E{others[0]}" + (f" to E{others[-1]}" if len(others) > 1 else "")
        yield name, [shape for shape in shapes if shape.ep in others]


def _mode(shape: Shape) -> tuple[int, str, int, int, int]:
    ends = -1 if shape.ends is None else shape.ends
    return shape.zero, shape.reduce, ends, shape.shard_group or 0, shape.view_group or 0


@frozen
class _Rows:
    """Reasons why plans lost against the best one."""

    request: PlanRequest
    best: Candidate
    fitting: Sequence[Candidate]
    refused: Sequence[Candidate]

    def row(self, name: str, space: FamilySpace, shapes: Sequence[Shape], reference: Mechanisms | None) -> RejectedPlan:
        """Return the row of some shapes of a space, with the mechanisms that differ from `reference`, if given."""
        reason, example, seconds, simulated = self.reason(space, shapes)
        if example is None or reference is None or seconds is None:
            return RejectedPlan(name, reason)
        more = asdict(mechanisms(space, example).over(reference))
        least = _SEEN * self.best.seconds
        difference = seconds - self.best.seconds
        # what closed forms do not have: of a simulated step its waits, of a bound also what the bound leaves out
        rest = WAITS if simulated else NOT_BOUNDED
        shown = {each: value for each, value in more.items() if abs(value) >= least}
        left = difference - sum(shown.values())
        parts = shown | ({rest: left} if abs(left) >= least else {})
        text = ", ".join(f"{each.replace('_', ' ')} {_signed(value)}" for each, value in parts.items())
        text = f"{_signed(difference)}: {text}" if text else "no mechanism makes a difference"
        rounded = difference - sum(more.values())
        return RejectedPlan(name, f"{reason}; {text}", more | {rest: rounded}, difference)

    def reason(self, space: FamilySpace, shapes: Sequence[Shape]) -> tuple[str, Shape | None, float | None, bool]:
        """Return why no plan of some shapes won, and the shape that came nearest if it has any.

        With it come its seconds, and True if they were simulated, False if they are a bound.
        """
        # evaluated plans first; else the least bound of cuts; else the shape that lacks fewest bytes
        members, name, objective = set(shapes), space.family.name, self.request.objective
        tried = [c for c in self.fitting if c.shape in members and c.family == name]
        if tried:
            nearest = min(tried, key=lambda c: c.cost(objective))
            how = "simulated" if nearest.is_exact else "simulated, folded"
            worse, taken = self.worse(nearest.cost(objective)), seconds_text(nearest.seconds)
            text = f"{worse}: {taken} {how} ({nearest.plan.summary})"
            return text, nearest.shape, nearest.seconds, True
        rows = [space.row[shape] for shape in shapes]
        # by cost, then by bytes: among shapes that cannot fit, the smallest come first
        costs = sorted((space.cost(row), float(space.bytes[row]), at) for at, row in enumerate(rows))
        least: tuple[Cost, Shape] | None = None
        short: tuple[float, int, Shape] | None = None
        rest = WORST
        for number, (cost, _, at) in enumerate(costs):
            shape, rest = shapes[at], cost
            if not np.isfinite(rest[0]) and short is not None:
                break  # state alone does not fit
            if number >= _TRIED or (least is not None and rest >= least[0]):
                break
            # a shape that is looked at gets the bound of its best cuts, so its loose one no longer counts
            rest = WORST
            cuts = space.best_cuts(shape)
            if np.isfinite(cuts.seconds):
                found = objective.cost(cuts.seconds, cuts.peak_bytes, shape.clusters), shape
                least = min(least or found, found)
            else:
                short = min(short or (cuts.short_bytes, cuts.stage, shape), (cuts.short_bytes, cuts.stage, shape))
        refused = [c for c in self.refused if c.shape in members and c.family == name]
        if least is not None and not refused:
            cost = min(least[0], rest)  # `rest` bounds the shapes that were not looked at
            return (
                f"{self.worse(cost)}: at least {seconds_text(cost[1])} ({least[1].summary})",
                least[1],
                cost[1],
                False,
            )
        if refused and refused[0].evaluation is not None:
            return f"not placed: {refused[0].evaluation.refusal} ({refused[0].shape.summary})", None, None, False
        assert short is not None, "a shape either has cuts that fit or lacks bytes"
        lacking = f"stage @{short[1]} lacks at least {size_text(int(short[0]))} ({short[2].summary})"
        if np.isfinite([cost[0] for cost, _, _ in costs[_TRIED:]]).any():
            return f"none of {_TRIED} shapes that were looked at fits: {lacking}", None, None, False
        return f"does not fit: {lacking}", None, None, False

    def worse(self, cost: Cost) -> str:
        """Say by how much a cost is worse than the best plan's."""
        objective = self.request.objective
        reference = self.best.cost(objective)
        if objective is not TIME and cost[0] != reference[0]:
            text = objective.text(cost[0], self.best.plan.tokens_per_step)
            return text if cost > reference else f"not tried: {text} at best"
        more = 100 * (cost[1] / reference[1] - 1)
        return f"{more:.1f} % slower" if more >= 0 else f"not tried: {-more:.1f} % faster at best"


def _signed(seconds: float) -> str:
    return f"{'-' if seconds < 0 else '+'}{seconds_text(abs(seconds))}"

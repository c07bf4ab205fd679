"""Instructive losers: for other families, numbers of stages or tensor peers, and other ways to keep state, why the best of them is not the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from attrs import asdict

from ratrain.ratrainc.console.console import seconds_text, size_text
from ratrain.ratrainc.planner.bounds.cuts import best_cuts
from ratrain.ratrainc.planner.search.answer import Loser
from ratrain.ratrainc.planner.search.mechanisms import Mechanisms, mechanisms
from ratrain.ratrainc.planner.space.objective import TIME, WORST, Cost

if TYPE_CHECKING:
    from ratrain.ratrainc.planner.search.answer import Candidate, Request
    from ratrain.ratrainc.planner.search.family_spaces import FamilySpace
    from ratrain.ratrainc.planner.space.space import Shape

_SHOWN = 20
_TRIED = 128
"""Shapes whose cuts are searched for the reason of one row."""


class Searched(Protocol):
    """What is read of a search that is over."""

    @property
    def request(self) -> Request:
        """What was asked."""
        ...

    @property
    def spaces(self) -> list[FamilySpace]:
        """The families that were searched."""
        ...

    @property
    def fitting(self) -> Sequence[Candidate]:
        """Plans that were evaluated and fit."""
        ...

    @property
    def refused(self) -> Sequence[Candidate]:
        """Plans that were evaluated and not placed."""
        ...


def losers(search: Searched, best: Candidate) -> list[Loser]:
    """One row for each other family; then, of the best one's, rows for other stages, tensor peers and ZeRO levels.

    Numbers of stages are those near the best's and powers of two.
    Levels are those of shapes with as many stages as the best. A row of other tensor peers says what makes it slower; where the request asks
    for that, all rows do.
    """
    own = next(space for space in search.spaces if space.family.name == best.family)
    reference = mechanisms(own, best.shape)
    explain = search.request.explain
    lost = [
        _row(space.family.name, search, best, space, space.shapes, reference if explain else None)
        for space in search.spaces
        if space is not own
    ]
    stages = sorted({shape.pp for shape in own.shapes})
    near = {best.shape.pp - 1, best.shape.pp + 1, *(1 << power for power in range(12))} - {best.shape.pp}
    for pp in [p for p in stages if p in near]:
        family = [shape for shape in own.shapes if shape.pp == pp]
        lost.append(_row(f"P = {pp}", search, best, own, family, reference if explain else None))
    for tp in sorted({shape.tp for shape in own.shapes} - {best.shape.tp}):
        family = [shape for shape in own.shapes if shape.tp == tp]
        lost.append(_row(f"T = {tp}", search, best, own, family, reference))
    for mode in sorted({_mode(shape) for shape in own.shapes if shape.pp == best.shape.pp} - {_mode(best.shape)}):
        family = [shape for shape in own.shapes if shape.pp == best.shape.pp and _mode(shape) == mode]
        name = f"P = {best.shape.pp}, {_state_text(family[0])}"
        lost.append(_row(name, search, best, own, family, reference if explain else None))
    return lost if explain else lost[:_SHOWN]


def _mode(shape: Shape) -> tuple[int, str, int, int, int]:
    ends = -1 if shape.ends is None else shape.ends
    return shape.zero, shape.reduce, ends, shape.shard_group or 0, shape.view_group or 0


def _state_text(shape: Shape) -> str:
    ends = "" if shape.ends is None else f", embedding and head {shape.ends}"
    group = "" if shape.shard_group is None else f", groups of {shape.shard_group}"
    group += "" if shape.view_group is None else f", views in groups of {shape.view_group}"
    return f"ZeRO {shape.zero}{ends}{group}, reduce {shape.reduce}"


def _row(
    name: str,
    search: Searched,
    best: Candidate,
    space: FamilySpace,
    family: Sequence[Shape],
    reference: Mechanisms | None,
) -> Loser:
    """A family's row; with what makes it slower than `reference` where there is one."""
    reason, example, seconds = _reason(search, best, space, family)
    if example is None or reference is None:
        return Loser(name, reason)
    more = mechanisms(space, example).over(reference)
    parts = {each: value for each, value in asdict(more).items() if abs(value) >= _SEEN * best.seconds}
    if seconds is not None:  # what closed forms do not know
        rest = seconds - best.seconds - sum(asdict(more).values())
        parts |= {"waits": rest} if abs(rest) >= _SEEN * best.seconds else {}
    text = ", ".join(f"{each.replace('_', ' ')} {_signed(value)}" for each, value in parts.items())
    return Loser(name, f"{reason}; {text or 'no mechanism makes a difference'}", {**asdict(more), **parts})


_SEEN = 5e-4
"""Of the step: less is not worth a word."""


def _signed(seconds: float) -> str:
    return f"{'-' if seconds < 0 else '+'}{seconds_text(abs(seconds))}"


def _reason(
    search: Searched, best: Candidate, space: FamilySpace, family: Sequence[Shape]
) -> tuple[str, Shape | None, float | None]:
    """Why no plan of some shapes won, the shape that came nearest of those that fit, and its seconds where it was simulated."""
    members, name, objective = set(family), space.family.name, search.request.objective
    tried = [c for c in search.fitting if c.shape in members and c.family == name]
    if tried:
        nearest = min(tried, key=lambda c: c.cost(objective))
        what = "simulated" if nearest.is_exact else "simulated, folded"
        text = f"{_worse(search, nearest.cost(objective), best)}: {seconds_text(nearest.seconds)} {what} ({_text(nearest.shape)})"
        return text, nearest.shape, nearest.seconds
    rows = [space.row[shape] for shape in family]
    costs = sorted((space.cost(row), float(space.bytes[row]), at) for at, row in enumerate(rows))
    least: tuple[Cost, Shape] | None = None
    short: tuple[float, int, Shape] | None = None
    rest = WORST
    for number, (cost, _, at) in enumerate(costs):
        shape, rest = family[at], cost
        if not np.isfinite(rest[0]) and short is not None:
            break  # state alone does not fit
        if number >= _TRIED or (least is not None and rest >= least[0]):
            break
        rest = WORST
        cuts = best_cuts(space.columns_of(shape), roomiest=objective.of_bytes)
        if np.isfinite(cuts.seconds):
            found = objective.cost(cuts.seconds, cuts.peak_bytes, shape.clusters), shape
            least = min(least or found, found)
        else:
            short = min(short or (cuts.short_bytes, cuts.stage, shape), (cuts.short_bytes, cuts.stage, shape))
    refused = [c for c in search.refused if c.shape in members and c.family == name]
    if least is not None and not refused:
        cost = min(least[0], rest)  # of those that were not looked at, too
        return f"{_worse(search, cost, best)}: at least {seconds_text(cost[1])} ({_text(least[1])})", least[1], None
    if refused and refused[0].evaluation is not None:
        return f"not placed: {refused[0].evaluation.refusal} ({_text(refused[0].shape)})", None, None
    assert short is not None, "a shape either has cuts that fit or lacks bytes"
    lacking = f"stage @{short[1]} lacks at least {size_text(int(short[0]))} ({_text(short[2])})"
    if np.isfinite([cost[0] for cost, _, _ in costs[_TRIED:]]).any():
        return f"none of {_TRIED} shapes that were looked at fits: {lacking}", None, None
    return f"does not fit: {lacking}", None, None


def _worse(search: Searched, cost: Cost, best: Candidate) -> str:
    objective = search.request.objective
    reference = best.cost(objective)
    if objective is not TIME and cost[0] != reference[0]:
        text = objective.text(cost[0], best.plan.tokens_per_step)
        return text if cost > reference else f"not tried: {text} at best"
    more = 100 * (cost[1] / reference[1] - 1)
    return f"{more:.1f} % slower" if more >= 0 else f"not tried: {-more:.1f} % faster at best"


def _text(shape: Shape) -> str:
    chunks = "" if shape.chunks == 1 else f" V={shape.chunks}"
    slices = "" if shape.slices == 1 else f" k={shape.slices}"
    peers = "" if shape.tp == 1 else f" T={shape.tp}"
    return f"P={shape.pp} D={shape.dp}{peers} b={shape.micro_batch_size} M={shape.micro_batches}{chunks}{slices}, {_short_state(shape)}"


def _short_state(shape: Shape) -> str:
    ends = "" if shape.ends is None else f" (ends {shape.ends})"
    group = "" if shape.shard_group is None else f" of {shape.shard_group}"
    group += "" if shape.view_group is None else f" views of {shape.view_group}"
    return f"ZeRO {shape.zero}{group}{ends} {shape.reduce}"

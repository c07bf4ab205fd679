"""Instructive losers: for other numbers of stages, and other ways to keep state, why the best of them is not the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from ratrain.ratrainc.console import seconds_text, size_text
from ratrain.ratrainc.planner.answer import Loser
from ratrain.ratrainc.planner.cuts import best_cuts

if TYPE_CHECKING:
    from ratrain.ratrainc.planner.answer import Candidate, Request
    from ratrain.ratrainc.planner.columns import Columns, Numbers
    from ratrain.ratrainc.planner.space import Shape

_SHOWN = 12
_TRIED = 24
"""Shapes whose cuts are searched for the reason of one row."""


class Searched(Protocol):
    """What is read of a search that is over."""

    @property
    def request(self) -> Request:
        """What was asked."""
        ...

    @property
    def row(self) -> dict[Shape, int]:
        """Every shape of the space, and its row."""
        ...

    @property
    def shape_bounds(self) -> Numbers:
        """Seconds that no cuts of a row's shape go below."""
        ...

    @property
    def fitting(self) -> list[Candidate]:
        """Plans that were evaluated and fit."""
        ...

    @property
    def refused(self) -> list[Candidate]:
        """Plans that were evaluated and not placed."""
        ...

    def columns_of(self, shape: Shape) -> Columns:
        """The one row of a shape."""
        ...


def losers(search: Searched, best: Candidate) -> list[Loser]:
    """One row for each number of stages near the best's and each power of two, and for each other ZeRO level at the best's shape."""
    lost = []
    stages = sorted({shape.pp for shape in search.row})
    near = {best.shape.pp - 1, best.shape.pp + 1, *(1 << power for power in range(12))} - {best.shape.pp}
    for pp in [p for p in stages if p in near]:
        family = [shape for shape in search.row if shape.pp == pp]
        lost.append(Loser(f"P = {pp}", _reason(search, best, family)))
    for zero, reduce in search.request.modes:
        family = [s for s in search.row if (s.zero, s.reduce) == (zero, reduce) and s.pp == best.shape.pp]
        if (zero, reduce) != (best.shape.zero, best.shape.reduce) and family:
            lost.append(Loser(f"P = {best.shape.pp}, ZeRO {zero}, reduce {reduce}", _reason(search, best, family)))
    return lost[:_SHOWN]


def _reason(search: Searched, best: Candidate, family: list[Shape]) -> str:
    """Why no plan of some shapes won."""
    members = set(family)
    tried = [c for c in search.fitting if c.shape in members]
    if tried:
        fastest = min(tried, key=lambda c: c.seconds)
        return f"{_slower(fastest.seconds, best)}: {seconds_text(fastest.seconds)} simulated ({_text(fastest.shape)})"
    bounds = search.shape_bounds[[search.row[shape] for shape in family]]
    least: tuple[float, Shape] | None = None
    short: tuple[float, int, Shape] | None = None
    for at in np.argsort(bounds, kind="stable")[:_TRIED]:
        shape = family[at]
        if least is not None and bounds[at] >= least[0]:
            break
        cuts = best_cuts(search.columns_of(shape))
        if np.isfinite(cuts.seconds):
            least = min(least or (cuts.seconds, shape), (cuts.seconds, shape))
        else:
            short = min(short or (cuts.short_bytes, cuts.stage, shape), (cuts.short_bytes, cuts.stage, shape))
    refused = [c for c in search.refused if c.shape in members]
    if least is not None and not refused:
        return f"{_slower(least[0], best)}: at least {seconds_text(least[0])} ({_text(least[1])})"
    if refused and refused[0].evaluation is not None:
        return f"not placed: {refused[0].evaluation.refusal} ({_text(refused[0].shape)})"
    assert short is not None, "a shape either has cuts that fit or lacks bytes"
    lacking = f"stage @{short[1]} lacks at least {size_text(int(short[0]))} ({_text(short[2])})"
    if np.isfinite(np.sort(bounds)[_TRIED:]).any():
        return f"none of {_TRIED} shapes that were looked at fits: {lacking}"
    return f"does not fit: {lacking}"


def _slower(seconds: float, best: Candidate) -> str:
    more = 100 * (seconds / best.seconds - 1)
    return f"{more:.1f} % slower" if more >= 0 else f"not tried: {-more:.1f} % faster at best"


def _text(shape: Shape) -> str:
    chunks = "" if shape.chunks == 1 else f" V={shape.chunks}"
    slices = "" if shape.slices == 1 else f" k={shape.slices}"
    return f"D={shape.dp} b={shape.micro_batch_size} M={shape.micro_batches}{chunks}{slices}, ZeRO {shape.zero} {shape.reduce}"

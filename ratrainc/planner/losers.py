"""Instructive losers: for other numbers of stages or tensor peers, and other ways to keep state, why the best of them is not the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
from attrs import astuple, frozen

from ratrain.ratrainc.console import seconds_text, size_text
from ratrain.ratrainc.planner.answer import Loser
from ratrain.ratrainc.planner.bounds import recovery_seconds
from ratrain.ratrainc.planner.cuts import best_cuts

if TYPE_CHECKING:
    from ratrain.ratrainc.planner.answer import Candidate, Request
    from ratrain.ratrainc.planner.columns import Columns, Numbers
    from ratrain.ratrainc.planner.space import Shape

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
    """One row for each number of stages near the best's and each power of two, for each other number of tensor peers, and for each other ZeRO level.

    Levels are those of shapes with as many stages as the best.
    """
    lost = []
    stages = sorted({shape.pp for shape in search.row})
    near = {best.shape.pp - 1, best.shape.pp + 1, *(1 << power for power in range(12))} - {best.shape.pp}
    for pp in [p for p in stages if p in near]:
        family = [shape for shape in search.row if shape.pp == pp]
        lost.append(Loser(f"P = {pp}", _reason(search, best, family)[0]))
    for tp in sorted({shape.tp for shape in search.row} - {best.shape.tp}):
        reason, example = _reason(search, best, [shape for shape in search.row if shape.tp == tp])
        lost.append(Loser(f"T = {tp}", reason + (_difference(search, example, best.shape) if example else "")))
    for zero, reduce in search.request.modes:
        family = [s for s in search.row if (s.zero, s.reduce) == (zero, reduce) and s.pp == best.shape.pp]
        if (zero, reduce) != (best.shape.zero, best.shape.reduce) and family:
            lost.append(Loser(f"P = {best.shape.pp}, ZeRO {zero}, reduce {reduce}", _reason(search, best, family)[0]))
    return lost[:_SHOWN]


@frozen
class _Shares:
    """What makes up the step of a shape under its best cuts: seconds of a stage, the mean of all, in closed form."""

    exchanges: float
    """of its tensor engine"""
    compute: float
    """recovery included"""
    bubble: float
    """one micro-batch's way through all other stages"""


def _shares(search: Searched, shape: Shape) -> _Shares:
    c = search.columns_of(shape)
    everything = np.array([1.0, c.layers, 1.0])
    layers = np.array(best_cuts(c).layers, float)[:, None]
    compute = c.micro_batches * (everything @ (c.forward + c.backward)) + recovery_seconds(c, layers).sum(axis=0)
    way = everything @ (c.first_forward + c.first_backward) * (c.pp - 1)
    both = (c.micro_batches * (everything @ c.exchange), compute, way)
    return _Shares(*(float(column[0] / c.pp[0]) for column in both))


def _difference(search: Searched, shape: Shape, best: Shape) -> str:
    """What a shape with another number of tensor peers pays and saves against the best one."""
    pairs = zip(astuple(_shares(search, shape)), astuple(_shares(search, best)), strict=True)
    exchanges, compute, bubble = (seconds - reference for seconds, reference in pairs)
    return f"; tensor peers: exchanges {_signed(exchanges)}, compute {_signed(compute)}, bubble {_signed(bubble)}"


def _signed(seconds: float) -> str:
    return f"{'-' if seconds < 0 else '+'}{seconds_text(abs(seconds))}"


def _reason(search: Searched, best: Candidate, family: list[Shape]) -> tuple[str, Shape | None]:
    """Why no plan of some shapes won, and the shape that came nearest of those that fit."""
    members = set(family)
    tried = [c for c in search.fitting if c.shape in members]
    if tried:
        fastest = min(tried, key=lambda c: c.seconds)
        text = f"{_slower(fastest.seconds, best)}: {seconds_text(fastest.seconds)} simulated ({_text(fastest.shape)})"
        return text, fastest.shape
    bounds = search.shape_bounds[[search.row[shape] for shape in family]]
    least: tuple[float, Shape] | None = None
    short: tuple[float, int, Shape] | None = None
    rest = np.inf
    for number, at in enumerate(np.argsort(bounds, kind="stable")):
        shape, rest = family[at], float(bounds[at])
        if number == _TRIED or (least is not None and rest >= least[0]):
            break
        rest = np.inf
        cuts = best_cuts(search.columns_of(shape))
        if np.isfinite(cuts.seconds):
            least = min(least or (cuts.seconds, shape), (cuts.seconds, shape))
        else:
            short = min(short or (cuts.short_bytes, cuts.stage, shape), (cuts.short_bytes, cuts.stage, shape))
    refused = [c for c in search.refused if c.shape in members]
    if least is not None and not refused:
        seconds = min(least[0], rest)  # of those that were not looked at, too
        return f"{_slower(seconds, best)}: at least {seconds_text(seconds)} ({_text(least[1])})", least[1]
    if refused and refused[0].evaluation is not None:
        return f"not placed: {refused[0].evaluation.refusal} ({_text(refused[0].shape)})", None
    assert short is not None, "a shape either has cuts that fit or lacks bytes"
    lacking = f"stage @{short[1]} lacks at least {size_text(int(short[0]))} ({_text(short[2])})"
    if np.isfinite(np.sort(bounds)[_TRIED:]).any():
        return f"none of {_TRIED} shapes that were looked at fits: {lacking}", None
    return f"does not fit: {lacking}", None


def _slower(seconds: float, best: Candidate) -> str:
    more = 100 * (seconds / best.seconds - 1)
    return f"{more:.1f} % slower" if more >= 0 else f"not tried: {-more:.1f} % faster at best"


def _text(shape: Shape) -> str:
    chunks = "" if shape.chunks == 1 else f" V={shape.chunks}"
    slices = "" if shape.slices == 1 else f" k={shape.slices}"
    peers = "" if shape.tp == 1 else f" T={shape.tp}"
    return f"P={shape.pp} D={shape.dp}{peers} b={shape.micro_batch_size} M={shape.micro_batches}{chunks}{slices}, ZeRO {shape.zero} {shape.reduce}"

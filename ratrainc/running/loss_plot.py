"""The losses of a run as a chart of characters, an SVG line for notebooks, or an SVG or PNG file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from attrs import frozen

from ratrain.ratrainc.console.pictures import new_figure, write_figure

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_COLUMNS, _ROWS = 64, 8
_WIDE, _HIGH = 560, 180
"""Pixels of the line of losses in a notebook."""


@frozen
class Curves:
    """Training losses by step, and held-out losses of the steps that were evaluated; finite ones only."""

    training: tuple[tuple[int, float], ...]
    held_out: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, points: Iterable[tuple[int, float, float | None]]) -> Curves:
        """Make curves from triples (step, loss, held-out loss or None)."""
        seen = list(points)
        training = tuple((step, loss) for step, loss, _ in seen if math.isfinite(loss))
        held = tuple((step, loss) for step, _, loss in seen if loss is not None and math.isfinite(loss))
        return cls(training, held)


def chart_lines(curves: Curves) -> list[str]:
    """Draw the training losses as columns of characters, each the mean of a run of steps; empty without two losses."""
    means = _column_means([loss for _, loss in curves.training])
    if len(means) < 2:
        return []
    low, high = min(means), max(means)
    span = high - low or 1.0
    # The lowest column keeps one eighth, so that it is seen.
    heights = [1 + round((mean - low) / span * (8 * _ROWS - 1)) for mean in means]
    lines = []
    for row in reversed(range(_ROWS)):
        label = {_ROWS - 1: f"{high:8.4f}", 0: f"{low:8.4f}"}.get(row, " " * 8)
        cells = "".join(_EIGHTHS[min(max(height - 8 * row, 0), 8)] for height in heights)
        lines.append(f"{label} ┤{cells.rstrip()}")
    first, last = curves.training[0][0], curves.training[-1][0]
    lines.append(" " * 9 + f"└ steps {first} to {last}")
    return lines


def _column_means(values: Sequence[float]) -> list[float]:
    columns = min(_COLUMNS, len(values))
    edges = [index * len(values) // columns for index in range(columns + 1)] if columns else []
    return [sum(values[low:high]) / (high - low) for low, high in pairwise(edges)]


def curve_picture(curves: Curves) -> str:
    """Draw the training losses as an SVG line, labelled with their range and steps; empty without two losses."""
    points = curves.training
    if len(points) < 2:
        return ""
    low, high = (bound(loss for _, loss in points) for bound in (min, max))
    first, last = points[0][0], points[-1][0]
    across, up = _WIDE / (last - first), _HIGH / (high - low or 1.0)
    line = " ".join(f"{(step - first) * across:.1f},{(high - loss) * up:.1f}" for step, loss in points)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-60 -12 {_WIDE + 70} {_HIGH + 34}" width="{_WIDE + 70}" '
        'font-family="sans-serif" font-size="11" fill="#808080">'
        f'<polyline points="{line}" fill="none" stroke="#3b82c4" stroke-width="1.5"/>'
        f'<text x="-6" y="4" text-anchor="end">{high:.4f}</text><text x="-6" y="{_HIGH}" '
        f'text-anchor="end">{low:.4f}</text>'
        f'<text x="0" y="{_HIGH + 16}">loss, steps {first} to {last}</text></svg>'
    )


def write_losses(path: str, curves: Curves, title: str) -> None:
    """Write the losses as SVG or PNG by the file's ending. Raises `DiagnosticError` RT002 as `write_figure` does."""
    figure, axes = new_figure(7.2, 4.2, title)
    axes.plot(*_coordinates(curves.training), label="training", gid="training")
    if curves.held_out:
        axes.plot(*_coordinates(curves.held_out), "o-", label="held out", gid="held-out")
    axes.set(xlabel="step", ylabel="loss, nats a token")
    axes.legend()
    write_figure(figure, path)


def _coordinates(points: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [step for step, _ in points], [loss for _, loss in points]

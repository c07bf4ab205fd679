"""The losses of a run as a picture: a chart of characters in the report, an SVG or PNG file beside it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from itertools import pairwise

from attrs import frozen

from ratrain.ratrain_ir.files import write_lines
from ratrain.ratrainc.pictures import new_figure, picture_kind, write_figure

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_COLUMNS, _ROWS = 64, 8


@frozen
class Curves:
    """Losses by step, and those of the held-out data where it was evaluated; finite ones only."""

    training: tuple[tuple[int, float], ...]
    held_out: tuple[tuple[int, float], ...]

    @classmethod
    def of(cls, points: Iterable[tuple[int, float, float | None]]) -> Curves:
        """From (step, loss, held-out loss)."""
        seen = list(points)
        training = tuple((step, loss) for step, loss, _ in seen if math.isfinite(loss))
        held = tuple((step, loss) for step, _, loss in seen if loss is not None and math.isfinite(loss))
        return cls(training, held)


def chart_lines(curves: Curves) -> list[str]:
    """The training losses as columns of characters, each the mean of a run of steps; empty without two losses."""
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


def loss_plot_kind(path: str) -> str:
    """Svg, or png where there is matplotlib, by a file's ending. Raises `DiagnosticError` RT002 as `picture_kind` does."""
    return picture_kind(path, drawn_without=("svg",))


def write_losses(path: str, curves: Curves, title: str) -> None:
    """Write the losses as what the file's ending asks for.

    Raises `DiagnosticError` RT002 as `loss_plot_kind` does, and where it cannot be written.
    """
    if loss_plot_kind(path) == "svg":
        write_lines(path, _svg_lines(curves, title))
    else:
        _write_figure(path, curves, title)


def _write_figure(path: str, curves: Curves, title: str) -> None:
    figure = new_figure(_WIDTH / 100, _HEIGHT / 100)
    axes = figure.add_subplot()
    axes.plot([step for step, _ in curves.training], [loss for _, loss in curves.training], label="training")
    if curves.held_out:
        axes.plot([step for step, _ in curves.held_out], [loss for _, loss in curves.held_out], "o-", label="held out")
    axes.set(xlabel="step", ylabel="loss, nats a token")
    axes.set_title(title, parse_math=False)
    axes.legend()
    write_figure(figure, path)


_WIDTH, _HEIGHT = 720, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 704, 48, 372  # of the axes, in pixels
_TICKS = 5
_POINTS = 1200  # of a line: more than its pixels would only make the file larger


@frozen
class _Scale:
    """Where values lie on the picture."""

    first: float
    last: float
    low: float
    high: float

    @classmethod
    def over(cls, points: Sequence[tuple[int, float]]) -> _Scale:
        steps, losses = [step for step, _ in points] or [0], [loss for _, loss in points] or [0.0]
        low, high = min(losses), max(losses)
        margin = 0.05 * (high - low) or 0.5
        return cls(steps[0], max(*steps, steps[0] + 1), low - margin, high + margin)

    def x(self, step: float) -> float:
        return _LEFT + (step - self.first) / (self.last - self.first) * (_RIGHT - _LEFT)

    def y(self, loss: float) -> float:
        return _BOTTOM - (loss - self.low) / (self.high - self.low) * (_BOTTOM - _TOP)


def _svg_lines(curves: Curves, title: str) -> list[str]:
    scale = _Scale.over([*curves.training, *curves.held_out])
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="24" font-size="15">{escape(title)}</text>',
        *_axes(scale),
        _polyline(scale, curves.training, "#1f5fa8"),
    ]
    if curves.held_out:
        lines.append(_polyline(scale, curves.held_out, "#c4531b"))
        lines += [
            f'<circle cx="{scale.x(s):.1f}" cy="{scale.y(v):.1f}" r="3" fill="#c4531b"/>' for s, v in curves.held_out
        ]
    lines += [_legend(0, "#1f5fa8", "training"), *([_legend(1, "#c4531b", "held out")] if curves.held_out else [])]
    return [*lines, "</svg>"]


def _axes(scale: _Scale) -> list[str]:
    lines = []
    for tick in range(_TICKS + 1):
        share = tick / _TICKS
        step, loss = scale.first + share * (scale.last - scale.first), scale.low + share * (scale.high - scale.low)
        x, y = scale.x(step), scale.y(loss)
        lines += [
            f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_RIGHT}" y2="{y:.1f}" stroke="#dddddd"/>',
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{loss:.3f}</text>',
            f'<text x="{x:.1f}" y="{_BOTTOM + 18}" text-anchor="middle">{step:.0f}</text>',
        ]
    middle = (_TOP + _BOTTOM) / 2
    return [
        *lines,
        f'<text x="{(_LEFT + _RIGHT) / 2}" y="{_BOTTOM + 38}" text-anchor="middle">step</text>',
        f'<text x="14" y="{middle}" text-anchor="middle" transform="rotate(-90 14 {middle})">loss, nats a token</text>',
    ]


def _polyline(scale: _Scale, points: Sequence[tuple[int, float]], colour: str) -> str:
    every = -(-len(points) // _POINTS) or 1
    drawn = [*points[::every], *(points[-1:] if (len(points) - 1) % every else [])]
    places = " ".join(f"{scale.x(step):.1f},{scale.y(loss):.1f}" for step, loss in drawn)
    return f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{places}"/>'


def _legend(place: int, colour: str, text: str) -> str:
    x = _RIGHT - 170 + 90 * place
    line = f'<line x1="{x}" y1="36" x2="{x + 18}" y2="36" stroke="{colour}" stroke-width="2"/>'
    return f'{line}<text x="{x + 24}" y="40">{text}</text>'

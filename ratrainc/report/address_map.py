"""A still picture of a stage's memory: each tensor is a rectangle of addresses over the ops of the step.

    address
      |      [ saved ...... ]            a rectangle's width is a life, in ops
      |  [ boundary ]  [ saved .. ]      its height the tensor's bytes
      +-------------------------- op

A tensor with several lives has a rectangle for each.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.analysis.lifetime import lifetimes
from ratrain.ratrain_ir.config.types import aligned
from ratrain.ratrain_ir.module import Level
from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.ratrain_ir.support.quantities import number_of
from ratrain.ratrainc.console.console import size_text
from ratrain.ratrainc.report.colours import KIND_COLOURS
from ratrain.ratrainc.report.svg import Picture

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.types import StateKind
    from ratrain.ratrain_ir.module import Module, Stage
    from ratrain.ratrain_ir.ops.tensor import Tensor

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 1100, 420, 70, 30, 58
"""Pixels: width of the picture, height of the memory in it, space left of the memory, above and below it."""
MOST = 4000
"""Most lives that are drawn; those with the largest product of bytes and ops come first."""
_LETTER = 6.2
"""Pixels of a letter in the legend."""

Life = tuple["Tensor", int, int]
"""A tensor with an interval of ops in which it is live: first op, exclusive end."""


def address_map(module: Module, stage: int | None = None) -> Picture:
    """Draw the addresses of a stage's tensors in DDR over a step; None takes the stage with the largest arena.

    Raises `DiagnosticError` RT071 if the module is not allocated.
    """
    if module.level is not Level.ALLOCATED:
        text = f"the module is {module.level.value}: its tensors have no addresses yet"
        fail("RT071", text, help="run the pass allocate-ddr")
    chosen = max(module.stages, key=lambda each: each.arena_bytes) if stage is None else module.stages[stage]
    return Picture("\n".join(_lines(module, chosen)))


def _lives(stage: Stage) -> list[Life]:
    """Return all lives in the arena, sorted by bytes times ops, largest first."""
    spans = lifetimes(stage).intervals.items()
    lives = [(tensor, start, stop) for tensor, life in spans for start, stop in life if tensor.offset is not None]
    # the largest are drawn first, so that small ones are never hidden under them
    return sorted(lives, key=lambda life: -aligned(life[0].type.nbytes) * (life[2] - life[1]))


def _lines(module: Module, stage: Stage) -> Iterator[str]:
    lives = _lives(stage)
    # an empty stage still needs sizes to divide by
    shown, ops, arena = lives[:MOST], max(len(stage.ops), 1), max(stage.arena_bytes, 1)
    across, up = (WIDTH - LEFT - 8) / ops, HEIGHT / arena
    total = TOP + HEIGHT + BOTTOM
    of_all = f" (the {MOST:,} largest of {len(lives):,} lives)" if len(lives) > MOST else ""
    title = (
        f"{module.name}, stage @{stage.index}: {size_text(stage.arena_bytes)} of DDR in "
        f"{number_of(len(stage.ops), 'op', ',')}{of_all}"
    )
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {total}" width="{WIDTH}" height="{total}" '
        'font-family="sans-serif" font-size="10">'
    )
    yield f'<rect width="{WIDTH}" height="{total}" fill="#ffffff"/>'
    yield f'<text x="{LEFT}" y="18" font-size="12" fill="#222222">{escape(title)}</text>'
    yield f'<rect x="{LEFT}" y="{TOP}" width="{ops * across:.2f}" height="{HEIGHT}" fill="#f1f1f1"/>'
    for tensor, start, stop in shown:
        assert tensor.offset is not None
        height = aligned(tensor.type.nbytes) * up
        # addresses grow upwards, the y of SVG downwards
        top = TOP + HEIGHT - tensor.offset * up - height
        name = f"%{tensor.name}, {tensor.kind.value}, {size_text(tensor.type.nbytes)}"
        yield (
            f'<rect x="{LEFT + start * across:.2f}" y="{top:.2f}" width="{(stop - start) * across:.2f}" '
            f'height="{height:.2f}" '
            f'fill="{KIND_COLOURS[tensor.kind]}" stroke="#ffffff" '
            f'stroke-width="0.3"><title>{escape(name)}</title></rect>'
        )
    for share in (0.0, 0.5, 1.0):
        y = TOP + HEIGHT * (1 - share) + 4
        yield (
            f'<text x="{LEFT - 4}" y="{y:.0f}" text-anchor="end" fill="#222222">{size_text(int(arena * share))}</text>'
        )
    yield f'<text x="{LEFT}" y="{TOP + HEIGHT + 14}" fill="#222222">ops of the step, in order</text>'
    # kinds in the order of their largest life, each once
    yield from _legend(list(dict.fromkeys(tensor.kind for tensor, _, _ in shown)), total - 28)
    yield "</svg>\n"


def _legend(kinds: list[StateKind], y: int) -> Iterator[str]:
    """Yield an entry for each kind, in a second row where the first is full."""
    left = LEFT
    for kind in kinds:
        wide = 30 + int(_LETTER * len(kind.value))
        if left + wide > WIDTH:
            left, y = LEFT, y + 16
        yield f'<rect x="{left}" y="{y - 9}" width="11" height="11" fill="{KIND_COLOURS[kind]}"/>'
        yield f'<text x="{left + 16}" y="{y}" fill="#222222">{kind.value}</text>'
        left += wide

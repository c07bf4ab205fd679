"""A still picture of a step: a lane for each stage, a box for each pass of a micro-batch through a chunk.

SVG without scripts. A box is wide as its pass is long, and has the micro-batch's number if that fits:

    @0 |0|1|2|3|   |0 |1 |2 |3 |
    @1   |0|0 |1|1 |2|2 |3|3 |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from attrs import frozen

from ratrain.ratrain_ir.analysis.schedule_worth import step_spans
from ratrain.ratrain_ir.ops.base import Engine, piece_text
from ratrain.ratrain_ir.schedules.action import ActionKind
from ratrain.ratrain_ir.support.quantities import number_of
from ratrain.ratrainc.report.svg import Picture

if TYPE_CHECKING:
    from ratrain.ratrain_ir.analysis.actions import ActionTable, PlacedAction
    from ratrain.ratrain_ir.analysis.schedule_worth import PassTimes
    from ratrain.targets.program.instruction import Instruction
    from ratrain.targets.simulator.timeline import Timeline

WIDTH, LANE, GAP, LEFT, TOP, BOTTOM = 1100, 26, 6, 44, 30, 44
"""Pixels: width of the picture, height of a lane, space between lanes, left of the lanes, above and below them."""
_LETTER = 5.5
"""Pixels of a letter in a label."""

COLOURS = {
    "forward": ("#3b82c4", "#9cc4e8"),
    "backward": ("#2f9e62", "#9bd8b4"),
    "backward_input": ("#2f9e62", "#9bd8b4"),
    "backward_weight": ("#d9822b", "#f2c590"),
    "recompute": ("#8a63b8", "#c9b3e3"),
}
"""Colours of a pass: through the first chunk of a stage, and through later ones."""
_PARTS = {"add_branch": "forward", "add_branch_backward": "backward"}
"""Ops that are part of a pass: they are drawn as it."""
_WORDS = {
    "forward": "forward",
    "backward": "backward, or its input half",
    "backward_weight": "weight half",
    "recompute": "recomputation",
}


@frozen
class Box:
    """A pass through a chunk, or an uninterrupted part of one."""

    keyword: str
    piece: str
    """label of the micro-batch, such as `0`, or `0.1` for its slice 1"""
    turn: int
    """index of the chunk among the chunks of its stage"""
    start: float
    end: float


def step_picture(timeline: Timeline, unit: str) -> Picture:
    """Draw the first step, from cold; `unit` is written behind times."""
    return Picture("\n".join(_lines(timeline, unit)))


def boxes(timeline: Timeline, stage: int) -> list[Box]:
    """Return the passes on the compute engine of a stage in the first step, in the order of time.

    Consecutive instructions of one pass, such as an attention and its mlp, are merged into a box.
    """
    program = timeline.program
    chunk_of = {str(block): chunk for block, chunk in program.topology.chunk_of.items()}
    turns = {chunk: turn for turn, chunk in enumerate(program.topology.chunks_of(stage))}
    found: list[Box] = []
    count = len(program.stages[stage].streams[Engine.COMPUTE])
    # the spans of a stream follow each other step by step, and `count` of them are the first step
    for span in timeline.spans[stage][Engine.COMPUTE][:count]:
        item = span.instruction
        keyword = _PARTS.get(item.keyword, item.keyword)
        # updates are not drawn; an op of no seconds would be a box without width
        if keyword not in COLOURS or span.end <= span.start:
            continue
        box = Box(keyword, _label(item), turns[chunk_of[item.blocks[0]]], span.start, span.end)
        last = found[-1] if found else None
        # a box reaches from the first start to the last end, so short waits inside a pass are not seen
        if last is not None and (last.keyword, last.piece, last.turn) == (box.keyword, box.piece, box.turn):
            found[-1] = Box(box.keyword, box.piece, box.turn, last.start, box.end)
        else:
            found.append(box)
    return found


def _label(item: Instruction) -> str:
    """Return a piece as `0` or `0.1`: micro-batch and slice."""
    return piece_text(item.piece).replace("m", "", 1).replace(" s", ".")


def _lines(timeline: Timeline, unit: str) -> Iterator[str]:
    lanes = [boxes(timeline, stage) for stage in range(len(timeline.program.stages))]
    yield from _drawing(lanes, lambda end: _title(timeline, end, unit))


def table_picture(table: ActionTable, times: PassTimes, title: str) -> Picture:
    """Draw a step of a sound table: a lane for each rank, a box for each forward and backward of these times."""
    lanes = []
    for spans in step_spans(table, times):
        turns = {stage: turn for turn, stage in enumerate(sorted({action.stage for action, _, _ in spans}))}
        lanes.append([Box(_KEYWORDS[a.kind], _number(a), turns[a.stage], start, end) for a, start, end in spans])
    return Picture("\n".join(_drawing(lanes, lambda end: f"{title}; a step of {end:.6g}")))


_KEYWORDS = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.BACKWARD_INPUT: "backward_input",
    ActionKind.BACKWARD_WEIGHT: "backward_weight",
}


def _number(action: PlacedAction) -> str:
    """Return the micro-batch of an action, with its slice behind a dot."""
    return f"{action.micro_batch}" if action.slice is None else f"{action.micro_batch}.{action.slice}"


def _drawing(lanes: Sequence[Sequence[Box]], title: Callable[[float], str]) -> Iterator[str]:
    """Yield the picture's lines; `title` is told the end of the last box."""
    # an empty picture still needs a width to divide by
    end = max((box.end for lane in lanes for box in lane), default=0.0) or 1.0
    height = TOP + len(lanes) * (LANE + GAP) + BOTTOM
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="10">'
    )
    yield f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>'
    yield f'<text x="{LEFT}" y="18" font-size="12" fill="#222222">{escape(title(end))}</text>'
    scale = (WIDTH - LEFT - 8) / end
    for stage, lane in enumerate(lanes):
        top = TOP + stage * (LANE + GAP)
        yield f'<text x="6" y="{top + 17}" fill="#222222">@{stage}</text>'
        yield f'<rect x="{LEFT}" y="{top}" width="{end * scale:.2f}" height="{LANE}" fill="#f1f1f1"/>'
        for box in lane:
            yield from _drawn(box, top, scale)
    yield from _legend(lanes, height - 20)
    yield "</svg>\n"


def _drawn(box: Box, top: int, scale: float) -> Iterator[str]:
    left, width = LEFT + box.start * scale, (box.end - box.start) * scale
    colour = COLOURS[box.keyword][min(box.turn, 1)]
    yield (
        f'<rect x="{left:.2f}" y="{top}" width="{width:.2f}" height="{LANE}" fill="{colour}" stroke="#ffffff" '
        'stroke-width="0.6"/>'
    )
    # without room for its label a box stays plain: labels that overlap cannot be read
    if width >= _LETTER * len(box.piece) + 2:
        ink = "#ffffff" if box.turn == 0 else "#222222"
        middle = f'x="{left + width / 2:.2f}" y="{top + 17}" text-anchor="middle"'
        yield f'<text {middle} fill="{ink}">{box.piece}</text>'


def _title(timeline: Timeline, end: float, unit: str) -> str:
    plan = timeline.program.plan
    cut = f", {number_of(plan.chunks, 'chunk')} a stage ({plan.layout})" if plan.chunks > 1 else ""
    sliced = f", {number_of(len(plan.slices), 'slice')}" if plan.slices else ""
    return (
        f"{plan.schedule or 'an order of its own'}: {number_of(plan.pp, 'stage')}, "
        f"{number_of(plan.micro_batches, 'micro-batch')}{cut}{sliced}; {end:.6g}{unit} of compute, simulated"
    )


def _legend(lanes: Sequence[Sequence[Box]], y: int) -> Iterator[str]:
    # whole backwards and input halves share a colour, so they share an entry
    present = {box.keyword.replace("backward_input", "backward") for lane in lanes for box in lane}
    left = LEFT
    for keyword, words in _WORDS.items():
        if keyword in present:
            yield f'<rect x="{left}" y="{y - 9}" width="11" height="11" fill="{COLOURS[keyword][0]}"/>'
            yield f'<text x="{left + 16}" y="{y}" fill="#222222">{words}</text>'
            left += 40 + int(_LETTER * len(words))
    if any(box.turn for lane in lanes for box in lane):
        yield f'<text x="{left}" y="{y}" fill="#222222">paler: later chunks of a stage</text>'

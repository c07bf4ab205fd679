"""Idle pieces of a step as objects."""

from __future__ import annotations

from attrs import frozen

from ratrain.ratrain_ir.ops.base import ENGINES, Engine
from ratrain.targets.simulator.bubbles import Bubbles, Cause
from ratrain.targets.simulator.flat_program import STREAMS


@frozen
class IdlePiece:
    """Part of an idle interval with one cause. `awaited_stage` is the stage of the op that the engine waited for."""

    stage: int
    engine: Engine
    start: float
    end: float
    cause: Cause
    awaited_stage: int


def idle_pieces(bubbles: Bubbles) -> list[IdlePiece]:
    """Return all idle pieces, stream by stream, in the order of time."""
    causes = tuple(Cause)
    columns = (column.tolist() for column in bubbles.piece_arrays())
    return [
        IdlePiece(stream // STREAMS, ENGINES[stream % STREAMS], start, end, causes[cause], other)
        for stream, cause, other, start, end in zip(*columns, strict=True)
    ]

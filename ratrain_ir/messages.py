"""Messages between stages: which kinds of op are one, and which way it goes."""

from __future__ import annotations

from enum import Enum

from ratrain.ratrain_ir import ops
from ratrain.ratrain_ir.per_op import PerOp


class Direction(Enum):
    """Which way a message goes, seen from the stage whose op it is."""

    OUT = "out"
    IN = "in"


DIRECTIONS: PerOp[Direction | None] = PerOp(
    "direction as a message",
    {
        ops.Send: Direction.OUT,
        ops.Recv: Direction.IN,
        **dict.fromkeys((*ops.LONE_OPS, *ops.COLLECTIVE_OPS, ops.Release), None),
    },
)
"""None of what is no message."""

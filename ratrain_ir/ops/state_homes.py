"""Training state in other memories than DDR: which ops work on it there, and on which engine.

Masters and moments are the bulk of a step's state and are touched rarely: by their block's update, masters by the
gathers of its view too. These two ops reach into another memory themselves, a piece at a time through a workspace of
theirs; for all other ops what is in another memory has to be fetched first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.ratrain_ir.config.types import ALIGNMENT_BYTES, Home, StateKind
from ratrain.ratrain_ir.ops.base import Engine
from ratrain.ratrain_ir.ops.collectives import AllGather
from ratrain.ratrain_ir.ops.compute import Update

if TYPE_CHECKING:
    from ratrain.ratrain_ir.ops.base import Op
    from ratrain.ratrain_ir.ops.tensor import Tensor

STATE_ELSEWHERE = frozenset({StateKind.MASTER, StateKind.MOMENT})
"""The kinds of state that may be in another memory from step to step."""
STREAMS_OF_UPDATE = 3
"""What an update streams of each element: master and both moments."""
LEAST_STAGING = STREAMS_OF_UPDATE * ALIGNMENT_BYTES
"""The least workspace, in bytes, through which state can be streamed."""


def streamed_state(op: Op) -> tuple[Tensor, ...]:
    """The state in another memory that an op works on without a fetch."""
    if type(op) is Update:
        operands = op.updates
    elif type(op) is AllGather:
        operands = op.reads
    else:
        return ()
    return tuple(tensor for tensor in operands if tensor.home is not Home.DDR and tensor.kind in STATE_ELSEWHERE)


def engine_of_update(op: Update, of_target: Engine) -> Engine:
    """Return the engine that updates a block.

    It is the target's own, or the host where state streams from another memory: compute need not wait for that.
    """
    return Engine.HOST if streamed_state(op) else of_target

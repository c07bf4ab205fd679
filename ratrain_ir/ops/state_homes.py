"""Training state in other memories than DDR: the ops that work on it there, and their engine.

Masters and moments are most of a step's state and are touched rarely: by the update of their block, and masters also by
the gathers of its view. These two ops read and write another memory themselves, a piece at a time through a workspace;
gathers also read frozen parameters there that replicas have between them, right into the view.
For every other op a tensor in another memory has to be fetched first.
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
_STREAMED = STATE_ELSEWHERE | {StateKind.FROZEN}
STREAMS_OF_UPDATE = 3
"""Number of values that an update streams for each element: master and both moments."""
LEAST_STAGING = STREAMS_OF_UPDATE * ALIGNMENT_BYTES
"""Smallest workspace, in bytes, through which state can be streamed."""


def streamed_state(op: Op) -> tuple[Tensor, ...]:
    """Return the operands in another memory that an op (update or gather) streams without a fetch."""
    if type(op) is Update:
        operands = op.updates
    elif type(op) is AllGather:
        operands = op.reads
    else:
        return ()
    return tuple(tensor for tensor in operands if tensor.home is not Home.DDR and tensor.kind in _STREAMED)


def staged_state(op: Op) -> tuple[Tensor, ...]:
    """Return the operands in another memory that an op streams through workspace: frozen parameters need none."""
    return tuple(tensor for tensor in streamed_state(op) if tensor.kind is not StateKind.FROZEN)


def engine_of_update(op: Update, of_target: Engine) -> Engine:
    """Return the engine that updates a block.

    It is the target's own (`of_target`), or the host where state streams from another memory, so that compute need not
    wait.
    """
    return Engine.HOST if streamed_state(op) else of_target

"""Actions that a schedule gives to a stage, and their order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum

from attrs import frozen


class ActionKind(Enum):
    """Kind of an action of a stage; the values are the names with which schedules are written."""

    FORWARD = "F"
    BACKWARD = "B"
    """the whole backward: both halves in one"""
    BACKWARD_INPUT = "I"
    """the half of a backward that makes the gradient of the stage's input; the stage before waits for it"""
    BACKWARD_WEIGHT = "W"
    """the half that makes the gradients of the parameters; nobody else waits for it"""
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    UNSHARD = "UNSHARD"
    """gather the stage's parameters"""
    RESHARD = "RESHARD"
    """drop the gathered parameters"""
    REDUCE_GRAD = "REDUCE_GRAD"
    """sum the step's gradients over the replicas"""

    __hash__ = (
        object.__hash__
    )  # members are singletons; hashing the name instead would take a large part of the time of a lint


Work = tuple[int, int, int]
"""Chunk, micro-batch, and slice of the micro-batch (0 where there are no slices)."""


@frozen
class Action:
    """Forward or backward of one micro-batch, or of one slice of it, through one chunk of the model."""

    kind: ActionKind
    micro_batch: int
    chunk: int
    """its number in forward order, counted over all stages"""
    slice: int = 0
    """number of the run of the micro-batch's tokens along the sequence, from 0"""

    @property
    def work(self) -> Work:
        """The chunk, micro-batch and slice of this action."""
        return self.chunk, self.micro_batch, self.slice


Order = Sequence[Action]
"""Actions of one stage, in the order in which it executes them."""


def with_backwards_from(chunk: int, order: Order) -> Order:
    """Return an order without the backwards, and halves of backwards, of the chunks below one."""
    if not chunk:
        return order
    return [action for action in order if action.kind is ActionKind.FORWARD or action.chunk >= chunk]


def most_in_flight(passes: Iterable[tuple[ActionKind, int]], forward_only: int = 0) -> int:
    """Count the most passes that are in flight at once in an order, given kind and chunk of each of its actions.

    A pass of a micro-batch (or slice) through a chunk is in flight from its forward until the gradient of its input is
    made. A pass through one of the first `forward_only` chunks, which have no backward, leaves nothing to hold and
    does not count.
    """
    held = most = 0
    for kind, chunk in passes:
        held += _HELD.get(kind, 0) if chunk >= forward_only else 0
        most = max(most, held)
    return most


_HELD = {ActionKind.FORWARD: 1, ActionKind.BACKWARD: -1, ActionKind.BACKWARD_INPUT: -1}
"""Change of the number of passes in flight by an action of each kind."""

"""What a stage can be told to do, and in which order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum

from attrs import frozen


class ActionKind(Enum):
    """What a stage can be told to do in a schedule; the values are the names schedules are written with."""

    FORWARD = "F"
    BACKWARD = "B"
    """the whole backward: both halves in one"""
    BACKWARD_INPUT = "I"
    """the half of a backward that makes the gradient of the stage's input, which the stage before waits for"""
    BACKWARD_WEIGHT = "W"
    """the half that makes the gradients of the parameters; nobody else waits for it"""
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    UNSHARD = "UNSHARD"
    """gather the stage's parameters"""
    RESHARD = "RESHARD"
    """drop what was gathered"""
    REDUCE_GRAD = "REDUCE_GRAD"
    """sum the step's gradients over the replicas"""

    __hash__ = (
        object.__hash__
    )  # there is one object of each: hashing its name instead takes a large part of the time of a lint


Work = tuple[int, int, int]
"""A chunk, a micro-batch that passes through it, and which slice of it."""


@frozen
class Action:
    """Forward or backward of one micro-batch, or of one slice of it, through one chunk of the model."""

    kind: ActionKind
    micro_batch: int
    chunk: int
    """its number in forward order, over all stages"""
    slice: int = 0
    """which run of the micro-batch's rows, along the sequence"""

    @property
    def work(self) -> Work:
        """What it works on."""
        return self.chunk, self.micro_batch, self.slice


Order = Sequence[Action]
"""What one stage does, one after the other."""


def most_in_flight(kinds: Iterable[ActionKind]) -> int:
    """Most passes that are in flight in an order, given the kinds of its actions.

    A pass of a (slice of a) micro-batch through a chunk is in flight from its forward until it has made the gradient of its input.
    """
    held = most = 0
    for kind in kinds:
        held += _HELD.get(kind, 0)
        most = max(most, held)
    return most


_HELD = {ActionKind.FORWARD: 1, ActionKind.BACKWARD: -1, ActionKind.BACKWARD_INPUT: -1}
"""What each action adds to what is in flight."""

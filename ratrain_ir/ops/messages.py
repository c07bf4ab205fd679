"""Messages between stages: which kinds of op are one, which way it goes, and what it carries."""

from __future__ import annotations

from enum import Enum

from ratrain.ratrain_ir.ops import ops
from ratrain.ratrain_ir.ops.ops import Engine, GuestWay, Payload
from ratrain.ratrain_ir.ops.per_op import PerOp


class Direction(Enum):
    """Which way a message goes, seen from the stage whose op it is."""

    OUT = "out"
    IN = "in"


DIRECTIONS: PerOp[Direction | None] = PerOp(
    "direction as a message",
    {
        ops.Send: Direction.OUT,
        ops.Recv: Direction.IN,
        ops.Evict: Direction.OUT,
        ops.Accept: Direction.IN,
        ops.GiveBack: Direction.OUT,
        ops.TakeBack: Direction.IN,
        **dict.fromkeys((*ops.LONE_OPS, *ops.COLLECTIVE_OPS, ops.Release), None),
    },
)
"""None of what is no message."""

_WAYS = {
    ops.Evict.keyword: GuestWay.OUT,
    ops.Accept.keyword: GuestWay.OUT,
    ops.GiveBack.keyword: GuestWay.BACK,
    ops.TakeBack.keyword: GuestWay.BACK,
}
_PAYLOADS = {payload.value: payload for payload in Payload}


def payload_of(keyword: str, variant: str) -> Payload | GuestWay | None:
    """What a message carries, by its keyword and, of those within the pipeline, what it says; None where it says nothing known."""
    return _WAYS.get(keyword) or _PAYLOADS.get(variant)


def engines_of(payload: Payload | GuestWay) -> tuple[Engine, Engine]:
    """The engines that send and receive a payload."""
    return (Engine.STORE, Engine.FETCH) if isinstance(payload, GuestWay) else (Engine.SEND, Engine.RECV)


def meets(payload: Payload | GuestWay) -> bool:
    """Whether both ends of its messages always start and end together: nothing but the arenas has room for what is on its way."""
    return isinstance(payload, GuestWay)

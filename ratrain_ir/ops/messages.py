"""Messages between two stages: activations and gradients, and activations offloaded to the DDR of a donor stage."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, final, get_args

from attrs import define

from ratrain.ratrain_ir.config.types import StateKind, TensorType
from ratrain.ratrain_ir.model.blocks import exchanged_type
from ratrain.ratrain_ir.ops.base import BlockPieceOp, Direction, Engine, GuestWay, Op, Payload, PayloadOp
from ratrain.ratrain_ir.ops.op_fields import chunk_field, micro_batch_field, peer_field, slice_field
from ratrain.ratrain_ir.ops.operands import Candidates, Role, Signature, SignatureError
from ratrain.ratrain_ir.ops.roles import ACTIVATIONS, GUEST, SAVED, STORABLE

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan


@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class BytesOfStageOp(BlockPieceOp):
    """Base of ops that move activations of a block between the DDR of two stages; `peer` is the other stage."""

    peer: int = peer_field()

    def candidates(self, model: ModelConfig, plan: Plan) -> Candidates:
        """List the signatures that this op may have."""
        del model, plan
        return _guests(self)


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class Send(PayloadOp):
    """Sends an activation to the stage of the next chunk, or a gradient back."""

    keyword = "send"
    default_engine = Engine.SEND
    direction = Direction.OUT
    micro_batch: int = micro_batch_field()
    slice: int | None = slice_field()
    chunk: int | None = chunk_field()
    peer: int = peer_field()

    def candidates(self, model: ModelConfig, plan: Plan) -> Candidates:
        """List the signatures that this op may have."""
        return _send(model, plan)


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class Recv(PayloadOp):
    """Receives an activation from the stage of the chunk before, or a gradient back."""

    keyword = "recv"
    default_engine = Engine.RECV
    direction = Direction.IN
    micro_batch: int = micro_batch_field()
    slice: int | None = slice_field()
    chunk: int | None = chunk_field()
    peer: int = peer_field()

    def candidates(self, model: ModelConfig, plan: Plan) -> Candidates:
        """List the signatures that this op may have."""
        return _recv(model, plan)


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class Evict(BytesOfStageOp):
    """Sends activations of a block to a donor stage, whose DDR keeps them; its own bytes are free afterwards.

    It starts and ends together with the `accept` on that stage.
    """

    keyword = "evict"
    default_engine = Engine.STORE
    direction = Direction.OUT


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class Accept(BytesOfStageOp):
    """Receives activations that another stage evicts; this stage, the donor, keeps them as guests in its DDR."""

    keyword = "accept"
    default_engine = Engine.FETCH
    direction = Direction.IN


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class GiveBack(BytesOfStageOp):
    """Sends guests back to the stage that owns them.

    It starts and ends together with the `take_back` on that stage.
    """

    keyword = "give_back"
    default_engine = Engine.STORE
    direction = Direction.OUT


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class TakeBack(BytesOfStageOp):
    """Receives evicted activations of a block from the donor stage back into this stage's DDR."""

    keyword = "take_back"
    default_engine = Engine.FETCH
    direction = Direction.IN


GuestOp = Evict | Accept | GiveBack | TakeBack
"""Messages that move tensors between the DDR of a stage and that of a donor."""


MessageOp = Send | Recv | GuestOp


GUEST_OPS: tuple[type[Op], ...] = get_args(GuestOp)


MESSAGE_OPS: tuple[type[Op], ...] = (Send, Recv, *GUEST_OPS)
"""Kinds of ops that one rank executes together with a partner on another stage."""


_WAYS = {
    Evict.keyword: GuestWay.OUT,
    Accept.keyword: GuestWay.OUT,
    GiveBack.keyword: GuestWay.BACK,
    TakeBack.keyword: GuestWay.BACK,
}


_PAYLOADS = {payload.value: payload for payload in Payload}


def payload_of(keyword: str, variant: str) -> Payload | GuestWay | None:
    """Return the content of a message by its keyword and its variant (the text of its payload), or None if unknown."""
    return _WAYS.get(keyword) or _PAYLOADS.get(variant)


def engines_of(payload: Payload | GuestWay) -> tuple[Engine, Engine]:
    """Return the engines that send and receive a payload, as (sender, receiver)."""
    return (Engine.STORE, Engine.FETCH) if isinstance(payload, GuestWay) else (Engine.SEND, Engine.RECV)


def meets(payload: Payload | GuestWay) -> bool:
    """Tell whether both ends of a message start and end together (a rendezvous).

    Messages to and from a donor do: no memory but the two arenas can buffer their bytes.
    """
    return isinstance(payload, GuestWay)


@cache
def _boundary(model: ModelConfig, plan: Plan) -> Role:
    return Role("data", frozenset({StateKind.BOUNDARY}), exchanged_type(model, plan))


@cache
def _send(model: ModelConfig, plan: Plan) -> Candidates:
    return [(False, Signature(reads=(_boundary(model, plan),)))]


@cache
def _recv(model: ModelConfig, plan: Plan) -> Candidates:
    return [(False, Signature(writes=(_boundary(model, plan),)))]


def _guests(op: BytesOfStageOp) -> Candidates:
    """List the one signature of an op that moves tensors to or from a donor: one role for each operand.

    The tensors are activations and saved slots on the stage that owns them, guests on the donor. Raises
    `SignatureError` if there are none, or one has another kind.
    """
    moved = op.reads or op.writes
    if not moved:
        raise SignatureError(f"'{op!r}' moves nothing")
    kinds = STORABLE if isinstance(op, Evict | TakeBack) else GUEST
    for tensor in moved:
        if tensor.kind not in kinds:
            what = "not evicted" if kinds is STORABLE else "no guest"
            raise SignatureError(f"%{tensor.name} is {tensor.kind.value}, which is {what}", tensor)
    return _guests_of(isinstance(op, Evict | GiveBack), tuple((t.kind, t.type, t.slot) for t in moved))


@cache
def _guests_of(leave: bool, tensors: tuple[tuple[StateKind, TensorType, str], ...]) -> Candidates:
    roles = tuple(_guest_role(f"data.{place}", *each) for place, each in enumerate(tensors))
    return [(False, Signature(roles) if leave else Signature((), roles))]


def _guest_role(name: str, kind: StateKind, type_: TensorType, slot: str) -> Role:
    if kind is StateKind.GUEST:
        return Role(name, GUEST, type_)
    return Role(name, SAVED, type_, slot=slot) if kind is StateKind.SAVED else Role(name, ACTIVATIONS, type_)

"""Messages between two stages: activations and gradients, and activations offloaded to the DDR of a donor stage."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, final

from attrs import define

from ratrain.ratrain_ir.config.types import StateKind, TensorType
from ratrain.ratrain_ir.model.slots import exchanged_type
from ratrain.ratrain_ir.ops.base import BlockPieceOp, Direction, Engine, Op, Payload, PayloadOp, PeerTransfer
from ratrain.ratrain_ir.ops.op_fields import chunk_field, micro_batch_field, peer_field, slice_field
from ratrain.ratrain_ir.ops.operands import Candidates, Role, Signature, SignatureError
from ratrain.ratrain_ir.ops.roles import ACTIVATIONS, REMOTE, SAVED, STORABLE

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan


@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class OffloadOp(BlockPieceOp):
    """Base of ops that move activations of a block between the DDR of a stage and that of a donor.

    `peer` is the other stage.
    """

    peer: int = peer_field()

    def candidates(self, model: ModelConfig, plan: Plan) -> Candidates:
        """List the signatures that this op may have."""
        del model, plan
        return _offload(self)


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
class PeerOffload(OffloadOp):
    """Sends activations of a block to a donor stage, whose DDR keeps them; its own bytes are free afterwards.

    It starts and ends together with the `donor_accept` on that stage.
    """

    keyword = "peer_offload"
    default_engine = Engine.STORE
    direction = Direction.OUT


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class DonorAccept(OffloadOp):
    """Receives activations that another stage offloads; this stage, the donor, keeps them in remote buffers."""

    keyword = "donor_accept"
    default_engine = Engine.FETCH
    direction = Direction.IN


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class DonorReturn(OffloadOp):
    """Sends remote buffers back to the stage that owns their activations.

    It starts and ends together with the `peer_reload` on that stage.
    """

    keyword = "donor_return"
    default_engine = Engine.STORE
    direction = Direction.OUT


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class PeerReload(OffloadOp):
    """Receives offloaded activations of a block from the donor stage back into this stage's DDR."""

    keyword = "peer_reload"
    default_engine = Engine.FETCH
    direction = Direction.IN


MessageOp = Send | Recv | OffloadOp


OFFLOAD_OPS: tuple[type[Op], ...] = (PeerOffload, DonorAccept, DonorReturn, PeerReload)


MESSAGE_OPS: tuple[type[Op], ...] = (Send, Recv, *OFFLOAD_OPS)
"""Kinds of ops that one rank executes together with a partner on another stage."""


_TRANSFERS = {
    PeerOffload.keyword: PeerTransfer.OFFLOAD,
    DonorAccept.keyword: PeerTransfer.OFFLOAD,
    DonorReturn.keyword: PeerTransfer.RELOAD,
    PeerReload.keyword: PeerTransfer.RELOAD,
}


_PAYLOADS = {payload.value: payload for payload in Payload}


def payload_of(keyword: str, variant: str) -> Payload | PeerTransfer | None:
    """Return the content of a message by its keyword and its variant (the text of its payload), or None if unknown."""
    return _TRANSFERS.get(keyword) or _PAYLOADS.get(variant)


def engines_of(payload: Payload | PeerTransfer) -> tuple[Engine, Engine]:
    """Return the engines that send and receive a payload, as (sender, receiver)."""
    return (Engine.STORE, Engine.FETCH) if isinstance(payload, PeerTransfer) else (Engine.SEND, Engine.RECV)


def meets(payload: Payload | PeerTransfer) -> bool:
    """Tell whether both ends of a message start and end together (a rendezvous).

    Messages to and from a donor do: no memory but the two arenas can buffer their bytes.
    """
    return isinstance(payload, PeerTransfer)


@cache
def _boundary(model: ModelConfig, plan: Plan) -> Role:
    return Role("data", frozenset({StateKind.BOUNDARY}), exchanged_type(model, plan))


@cache
def _send(model: ModelConfig, plan: Plan) -> Candidates:
    return [(False, Signature(reads=(_boundary(model, plan),)))]


@cache
def _recv(model: ModelConfig, plan: Plan) -> Candidates:
    return [(False, Signature(writes=(_boundary(model, plan),)))]


def _offload(op: OffloadOp) -> Candidates:
    """List the one signature of an op that moves tensors to or from a donor: one role for each operand.

    The tensors are activations and saved slots on the stage that owns them, remote buffers on the donor. Raises
    `SignatureError` if there are none, or one has another kind.
    """
    moved = op.reads or op.writes
    if not moved:
        raise SignatureError(f"'{op!r}' moves nothing")
    kinds = STORABLE if isinstance(op, PeerOffload | PeerReload) else REMOTE
    for tensor in moved:
        if tensor.kind not in kinds:
            what = "not offloaded" if kinds is STORABLE else "no remote buffer"
            raise SignatureError(f"%{tensor.name} is {tensor.kind.value}, which is {what}", tensor)
    return _moved(isinstance(op, PeerOffload | DonorReturn), tuple((t.kind, t.type, t.slot) for t in moved))


@cache
def _moved(leave: bool, tensors: tuple[tuple[StateKind, TensorType, str], ...]) -> Candidates:
    roles = tuple(_moved_role(f"data.{place}", *each) for place, each in enumerate(tensors))
    return [(False, Signature(roles) if leave else Signature((), roles))]


def _moved_role(name: str, kind: StateKind, type_: TensorType, slot: str) -> Role:
    if kind is StateKind.REMOTE:
        return Role(name, REMOTE, type_)
    return Role(name, SAVED, type_, slot=slot) if kind is StateKind.SAVED else Role(name, ACTIVATIONS, type_)

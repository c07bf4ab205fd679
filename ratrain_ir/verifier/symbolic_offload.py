"""Activations offloaded to a donor stage, in the symbolic run of both stages.

Each end is checked alone: the donor returns what came, unchanged; the owner reloads what it sent. The rules about
channels (`ratrain.ratrain_ir.verifier.communication`) check that both ends mean the same, offload by offload.
"""

from __future__ import annotations

from attrs import define, field, frozen

from ratrain.ratrain_ir.config.types import StateKind
from ratrain.ratrain_ir.model.blocks import Block
from ratrain.ratrain_ir.ops.base import Op, Piece
from ratrain.ratrain_ir.ops.kinds import piece_of
from ratrain.ratrain_ir.ops.messages import DonorAccept, DonorReturn, PeerOffload, PeerReload
from ratrain.ratrain_ir.ops.tensor import Tensor
from ratrain.ratrain_ir.verifier.slices import Value
from ratrain.ratrain_ir.verifier.symbolic_values import SymbolicValues, word_of, words_of


@frozen
class _Offloaded:
    """Value of a tensor when it was sent to a donor stage; `recovered` is the recovery that had made it, if any."""

    tensor: Tensor
    value: Value
    recovered: Op | None


def _form(tensor: Tensor) -> str:
    """Return the properties that a tensor must keep when it comes back: its type, and its slot if it is saved."""
    slot = f" of slot {tensor.slot}" if tensor.kind is StateKind.SAVED else ""
    return f"{tensor.type}{slot}"


def _remote(op: DonorAccept | DonorReturn, number: int) -> Value:
    return "remote", op.block, piece_of(op), f"@{op.peer}", f"number {number}"


_OfOffload = tuple[int, Block, Piece]
"""The other stage, and the block and piece that the activations belong to."""


@define(eq=False)
class SymbolicOffload(SymbolicValues):
    """Visits of the four ops that offload activations to a donor and reload them."""

    offloaded: dict[_OfOffload, tuple[PeerOffload, list[_Offloaded]]] = field(factory=dict)
    """The `peer_offload`, and the tensors it sent."""
    received: dict[_OfOffload, int] = field(factory=dict)
    """Numbers of remote buffers that came."""

    def peer_offload(self, op: PeerOffload) -> None:
        """Send tensors to a donor; each must belong to the block and piece that the op names."""
        block, m = op.block, piece_of(op)
        sent: list[_Offloaded] = []
        for tensor in op.reads:
            held = self.values.get(tensor)
            if held is None or held[1:3] != (block, m):
                words = words_of(held) if held else "nothing"
                text = f"'{op!r}' sends %{tensor.name}, which holds {words}, and nothing of {block} {word_of(m)}"
                self.report.at_op("RT034", text, self.stage, op, tensor)
            # The tensor may be released now; `peer_reload` finds its value here.
            sent.append(_Offloaded(tensor, held or (), self.recovered.get(tensor)))
        self.offloaded[op.peer, block, m] = op, sent

    def peer_reload(self, op: PeerReload) -> None:
        """Reload tensors, with the values they had when they were offloaded.

        They must have been offloaded to that stage before: the same number, of the same types and slots, in the same
        order.
        """
        found = self.offloaded.get((op.peer, op.block, piece_of(op)))
        if found is None:
            text = f"'{op!r}' reloads what this stage has not offloaded before"
            self.report.at_op("RT034", text, self.stage, op)
            return
        offload, sent = found
        given, got = ([_form(tensor) for tensor in each] for each in (offload.reads, op.writes))
        if given != got:
            note = self.report.note("offloaded here", offload)
            text = f"'{op!r}' reloads {', '.join(got)}, and {', '.join(given)} was offloaded"
            self.report.at_op("RT034", text, self.stage, op, notes=[note])
            return
        for tensor, each in zip(op.writes, sent, strict=True):
            self.set(tensor, *each.value)
            if each.recovered is not None:
                self.recovered[tensor] = each.recovered

    def donor_accept(self, op: DonorAccept) -> None:
        """Receive remote buffers; they hold whatever their owner has sent."""
        for number, tensor in enumerate(op.writes):
            self.set(tensor, *_remote(op, number))
        self.received[op.peer, op.block, piece_of(op)] = len(op.writes)

    def donor_return(self, op: DonorReturn) -> None:
        """Return all remote buffers of one offload, in the order in which they came."""
        for number, tensor in enumerate(op.reads):
            self.expect("RT034", op, tensor, *_remote(op, number))
        came = self.received.get((op.peer, op.block, piece_of(op)), 0)
        if came != len(op.reads):
            text = f"'{op!r}' returns {len(op.reads)} remote buffers, and {came} came"
            self.report.at_op("RT034", text, self.stage, op)

"""Activations offloaded to a donor stage (guests), in the symbolic run of both stages.

Each end is checked alone: the donor gives back what came, unchanged; the owner takes back what it sent. The rules about
channels (`ratrain.ratrain_ir.verifier.communication`) check that both ends mean the same, eviction by eviction.
"""

from __future__ import annotations

from attrs import define, field, frozen

from ratrain.ratrain_ir.config.types import StateKind
from ratrain.ratrain_ir.model.blocks import Block
from ratrain.ratrain_ir.ops.base import Op, Piece
from ratrain.ratrain_ir.ops.kinds import piece_of
from ratrain.ratrain_ir.ops.messages import Accept, Evict, GiveBack, TakeBack
from ratrain.ratrain_ir.ops.tensor import Tensor
from ratrain.ratrain_ir.verifier.slices import Value
from ratrain.ratrain_ir.verifier.symbolic_values import SymbolicValues, word_of, words_of


@frozen
class _Evicted:
    """Value of a tensor when it was sent to a donor stage; `recovered` is the recovery that had made it, if any."""

    tensor: Tensor
    value: Value
    recovered: Op | None


def _form(tensor: Tensor) -> str:
    """Return the properties that a tensor must keep when it comes back: its type, and its slot if it is saved."""
    slot = f" of slot {tensor.slot}" if tensor.kind is StateKind.SAVED else ""
    return f"{tensor.type}{slot}"


def _guest(op: Accept | GiveBack, number: int) -> Value:
    return "guest", op.block, piece_of(op), f"@{op.peer}", f"number {number}"


_OfGuests = tuple[int, Block, Piece]
"""The other stage, and the block and piece that the guests belong to."""


@define(eq=False)
class SymbolicGuests(SymbolicValues):
    """Visits of ops that evict, accept, give back and take back."""

    evicted: dict[_OfGuests, tuple[Evict, list[_Evicted]]] = field(factory=dict)
    """Evicting op, and the tensors it sent."""
    guests: dict[_OfGuests, int] = field(factory=dict)
    """Numbers of guests that came."""

    def evict(self, op: Evict) -> None:
        """Send tensors to a donor; each must belong to the block and piece that the op names."""
        block, m = op.block, piece_of(op)
        sent: list[_Evicted] = []
        for tensor in op.reads:
            held = self.values.get(tensor)
            if held is None or held[1:3] != (block, m):
                words = words_of(held) if held else "nothing"
                text = f"'{op!r}' sends %{tensor.name}, which holds {words}, and nothing of {block} {word_of(m)}"
                self.report.at_op("RT034", text, self.stage, op, tensor)
            # The tensor may be released now; `take_back` finds its value here.
            sent.append(_Evicted(tensor, held or (), self.recovered.get(tensor)))
        self.evicted[op.peer, block, m] = op, sent

    def take_back(self, op: TakeBack) -> None:
        """Take tensors back, with the values they had when they were evicted.

        They must have been evicted to that stage before: the same number, of the same types and slots, in the same
        order.
        """
        found = self.evicted.get((op.peer, op.block, piece_of(op)))
        if found is None:
            text = f"'{op!r}' takes back what this stage has not evicted before"
            self.report.at_op("RT034", text, self.stage, op)
            return
        evict, sent = found
        given, got = ([_form(tensor) for tensor in each] for each in (evict.reads, op.writes))
        if given != got:
            note = self.report.note("evicted here", evict)
            text = f"'{op!r}' takes back {', '.join(got)}, and {', '.join(given)} was evicted"
            self.report.at_op("RT034", text, self.stage, op, notes=[note])
            return
        for tensor, each in zip(op.writes, sent, strict=True):
            self.set(tensor, *each.value)
            if each.recovered is not None:
                self.recovered[tensor] = each.recovered

    def accept(self, op: Accept) -> None:
        """Receive guests; they hold whatever their owner has sent."""
        for number, tensor in enumerate(op.writes):
            self.set(tensor, *_guest(op, number))
        self.guests[op.peer, op.block, piece_of(op)] = len(op.writes)

    def give_back(self, op: GiveBack) -> None:
        """Give back all guests of one eviction, in the order in which they came."""
        for number, tensor in enumerate(op.reads):
            self.expect("RT034", op, tensor, *_guest(op, number))
        came = self.guests.get((op.peer, op.block, piece_of(op)), 0)
        if came != len(op.reads):
            text = f"'{op!r}' gives back {len(op.reads)} guests, and {came} came"
            self.report.at_op("RT034", text, self.stage, op)

"""What a stage keeps in the DDR of another, in a symbolic run: at both ends.

Each end is checked by itself: the one that lends gives back what came, as it came; the other takes back what it sent. That the two ends mean
the same, eviction by eviction, is checked where channels are (`ratrain.ratrain_ir.verifier.communication`).
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
    """What one tensor held that was sent to the DDR of another stage."""

    tensor: Tensor
    value: Value
    recovered: Op | None


def _form(tensor: Tensor) -> str:
    """What a tensor that comes back has in common with the one that was sent: its type, and its slot where it is saved."""
    slot = f" of slot {tensor.slot}" if tensor.kind is StateKind.SAVED else ""
    return f"{tensor.type}{slot}"


def _guest(op: Accept | GiveBack, number: int) -> Value:
    return "guest", op.block, piece_of(op), f"@{op.peer}", f"number {number}"


_OfGuests = tuple[int, Block, Piece]
"""The other stage, and of what the guests are."""


@define(eq=False)
class SymbolicGuests(SymbolicValues):
    """The visits of what evicts, accepts, gives back and takes back."""

    evicted: dict[_OfGuests, tuple[Evict, list[_Evicted]]] = field(factory=dict)
    """By what was evicted: by which op, and what."""
    guests: dict[_OfGuests, int] = field(factory=dict)
    """How many came."""

    def evict(self, op: Evict) -> None:
        """What goes to another stage is something of the block and piece that the op names."""
        block, m = op.block, piece_of(op)
        sent: list[_Evicted] = []
        for tensor in op.reads:
            held = self.values.get(tensor)
            if held is None or held[1:3] != (block, m):
                words = words_of(held) if held else "nothing"
                text = f"'{op!r}' sends %{tensor.name}, which holds {words}, and nothing of {block} {word_of(m)}"
                self.report.at_op("RT034", text, self.stage, op, tensor)
            sent.append(_Evicted(tensor, held or (), self.recovered.get(tensor)))
        self.evicted[op.peer, block, m] = op, sent

    def take_back(self, op: TakeBack) -> None:
        """What comes back is what was evicted to that stage before: as many tensors, of the same types and slots, in the same order."""
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
        """Guests hold what the stage that they belong to has sent, whatever that is."""
        for number, tensor in enumerate(op.writes):
            self.set(tensor, *_guest(op, number))
        self.guests[op.peer, op.block, piece_of(op)] = len(op.writes)

    def give_back(self, op: GiveBack) -> None:
        """All guests of one eviction go back, in the order in which they came."""
        for number, tensor in enumerate(op.reads):
            self.expect("RT034", op, tensor, *_guest(op, number))
        came = self.guests.get((op.peer, op.block, piece_of(op)), 0)
        if came != len(op.reads):
            text = f"'{op!r}' gives back {len(op.reads)} guests, and {came} came"
            self.report.at_op("RT034", text, self.stage, op)

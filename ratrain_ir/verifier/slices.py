"""Slices of micro-batches in the symbolic run: their order in sums, the keys that they see, the sums that they add to.

Micro-batches ascend. Within each, slices ascend in the loss and descend in gradients: a slice adds to the gradients of
the keys and values of earlier slices, whose backward comes after its own.

    3 slices: contributions to a gradient   0: m0 s2   1: m0 s1   2: m0 s0   3: m1 s2   ...
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from attrs import frozen

from ratrain.ratrain_ir.model.slice_plan import slice_plan
from ratrain.ratrain_ir.model.slots import KEY_SLOTS, WHOLE_KEYS, begins_key_gradients, seen_slices, sum_slots
from ratrain.ratrain_ir.ops.base import Piece, Slice
from ratrain.ratrain_ir.ops.roles import of_slice

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.ratrain_ir.model.blocks import Block

Value = tuple[object, ...]
"""Symbolic value of a tensor in the symbolic run."""


class Shares(NamedTuple):
    """Contributions of slices to a sum, from `start` to `stop` (exclusive)."""

    start: int
    stop: int
    slices: int
    descending: bool

    def __str__(self) -> str:
        ends = (self.start, self.stop - 1) if self.stop > self.start + 1 else (self.start,)[: self.stop - self.start]
        return " to ".join(map(self.piece, ends))

    def piece(self, share: int) -> str:
        """Format the slice that makes a contribution."""
        micro_batch, number = divmod(share, self.slices)
        return f"m{micro_batch} s{self.slices - 1 - number if self.descending else number}"


@frozen
class Contributions:
    """Numbering of the contributions of pieces to a step's sum.

    `descending`, in its methods, is the direction of the slices within a micro-batch.
    """

    slices: int
    """pieces of a micro-batch"""
    is_cut: bool
    """True if micro-batches are cut into slices"""

    @classmethod
    def under(cls, plan: Plan) -> Contributions:
        """Make the numbering of a plan."""
        return cls(max(1, len(plan.slices)), bool(plan.slices))

    def share(self, piece: Piece, *, descending: bool) -> int:
        """Return the number of a piece's contribution."""
        if isinstance(piece, int):
            return piece
        number = self.slices - 1 - piece.number if descending else piece.number
        return piece.micro_batch * self.slices + number

    def piece(self, share: int, *, descending: bool) -> Piece:
        """Return the piece that makes a contribution."""
        if not self.is_cut:
            return share
        micro_batch, number = divmod(share, self.slices)
        return Slice(micro_batch, self.slices - 1 - number if descending else number)

    def shares(self, stop: int, start: int = 0, *, descending: bool = True) -> range | Shares:
        """Return the contributions from `start` to `stop` (exclusive) as a value."""
        return Shares(start, stop, self.slices, descending) if self.is_cut else range(start, stop)

    def of_micro_batches(self, stop: int, start: int = 0) -> range | Shares:
        """Return the contributions of whole micro-batches to a gradient, from `start` to `stop` (exclusive)."""
        return self.shares(stop * self.slices, start * self.slices)


def seen_keys(model: ModelConfig, plan: Plan, block: Block, piece: Piece) -> Iterator[tuple[str, Value]]:
    """Yield (role, value it must hold) of the keys and values of earlier slices that a slice of an attention sees.

    With context ranks, the keys and values of all ranks are among them.
    """
    for other in _seen(model, plan, block, piece):
        for name, whole in zip(KEY_SLOTS, WHOLE_KEYS, strict=True):
            if plan.cp == 1:
                yield of_slice(name, other.number), ("saved", block, other, name)
            else:
                yield of_slice(whole, other.number), (whole, block, other)


class SumStep(NamedTuple):
    """Use of one sum of key or value gradients in the backward of a slice."""

    role: str
    before: Value | None
    """the value it must find; None if it is the first to add"""
    after: Value | None
    """the value it leaves; None if it takes the sum of its own keys or values"""


def sum_steps(model: ModelConfig, plan: Plan, block: Block, piece: Piece) -> Iterator[SumStep]:
    """Yield the sums that the backward of a slice uses.

    First come the sums that later slices left for its own keys and values, then the sums of earlier slices that it
    adds to.
    """
    if isinstance(piece, int) or block.kind != "attention":
        return
    if plan.cp > 1:
        yield from _part_steps(model, plan, block, piece)
        return
    for slot in sum_slots(model, slice_plan(plan, piece.number), block):
        yield SumStep(slot.name, (slot.name, block, piece, _down_to(piece.number + 1)), None)
    for other in _seen(model, plan, block, piece):
        theirs = slice_plan(plan, other.number)
        begins = begins_key_gradients(model, slice_plan(plan, piece.number), theirs)
        for slot in sum_slots(model, theirs, block):
            before = None if begins else (slot.name, block, other, _down_to(piece.number + 1))
            yield SumStep(of_slice(slot.name, other.number), before, (slot.name, block, other, _down_to(piece.number)))


def _part_steps(model: ModelConfig, plan: Plan, block: Block, piece: Slice) -> Iterator[SumStep]:
    """Yield the parts of gradients of keys that a context rank's backward of a slice adds to, its own first."""
    for other in (piece, *_seen(model, plan, block, piece)):
        begins = begins_key_gradients(model, *(slice_plan(plan, each.number) for each in (piece, other)))
        for whole in WHOLE_KEYS:
            value = (f"part of d{whole}", block, other)
            role = f"d{whole}" if other is piece else of_slice(f"d{whole}", other.number)
            before = None if begins else (*value, _down_to(piece.number + 1))
            yield SumStep(role, before, value if other is piece else (*value, _down_to(piece.number)))


def _seen(model: ModelConfig, plan: Plan, block: Block, piece: Piece) -> list[Slice]:
    """Return the earlier slices whose keys a piece sees; none for a whole micro-batch."""
    if isinstance(piece, int) or block.kind != "attention":
        return []
    return [Slice(piece.micro_batch, number) for number in seen_slices(model, slice_plan(plan, piece.number))]


def _down_to(number: int) -> str:
    """Describe the slices that have added to a sum: those that see the keys, down to one."""
    return f"from its later slices down to s{number}"

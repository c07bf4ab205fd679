"""What slices of micro-batches mean to the symbolic run: which contribution to a sum each makes, whose keys it sees, which sums it adds to.

Micro-batches ascend. Of their slices those of the loss ascend too, and those of gradients descend: a slice adds to the gradients of the keys
and values of earlier ones, whose backward comes after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from attrs import frozen

from ratrain.ratrain_ir.config.plan import Plan, slice_plan
from ratrain.ratrain_ir.model.blocks import KEY_SLOTS, Block, last_viewer, seen_slices, sum_slots
from ratrain.ratrain_ir.ops.base import Piece, Slice
from ratrain.ratrain_ir.ops.roles import of_slice

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig

Value = tuple[object, ...]
"""What a tensor holds in the symbolic run."""


class Shares(NamedTuple):
    """Contributions of slices to a sum, from one up to another."""

    start: int
    stop: int
    slices: int
    descending: bool

    def __str__(self) -> str:
        ends = (self.start, self.stop - 1) if self.stop > self.start + 1 else (self.start,)[: self.stop - self.start]
        return " to ".join(map(self.piece, ends))

    def piece(self, share: int) -> str:
        """The slice that makes a contribution, in words."""
        micro_batch, number = divmod(share, self.slices)
        return f"m{micro_batch} s{self.slices - 1 - number if self.descending else number}"


@frozen
class Contributions:
    """Which contribution to a step's sum each piece makes; `descending` says which way the slices of a micro-batch go."""

    slices: int
    """pieces of a micro-batch"""
    is_cut: bool
    """whether micro-batches are cut at all"""

    @classmethod
    def under(cls, plan: Plan) -> Contributions:
        """Those under a plan."""
        return cls(max(1, len(plan.slices)), bool(plan.slices))

    def share(self, piece: Piece, *, descending: bool) -> int:
        """The place of a piece's contribution."""
        if isinstance(piece, int):
            return piece
        number = self.slices - 1 - piece.number if descending else piece.number
        return piece.micro_batch * self.slices + number

    def piece(self, share: int, *, descending: bool) -> Piece:
        """The piece that makes a contribution."""
        if not self.is_cut:
            return share
        micro_batch, number = divmod(share, self.slices)
        return Slice(micro_batch, self.slices - 1 - number if descending else number)

    def shares(self, stop: int, start: int = 0, *, descending: bool = True) -> range | Shares:
        """The contributions from one up to another."""
        return Shares(start, stop, self.slices, descending) if self.is_cut else range(start, stop)

    def of_micro_batches(self, stop: int, start: int = 0) -> range | Shares:
        """The contributions of whole micro-batches to a gradient."""
        return self.shares(stop * self.slices, start * self.slices)


def seen_keys(model: ModelConfig, plan: Plan, block: Block, piece: Piece) -> Iterator[tuple[str, Value]]:
    """Of an attention of a slice: the roles of the keys and values of earlier slices that it sees, and what each must hold."""
    for other in _seen(model, plan, block, piece):
        for name in KEY_SLOTS:
            yield of_slice(name, other.number), ("saved", block, other, name)


class SumStep(NamedTuple):
    """What the backward of a slice does with one sum of gradients of keys or values."""

    role: str
    before: Value | None
    """what it must find; None where it is the first to add"""
    after: Value | None
    """what it leaves; None where it takes up the sum of its own keys or values"""


def sum_steps(model: ModelConfig, plan: Plan, block: Block, piece: Piece) -> Iterator[SumStep]:
    """The backward of a slice takes what later slices left for its keys and values, and adds to the sums of earlier ones."""
    if isinstance(piece, int):
        return
    for slot in sum_slots(model, slice_plan(plan, piece.number), block):
        yield SumStep(slot.name, (slot.name, block, piece, _down_to(piece.number + 1)), None)
    for other in _seen(model, plan, block, piece):
        theirs = slice_plan(plan, other.number)
        begins = last_viewer(model, theirs) == piece.number
        for slot in sum_slots(model, theirs, block):
            before = None if begins else (slot.name, block, other, _down_to(piece.number + 1))
            yield SumStep(of_slice(slot.name, other.number), before, (slot.name, block, other, _down_to(piece.number)))


def _seen(model: ModelConfig, plan: Plan, block: Block, piece: Piece) -> list[Slice]:
    """The earlier slices whose keys a piece sees."""
    if isinstance(piece, int) or block.kind != "attention":
        return []
    return [Slice(piece.micro_batch, number) for number in seen_slices(model, slice_plan(plan, piece.number))]


def _down_to(number: int) -> str:
    """Which later slices have added to a sum: those that see the keys, down to one."""
    return f"from its later slices down to s{number}"

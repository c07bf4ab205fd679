"""What tensor peers gathered of an input for the forward, kept for its backward where bytes are left, instead of being gathered again.

    %x_whole.mlp.0.m0.forward = gather_rows activation mlp.0 m0 forward (%x.mlp.0.m0)
    ...
    %x_whole.mlp.0.m0.backward = gather_rows activation mlp.0 m0 backward (%x.mlp.0.m0)
    %dx_part.mlp.0.m0, ... = backward mlp.0 m0 (%dx_whole.head.m0, %x_whole.mlp.0.m0.backward, ...)
  becomes
    %x_whole.mlp.0.m0.forward = gather_rows activation mlp.0 m0 forward (%x.mlp.0.m0)
    ...
    %dx_part.mlp.0.m0, ... = backward mlp.0 m0 (%dx_whole.head.m0, %x_whole.mlp.0.m0.forward, ...)

Each that is kept saves the same exchange for bytes that are taken from the forward to the backward, less the peer's own rows, which
nothing else needs in between: so those with the shortest way are kept first. It comes after the choice of what is recovered, and takes
what that leaves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
from attrs import define, field, frozen

from ratrain.passes.recovery.changes_within_budget import ChangesWithinBudget
from ratrain.ratrain_ir.config.types import aligned
from ratrain.ratrain_ir.model.blocks import shares_rows
from ratrain.ratrain_ir.ops.base import Op, Payload, Phase
from ratrain.ratrain_ir.ops.collectives import GatherRows
from ratrain.ratrain_ir.ops.kinds import piece_of
from ratrain.ratrain_ir.ops.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ratrain.passes.memory.trial import Trials
    from ratrain.ratrain_ir.module import Stage


Twice = tuple[int, int]
"""The position of a gather for a forward, and that of the same for its backward."""


def gathers_to_keep(stage: Stage, trials: Trials, budget: int) -> list[Twice]:
    """What of a stage is gathered twice and had better be kept, within a budget of bytes."""
    if not shares_rows(trials.module.plan):
        return []
    keeper = _Keeper(stage, trials, budget)
    for twice in sorted(_gathered_twice(stage), key=lambda each: (each.again - each.first, each.first)):
        keeper.keep(twice)
    keeper.keep_what_fits()
    return [(twice.first, twice.again) for twice in keeper.kept]


def with_kept(ops: list[Op], kept: Iterable[Twice]) -> list[Op]:
    """A list whose backwards read what was gathered for forwards."""
    dropped = {again for _, again in kept}
    instead = {ops[again].writes[0]: ops[first].writes[0] for first, again in kept}
    reading: list[Op] = []
    for position, op in enumerate(ops):
        if position in dropped:
            continue
        reads = tuple(instead.get(tensor, tensor) for tensor in op.reads)
        reading.append(op if reads == op.reads else attrs.evolve(op, reads=reads))
    return reading


@define
class _GatheredTwice:
    """An input that is gathered for a forward, and again for its backward, by positions in the list."""

    first: int
    """of the gather for the forward"""
    again: int
    """of the gather for the backward"""
    whole: Tensor
    """what the forward reads"""
    own: Tensor
    """the rows that the peer has itself"""
    used_until: int
    """the last op before the second gather that uses what the forward reads"""
    own_used_until: int
    """the last op before the second gather that uses the own rows"""
    own_used_later: bool = False
    """whether anything but that gather uses them afterwards"""


def _gathered_twice(stage: Stage) -> list[_GatheredTwice]:
    """Of a stage all whose gather for the backward reads the very tensor which that for the forward reads."""
    firsts: dict[object, tuple[int, GatherRows]] = {}
    last_use: dict[Tensor, int] = {}
    found: list[_GatheredTwice] = []
    of_own: dict[Tensor, _GatheredTwice] = {}
    for position, op in enumerate(stage.ops):
        if isinstance(op, GatherRows) and op.payload is Payload.ACTIVATION:
            key, own = (op.block, piece_of(op)), op.reads[0]
            if op.phase is Phase.FORWARD:
                firsts[key] = position, op
            elif key in firsts and firsts[key][1].reads[0] is own:
                first, gather = firsts[key]
                whole = gather.writes[0]
                twice = _GatheredTwice(first, position, whole, own, last_use.get(whole, first), last_use[own])
                found.append(twice)
                of_own[own] = twice
                last_use[own] = position
                continue
        for tensor in op.operands:
            last_use[tensor] = position
            if tensor in of_own:
                of_own[tensor].own_used_later = True
    return found


@frozen
class _Change:
    """What of the live bytes changes between two positions, the second not included."""

    first: int
    end: int
    nbytes: int


@define(eq=False)
class _Keeper(ChangesWithinBudget):
    """Keeps what was gathered."""

    kept: list[_GatheredTwice] = field(factory=list, init=False)

    def keep(self, twice: _GatheredTwice) -> None:
        """Keep what was gathered, if the budget lets."""
        whole = aligned(twice.whole.type.nbytes)
        changes = [_Change(twice.used_until + 1, twice.again, whole)]
        if not (twice.own_used_later or twice.own.carried):
            own = aligned(twice.own.type.nbytes)
            changes.append(_Change(twice.own_used_until + 1, twice.again + 1, -own))
        for change in changes:
            self.curve[change.first : change.end] += change.nbytes
        span = self.curve[twice.used_until + 1 : twice.again]
        if int(span.max(initial=0)) <= self.budget:
            self.kept.append(twice)
            return
        for change in changes:
            self.curve[change.first : change.end] -= change.nbytes

    def keep_what_fits(self) -> None:
        """Gather again what was decided last, until the arena fits."""
        self.kept = self.kept[: self.most_that_fit(len(self.kept))]

    def rebuilt(self, count: int) -> list[Op]:
        """The list with the first so many kept."""
        return with_kept(self.stage.ops, [(twice.first, twice.again) for twice in self.kept[:count]])

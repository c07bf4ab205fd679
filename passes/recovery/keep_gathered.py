"""Gathered inputs of tensor-parallel ranks, kept from the forward to the backward where bytes are left.

    %x_whole.mlp.0.m0.forward = gather_rows activation mlp.0 m0 forward (%x.mlp.0.m0)
    ...
    %x_whole.mlp.0.m0.backward = gather_rows activation mlp.0 m0 backward (%x.mlp.0.m0)
    %dx_part.mlp.0.m0, ... = backward mlp.0 m0 (%dx_whole.head.m0, %x_whole.mlp.0.m0.backward, ...)
  becomes
    %x_whole.mlp.0.m0.forward = gather_rows activation mlp.0 m0 forward (%x.mlp.0.m0)
    ...
    %dx_part.mlp.0.m0, ... = backward mlp.0 m0 (%dx_whole.head.m0, %x_whole.mlp.0.m0.forward, ...)

Each kept input saves the same exchange. It costs its bytes from the forward to the backward, less the rank's own rows,
which nothing else needs in between. So a greedy choice keeps the inputs with the shortest distance first. It runs after
the choice of recovery, on the bytes that are left. Cost: one sweep over the ops, and O(log n) trial placements.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
from attrs import define, field, frozen

from ratrain.passes.recovery.changes_within_budget import ChangesWithinBudget
from ratrain.ratrain_ir.config.types import aligned
from ratrain.ratrain_ir.model.slots import shares_rows
from ratrain.ratrain_ir.ops.base import Op, Payload, Phase
from ratrain.ratrain_ir.ops.collectives import GatherRows
from ratrain.ratrain_ir.ops.kinds import piece_of
from ratrain.ratrain_ir.ops.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ratrain.passes.trial.trial import Trials
    from ratrain.ratrain_ir.module import Stage


Twice = tuple[int, int]
"""Position of a gather for a forward, and position of the same gather for its backward."""


def gathers_to_keep(stage: Stage, trials: Trials, budget: int) -> list[Twice]:
    """Return the repeated gathers of a stage whose first result should be kept, within a budget of bytes.

    Empty if the plan does not shard rows over tensor-parallel ranks.
    """
    if not shares_rows(trials.module.plan):
        return []
    keeper = _Keeper(stage, trials, budget)
    # All save the same exchange, so the shortest life is the best value for its bytes.
    for twice in sorted(_gathered_twice(stage), key=lambda each: (each.again - each.first, each.first)):
        keeper.keep(twice)
    keeper.keep_what_fits()
    return [(twice.first, twice.again) for twice in keeper.kept]


def with_kept(ops: list[Op], kept: Iterable[Twice]) -> list[Op]:
    """Return a list without the repeated gathers in `kept`, whose readers read the first result."""
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
    """Input that is gathered for a forward and again for its backward, by positions in the list."""

    first: int
    """Position of the gather for the forward."""
    again: int
    """Position of the gather for the backward."""
    whole: Tensor
    """Gathered input that the forward reads."""
    own: Tensor
    """Rows of the rank itself, which the gather reads."""
    used_until: int
    """Position of the last op before the second gather that uses `whole`."""
    own_used_until: int
    """Position of the last op before the second gather that uses `own`."""
    own_used_later: bool = False
    """True if an op after the second gather uses `own`."""


def _gathered_twice(stage: Stage) -> list[_GatheredTwice]:
    """Return the inputs of a stage whose two gathers read the very same tensor, in list order."""
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
                # Only ops behind the second gather come here: `own` is noted when that gather is met.
                of_own[tensor].own_used_later = True
    return found


@frozen
class _Change:
    """Change of the live bytes from position `first` to `end`, exclusive."""

    first: int
    end: int
    nbytes: int


@define(eq=False)
class _Keeper(ChangesWithinBudget):
    """Keeper of gathered inputs of one stage."""

    kept: list[_GatheredTwice] = field(factory=list, init=False)

    def keep(self, twice: _GatheredTwice) -> None:
        """Keep a gathered input if the live bytes stay within the budget."""
        whole = aligned(twice.whole.type.nbytes)
        changes = [_Change(twice.used_until + 1, twice.again, whole)]
        # Without the second gather the rank's own rows end early, which pays for a part of the gathered ones.
        if not (twice.own_used_later or twice.own.carried):
            own = aligned(twice.own.type.nbytes)
            changes.append(_Change(twice.own_used_until + 1, twice.again + 1, -own))
        for change in changes:
            self.curve[change.first : change.end] += change.nbytes
        # Only these positions have more live bytes than before; the others cannot newly exceed the budget.
        span = self.curve[twice.used_until + 1 : twice.again]
        if int(span.max(initial=0)) <= self.budget:
            self.kept.append(twice)
            return
        for change in changes:
            self.curve[change.first : change.end] -= change.nbytes

    def keep_what_fits(self) -> None:
        """Give up the last decisions until the arena fits."""
        self.kept = self.kept[: self.most_that_fit(len(self.kept))]

    def rebuilt(self, count: int) -> list[Op]:
        """Return the list with the first `count` inputs kept."""
        return with_kept(self.stage.ops, [(twice.first, twice.again) for twice in self.kept[:count]])

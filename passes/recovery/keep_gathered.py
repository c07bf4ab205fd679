"""Gathered inputs of tensor-parallel ranks, or keys of context ranks, kept for the backward where bytes are left.

    %x_whole.mlp.0.m0.forward = gather_rows activation mlp.0 m0 forward (%x.mlp.0.m0)
    ...
    %x_whole.mlp.0.m0.backward = gather_rows activation mlp.0 m0 backward (%x.mlp.0.m0)
    %dx_part.mlp.0.m0, ... = backward mlp.0 m0 (%dx_whole.head.m0, %x_whole.mlp.0.m0.backward, ...)
  becomes
    %x_whole.mlp.0.m0.forward = gather_rows activation mlp.0 m0 forward (%x.mlp.0.m0)
    ...
    %dx_part.mlp.0.m0, ... = backward mlp.0 m0 (%dx_whole.head.m0, %x_whole.mlp.0.m0.forward, ...)

Keys and values of context ranks (`gather_keys`) are kept alike. What is kept saves the same exchange. It costs its
bytes from the forward to the backward, less the rank's own rows, which nothing else needs in between. So a greedy
choice keeps those with the shortest distance first. It runs after the choice of recovery, on the bytes that are left.
Cost: one sweep over the ops, and O(log n) trial placements.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import attrs
from attrs import define, field, frozen

from ratrain.passes.recovery.changes_within_budget import ChangesWithinBudget
from ratrain.ratrain_ir.config.types import aligned
from ratrain.ratrain_ir.model.slots import shares_rows
from ratrain.ratrain_ir.ops.base import Op, Payload, Phase
from ratrain.ratrain_ir.ops.collectives import GatherRows
from ratrain.ratrain_ir.ops.context_ranks import GatherKeys
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

    Empty if the plan neither shards rows over tensor-parallel ranks nor has context ranks.
    """
    if not shares_rows(trials.module.plan) and trials.module.plan.cp == 1:
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
    instead = dict(chain.from_iterable(zip(ops[again].writes, ops[first].writes, strict=True) for first, again in kept))
    reading: list[Op] = []
    for position, op in enumerate(ops):
        if position in dropped:
            continue
        reads = tuple(instead.get(tensor, tensor) for tensor in op.reads)
        reading.append(op if reads == op.reads else attrs.evolve(op, reads=reads))
    return reading


@define
class _Part:
    """Tensor that two gathers make from one of the rank itself."""

    whole: Tensor
    """Gathered tensor that the forward reads."""
    own: Tensor
    """Tensor of the rank itself, which the gathers read."""
    used_until: int
    """Position of the last op before the second gather that uses `whole`."""
    own_used_until: int
    """Position of the last op before the second gather that uses `own`."""
    own_used_later: bool = False
    """True if an op after the second gather uses `own`."""


@frozen
class _GatheredTwice:
    """Input, or keys and values, that are gathered for a forward and again for its backward, by list positions."""

    first: int
    """Position of the gather for the forward."""
    again: int
    """Position of the gather for the backward."""
    parts: tuple[_Part, ...]


def _gathered_twice(stage: Stage) -> list[_GatheredTwice]:
    """Return what two gathers of a stage make from the very same tensors, in list order."""
    firsts: dict[object, tuple[int, GatherRows | GatherKeys]] = {}
    last_use: dict[Tensor, int] = {}
    found: list[_GatheredTwice] = []
    of_own: dict[Tensor, _Part] = {}
    for position, op in enumerate(stage.ops):
        if type(op) is GatherKeys or (type(op) is GatherRows and op.payload is Payload.ACTIVATION):
            key = op.keyword, op.block, piece_of(op), op.head_group if type(op) is GatherKeys else None
            if op.phase is Phase.FORWARD:
                firsts[key] = position, op
            elif key in firsts and firsts[key][1].reads == op.reads:
                first, gather = firsts[key]
                parts = tuple(
                    _Part(whole, own, last_use.get(whole, first), last_use[own])
                    for whole, own in zip(gather.writes, op.reads, strict=True)
                )
                found.append(_GatheredTwice(first, position, parts))
                of_own |= {part.own: part for part in parts}
                last_use |= dict.fromkeys(op.reads, position)
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
        changes = []
        for part in twice.parts:
            changes.append(_Change(part.used_until + 1, twice.again, aligned(part.whole.type.nbytes)))
            # Without the second gather the rank's own rows end early, which pays for a part of the gathered ones.
            if not (part.own_used_later or part.own.carried):
                changes.append(_Change(part.own_used_until + 1, twice.again + 1, -aligned(part.own.type.nbytes)))
        for change in changes:
            self.curve[change.first : change.end] += change.nbytes
        # Only these positions have more live bytes than before; the others cannot newly exceed the budget.
        span = self.curve[min(part.used_until for part in twice.parts) + 1 : twice.again]
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

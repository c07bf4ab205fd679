"""Results of exchanges between ranks, and products of experts, kept for the backward where bytes are left.

    %x_whole.mlp.0.m0.forward = gather_rows activation mlp.0 m0 forward (%x.mlp.0.m0)
    ...
    %x_whole.mlp.0.m0.backward = gather_rows activation mlp.0 m0 backward (%x.mlp.0.m0)
    %dx_part.mlp.0.m0, ... = backward mlp.0 m0 (%dx_whole.head.m0, %x_whole.mlp.0.m0.backward, ...)
  becomes
    %x_whole.mlp.0.m0.forward = gather_rows activation mlp.0 m0 forward (%x.mlp.0.m0)
    ...
    %dx_part.mlp.0.m0, ... = backward mlp.0 m0 (%dx_whole.head.m0, %x_whole.mlp.0.m0.forward, ...)

Keys and values of context ranks (`gather_keys`) are kept alike. Where replicas share out experts, two things may be
kept of each mlp and piece, one without the other:

    rows        what the forward's `dispatch` brought; that of the backward then brings gradients alone
    products    gate and up, which `forward_experts` writes then, and `backward_experts` reads

What is kept saves the same work again. It costs its bytes from the forward to the backward, less the rank's own rows of
a gathered input, which nothing else needs in between. So a greedy choice keeps those with the shortest distance first:
of experts the products of all, then rows, or the other way round if exchanges take longer than compute. It runs after
the choice of recovery, on the bytes that are left. Cost: one sweep over the ops, and O(log n) trial placements.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
from attrs import define, field, frozen

from ratrain.passes.recovery.changes_within_budget import ChangesWithinBudget
from ratrain.ratrain_ir.config.types import StateKind, aligned
from ratrain.ratrain_ir.model.expert_ranks import KEPT_OF_ROWS, product_types
from ratrain.ratrain_ir.model.slice_plan import slice_plan
from ratrain.ratrain_ir.model.slots import shares_rows
from ratrain.ratrain_ir.ops.base import Engine, Op, Payload, Phase
from ratrain.ratrain_ir.ops.collectives import GatherRows
from ratrain.ratrain_ir.ops.context_ranks import GatherKeys
from ratrain.ratrain_ir.ops.expert_ranks import BackwardExperts, Dispatch, ForwardExperts
from ratrain.ratrain_ir.ops.kinds import piece_of
from ratrain.ratrain_ir.ops.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ratrain.passes.trial.trial import Trials
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.ratrain_ir.module import Module, Stage


Twice = tuple[int, int]
"""Position of an op of a forward, and of the one of its backward that makes the same again, beside other things."""


def may_keep(plan: Plan) -> bool:
    """Tell whether ranks exchange something again for backwards: rows, keys, or rows of experts."""
    return shares_rows(plan) or plan.cp > 1 or plan.ep > 1


def made_twice_to_keep(stage: Stage, trials: Trials, budget: int) -> list[Twice]:
    """Return what a stage makes twice, and should keep of the forward within a budget of bytes."""
    if not may_keep(trials.module.plan):
        return []
    keeper = _Keeper(stage, trials, budget)
    first = _kept_first(stage, trials) if trials.module.plan.ep > 1 else None
    # Of one kind all save the same work, so the shortest life is the best value for its bytes.
    for twice in sorted(_made_twice(stage, trials.module), key=lambda each: (each.kind is not first, *each.life)):
        keeper.keep(twice)
    keeper.keep_what_fits()
    return [(twice.first, twice.again) for twice in keeper.kept]


def all_made_twice(stage: Stage, module: Module, kind: type[Op]) -> list[Twice]:
    """Return all of a kind of the forward's ops whose results a stage makes again for backwards."""
    return [(twice.first, twice.again) for twice in _made_twice(stage, module) if twice.kind is kind]


def _kept_first(stage: Stage, trials: Trials) -> type[Op]:
    """Return the kind of ops whose results are kept first: those of the engine that has more to do."""
    seconds = dict.fromkeys(Engine, 0.0)
    for op in stage.ops:
        seconds[op.engine] += trials.op_seconds(stage, op)
    return Dispatch if seconds[Engine.TENSOR] > seconds[Engine.COMPUTE] else ForwardExperts


def with_kept(stage: Stage, module: Module, kept: Iterable[Twice]) -> Stage:
    """Return a stage in which nothing in `kept` is made again: its readers read what the forward made."""
    draft = stage.draft()
    ops: list[Op | None] = list(stage.ops)
    instead: dict[Tensor, Tensor] = {}
    for first, again in kept:
        before, after = stage.ops[first], stage.ops[again]
        if isinstance(before, ForwardExperts):
            products = _add_products(draft, module, before)
            ops[first] = attrs.evolve(before, writes=(*before.writes, *products))
            place = [tensor.slot for tensor in after.reads].index("drows") + 1
            ops[again] = attrs.evolve(after, reads=(*after.reads[:place], *products, *after.reads[place:]))
        elif isinstance(before, Dispatch):
            made = {tensor.slot: tensor for tensor in before.writes}
            instead |= {tensor: made[tensor.slot] for tensor in after.writes if tensor.slot in KEPT_OF_ROWS}
            reads = (t for t in after.reads if t.kind is not StateKind.SAVED or t.slot == "chosen")
            writes = tuple(tensor for tensor in after.writes if tensor.slot not in KEPT_OF_ROWS)
            ops[again] = attrs.evolve(after, reads=(*reads, made["counts"]), writes=writes)
        else:
            ops[again] = None
            instead |= zip(after.writes, before.writes, strict=True)
    draft.ops = [_reading(op, instead) for op in ops if op is not None]
    return draft


def _add_products(stage: Stage, module: Module, op: ForwardExperts) -> tuple[Tensor, ...]:
    """Declare gate and up of the rows that an op computes; return them."""
    group = op.writes[0].name.rpartition(".")[0]
    return tuple(
        stage.add(Tensor(stage.free_name(f"{group}.{name}"), StateKind.SAVED, type_))
        for name, type_ in product_types(module.model, slice_plan(module.plan, op.slice)).items()
    )


def _reading(op: Op, instead: dict[Tensor, Tensor]) -> Op:
    reads = tuple(instead.get(tensor, tensor) for tensor in op.reads)
    return op if reads == op.reads else attrs.evolve(op, reads=reads)


@define
class _Part:
    """Bytes that a forward makes, and its backward again."""

    nbytes: int
    used_until: int
    """Position of the last op before the backward's that uses the forward's."""
    own: Tensor | None = None
    """Tensor of the rank itself that both gathers read, where nothing but the second may need it by then."""
    own_used_until: int = 0
    """Position of the last op before the second gather that uses `own`."""
    own_used_later: bool = False
    """True if an op after the second gather uses `own`."""


@frozen
class _MadeTwice:
    """Results that are made for a forward and again for its backward, by list positions."""

    kind: type[Op]
    """Class of the forward's op."""
    first: int
    """Position of the forward's op."""
    again: int
    """Position of the backward's op."""
    parts: tuple[_Part, ...]

    @property
    def life(self) -> tuple[int, int]:
        """Ops from the forward's to the backward's, and the position of the former."""
        return self.again - self.first, self.first


def _made_twice(stage: Stage, module: Module) -> list[_MadeTwice]:
    """Return what two ops of a stage make from the very same tensors, in the order of the second ones."""
    firsts: dict[object, tuple[int, Op]] = {}
    last_use: dict[Tensor, int] = {}
    found: list[_MadeTwice] = []
    of_own: dict[Tensor, _Part] = {}
    for position, op in enumerate(stage.ops):
        if isinstance(op, Dispatch | ForwardExperts | BackwardExperts):
            found += _of_experts(op, position, firsts, last_use, module)
        elif type(op) is GatherKeys or (type(op) is GatherRows and op.payload is Payload.ACTIVATION):
            key = op.keyword, op.block, piece_of(op), op.head_group if type(op) is GatherKeys else None
            if op.phase is Phase.FORWARD:
                firsts[key] = position, op
            elif key in firsts and firsts[key][1].reads == op.reads:
                first, gather = firsts[key]
                parts = tuple(
                    _Part(aligned(whole.type.nbytes), last_use.get(whole, first), own, last_use[own])
                    for whole, own in zip(gather.writes, op.reads, strict=True)
                )
                found.append(_MadeTwice(type(op), first, position, parts))
                of_own |= dict(zip(op.reads, parts, strict=True))
                last_use |= dict.fromkeys(op.reads, position)
                continue
        for tensor in op.operands:
            last_use[tensor] = position
            if tensor in of_own:
                # Only ops behind the second gather come here: `own` is noted when that gather is met.
                of_own[tensor].own_used_later = True
    return found


def _of_experts(
    op: Dispatch | ForwardExperts | BackwardExperts,
    position: int,
    firsts: dict[object, tuple[int, Op]],
    last_use: dict[Tensor, int],
    module: Module,
) -> Iterator[_MadeTwice]:
    """Note an op of expert ranks of a forward; yield what one of a backward makes again. Nothing is kept yet."""
    kind = Dispatch if isinstance(op, Dispatch) else ForwardExperts
    key = kind, op.block, piece_of(op)
    if type(op) is ForwardExperts or (type(op) is Dispatch and op.payload is Payload.ACTIVATION):
        firsts[key] = position, op
        return
    first, before = firsts.get(key, (None, op))
    if first is None:
        return
    if isinstance(op, Dispatch):
        kept = [tensor for tensor in before.writes if tensor.slot in KEPT_OF_ROWS]
        parts = [_Part(aligned(tensor.type.nbytes), last_use.get(tensor, first)) for tensor in kept]
    else:
        products = product_types(module.model, slice_plan(module.plan, op.slice)).values()
        parts = [_Part(aligned(type_.nbytes), first) for type_ in products]
    yield _MadeTwice(kind, first, position, tuple(parts))


@frozen
class _Change:
    """Change of the live bytes from position `first` to `end`, exclusive."""

    first: int
    end: int
    nbytes: int


@define(eq=False)
class _Keeper(ChangesWithinBudget):
    """Keeper of what one stage makes twice."""

    kept: list[_MadeTwice] = field(factory=list, init=False)

    def keep(self, twice: _MadeTwice) -> None:
        """Keep something if the live bytes stay within the budget."""
        changes = []
        for part in twice.parts:
            changes.append(_Change(part.used_until + 1, twice.again, part.nbytes))
            # Without the second gather the rank's own rows end early, which pays for a part of the gathered ones.
            if part.own is not None and not (part.own_used_later or part.own.carried):
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

    def rebuilt(self, count: int) -> Stage:
        """Return the stage with the first `count` things kept."""
        return with_kept(self.stage, self.trials.module, [(twice.first, twice.again) for twice in self.kept[:count]])

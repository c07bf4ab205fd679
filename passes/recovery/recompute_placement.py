"""Placement of recomputation: `recompute{placement=forward-side}` moves it into the pipeline's idle windows (FSR).

    inline          F0 F1 [rec layer 2] (waits) [B layer 2] [rec layer 1] [B layer 1]     stage 0 of 2, 1F1B
    forward-side    F0 F1 [rec layer 2] [rec layer 1] (waits) [B layer 2] [B layer 1]     hidden in the wait

Inline, a layer is recomputed right before its backward. Recomputation needs no gradient, so it may run earlier: after
the micro-batch's forward, before its gradient arrives. That pays where the compute engine would wait for the gradient,
judged by a run of the module's order in which every forward, and every half of a backward, takes one unit of time.
Under 1F1B such waits come before the first backward of a stage (warm-up) and before the backwards of the cool-down,
when no forward is left to fill the gap. In the steady state there is nothing to hide in, and recomputation stays
inline. At most P - 1 micro-batches' recomputations per stage can be hidden this way.

Tensors that are recomputed earlier live longer. Layers move in the order in which backward needs them, as long as the
exact live bytes, workspace included, stay within the budget. Cost: one sweep per window, and O(log n) trial placements.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from attrs import define, field

from ratrain.passes.recovery.changes_within_budget import ChangesWithinBudget
from ratrain.ratrain_ir.analysis.chunk_actions import chunk_actions
from ratrain.ratrain_ir.analysis.unit_run import gradient_waits
from ratrain.ratrain_ir.config.types import aligned
from ratrain.ratrain_ir.model.sharded_blocks import gathers_layers_within_step
from ratrain.ratrain_ir.model.slots import shares_rows
from ratrain.ratrain_ir.ops.base import Op
from ratrain.ratrain_ir.ops.collectives import repeats_sum
from ratrain.ratrain_ir.ops.compute import InputGradientOp, Recompute
from ratrain.ratrain_ir.ops.memory import Fetch
from ratrain.ratrain_ir.ops.messages import PeerReload
from ratrain.ratrain_ir.ops.tensor import Tensor

if TYPE_CHECKING:
    from ratrain.passes.trial.trial import Trials
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.ratrain_ir.module import Module, Stage
    from ratrain.ratrain_ir.schedules.action import Work


def why_inline(plan: Plan) -> str:
    """Return why all recomputation under a plan must be inline; empty if some may stand on the forward side."""
    if plan.pp == 1:
        return "one stage (pp = 1) waits for no gradient, so recovery has no idle window to stand in"
    if gathers_layers_within_step(plan):
        return (
            "the view that recovery reads is gathered for its backward alone (zero = 3), so it stands right before that"
        )
    if shares_rows(plan):
        return (
            "the rows that recovery reads are gathered for its backward alone (sequence_sharding), so it "
            "stands right before that"
        )
    if plan.cp > 1:
        return "the keys that recovery reads are gathered for its backward alone (cp), so it stands right before that"
    return ""


def idle_windows(module: Module) -> list[list[Work]]:
    """Return, by stage, the backward passes before which it waits for the gradient, the longest wait first.

    Empty for each stage where recomputation must be inline, or the order hangs.
    """
    none: list[list[Work]] = [[] for _ in module.stages]
    if why_inline(module.plan):
        return none
    orders = [[action for _, action in chunk_actions(module, stage)] for stage in module.stages]
    try:
        return gradient_waits(orders, module.topology.chunk_stages)
    except ValueError:
        return none  # the order hangs; the verifier will report it


Moves = dict[int, list[int]]
"""By the position of the first op of a backward: positions of the recompute ops to put before it, in order."""


def moves_to_forward_side(stage: Stage, trials: Trials, budget: int, windows: Sequence[Work]) -> Moves:
    """Return the recompute ops of a stage to move ahead of the backwards of some windows, within a budget of bytes."""
    if not windows:
        return {}
    mover = _Mover(stage, trials, budget)
    backwards = _backwards_of(stage, trials.module, set(windows))
    # The longest waits get the bytes first.
    for work in windows:
        mover.fill(backwards[work])
    mover.keep_what_fits()
    return mover.moved


def moved_ahead(ops: list[Op], moves: Moves) -> list[Op]:
    """Return a list with the moves made."""
    going = {position for positions in moves.values() for position in positions}
    moved: list[Op] = []
    for position, op in enumerate(ops):
        moved += [ops[each] for each in moves.get(position, ())]
        if position not in going:
            moved.append(op)
    return moved


@define
class _BackwardOps:
    """Positions of one backward pass in a stage's list."""

    first: int
    """Position of its first op that makes a gradient."""
    recoveries: list[tuple[int, Op]] = field(factory=list)
    """Recompute ops after that, and the sums over ranks between them, with their positions."""


def _backwards_of(stage: Stage, module: Module, wanted: Container[Work]) -> dict[Work, _BackwardOps]:
    chunk_of = module.topology.chunk_of
    found: dict[Work, _BackwardOps] = {}
    for position, op in enumerate(stage.ops):
        if not (isinstance(op, InputGradientOp | Recompute) or repeats_sum(op)):
            continue
        (served,) = op.served_blocks(module.model)
        work = chunk_of[served], op.micro_batch, op.slice or 0
        if work not in wanted:
            continue
        if isinstance(op, InputGradientOp):
            found.setdefault(work, _BackwardOps(position))
        elif work in found:
            found[work].recoveries.append((position, op))
    return found


@define(eq=False)
class _Mover(ChangesWithinBudget):
    """Mover of the recompute ops of some windows."""

    brought: dict[Tensor, int] = field(init=False)
    """By tensor: position of the op that reloads it from another memory or stage."""
    moved: Moves = field(factory=dict, init=False)

    @brought.default
    def _brought_by_fetches(self) -> dict[Tensor, int]:
        fetches = ((at, op) for at, op in enumerate(self.stage.ops) if isinstance(op, Fetch | PeerReload))
        return {tensor: at for at, op in fetches for tensor in op.writes}

    def fill(self, backward: _BackwardOps) -> None:
        """Move as many recompute ops of a backward as the budget allows, in order.

        Ops that read a tensor reloaded after the backward's first op stay, and so do their dependents.
        """
        first = backward.first
        chosen: list[int] = []
        later: set[Tensor] = set()
        for position, op in backward.recoveries:
            if any(tensor in later or self.brought.get(tensor, -1) >= first for tensor in op.reads):
                later.update(op.writes)
                continue
            added = sum(aligned(t.type.nbytes) for t in op.writes)
            # A move makes the outputs live from `first` on instead of `position`. Stop at the first that does not fit:
            # layers move in the order in which backward needs them.
            if int(self.curve[first : position + 1].max()) + added > self.budget:
                break
            self.curve[first:position] += added
            chosen.append(position)
        if chosen:
            self.moved[first] = chosen

    def keep_what_fits(self) -> None:
        """Undo the windows filled last until the arena fits."""
        self.moved = dict(islice(self.moved.items(), self.most_that_fit(len(self.moved))))

    def rebuilt(self, count: int) -> Stage:
        """Return the stage with the moves of the first `count` windows made."""
        return self.stage.draft(moved_ahead(self.stage.ops, dict(islice(self.moved.items(), count))))

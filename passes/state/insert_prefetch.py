"""`insert-prefetch{depth-blocks=... depth-bytes=... blocking=true}`: gathers views in the order of the next forward.

    update mlp.1, update attention.1, update mlp.0, gather mlp.1, gather attention.1, gather mlp.0, flags      becomes
    update mlp.1, update attention.1, update mlp.0, flags, gather mlp.0, gather attention.1, gather mlp.1

Across the step's end, each gather follows the update of its block and the gathers of the blocks before it, so that the
view that the next step needs first is complete first. The flags of all ranks are reduced before the gathers, which do
not depend on them; otherwise the next step would wait for all gathers. An exception are gathers for which a stage has
time while earlier stages still run their last backwards: they come before the flags. Where nothing is sharded an update
writes its view itself, and there is nothing to gather. Where views are sharded within the step too (ZeRO 3), each is
gathered up to `depth-blocks` block ops ahead of its use, as long as the views that are gathered and not yet used take
at most `depth-bytes`. The same holds of frozen parameters that are fetched from another memory (`offload-state`).

With `blocking=true` compute waits for every gather, like a program that calls a gather and continues when it returns.
Without it, gathers keep the setting that they have. Across the step's end blocking gathers follow all updates of their
stage, since they have nothing to hide behind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, TypeGuard

from attrs import evolve, field, frozen

from ratrain.passes.pass_base import SWITCH, Decision, Idle, Pass, PassContext
from ratrain.passes.trial.trial import Trials
from ratrain.ratrain_ir.config.types import StateKind
from ratrain.ratrain_ir.model.blocks import Block, block_chain
from ratrain.ratrain_ir.model.sharded_blocks import any_gathered_within_step
from ratrain.ratrain_ir.ops.base import Engine, Op, Quantity
from ratrain.ratrain_ir.ops.collectives import AllGather, AllReduce, AllReduceScalar, ReduceScatter, is_blocking
from ratrain.ratrain_ir.ops.compute import BackwardWeight, BlockOp, InputGradientOp, Update
from ratrain.ratrain_ir.ops.expert_ranks import Dispatch
from ratrain.ratrain_ir.ops.kinds import brings_parameters
from ratrain.ratrain_ir.support.diagnostics import fail

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.ratrain_ir.module import Module, Stage
    from ratrain.ratrain_ir.ops.memory import Fetch
    from ratrain.ratrain_ir.ops.tensor import Tensor


@frozen
class InsertPrefetchPass(Pass):
    """Order view gathers by the next step's forward."""

    name: ClassVar[str] = "insert-prefetch"
    decides: ClassVar[frozenset[Decision]] = frozenset({Decision.GATHERS})
    depth_blocks: int = field(default=1, metadata={"unit": "blocks"})
    """Number of block ops by which a view is brought ahead of its use within the step: gathered (ZeRO 3) or fetched."""
    depth_bytes: int | None = field(default=None, metadata={"unit": "bytes", "default": "no limit"})
    """Bytes that views brought within the step may take before they are used; those of one use always may. None: no
    limit."""
    blocking: bool = field(default=False, metadata={"choices": SWITCH})
    """True: compute waits for every gather."""

    def idle(self, plan: Plan, model: ModelConfig) -> Iterator[Idle]:
        """Yield the depths where no view is gathered within the step, and `blocking` where none is gathered at all.

        With a depth of 0 blocks the depth in bytes has no effect either.
        """
        within_step = any_gathered_within_step(plan, block_chain(model))
        if not within_step:
            why = "no view is gathered within the step, as under zero = 3, or fetched from another memory"
            for option in ("depth_blocks", "depth_bytes"):
                yield Idle(option, why, "leave it out, or use zero = 3", unless_fetched=True)
        elif self.depth_blocks == 0:
            why = "with depth-blocks=0 each view is gathered right before its use, and none waits for it"
            yield Idle("depth_bytes", why, "leave it out, or depth-blocks=0")
        if not (plan.shards_state or within_step):
            why = f"with zero = {plan.zero} and dp = {plan.dp} nothing is sharded, and nothing gathered"
            yield Idle("blocking", why, "leave it out, or use zero = 1 or more with dp = 2 or more")

    def run(self, module: Module, context: PassContext) -> None:
        """Rewrite every stage.

        Raises `DiagnosticError` RT073 for a depth of more blocks than a stage computes in a step.
        """
        most = max(sum(op.engine is Engine.COMPUTE for op in stage.ops) for stage in module.stages)
        if self.depth_blocks > most:
            text = (
                f"'depth-blocks={self.depth_blocks}' of '{self.name}' is more than the {most} compute ops "
                "that a stage has in a step"
            )
            fail("RT073", text, help=f"write at most {most}")
        context.statistics["gathers"] = sum(self.rewrite(stage, Trials(module, context)) for stage in module.stages)

    def rewrite(self, stage: Stage, trials: Trials) -> int:
        """Rewrite one stage in place; return the number of gathers."""
        self.block(stage)
        return self.reorder(stage, trials)

    def block(self, stage: Stage) -> None:
        """Make all gathers of a stage blocking, if the option says so."""
        if self.blocking:
            stage.ops = [evolve(op, blocking=True) if type(op) is AllGather else op for op in stage.ops]

    def reorder(self, stage: Stage, trials: Trials) -> int:
        """Put the gathers of a stage in their places; return the number of gathers."""
        module = trials.module
        gathers = _reorder(stage, trials, {block: index for index, block in enumerate(block_chain(module.model))})
        if any(map(brings_parameters, stage.ops)):
            gathers += _prefetch_within_step(stage, self.depth_blocks, self.depth_bytes)
        return gathers


def _reorder(stage: Stage, trials: Trials, order: dict[Block, int]) -> int:
    """Put the gathers for the next step into forward order and the flags early; return the number of gathers.

    Each gather stands as soon as the updates of its blocks are done, a blocking one after all updates. `order`:
    position of each block in the forward.
    """
    gathers = sorted(
        (op for op in stage.ops if _is_for_next_step(op)), key=lambda op: min(map(order.__getitem__, op.blocks))
    )
    flags = [op for op in stage.ops if _meets_flags(op)]
    moved: set[Op] = {*gathers, *flags}
    rest = [op for op in stage.ops if op not in moved]
    last_update = {op.block: position for position, op in enumerate(rest) if type(op) is Update}
    first = _gathered_before_flags(stage, trials, gathers) if flags else 0
    after: dict[int, list[Op]] = {}
    earliest = -1
    moving: tuple[AllGather | AllReduceScalar, ...] = (*gathers[:first], *flags, *gathers[first:])
    # Collectives of a stage run in list order, so none may stand before an earlier one of `moving`: `earliest` only
    # grows.
    for op in moving:
        updated = last_update if is_blocking(op) else op.blocks
        needed = [last_update.get(block, len(rest) - 1) for block in updated] or [_last_needed(rest)]
        earliest = max(earliest, *needed)
        after.setdefault(earliest, []).append(op)
    ops: list[Op] = list(after.get(-1, ()))
    for position, stays in enumerate(rest):
        ops.append(stays)
        ops += after.get(position, ())
    stage.ops = ops
    return len(gathers)


def _last_needed(ops: list[Op]) -> int:
    """Return the index of the last op that makes flags of gradients or another scalar, or computes; -1 without any.

    Other scalars count because all ranks run these collectives in one order. Compute counts because a stage in which
    nothing trains has flags of nothing, but gathers views for forwards that the other stages wait for.
    """
    kinds = ReduceScatter | AllReduce | AllReduceScalar | BlockOp
    return next((at for at in reversed(range(len(ops))) if isinstance(ops[at], kinds)), -1)


def _gathered_before_flags(stage: Stage, trials: Trials, gathers: list[AllGather]) -> int:
    """Return how many gathers a stage has time for before the flags of the earlier stages arrive.

    When this stage has sent its last gradient, the earlier stages still run the last micro-batch's backward, one after
    the other. This stage may have weight halves left in that time. Where gradients are clipped by their global norm,
    all stages continue at the same moment, and the result is 0.
    """
    module = trials.module
    if module.plan.optimizer.clip == "global":
        return 0
    topology = module.topology
    left = sum(
        _last_backward_seconds(module.stages[topology.chunk_stages[chunk]], trials)
        for chunk in range(topology.chunks_of(stage.index)[0])
    )
    left -= _seconds_of_weight_halves_left(stage, trials)
    for count, gather in enumerate(gathers):
        left -= trials.op_seconds(stage, gather)
        if left < 0:
            return count
    return len(gathers)


def _last_backward_seconds(stage: Stage, trials: Trials) -> float:
    """Return the seconds of a stage's input gradients of the last micro-batch, without recomputation."""
    module = trials.module
    missing = len(module.topology.stage_blocks[stage.index])
    seconds = 0.0
    for op in reversed(stage.ops):
        if isinstance(op, InputGradientOp) and op.micro_batch == module.plan.micro_batches - 1:
            seconds += trials.context.op_seconds(module, stage, op)
            missing -= 1
            if not missing:
                break
    return seconds


def _seconds_of_weight_halves_left(stage: Stage, trials: Trials) -> float:
    """Return the seconds of the weight halves that a stage runs after its last input gradient."""
    seconds = 0.0
    for op in reversed(stage.ops):
        if isinstance(op, InputGradientOp):
            break
        if type(op) is BackwardWeight:
            seconds += trials.context.op_seconds(trials.module, stage, op)
    return seconds


def _meets_flags(op: Op) -> TypeGuard[AllReduceScalar]:
    return type(op) is AllReduceScalar and op.quantity is Quantity.FLAGS


def _is_for_next_step(op: Op) -> TypeGuard[AllGather]:
    return type(op) is AllGather and op.phase is None


def _prefetch_within_step(stage: Stage, depth: int, limit: int | None) -> int:
    """Move what brings views within the step up to `depth` compute ops ahead of their use; return the number of ops.

    A gather never moves before the write of the master that it reads, because within a step masters are only read
    before the updates, and the updates end the step.
    """
    ahead: dict[int, list[Op]] = {}
    """Gathers by the position of the compute op they come before."""
    compute: list[int] = []
    uses: dict[Tensor, int] = {}
    for position, op in enumerate(stage.ops):
        # experts are copied from the view by an exchange, before the products that read it
        if op.engine is Engine.COMPUTE or type(op) is Dispatch:
            compute.append(position)
            for tensor in op.reads:
                if tensor.kind in (StateKind.VIEW, StateKind.FROZEN):
                    uses.setdefault(tensor, len(compute) - 1)
    gathers = [op for op in stage.ops if brings_parameters(op)]
    for at, gather in _places(gathers, uses, depth, limit):
        ahead.setdefault(compute[at], []).append(gather)
    ops: list[Op] = []
    for position, op in enumerate(stage.ops):
        ops.extend(ahead.get(position, ()))
        if not brings_parameters(op):
            ops.append(op)
    stage.ops = ops
    return len(gathers)


def _places(
    gathers: list[AllGather | Fetch], uses: dict[Tensor, int], depth: int, limit: int | None
) -> Iterator[tuple[int, AllGather | Fetch]]:
    """Yield each gather or fetch, in the order of use, with the index of the compute op that it comes before.

    `uses`: index of the compute op that uses each view first. `limit`: most bytes of views brought and not yet used.
    """
    waiting: deque[AllGather | Fetch] = deque()
    taken = at = 0
    for gather in sorted(gathers, key=lambda op: uses[op.writes[0]]):
        size = _view_bytes(gather)
        at = max(at, uses[gather.writes[0]] - depth)
        # `waiting` holds the views that are gathered and not yet used. If one more exceeds the limit, its gather moves
        # behind the uses of the oldest, until there is room. Views of one use may all be there.
        while waiting and (uses[waiting[0].writes[0]] < at or (limit is not None and taken + size > limit)):
            used = waiting.popleft()
            taken -= _view_bytes(used)
            at = min(max(at, uses[used.writes[0]] + 1), uses[gather.writes[0]])
        waiting.append(gather)
        taken += size
        yield at, gather


def _view_bytes(gather: AllGather | Fetch) -> int:
    return sum(tensor.type.nbytes for tensor in gather.writes)

"""`insert-prefetch{depth-blocks=... depth-bytes=...}`: gathers parameter views in the order the next forward visits the blocks.

Across the step's end, each gather follows the update of its block and the gathers of the blocks before it, so that the view the next step
needs first is whole first. Where nothing is sharded an update writes its view itself, and there is nothing to gather. Where
views are sharded within the step too (ZeRO 3), each is gathered up to `depth-blocks` block ops ahead of its use, as far as the views that
wait for theirs take no more than `depth-bytes`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, TypeGuard

from attrs import field, frozen

from ratrain.passes.pass_base import Pass, PassContext
from ratrain.ratrain_ir.blocks import Block, block_chain, gathers_within_step
from ratrain.ratrain_ir.ops import AllGather, Engine, Op, Tensor, Update
from ratrain.ratrain_ir.types import StateKind

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module, Stage


@frozen
class InsertPrefetchPass(Pass):
    """Order view gathers by the next step's forward."""

    name: ClassVar[str] = "insert-prefetch"
    depth_blocks: int = field(default=1, metadata={"unit": "blocks"})
    """How many block ops ahead of its use a view sharded within the step is gathered (ZeRO 3)."""
    depth_bytes: int | None = field(default=None, metadata={"unit": "bytes", "default": "no limit"})
    """Bytes that views sharded within the step may take before they are used; one view always may. None: no limit."""

    def run(self, module: Module, context: PassContext) -> None:
        """Rewrite every stage."""
        context.statistics["gathers"] = sum(self.rewrite(module, stage) for stage in module.stages)

    def rewrite(self, module: Module, stage: Stage) -> int:
        """Rewrite one stage; the number of gathers."""
        gathers = _reorder(stage, {block: index for index, block in enumerate(block_chain(module.model))})
        if gathers_within_step(module.plan):
            gathers = _prefetch_within_step(stage, self.depth_blocks, self.depth_bytes)
        return gathers


def _reorder(stage: Stage, order: dict[Block, int]) -> int:
    """Put gathers in forward order, each as soon as the updates it needs are done; the number of gathers."""
    gathers = sorted(
        (op for op in stage.ops if _is_for_next_step(op)), key=lambda op: min(map(order.__getitem__, op.blocks))
    )
    last_update = {op.block: position for position, op in enumerate(stage.ops) if type(op) is Update}
    after: dict[int, list[Op]] = {}
    earliest = -1
    for gather in gathers:
        earliest = max(earliest, *(last_update.get(block, len(stage.ops) - 1) for block in gather.blocks))
        after.setdefault(earliest, []).append(gather)
    ops: list[Op] = []
    for position, op in enumerate(stage.ops):
        if not _is_for_next_step(op):
            ops.append(op)
        ops += after.get(position, ())
    stage.ops = ops
    return len(gathers)


def _is_for_next_step(op: Op) -> TypeGuard[AllGather]:
    return type(op) is AllGather and op.phase is None


def _prefetch_within_step(stage: Stage, depth: int, limit: int | None) -> int:
    """Move each gather of a sharded view up to `depth` compute ops ahead of its use; the number of gathers.

    Not beyond the write of what it reads: within a step masters are only read before the updates, which end it.
    """
    ahead: dict[int, list[Op]] = {}
    """Gathers by the position of the compute op they come before."""
    compute: list[int] = []
    uses: dict[Tensor, int] = {}
    for position, op in enumerate(stage.ops):
        if op.engine is Engine.COMPUTE:
            compute.append(position)
            for tensor in op.reads:
                if tensor.kind is StateKind.VIEW:
                    uses.setdefault(tensor, len(compute) - 1)
    gathers = [op for op in stage.ops if type(op) is AllGather and op.phase is not None]
    for at, gather in _places(gathers, uses, depth, limit):
        ahead.setdefault(compute[at], []).append(gather)
    ops: list[Op] = []
    for position, op in enumerate(stage.ops):
        ops.extend(ahead.get(position, ()))
        if not (type(op) is AllGather and op.phase is not None):
            ops.append(op)
    stage.ops = ops
    return len(gathers)


def _places(
    gathers: list[AllGather], uses: dict[Tensor, int], depth: int, limit: int | None
) -> Iterator[tuple[int, AllGather]]:
    """Each gather, in the order of use, and the compute op it comes before."""
    waiting: deque[AllGather] = deque()
    taken = at = 0
    for gather in sorted(gathers, key=lambda op: uses[op.writes[0]]):
        size = _view_bytes(gather)
        at = max(at, uses[gather.writes[0]] - depth)
        while waiting and (uses[waiting[0].writes[0]] < at or (limit is not None and taken + size > limit)):
            used = waiting.popleft()
            taken -= _view_bytes(used)
            at = max(at, uses[used.writes[0]] + 1)
        waiting.append(gather)
        taken += size
        yield at, gather


def _view_bytes(gather: AllGather) -> int:
    return sum(tensor.type.nbytes for tensor in gather.writes)

"""`bucket-grad-sync{bytes=...|auto unit=block|layer|stage blocking=true}`: joins and advances gradient reductions.

    backward mlp.1, backward attention.1, backward mlp.0, ..., reduce mlp.1, reduce attention.1, reduce mlp.0   becomes
    backward mlp.1, backward attention.1, reduce [mlp.1 attention.1], backward mlp.0, reduce [mlp.0], ...

Reductions come in backward order. A bucket closes when its gradients reach `bytes`. It stands right after the backward
that contributes to it last, so it starts as early as it may. With `reduce = "each-micro-batch"` buckets are formed
within each micro-batch. Shards partition every block, never a bucket, so bucketing changes no bit.

If reductions of the whole step stand apart, one chunk's before other work of the stage (`place-from-file`), no bucket
joins reductions of two chunks.

Small buckets start early; large ones pay the latency of the links less often. `bytes=auto` takes the smallest of a few
sizes whose reductions the link finishes while the backward that makes them runs; if there is none, the size that keeps
the link busy for the shortest time. `unit=stage` reduces in bulk: one collective of all of a stage's gradients, after
the whole backward. With `blocking=true` compute waits for every reduction of gradients, tied ones included, like a
program that calls a reduction and continues when it returns. Without it, reductions keep the setting that they have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

from attrs import define, evolve, field, frozen

from ratrain.passes.pass_base import SWITCH, Decision, Idle, Pass, PassContext
from ratrain.ratrain_ir.config.types import StateKind
from ratrain.ratrain_ir.model.blocks import Block
from ratrain.ratrain_ir.module import Stage
from ratrain.ratrain_ir.ops.base import Group, Op
from ratrain.ratrain_ir.ops.collectives import AllReduce, ReduceScatter, reduces_over_replicas
from ratrain.ratrain_ir.ops.compute import InputGradientOp, WeightGradientOp

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.ratrain_ir.module import Module
    from ratrain.ratrain_ir.ops.tensor import Tensor, Tensors

MIB = 1 << 20
GradSync = ReduceScatter | AllReduce
"""Ops that reduce gradients over replicas."""
LIMITS = (1, 16 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB)
"""Bucket sizes in bytes that `bytes=auto` chooses from; the smallest makes one bucket per block."""


@frozen
class BucketGradSyncPass(Pass):
    """Join gradient reductions into buckets and place each after its last contribution."""

    name: ClassVar[str] = "bucket-grad-sync"
    decides: ClassVar[frozenset[Decision]] = frozenset({Decision.REDUCTIONS})
    bytes: int | str = field(default=64 * MIB, metadata={"unit": "bytes", "words": ("auto",)})
    """Size at which a bucket closes; `auto`: chosen for each stage from `LIMITS`."""
    unit: str = field(default="block", metadata={"choices": ("block", "layer", "stage")})
    """Boundary at which a bucket may end: a block, a layer, or only the stage."""
    blocking: bool = field(default=False, metadata={"choices": SWITCH})
    """True: compute waits for every reduction."""

    def idle(self, plan: Plan, model: ModelConfig) -> Iterator[Idle]:
        """Yield `bytes` where a bucket is all of a stage."""
        del plan, model
        if self.unit == "stage":
            why = "with unit=stage a bucket is all that a stage reduces, of whatever size"
            yield Idle("bytes", why, "leave it out, or unit=stage")

    def run(self, module: Module, context: PassContext) -> None:
        """Rewrite every stage."""
        context.statistics["buckets"] = sum(self.rewrite(module, stage, context) for stage in module.stages)

    def rewrite(self, module: Module, stage: Stage, context: PassContext) -> int:
        """Rewrite one stage in place; return the number of buckets."""
        limit = self.bytes if isinstance(self.bytes, int) else self.fitted(module, stage, context)
        bucketing = _Bucketing(stage, module.topology.chunk_of, limit, self.unit)
        bucketing.run()
        stage.ops = bucketing.ops()
        if self.blocking:
            stage.ops = [evolve(op, blocking=True) if isinstance(op, GradSync) else op for op in stage.ops]
        return len(bucketing.buckets)

    def fitted(self, module: Module, stage: Stage, context: PassContext) -> int:
        """Return the smallest limit in bytes whose reductions fit into the backward that makes their gradients.

        If there is none, return the limit whose reductions take the shortest time.
        """
        link_seconds = {}
        for limit in LIMITS:
            bucketing = _Bucketing(stage, module.topology.chunk_of, limit, self.unit)
            bucketing.run()
            link_seconds[limit] = sum(context.op_seconds(module, stage, op) for op in bucketing.buckets)
        window = _backward_seconds(module, stage, context)
        fitting = [limit for limit, seconds in link_seconds.items() if seconds <= window]
        return fitting[0] if fitting else min(LIMITS, key=link_seconds.__getitem__)


def _backward_seconds(module: Module, stage: Stage, context: PassContext) -> float:
    """Return the seconds of a stage's backwards during which gradients can be reduced.

    Counted are the backwards of each micro-batch, or of the last one if gradients are reduced once a step. Of several
    slices only slice 0 counts: it runs last and completes the gradients.
    """
    each = module.plan.reduce == "each-micro-batch"
    last = module.plan.micro_batches - 1
    return sum(
        context.op_seconds(module, stage, op)
        for op in stage.ops
        if isinstance(op, InputGradientOp | WeightGradientOp) and (each or op.micro_batch == last) and not op.slice
    )


@define
class _Bucketing:
    """State of bucketing one stage."""

    stage: Stage
    chunk_of: Mapping[Block, int]
    limit: int
    ends_with: str
    """Unit of a bucket: `block`, `layer` or `stage`."""
    buckets: list[Op] = field(factory=list)
    after: dict[int, list[Op]] = field(factory=dict)
    """Buckets by the position of the op that they follow."""
    joined: set[int] = field(factory=set)
    """Positions of the reductions that went into buckets."""

    def run(self) -> None:
        # A bucket is of one group of replicas; where expert ranks make two of them, a bucket of each may be open.
        open_of: dict[Group, list[GradSync]] = {}
        sizes: dict[Group, int] = {}
        last_writer: dict[Tensor, int] = {}
        work_since: set[Group] = set()
        """groups for which gradients were made since the reduction before"""
        for position, op in enumerate(self.stage.ops):
            if reduces_over_replicas(op):
                self.joined.add(position)
                open_ops = open_of.setdefault(op.group, [])
                apart = op.group in work_since and self.ends_chunk(open_ops[-1:], op)
                work_since.discard(op.group)
                if open_ops and (
                    apart or self.key(op) != self.key(open_ops[-1]) or self.is_full(sizes[op.group], open_ops[-1], op)
                ):
                    self.close(open_ops, last_writer)
                    open_ops.clear()
                sizes[op.group] = sum(t.type.nbytes for t in _gradients(op)) + (sizes[op.group] if open_ops else 0)
                open_ops.append(op)
                continue
            if isinstance(op, WeightGradientOp):  # `all_reduce ends` writes gradients too, but only reduced ones
                work_since.update(open_of)
                last_writer.update((t, position) for t in op.writes + op.updates if t.kind is StateKind.GRAD)
        for open_ops in open_of.values():
            if open_ops:
                self.close(open_ops, last_writer)

    def ops(self) -> list[Op]:
        """Return the stage's ops with buckets in place of the reductions."""
        ops: list[Op] = []
        for position, op in enumerate(self.stage.ops):
            if position not in self.joined:
                ops.append(op)
            ops.extend(self.after.get(position, ()))
        return ops

    def key(self, op: GradSync) -> object:
        """Return a key that is equal for reductions that may share a bucket."""
        return (type(op), op.micro_batch if isinstance(op, ReduceScatter) else None, op.blocking)

    def ends_chunk(self, last: list[GradSync], following: GradSync) -> bool:
        """Tell whether two neighbouring reductions of the whole step belong to different chunks."""
        whole = not isinstance(following, ReduceScatter) or following.micro_batch is None
        return whole and any(self.chunk_of[op.blocks[-1]] != self.chunk_of[following.blocks[0]] for op in last)

    def is_full(self, size: int, last: GradSync, following: GradSync) -> bool:
        """Tell whether a bucket of `size` bytes ends before the next reduction.

        It ends if it has reached its limit, unless `unit=layer` and the next block is of the same layer.
        """
        if self.ends_with == "stage":
            return False
        torn = self.ends_with == "layer" and last.blocks[-1].layer == following.blocks[0].layer
        return size >= self.limit and not torn

    def close(self, ops: list[GradSync], last_writer: dict[Tensor, int]) -> None:
        position = max(last_writer[t] for op in ops for t in _gradients(op))
        self.buckets.append(_merged(ops))
        self.after.setdefault(position, []).append(self.buckets[-1])


def _gradients(op: GradSync) -> Tensors:
    tensors = op.reads if isinstance(op, ReduceScatter) else op.updates
    return tuple(t for t in tensors if t.kind is StateKind.GRAD)


def _merged(ops: list[GradSync]) -> Op:
    """Return one reduction of the blocks of several, otherwise like the first.

    Its tensors are the gradients or shards in block order, then the flags in block order.
    """
    return evolve(
        ops[0],
        blocks=tuple(block for op in ops for block in op.blocks),
        reads=tuple(t for op in ops for t in op.reads),
        writes=_big_then_flags(tuple(t for op in ops for t in op.writes)),
        updates=_big_then_flags(tuple(t for op in ops for t in op.updates)),
        line=0,
    )


def _big_then_flags(tensors: Tensors) -> Tensors:
    flags = tuple(t for t in tensors if t.kind is StateKind.SCALAR)
    return (*(t for t in tensors if t.kind is not StateKind.SCALAR), *flags)

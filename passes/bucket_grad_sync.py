"""`bucket-grad-sync{bytes=... unit=block|layer}`: joins the gradient reductions of neighbouring blocks, and starts them as early as they may.

Reductions come in backward order. A bucket closes when its gradients reach `bytes`; it stands right after the backward that
gives its last contribution, so that it waits for no straggler it does not need. With `reduce = "each-micro-batch"` the
buckets are formed within each micro-batch. Shards partition every block, never a bucket, so bucketing changes no bit.
"""

from __future__ import annotations

from typing import ClassVar

from attrs import define, field, frozen

from passes.pass_base import Pass, PassContext
from ratrain_ir.module import Module, Stage
from ratrain_ir.ops import AllReduce, Group, Op, ReduceScatter, Tensor, Tensors, WeightGradientOp
from ratrain_ir.types import StateKind

MIB = 1 << 20
GradSync = ReduceScatter | AllReduce


@frozen
class BucketGradSyncPass(Pass):
    """Join gradient reductions into buckets and place each after its last contribution."""

    name: ClassVar[str] = "bucket-grad-sync"
    bytes: int = field(default=64 * MIB, metadata={"unit": "bytes"})
    unit: str = field(default="block", metadata={"choices": ("block", "layer")})
    """A bucket ends with a block, or only with a whole layer."""

    def run(self, module: Module, context: PassContext) -> None:
        """Rewrite every stage."""
        buckets = 0
        for stage in module.stages:
            rewriter = _Bucketing(stage, self.bytes, self.unit)
            rewriter.run()
            buckets += rewriter.buckets
        context.statistics["buckets"] = buckets


@define
class _Bucketing:
    stage: Stage
    limit: int
    unit: str
    buckets: int = 0
    after: dict[int, list[Op]] = field(factory=dict)
    """Buckets by the position of the op they follow."""

    def run(self) -> None:
        open_ops: list[GradSync] = []
        last_writer: dict[Tensor, int] = {}
        moved: set[int] = set()
        key: object = None
        for position, op in enumerate(self.stage.ops):
            if isinstance(op, ReduceScatter) or (type(op) is AllReduce and op.group is Group.REPLICAS):
                moved.add(position)
                if open_ops and (self.key(op) != key or self.is_full(open_ops, op)):
                    self.close(open_ops, last_writer)
                    open_ops = []
                key = self.key(op)
                open_ops.append(op)
                continue
            if isinstance(op, WeightGradientOp):  # `all_reduce ends` writes gradients too, but only reduced ones
                last_writer.update((t, position) for t in op.writes + op.updates if t.kind is StateKind.GRAD)
        if open_ops:
            self.close(open_ops, last_writer)
        ops: list[Op] = []
        for position, op in enumerate(self.stage.ops):
            if position not in moved:
                ops.append(op)
            ops.extend(self.after.get(position, ()))
        self.stage.ops = ops

    def key(self, op: GradSync) -> object:
        """Reductions of equal key may share a bucket."""
        return op.micro_batch if isinstance(op, ReduceScatter) else None

    def is_full(self, ops: list[GradSync], following: GradSync) -> bool:
        """Whether a bucket ends before the next reduction: it has its bytes, and no layer is torn where layers count."""
        torn = self.unit == "layer" and ops[-1].blocks[-1].layer == following.blocks[0].layer
        return self.size(ops) >= self.limit and not torn

    def size(self, ops: list[GradSync]) -> int:
        return sum(t.type.nbytes for op in ops for t in _gradients(op))

    def close(self, ops: list[GradSync], last_writer: dict[Tensor, int]) -> None:
        position = max(last_writer[t] for op in ops for t in _gradients(op))
        self.after.setdefault(position, []).append(_merged(ops))
        self.buckets += 1


def _gradients(op: GradSync) -> Tensors:
    tensors = op.reads if isinstance(op, ReduceScatter) else op.updates
    return tuple(t for t in tensors if t.kind is StateKind.GRAD)


def _merged(ops: list[GradSync]) -> Op:
    """One reduction of all blocks of several: gradients or shards in block order, then the flags in block order."""
    blocks = tuple(unit for op in ops for unit in op.blocks)
    reads = tuple(t for op in ops for t in op.reads)
    writes = _big_then_flags(tuple(t for op in ops for t in op.writes))
    updates = _big_then_flags(tuple(t for op in ops for t in op.updates))
    first = ops[0]
    if isinstance(first, ReduceScatter):
        return ReduceScatter(blocks=blocks, micro_batch=first.micro_batch, reads=reads, writes=writes, updates=updates)
    return AllReduce(blocks=blocks, group=Group.REPLICAS, reads=reads, writes=writes, updates=updates)


def _big_then_flags(tensors: Tensors) -> Tensors:
    flags = tuple(t for t in tensors if t.kind is StateKind.SCALAR)
    return (*(t for t in tensors if t.kind is not StateKind.SCALAR), *flags)

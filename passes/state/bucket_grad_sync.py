"""`bucket-grad-sync{bytes=...|auto unit=block|layer|stage blocking=true}`: joins the gradient reductions of neighbouring blocks, and starts them as early as they may.

Reductions come in backward order. A bucket closes when its gradients reach `bytes`; it stands right after the backward that
gives its last contribution, so that it waits for no straggler it does not need. With `reduce = "each-micro-batch"` the
buckets are formed within each micro-batch. Shards partition every block, never a bucket, so bucketing changes no bit.

Where reductions of the whole step stand apart, one chunk's before other work of the stage (`place-from-file`), no bucket joins those of two
chunks.

Small buckets start early; large ones pay the links' latencies less often. `bytes=auto` takes the smallest of a few sizes whose reductions the
link finishes while the backward that makes them runs; if there is none, the one that keeps the link busy for the shortest time.
`unit=stage` reduces in bulk: one collective of all of a stage's gradients, after the whole backward. With `blocking=true` compute waits for every
reduction of gradients, that of tied ones too, as where a program calls it and goes on when it returns; without, what is blocking stays so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

from attrs import define, evolve, field, frozen

from ratrain.passes.pass_base import SWITCH, Decision, Idle, Pass, PassContext
from ratrain.ratrain_ir.config.types import StateKind
from ratrain.ratrain_ir.model.blocks import Block
from ratrain.ratrain_ir.module import Stage
from ratrain.ratrain_ir.ops.base import Op
from ratrain.ratrain_ir.ops.collectives import AllReduce, ReduceScatter, reduces_over_replicas
from ratrain.ratrain_ir.ops.compute import InputGradientOp, WeightGradientOp

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.ratrain_ir.module import Module
    from ratrain.ratrain_ir.ops.tensor import Tensor, Tensors

MIB = 1 << 20
GradSync = ReduceScatter | AllReduce
LIMITS = (1, 16 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB)
"""What `bytes=auto` chooses from, from a bucket a block on."""


@frozen
class BucketGradSyncPass(Pass):
    """Join gradient reductions into buckets and place each after its last contribution."""

    name: ClassVar[str] = "bucket-grad-sync"
    decides: ClassVar[frozenset[Decision]] = frozenset({Decision.REDUCTIONS})
    bytes: int | str = field(default=64 * MIB, metadata={"unit": "bytes", "words": ("auto",)})
    unit: str = field(default="block", metadata={"choices": ("block", "layer", "stage")})
    """A bucket ends with a block, only with a whole layer, or with the stage."""
    blocking: bool = field(default=False, metadata={"choices": SWITCH})

    def idle(self, plan: Plan, model: ModelConfig) -> Iterator[Idle]:
        """The bytes of a bucket that is all of a stage."""
        del plan, model
        if self.unit == "stage":
            why = "with unit=stage a bucket is all that a stage reduces, of whatever size"
            yield Idle("bytes", why, "leave it out, or unit=stage")

    def run(self, module: Module, context: PassContext) -> None:
        """Rewrite every stage."""
        context.statistics["buckets"] = sum(self.rewrite(module, stage, context) for stage in module.stages)

    def rewrite(self, module: Module, stage: Stage, context: PassContext) -> int:
        """Rewrite one stage; the number of buckets."""
        limit = self.bytes if isinstance(self.bytes, int) else self.fitted(module, stage, context)
        bucketing = _Bucketing(stage, module.topology.chunk_of, limit, self.unit)
        bucketing.run()
        stage.ops = bucketing.ops()
        if self.blocking:
            stage.ops = [evolve(op, blocking=True) if isinstance(op, GradSync) else op for op in stage.ops]
        return len(bucketing.buckets)

    def fitted(self, module: Module, stage: Stage, context: PassContext) -> int:
        """The smallest limit whose reductions fit the backward that gives them, else that of the shortest."""
        link_seconds = {}
        for limit in LIMITS:
            bucketing = _Bucketing(stage, module.topology.chunk_of, limit, self.unit)
            bucketing.run()
            link_seconds[limit] = sum(context.op_seconds(module, stage, op) for op in bucketing.buckets)
        window = _backward_seconds(module, stage, context)
        fitting = [limit for limit, seconds in link_seconds.items() if seconds <= window]
        return fitting[0] if fitting else min(LIMITS, key=link_seconds.__getitem__)


def _backward_seconds(module: Module, stage: Stage, context: PassContext) -> float:
    """Seconds of the backwards after which gradients are reduced: those of each micro-batch, or of the last; of slices the first, which is last."""
    each = module.plan.reduce == "each-micro-batch"
    last = module.plan.micro_batches - 1
    return sum(
        context.op_seconds(module, stage, op)
        for op in stage.ops
        if isinstance(op, InputGradientOp | WeightGradientOp) and (each or op.micro_batch == last) and not op.slice
    )


@define
class _Bucketing:
    stage: Stage
    chunk_of: Mapping[Block, int]
    limit: int
    ends_with: str
    """block, layer or stage"""
    buckets: list[Op] = field(factory=list)
    after: dict[int, list[Op]] = field(factory=dict)
    """Buckets by the position of the op they follow."""
    joined: set[int] = field(factory=set)
    """Positions of the reductions that went into buckets."""

    def run(self) -> None:
        open_ops: list[GradSync] = []
        size = 0
        last_writer: dict[Tensor, int] = {}
        key: object = None
        work_since = False
        """whether gradients were made since the reduction before"""
        for position, op in enumerate(self.stage.ops):
            if reduces_over_replicas(op):
                self.joined.add(position)
                apart = work_since and self.ends_chunk(open_ops[-1:], op)
                work_since = False
                if open_ops and (apart or self.key(op) != key or self.is_full(size, open_ops[-1], op)):
                    self.close(open_ops, last_writer)
                    open_ops, size = [], 0
                key = self.key(op)
                open_ops.append(op)
                size += sum(t.type.nbytes for t in _gradients(op))
                continue
            work_since |= isinstance(op, WeightGradientOp)
            if isinstance(op, WeightGradientOp):  # `all_reduce ends` writes gradients too, but only reduced ones
                last_writer.update((t, position) for t in op.writes + op.updates if t.kind is StateKind.GRAD)
        if open_ops:
            self.close(open_ops, last_writer)

    def ops(self) -> list[Op]:
        """The stage's ops with buckets in place of the reductions."""
        ops: list[Op] = []
        for position, op in enumerate(self.stage.ops):
            if position not in self.joined:
                ops.append(op)
            ops.extend(self.after.get(position, ()))
        return ops

    def key(self, op: GradSync) -> object:
        """Reductions of equal key may share a bucket."""
        return (type(op), op.micro_batch if isinstance(op, ReduceScatter) else None, op.blocking)

    def ends_chunk(self, last: list[GradSync], following: GradSync) -> bool:
        """Whether two reductions of the whole step are of different chunks."""
        whole = not isinstance(following, ReduceScatter) or following.micro_batch is None
        return whole and any(self.chunk_of[op.blocks[-1]] != self.chunk_of[following.blocks[0]] for op in last)

    def is_full(self, size: int, last: GradSync, following: GradSync) -> bool:
        """Whether a bucket of so many bytes ends before the next reduction: it has its bytes, and no layer is torn where layers count."""
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
    """One reduction of all blocks of several, else like the first: gradients or shards in block order, then the flags in block order."""
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

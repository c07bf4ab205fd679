"""`recompute{policy=none|full|attention|mlp}`: which saved tensors are dropped after forward and recovered before backward.

Inline recovery: right before the backward that needs it. `full` recovers a whole layer from its checkpoint, the input of
its attention: `recompute attention` yields the input of `mlp`, so one checkpoint a layer is kept.

    %x.mlp.0.m0, %s.attention.0.m0.* = forward attention.0 m0 (%x.attention.0.m0, %w.attention.0)
  becomes, under `full`,
    %x.mlp.0.m0 = forward attention.0 m0 (%x.attention.0.m0, %w.attention.0)
    ...
    %s.attention.0.m0.*, %r.mlp.0.m0 = recompute attention.0 m0 (%x.attention.0.m0, %w.attention.0)
    %s.mlp.0.m0.* = recompute mlp.0 m0 (%r.mlp.0.m0, %w.mlp.0)
"""

from __future__ import annotations

from typing import ClassVar

import attrs
from attrs import define, field, frozen

from passes.pass_base import Pass, PassContext
from ratrain_ir.blocks import Block, block
from ratrain_ir.module import Module, Stage
from ratrain_ir.ops import Backward, Forward, Op, Recompute, Tensor
from ratrain_ir.types import StateKind

POLICIES = ("full", "none", "attention", "mlp")


@frozen
class RecomputePass(Pass):
    """Drop saved activations after forward and recover them right before backward."""

    name: ClassVar[str] = "recompute"
    policy: str = field(default="full", metadata={"choices": POLICIES})

    def run(self, module: Module, context: PassContext) -> None:
        """Rewrite every stage under the policy."""
        kinds = {"full": ("attention", "mlp"), "none": (), "attention": ("attention",), "mlp": ("mlp",)}[self.policy]
        recovered = 0
        for stage in module.stages:
            rewriter = _Rewriter(stage, kinds)
            rewriter.run()
            recovered += rewriter.recovered
        context.statistics["recompute ops"] = recovered


@define
class _Rewriter:
    stage: Stage
    kinds: tuple[str, ...]
    forwards: dict[tuple[Block, int], Forward] = field(factory=dict)
    recovered: int = 0

    def run(self) -> None:
        if not self.kinds:
            return
        if any(type(op) is Recompute for op in self.stage.ops):
            return  # recovery is placed already; a second run changes nothing
        ops: list[Op] = []
        for op in self.stage.ops:
            if type(op) is Forward and op.block.kind in self.kinds:
                self.forwards[op.block, op.micro_batch] = op
                kept = tuple(t for t in op.writes if t.kind is not StateKind.SAVED)
                ops.append(attrs.evolve(op, writes=kept))
            elif type(op) is Backward:
                ops.extend(self.with_recovery(op))
            else:
                ops.append(op)
        self.stage.ops = ops
        self.stage.prune()

    @property
    def by_layer(self) -> bool:
        return len(self.kinds) == 2

    def with_recovery(self, op: Backward) -> list[Op]:
        """The backward op, after the recovery of what it reads."""
        kind, layer, m = op.block.kind, op.block.layer, op.micro_batch
        if kind not in self.kinds:
            return [op]
        if not self.by_layer:
            return [self.recompute(op.block, m), op]
        if kind == "attention":
            return [op]  # recovered together with its layer's mlp
        attention = self.recompute(block("attention", layer), m)
        source = self.forwards[op.block, m].reads[0]
        again = self.stage.add(Tensor(f"r.{op.block}.m{m}", StateKind.ACTIVATION, source.type))
        attention.writes = (*attention.writes, again)
        self.mark_checkpoint(attention.reads[0])
        mlp = self.recompute(op.block, m)
        mlp.reads = (again, *mlp.reads[1:])
        reads = tuple(again if t is source else t for t in op.reads)
        return [attention, mlp, attrs.evolve(op, reads=reads)]

    def recompute(self, unit: Block, m: int) -> Recompute:
        forward = self.forwards[unit, m]
        saved = tuple(t for t in forward.writes if t.kind is StateKind.SAVED)
        self.recovered += 1
        return Recompute(block=unit, micro_batch=m, reads=forward.reads, writes=saved)

    def mark_checkpoint(self, tensor: Tensor) -> None:
        if tensor.kind is StateKind.ACTIVATION:
            tensor.kind = StateKind.CHECKPOINT

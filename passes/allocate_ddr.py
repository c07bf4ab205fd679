"""`allocate-ddr{capacity=...}`: gives every tensor its bytes in the stage's arena, under the capacity.

When the live bytes alone exceed the capacity no allocation can help: the refusal names the op at the peak, who holds the bytes
there, and what would free some.
"""

from __future__ import annotations

from typing import ClassVar

from attrs import field, frozen

from passes.allocation import AllocationProblem, allocate
from passes.pass_base import Fact, Pass, PassContext
from ratrain_ir.analysis.lifetime import Lifetimes, lifetimes
from ratrain_ir.diagnostics import Note
from ratrain_ir.module import Level, Module, Stage, TargetInfo
from ratrain_ir.ops import Forward, Op
from ratrain_ir.types import StateKind, aligned


@frozen
class AllocateDdrPass(Pass):
    """Place every tensor in DDR, largest first, best fit."""

    name: ClassVar[str] = "allocate-ddr"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.PLACED, Fact.RELEASED, Fact.LEGALISED})
    forbids: ClassVar[frozenset[Fact]] = frozenset({Fact.ALLOCATED})
    capacity: int | None = field(default=None, metadata={"unit": "bytes"})

    def run(self, module: Module, context: PassContext) -> None:
        """Allocate every stage.

        Raises `DiagnosticError` RT053 or RT052 for every stage that does not fit.
        """
        capacity = self.capacity if self.capacity is not None else context.target.capacity_bytes
        for stage in module.stages:
            found = lifetimes(stage)
            if found.peak_bytes > capacity:
                _refuse(found, capacity, context, module)
                continue
            _place(stage, found)
            ratio = stage.arena_bytes / max(1, found.peak_bytes)
            text = f"arena {stage.arena_bytes} bytes, peak live {found.peak_bytes}, ratio {ratio:.4f}"
            context.statistics[f"stage {stage.index}"] = text
            if stage.arena_bytes > capacity:
                short = stage.arena_bytes - capacity
                context.diagnostics.error(
                    "RT052",
                    f"stage @{stage.index} needs an arena of {stage.arena_bytes} bytes, {short} more than the capacity "
                    f"of {capacity}, though only {found.peak_bytes} are live at once",
                    help=_way_out(module),
                )
        context.diagnostics.check()
        module.level = Level.ALLOCATED
        module.target = TargetInfo(context.target.name, capacity)


def _place(stage: Stage, found: Lifetimes) -> None:
    tensors = list(stage.tensors.values())
    sizes = [aligned(t.type.nbytes) for t in tensors]
    problem = AllocationProblem(sizes, [found.intervals[t] for t in tensors], len(stage.ops))
    for tensor, offset in zip(tensors, allocate(problem).offsets, strict=True):
        tensor.offset = offset


def _refuse(found: Lifetimes, capacity: int, context: PassContext, module: Module) -> None:
    position = found.peak_position
    stage = found.stage
    notes = [
        Note(f"{kind.value}: {size} bytes ({size / 2**30:.2f} GiB)")
        for kind, size in found.bytes_by_kind(position).items()
    ]
    context.diagnostics.error(
        "RT053",
        f"stage @{stage.index} has {found.peak_bytes} bytes live at '{stage.ops[position]!r}', "
        f"{found.peak_bytes - capacity} more than the capacity of {capacity}",
        notes=notes,
        help=_way_out(module),
    )


def _keeps_saved(op: Op) -> bool:
    """Whether a layer's forward keeps tensors for its backward that could be recovered instead."""
    return type(op) is Forward and op.block.layer is not None and any(t.kind is StateKind.SAVED for t in op.writes)


def _way_out(module: Module) -> str:
    """Levers that lower the peak of this plan, cheapest first."""
    plan = module.plan
    levers = []
    if any(_keeps_saved(op) for stage in module.stages for op in stage.ops):
        levers.append("recompute{policy=full}")
    if plan.zero == 0 and plan.dp > 1:
        levers.append("zero = 1 in the plan")
    elif plan.dp > 1 and plan.reduce == "last":
        levers.append('zero = 2 with reduce = "each-micro-batch"')
    if plan.micro_batch_size > 1:
        levers.append("a smaller micro_batch_size")
    if plan.pp < module.model.layers:
        levers.append("more stages (pp)")
    return "what would free bytes: " + "; ".join(levers) if levers else "the model needs more clusters"

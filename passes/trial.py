"""Stages as allocation sees them; and trials: a stage as it will be once the target has sized its workspace.

A pass that spends a byte budget asks a trial for the exact live bytes, and the exact arena, before anything is final.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from passes.allocation import AllocationProblem, allocate
from passes.overlap import Occupancy, occupancy
from ratrain_ir.module import Stage
from ratrain_ir.ops import Op, Recv, Send, Tensor, Update
from ratrain_ir.types import Dtype, StateKind, aligned, tensor_type

if TYPE_CHECKING:
    from passes.pass_base import PassContext
    from ratrain_ir.analysis.lifetime import Lifetimes
    from ratrain_ir.module import Module


def with_workspace(module: Module, stage: Stage, context: PassContext) -> Stage:
    """A copy of a stage's lists whose ops have the workspace and engines the target will ask for; the stage stays as it is."""
    copy = Stage(stage.index, dict(stage.tensors), [], stage.line)
    known: dict[str, Tensor] = {}
    ops: list[Op] = []
    for op in stage.ops:
        request = context.target.workspace(module, op)
        if request is None or request.nbytes == 0:
            if type(op) is Update and op.placement is not context.target.update_engine:
                ops.append(attrs.evolve(op, placement=context.target.update_engine))
            else:
                ops.append(op)
            continue
        tensor = known.get(request.key)
        if tensor is None:
            type_ = tensor_type(Dtype.U8, (request.nbytes,))
            tensor = known[request.key] = copy.add(Tensor(f"ws.{request.key}", StateKind.WORKSPACE, type_))
        ops.append(attrs.evolve(op, scratch=(tensor,)))
    copy.ops = ops
    return copy


def allocation_problem(lives: Lifetimes, *, apart: bool = False) -> AllocationProblem:
    """The placement problem of a stage's tensors, in declaration order; `apart`: what is received takes no bytes of what is sent."""
    stage = lives.stage
    tensors = list(stage.tensors.values())
    sides: dict[Tensor, int] = {}
    if apart:
        sides = dict.fromkeys((t for op in stage.ops if type(op) is Recv for t in op.writes), 1)
        sides |= dict.fromkeys((t for op in stage.ops if type(op) is Send for t in op.reads), -1)
    sizes = [aligned(t.type.nbytes) for t in tensors]
    intervals = [lives.intervals[t] for t in tensors]
    return AllocationProblem(sizes, intervals, len(stage.ops), [sides.get(t, 0) for t in tensors] if sides else None)


def trial_occupancy(module: Module, stage: Stage, context: PassContext) -> Occupancy:
    """The occupancy a stage will have once its ops have their workspace."""
    return occupancy(module, with_workspace(module, stage, context), context)


def trial_arena_bytes(module: Module, stage: Stage, context: PassContext, lag: float) -> int:
    """The arena the stage would need if it were placed now, with room for ops that lag behind by `lag` seconds."""
    lives = trial_occupancy(module, stage, context).within(lag)
    return allocate(allocation_problem(lives)).arena_bytes

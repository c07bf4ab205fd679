"""Stages as allocation sees them; and trials: a stage as it will be once the target has sized its workspace.

A pass that spends a byte budget asks a trial for the exact live bytes, and the exact arena, before anything is final.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import attrs

from ratrain.passes.memory.allocation import AllocationProblem, Effort, allocate
from ratrain.passes.memory.overlap import Occupancy, occupancy
from ratrain.ratrain_ir.module import Level, Module, Stage
from ratrain.ratrain_ir.ops import Op, Recv, Send, Tensor, Update
from ratrain.ratrain_ir.types import Dtype, StateKind, aligned, tensor_type

if TYPE_CHECKING:
    from ratrain.passes.pass_base import PassContext
    from ratrain.ratrain_ir.analysis.lifetime import Lifetimes


def with_workspace(module: Module, stage: Stage, context: PassContext) -> Stage:
    """A copy of a stage's lists whose ops have the workspace and engines the target will ask for; the stage stays as it is.

    An op gets the same copy in every trial.
    """
    copy = Stage(stage.index, dict(stage.tensors), [], stage.line)
    for op in stage.ops:
        found = prepared(module, stage, op, context)
        for tensor in found.scratch:
            copy.tensors.setdefault(tensor.name, tensor)
        copy.ops.append(found)
    return copy


def prepared(module: Module, stage: Stage, op: Op, context: PassContext) -> Op:
    """An op with the workspace and on the engine the target will ask for; the same one each time."""
    found = context.prepared.get(op)
    if found is None:
        found = context.prepared[op] = _prepared(module, stage, op, context)
    return found


def _prepared(module: Module, stage: Stage, op: Op, context: PassContext) -> Op:
    request = context.target.workspace(module, op)
    if request is not None and request.nbytes:
        key = stage.index, request.key
        tensor = context.workspace.get(key)
        if tensor is None:
            type_ = tensor_type(Dtype.U8, (request.nbytes,))
            tensor = context.workspace[key] = Tensor(stage.free_name(f"ws.{request.key}"), StateKind.WORKSPACE, type_)
        return attrs.evolve(op, scratch=(tensor,))
    if type(op) is Update and op.placement is not context.target.update_engine:
        return attrs.evolve(op, placement=context.target.update_engine)
    return op


def give_own_addresses(stages: Iterable[Stage]) -> None:
    """Give every tensor bytes that no other has, however many that takes."""
    for stage in stages:
        end = 0
        for tensor in stage.tensors.values():
            tensor.offset = end
            end += aligned(tensor.type.nbytes)


def seconds_at_own_addresses(module: Module, context: PassContext) -> float:
    """Simulated seconds of a step of a placed module, were no bytes used twice: the time its order alone takes."""
    stages = [with_workspace(module, stage, context) for stage in module.stages]
    give_own_addresses(stages)
    info = attrs.evolve(context.target.info, capacity_bytes=max(stage.arena_bytes for stage in stages))
    trial = Module(module.name, Level.ALLOCATED, module.model, module.plan, stages, info)
    try:
        return context.target.step_seconds(trial)
    finally:
        for stage in stages:
            for tensor in stage.tensors.values():
                tensor.offset = None


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


def trial_excess_bytes(module: Module, stage: Stage, context: PassContext, lag: float, capacity: int) -> int:
    """The bytes by which an arena would exceed the capacity if the stage were placed now, with room for ops that lag behind by `lag` seconds."""
    occupied = trial_occupancy(module, stage, context)
    enough = Effort(gap=max(0.0, capacity / max(1, occupied.peak_bytes(lag)) - 1))
    placement = allocate(allocation_problem(occupied.within(lag)), effort=enough, search=False)
    return max(0, placement.arena_bytes - capacity)

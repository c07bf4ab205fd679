"""What the planner knows of the training state: bytes and seconds of the units under replicas, a ZeRO level and a reduce mode, read off a module of one layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import evolve, frozen

from ratrain.ratrain_ir.config.rank_mapping import RankMapping
from ratrain.ratrain_ir.config.types import Dtype, StateKind, aligned, tensor_type
from ratrain.ratrain_ir.lowering import lower
from ratrain.ratrain_ir.model.blocks import (
    flat_elements,
    gathers_within_step,
    parts_view,
    reduces_each_micro_batch,
    shard_elements,
    view_shard_elements,
)
from ratrain.ratrain_ir.module import Module
from ratrain.ratrain_ir.ops.base import Group
from ratrain.ratrain_ir.ops.collectives import AllGather, AllReduce, ReduceScatter
from ratrain.ratrain_ir.ops.compute import Update
from ratrain.ratrain_ir.ops.tensor import Tensor, Tensors
from ratrain.ratrainc.planner.space.space import levels_of_ends
from ratrain.ratrainc.planner.space.tilings import Tiles
from ratrain.ratrainc.planner.space.units import KINDS, UNITS, Vector, block_of
from ratrain.targets.machine.timing import TimedOp, op_work
from ratrain.targets.target import MachineTarget, target_of

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.ratrainc.planner.space.setting import Setting
    from ratrain.ratrainc.planner.space.space import Shape


@frozen(eq=False)
class StateProfile:
    """The training state of the units under a number of replicas, a ZeRO level and a reduce mode."""

    carried: Vector
    """bytes that live across steps, by unit"""
    state: Vector
    """of these, bytes of masters and moments, by unit"""
    gradients: Vector
    """bytes of gradients, or of shards where each micro-batch is reduced, that are live while micro-batches are in flight"""
    sliced_gradients: Vector
    """bytes of full gradients, by unit, where each micro-batch is reduced, else 0: its slices have them in common"""
    mlp_gradient: int
    """bytes of an mlp's full gradient where each micro-batch is reduced, else 0; with tensor peers its weight half may come later, so 0"""
    head_gradient: int
    mlp_view: int
    """bytes of an mlp's view where views are gathered within the step, else 0; less the part of it that a replica has, which may be dead then"""
    embed_view: int
    """bytes of the embedding's view, or a replica's part of it, which nobody reads after the step's last forward; 0 where it has neither"""
    head_view: int
    """the same of the head, after its last backward"""
    layer_part: int
    """bytes of a replica's part of a layer's views, which nobody reads after its last backward; 0 where views are whole, or made of shards"""
    update: Vector
    """seconds of updates, by unit"""
    link: Vector
    """seconds of the collective engine in a step, by unit, latencies left out"""
    link_each: Vector
    """seconds of the collective engine for a micro-batch"""
    tail: Vector
    """seconds from the last backward of a unit's first block to the next step's use of its view: reduction, update, gather"""
    tail_update: Vector
    """of these, seconds of the update"""


@frozen
class StateKey:
    """What the state of stages depends on."""

    dp: int
    tp: int
    zero: int
    reduce: str
    ends: int | None
    shard_group: int | None
    view_group: int | None
    tiles: Tiles
    """of a single stage"""

    @property
    def near(self) -> tuple[int, int, int | None, int | None, Tiles]:
        """What the seconds of an op on given bytes depend on."""
        return self.dp, self.tp, self.shard_group, self.view_group, self.tiles


def state_key(shape: Shape) -> StateKey:
    """What the state of a shape's stages depends on: of the mapping, how many replicas of a stage are near."""
    tiles = tuple(evolve(tile, stages=1) for tile in shape.tiles)
    groups = shape.shard_group, shape.view_group
    return StateKey(shape.dp, shape.tp, shape.zero, shape.reduce, shape.ends, *groups, tiles)


def state_profile(setting: Setting, key: StateKey, timed: dict[TimedOp, float]) -> StateProfile:
    """The profile of a state; `timed` are seconds of ops under its mapping that are known, and takes those that are found."""
    mapping = RankMapping(key.tiles) if key.tiles else None
    shape: dict[str, Any] = {"pp": 1, "dp": key.dp, "tp": key.tp, "cuts": (), "micro_batches": 1, "zero": key.zero}
    shape |= {"zero_blocks": levels_of_ends(key.ends), "shard_group": key.shard_group}
    shape |= {"view_group": key.view_group}
    state = _State.of(setting, setting.shaped(**shape, reduce=key.reduce, mapping=mapping), timed)
    return StateProfile(
        carried=_by_unit(state.carried_bytes),
        state=_by_unit(state.state_bytes),
        gradients=_by_unit(
            lambda kind: state.shard_bytes(kind) if state.reduces_each(kind) else state.gradient_bytes(kind)
        ),
        sliced_gradients=_by_unit(lambda kind: state.gradient_bytes(kind) if state.reduces_each(kind) else 0),
        mlp_gradient=state.gradient_bytes("mlp") if state.reduces_each("mlp") and key.tp == 1 else 0,
        head_gradient=state.gradient_bytes("head") if state.reduces_each("head") else 0,
        mlp_view=state.view_bytes("mlp") - state.carried_view_bytes("mlp"),
        embed_view=state.carried_view_bytes("embed"),
        head_view=state.carried_view_bytes("head"),
        layer_part=sum(map(state.part_bytes, KINDS["layer"])),
        update=_by_unit(lambda kind: state.seconds(Update, kind)),
        link=_by_unit(lambda kind: state.link_seconds(kind, every_micro_batch=False)),
        link_each=_by_unit(lambda kind: state.link_seconds(kind, every_micro_batch=True)),
        tail=np.array([state.tail_seconds(kind) for kind in _FIRST_BLOCKS]),
        tail_update=np.array([state.seconds(Update, kind) for kind in _FIRST_BLOCKS]),
    )


_FIRST_BLOCKS = ("embed", "attention", "head")
"""Of each unit, the kind of its first block."""


def _by_unit(of_kind: Callable[[str], float]) -> Vector:
    return np.array([sum(of_kind(kind) for kind in KINDS[unit]) for unit in UNITS], float)


StateOp = ReduceScatter | AllReduce | AllGather | Update


@frozen(eq=False)
class _State:
    """Bytes and seconds of the state of one kind of block, read off a module of one layer and one micro-batch."""

    target: MachineTarget
    module: Module
    ops: dict[tuple[type, str], list[StateOp]]
    timed: dict[TimedOp, float]
    """seconds that are known"""

    @classmethod
    def of(cls, setting: Setting, plan: Plan, timed: dict[TimedOp, float]) -> _State:
        module = lower(setting.model.with_one_layer(), plan)
        target = target_of(setting.machine)
        ops: dict[tuple[type, str], list[StateOp]] = {}
        for op in module.stages[0].ops:
            if type(op) is Update:
                op.placement = target.update_engine
                ops.setdefault((Update, op.block.kind), []).append(op)
            elif isinstance(op, ReduceScatter | AllReduce | AllGather) and len(op.blocks) == 1:
                ops.setdefault((type(op), op.blocks[0].kind), []).append(op)
        return cls(target, module, ops, timed)

    @property
    def plan(self) -> Plan:
        return self.module.plan

    def view_bytes(self, kind: str) -> int:
        return aligned(
            flat_elements(self.module.model, self.plan, block_of(kind)) * Dtype(self.plan.view_dtype).itemsize
        )

    def gradient_bytes(self, kind: str) -> int:
        return aligned(
            flat_elements(self.module.model, self.plan, block_of(kind)) * Dtype(self.plan.grad_dtype).itemsize
        )

    def shard(self, kind: str) -> int:
        return shard_elements(self.module.model, self.plan, block_of(kind))

    def shard_bytes(self, kind: str) -> int:
        return aligned(self.shard(kind) * Dtype(self.plan.grad_shard_dtype).itemsize)

    def part_bytes(self, kind: str) -> int:
        """What a replica has of a view that a group has between it."""
        if not parts_view(self.plan, block_of(kind)):
            return 0
        elements = view_shard_elements(self.module.model, self.plan, block_of(kind))
        return aligned(elements * Dtype(self.plan.view_dtype).itemsize)

    def carried_view_bytes(self, kind: str) -> int:
        """What lives of a view across steps."""
        return self.part_bytes(kind) if gathers_within_step(self.plan, block_of(kind)) else self.view_bytes(kind)

    def carried_bytes(self, kind: str) -> int:
        return self.carried_view_bytes(kind) + self.state_bytes(kind) + aligned(Dtype.I64.itemsize)

    def state_bytes(self, kind: str) -> int:
        return 3 * aligned(self.shard(kind) * Dtype.F32.itemsize)

    def of_op(self, op: StateOp) -> float:
        depends_on = self.target.timed(self.module, self.module.stages[0], op)
        seconds = self.timed.get(depends_on)
        if seconds is None:
            seconds = self.timed[depends_on] = op_work(depends_on, self.plan, self.target.machine).seconds
        return seconds

    def reduces_each(self, kind: str) -> bool:
        """Whether a block's gradient is reduced after each micro-batch."""
        return reduces_each_micro_batch(self.plan, block_of(kind))

    def seconds(self, op: type, kind: str) -> float:
        """Seconds of a block's op of a class alone; of several the shortest, 0 where there is none."""
        return min((self.of_op(each) for each in self.ops.get((op, kind), ())), default=0.0)

    def link_seconds(self, kind: str, *, every_micro_batch: bool) -> float:
        """Seconds of the collective engine for a block, once a step or for each micro-batch."""
        collectives = [op for (_, k), ops in self.ops.items() if k == kind for op in ops if not isinstance(op, Update)]
        of_micro_batch = [op for op in collectives if getattr(op, "micro_batch", None) is not None]
        chosen = of_micro_batch if every_micro_batch else [op for op in collectives if op not in of_micro_batch]
        return sum(map(self.marginal, chosen))

    def marginal(self, op: StateOp) -> float:
        """Seconds that a collective adds to one that already moves very much: in no bucket can it take less.

        What tensor peers share is in no bucket: only collectives over replicas are joined.
        """
        if isinstance(op, AllReduce) and op.group is Group.TENSOR:
            return self.of_op(op)
        return (self.of_op(_scaled(op, 2 * _MANY)) - self.of_op(_scaled(op, _MANY))) / _MANY

    def tail_seconds(self, kind: str) -> float:
        """A block's reduction, update and gather, one after another; with tensor peers the sum of what they share is one more of them."""
        reductions = sum(map(self.of_op, self.ops.get((AllReduce, kind), ())))
        return reductions + sum(self.seconds(op, kind) for op in (ReduceScatter, Update)) + self.gather_seconds(kind)

    def gather_seconds(self, kind: str) -> float:
        """The shortest gather of a block's view at the step's end, and the shortest for a use; 0 where there is none."""
        gathers = [op for op in self.ops.get((AllGather, kind), ()) if isinstance(op, AllGather)]
        apart = ([op for op in gathers if (op.micro_batch is None) is at_end] for at_end in (True, False))
        return sum(min(map(self.of_op, each), default=0.0) for each in apart)


_MANY = 4096


def _scaled(op: StateOp, factor: int) -> StateOp:
    """An op on tensors that many times as large."""

    def scaled(tensors: Tensors) -> Tensors:
        return tuple(
            t
            if t.kind is StateKind.SCALAR
            else Tensor(t.name, t.kind, tensor_type(t.type.dtype, (t.type.elements * factor,)))
            for t in tensors
        )

    return evolve(op, reads=scaled(op.reads), writes=scaled(op.writes), updates=scaled(op.updates))

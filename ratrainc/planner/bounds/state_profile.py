"""Profile of the training state: bytes and seconds of each unit under replicas, a ZeRO level and a reduce mode.

It is read off a module of one layer and one micro-batch. Collectives count without their latency, since buckets may
join any number of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from attrs import evolve, frozen

from ratrain.ratrain_ir.config.types import Dtype, StateKind, aligned, tensor_type
from ratrain.ratrain_ir.lowering import lower
from ratrain.ratrain_ir.model.blocks import flat_elements
from ratrain.ratrain_ir.model.sharded_blocks import (
    frozen_elements,
    frozen_parts,
    gathers_within_step,
    packed_frozen_bytes,
    parts_view,
    reduces_each_micro_batch,
    shard_elements,
    shares_frozen,
    view_shard_elements,
)
from ratrain.ratrain_ir.module import Module
from ratrain.ratrain_ir.ops.base import Group
from ratrain.ratrain_ir.ops.collectives import AllGather, AllReduce, ReduceScatter
from ratrain.ratrain_ir.ops.compute import Update
from ratrain.ratrain_ir.ops.tensor import Tensor, Tensors
from ratrain.ratrainc.planner.space.units import KINDS, UNITS, Vector, block_of
from ratrain.targets.machine.timing import TimedOp, op_work
from ratrain.targets.target import MachineTarget, target_of

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.ratrainc.planner.space.search_setting import SearchSetting
    from ratrain.ratrainc.planner.space.space import Shape


@frozen(eq=False)
class StateProfile:
    """Bytes and seconds of the training state, by unit where a field is a vector."""

    carried: Vector
    """bytes that live across steps"""
    state: Vector
    """bytes of masters and moments, which `carried` includes"""
    gradients: Vector
    """bytes of gradients live while micro-batches are in flight; of shards if each micro-batch is reduced"""
    sliced_gradients: Vector
    """bytes of full gradients if each micro-batch is reduced, else 0: its slices have them in common"""
    mlp_gradient: int
    """bytes of an mlp's full gradient if each micro-batch is reduced; 0 if tp > 1, whose weight half may come
    later"""
    head_gradient: int
    mlp_view: int
    """bytes of an mlp's view if gathered within the step, less the replica's own part, which may be dead by then; else
    0"""
    embed_view: int
    """bytes of the embedding's view, or of a replica's part of it, which are dead after the last forward; 0 if it has
    neither"""
    head_view: int
    """bytes of the head's view, or of a replica's part of it, dead after its last backward; 0 if it has neither"""
    layer_part: int
    """bytes of a replica's part of a layer's views, dead after its last backward; 0 if views are whole or made of
    shards"""
    update: Vector
    """seconds of updates"""
    link: Vector
    """seconds of the collective engine in a step, without latencies"""
    link_each: Vector
    """seconds of the collective engine a micro-batch, without latencies"""
    tail: Vector
    """seconds from the last backward of a unit's first block to the next use of its view: reduction, update, gather"""
    tail_update: Vector
    """seconds of the update, which `tail` includes"""


def state_profile(setting: SearchSetting, stage: Shape, timed: dict[TimedOp, float]) -> StateProfile:
    """Read the profile of a stage's state (`Shape.stage`); `timed` caches the seconds of ops under its mapping."""
    sharding = {"zero": stage.zero, "reduce": stage.reduce, "zero_blocks": stage.zero_blocks}
    groups = {"shard_group": stage.shard_group, "view_group": stage.view_group, "mapping": stage.mapping}
    state = _State.of(setting, setting.shaped(dp=stage.dp, tp=stage.tp, **sharding, **groups), timed)
    return StateProfile(
        carried=_by_unit(state.carried_bytes),
        state=_by_unit(state.state_bytes),
        gradients=_by_unit(
            lambda kind: state.shard_bytes(kind) if state.reduces_each(kind) else state.gradient_bytes(kind)
        ),
        sliced_gradients=_by_unit(lambda kind: state.gradient_bytes(kind) if state.reduces_each(kind) else 0),
        mlp_gradient=state.gradient_bytes("mlp") if state.reduces_each("mlp") and stage.tp == 1 else 0,
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
"""Kind of the first block of each unit."""


def _by_unit(of_kind: Callable[[str], float]) -> Vector:
    return np.array([sum(of_kind(kind) for kind in KINDS[unit]) for unit in UNITS], float)


StateOp = ReduceScatter | AllReduce | AllGather | Update


@frozen(eq=False)
class _State:
    """Bytes and seconds of the state of one kind of block."""

    target: MachineTarget
    module: Module
    ops: dict[tuple[type, str], list[StateOp]]
    timed: dict[TimedOp, float]
    """cached seconds"""

    @classmethod
    def of(cls, setting: SearchSetting, plan: Plan, timed: dict[TimedOp, float]) -> _State:
        module = lower(setting.model.with_one_layer(), plan)
        target = target_of(setting.machine)
        ops: dict[tuple[type, str], list[StateOp]] = {}
        for op in module.stages[0].ops:
            if type(op) is Update:
                # an update's seconds depend on its engine, which codegen chooses only later
                op.placement = target.update_engine
                ops.setdefault((Update, op.block.kind), []).append(op)
            elif isinstance(op, ReduceScatter | AllReduce | AllGather) and len(op.blocks) == 1:
                ops.setdefault((type(op), op.blocks[0].kind), []).append(op)
        return cls(target, module, ops, timed)

    @property
    def plan(self) -> Plan:
        return self.module.plan

    def view_bytes(self, kind: str) -> int:
        """Return the bytes of a whole view, with frozen parameters that are gathered as it is."""
        gathered = self.whole_frozen_bytes(kind) if shares_frozen(self.plan, block_of(kind)) else 0
        return self.whole_bytes(kind, self.plan.view_dtype) + gathered

    def gradient_bytes(self, kind: str) -> int:
        return self.whole_bytes(kind, self.plan.grad_dtype)

    def whole_bytes(self, kind: str, dtype: str) -> int:
        return aligned(flat_elements(self.module.model, self.plan, block_of(kind)) * Dtype(dtype).itemsize)

    def shard(self, kind: str) -> int:
        return shard_elements(self.module.model, self.plan, block_of(kind))

    def shard_bytes(self, kind: str) -> int:
        return aligned(self.shard(kind) * Dtype(self.plan.grad_shard_dtype).itemsize)

    def part_bytes(self, kind: str) -> int:
        """Return the bytes of a replica's part of a view that a group shares out; 0 if no group does."""
        if not parts_view(self.plan, block_of(kind)):
            return 0
        elements = view_shard_elements(self.module.model, self.plan, block_of(kind))
        return aligned(elements * Dtype(self.plan.view_dtype).itemsize)

    def carried_view_bytes(self, kind: str) -> int:
        """Return the bytes of a view that live across steps."""
        return self.part_bytes(kind) if gathers_within_step(self.plan, block_of(kind)) else self.view_bytes(kind)

    def carried_bytes(self, kind: str) -> int:
        # each block that trains also carries its update count
        count = aligned(Dtype.I64.itemsize) if self.shard(kind) else 0
        return self.carried_view_bytes(kind) + self.state_bytes(kind) + count + self.frozen_bytes(kind)

    def frozen_bytes(self, kind: str) -> int:
        """Return the bytes of a replica's frozen parameters of a block, plain and packed, from step to step."""
        return self.whole_frozen_bytes(kind, frozen_parts(self.plan, block_of(kind)))

    def whole_frozen_bytes(self, kind: str, parts: int = 1) -> int:
        """Return the bytes of a block's frozen parameters, plain and packed, or of one of some equal parts of them."""
        of_block = self.module.model, self.plan, block_of(kind)
        plain = frozen_elements(*of_block) // parts * Dtype(self.plan.view_dtype).itemsize
        return aligned(plain) + aligned(packed_frozen_bytes(*of_block) // parts)

    def state_bytes(self, kind: str) -> int:
        # f32 master weights and two moments
        return 3 * aligned(self.shard(kind) * Dtype.F32.itemsize)

    def of_op(self, op: StateOp) -> float:
        # ops with equal `TimedOp` take equal time; other levels of the same mapping ask for them again
        depends_on = self.target.timed(self.module, self.module.stages[0], op)
        seconds = self.timed.get(depends_on)
        if seconds is None:
            seconds = self.timed[depends_on] = op_work(depends_on, self.plan, self.target.machine).seconds
        return seconds

    def reduces_each(self, kind: str) -> bool:
        """Return True if a block's gradient is reduced after each micro-batch."""
        return reduces_each_micro_batch(self.plan, block_of(kind))

    def seconds(self, op: type, kind: str) -> float:
        """Return the seconds of a block's shortest op of a class; 0 if it has none."""
        return min((self.of_op(each) for each in self.ops.get((op, kind), ())), default=0.0)

    def link_seconds(self, kind: str, *, every_micro_batch: bool) -> float:
        """Return the seconds of the collective engine for a block, once a step or for each micro-batch."""
        collectives = [op for (_, k), ops in self.ops.items() if k == kind for op in ops if not isinstance(op, Update)]
        of_micro_batch = [op for op in collectives if getattr(op, "micro_batch", None) is not None]
        chosen = of_micro_batch if every_micro_batch else [op for op in collectives if op not in of_micro_batch]
        return sum(map(self.marginal, chosen))

    def marginal(self, op: StateOp) -> float:
        """Return the seconds that a collective adds to a very large one: in no bucket can it take less.

        Only collectives over replicas are joined in buckets; sums over tensor-parallel ranks count whole.
        """
        if isinstance(op, AllReduce) and op.group is Group.TENSOR:
            return self.of_op(op)
        # the latency of a collective is in both terms and cancels
        return (self.of_op(_scaled(op, 2 * _MANY)) - self.of_op(_scaled(op, _MANY))) / _MANY

    def tail_seconds(self, kind: str) -> float:
        """Return the seconds of a block's reduction, update and gather in a row, with sums over tensor ranks."""
        reductions = sum(map(self.of_op, self.ops.get((AllReduce, kind), ())))
        return reductions + sum(self.seconds(op, kind) for op in (ReduceScatter, Update)) + self.gather_seconds(kind)

    def gather_seconds(self, kind: str) -> float:
        """Return the seconds of a block's shortest gather at the step's end, plus its shortest for a use."""
        gathers = [op for op in self.ops.get((AllGather, kind), ()) if isinstance(op, AllGather)]
        # a gather without a micro-batch is at the step's end
        apart = ([op for op in gathers if (op.micro_batch is None) is at_end] for at_end in (True, False))
        return sum(min(map(self.of_op, each), default=0.0) for each in apart)


_MANY = 4096


def _scaled(op: StateOp, factor: int) -> StateOp:
    """Return an op on tensors `factor` times as large; scalars stay."""

    def scaled(tensors: Tensors) -> Tensors:
        return tuple(
            t
            if t.kind is StateKind.SCALAR
            else Tensor(t.name, t.kind, tensor_type(t.type.dtype, (t.type.elements * factor,)))
            for t in tensors
        )

    return evolve(op, reads=scaled(op.reads), writes=scaled(op.writes), updates=scaled(op.updates))

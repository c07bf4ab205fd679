"""Profile of the training state: bytes and seconds of each unit under replicas, a ZeRO level and a reduce mode.

It is read off a module of one layer of each class and one micro-batch. Collectives count without their latency, since
buckets may join any number of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from ratrain.ratrain_ir.config.types import Dtype, StateKind, aligned, tensor_type
from ratrain.ratrain_ir.lowering import lower
from ratrain.ratrain_ir.model.blocks import Block, block, flat_elements
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
from ratrain.ratrain_ir.ops.compute import Backward, BlockOp, Update
from ratrain.ratrain_ir.ops.tensor import Tensor, Tensors
from ratrain.ratrainc.planner.space.units import Vector, by_block, unit_vector
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
    head_gathered: int
    """bytes of the head's view that its backward reads and that is gathered within the step, less the replica's own
    part; else 0"""
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
    state = _State.of(setting, setting.shaped(dp=stage.dp, tp=stage.tp, ep=stage.ep, **sharding, **groups), timed)
    classes = setting.classes
    mlps = [block("mlp", layer) for layer in range(len(classes))]
    returning = [owner for owner, back in zip(mlps, classes.goes_back, strict=True) if back]
    embed, head = block("embed"), block("head")

    def by_unit(of_block: Callable[[Block], float]) -> Vector:
        return by_block(len(classes), of_block)

    def by_first_block(of_block: Callable[[Block], float]) -> Vector:
        first = [of_block(block("attention", layer)) for layer in range(len(classes))]
        return unit_vector(of_block(embed), first, of_block(head))

    return StateProfile(
        carried=by_unit(state.carried_bytes),
        state=by_unit(state.state_bytes),
        gradients=by_unit(
            lambda owner: state.shard_bytes(owner) if state.reduces_each(owner) else state.gradient_bytes(owner)
        ),
        sliced_gradients=by_unit(lambda owner: state.gradient_bytes(owner) if state.reduces_each(owner) else 0),
        mlp_gradient=_least(
            state.gradient_bytes(owner) if state.reduces_each(owner) and stage.tp == 1 else 0 for owner in returning
        ),
        head_gradient=state.gradient_bytes(head) if state.reduces_each(head) else 0,
        head_gathered=state.gathered_bytes(Backward, head),
        mlp_view=_least(state.view_bytes(owner) - state.carried_view_bytes(owner) for owner in returning),
        embed_view=state.carried_view_bytes(embed),
        head_view=state.carried_view_bytes(head),
        layer_part=max(state.part_bytes(block("attention", owner.layer)) + state.part_bytes(owner) for owner in mlps),
        update=by_unit(lambda owner: state.seconds(Update, owner)),
        link=by_unit(lambda owner: state.link_seconds(owner, every_micro_batch=False)),
        link_each=by_unit(lambda owner: state.link_seconds(owner, every_micro_batch=True)),
        tail=by_first_block(state.tail_seconds),
        tail_update=by_first_block(lambda owner: state.seconds(Update, owner)),
    )


def _least(nbytes: Iterable[int]) -> int:
    """Return the least bytes of blocks with a backward; 0 if there is none."""
    return min(nbytes, default=0)


StateOp = ReduceScatter | AllReduce | AllGather | Update


@frozen(eq=False)
class _State:
    """Bytes and seconds of the state of blocks."""

    target: MachineTarget
    module: Module
    ops: dict[tuple[type, Block], list[StateOp]]
    timed: dict[TimedOp, float]
    """cached seconds"""

    @classmethod
    def of(cls, setting: SearchSetting, plan: Plan, timed: dict[TimedOp, float]) -> _State:
        module = lower(setting.classes.model, plan)
        target = target_of(setting.machine)
        ops: dict[tuple[type, Block], list[StateOp]] = {}
        for op in module.stages[0].ops:
            if type(op) is Update:
                # an update's seconds depend on its engine, which codegen chooses only later
                op.placement = target.update_engine
                ops.setdefault((Update, op.block), []).append(op)
            elif isinstance(op, ReduceScatter | AllReduce | AllGather) and len(op.blocks) == 1:
                ops.setdefault((type(op), op.blocks[0]), []).append(op)
        return cls(target, module, ops, timed)

    @property
    def plan(self) -> Plan:
        return self.module.plan

    def view_bytes(self, owner: Block) -> int:
        """Return the bytes of a whole view, with frozen parameters that are gathered as it is."""
        gathered = self.whole_frozen_bytes(owner) if shares_frozen(self.module.model, self.plan, owner) else 0
        return self.whole_bytes(owner, self.plan.view_dtype) + gathered

    def gradient_bytes(self, owner: Block) -> int:
        return self.whole_bytes(owner, self.plan.grad_dtype)

    def whole_bytes(self, owner: Block, dtype: str) -> int:
        return aligned(flat_elements(self.module.model, self.plan, owner) * Dtype(dtype).itemsize)

    def shard(self, owner: Block) -> int:
        return shard_elements(self.module.model, self.plan, owner)

    def shard_bytes(self, owner: Block) -> int:
        return aligned(self.shard(owner) * Dtype(self.plan.grad_shard_dtype).itemsize)

    def part_bytes(self, owner: Block) -> int:
        """Return the bytes of a replica's part of a view that a group shares out; 0 if no group does."""
        if not parts_view(self.module.model, self.plan, owner):
            return 0
        elements = view_shard_elements(self.module.model, self.plan, owner)
        return aligned(elements * Dtype(self.plan.view_dtype).itemsize)

    def carried_view_bytes(self, owner: Block) -> int:
        """Return the bytes of a view that live across steps."""
        return self.part_bytes(owner) if gathers_within_step(self.plan, owner) else self.view_bytes(owner)

    def gathered_bytes(self, kind: type[BlockOp], owner: Block) -> int:
        """Return the bytes of the view, beyond a replica's part, that is gathered for an op of a block; the least."""
        ops = (op for op in self.module.stages[0].ops if type(op) is kind and op.block is owner)
        views = ([t for t in op.reads if t.kind is StateKind.VIEW and not t.carried] for op in ops)
        nbytes = min((sum(aligned(view.type.nbytes) for view in each) for each in views), default=0)
        return max(nbytes - self.part_bytes(owner), 0)

    def carried_bytes(self, owner: Block) -> int:
        # each block that trains also carries its update count
        count = aligned(Dtype.I64.itemsize) if self.shard(owner) else 0
        return self.carried_view_bytes(owner) + self.state_bytes(owner) + count + self.frozen_bytes(owner)

    def frozen_bytes(self, owner: Block) -> int:
        """Return the bytes of a replica's frozen parameters of a block, plain and packed, from step to step."""
        return self.whole_frozen_bytes(owner, frozen_parts(self.module.model, self.plan, owner))

    def whole_frozen_bytes(self, owner: Block, parts: int = 1) -> int:
        """Return the bytes of a block's frozen parameters, plain and packed, or of one of some equal parts of them."""
        of_block = self.module.model, self.plan, owner
        plain = frozen_elements(*of_block) // parts * Dtype(self.plan.view_dtype).itemsize
        return aligned(plain) + aligned(packed_frozen_bytes(*of_block) // parts)

    def state_bytes(self, owner: Block) -> int:
        # f32 master weights and two moments
        return 3 * aligned(self.shard(owner) * Dtype.F32.itemsize)

    def of_op(self, op: StateOp) -> float:
        # ops with equal `TimedOp` take equal time; other levels of the same mapping ask for them again
        depends_on = self.target.timed(self.module, self.module.stages[0], op)
        seconds = self.timed.get(depends_on)
        if seconds is None:
            seconds = self.timed[depends_on] = op_work(depends_on, self.plan, self.target.machine).seconds
        return seconds

    def reduces_each(self, owner: Block) -> bool:
        """Return True if a block's gradient is reduced after each micro-batch."""
        return reduces_each_micro_batch(self.module.model, self.plan, owner)

    def seconds(self, op: type, owner: Block) -> float:
        """Return the seconds of a block's shortest op of a class; 0 if it has none."""
        return min((self.of_op(each) for each in self.ops.get((op, owner), ())), default=0.0)

    def link_seconds(self, owner: Block, *, every_micro_batch: bool) -> float:
        """Return the seconds of the collective engine for a block, once a step or for each micro-batch."""
        collectives = [
            op for (_, each), ops in self.ops.items() if each is owner for op in ops if not isinstance(op, Update)
        ]
        of_micro_batch = [op for op in collectives if getattr(op, "micro_batch", None) is not None]
        chosen = of_micro_batch if every_micro_batch else [op for op in collectives if op not in of_micro_batch]
        return sum(map(self.marginal, chosen))

    def marginal(self, op: StateOp) -> float:
        """Return the seconds that a collective adds to a very large one: in no bucket can it take less.

        Only collectives over replicas are joined in buckets; sums over tensor-parallel or expert ranks count whole.
        """
        if isinstance(op, AllReduce) and op.group in (Group.TENSOR, Group.EXPERTS):
            return self.of_op(op)
        # the latency of a collective is in both terms and cancels
        return (self.of_op(_scaled(op, 2 * _MANY)) - self.of_op(_scaled(op, _MANY))) / _MANY

    def tail_seconds(self, owner: Block) -> float:
        """Return the seconds of a block's reduction, update and gather in a row, with sums over tensor ranks."""
        reductions = sum(map(self.of_op, self.ops.get((AllReduce, owner), ())))
        return reductions + sum(self.seconds(op, owner) for op in (ReduceScatter, Update)) + self.gather_seconds(owner)

    def gather_seconds(self, owner: Block) -> float:
        """Return the seconds of a block's shortest gather at the step's end, plus its shortest for a use."""
        gathers = [op for op in self.ops.get((AllGather, owner), ()) if isinstance(op, AllGather)]
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

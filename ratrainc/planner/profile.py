"""What the planner knows of a model on a machine: seconds and bytes of its units, asked of the compiler's own functions.

Units are the embedding, one layer (attention and mlp) and the head. This is the only file of the planner that asks a target for times;
everything else computes with the arrays made here. Each figure is a lower bound of what the compiler and the simulator use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import define, evolve, field, frozen
from numpy.typing import NDArray

from ratrain.passes.pass_base import PassContext
from ratrain.passes.placement.split_backward import split_backwards
from ratrain.passes.recovery.kept_bytes import kept_bytes
from ratrain.passes.recovery.rewriting import CHOICES, LayerChoice, rewritten, same_for_all
from ratrain.ratrain_ir.blocks import (
    Block,
    block,
    computed_type,
    exchanged_type,
    flat_elements,
    gathers_within_step,
    kept_in_forward,
    parts_view,
    reduces_each_micro_batch,
    saved_slots,
    shard_elements,
    shares_rows,
    stream_type,
    token_type,
    view_shard_elements,
)
from ratrain.ratrain_ir.frontend.plan import slice_plan
from ratrain.ratrain_ir.frontend.rank_mapping import RankMapping
from ratrain.ratrain_ir.lowering import lower
from ratrain.ratrain_ir.module import Module, Stage
from ratrain.ratrain_ir.ops import (
    AllGather,
    AllReduce,
    Backward,
    BackwardHeads,
    BackwardInput,
    BackwardWeight,
    BlockOp,
    Forward,
    Group,
    Project,
    Recompute,
    ReduceScatter,
    Tensor,
    Tensors,
    Update,
)
from ratrain.ratrain_ir.topology import grid
from ratrain.ratrain_ir.types import Dtype, StateKind, aligned, tensor_type
from ratrain.ratrainc.planner.exchanges import NO_EXCHANGES, ExchangeProfile, exchange_profile
from ratrain.ratrainc.planner.setting import Setting
from ratrain.ratrainc.planner.space import levels_of_ends
from ratrain.ratrainc.planner.tilings import Tiles
from ratrain.targets.machine.capacity import mesh_capacity
from ratrain.targets.machine.link_groups import Link
from ratrain.targets.machine.placement import Members, Placement
from ratrain.targets.machine.timing import TimedOp, op_work
from ratrain.targets.target import MachineTarget, target_of

if TYPE_CHECKING:
    from ratrain.ratrain_ir.frontend.model_config import ModelConfig
    from ratrain.ratrain_ir.frontend.plan import Plan
    from ratrain.ratrain_ir.target import Capacity
    from ratrain.ratrainc.planner.space import Shape
    from ratrain.targets.machine.machine import Machine

Vector = NDArray[np.float64]

UNITS = ("embed", "layer", "head")
_KINDS = {"embed": ("embed",), "layer": ("attention", "mlp"), "head": ("head",)}


_FORWARD, _BACKWARD = (Forward, Project), (Backward, BackwardHeads)
"""What computes a block forward and back, with what norms over tensor peers have before them."""


@frozen(eq=False)
class WorkProfile:
    """One micro-batch of a given size: seconds and bytes that do not depend on how many replicas there are.

    Where it passes in slices, seconds are those of all of them, and bytes, and what is said of a layer's recovery, those of the least one.
    """

    forward: Vector
    """seconds of a unit's forward [embed, layer, head]"""
    backward: Vector
    """seconds of a unit's backward, recovery apart"""
    kept_bytes: Vector
    """bytes that a layer keeps for its backward beyond its checkpoint, ascending: corners of the convex hull of all choices"""
    recovery: Vector
    """seconds of recovery that go with them, descending"""
    activation: int
    """bytes of a layer's input, or of the head's"""
    mlp_ends: int
    """bytes of an mlp's input, of the gradient of that, and of the gradient of its output; of tensor peers, whole ones"""
    head_ends: int
    """bytes of the head's input, and of the gradient of that"""
    inputs: int
    """bytes of the tokens, or of the labels, of a micro-batch"""
    documents: int
    """bytes of where documents start in a micro-batch, which every stage holds from forward to backward; 0 where they are not kept apart"""
    mlp_saved: int
    """bytes of all an mlp's backward reads beside its input"""
    mlp_scratch: int
    """workspace of an mlp's backward; 0 with tensor peers, where a half of it may come apart"""
    head_scratch: int
    """workspace of the head's backward, and what it reads that its forward saved"""
    boundary: int
    """bytes that go to the next stage"""
    first_forward: Vector
    """seconds of a unit's forward of the first slice, or of all where there are none"""
    first_backward: Vector
    """seconds of compute until the first slice's gradient has passed a unit"""
    passed_back: Vector
    """the same of a micro-batch: with tensor peers, whose backwards may be in halves, the input halves alone"""
    weight_half: Vector
    """seconds of a unit's backward that may follow when the gradient has passed; 0 where backwards are whole"""
    always_kept: int
    """bytes that a layer holds beside its input, whatever is recovered: keys and values that later slices attend to"""
    pending: int
    """bytes that a layer holds from the input half of its backward to its weight half, where they are apart"""


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


@define(eq=False)
class Profiles:
    """The profiles of a setting, each made once."""

    setting: Setting
    works: dict[tuple[int, int, int], WorkProfile] = field(factory=dict)
    states: dict[StateKey, StateProfile] = field(factory=dict)
    crossed: dict[tuple[int, int, int, Tiles], frozenset[Link]] = field(factory=dict)
    exchanged: dict[tuple[int, int, int, Members], ExchangeProfile] = field(factory=dict)
    timed: dict[tuple[int, int, int | None, int | None, Tiles], dict[TimedOp, float]] = field(factory=dict)
    """seconds of collectives and updates, by what they depend on: the levels of blocks say which there are, not how long one takes"""
    peers_near: dict[tuple[int, int, Tiles], Members] = field(factory=dict)
    capacities: dict[tuple[int, int, int], int] = field(factory=dict)

    def work(self, micro_batch_size: int, slices: int = 1, tp: int = 1) -> WorkProfile:
        """The profile of one micro-batch size and numbers of slices and tensor peers, from a module of one layer."""
        key = micro_batch_size, slices, tp
        if key not in self.works:
            self.works[key] = _work_profile(self.setting, *key)
        return self.works[key]

    def state(self, key: StateKey) -> StateProfile:
        """The profile of a state under a mapping of the replicas."""
        if key not in self.states:
            self.states[key] = _state_profile(self.setting, key, self.timed.setdefault(key.near, {}))
        return self.states[key]

    def message(self, shape: Shape) -> float:
        """Seconds of a boundary's way to the next stage, the quickest of all stages."""
        key = (shape.pp, shape.dp, shape.tp, shape.tiles)
        if key not in self.crossed:
            self.crossed[key] = _links_between_stages(self.setting.machine, *key)
        target, nbytes = (
            target_of(self.setting.machine),
            self.work(shape.micro_batch_size, shape.slices, shape.tp).boundary,
        )
        return min(target.message_seconds(nbytes, link) for link in self.crossed[key])

    def exchange(self, shape: Shape) -> ExchangeProfile:
        """What the tensor peers of a shape exchange; shapes whose peers are equally near each other have the same."""
        if shape.tp == 1:
            return NO_EXCHANGES
        near = shape.dp, shape.tp, shape.tiles
        if near not in self.peers_near:
            tiles = tuple(evolve(tile, stages=1) for tile in shape.tiles)
            placement = Placement(self.setting.machine.link_groups, grid(1, shape.dp, shape.tp), tiles or None)
            self.peers_near[near] = placement.members(Group.TENSOR.value)
        key = shape.micro_batch_size, shape.slices, shape.tp, self.peers_near[near]
        if key not in self.exchanged:
            self.exchanged[key] = exchange_profile(self.setting, shape)
        return self.exchanged[key]

    def capacity(self, shape: Shape) -> int:
        """Bytes that a rank of a shape has left for tensors."""
        mesh = shape.pp, shape.dp, shape.tp
        if mesh not in self.capacities:
            self.capacities[mesh] = rank_capacity(self.setting.model, self.setting.machine, shape).left
        return self.capacities[mesh]


def rank_capacity(model: ModelConfig, machine: Machine, shape: Shape) -> Capacity:
    """The DDR of a rank of a shape, and what is left of it for tensors."""
    return mesh_capacity(machine, grid(shape.pp, shape.dp, shape.tp), tied=model.tied_embeddings)


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


def _links_between_stages(machine: Machine, pp: int, dp: int, tp: int, tiles: Tiles) -> frozenset[Link]:
    placement = Placement(machine.link_groups, grid(pp, dp, tp), tiles or None)
    hops = placement.mesh.hops
    levels = {placement.level_between(hop.source, hop.target) for hop in hops} or {placement.outermost}
    return frozenset(placement.message_link(level) for level in levels)


def _work_profile(setting: Setting, micro_batch_size: int, slices: int, tp: int) -> WorkProfile:
    small = setting.model.with_one_layer()
    shape: dict[str, Any] = {
        "pp": 1,
        "dp": 1,
        "tp": tp,
        "cuts": (),
        "micro_batches": 2,
        "micro_batch_size": micro_batch_size,
        "zero": 0,
        "slices": setting.slice_lengths(slices),
    }
    plan = setting.shaped(**shape, reduce="last")
    module = lower(small, plan)
    target = target_of(setting.machine)
    context = PassContext(target)  # it knows ops that take equal time
    chosen = [(choice, rewritten(module.stages[0], same_for_all(choice))) for choice in CHOICES[setting.policy]]
    apart = _in_halves(module)
    halves = apart if tp > 1 else None
    parts = [
        _part_profile(small, slice_plan(plan, number), module, chosen, halves, context, number)
        for number in (range(slices) if plan.slices else (None,))
    ]
    kept_bytes, recovery = _lower_hull([point for part in parts for point in part.extra])
    return WorkProfile(
        forward=np.sum([part.forward for part in parts], axis=0),
        backward=np.sum([part.backward for part in parts], axis=0),
        kept_bytes=kept_bytes,
        recovery=recovery,
        activation=min(part.activation for part in parts),
        mlp_ends=min(part.mlp_ends for part in parts),
        head_ends=min(part.head_ends for part in parts),
        inputs=min(part.inputs for part in parts),
        documents=min(part.documents for part in parts),
        mlp_saved=min(part.mlp_saved for part in parts),
        mlp_scratch=_scratch_bytes(module, target, "mlp") if halves is None else 0,
        head_scratch=_scratch_bytes(module, target, "head") + min(part.head_saved for part in parts),
        boundary=min(part.boundary for part in parts),
        first_forward=parts[0].forward,
        first_backward=parts[0].passed_back,
        passed_back=np.sum([part.passed_back for part in parts], axis=0),
        weight_half=np.sum([part.weight_half for part in parts], axis=0),
        always_kept=min(part.always_kept for part in parts),
        pending=min(_pending_bytes(apart, number) for number in (range(slices) if plan.slices else (None,))),
    )


@frozen(eq=False)
class _PartProfile:
    """What a `WorkProfile` says, of one slice, or of a whole micro-batch."""

    forward: Vector
    backward: Vector
    passed_back: Vector
    weight_half: Vector
    extra: list[tuple[int, float]]
    """bytes that each choice keeps beyond what is always kept, and seconds beyond the least"""
    activation: int
    mlp_ends: int
    head_ends: int
    inputs: int
    documents: int
    mlp_saved: int
    head_saved: int
    boundary: int
    always_kept: int


def _part_profile(
    model: ModelConfig,
    plan: Plan,
    module: Module,
    chosen: Sequence[tuple[LayerChoice, Stage]],
    halves: Stage | None,
    context: PassContext,
    number: int | None,
) -> _PartProfile:
    """The profile of one slice by its number, `plan` being that of the slice. `halves`: the stage with its backwards in halves, if they may be so."""
    whole = _Ops.of(module, module.stages[0], context, number)
    always_kept = _always_kept_bytes(model, plan)
    options = [
        (kept_bytes(model, plan, choice) - always_kept, _Ops.of(module, stage, context, number))
        for choice, stage in chosen
    ]
    layer_forward = min(ops.seconds(_FORWARD, "layer") for _, ops in options)
    layer_backward = min(ops.seconds(_BACKWARD, "layer") for _, ops in options)
    least = layer_forward + layer_backward
    stream, whole_stream = aligned(exchanged_type(model, plan).nbytes), aligned(stream_type(model, plan).nbytes)
    ends = aligned(computed_type(model, plan, block("mlp", 0)).nbytes)
    gathered = (
        ends if shares_rows(plan) else 0
    )  # beside them live the rows of the gradient of the output, which a sum then adds
    backward = np.array([whole.seconds(Backward, "embed"), layer_backward, whole.seconds(Backward, "head")])
    passed_back, weight_half = backward, np.zeros(3)
    if halves is not None:
        split = _Ops.of(module, halves, context, number)
        passed_back = np.minimum(backward, [split.seconds((*_BACKWARD, BackwardInput), unit) for unit in UNITS])
        weight_half = np.array([split.seconds(BackwardWeight, unit) for unit in UNITS])
    return _PartProfile(
        forward=np.array([whole.seconds(Forward, "embed"), layer_forward, whole.seconds(Forward, "head")]),
        backward=backward,
        passed_back=passed_back,
        weight_half=weight_half,
        extra=[(kept, ops.seconds((*_FORWARD, Recompute, *_BACKWARD), "layer") - least) for kept, ops in options],
        activation=stream,
        mlp_ends=stream + gathered + 2 * ends,
        head_ends=2 * whole_stream,
        inputs=aligned(token_type(plan).nbytes),
        documents=aligned(token_type(plan).nbytes) if plan.keeps_documents_apart else 0,
        mlp_saved=_saved_bytes(model, plan, block("mlp", 0)),
        head_saved=_saved_bytes(model, plan, block("head")),
        boundary=exchanged_type(model, plan).nbytes,
        always_kept=always_kept,
    )


@frozen(eq=False)
class _Ops:
    """Seconds of the block ops of a one-layer stage, of one slice: by op class and kind of block, the cheaper of its two micro-batches."""

    times: dict[tuple[type, str], float]

    @classmethod
    def of(cls, module: Module, stage: Stage, context: PassContext, number: int | None) -> _Ops:
        times: dict[tuple[type, str], float] = {}
        for op in stage.ops:
            if isinstance(op, BlockOp) and op.slice == number:
                key = (type(op), op.block.kind)
                seconds = context.op_seconds(module, stage, op)
                times[key] = min(times.get(key, seconds), seconds)
        return cls(times)

    def seconds(self, classes: type | tuple[type, ...], unit: str) -> float:
        chosen = classes if isinstance(classes, tuple) else (classes,)
        return sum(self.times.get((op, kind), 0.0) for op, kind in product(chosen, _KINDS[unit]))


def _saved_bytes(model: ModelConfig, plan: Plan, owner: Block) -> int:
    """All that a block's forward saves for its backward."""
    return sum(aligned(slot.type.nbytes) for slot in saved_slots(model, plan, owner))


def _in_halves(module: Module) -> Stage:
    """The one stage of a module with its backwards in halves."""
    draft = module.draft()
    split_backwards(draft, draft.stages[0])
    return draft.stages[0]


def _pending_bytes(stage: Stage, number: int | None) -> int:
    """Bytes of a layer, of one slice, that its input halves leave or read and its weight halves read; the least of its micro-batches'."""
    found: dict[int, set[Tensor]] = {}
    before: dict[tuple[int, Block], set[Tensor]] = {}
    for op in stage.ops:
        if isinstance(op, BackwardInput) and op.slice == number:
            before[op.micro_batch, op.block] = {*op.reads, *op.writes, *op.updates}
        elif isinstance(op, BackwardWeight) and op.slice == number:
            both = before[op.micro_batch, op.block].intersection(op.reads)
            found.setdefault(op.micro_batch, set()).update(t for t in both if t.kind in _OF_ACTIVATIONS)
    return min(sum(aligned(tensor.type.nbytes) for tensor in tensors) for tensors in found.values())


_OF_ACTIVATIONS = (StateKind.SAVED, StateKind.CHECKPOINT, StateKind.BOUNDARY, StateKind.ACTIVATION)


def _scratch_bytes(module: Module, target: MachineTarget, kind: str) -> int:
    """Workspace of the backward of a kind of block in a one-layer module, the least of its micro-batches'."""
    ops = (op for op in module.stages[0].ops if type(op) is Backward and op.block.kind == kind)
    requests = [target.workspace(module, op) for op in ops]
    return min(aligned(request.nbytes) if request is not None else 0 for request in requests)


def _always_kept_bytes(model: ModelConfig, plan: Plan) -> int:
    """Bytes of a layer's slots that its forward keeps whatever is recovered."""
    attention = block("attention", 0)
    always = kept_in_forward(model, plan, attention)
    return sum(aligned(slot.type.nbytes) for slot in saved_slots(model, plan, attention) if slot.name in always)


def _lower_hull(points: Iterable[tuple[int, float]]) -> tuple[Vector, Vector]:
    """The lower convex hull of (bytes, seconds), from the fewest bytes to the fewest seconds."""
    hull: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if hull and y >= hull[-1][1]:
            continue
        while len(hull) >= 2:
            (x0, y0), (x1, y1) = hull[-2:]
            if (y1 - y0) * (x - x0) < (y - y0) * (x1 - x0):
                break
            hull.pop()
        if hull and hull[-1][0] == x:
            hull.pop()
        hull.append((x, y))
    return np.array([x for x, _ in hull], float), np.array([y for _, y in hull], float)


def _state_profile(setting: Setting, key: StateKey, timed: dict[TimedOp, float]) -> StateProfile:
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
        layer_part=sum(map(state.part_bytes, _KINDS["layer"])),
        update=_by_unit(lambda kind: state.seconds(Update, kind)),
        link=_by_unit(lambda kind: state.link_seconds(kind, every_micro_batch=False)),
        link_each=_by_unit(lambda kind: state.link_seconds(kind, every_micro_batch=True)),
        tail=np.array([state.tail_seconds(kind) for kind in _FIRST_BLOCKS]),
        tail_update=np.array([state.seconds(Update, kind) for kind in _FIRST_BLOCKS]),
    )


_FIRST_BLOCKS = ("embed", "attention", "head")
"""Of each unit, the kind of its first block."""


def _by_unit(of_kind: Callable[[str], float]) -> Vector:
    return np.array([sum(of_kind(kind) for kind in _KINDS[unit]) for unit in UNITS], float)


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
            flat_elements(self.module.model, self.plan, _block_of(kind)) * Dtype(self.plan.view_dtype).itemsize
        )

    def gradient_bytes(self, kind: str) -> int:
        return aligned(
            flat_elements(self.module.model, self.plan, _block_of(kind)) * Dtype(self.plan.grad_dtype).itemsize
        )

    def shard(self, kind: str) -> int:
        return shard_elements(self.module.model, self.plan, _block_of(kind))

    def shard_bytes(self, kind: str) -> int:
        return aligned(self.shard(kind) * Dtype(self.plan.grad_shard_dtype).itemsize)

    def part_bytes(self, kind: str) -> int:
        """What a replica has of a view that a group has between it."""
        if not parts_view(self.plan, _block_of(kind)):
            return 0
        elements = view_shard_elements(self.module.model, self.plan, _block_of(kind))
        return aligned(elements * Dtype(self.plan.view_dtype).itemsize)

    def carried_view_bytes(self, kind: str) -> int:
        """What lives of a view across steps."""
        return self.part_bytes(kind) if gathers_within_step(self.plan, _block_of(kind)) else self.view_bytes(kind)

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
        return reduces_each_micro_batch(self.plan, _block_of(kind))

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


def _block_of(kind: str) -> Block:
    return block(kind, 0 if kind in ("attention", "mlp") else None)

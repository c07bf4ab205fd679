"""Lowering of a model and a plan into a `dataflow` module: one complete training step in plain micro-batch order.

Per stage: all forwards, micro-batch by micro-batch; all backwards, ascending too (gradients accumulate in that order, which
is part of the semantics); then gradient reduction block by block in backward order; then, in forward order, the update of
each block and, where state is sharded, the gather of its view; at last the scalars. Passes reorder and merge, they never
add or drop mathematics.
"""

from __future__ import annotations

from attrs import define

from ratrain.ratrain_ir.blocks import (
    Block,
    activation_type,
    block,
    flat_elements,
    gathers_within_step,
    is_sharded,
    next_block,
    reduces_each_micro_batch,
    saved_slots,
    shard_elements,
    token_type,
)
from ratrain.ratrain_ir.frontend.model_config import ModelConfig
from ratrain.ratrain_ir.frontend.plan import Plan
from ratrain.ratrain_ir.module import Level, Module, Stage
from ratrain.ratrain_ir.ops import (
    AllGather,
    AllReduce,
    AllReduceScalar,
    Backward,
    Forward,
    Group,
    LoadInput,
    Op,
    Part,
    Payload,
    Phase,
    Quantity,
    Recv,
    ReduceScatter,
    ScaleUpdate,
    Send,
    Tensor,
    Update,
)
from ratrain.ratrain_ir.topology import Topology, topology_of
from ratrain.ratrain_ir.types import Dtype, StateKind, TensorType, tensor_type


def lower(model: ModelConfig, plan: Plan) -> Module:
    """The dataflow module of one training step. `plan` must have been checked against `model`."""
    topology = topology_of(model, plan)
    stages = [_StageLowering(model, plan, topology, Stage(index)).lower() for index in range(topology.stages)]
    return Module(model.name, Level.DATAFLOW, model, plan, stages)


@define
class _StageLowering:
    """Builds one stage; tensors are named after what they hold and the block (and micro-batch) they belong to."""

    model: ModelConfig
    plan: Plan
    topology: Topology
    stage: Stage

    def lower(self) -> Stage:
        blocks = self.topology.stage_blocks[self.stage.index]
        chunks = self.topology.chunks_of(self.stage.index)
        for unit in blocks:
            self.declare_state(unit)
        self.carried(StateKind.SCALAR, "scale", tensor_type(Dtype.F32, (2,)))
        for micro_batch in range(self.plan.micro_batches):
            for chunk in chunks:
                self.forward_pass(chunk, micro_batch)
        for micro_batch in range(self.plan.micro_batches):
            for chunk in reversed(chunks):
                self.backward_pass(chunk, micro_batch)
        self.step_end(blocks)
        return self.stage

    def emit(self, op: Op) -> None:
        self.stage.ops.append(op)

    def tensor(self, kind: StateKind, name: str, type_: TensorType) -> Tensor:
        """The tensor of that name, declared on first use."""
        found = self.stage.tensors.get(name)
        return found if found is not None else self.stage.add(Tensor(name, kind, type_))

    def carried(self, kind: StateKind, name: str, type_: TensorType) -> Tensor:
        return self.stage.add(Tensor(name, kind, type_, carried=True))

    def named(self, name: str) -> Tensor:
        return self.stage.tensors[name]

    def declare_state(self, unit: Block) -> None:
        whole = flat_elements(self.model, self.plan, unit)
        shard = shard_elements(self.model, self.plan, unit)
        if not gathers_within_step(self.plan):
            self.carried(StateKind.VIEW, f"w.{unit}", tensor_type(Dtype(self.plan.view_dtype), (whole,)))
        self.carried(StateKind.MASTER, f"p.{unit}", tensor_type(Dtype.F32, (shard,)))
        self.carried(StateKind.MOMENT, f"m1.{unit}", tensor_type(Dtype.F32, (shard,)))
        self.carried(StateKind.MOMENT, f"m2.{unit}", tensor_type(Dtype.F32, (shard,)))
        self.carried(StateKind.SCALAR, f"t.{unit}", tensor_type(Dtype.I64, (1,)))

    def view(self, unit: Block, micro_batch: int, phase: Phase) -> Tensor:
        """The view a use reads: the carried one, or one gathered for this use."""
        if not gathers_within_step(self.plan):
            return self.named(f"w.{unit}")
        whole = tensor_type(Dtype(self.plan.view_dtype), (flat_elements(self.model, self.plan, unit),))
        name = f"w.{unit}.m{micro_batch}.{phase.value}"
        found = self.stage.tensors.get(name)
        if found is None:
            found = self.stage.add(Tensor(name, StateKind.VIEW, whole))
            master = self.named(f"p.{unit}")
            self.emit(AllGather(blocks=(unit,), micro_batch=micro_batch, phase=phase, reads=(master,), writes=(found,)))
        return found

    def gradient(self, unit: Block, micro_batch: int) -> Tensor:
        """The full gradient a backward contributes to: one a step, or one a micro-batch where each is reduced."""
        elements = flat_elements(self.model, self.plan, unit)
        suffix = f".m{micro_batch}" if reduces_each_micro_batch(self.plan) else ""
        return self.tensor(StateKind.GRAD, f"g.{unit}{suffix}", tensor_type(Dtype(self.plan.grad_dtype), (elements,)))

    def shard(self, unit: Block) -> Tensor:
        elements = shard_elements(self.model, self.plan, unit)
        dtype = Dtype(self.plan.grad_shard_dtype)
        return self.tensor(StateKind.GRAD_SHARD, f"gs.{unit}", tensor_type(dtype, (elements,)))

    def scalar(self, name: str, dtype: Dtype) -> Tensor:
        return self.tensor(StateKind.SCALAR, name, tensor_type(dtype, (1,)))

    def input(self, part: Part, micro_batch: int) -> Tensor:
        return self.tensor(StateKind.INPUT, f"{part.value}.m{micro_batch}", token_type(self.plan))

    def activation(self, unit: Block, micro_batch: int, *, gradient: bool = False) -> Tensor:
        """The input of a block for one micro-batch, or the gradient of it; a boundary where it crosses a cut."""
        kind = StateKind.BOUNDARY if unit in self.topology.blocks_behind_cuts else StateKind.ACTIVATION
        prefix = "dx" if gradient else "x"
        return self.tensor(kind, f"{prefix}.{unit}.m{micro_batch}", activation_type(self.model, self.plan))

    def saved(self, unit: Block, micro_batch: int) -> tuple[Tensor, ...]:
        slots = saved_slots(self.model, self.plan, unit)
        return tuple(self.tensor(StateKind.SAVED, f"s.{unit}.m{micro_batch}.{slot.name}", slot.type) for slot in slots)

    def forward_pass(self, chunk: int, m: int) -> None:
        blocks = self.topology.chunk_blocks[chunk]
        before, after = self.topology.neighbours(chunk)
        if blocks[0].kind == "embed":
            self.emit(LoadInput(part=Part.TOKENS, micro_batch=m, writes=(self.input(Part.TOKENS, m),)))
        if before is not None:
            received = self.activation(blocks[0], m)
            self.emit(Recv(payload=Payload.ACTIVATION, micro_batch=m, peer=before, writes=(received,)))
        for unit in blocks:
            if unit.kind == "head":
                self.emit(LoadInput(part=Part.LABELS, micro_batch=m, writes=(self.input(Part.LABELS, m),)))
            self.emit(self.forward(unit, m))
        if after is not None:
            sent = self.activation(next_block(self.model, blocks[-1]), m)
            self.emit(Send(payload=Payload.ACTIVATION, micro_batch=m, peer=after, reads=(sent,)))

    def forward(self, unit: Block, m: int) -> Forward:
        view = self.view(unit, m, Phase.FORWARD)
        if unit.kind == "head":
            loss = self.scalar("loss", Dtype.F64)
            reads = (self.activation(unit, m), view, self.input(Part.LABELS, m))
            saved = self.saved(unit, m)
            writes, updates = ((*saved, loss), ()) if m == 0 else (saved, (loss,))
            return Forward(block=unit, micro_batch=m, reads=reads, writes=writes, updates=updates)
        source = self.input(Part.TOKENS, m) if unit.kind == "embed" else self.activation(unit, m)
        output = self.activation(next_block(self.model, unit), m)
        return Forward(block=unit, micro_batch=m, reads=(source, view), writes=(output, *self.saved(unit, m)))

    def backward_pass(self, chunk: int, m: int) -> None:
        blocks = self.topology.chunk_blocks[chunk]
        before, after = self.topology.neighbours(chunk)
        if after is not None:
            received = self.activation(next_block(self.model, blocks[-1]), m, gradient=True)
            self.emit(Recv(payload=Payload.GRADIENT, micro_batch=m, peer=after, writes=(received,)))
        for unit in reversed(blocks):
            self.emit(self.backward(unit, m))
            if reduces_each_micro_batch(self.plan):
                self.emit(self.reduce_scatter(unit, m))
        if before is not None:
            sent = self.activation(blocks[0], m, gradient=True)
            self.emit(Send(payload=Payload.GRADIENT, micro_batch=m, peer=before, reads=(sent,)))

    def backward(self, unit: Block, m: int) -> Backward:
        saved = self.saved(unit, m)
        gradient = self.gradient(unit, m)
        outputs: tuple[Tensor, ...] = ()
        if unit.kind != "embed":
            outputs = (self.activation(unit, m, gradient=True),)
        if unit.kind == "head":
            view = self.view(unit, m, Phase.BACKWARD)
            inputs = (self.activation(unit, m), *saved, view, self.input(Part.LABELS, m), self.named("scale"))
        else:
            dy = self.activation(next_block(self.model, unit), m, gradient=True)
            if unit.kind == "embed":
                inputs = (dy, self.input(Part.TOKENS, m))
            else:
                inputs = (dy, self.activation(unit, m), *saved, self.view(unit, m, Phase.BACKWARD))
        if m == 0 or reduces_each_micro_batch(self.plan):
            return Backward(block=unit, micro_batch=m, reads=inputs, writes=(*outputs, gradient))
        return Backward(block=unit, micro_batch=m, reads=inputs, writes=outputs, updates=(gradient,))

    def reduce_scatter(self, unit: Block, m: int | None) -> ReduceScatter:
        results = (self.shard(unit), self.scalar(f"flag.{unit}", Dtype.U32))
        source = (self.gradient(unit, m or 0),)
        if m:
            return ReduceScatter(blocks=(unit,), micro_batch=m, reads=source, updates=results)
        return ReduceScatter(blocks=(unit,), micro_batch=m, reads=source, writes=results)

    def step_end(self, blocks: tuple[Block, ...]) -> None:
        if not reduces_each_micro_batch(self.plan):
            for unit in reversed(blocks):
                self.emit(self.grad_sync(unit))
        self.sum_tied(blocks)
        if self.stage.index == self.topology.last_stage:
            loss = self.named("loss")
            self.emit(AllReduceScalar(quantity=Quantity.LOSS, group=Group.REPLICAS, reads=(loss,)))
        self.sum_norm(blocks)
        for unit in blocks:
            self.emit(self.update(unit))
        if is_sharded(self.plan) and not gathers_within_step(self.plan):
            for unit in blocks:
                view, master = self.named(f"w.{unit}"), self.named(f"p.{unit}")
                self.emit(AllGather(blocks=(unit,), reads=(master,), writes=(view,)))
        if self.plan.has_dynamic_scale:
            flags = tuple(self.named(f"flag.{unit}") for unit in blocks)
            overflow = self.scalar("overflow", Dtype.U32)
            self.emit(AllReduceScalar(quantity=Quantity.FLAGS, group=Group.ALL, reads=flags, writes=(overflow,)))
            self.emit(ScaleUpdate(reads=(overflow,), updates=(self.named("scale"),)))

    def grad_sync(self, unit: Block) -> Op:
        if is_sharded(self.plan):
            return self.reduce_scatter(unit, None)
        flag = self.scalar(f"flag.{unit}", Dtype.U32)
        return AllReduce(blocks=(unit,), updates=(self.gradient(unit, 0),), writes=(flag,))

    def reduced(self, unit: Block) -> Tensor:
        """The reduced gradient an update reads."""
        return self.shard(unit) if is_sharded(self.plan) else self.gradient(unit, 0)

    def sum_tied(self, blocks: tuple[Block, ...]) -> None:
        """Tied embeddings: first + last, between each stage's own reduction and either update."""
        if not self.model.tied_embeddings:
            return
        ends = tuple(unit for unit in (block("embed"), block("head")) if unit in blocks)
        if ends:
            grads = tuple(self.reduced(unit) for unit in ends)
            flags = tuple(self.named(f"flag.{unit}") for unit in ends)
            self.emit(AllReduce(blocks=ends, group=Group.ENDS, updates=(*grads, *flags)))

    def sum_norm(self, blocks: tuple[Block, ...]) -> None:
        """Global clipping: the norm of the whole gradient, which every update of every stage waits for."""
        if self.plan.optimizer.clip == "global":
            gradients = tuple(self.reduced(unit) for unit in blocks)
            flags = tuple(self.named(f"flag.{unit}") for unit in blocks)
            norm = (self.scalar("norm", Dtype.F64),)
            reads = (*gradients, *flags)
            self.emit(AllReduceScalar(quantity=Quantity.NORM, group=Group.ALL, blocks=blocks, reads=reads, writes=norm))

    def update(self, unit: Block) -> Update:
        norm = (self.named("norm"),) if self.plan.optimizer.clip == "global" else ()
        reads = (self.reduced(unit), self.named(f"flag.{unit}"), self.named("scale"), *norm)
        state = tuple(self.named(f"{prefix}.{unit}") for prefix in ("p", "m1", "m2", "t"))
        writes = () if is_sharded(self.plan) else (self.named(f"w.{unit}"),)
        return Update(block=unit, reads=reads, writes=writes, updates=state)

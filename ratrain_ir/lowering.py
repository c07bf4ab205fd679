"""Lowering of a model and a plan into a `dataflow` module: one complete training step in plain micro-batch order.

Per stage: all forwards, micro-batch by micro-batch; all backwards, ascending too (gradients accumulate in that order, which
is part of the semantics); then gradient reduction block by block in backward order, and the scalars of all ranks; then, in
forward order, the update of each block and, where state is sharded, the gather of its view; at last the next step's scale.
Passes reorder and merge, they never add or drop mathematics.
"""

from __future__ import annotations

from attrs import define

from ratrain.ratrain_ir.blocks import (
    Block,
    activation_type,
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
        for block in blocks:
            self.declare_state(block)
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
        tensor = self.stage.tensors.get(name)
        return tensor if tensor is not None else self.stage.add(Tensor(name, kind, type_))

    def carried(self, kind: StateKind, name: str, type_: TensorType) -> Tensor:
        return self.stage.add(Tensor(name, kind, type_, carried=True))

    def named(self, name: str) -> Tensor:
        return self.stage.tensors[name]

    def declare_state(self, block: Block) -> None:
        whole = flat_elements(self.model, self.plan, block)
        shard = shard_elements(self.model, self.plan, block)
        if not gathers_within_step(self.plan):
            self.carried(StateKind.VIEW, f"w.{block}", tensor_type(Dtype(self.plan.view_dtype), (whole,)))
        self.carried(StateKind.MASTER, f"p.{block}", tensor_type(Dtype.F32, (shard,)))
        self.carried(StateKind.MOMENT, f"m1.{block}", tensor_type(Dtype.F32, (shard,)))
        self.carried(StateKind.MOMENT, f"m2.{block}", tensor_type(Dtype.F32, (shard,)))
        self.carried(StateKind.SCALAR, f"t.{block}", tensor_type(Dtype.I64, (1,)))

    def view(self, block: Block, micro_batch: int, phase: Phase) -> Tensor:
        """The view a use reads: the carried one, or one gathered for this use."""
        if not gathers_within_step(self.plan):
            return self.named(f"w.{block}")
        whole = tensor_type(Dtype(self.plan.view_dtype), (flat_elements(self.model, self.plan, block),))
        name = f"w.{block}.m{micro_batch}.{phase.value}"
        view = self.stage.tensors.get(name)
        if view is None:
            view = self.stage.add(Tensor(name, StateKind.VIEW, whole))
            master = self.named(f"p.{block}")
            self.emit(AllGather(blocks=(block,), micro_batch=micro_batch, phase=phase, reads=(master,), writes=(view,)))
        return view

    def gradient(self, block: Block, micro_batch: int) -> Tensor:
        """The full gradient a backward contributes to: one a step, or one a micro-batch where each is reduced."""
        elements = flat_elements(self.model, self.plan, block)
        suffix = f".m{micro_batch}" if reduces_each_micro_batch(self.plan) else ""
        return self.tensor(StateKind.GRAD, f"g.{block}{suffix}", tensor_type(Dtype(self.plan.grad_dtype), (elements,)))

    def shard(self, block: Block) -> Tensor:
        elements = shard_elements(self.model, self.plan, block)
        dtype = Dtype(self.plan.grad_shard_dtype)
        return self.tensor(StateKind.GRAD_SHARD, f"gs.{block}", tensor_type(dtype, (elements,)))

    def scalar(self, name: str, dtype: Dtype) -> Tensor:
        return self.tensor(StateKind.SCALAR, name, tensor_type(dtype, (1,)))

    def input(self, part: Part, micro_batch: int) -> Tensor:
        return self.tensor(StateKind.INPUT, f"{part.value}.m{micro_batch}", token_type(self.plan))

    def activation(self, block: Block, micro_batch: int, *, gradient: bool = False) -> Tensor:
        """The input of a block for one micro-batch, or the gradient of it; a boundary where it crosses a cut."""
        kind = StateKind.BOUNDARY if block in self.topology.blocks_behind_cuts else StateKind.ACTIVATION
        prefix = "dx" if gradient else "x"
        return self.tensor(kind, f"{prefix}.{block}.m{micro_batch}", activation_type(self.model, self.plan))

    def saved(self, block: Block, micro_batch: int) -> tuple[Tensor, ...]:
        slots = saved_slots(self.model, self.plan, block)
        return tuple(self.tensor(StateKind.SAVED, f"s.{block}.m{micro_batch}.{slot.name}", slot.type) for slot in slots)

    def into(self, chunk: int) -> int | None:
        """What a message into a chunk says of it."""
        return chunk if self.topology.has_several_chunks else None

    def forward_pass(self, chunk: int, m: int) -> None:
        blocks = self.topology.chunk_blocks[chunk]
        before, after = self.topology.neighbours(chunk)
        if blocks[0].kind == "embed":
            self.emit(LoadInput(part=Part.TOKENS, micro_batch=m, writes=(self.input(Part.TOKENS, m),)))
        if before is not None:
            received = self.activation(blocks[0], m)
            into = self.into(chunk)
            self.emit(Recv(payload=Payload.ACTIVATION, micro_batch=m, chunk=into, peer=before, writes=(received,)))
        for block in blocks:
            if block.kind == "head":
                self.emit(LoadInput(part=Part.LABELS, micro_batch=m, writes=(self.input(Part.LABELS, m),)))
            self.emit(self.forward(block, m))
        if after is not None:
            sent = self.activation(next_block(self.model, blocks[-1]), m)
            into = self.into(chunk + 1)
            self.emit(Send(payload=Payload.ACTIVATION, micro_batch=m, chunk=into, peer=after, reads=(sent,)))

    def forward(self, block: Block, m: int) -> Forward:
        view = self.view(block, m, Phase.FORWARD)
        if block.kind == "head":
            loss = self.scalar("loss", Dtype.F64)
            reads = (self.activation(block, m), view, self.input(Part.LABELS, m))
            saved = self.saved(block, m)
            writes, updates = ((*saved, loss), ()) if m == 0 else (saved, (loss,))
            return Forward(block=block, micro_batch=m, reads=reads, writes=writes, updates=updates)
        source = self.input(Part.TOKENS, m) if block.kind == "embed" else self.activation(block, m)
        output = self.activation(next_block(self.model, block), m)
        return Forward(block=block, micro_batch=m, reads=(source, view), writes=(output, *self.saved(block, m)))

    def backward_pass(self, chunk: int, m: int) -> None:
        blocks = self.topology.chunk_blocks[chunk]
        before, after = self.topology.neighbours(chunk)
        if after is not None:
            received = self.activation(next_block(self.model, blocks[-1]), m, gradient=True)
            into = self.into(chunk + 1)
            self.emit(Recv(payload=Payload.GRADIENT, micro_batch=m, chunk=into, peer=after, writes=(received,)))
        for block in reversed(blocks):
            self.emit(self.backward(block, m))
            if reduces_each_micro_batch(self.plan):
                self.emit(self.reduce_scatter(block, m))
        if before is not None:
            sent = self.activation(blocks[0], m, gradient=True)
            into = self.into(chunk)
            self.emit(Send(payload=Payload.GRADIENT, micro_batch=m, chunk=into, peer=before, reads=(sent,)))

    def backward(self, block: Block, m: int) -> Backward:
        saved = self.saved(block, m)
        gradient = self.gradient(block, m)
        outputs: tuple[Tensor, ...] = ()
        if block.kind != "embed":
            outputs = (self.activation(block, m, gradient=True),)
        if block.kind == "head":
            view = self.view(block, m, Phase.BACKWARD)
            inputs = (self.activation(block, m), *saved, view, self.input(Part.LABELS, m), self.named("scale"))
        else:
            dy = self.activation(next_block(self.model, block), m, gradient=True)
            if block.kind == "embed":
                inputs = (dy, self.input(Part.TOKENS, m))
            else:
                inputs = (dy, self.activation(block, m), *saved, self.view(block, m, Phase.BACKWARD))
        if m == 0 or reduces_each_micro_batch(self.plan):
            return Backward(block=block, micro_batch=m, reads=inputs, writes=(*outputs, gradient))
        return Backward(block=block, micro_batch=m, reads=inputs, writes=outputs, updates=(gradient,))

    def reduce_scatter(self, block: Block, m: int | None) -> ReduceScatter:
        results = (self.shard(block), self.scalar(f"flag.{block}", Dtype.U32))
        source = (self.gradient(block, m or 0),)
        if m:
            return ReduceScatter(blocks=(block,), micro_batch=m, reads=source, updates=results)
        return ReduceScatter(blocks=(block,), micro_batch=m, reads=source, writes=results)

    def step_end(self, blocks: tuple[Block, ...]) -> None:
        if not reduces_each_micro_batch(self.plan):
            for block in reversed(blocks):
                self.emit(self.grad_sync(block))
        self.sum_tied(blocks)
        if self.stage.index == self.topology.last_stage:
            loss = self.named("loss")
            self.emit(AllReduceScalar(quantity=Quantity.LOSS, group=Group.REPLICAS, reads=(loss,)))
        self.sum_norm(blocks)
        self.combine_flags(blocks)
        for block in blocks:
            self.emit(self.update(block))
        if is_sharded(self.plan) and not gathers_within_step(self.plan):
            for block in blocks:
                view, master = self.named(f"w.{block}"), self.named(f"p.{block}")
                self.emit(AllGather(blocks=(block,), reads=(master,), writes=(view,)))
        if self.plan.has_dynamic_scale:
            self.emit(ScaleUpdate(reads=(self.named("overflow"),), updates=(self.named("scale"),)))

    def grad_sync(self, block: Block) -> Op:
        if is_sharded(self.plan):
            return self.reduce_scatter(block, None)
        flag = self.scalar(f"flag.{block}", Dtype.U32)
        return AllReduce(blocks=(block,), updates=(self.gradient(block, 0),), writes=(flag,))

    def reduced(self, block: Block) -> Tensor:
        """The reduced gradient an update reads."""
        return self.shard(block) if is_sharded(self.plan) else self.gradient(block, 0)

    def sum_tied(self, blocks: tuple[Block, ...]) -> None:
        """Tied embeddings: first + last, between each stage's own reduction and either update."""
        if not self.model.tied_embeddings:
            return
        ends = tuple(block for block in blocks if block.kind in ("embed", "head"))
        if ends:
            grads = tuple(self.reduced(block) for block in ends)
            flags = tuple(self.named(f"flag.{block}") for block in ends)
            self.emit(AllReduce(blocks=ends, group=Group.ENDS, updates=(*grads, *flags)))

    def sum_norm(self, blocks: tuple[Block, ...]) -> None:
        """Global clipping: the norm of the whole gradient, which every update of every stage waits for."""
        if self.plan.optimizer.clip == "global":
            gradients = tuple(self.reduced(block) for block in blocks)
            flags = tuple(self.named(f"flag.{block}") for block in blocks)
            norm = (self.scalar("norm", Dtype.F64),)
            reads = (*gradients, *flags)
            self.emit(AllReduceScalar(quantity=Quantity.NORM, group=Group.ALL, blocks=blocks, reads=reads, writes=norm))

    def combine_flags(self, blocks: tuple[Block, ...]) -> None:
        """The flags of all ranks, which the next step's scale follows: they wait for reductions, not for updates and gathers."""
        if self.plan.has_dynamic_scale:
            flags = tuple(self.named(f"flag.{block}") for block in blocks)
            overflow = (self.scalar("overflow", Dtype.U32),)
            self.emit(AllReduceScalar(quantity=Quantity.FLAGS, group=Group.ALL, reads=flags, writes=overflow))

    def update(self, block: Block) -> Update:
        norm = (self.named("norm"),) if self.plan.optimizer.clip == "global" else ()
        reads = (self.reduced(block), self.named(f"flag.{block}"), self.named("scale"), *norm)
        state = tuple(self.named(f"{prefix}.{block}") for prefix in ("p", "m1", "m2", "t"))
        writes = () if is_sharded(self.plan) else (self.named(f"w.{block}"),)
        return Update(block=block, reads=reads, writes=writes, updates=state)

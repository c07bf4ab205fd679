"""Lowering of a model and a plan into a `dataflow` module: one complete training step in plain micro-batch order.

Per stage: all forwards, micro-batch by micro-batch; all backwards, ascending too (gradients accumulate in that order, which
is part of the semantics); where micro-batches are cut into slices, these pass one by one, ascending forward and descending backward; then gradient reduction block by block in backward order, and the scalars of all ranks; then, in
forward order, the update of each block and, where state is sharded, the gather of its view, or of a replica's part of one; at last the next step's scale.
Where tensor peers share out blocks, each block's input is made whole before it and what it gives is summed after it, forward and backward;
an input is gathered anew for the backward. Where they norm what a block gives, that is summed alone, and normed and added by an op of
its own. Passes reorder and merge, they never add or drop mathematics.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from attrs import define

from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.config.plan import Plan, slice_plan
from ratrain.ratrain_ir.config.types import Dtype, StateKind, TensorType, tensor_type
from ratrain.ratrain_ir.model.blocks import (
    HEADS_SLOTS,
    INPUT_HALF_SLOTS,
    KEY_SLOTS,
    PRODUCTS,
    SQUARES,
    WEIGHT_HALF_SLOTS,
    Block,
    Slot,
    activation_type,
    branch_slots,
    branch_sums,
    computed_type,
    exchanged_type,
    flat_elements,
    gathers_at_step_end,
    gathers_within_step,
    half_slots,
    is_sharded,
    keeps_view,
    last_viewer,
    next_block,
    normed_gradient_slots,
    parts_view,
    previous_block,
    projected_slots,
    reads_documents,
    reduces_each_micro_batch,
    row_sum_slots,
    row_sums_type,
    saved_slots,
    seen_slices,
    shard_elements,
    shares_rows,
    sum_slots,
    token_type,
    tokens_per_micro_batch,
    view_shard_elements,
)
from ratrain.ratrain_ir.model.peer_blocks import adds_branch_apart, source_block, stands_beside, sum_block
from ratrain.ratrain_ir.module import Level, Module, Stage
from ratrain.ratrain_ir.ops.base import (
    Group,
    Op,
    Part,
    Payload,
    Phase,
    Piece,
    Quantity,
    Slice,
    piece_fields,
    piece_name,
)
from ratrain.ratrain_ir.ops.collectives import (
    AllGather,
    AllReduce,
    AllReduceScalar,
    CombineLoss,
    GatherRows,
    ReduceRows,
    ReduceScatter,
    ReduceSums,
)
from ratrain.ratrain_ir.ops.compute import (
    AddBranch,
    AddBranchBackward,
    Backward,
    BackwardHeads,
    Forward,
    LoadInput,
    Project,
    ScaleUpdate,
    Update,
)
from ratrain.ratrain_ir.ops.messages import Recv, Send
from ratrain.ratrain_ir.ops.tensor import Tensor
from ratrain.ratrain_ir.topology import Topology, topology_of


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
                for piece in self.pieces(micro_batch):
                    self.forward_pass(chunk, piece)
        for micro_batch in range(self.plan.micro_batches):
            for chunk in reversed(chunks):
                for piece in reversed(self.pieces(micro_batch)):
                    self.backward_pass(chunk, piece)
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
        if not gathers_within_step(self.plan, block):
            self.carried(StateKind.VIEW, f"w.{block}", tensor_type(Dtype(self.plan.view_dtype), (whole,)))
        elif parts_view(self.plan, block):
            part = view_shard_elements(self.model, self.plan, block)
            self.carried(StateKind.VIEW_SHARD, f"v.{block}", tensor_type(Dtype(self.plan.view_dtype), (part,)))
        self.carried(StateKind.MASTER, f"p.{block}", tensor_type(Dtype.F32, (shard,)))
        self.carried(StateKind.MOMENT, f"m1.{block}", tensor_type(Dtype.F32, (shard,)))
        self.carried(StateKind.MOMENT, f"m2.{block}", tensor_type(Dtype.F32, (shard,)))
        self.carried(StateKind.SCALAR, f"t.{block}", tensor_type(Dtype.I64, (1,)))

    def pieces(self, micro_batch: int) -> list[Piece]:
        """What of a micro-batch passes through the blocks at a time, in the order of its rows."""
        count = len(self.plan.slices)
        return [Slice(micro_batch, number) for number in range(count)] if count else [micro_batch]

    def view(self, block: Block, piece: Piece, phase: Phase) -> Tensor:
        """The view a use reads: the carried one, or one gathered for this use."""
        if not gathers_within_step(self.plan, block):
            return self.named(f"w.{block}")
        whole = tensor_type(Dtype(self.plan.view_dtype), (flat_elements(self.model, self.plan, block),))
        name = f"w.{block}.{piece_name(piece)}.{phase.value}"
        view = self.stage.tensors.get(name)
        if view is None:
            view = self.stage.add(Tensor(name, StateKind.VIEW, whole))
            source = self.named(f"{'v' if parts_view(self.plan, block) else 'p'}.{block}")
            self.emit(AllGather(blocks=(block,), **piece_fields(piece), phase=phase, reads=(source,), writes=(view,)))
        return view

    def gradient(self, block: Block, micro_batch: int) -> Tensor:
        """The full gradient a backward contributes to: one a step, or one a micro-batch where each is reduced."""
        elements = flat_elements(self.model, self.plan, block)
        suffix = f".m{micro_batch}" if reduces_each_micro_batch(self.plan, block) else ""
        return self.tensor(StateKind.GRAD, f"g.{block}{suffix}", tensor_type(Dtype(self.plan.grad_dtype), (elements,)))

    def shard(self, block: Block) -> Tensor:
        elements = shard_elements(self.model, self.plan, block)
        dtype = Dtype(self.plan.grad_shard_dtype)
        return self.tensor(StateKind.GRAD_SHARD, f"gs.{block}", tensor_type(dtype, (elements,)))

    def scalar(self, name: str, dtype: Dtype) -> Tensor:
        return self.tensor(StateKind.SCALAR, name, tensor_type(dtype, (1,)))

    def input(self, part: Part, piece: Piece) -> Tensor:
        return self.tensor(StateKind.INPUT, f"{part.value}.{piece_name(piece)}", token_type(self.plan_of(piece)))

    def activation(self, block: Block, piece: Piece, *, gradient: bool = False) -> Tensor:
        """The input of a block for one piece, or the gradient of it; a boundary where it crosses a cut."""
        kind = StateKind.BOUNDARY if block in self.topology.blocks_behind_cuts else StateKind.ACTIVATION
        prefix = "dx" if gradient else "x"
        type_ = activation_type(self.model, self.plan_of(piece), block)
        return self.tensor(kind, f"{prefix}.{block}.{piece_name(piece)}", type_)

    def adds_apart(self, block: Block) -> bool:
        """Whether what a block gives is normed and added to the stream by an op of its own."""
        return adds_branch_apart(self.model, self.plan, block)

    def read_activation(self, block: Block, piece: Piece, *, phase: Phase | None = None) -> Tensor:
        """The input of a block as the block reads it in a phase, or, without one, the gradient of it as the block before does: all its rows."""
        gradient = phase is None
        before = previous_block(block, self.model) if gradient else None
        if before is not None and self.adds_apart(before):
            what, own = f"dbranch_whole.{before}", self.branch_gradient(before, piece)
        else:
            what, own = f"{'dx' if gradient else 'x'}_whole.{block}", self.activation(block, piece, gradient=gradient)
        if not shares_rows(self.plan):
            return own
        name = f"{what}.{piece_name(piece)}{f'.{phase.value}' if phase else ''}"
        if name in self.stage.tensors:  # gathered for the other of an attention and an mlp side by side
            return self.named(name)
        whole = self.tensor(StateKind.ACTIVATION, name, computed_type(self.model, self.plan_of(piece), block))
        payload = Payload.GRADIENT if gradient else Payload.ACTIVATION
        fields = {"payload": payload, "block": block, **piece_fields(piece), "phase": phase}
        self.emit(GatherRows(**fields, reads=(own,), writes=(whole,)))
        return whole

    def written_activation(self, block: Block, piece: Piece, *, gradient: bool = False) -> Tensor:
        """What the block before writes of the input of a block, or the block itself of its gradient: a part, where there are tensor peers."""
        if self.plan.tp == 1:
            return self.activation(block, piece, gradient=gradient)
        what = f"{'dx' if gradient else 'x'}_part.{block}"
        if not gradient and self.adds_apart(before := previous_block(block, self.model)):
            what = f"branch_part.{before}"
        name = f"{what}.{piece_name(piece)}"
        return self.tensor(StateKind.PARTIAL, name, computed_type(self.model, self.plan_of(piece), block))

    def add_branch(self, block: Block, piece: Piece) -> None:
        """Sum the parts of what a block gives, and add that to the stream, normed."""
        branch, *statistics = self.branch(block, piece)
        after, fields = next_block(self.model, block), {**piece_fields(piece)}
        part = self.written_activation(after, piece)
        self.emit(ReduceRows(payload=Payload.ACTIVATION, block=after, **fields, reads=(part,), writes=(branch,)))
        reads = (self.activation(block, piece), branch, self.view(block, piece, Phase.FORWARD))
        writes = (self.activation(after, piece), *statistics)
        self.emit(AddBranch(block=block, **fields, reads=reads, writes=writes))

    def branch(self, block: Block, piece: Piece) -> tuple[Tensor, ...]:
        """What a block gives, and the statistics of its norm: no slots of the block's own ops."""
        return self.slots(block, piece, branch_slots(self.model, self.plan_of(piece)), "b")

    def branch_gradient(self, block: Block, piece: Piece) -> Tensor:
        """The gradient of what a block gives, of the rows that a rank has between blocks."""
        type_ = exchanged_type(self.model, self.plan_of(piece))
        return self.tensor(StateKind.ACTIVATION, f"dbranch.{block}.{piece_name(piece)}", type_)

    def branch_sums(self, block: Block, piece: Piece) -> tuple[Tensor, ...]:
        """What the norm of a branch leaves for the backward of its block."""
        return self.slots(block, piece, branch_sums(self.model, self.plan_of(piece), block), "b")

    def add_branch_backward(self, block: Block, piece: Piece) -> None:
        """From the gradient of the stream behind a block to that of what the block gives."""
        dsum = self.activation(next_block(self.model, block), piece, gradient=True)
        reads = (dsum, *self.branch(block, piece), self.view(block, piece, Phase.BACKWARD))
        writes = (self.branch_gradient(block, piece), *self.branch_sums(block, piece))
        self.emit(AddBranchBackward(block=block, **piece_fields(piece), reads=reads, writes=writes))

    def beside(self, mlp: Block, piece: Piece, *, gradient: bool = False) -> tuple[Tensor, ...]:
        """What attention has made of the sum that the mlp beside it adds to, or that mlp of the gradient of their input."""
        if not stands_beside(self.model, self.plan, mlp):
            return ()
        return (self.written_activation(mlp, piece, gradient=gradient),)

    def sum_parts(self, block: Block, piece: Piece, around: Block | None, *, gradient: bool = False) -> None:
        """Sum the parts of the input of a block, or of its gradient, and the stream that goes around."""
        if self.plan.tp == 1:
            return
        part = self.written_activation(block, piece, gradient=gradient)
        stream = () if around is None else (self.activation(around, piece, gradient=gradient),)
        payload = Payload.GRADIENT if gradient else Payload.ACTIVATION
        result = self.activation(block, piece, gradient=gradient)
        fields = {"payload": payload, "block": block, **piece_fields(piece)}
        self.emit(ReduceRows(**fields, reads=(part, *stream), writes=(result,)))

    def plan_of(self, piece: Piece) -> Plan:
        """The plan as it is for a piece."""
        return slice_plan(self.plan, None if isinstance(piece, int) else piece.number)

    def slots(self, block: Block, piece: Piece, slots: Iterable[Slot], group: str = "s") -> tuple[Tensor, ...]:
        names = f"{group}.{block}.{piece_name(piece)}"
        return tuple(self.tensor(StateKind.SAVED, f"{names}.{slot.name}", slot.type) for slot in slots)

    def saved(self, block: Block, piece: Piece) -> tuple[Tensor, ...]:
        return self.slots(block, piece, saved_slots(self.model, self.plan_of(piece), block))

    def projected(self, block: Block, piece: Piece) -> tuple[Tensor, ...]:
        """What an op of its own projects, where norms of queries and keys take sums over tensor peers; none elsewhere."""
        return self.slots(block, piece, projected_slots(self.model, self.plan_of(piece), block))

    def row_sums(self, block: Block, piece: Piece, name: str) -> tuple[Tensor, ...]:
        """There too: the sums over each row that all peers have together."""
        slots = row_sum_slots(self.model, self.plan_of(piece), block, name)
        return self.slots(block, piece, slots, "s" if name == SQUARES else "d")

    def normed_gradients(self, block: Block, piece: Piece) -> tuple[Tensor, ...]:
        """There too: the gradients of normed queries and keys, and of values."""
        return self.slots(block, piece, normed_gradient_slots(self.model, self.plan_of(piece), block), "d")

    def part_of_sums(self, block: Block, piece: Piece, name: str) -> Tensor:
        """There too: what a peer has of the sums over each row."""
        name = f"{name}_part.{block}.{piece_name(piece)}"
        return self.tensor(StateKind.PARTIAL, name, row_sums_type(self.plan_of(piece)))

    def reduce_sums(self, block: Block, piece: Piece, name: str, payload: Payload) -> None:
        """Sum what peers have of the sums over each row."""
        reads, writes = (self.part_of_sums(block, piece, name),), self.row_sums(block, piece, name)
        self.emit(ReduceSums(payload=payload, block=block, **piece_fields(piece), reads=reads, writes=writes))

    def project(self, block: Block, piece: Piece) -> None:
        """Queries, keys and values of an attention whose norms of them take sums over tensor peers, and those sums."""
        if projected := self.projected(block, piece):
            source = self.read_activation(source_block(self.model, self.plan, block), piece, phase=Phase.FORWARD)
            writes = (self.part_of_sums(block, piece, SQUARES), *projected)
            reads = (source, self.view(block, piece, Phase.FORWARD))
            self.emit(Project(block=block, **piece_fields(piece), reads=reads, writes=writes))
            self.reduce_sums(block, piece, SQUARES, Payload.ACTIVATION)

    def backward_heads(self, block: Block, piece: Piece) -> None:
        """Gradients of normed queries and keys, and of values, and what the gradient of those norms sums over tensor peers."""
        if not (gradients := self.normed_gradients(block, piece)):
            return
        names = half_slots(self.model, self.plan_of(piece), block, HEADS_SLOTS)
        saved = tuple(tensor for tensor in self.saved(block, piece) if tensor.slot in names)
        dy = self.read_activation(sum_block(self.model, self.plan, block), piece)
        # gathered here for what comes after: it runs beside this op, and recovery, which stands before it, reads it
        self.read_activation(source_block(self.model, self.plan, block), piece, phase=Phase.BACKWARD)
        others = (*self.documents(block, piece), *self.seen_keys(block, piece), *self.sums(block, piece))
        begun, added = (self.seen_sums(block, piece, first=first) for first in (True, False))
        reads = (dy, *saved, self.view(block, piece, Phase.BACKWARD), *others)
        writes = (self.part_of_sums(block, piece, PRODUCTS), *gradients, *begun)
        self.emit(BackwardHeads(block=block, **piece_fields(piece), reads=reads, writes=writes, updates=added))
        self.reduce_sums(block, piece, PRODUCTS, Payload.GRADIENT)

    def seen(self, block: Block, piece: Piece) -> list[Slice]:
        """The earlier slices of a micro-batch whose keys a slice of an attention sees."""
        if isinstance(piece, int) or block.kind != "attention":
            return []
        return [Slice(piece.micro_batch, number) for number in seen_slices(self.model, self.plan_of(piece))]

    def seen_keys(self, block: Block, piece: Piece) -> tuple[Tensor, ...]:
        """Keys and values of the earlier slices that a slice of an attention sees."""
        return tuple(t for other in self.seen(block, piece) for t in self.saved(block, other) if t.slot in KEY_SLOTS)

    def sums(self, block: Block, piece: Piece) -> tuple[Tensor, ...]:
        """What later slices add up for the gradients of a slice's keys and values."""
        return self.slots(block, piece, sum_slots(self.model, self.plan_of(piece), block))

    def seen_sums(self, block: Block, piece: Piece, *, first: bool) -> tuple[Tensor, ...]:
        """The sums that a slice of an attention adds to; `first`: those that it is the first to add to."""
        number = None if isinstance(piece, int) else piece.number
        return tuple(
            tensor
            for other in self.seen(block, piece)
            if (last_viewer(self.model, self.plan_of(other)) == number) is first
            for tensor in self.sums(block, other)
        )

    def into(self, chunk: int) -> int | None:
        """What a message into a chunk says of it."""
        return chunk if self.topology.has_several_chunks else None

    def message(self, payload: Payload, piece: Piece, into: int, peer: int) -> dict[str, Any]:
        """The fields of a message."""
        return {"payload": payload, **piece_fields(piece), "chunk": self.into(into), "peer": peer}

    def forward_pass(self, chunk: int, piece: Piece) -> None:
        blocks = self.topology.chunk_blocks[chunk]
        before, after = self.topology.neighbours(chunk)
        if blocks[0].kind == "embed":
            self.load(Part.TOKENS, piece)
        if chunk == self.topology.chunks_of(self.stage.index)[0] and self.plan.keeps_documents_apart:
            self.load(
                Part.DOCUMENTS, piece
            )  # for all chunks of the stage: each has an attention, and this one is first
        if before is not None:
            received = self.activation(blocks[0], piece)
            self.emit(Recv(**self.message(Payload.ACTIVATION, piece, chunk, before), writes=(received,)))
        for block in blocks:
            if block.kind == "head":
                self.load(Part.LABELS, piece)
            self.project(block, piece)
            self.emit(self.forward(block, piece))
            if block.kind == "head":
                self.combine_loss(block, piece)
            elif self.adds_apart(block):
                self.add_branch(block, piece)
            elif not stands_beside(self.model, self.plan, next_block(self.model, block)):
                around = None if block.kind == "embed" else source_block(self.model, self.plan, block)
                self.sum_parts(next_block(self.model, block), piece, around)
        if after is not None:
            sent = self.activation(next_block(self.model, blocks[-1]), piece)
            self.emit(Send(**self.message(Payload.ACTIVATION, piece, chunk + 1, after), reads=(sent,)))

    def documents(self, block: Block, piece: Piece) -> tuple[Tensor, ...]:
        """Where the documents of a piece start, for a block that asks."""
        return (self.input(Part.DOCUMENTS, piece),) if reads_documents(self.model, self.plan, block) else ()

    def load(self, part: Part, piece: Piece) -> None:
        self.emit(LoadInput(part=part, **piece_fields(piece), writes=(self.input(part, piece),)))

    def forward(self, block: Block, piece: Piece) -> Forward:
        view = self.view(block, piece, Phase.FORWARD)
        fields = piece_fields(piece)
        if projected := self.projected(block, piece):
            return self.forward_of_heads(block, piece, projected)
        if block.kind == "embed":
            source = self.input(Part.TOKENS, piece)
        else:
            source = self.read_activation(source_block(self.model, self.plan, block), piece, phase=Phase.FORWARD)
        if block.kind == "head":
            inputs = (source, view, self.input(Part.LABELS, piece))
            loss = self.scalar("loss", Dtype.F64)
            saved = self.saved(block, piece)
            if self.plan.tp > 1:
                own = (tensor for tensor in saved if tensor.slot != "lse")
                return Forward(block=block, **fields, reads=inputs, writes=(*self.parts_of_loss(piece), *own))
            writes, updates = self.with_loss(saved, loss, piece)
            return Forward(block=block, **fields, reads=inputs, writes=writes, updates=updates)
        output = self.written_activation(next_block(self.model, block), piece)
        beside = self.beside(block, piece)
        reads = (source, view, *self.documents(block, piece), *self.seen_keys(block, piece), *beside)
        return Forward(block=block, **fields, reads=reads, writes=(output, *self.saved(block, piece)))

    def forward_of_heads(self, block: Block, piece: Piece, projected: tuple[Tensor, ...]) -> Forward:
        """The forward of an attention from what is projected and summed over tensor peers on."""
        made = (*projected, *self.row_sums(block, piece, SQUARES))
        view = self.view(block, piece, Phase.FORWARD)
        reads = (view, *self.documents(block, piece), *made, *self.seen_keys(block, piece))
        kept = tuple(tensor for tensor in self.saved(block, piece) if tensor not in made)
        output = self.written_activation(next_block(self.model, block), piece)
        return Forward(block=block, **piece_fields(piece), reads=reads, writes=(output, *kept))

    def with_loss(
        self, saved: tuple[Tensor, ...], loss: Tensor, piece: Piece
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """What the op that knows the loss of a piece writes, and what it updates: the first writes the step's loss, the others add to it."""
        return ((*saved, loss), ()) if piece == self.pieces(0)[0] else (saved, (loss,))

    def parts_of_loss(self, piece: Piece) -> tuple[Tensor, Tensor]:
        """What a tensor peer makes of its part of the vocabulary for a piece."""
        rows = tensor_type(Dtype.F32, (tokens_per_micro_batch(self.plan_of(piece)),))
        types = {"lse_part": rows, "loss_part": tensor_type(Dtype.F64, (1,))}
        lse, loss = (self.tensor(StateKind.PARTIAL, f"{n}.head.{piece_name(piece)}", t) for n, t in types.items())
        return lse, loss

    def combine_loss(self, block: Block, piece: Piece) -> None:
        """The loss from what tensor peers know of each row."""
        if self.plan.tp > 1:
            lse = tuple(tensor for tensor in self.saved(block, piece) if tensor.slot == "lse")
            writes, updates = self.with_loss(lse, self.named("loss"), piece)
            reads = (*self.parts_of_loss(piece), self.input(Part.LABELS, piece))
            self.emit(CombineLoss(block=block, **piece_fields(piece), reads=reads, writes=writes, updates=updates))

    def backward_pass(self, chunk: int, piece: Piece) -> None:
        blocks = self.topology.chunk_blocks[chunk]
        before, after = self.topology.neighbours(chunk)
        if after is not None:
            received = self.activation(next_block(self.model, blocks[-1]), piece, gradient=True)
            self.emit(Recv(**self.message(Payload.GRADIENT, piece, chunk + 1, after), writes=(received,)))
        for block in reversed(blocks):
            if self.adds_apart(block):
                self.add_branch_backward(block, piece)
            self.backward_heads(block, piece)
            self.emit(self.backward(block, piece))
            if block.kind != "embed" and not stands_beside(self.model, self.plan, block):
                around = None if block.kind == "head" else sum_block(self.model, self.plan, block)
                self.sum_parts(block, piece, around, gradient=True)
            if reduces_each_micro_batch(self.plan, block) and self.is_last_share(piece):
                self.emit(self.reduce_scatter(block, piece if isinstance(piece, int) else piece.micro_batch))
        if before is not None:
            sent = self.activation(blocks[0], piece, gradient=True)
            self.emit(Send(**self.message(Payload.GRADIENT, piece, chunk, before), reads=(sent,)))

    def is_last_share(self, piece: Piece) -> bool:
        """Whether a piece is the last of its micro-batch to go backward: slices descend."""
        return isinstance(piece, int) or piece.number == 0

    def is_first_share(self, block: Block, piece: Piece) -> bool:
        """Whether a piece is the first of a block to go backward: of its micro-batch where each is reduced, else of the step."""
        each = reduces_each_micro_batch(self.plan, block)
        if isinstance(piece, int):
            return piece == 0 or each
        return piece.number == len(self.plan.slices) - 1 and (piece.micro_batch == 0 or each)

    def backward(self, block: Block, piece: Piece) -> Backward:
        saved = self.saved(block, piece)
        gradient = self.gradient(block, piece if isinstance(piece, int) else piece.micro_batch)
        outputs: tuple[Tensor, ...] = ()
        if block.kind != "embed":
            outputs = (self.written_activation(block, piece, gradient=True),)
        inputs: tuple[Tensor, ...]
        if block.kind == "head":
            view = self.view(block, piece, Phase.BACKWARD)
            source = self.read_activation(block, piece, phase=Phase.BACKWARD)
            inputs = (source, *saved, view, self.input(Part.LABELS, piece), self.named("scale"))
        else:
            dy = self.read_activation(sum_block(self.model, self.plan, block), piece)
            if block.kind == "embed":
                inputs = (dy, self.input(Part.TOKENS, piece), *self.documents(block, piece))
            else:
                gradients = self.normed_gradients(block, piece)
                if gradients:
                    others = (*gradients, *self.row_sums(block, piece, PRODUCTS))
                    halves = (INPUT_HALF_SLOTS, WEIGHT_HALF_SLOTS)
                    names = [n for h in halves for n in half_slots(self.model, self.plan_of(piece), block, h)]
                    saved = tuple(tensor for tensor in saved if tensor.slot in names)
                else:
                    others = (*self.documents(block, piece), *self.seen_keys(block, piece), *self.sums(block, piece))
                others += self.beside(next_block(self.model, block), piece, gradient=True)
                others += self.branch_sums(block, piece)
                view = self.view(block, piece, Phase.BACKWARD)
                source_of = source_block(self.model, self.plan, block)
                source = self.read_activation(source_of, piece, phase=Phase.BACKWARD)
                inputs = (dy, source, *saved, view, *others)
        begun: tuple[Tensor, ...] = ()
        added: tuple[Tensor, ...] = ()
        if not self.normed_gradients(block, piece):  # else the op before the norms has added to them
            begun, added = (self.seen_sums(block, piece, first=first) for first in (True, False))
        fields = piece_fields(piece)
        if self.is_first_share(block, piece):
            return Backward(block=block, **fields, reads=inputs, writes=(*outputs, *begun, gradient), updates=added)
        return Backward(block=block, **fields, reads=inputs, writes=(*outputs, *begun), updates=(gradient, *added))

    def reduce_scatter(self, block: Block, m: int | None) -> ReduceScatter:
        results = (self.shard(block), self.scalar(f"flag.{block}", Dtype.U32))
        source = (self.gradient(block, m or 0),)
        if m:
            return ReduceScatter(blocks=(block,), micro_batch=m, reads=source, updates=results)
        return ReduceScatter(blocks=(block,), micro_batch=m, reads=source, writes=results)

    def step_end(self, blocks: tuple[Block, ...]) -> None:
        for block in reversed(blocks):
            if not reduces_each_micro_batch(self.plan, block):
                self.emit(self.grad_sync(block))
        self.sum_shared(blocks)
        self.sum_tied(blocks)
        if self.stage.index == self.topology.last_stage:
            loss = self.named("loss")
            self.emit(AllReduceScalar(quantity=Quantity.LOSS, group=Group.REPLICAS, reads=(loss,)))
        self.sum_norm(blocks)
        self.combine_flags(blocks)
        for block in blocks:
            self.emit(self.update(block))
        for block in blocks:
            if gathers_at_step_end(self.plan, block):
                view = self.named(f"{'v' if parts_view(self.plan, block) else 'w'}.{block}")
                self.emit(AllGather(blocks=(block,), reads=(self.named(f"p.{block}"),), writes=(view,)))
        if self.plan.has_dynamic_scale:
            self.emit(ScaleUpdate(reads=(self.named("overflow"),), updates=(self.named("scale"),)))

    def grad_sync(self, block: Block) -> Op:
        if is_sharded(self.plan, block):
            return self.reduce_scatter(block, None)
        flag = self.scalar(f"flag.{block}", Dtype.U32)
        return AllReduce(blocks=(block,), updates=(self.gradient(block, 0),), writes=(flag,))

    def reduced(self, block: Block) -> Tensor:
        """The reduced gradient an update reads."""
        return self.shard(block) if is_sharded(self.plan, block) else self.gradient(block, 0)

    def sum_shared(self, blocks: tuple[Block, ...]) -> None:
        """Gradients of parameters that several tensor peers have; and every block's flag, so that all peers skip the same updates."""
        if self.plan.tp > 1:
            for block in reversed(blocks):
                updates = (self.reduced(block), self.named(f"flag.{block}"))
                self.emit(AllReduce(blocks=(block,), group=Group.TENSOR, updates=updates))

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
        writes = (self.named(f"w.{block}"),) if keeps_view(self.plan, block) else ()
        return Update(block=block, reads=reads, writes=writes, updates=state)

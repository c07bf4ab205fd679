"""Lowering of a model and a plan into a `dataflow` module: one complete training step in plain micro-batch order.

Example: a stage that holds `embed`, `attention.0` and `mlp.0`, with two micro-batches and ZeRO level 1:

    load_input m0   forward embed m0   forward attention.0 m0   forward mlp.0 m0   send activation m0
    ...                                                                            the same for m1
    recv gradient m0   backward mlp.0 m0   backward attention.0 m0   backward embed m0
    ...                                                                            the same for m1
    reduce_scatter mlp.0   reduce_scatter attention.0   reduce_scatter embed
    all_reduce_scalar flags
    update embed   update attention.0   update mlp.0
    all_gather embed   all_gather attention.0   all_gather mlp.0
    scale_update

Micro-batches ascend in the backward too. Gradients accumulate in that order, which is part of the semantics. The slices
of a micro-batch ascend in the forward and descend in the backward. Gradients are reduced block by block in backward
order. Updates, and the gathers of sharded views, follow in forward order.

With tensor parallelism each block's input is gathered before it, and its partial outputs are summed after it, forward
and backward. The backward gathers the input again. If the output of a block is normed (post-norm), it is summed alone;
a separate op norms it and adds it to the residual stream.

Passes reorder and merge these ops. They never add or drop mathematics. Cost: time linear in the number of ops.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import define

from ratrain.ratrain_ir.config.types import Dtype, StateKind, tensor_type
from ratrain.ratrain_ir.expert_lowering import ExpertLowering
from ratrain.ratrain_ir.model.blocks import (
    Block,
    has_backward,
    has_experts,
    next_block,
    passes_gradient_on,
    ties_gradients,
    trains,
)
from ratrain.ratrain_ir.model.checked_training import check_training
from ratrain.ratrain_ir.model.expert_ranks import biases_choice, shares_experts
from ratrain.ratrain_ir.model.sharded_blocks import (
    gathers_at_step_end,
    is_sharded,
    keeps_view,
    parts_view,
    reduces_each_micro_batch,
)
from ratrain.ratrain_ir.model.slots import (
    PRODUCTS,
    slots_behind_heads,
)
from ratrain.ratrain_ir.model.tensor_blocks import is_parallel_mlp, source_block, sum_block
from ratrain.ratrain_ir.module import Level, Module, Stage
from ratrain.ratrain_ir.ops.base import (
    Group,
    Op,
    Part,
    Payload,
    Phase,
    Piece,
    Quantity,
    piece_fields,
)
from ratrain.ratrain_ir.ops.collectives import (
    AllGather,
    AllReduce,
    AllReduceScalar,
    CombineLoss,
    ReduceRows,
    ReduceScatter,
    mean_group,
    shards_group,
)
from ratrain.ratrain_ir.ops.compute import (
    AddBranch,
    AddBranchBackward,
    Backward,
    Forward,
    LoadInput,
    ScaleUpdate,
    Update,
)
from ratrain.ratrain_ir.ops.messages import Recv, Send
from ratrain.ratrain_ir.repeated_passes import PATTERN, RepeatedPasses
from ratrain.ratrain_ir.topology import topology_of

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.ratrain_ir.ops.tensor import Tensor


def lower(model: ModelConfig, plan: Plan) -> Module:
    """Build the dataflow module of one training step. `plan` must have been checked against `model`.

    Raises RT064 where the plan's frozen parameters or adapters do not fit the model (`check_training`).
    """
    check_training(model, plan)
    topology = topology_of(model, plan)
    stages = [_StageLowering(model, plan, topology, Stage(index)).lower() for index in range(topology.stages)]
    return Module(model.name, Level.DATAFLOW, model, plan, stages)


@define
class _StageLowering(ExpertLowering):
    """Builder of one stage's ops.

    Methods that return a tensor may first emit the op that makes it, such as a gather. So call them before the op that
    reads the tensor is emitted.
    """

    def lower(self) -> Stage:
        # The order of declarations and ops is part of the result: equal inputs give an equal text.
        blocks = self.topology.stage_blocks[self.stage.index]
        for block in blocks:
            self.declare_state(block)
        if self.uses_scale(blocks):
            self.carried(StateKind.SCALAR, "scale", tensor_type(Dtype.F32, (2,)))
        # Micro-batches ascend in the backward too: floating-point sums of gradients depend on the order.
        repeated = RepeatedPasses(self.stage)
        for passes in (self.forward_passes, self.backward_passes):
            for micro_batch in range(min(PATTERN + 1, self.plan.micro_batches)):
                ops, tensors = len(self.stage.ops), len(self.stage.tensors)
                passes(micro_batch)
            pattern = self.stage.ops[ops:], list(self.stage.tensors.values())[tensors:]
            repeated.add(*pattern, range(PATTERN + 1, self.plan.micro_batches))
        self.step_end(blocks)
        return self.stage

    def forward_passes(self, micro_batch: int) -> None:
        """Emit the forward of a micro-batch through all chunks of the stage."""
        for chunk in self.topology.chunks_of(self.stage.index):
            for piece in self.pieces(micro_batch):
                self.forward_pass(chunk, piece)

    def backward_passes(self, micro_batch: int) -> None:
        """Emit the backward of a micro-batch through all chunks of the stage.

        Slices descend: the backward of a slice needs the key and value gradients that later slices contribute.
        """
        for chunk in reversed(self.topology.chunks_of(self.stage.index)):
            for piece in reversed(self.pieces(micro_batch)):
                self.backward_pass(chunk, piece)

    def uses_scale(self, blocks: tuple[Block, ...]) -> bool:
        """Tell whether any op of a stage reads or follows the loss scale: not if it only goes forward and is fixed."""
        model, plan = self.model, self.plan
        routes = plan.router and any(has_experts(model, each) and has_backward(model, plan, each) for each in blocks)
        ends = blocks[-1].kind == "head" or any(trains(model, plan, each) for each in blocks)
        return plan.has_dynamic_scale or ends or bool(routes)

    def add_branch(self, block: Block, piece: Piece) -> None:
        """Emit the sum of a block's partial outputs, then the op that norms it and adds it to the residual stream."""
        branch, *statistics = self.branch(block, piece)
        after, fields = next_block(self.model, block), {**piece_fields(piece)}
        part = self.written_activation(after, piece)
        self.emit(ReduceRows(payload=Payload.ACTIVATION, block=after, **fields, reads=(part,), writes=(branch,)))
        reads = (self.activation(block, piece), branch, *self.views(block, piece, Phase.FORWARD))
        writes = (self.activation(after, piece), *statistics)
        self.emit(AddBranch(block=block, **fields, reads=reads, writes=writes))

    def add_branch_backward(self, block: Block, piece: Piece) -> None:
        """Emit the post-norm's backward: from the gradient of the stream behind a block to that of its output."""
        dsum = self.activation(next_block(self.model, block), piece, gradient=True)
        reads = (dsum, *self.branch(block, piece), *self.views(block, piece, Phase.BACKWARD))
        writes = (self.branch_gradient(block, piece), *self.branch_sums(block, piece))
        self.emit(AddBranchBackward(block=block, **piece_fields(piece), reads=reads, writes=writes))

    def sum_parts(self, block: Block, piece: Piece, around: Block | None, *, gradient: bool = False) -> None:
        """Emit the sum over tensor-parallel ranks of the partial inputs of a block, or of their gradients.

        `around` is the block whose input (or its gradient) the residual connection adds to the sum; None adds nothing.
        Emits nothing if tp is 1.
        """
        if self.plan.tp == 1:
            return
        part = self.written_activation(block, piece, gradient=gradient)
        stream = () if around is None else (self.activation(around, piece, gradient=gradient),)
        payload = Payload.GRADIENT if gradient else Payload.ACTIVATION
        result = self.activation(block, piece, gradient=gradient)
        fields = {"payload": payload, "block": block, **piece_fields(piece)}
        self.emit(ReduceRows(**fields, reads=(part, *stream), writes=(result,)))

    def into(self, chunk: int) -> int | None:
        """Return the `chunk` field of a message into a chunk; None if each stage holds one chunk."""
        return chunk if self.topology.has_several_chunks else None

    def message(self, payload: Payload, piece: Piece, into: int, peer: int) -> dict[str, Any]:
        """Return the fields of a message."""
        return {"payload": payload, **piece_fields(piece), "chunk": self.into(into), "peer": peer}

    def forward_pass(self, chunk: int, piece: Piece) -> None:
        """Emit the forward of a piece through a chunk: inputs, receive, blocks with their sums, send."""
        blocks = self.topology.chunk_blocks[chunk]
        before, after = self.topology.neighbours(chunk)
        if blocks[0].kind == "embed":
            self.load(Part.TOKENS, piece)
        if chunk == self.topology.chunks_of(self.stage.index)[0] and self.plan.keeps_documents_apart:
            # once for all chunks of the stage: each has an attention, and this chunk runs first
            self.load(Part.DOCUMENTS, piece)
        if before is not None:
            received = self.activation(blocks[0], piece)
            self.emit(Recv(**self.message(Payload.ACTIVATION, piece, chunk, before), writes=(received,)))
        for block in blocks:
            if block.kind == "head":
                self.load(Part.LABELS, piece)
            self.project(block, piece)
            self.send_to_experts(block, piece)
            self.emit(self.forward(block, piece))
            # Three ways to the stream behind a block: the loss of the head; a norm and a sum by an op of its own; a
            # sum over tensor-parallel ranks. Parallel attention is not summed: its mlp adds to the same partial sum.
            if block.kind == "head":
                self.combine_loss(block, piece)
            elif self.adds_apart(block):
                self.add_branch(block, piece)
            elif not is_parallel_mlp(self.model, self.plan, next_block(self.model, block)):
                around = None if block.kind == "embed" else source_block(self.model, self.plan, block)
                self.sum_parts(next_block(self.model, block), piece, around)
        if after is not None:
            sent = self.activation(next_block(self.model, blocks[-1]), piece)
            self.emit(Send(**self.message(Payload.ACTIVATION, piece, chunk + 1, after), reads=(sent,)))

    def load(self, part: Part, piece: Piece) -> None:
        self.emit(LoadInput(part=part, **piece_fields(piece), writes=(self.input(part, piece),)))

    def forward(self, block: Block, piece: Piece) -> Forward:
        views = self.views(block, piece, Phase.FORWARD)
        fields = piece_fields(piece)
        if projected := self.projected(block, piece):
            return self.forward_of_heads(block, piece, projected)
        if made := self.made_by_project(block, piece):
            return self.forward_of_context(block, piece, made)
        if self.routed(block, piece):
            return self.forward_of_experts(block, piece)
        if block.kind == "embed":
            source = self.input(Part.TOKENS, piece)
        else:
            source = self.read_activation(source_block(self.model, self.plan, block), piece, phase=Phase.FORWARD)
        if block.kind == "head":
            inputs = (source, *views, self.input(Part.LABELS, piece))
            loss = self.scalar("loss", Dtype.F64)
            saved = self.saved(block, piece)
            if self.plan.tp > 1:
                # this rank knows the log-sum-exp of its part of the vocabulary only: `combine_loss` writes the slot
                own = (tensor for tensor in saved if tensor.slot != "lse")
                return Forward(block=block, **fields, reads=inputs, writes=(*self.parts_of_loss(piece), *own))
            writes, updates = self.with_loss(saved, loss, piece)
            return Forward(block=block, **fields, reads=inputs, writes=writes, updates=updates)
        output = self.written_activation(next_block(self.model, block), piece)
        branch = self.branch_part(block, piece)
        others = (*self.documents(block, piece), *self.seen_keys(block, piece), *self.choice_bias(block))
        reads = (source, *views, *others, *branch)
        return Forward(block=block, **fields, reads=reads, writes=(output, *self.saved(block, piece)))

    def with_loss(
        self, saved: tuple[Tensor, ...], loss: Tensor, piece: Piece
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return (writes, updates) of the op that makes a piece's loss: the first piece writes it, others add."""
        return ((*saved, loss), ()) if piece == self.pieces(0)[0] else (saved, (loss,))

    def combine_loss(self, block: Block, piece: Piece) -> None:
        """Emit the op that combines the tensor-parallel ranks' parts of each row's loss; nothing if tp is 1."""
        if self.plan.tp > 1:
            lse = tuple(tensor for tensor in self.saved(block, piece) if tensor.slot == "lse")
            writes, updates = self.with_loss(lse, self.named("loss"), piece)
            reads = (*self.parts_of_loss(piece), self.input(Part.LABELS, piece))
            self.emit(CombineLoss(block=block, **piece_fields(piece), reads=reads, writes=writes, updates=updates))

    def backward_pass(self, chunk: int, piece: Piece) -> None:
        """Emit the backward of a piece through a chunk: receive, blocks in reverse order with their sums, send.

        If each micro-batch is reduced alone, a block's reduction follows the backward of the micro-batch's last piece.
        A chunk below the lowest parameter that trains only goes forward.
        """
        if chunk < self.topology.forward_only:
            return
        blocks = self.topology.chunk_blocks[chunk]
        before, after = self.topology.neighbours(chunk)
        if after is not None:
            received = self.activation(next_block(self.model, blocks[-1]), piece, gradient=True)
            self.emit(Recv(**self.message(Payload.GRADIENT, piece, chunk + 1, after), writes=(received,)))
        # `sum_parts` makes the gradient of a block's input whole before the block before reads it
        for block in reversed(blocks):
            if not has_backward(self.model, self.plan, block):
                break
            if self.adds_apart(block):
                self.add_branch_backward(block, piece)
            self.backward_heads(block, piece)
            self.emit(self.backward(block, piece))
            if passes_gradient_on(self.model, self.plan, block) and not is_parallel_mlp(self.model, self.plan, block):
                around = None if block.kind == "head" else sum_block(self.model, self.plan, block)
                self.sum_parts(block, piece, around, gradient=True)
            if (
                trains(self.model, self.plan, block)
                and reduces_each_micro_batch(self.model, self.plan, block)
                and self.is_last_share(piece)
            ):
                self.emit(self.reduce_scatter(block, piece if isinstance(piece, int) else piece.micro_batch))
        if before is not None and passes_gradient_on(self.model, self.plan, blocks[0]):
            sent = self.activation(blocks[0], piece, gradient=True)
            self.emit(Send(**self.message(Payload.GRADIENT, piece, chunk, before), reads=(sent,)))

    def is_last_share(self, piece: Piece) -> bool:
        """Tell whether a piece is the last of its micro-batch in the backward, where slices descend."""
        return isinstance(piece, int) or piece.number == 0

    def is_first_share(self, block: Block, piece: Piece) -> bool:
        """Tell whether a piece is the first that adds to a block's gradient tensor (see `gradient`)."""
        each = reduces_each_micro_batch(self.model, self.plan, block)
        if isinstance(piece, int):
            return piece == 0 or each
        # slices descend in the backward: the last one comes first
        return piece.number == len(self.plan.slices) - 1 and (piece.micro_batch == 0 or each)

    def backward(self, block: Block, piece: Piece) -> Backward:
        saved = self.saved(block, piece)
        micro_batch = piece if isinstance(piece, int) else piece.micro_batch
        gradient = (self.gradient(block, micro_batch),) if trains(self.model, self.plan, block) else ()
        outputs: tuple[Tensor, ...] = ()
        if passes_gradient_on(self.model, self.plan, block):
            outputs = (self.written_activation(block, piece, gradient=True),)
        inputs: tuple[Tensor, ...]
        if block.kind == "head":
            views = self.views(block, piece, Phase.BACKWARD)
            source = self.read_activation(block, piece, phase=Phase.BACKWARD)
            inputs = (source, *saved, *views, self.input(Part.LABELS, piece), self.named("scale"))
        else:
            dy = self.read_activation(sum_block(self.model, self.plan, block), piece)
            if block.kind == "embed":
                inputs = (dy, self.input(Part.TOKENS, piece), *self.documents(block, piece))
            else:
                gradients = self.normed_gradients(block, piece) or self.head_gradients(block, piece)
                if gradients:
                    # `backward_heads` has done the part through the scores: read only the slots of the rest
                    others = (*gradients, *self.row_sums(block, piece, PRODUCTS))
                    names = slots_behind_heads(self.model, self.plan_of(piece), block)
                    saved = tuple(tensor for tensor in saved if tensor.slot in names)
                else:
                    others = (*self.documents(block, piece), *self.seen_keys(block, piece), *self.sums(block, piece))
                others += self.branch_part(next_block(self.model, block), piece, gradient=True)
                if self.head_gradients(block, piece):
                    others += self.documents(block, piece)
                others += self.branch_sums(block, piece)
                if self.plan.router and has_experts(self.model, block):
                    others += (self.named("scale"),)
                views = self.views(block, piece, Phase.BACKWARD)
                source_of = source_block(self.model, self.plan, block)
                source = self.read_activation(source_of, piece, phase=Phase.BACKWARD)
                others += self.send_gradients_to_experts(block, piece, dy, first=self.is_first_share(block, piece))
                inputs = (dy, source, *saved, *views, *others)
        begun: tuple[Tensor, ...] = ()
        added: tuple[Tensor, ...] = ()
        if not self.normed_gradients(block, piece):  # else `backward_heads` has added to them
            begun, added = (self.seen_sums(block, piece, first=first) for first in (True, False))
        fields, counts = piece_fields(piece), self.counted(block)
        # The first contribution writes the gradient instead of adding, so no op has to zero it.
        if self.is_first_share(block, piece) and not self.routed(block, piece):
            writes, updates = (*outputs, *begun, *gradient), (*counts, *added)
        else:
            writes, updates = (*outputs, *begun), (*gradient, *counts, *added)
        return Backward(block=block, **fields, reads=inputs, writes=writes, updates=updates)

    def reduce_scatter(self, block: Block, m: int | None) -> ReduceScatter:
        """Build a block's reduction into shards: of micro-batch `m` alone, or of the whole step if `m` is None."""
        results = (self.shard(block), self.scalar(f"flag.{block}", Dtype.U32))
        source = (self.gradient(block, m or 0),)
        fields: dict[str, Any] = {
            "blocks": (block,),
            "group": mean_group(self.model, self.plan, block),
            "micro_batch": m,
        }
        if m:  # micro-batch 0 and the reduction of a whole step (None) begin the shard, later ones add to it
            return ReduceScatter(**fields, reads=source, updates=results)
        return ReduceScatter(**fields, reads=source, writes=results)

    def step_end(self, blocks: tuple[Block, ...]) -> None:
        """Emit the end of the step: reductions, scalars, updates, gathers of views, the next loss scale."""
        blocks = tuple(block for block in blocks if trains(self.model, self.plan, block))
        for block in reversed(blocks):
            if not reduces_each_micro_batch(self.model, self.plan, block):
                self.emit(self.grad_sync(block))
        # Gradients first become final: over replicas, over tensor-parallel ranks, over tied ends. The norm reads final
        # gradients. Flags meet before any update, so that their barrier does not wait for updates and gathers.
        self.sum_shared(blocks)
        self.sum_tied(blocks)
        if self.stage.index == self.topology.last_stage:
            loss = self.named("loss")
            self.emit(AllReduceScalar(quantity=Quantity.LOSS, group=Group.REPLICAS, reads=(loss,)))
        self.sum_norm(blocks)
        self.combine_flags(blocks)
        self.combine_counts(blocks)
        for block in blocks:
            self.emit(self.update(block))
        for block in blocks:
            if gathers_at_step_end(self.model, self.plan, block):
                view = self.named(f"{'v' if parts_view(self.model, self.plan, block) else 'w'}.{block}")
                source = (self.named(f"p.{block}"),)
                group = shards_group(self.model, self.plan, block)
                self.emit(AllGather(blocks=(block,), group=group, reads=source, writes=(view,)))
        if self.plan.has_dynamic_scale:
            self.emit(ScaleUpdate(reads=(self.named("overflow"),), updates=(self.named("scale"),)))

    def grad_sync(self, block: Block) -> Op:
        if is_sharded(self.model, self.plan, block):
            return self.reduce_scatter(block, None)
        flag = self.scalar(f"flag.{block}", Dtype.U32)
        group = mean_group(self.model, self.plan, block)
        return AllReduce(blocks=(block,), group=group, updates=(self.gradient(block, 0),), writes=(flag,))

    def sum_shared(self, blocks: tuple[Block, ...]) -> None:
        """Emit the sums over tensor-parallel ranks of each block's gradients of replicated parameters, and of its flag.

        The flags are summed so that all ranks skip the same updates. Expert ranks do so for the mlps.
        """
        for block in reversed(blocks):
            if shares_experts(self.model, self.plan, block):
                updates = (self.reduced(block), self.named(f"flag.{block}"))
                self.emit(AllReduce(blocks=(block,), group=Group.EXPERTS, updates=updates))
        if self.plan.tp > 1:
            for block in reversed(blocks):
                updates = (self.reduced(block), self.named(f"flag.{block}"))
                self.emit(AllReduce(blocks=(block,), group=Group.TENSOR, updates=updates))

    def sum_tied(self, blocks: tuple[Block, ...]) -> None:
        """Emit the sum of the tied embeddings' gradients on the first and the last stage, before either updates."""
        if not ties_gradients(self.model, self.plan):
            return
        ends = tuple(block for block in blocks if block.kind in ("embed", "head"))
        if ends:
            # equal shards hold the same rows of the table at both ends (`flat_elements`), so shards are summed directly
            grads = tuple(self.reduced(block) for block in ends)
            flags = tuple(self.named(f"flag.{block}") for block in ends)
            self.emit(AllReduce(blocks=ends, group=Group.ENDS, updates=(*grads, *flags)))

    def sum_norm(self, blocks: tuple[Block, ...]) -> None:
        """Emit the norm of the whole gradient for global clipping; every update of every stage waits for it."""
        if self.plan.optimizer.clip == "global":
            gradients = tuple(self.reduced(block) for block in blocks)
            flags = tuple(self.named(f"flag.{block}") for block in blocks)
            norm = (self.scalar("norm", Dtype.F64),)
            reads = (*gradients, *flags)
            self.emit(AllReduceScalar(quantity=Quantity.NORM, group=Group.ALL, blocks=blocks, reads=reads, writes=norm))

    def combine_flags(self, blocks: tuple[Block, ...]) -> None:
        """Emit the combination of all ranks' overflow flags, which the next step's loss scale follows.

        It waits for reductions only, not for updates and gathers.
        """
        if self.plan.has_dynamic_scale:
            flags = tuple(self.named(f"flag.{block}") for block in blocks)
            overflow = (self.scalar("overflow", Dtype.U32),)
            self.emit(AllReduceScalar(quantity=Quantity.FLAGS, group=Group.ALL, reads=flags, writes=overflow))

    def combine_counts(self, blocks: tuple[Block, ...]) -> None:
        """Emit the sum over replicas of the tokens sent to each expert, which also moves the biases of routers."""
        blocks = tuple(block for block in blocks if biases_choice(self.model, self.plan, block))
        if blocks:
            flags = tuple(self.named(f"flag.{block}") for block in blocks)
            updates = (*(self.named(f"bias.{block}") for block in blocks), *(self.named(f"load.{b}") for b in blocks))
            fields: dict[str, Any] = {"quantity": Quantity.COUNTS, "group": Group.REPLICAS, "blocks": blocks}
            self.emit(AllReduceScalar(**fields, reads=(*flags, *self.norm()), updates=updates))

    def norm(self) -> tuple[Tensor, ...]:
        """Return the norm of the whole gradient, which says that every update is skipped; empty without clipping."""
        return (self.named("norm"),) if self.plan.optimizer.clip == "global" else ()

    def update(self, block: Block) -> Update:
        reads = (self.reduced(block), self.named(f"flag.{block}"), self.named("scale"), *self.norm())
        state = tuple(self.named(f"{prefix}.{block}") for prefix in ("p", "m1", "m2", "t"))
        writes = (self.named(f"w.{block}"),) if keeps_view(self.model, self.plan, block) else ()
        return Update(block=block, reads=reads, writes=writes, updates=state)

"""Ops that one rank executes alone on its processor: loading input, blocks forward and backward, updates, releases."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, final, get_args

from attrs import define

from ratrain.ratrain_ir.config.types import Dtype, StateKind
from ratrain.ratrain_ir.model.blocks import Block, block_chain, next_block
from ratrain.ratrain_ir.model.expert_ranks import shares_experts
from ratrain.ratrain_ir.model.expert_slots import routed_slots
from ratrain.ratrain_ir.model.sharded_blocks import keeps_view
from ratrain.ratrain_ir.model.slots import (
    ATTENDED,
    HEADS_SLOTS,
    INPUT_HALF_SLOTS,
    KEY_SLOTS,
    PRODUCTS,
    SQUARES,
    WEIGHT_HALF_SLOTS,
    head_gradient_slots,
    kept_in_forward,
    made_by_project,
    normed_gradient_slots,
    output_gradient_slots,
    projected_slots,
    row_sum_slots,
    slots_behind_heads,
)
from ratrain.ratrain_ir.model.tensor_blocks import adds_branch_apart, is_parallel_mlp
from ratrain.ratrain_ir.ops.base import BlockPieceOp, Engine, Op, Part, WorkGroup
from ratrain.ratrain_ir.ops.context_ranks import Attend, AttendBackward
from ratrain.ratrain_ir.ops.expert_ranks import BackwardExperts, ForwardExperts, Route
from ratrain.ratrain_ir.ops.op_fields import block_field, enum_field, micro_batch_field, slice_field
from ratrain.ratrain_ir.ops.operands import Candidates, Roles, Signature, SignatureError
from ratrain.ratrain_ir.ops.roles import (
    branch_part_roles,
    branch_roles,
    branch_sum_roles,
    check_row_sums,
    check_whole_backward,
    choice_bias_roles,
    combined_roles,
    document_roles,
    exchanged_role,
    gradient_role,
    gradient_roles,
    gradients_before_norms,
    half_roles,
    input_gradient_role,
    input_gradient_roles,
    input_role,
    load_roles,
    made_before_forward,
    output_role,
    own_sum_roles,
    part_of_sums,
    parts_of_loss,
    pending_roles,
    reduced_role,
    router_scale_roles,
    saved_roles,
    scalar_role,
    scale_role,
    seen_key_roles,
    seen_part_roles,
    seen_sum_roles,
    slot_roles,
    state_role,
    token_role,
    view_role,
    view_roles,
    whole_key_roles,
)

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class LoadInput(Op):
    """Copies tokens, labels or starts of documents of one micro-batch from the host into the arena.

    Starts of documents are loaded where attention keeps documents apart: for each row, the position in its sequence,
    counted from 0, at which its document starts.
    """

    keyword = "load_input"
    default_engine = Engine.HOST
    default_work_group = WorkGroup.FORWARD
    alike_on_all_stages = True
    part: Part = enum_field(Part)
    micro_batch: int = micro_batch_field()
    slice: int | None = slice_field()

    def served_blocks(self, model: ModelConfig) -> tuple[Block, ...]:
        """List the block that reads the part: embedding or head; empty for documents, which many blocks read."""
        places = {Part.TOKENS: 0, Part.LABELS: -1}
        return (block_chain(model)[places[self.part]],) if self.part in places else ()

    def candidates(self, model: ModelConfig, plan: Plan) -> Candidates:
        """List the signatures that this op may have."""
        del model
        return [(False, Signature(writes=(token_role("data", plan),)))]


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class Forward(BlockPieceOp):
    """Forward of one block on one micro-batch; that of the head adds to the step's loss.

    It writes the saved slots that are kept for the backward; a `recompute` restores the others.
    """

    keyword = "forward"
    default_engine = Engine.COMPUTE
    default_work_group = WorkGroup.FORWARD
    alike_on_all_stages = True

    def candidates(self, model: ModelConfig, plan: Plan) -> Candidates:
        """List the signatures that this op may have."""
        return _forward(model, plan, self.block)


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class Recompute(BlockPieceOp):
    """Activation recovery: recomputes the saved slots that a block's forward did not keep for its backward.

    It reads the saved slots that were kept and writes the others. It may write the block's output too: where nothing of
    a layer was kept, the recovery of the MLP needs the output of the attention. With tensor-parallel ranks the output
    is a partial sum again, which a `reduce_rows` for the backward sums.
    """

    keyword = "recompute"
    default_engine = Engine.COMPUTE
    default_work_group = WorkGroup.BACKWARD
    alike_on_all_stages = True

    def candidates(self, model: ModelConfig, plan: Plan) -> Candidates:
        """List the signatures that this op may have."""
        return _recompute(model, plan, self.block, attends=attends(self))


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class Backward(BlockPieceOp):
    """Backward of one block on one micro-batch: the gradients of its input and of its parameters that train.

    The first contribution to the parameters' gradient writes it, later ones add to it. The lowest block that trains
    makes no gradient of its input, a frozen block above it no other one.
    """

    keyword = "backward"
    default_engine = Engine.COMPUTE
    default_work_group = WorkGroup.BACKWARD
    alike_on_all_stages = True

    def candidates(self, model: ModelConfig, plan: Plan) -> Candidates:
        """List the signatures that this op may have."""
        return _backward(model, plan, self.block)


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class BackwardInput(BlockPieceOp):
    """First half of a split backward: the gradient of the block's input.

    The stage before waits only for this half. It leaves pending slots for the second half. Only attention and mlp
    blocks have a split backward.
    """

    keyword = "backward_input"
    default_engine = Engine.COMPUTE
    default_work_group = WorkGroup.BACKWARD
    alike_on_all_stages = True

    def candidates(self, model: ModelConfig, plan: Plan) -> Candidates:
        """List the signatures that this op may have."""
        return _backward_input(model, plan, self.block)


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class BackwardWeight(BlockPieceOp):
    """Second half of a split backward: the gradient of the block's parameters.

    It may stand anywhere after the first half.
    """

    keyword = "backward_weight"
    default_engine = Engine.COMPUTE
    default_work_group = WorkGroup.WEIGHT
    alike_on_all_stages = True

    def candidates(self, model: ModelConfig, plan: Plan) -> Candidates:
        """List the signatures that this op may have."""
        return _backward_weight(model, plan, self.block)


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class AddBranch(BlockPieceOp):
    """Norms the summed output of a block and adds it to the residual stream.

    It is an op of its own because the norm needs the sum over tensor-parallel ranks. It works on the rows that a rank
    holds after that sum. Attention and mlp blocks have one in models that apply a norm to the output of each block.
    """

    keyword = "add_branch"
    default_engine = Engine.COMPUTE
    default_work_group = WorkGroup.FORWARD
    alike_on_all_stages = True

    def candidates(self, model: ModelConfig, plan: Plan) -> Candidates:
        """List the signatures that this op may have."""
        return _add_branch(model, plan, self.block)


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class AddBranchBackward(BlockPieceOp):
    """Gradient of the input of `add_branch`, from the gradient of the residual stream.

    It leaves the gradients of the norm's weights (and biases), as f32 sums over the rows that a rank holds, for the
    block's backward.
    """

    keyword = "add_branch_backward"
    default_engine = Engine.COMPUTE
    default_work_group = WorkGroup.BACKWARD
    alike_on_all_stages = True

    def candidates(self, model: ModelConfig, plan: Plan) -> Candidates:
        """List the signatures that this op may have."""
        return _add_branch_backward(model, plan, self.block)


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class Project(BlockPieceOp):
    """Computes queries, keys and values of an attention, before norms over all tensor-parallel ranks, or a gather.

    Context ranks gather keys and values, or exchange heads, which it leaves as attention takes them: normed and
    rotated. Before norms over
    all tensor-parallel ranks, it leaves for each row of queries and of keys the sum of squares over the rank's own
    heads; a key head that several ranks hold counts once. The attention's forward continues once these are summed over
    ranks (`reduce_sums`).
    """

    keyword = "project"
    default_engine = Engine.COMPUTE
    default_work_group = WorkGroup.FORWARD
    alike_on_all_stages = True

    def candidates(self, model: ModelConfig, plan: Plan) -> Candidates:
        """List the signatures that this op may have."""
        return _project(model, plan, self.block)


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class BackwardHeads(BlockPieceOp):
    """Computes gradients of queries, keys and values, before norms over all tensor-parallel ranks, or a sum of them.

    Context ranks sum those of keys and values (`reduce_keys`), of which it leaves parts; where they exchange heads, it
    leaves the gradient of the heads' output. Before norms over all
    tensor-parallel ranks, it leaves for each row of queries and of keys the sum of products that the norm's gradient
    needs, over the rank's own heads. The attention's backward, or its input half, continues once these are summed over
    ranks.
    """

    keyword = "backward_heads"
    default_engine = Engine.COMPUTE
    default_work_group = WorkGroup.BACKWARD
    alike_on_all_stages = True

    def candidates(self, model: ModelConfig, plan: Plan) -> Candidates:
        """List the signatures that this op may have."""
        return _backward_heads(model, plan, self.block)


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class Update(Op):
    """UpdateShard: AdamW on the master and moments of one block.

    If every rank keeps the block's whole view from step to step (nothing is sharded), it writes the view too.
    """

    keyword = "update"
    default_engine = Engine.COMPUTE
    alike_on_all_stages = True
    block: Block = block_field()
    placement: Engine = enum_field(Engine, Engine.COMPUTE, among=(Engine.COMPUTE, Engine.HOST))

    @property
    def engine(self) -> Engine:
        """The engine of updates: compute or host, depending on the machine."""
        return self.placement

    def candidates(self, model: ModelConfig, plan: Plan) -> Candidates:
        """List the signatures that this op may have."""
        return _update(model, plan, self.block)


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class ScaleUpdate(Op):
    """Sets the next step's loss scale from this step's overflow flag.

    It runs on the collective engine, where the flag arrives, so that the host can load the next step's inputs without
    waiting for it.
    """

    keyword = "scale_update"
    default_engine = Engine.COLLECTIVE
    alike_on_all_stages = True

    def candidates(self, model: ModelConfig, plan: Plan) -> Candidates:
        """List the signatures that this op may have."""
        del model, plan
        return _scale_update()


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class Release(Op):
    """Ends the lives of tensors. It marks a place in the list and executes nothing."""

    keyword = "release"
    default_engine = Engine.NONE
    alike_on_all_stages = True


BlockOp = (
    Forward
    | Recompute
    | Backward
    | BackwardInput
    | BackwardWeight
    | AddBranch
    | AddBranchBackward
    | Project
    | BackwardHeads
    | Attend
    | AttendBackward
    | Route
    | ForwardExperts
    | BackwardExperts
)

BLOCK_OPS: tuple[type[Op], ...] = get_args(BlockOp)
"""Kinds of ops that run a routine: they compute on one block of one micro-batch."""

InputGradientOp = Backward | BackwardInput
"""Ops that compute the gradient of a block's input."""

WeightGradientOp = Backward | BackwardWeight
"""Ops that contribute to the gradient of a block's parameters."""


@cache
def _forward(model: ModelConfig, plan: Plan, block: Block) -> Candidates:
    views, documents = view_roles(model, plan, block), document_roles(model, plan, block)
    if block.kind == "embed":
        reads: Roles = (token_role("tokens", plan), *views, *documents)
        return [(False, Signature(reads, (output_role("y", model, plan, block),)))]
    source = input_role(model, plan, block)
    if block.kind == "head":
        reads = (source, *views, token_role("labels", plan))
        saved, loss = saved_roles(model, plan, block, optional=False), scalar_role("loss", Dtype.F64)
        if plan.tp > 1:
            return [(False, Signature(reads, (*parts_of_loss(plan), *(role for role in saved if role.name != "lse"))))]
        return [(False, Signature(reads, (*saved, loss))), (True, Signature(reads, saved, (loss,)))]
    saved = saved_roles(model, plan, block, optional=True, needed=kept_in_forward(model, plan, block))
    if projected := made_by_project(model, plan, block):
        own = tuple(role for role in saved if role.name not in [slot.name for slot in projected])
        reads = (*_stream_roles(model, plan, block), *views)
        if plan.attends_apart:
            reads += tuple(role._replace(optional=False) for role in own if role.name in ATTENDED)
            own = tuple(role for role in own if role.name not in ATTENDED)
        else:
            reads += (*documents, slot_roles(projected)[0])
            reads += (*seen_key_roles(model, plan, block), *whole_key_roles(model, plan, block))
        return [(False, Signature(reads, (output_role("y", model, plan, block), *own)))]
    if made := made_before_forward(model, plan, block):
        names = [role.name for role in made]
        own = tuple(role for role in saved if role.name not in names)
        reads = (*views, *documents, *made, *seen_key_roles(model, plan, block))
        return [(False, Signature(reads, (output_role("y", model, plan, block), *own)))]
    if routed := routed_slots(model, plan, block):
        given = slot_roles(routed[:1]) if model.shared_expert_size is not None else ()
        own = tuple(role for role in saved if role.name.startswith("shared_"))
        reads = (source, *views, *given, *combined_roles(model, plan, gradient=False))
        return [(False, Signature(reads, (output_role("y", model, plan, block), *own)))]
    others = (*seen_key_roles(model, plan, block), *choice_bias_roles(model, plan, block))
    branch = branch_part_roles(model, plan, is_parallel_mlp(model, plan, block))
    reads = (source, *views, *documents, *others, *branch)
    return [(False, Signature(reads, (output_role("y", model, plan, block), *saved)))]


def _stream_roles(model: ModelConfig, plan: Plan, block: Block) -> Roles:
    """Return the role of an attention's input where it is added to its output; ranks that sum parts add it there."""
    return () if plan.tp > 1 else (input_role(model, plan, block),)


@cache
def _recompute(model: ModelConfig, plan: Plan, block: Block, *, attends: bool) -> Candidates:
    if shares_experts(model, plan, block):
        raise SignatureError(f"replicas share out the experts of {block}: nothing of it is recomputed")
    sums = tuple(slot.name for slot in row_sum_slots(model, plan, block, SQUARES))
    given = saved_roles(model, plan, block, optional=True, needed=sums)
    saved = tuple(role for role in given if role.name not in sums)
    attends = attends and not plan.attends_apart
    seen = (*seen_key_roles(model, plan, block), *whole_key_roles(model, plan, block)) if attends else ()
    others = (*choice_bias_roles(model, plan, block), *document_roles(model, plan, block), *seen)
    reads = (input_role(model, plan, block), *given, *view_roles(model, plan, block), *others)
    if block.kind == "head":
        return [(False, Signature(reads, saved))]
    if plan.tp > 1 and (model.parallel_residual or adds_branch_apart(model, plan, block)):
        return [(False, Signature(reads, saved))]  # no sum over the ranks is repeated (`why_never_repeated`)
    return [(False, Signature(reads, (*saved, output_role("y", model, plan, block, optional=True))))]


@cache
def _backward(model: ModelConfig, plan: Plan, block: Block) -> Candidates:
    source, views = input_role(model, plan, block), view_roles(model, plan, block)
    outputs = input_gradient_roles(model, plan, block)
    saved, documents = saved_roles(model, plan, block, optional=False), document_roles(model, plan, block)
    if projected_slots(model, plan, block) or made_by_project(model, plan, block):
        return _backward_behind_heads(model, plan, block)
    if block.kind == "embed":
        reads: Roles = (output_role("dy", model, plan, block), token_role("tokens", plan), *documents)
    elif block.kind == "head":
        reads = (source, *saved, *views, token_role("labels", plan), scale_role())
    else:
        others = (*documents, *seen_key_roles(model, plan, block), *own_sum_roles(model, plan, block))
        others += branch_part_roles(model, plan, is_parallel_mlp(model, plan, next_block(model, block)))
        others += (*branch_sum_roles(model, plan, block), *router_scale_roles(model, plan, block))
        reads = (output_role("dy", model, plan, block), source, *saved, *views, *others)
    gradient, load = gradient_roles(model, plan, block), load_roles(model, plan, block)
    if shares_experts(model, plan, block):  # `backward_experts` has begun the gradient of this piece
        reads += combined_roles(model, plan, gradient=True)
        return [(True, Signature(reads, outputs, gradient + load))]
    # Key and value gradients of earlier slices: this slice writes the sums that it is the first to add to (`begun`),
    # and updates the others (`added`).
    begun, added = (seen_sum_roles(model, plan, block, first=first) for first in (True, False))
    first = (False, Signature(reads, (*outputs, *begun, *gradient), (*load, *added)))
    return [first, (True, Signature(reads, (*outputs, *begun), (*gradient, *load, *added)))] if gradient else [first]


def _backward_behind_heads(model: ModelConfig, plan: Plan, block: Block) -> Candidates:
    """List the signatures of an attention's backward that starts from the gradients that `backward_heads` made."""
    names = slots_behind_heads(model, plan, block)
    saved = tuple(role for role in saved_roles(model, plan, block, optional=False) if role.name in names)
    ends = (output_role("dy", model, plan, block), input_role(model, plan, block))
    reads = (*ends, *saved, *view_roles(model, plan, block), *gradients_of_heads(model, plan, block))
    reads += branch_part_roles(model, plan, is_parallel_mlp(model, plan, next_block(model, block)))
    reads += (*_documents_behind_heads(model, plan, block), *branch_sum_roles(model, plan, block))
    dx, gradient = input_gradient_roles(model, plan, block), gradient_roles(model, plan, block)
    first = (False, Signature(reads, dx + gradient))
    return [first, (True, Signature(reads, dx, gradient))] if gradient else [first]


def _documents_behind_heads(model: ModelConfig, plan: Plan, block: Block) -> Roles:
    """Return the role of the starts of documents for a backward that turns gradients of keys back (context ranks)."""
    return document_roles(model, plan, block) if plan.cp > 1 else ()


def gradients_of_heads(model: ModelConfig, plan: Plan, block: Block) -> Roles:
    """Return the roles of the gradients that an attention's backward takes from `backward_heads`; else nothing."""
    return slot_roles(head_gradient_slots(model, plan, block)) or gradients_before_norms(model, plan, block)


@cache
def _project(model: ModelConfig, plan: Plan, block: Block) -> Candidates:
    if projected := made_by_project(model, plan, block):
        needed = ("q", *KEY_SLOTS)
        writes = tuple(role._replace(optional=role.name not in needed) for role in slot_roles(projected))
        reads = (input_role(model, plan, block), *view_roles(model, plan, block), *document_roles(model, plan, block))
        return [(False, Signature(reads, writes))]
    check_row_sums(model, plan, block)
    reads = (input_role(model, plan, block), *view_roles(model, plan, block))
    return [(False, Signature(reads, (part_of_sums(plan, SQUARES), *slot_roles(projected_slots(model, plan, block)))))]


@cache
def _backward_heads(model: ModelConfig, plan: Plan, block: Block) -> Candidates:
    if gradients := head_gradient_slots(model, plan, block):
        saved = half_roles(model, plan, block, HEADS_SLOTS)
        reads = (output_role("dy", model, plan, block), *saved, *view_roles(model, plan, block))
        if plan.attends_apart:
            return [(False, Signature(reads, slot_roles(output_gradient_slots(model, plan, block)[:1])))]
        reads += (*document_roles(model, plan, block), *seen_key_roles(model, plan, block))
        reads += whole_key_roles(model, plan, block)
        begun, added = (seen_part_roles(model, plan, block, first=first) for first in (True, False))
        return [(False, Signature(reads, (slot_roles(gradients)[0], *begun), added))]
    check_row_sums(model, plan, block)
    others = (
        *document_roles(model, plan, block),
        *seen_key_roles(model, plan, block),
        *own_sum_roles(model, plan, block),
    )
    saved = half_roles(model, plan, block, HEADS_SLOTS)
    reads = (output_role("dy", model, plan, block), *saved, *view_roles(model, plan, block), *others)
    begun, added = (seen_sum_roles(model, plan, block, first=first) for first in (True, False))
    made = (part_of_sums(plan, PRODUCTS), *slot_roles(normed_gradient_slots(model, plan, block)))
    return [(False, Signature(reads, (*made, *begun), added))]


@cache
def _add_branch(model: ModelConfig, plan: Plan, block: Block) -> Candidates:
    branch, *statistics = branch_roles(model, plan, block)
    reads = (exchanged_role("stream", model, plan, block), branch, *view_roles(model, plan, block))
    return [(False, Signature(reads, (exchanged_role("sum", model, plan, next_block(model, block)), *statistics)))]


@cache
def _add_branch_backward(model: ModelConfig, plan: Plan, block: Block) -> Candidates:
    after = next_block(model, block)
    slots = branch_roles(model, plan, block)
    reads = (exchanged_role("dsum", model, plan, after), *slots, *view_roles(model, plan, block))
    return [
        (
            False,
            Signature(reads, (exchanged_role("dbranch", model, plan, after), *branch_sum_roles(model, plan, block))),
        )
    ]


@cache
def _backward_input(model: ModelConfig, plan: Plan, block: Block) -> Candidates:
    check_whole_backward(model, plan, block)
    saved = half_roles(model, plan, block, INPUT_HALF_SLOTS)
    others = (
        *document_roles(model, plan, block),
        *seen_key_roles(model, plan, block),
        *own_sum_roles(model, plan, block),
        *branch_part_roles(model, plan, is_parallel_mlp(model, plan, next_block(model, block))),
        *router_scale_roles(model, plan, block),
    )
    ends = (output_role("dy", model, plan, block), input_role(model, plan, block))
    if gradients := gradients_of_heads(model, plan, block):
        reads = (*ends, *saved, *view_roles(model, plan, block), *gradients)
        reads += branch_part_roles(model, plan, is_parallel_mlp(model, plan, next_block(model, block)))
        reads += _documents_behind_heads(model, plan, block)
        return [
            (False, Signature(reads, (input_gradient_role(model, plan, block), *pending_roles(model, plan, block)))),
        ]
    reads = (*ends, *saved, *view_roles(model, plan, block), *others)
    begun, added = (seen_sum_roles(model, plan, block, first=first) for first in (True, False))
    outputs = (input_gradient_role(model, plan, block), *pending_roles(model, plan, block), *begun)
    return [(False, Signature(reads, outputs, added))]


@cache
def _backward_weight(model: ModelConfig, plan: Plan, block: Block) -> Candidates:
    check_whole_backward(model, plan, block)
    saved = half_roles(model, plan, block, WEIGHT_HALF_SLOTS)
    source = () if model.has_pre_norm else (input_role(model, plan, block),)
    values = tuple(role for role in gradients_before_norms(model, plan, block) if role.name == "dv")
    pending = (*pending_roles(model, plan, block), *values, *branch_sum_roles(model, plan, block))
    reads = (output_role("dy", model, plan, block), *source, *saved, *pending)
    gradient, load = (gradient_role(model, plan, block),), load_roles(model, plan, block)
    return [(False, Signature(reads, gradient, load)), (True, Signature(reads, (), gradient + load))]


@cache
def _update(model: ModelConfig, plan: Plan, block: Block) -> Candidates:
    norm = (scalar_role("norm", Dtype.F64),) if plan.optimizer.clip == "global" else ()
    reads = (reduced_role(model, plan, block, "g"), scalar_role("flag", Dtype.U32), scale_role(), *norm)
    state = (
        state_role(model, plan, block, "p", StateKind.MASTER),
        state_role(model, plan, block, "m1", StateKind.MOMENT),
        state_role(model, plan, block, "m2", StateKind.MOMENT),
        scalar_role("t", Dtype.I64),
    )
    writes = (view_role(model, plan, block),) if keeps_view(model, plan, block) else ()
    return [(True, Signature(reads, writes, state))]


@cache
def _scale_update() -> Candidates:
    return [(True, Signature((scalar_role("overflow", Dtype.U32),), (), (scale_role(),)))]


def attends(op: Recompute) -> bool:
    """Tell whether a recovery runs attention again, rather than only its inputs (norm and projections).

    It does if it writes the block's output, or a slot that attention produces.
    """
    return any(tensor.kind is not StateKind.SAVED or tensor.slot in ("o", "lse", "probs") for tensor in op.writes)

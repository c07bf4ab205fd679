"""Constructors of operand roles that several ops share: the input of a block, its view, its saved slots, ..."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.config.types import Dtype, StateKind, TensorType, tensor_type
from ratrain.ratrain_ir.model.blocks import (
    Block,
    Held,
    flat_elements,
    has_experts,
    next_block,
    passes_gradient_on,
    trains,
)
from ratrain.ratrain_ir.model.expert_blocks import choice_bias_type, load_type
from ratrain.ratrain_ir.model.expert_ranks import biases_choice, combined_types, shares_experts
from ratrain.ratrain_ir.model.expert_slots import exchanged_slots
from ratrain.ratrain_ir.model.micro_batch import tokens_per_micro_batch
from ratrain.ratrain_ir.model.sharded_blocks import (
    frozen_elements,
    frozen_parts,
    is_sharded,
    packed_frozen_bytes,
    parts_view,
    shard_elements,
    view_shard_elements,
)
from ratrain.ratrain_ir.model.slice_plan import slice_plan
from ratrain.ratrain_ir.model.slots import (
    KEY_SLOTS,
    PRODUCTS,
    SPLIT_KINDS,
    SQUARES,
    WHOLE_KEYS,
    Slot,
    activation_type,
    begins_key_gradients,
    branch_slots,
    branch_sums,
    computed_type,
    half_slots,
    key_part_types,
    normed_gradient_slots,
    pending_slots,
    projected_slots,
    reads_documents,
    row_sum_slots,
    row_sums_type,
    saved_slots,
    seen_slices,
    stream_type,
    sum_slots,
    token_type,
    whole_key_slots,
)
from ratrain.ratrain_ir.model.tensor_blocks import adds_branch_apart
from ratrain.ratrain_ir.ops.operands import Role, Roles, SignatureError

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan

ACTIVATIONS = frozenset({StateKind.ACTIVATION, StateKind.BOUNDARY, StateKind.CHECKPOINT})


STORABLE = frozenset({*ACTIVATIONS, StateKind.SAVED})
"""State kinds that may be stored in another memory, or on a donor stage"""


def kind_role(name: str, kind: StateKind, type_: TensorType) -> Role:
    """Return a role that accepts tensors of one state kind."""
    return Role(name, frozenset({kind}), type_)


PARTIAL = frozenset({StateKind.PARTIAL})


REMOTE = frozenset({StateKind.REMOTE})


def input_role(model: ModelConfig, plan: Plan, block: Block) -> Role:
    """Return the role `x` of a block's input in the form in which the block computes with it: with all its rows."""
    return Role("x", ACTIVATIONS, computed_type(model, plan, block))


def output_role(name: str, model: ModelConfig, plan: Plan, block: Block, *, optional: bool = False) -> Role:
    """Return the role `name` of a block's output, or of the gradient of its output.

    With tensor-parallel ranks the output (`y`) is a partial sum.
    """
    kinds = PARTIAL if plan.tp > 1 and name == "y" else ACTIVATIONS
    return Role(name, kinds, computed_type(model, plan, next_block(model, block)), optional)


def input_gradient_role(model: ModelConfig, plan: Plan, block: Block) -> Role:
    """Return the role of the gradient of a block's input: a partial sum if there are tensor-parallel ranks."""
    return Role("dx", PARTIAL if plan.tp > 1 else ACTIVATIONS, computed_type(model, plan, block))


def branch_part_roles(model: ModelConfig, plan: Plan, has_branch: bool) -> Roles:
    """Return the role of the partial sum that the parallel branch (attention or mlp) made; empty without one."""
    return (Role("branch_part", PARTIAL, stream_type(model, plan)),) if has_branch else ()


def exchanged_role(name: str, model: ModelConfig, plan: Plan, block: Block) -> Role:
    """Return the role of a block's input, or its gradient, in the form in which ranks exchange it between blocks."""
    return Role(name, ACTIVATIONS, activation_type(model, plan, block))


def scalar_role(name: str, dtype: Dtype, elements: int = 1) -> Role:
    """Return a role for a scalar, or for a tensor of a few numbers."""
    return kind_role(name, StateKind.SCALAR, tensor_type(dtype, (elements,)))


def scale_role() -> Role:
    """Return the role of the loss scale, f32[2]: the scale, and the count of steps since it last grew."""
    return scalar_role("scale", Dtype.F32, 2)


def router_scale_roles(model: ModelConfig, plan: Plan, block: Block) -> Roles:
    """Return the role of the loss scale for a backward that adds the gradients of a router's own losses; else none."""
    return (scale_role(),) if plan.router and has_experts(model, block) else ()


def choice_bias_roles(model: ModelConfig, plan: Plan, block: Block, name: str = "bias") -> Roles:
    """Return the role of the bias with which a block's router chooses; none without one."""
    return (kind_role(name, StateKind.SCALAR, choice_bias_type(model)),) if biases_choice(model, plan, block) else ()


def load_roles(model: ModelConfig, plan: Plan, block: Block, name: str = "load") -> Roles:
    """Return the role of the counts of tokens sent to each expert, which the bias follows; none without one."""
    return (kind_role(name, StateKind.SCALAR, load_type(model)),) if biases_choice(model, plan, block) else ()


def saved_roles(model: ModelConfig, plan: Plan, block: Block, *, optional: bool, needed: tuple[str, ...] = ()) -> Roles:
    """Return the roles of all saved slots of a block. If `optional`, all but those in `needed` may be missing."""
    return tuple(
        Role(s.name, SAVED, s.type, optional and s.name not in needed, s.name) for s in saved_slots(model, plan, block)
    )


def seen_key_roles(model: ModelConfig, plan: Plan, block: Block) -> Roles:
    """Return the roles of the keys and values of earlier slices that this slice's queries attend to.

    `plan` is the plan of a slice; the roles are ordered by slice. With context ranks, they include the roles of
    all ranks. Empty unless the block is an attention.
    """
    if block.kind != "attention":
        return ()
    slots = saved_slots if plan.cp == 1 else whole_key_slots
    return tuple(
        Role(of_slice(slot.name, index), SAVED, slot.type, slot=slot.name)
        for index in seen_slices(model, plan)
        for slot in slots(model, slice_plan(plan.whole, index), block)
        if slot.name in (*KEY_SLOTS, *WHOLE_KEYS)
    )


def seen_sum_roles(model: ModelConfig, plan: Plan, block: Block, *, first: bool) -> Roles:
    """Return the roles of key and value gradient sums of earlier slices that this slice of an attention adds to.

    Slices go backward in descending order, so the last slice that attends to a key begins its sum. With `first`, return
    only the sums that this slice begins, else only those that a later slice began.
    """
    if block.kind != "attention":
        return ()
    earlier = [(each, slice_plan(plan.whole, each)) for each in seen_slices(model, plan)]
    return tuple(
        Role(of_slice(slot.name, each), SAVED, slot.type, slot=slot.name)
        for each, other in earlier
        if begins_key_gradients(model, plan, other) is first
        for slot in sum_slots(model, other, block)
    )


def own_sum_roles(model: ModelConfig, plan: Plan, block: Block) -> Roles:
    """Return the roles of the gradients of a slice's own keys and values as summed by later slices."""
    return tuple(Role(slot.name, SAVED, slot.type, slot=slot.name) for slot in sum_slots(model, plan, block))


def of_slice(name: str, index: int) -> str:
    """Name the role of an operand that belongs to another slice of the same micro-batch: `k_0`."""
    return f"{name}_{index}"


def is_of_other_slice(role: str) -> bool:
    """Tell whether a role, by its name, belongs to another slice of the micro-batch."""
    return role.rpartition("_")[2].isdigit()


SAVED = frozenset({StateKind.SAVED})


def view_role(model: ModelConfig, plan: Plan, block: Block, name: str = "w") -> Role:
    """Return the role of a block's view: its parameters, flat, in `view_dtype`, with which blocks compute."""
    return kind_role(name, StateKind.VIEW, tensor_type(Dtype(plan.view_dtype), (flat_elements(model, plan, block),)))


def view_roles(model: ModelConfig, plan: Plan, block: Block) -> Roles:
    """Return the roles of the parameters that a block computes with: `w` those that train, `f` and `fq` frozen ones."""
    trained = (view_role(model, plan, block),) if trains(model, plan, block) else ()
    return trained + frozen_roles(model, plan, block)


def frozen_roles(model: ModelConfig, plan: Plan, block: Block) -> Roles:
    """Return the roles of a block's frozen parameters: `f` plain ones, `fq` packed ones; none if all of it trains."""
    frozen = {
        Held.PLAIN: (Dtype(plan.view_dtype), frozen_elements(model, plan, block)),
        Held.PACKED: (Dtype.U8, packed_frozen_bytes(model, plan, block)),
    }
    return tuple(
        kind_role(held.value, StateKind.FROZEN, tensor_type(dtype, (size,)))
        for held, (dtype, size) in frozen.items()
        if size
    )


def frozen_part_roles(model: ModelConfig, plan: Plan, block: Block) -> Roles:
    """Return the roles of a replica's parts of a block's frozen parameters: `fs` of plain ones, `fqs` of packed ones.

    Where a group of replicas shares views, they are parts of views too; `AllGather.members` tells groups by the kind.
    """
    kind = StateKind.VIEW_SHARD if parts_view(model, plan, block) else StateKind.FROZEN
    count = frozen_parts(model, plan, block)
    return tuple(
        kind_role(f"{role.name}s.{block}", kind, tensor_type(role.type.dtype, (role.type.elements // count,)))
        for role in frozen_roles(model, plan, block)
    )


def gradient_roles(model: ModelConfig, plan: Plan, block: Block) -> Roles:
    """Return the role of a block's whole gradient; none if nothing of the block trains."""
    return (gradient_role(model, plan, block),) if trains(model, plan, block) else ()


def input_gradient_roles(model: ModelConfig, plan: Plan, block: Block) -> Roles:
    """Return the role of the gradient of a block's input; none for the embedding and where nothing below trains."""
    return (input_gradient_role(model, plan, block),) if passes_gradient_on(model, plan, block) else ()


def view_shard_role(model: ModelConfig, plan: Plan, block: Block) -> Role:
    """Return the role of a replica's part of a view that a group of replicas shares."""
    elements = view_shard_elements(model, plan, block)
    return kind_role(f"v.{block}", StateKind.VIEW_SHARD, tensor_type(Dtype(plan.view_dtype), (elements,)))


def gradient_role(model: ModelConfig, plan: Plan, block: Block, name: str = "g") -> Role:
    """Return the role of a block's whole gradient."""
    return kind_role(name, StateKind.GRAD, tensor_type(Dtype(plan.grad_dtype), (flat_elements(model, plan, block),)))


def shard_role(model: ModelConfig, plan: Plan, block: Block, name: str) -> Role:
    """Return the role of a replica's shard of a block's reduced gradient."""
    elements = shard_elements(model, plan, block)
    return kind_role(name, StateKind.GRAD_SHARD, tensor_type(Dtype(plan.grad_shard_dtype), (elements,)))


def reduced_role(model: ModelConfig, plan: Plan, block: Block, name: str) -> Role:
    """Return the role of the reduced gradient that an update reads: a shard, or all of it if nothing is sharded."""
    role = shard_role if is_sharded(model, plan, block) else gradient_role
    return role(model, plan, block, name)


def token_role(name: str, plan: Plan) -> Role:
    """Return the role of one part of the input of a micro-batch: tokens, labels or starts of documents."""
    return kind_role(name, StateKind.INPUT, token_type(plan))


def document_roles(model: ModelConfig, plan: Plan, block: Block) -> Roles:
    """Return the role of the starts of documents; empty if the block does not read them."""
    return (token_role("documents", plan),) if reads_documents(model, plan, block) else ()


def state_role(model: ModelConfig, plan: Plan, block: Block, name: str, kind: StateKind) -> Role:
    """Return the role of a replica's shard of a block's optimizer state (master or moment), in f32."""
    return kind_role(name, kind, tensor_type(Dtype.F32, (shard_elements(model, plan, block),)))


def made_before_forward(model: ModelConfig, plan: Plan, block: Block) -> Roles:
    """Return the roles of saved slots that `project` and `reduce_sums` make before an attention's forward.

    Empty unless the norms of queries and keys need sums over tensor-parallel ranks.
    """
    return slot_roles((*projected_slots(model, plan, block), *row_sum_slots(model, plan, block, SQUARES)))


def gradients_before_norms(model: ModelConfig, plan: Plan, block: Block) -> Roles:
    """Return the roles of gradients that `backward_heads` and `reduce_sums` make before an attention's backward.

    They are the gradients of normed queries and keys, of values, and the sums that the norms' gradients need. Empty
    unless the norms of queries and keys need sums over tensor-parallel ranks.
    """
    return slot_roles((*normed_gradient_slots(model, plan, block), *row_sum_slots(model, plan, block, PRODUCTS)))


def whole_key_roles(model: ModelConfig, plan: Plan, block: Block) -> Roles:
    """Return the roles of keys and values of all context ranks; empty without such ranks."""
    return slot_roles(whole_key_slots(model, plan, block))


def key_part_roles(model: ModelConfig, plan: Plan, block: Block) -> Roles:
    """Return the roles of a context rank's parts of the gradients of all keys and values; empty without such ranks."""
    return tuple(Role(name, PARTIAL, type_) for name, type_ in key_part_types(model, plan, block).items())


def seen_part_roles(model: ModelConfig, plan: Plan, block: Block, *, first: bool) -> Roles:
    """Return the roles of a context rank's parts of the gradients of keys to which a slice adds: its own, then earlier.

    With `first`, return only those that this slice begins, else only those that a later slice began.
    """
    own = key_part_roles(model, plan, block) if begins_key_gradients(model, plan, plan) is first else ()
    earlier = [(each, slice_plan(plan.whole, each)) for each in seen_slices(model, plan)]
    return own + tuple(
        role._replace(name=of_slice(role.name, each))
        for each, other in earlier
        if begins_key_gradients(model, plan, other) is first
        for role in key_part_roles(model, other, block)
    )


def check_context_ranks(plan: Plan, block: Block) -> None:
    """Raise `SignatureError` unless the plan has context ranks that gather keys, and the block attends."""
    if not plan.exchanges_keys or block.kind != "attention":
        raise SignatureError(f"{block} has no keys that context ranks share (cp = {plan.cp}): nothing is gathered")


def check_head_group(plan: Plan, block: Block, group: int | None) -> None:
    """Raise `SignatureError` unless context ranks gather keys of this group of heads; None: of all at once."""
    check_context_ranks(plan, block)
    groups = plan.context_groups
    if group is None and groups > 1:
        raise SignatureError(f"it names no group of heads, of which there are {groups} (context_groups)")
    if group is not None and not (groups > 1 and group < groups):
        raise SignatureError(f"there is no group g{group} of heads (context_groups = {groups})")


def check_exchanged_heads(plan: Plan, block: Block) -> None:
    """Raise `SignatureError` unless the plan has context ranks that exchange heads, and the block attends."""
    if not plan.exchanges_heads or block.kind != "attention":
        text = f'{block} has no heads that context ranks share (cp = {plan.cp}, context_exchange = "heads" needed)'
        raise SignatureError(text)


def check_whole_backward(model: ModelConfig, plan: Plan, block: Block) -> None:
    """Raise `SignatureError` if replicas share out the experts of a block, whose backward then is not split."""
    if shares_experts(model, plan, block):
        raise SignatureError(f"replicas share out the experts of {block}: halves of its backward are not built")


def combined_roles(model: ModelConfig, plan: Plan, *, gradient: bool) -> Roles:
    """Return the roles of rows that `combine` sends back to their tokens; with `gradient`, of gradients."""
    return slot_roles(exchanged_slots(combined_types(model, plan, gradient=gradient)))


def part_of_sums(plan: Plan, name: str) -> Role:
    """Return the role of one tensor-parallel rank's partial sums of each row of queries and keys."""
    return Role(name, PARTIAL, row_sums_type(plan))


def check_row_sums(model: ModelConfig, plan: Plan, block: Block) -> None:
    """Raise `SignatureError` unless the block's norms of queries and keys need sums over tensor-parallel ranks."""
    if not projected_slots(model, plan, block):
        raise SignatureError(
            f"{block} norms no queries and keys over all heads of tensor-parallel ranks: nothing is done apart"
        )


def half_roles(model: ModelConfig, plan: Plan, block: Block, read: Mapping[str, tuple[str, ...]]) -> Roles:
    """Return the roles of the saved slots that a half of a split backward reads; `read` is the table of that half.

    Raises `SignatureError` if the backward of this kind of block cannot be split.
    """
    if block.kind not in SPLIT_KINDS:
        raise SignatureError(f"the backward of {block} is not split: only {' and '.join(SPLIT_KINDS)} blocks' are")
    wanted = half_slots(model, plan, block, read)
    return tuple(role for role in saved_roles(model, plan, block, optional=False) if role.name in wanted)


def slot_roles(slots: Iterable[Slot]) -> Roles:
    """Return a role for each slot, in order."""
    return tuple(Role(slot.name, SAVED, slot.type, slot=slot.name) for slot in slots)


def pending_roles(model: ModelConfig, plan: Plan, block: Block) -> Roles:
    """Return the roles of the pending slots: the input half of a split backward leaves them for the weight half."""
    return slot_roles(pending_slots(model, plan, block))


def branch_sum_roles(model: ModelConfig, plan: Plan, block: Block) -> Roles:
    """Return the roles of the norm gradient sums that `add_branch_backward` leaves for the block's backward."""
    return slot_roles(branch_sums(model, plan, block))


def branch_roles(model: ModelConfig, plan: Plan, block: Block) -> Roles:
    """Return the roles of a block's branch (its output before the norm) and the statistics of its norm.

    Raises `SignatureError` unless the branch is added by an op of its own (`add_branch`).
    """
    if not adds_branch_apart(model, plan, block):
        raise SignatureError(
            f"what {block} gives is not normed behind a sum of tensor-parallel ranks: nothing is added apart"
        )
    return slot_roles(branch_slots(model, plan))


def flag_roles(blocks: tuple[Block, ...]) -> Roles:
    """Return the roles of the overflow flags of blocks."""
    return tuple(scalar_role(f"flag.{block}", Dtype.U32) for block in blocks)


def parts_of_loss(plan: Plan) -> Roles:
    """Return the roles of a rank's part of the loss, over its part of the vocabulary.

    They are the log of the sum of exponentials of each row, f32[rows], and the loss, f64[1].
    """
    rows = tensor_type(Dtype.F32, (tokens_per_micro_batch(plan),))
    return Role("lse", PARTIAL, rows), Role("loss", PARTIAL, tensor_type(Dtype.F64, (1,)))

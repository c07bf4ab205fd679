"""Ops of context ranks: what attention needs of tokens of other ranks, in two forms (`Plan.context_exchange`).

Ranks gather the keys and values of all tokens, and sum the parts of their gradients (`keys`); or each takes all tokens
of its share of the heads, attends with these, and gives back its output (`heads`):

    keys:    project   gather_keys                     forward     backward_heads   reduce_keys               backward
    heads:   project   gather_heads   attend   return_heads   forward
             backward_heads   gather_heads   attend_backward   return_heads   backward

Keys may be gathered in groups of heads (`Plan.context_groups`), of which one at a time is held:

    keys:    project   gather_keys g0   attend g0   gather_keys g1   attend g1   forward
             backward_heads   gather_keys g0   attend_backward g0   reduce_keys g0   gather_keys g1  ...   backward
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, ClassVar, TypeGuard, final

from attrs import define

from ratrain.ratrain_ir.model.slice_plan import slice_plan
from ratrain.ratrain_ir.model.slots import (
    ATTENDED,
    attended_slots,
    forward_slots,
    head_gradient_slots,
    last_viewer,
    made_by_project,
    output_gradient_slots,
    shared_gradient_slots,
    shared_head_slots,
)
from ratrain.ratrain_ir.ops.base import BlockPayloadOp, BlockPieceOp, Engine, Group, Op, Payload, Phase, WorkGroup
from ratrain.ratrain_ir.ops.op_fields import enum_field, head_group_field
from ratrain.ratrain_ir.ops.operands import Candidates, Roles, Signature
from ratrain.ratrain_ir.ops.roles import (
    check_exchanged_heads,
    check_head_group,
    document_roles,
    key_part_roles,
    slot_roles,
    whole_key_roles,
)

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.ratrain_ir.model.blocks import Block


@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class KeysOp(BlockPieceOp):
    """Base of exchanges of keys and values, or of their gradients, between context ranks."""

    default_engine = Engine.TENSOR
    default_members = Group.CONTEXT
    alike_on_all_stages = True
    block_kinds: ClassVar[tuple[str, ...]] = ("attention",)
    head_group: int | None = head_group_field()

    def missing(self, model: ModelConfig, plan: Plan) -> str | None:
        """Explain that the plan has no context ranks that exchange keys; None if it has."""
        del model
        return None if plan.exchanges_keys else _other_exchange(plan)


@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class HeadsOp(BlockPayloadOp):
    """Base of exchanges between context ranks of tokens for heads, and back."""

    default_engine = Engine.TENSOR
    default_members = Group.CONTEXT
    alike_on_all_stages = True
    block_kinds = ("attention",)

    def missing(self, model: ModelConfig, plan: Plan) -> str | None:
        """Explain that the plan has no context ranks that exchange heads; None if it has."""
        del model
        return None if plan.exchanges_heads else _other_exchange(plan)


def _other_exchange(plan: Plan) -> str:
    """Say why context ranks do not exchange what an op exchanges."""
    if plan.cp == 1:
        return "the plan has no context ranks (cp = 1)"
    return f'context ranks exchange {plan.context_exchange} (context_exchange = "{plan.context_exchange}")'


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class GatherKeys(KeysOp):
    """Gathers the keys and values of an attention from all context ranks, in rank order.

    Under a window each rank gathers the runs that its own see, where these are fewer than all (`context_rows.py`).
    `phase` is the pass that reads them. A backward may also read what was gathered for the forward, if it is kept.
    Those of a slice are read by later slices too: by their forwards after its own, by their backwards before its own.
    """

    keyword = "gather_keys"
    phase: Phase = enum_field(Phase)

    def served_slice(self, model: ModelConfig, plan: Plan) -> int:
        """Return the slice that reads them first: in the backward the last one that sees them."""
        if self.slice is None or self.phase is Phase.FORWARD:
            return self.slice or 0
        last = last_viewer(model, slice_plan(plan, self.slice))
        return self.slice if last is None else last

    @property
    def work_group(self) -> WorkGroup:
        """The pass that reads them."""
        return WorkGroup.BACKWARD if self.phase is Phase.BACKWARD else WorkGroup.FORWARD

    def candidates(self, model: ModelConfig, plan: Plan) -> Candidates:
        """List the signatures that this op may have."""
        return _gather_keys(model, plan, self.block, self.head_group)


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class ReduceKeys(KeysOp):
    """Sums context ranks' parts of the gradients of keys and values; each rank gets those of its own tokens.

    It sums in f32 and rounds once. Ranks add in descending order, as slices do, whose later ones come first.
    """

    keyword = "reduce_keys"
    default_work_group = WorkGroup.BACKWARD

    def candidates(self, model: ModelConfig, plan: Plan) -> Candidates:
        """List the signatures that this op may have."""
        return _reduce_keys(model, plan, self.block, self.head_group)


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class GatherHeads(HeadsOp):
    """Exchanges a context rank's tokens of all heads for all tokens of its share of the heads.

    They are queries, keys and values, and starts of documents where attention reads them; in the backward the gradient
    of the heads' output. All tokens lie in the order of positions, one sequence after the other.
    """

    keyword = "gather_heads"

    def candidates(self, model: ModelConfig, plan: Plan) -> Candidates:
        """List the signatures that this op may have."""
        return _gather_heads(model, plan, self.block, self.payload)


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class ReturnHeads(HeadsOp):
    """Exchanges all tokens of a context rank's share of the heads for its tokens of all heads.

    They are the heads' output; in the backward the gradients of queries, keys and values.
    """

    keyword = "return_heads"

    def candidates(self, model: ModelConfig, plan: Plan) -> Candidates:
        """List the signatures that this op may have."""
        return _return_heads(model, plan, self.block, self.payload)


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class Attend(BlockPieceOp):
    """Computes the output of a context rank's share of the heads, from queries, keys and values of all tokens.

    `gather_heads` brings what it reads, `return_heads` shares out what it makes. Where keys are gathered in groups of
    heads, it computes the output of one group of all heads for the rank's own tokens; the first group writes it,
    the others add theirs.
    """

    keyword = "attend"
    default_engine = Engine.COMPUTE
    default_work_group = WorkGroup.FORWARD
    alike_on_all_stages = True
    head_group: int | None = head_group_field()

    def candidates(self, model: ModelConfig, plan: Plan) -> Candidates:
        """List the signatures that this op may have."""
        return _attend(model, plan, self.block, self.head_group)


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class AttendBackward(BlockPieceOp):
    """Computes the gradients of queries, keys and values of all tokens, for a context rank's share of the heads.

    Where keys are gathered in groups of heads, it computes those of one group: of the rank's queries, of which the
    first group writes the gradients and the others add theirs, and parts of those of all keys and values.
    """

    keyword = "attend_backward"
    default_engine = Engine.COMPUTE
    default_work_group = WorkGroup.BACKWARD
    alike_on_all_stages = True
    head_group: int | None = head_group_field()

    def candidates(self, model: ModelConfig, plan: Plan) -> Candidates:
        """List the signatures that this op may have."""
        return _attend_backward(model, plan, self.block, self.head_group)


KEY_OPS: tuple[type[Op], ...] = (GatherKeys, ReduceKeys)
"""Kinds of collectives of context ranks that exchange keys"""
HEAD_OPS: tuple[type[Op], ...] = (GatherHeads, ReturnHeads)
"""Kinds of collectives of context ranks that exchange heads"""
CONTEXT_OPS: tuple[type[Op], ...] = (*KEY_OPS, *HEAD_OPS)
"""Kinds of collectives of context ranks"""


def gathers_again(op: Op) -> TypeGuard[GatherKeys]:
    """Tell whether an op gathers the keys of context ranks again, for the backward."""
    return type(op) is GatherKeys and op.phase is Phase.BACKWARD


@cache
def _gather_keys(model: ModelConfig, plan: Plan, block: Block, group: int | None) -> Candidates:
    check_head_group(plan, block, group)
    own = slot_roles(made_by_project(model, plan, block)[1:3])
    return [(False, Signature(own, whole_key_roles(model, plan, block)))]


@cache
def _reduce_keys(model: ModelConfig, plan: Plan, block: Block, group: int | None) -> Candidates:
    check_head_group(plan, block, group)
    own = slot_roles(head_gradient_slots(model, plan, block)[1:])
    return [(False, _of_group(group, key_part_roles(model, plan, block), own))]


def _of_group(group: int | None, reads: Roles, joint: Roles, own: Roles = ()) -> Signature:
    """Return the signature of an op of a group of heads, the first of which writes what all make jointly."""
    return Signature(reads, own, joint) if group else Signature(reads, (*joint, *own))


@cache
def _gather_heads(model: ModelConfig, plan: Plan, block: Block, payload: Payload) -> Candidates:
    check_exchanged_heads(plan, block)
    if payload is Payload.GRADIENT:
        own, shared = (slot_roles((slot,)) for slot in output_gradient_slots(model, plan, block))
        return [(False, Signature(own, shared))]
    own = (*slot_roles(made_by_project(model, plan, block)[:3]), *document_roles(model, plan, block))
    return [(False, Signature(own, slot_roles(shared_head_slots(model, plan, block))))]


@cache
def _return_heads(model: ModelConfig, plan: Plan, block: Block, payload: Payload) -> Candidates:
    check_exchanged_heads(plan, block)
    if payload is Payload.GRADIENT:
        shared = slot_roles(shared_gradient_slots(model, plan, block))
        return [(False, Signature(shared, slot_roles(head_gradient_slots(model, plan, block))))]
    own = tuple(slot for slot in forward_slots(model, plan, block) if slot.name == "o")
    return [(False, Signature(slot_roles(attended_slots(model, plan, block))[:1], slot_roles(own)))]


@cache
def _attend(model: ModelConfig, plan: Plan, block: Block, group: int | None) -> Candidates:
    if group is not None:
        check_head_group(plan, block, group)
        made = slot_roles(slot for slot in forward_slots(model, plan, block) if slot.name in ATTENDED)
        return [(False, _of_group(group, _read_by_group(model, plan, block), made))]
    check_exchanged_heads(plan, block)
    given, made = (slot_roles(of(model, plan, block)) for of in (shared_head_slots, attended_slots))
    return [(False, Signature(given, made))]


@cache
def _attend_backward(model: ModelConfig, plan: Plan, block: Block, group: int | None) -> Candidates:
    if group is not None:
        check_head_group(plan, block, group)
        made = slot_roles(slot for slot in forward_slots(model, plan, block) if slot.name in ATTENDED)
        reads = (*made, *slot_roles(output_gradient_slots(model, plan, block)))
        reads += _read_by_group(model, plan, block)
        queries = slot_roles(head_gradient_slots(model, plan, block)[:1])
        return [(False, _of_group(group, reads, queries, key_part_roles(model, plan, block)))]
    check_exchanged_heads(plan, block)
    reads = (*slot_roles(shared_head_slots(model, plan, block)), *slot_roles(attended_slots(model, plan, block)))
    reads += slot_roles(output_gradient_slots(model, plan, block)[1:])
    return [(False, Signature(reads, slot_roles(shared_gradient_slots(model, plan, block))))]


def _read_by_group(model: ModelConfig, plan: Plan, block: Block) -> Roles:
    """Return the roles of queries, starts of documents, and gathered keys and values, with which a group attends."""
    queries = slot_roles(made_by_project(model, plan, block)[:1])
    return (*queries, *document_roles(model, plan, block), *whole_key_roles(model, plan, block))

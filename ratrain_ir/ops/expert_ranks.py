"""Ops of replicas that share out the experts of every layer (`parallel.ep`): rows of tokens travel to experts and back.

    forward    route   dispatch activation   forward_experts   combine activation   forward
    backward           dispatch gradient     backward_experts  combine gradient     backward

`dispatch` also copies experts to ranks with room for more rows; the gradients of these copies go home with `combine`.
With `dispatch = "capacity"` nothing is copied: rows above an expert's capacity are dropped, and what `combine` brings
back for them is zero.

Where `recompute` keeps rows from the forward, the dispatch of the backward brings gradients alone; where it keeps gate
and up, `backward_experts` reads what `forward_experts` wrote.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, final

from attrs import define

from ratrain.ratrain_ir.model.expert_ranks import (
    combined_types,
    copies_experts,
    dispatched_types,
    made_gradient_types,
    made_types,
    product_types,
    shares_experts,
)
from ratrain.ratrain_ir.model.expert_slots import exchanged_slots, routed_slots
from ratrain.ratrain_ir.ops.base import BlockPayloadOp, BlockPieceOp, Engine, Group, Op, Payload, WorkGroup
from ratrain.ratrain_ir.ops.operands import Candidates, Roles, Signature, SignatureError
from ratrain.ratrain_ir.ops.roles import (
    choice_bias_roles,
    gradient_role,
    input_role,
    output_role,
    slot_roles,
    view_roles,
)

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.ratrain_ir.model.blocks import Block
    from ratrain.ratrain_ir.model.expert_ranks import Types


@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class ExpertsOp(BlockPayloadOp):
    """Base of exchanges of rows between expert ranks: of activations, or of gradients."""

    default_engine = Engine.TENSOR
    default_members = Group.EXPERTS
    alike_on_all_stages = True
    block_kinds = ("mlp",)

    def missing(self, model: ModelConfig, plan: Plan) -> str | None:
        """Explain that the plan has no expert ranks; None if it has."""
        del model
        return None if plan.ep > 1 else "the plan has no replicas that share out experts (ep = 1)"


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class Route(BlockPieceOp):
    """Norms the input of an mlp, and chooses the experts of each token with their weights."""

    keyword = "route"
    default_engine = Engine.COMPUTE
    default_work_group = WorkGroup.FORWARD
    alike_on_all_stages = True

    def candidates(self, model: ModelConfig, plan: Plan) -> Candidates:
        """List the signatures that this op may have."""
        return _route(model, plan, self.block)


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class Dispatch(ExpertsOp):
    """Sends each row to the rank that computes it, so that every rank has as many; copies experts where rows go.

    The rows are the normed input, one for each choice of each token, with its weight. In the backward the gradient of
    the mlp's output goes with them, or alone if the rows were kept. With a capacity the first rows of each expert go to
    the rank that has it, and nothing is copied.
    """

    keyword = "dispatch"

    def candidates(self, model: ModelConfig, plan: Plan) -> Candidates:
        """List the signatures that this op may have."""
        return _dispatch(model, plan, self.block, self.payload)


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class ForwardExperts(BlockPieceOp):
    """Computes the rows that a rank has received, with its own experts and with copies of another rank's."""

    keyword = "forward_experts"
    default_engine = Engine.COMPUTE
    default_work_group = WorkGroup.FORWARD
    alike_on_all_stages = True

    def candidates(self, model: ModelConfig, plan: Plan) -> Candidates:
        """List the signatures that this op may have."""
        return _forward_experts(model, plan, self.block)


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class BackwardExperts(BlockPieceOp):
    """Computes the gradients of rows, of their weights, of a rank's own experts, and of its copies of others.

    It is the first to add to the block's gradient for its piece; `combine` and the block's backward follow.
    """

    keyword = "backward_experts"
    default_engine = Engine.COMPUTE
    default_work_group = WorkGroup.BACKWARD
    alike_on_all_stages = True

    def candidates(self, model: ModelConfig, plan: Plan) -> Candidates:
        """List the signatures: the block's gradient is written, or added to."""
        return _backward_experts(model, plan, self.block)


@final
@define(eq=False, weakref_slot=False, repr=False, kw_only=True)
class Combine(ExpertsOp):
    """Sends each computed row back to the rank of its token.

    In the backward the gradients of the weights go with them, and those of copied experts are added at home, in the
    order of ranks.
    """

    keyword = "combine"

    def candidates(self, model: ModelConfig, plan: Plan) -> Candidates:
        """List the signatures that this op may have."""
        return _combine(model, plan, self.block, self.payload)


EXPERT_OPS: tuple[type[Op], ...] = (Dispatch, Combine)
"""Kinds of collectives of expert ranks"""


def check_expert_ranks(model: ModelConfig, plan: Plan, block: Block) -> None:
    """Raise `SignatureError` unless replicas share out the experts of a block."""
    if not shares_experts(model, plan, block):
        raise SignatureError(f"{block} has no experts that replicas share out (ep = {plan.ep}): no row is exchanged")


def _roles(types: Types, *names: str) -> Roles:
    """Return the roles of tensors that ops of expert ranks leave for each other: those there are of `names`, or all."""
    return slot_roles(exchanged_slots({name: types[name] for name in names or types if name in types}))


def _choice_roles(model: ModelConfig, plan: Plan, block: Block) -> Roles:
    """Return the roles of the normed input, the chosen experts and their weights."""
    wanted = ("xn", "chosen", "weights")
    return slot_roles(slot for slot in routed_slots(model, plan, block) if slot.name in wanted)


def _chosen_alone(choice: Roles) -> Roles:
    return tuple(role for role in choice if role.name == "chosen")


@cache
def _route(model: ModelConfig, plan: Plan, block: Block) -> Candidates:
    check_expert_ranks(model, plan, block)
    views, bias = view_roles(model, plan, block), choice_bias_roles(model, plan, block)
    reads = (input_role(model, plan, block), *views, *bias)
    return [(False, Signature(reads, slot_roles(routed_slots(model, plan, block))))]


@cache
def _dispatch(model: ModelConfig, plan: Plan, block: Block, payload: Payload) -> Candidates:
    check_expert_ranks(model, plan, block)
    gradient = payload is Payload.GRADIENT
    dy = (output_role("dy", model, plan, block),) if gradient else ()
    views = view_roles(model, plan, block) if copies_experts(plan) else ()
    types = dispatched_types(model, plan, gradient=gradient)
    choice = _choice_roles(model, plan, block)
    found = [(False, Signature((*dy, *choice, *views), _roles(types)))]
    if gradient:  # rows of the forward were kept: only gradients travel, by the forward's counts
        reads = (*dy, *_chosen_alone(choice), *views, *_roles(types, "counts"))
        found.append((False, Signature(reads, _roles(dispatched_types(model, plan, gradient=True, kept=True)))))
    return found


@cache
def _forward_experts(model: ModelConfig, plan: Plan, block: Block) -> Candidates:
    check_expert_ranks(model, plan, block)
    given = _roles(dispatched_types(model, plan, gradient=False), "rows", "row_weights", "bounds", "pool")
    reads, made = (*given, *view_roles(model, plan, block)), _roles(made_types(model, plan))
    products = _roles(product_types(model, plan))
    return [(False, Signature(reads, made)), (False, Signature(reads, (*made, *products)))]


@cache
def _backward_experts(model: ModelConfig, plan: Plan, block: Block) -> Candidates:
    check_expert_ranks(model, plan, block)
    types = dispatched_types(model, plan, gradient=True)
    given = _roles(types, "rows", "row_weights", "bounds", "pool", "drows")
    reads, made = (*given, *view_roles(model, plan, block)), _roles(made_gradient_types(model, plan))
    kept = (*given, *_roles(product_types(model, plan)), *view_roles(model, plan, block))
    gradient = (gradient_role(model, plan, block),)
    of_first, of_later = (*made, *gradient), gradient
    return [
        (False, Signature(reads, of_first)),
        (False, Signature(kept, of_first)),
        (True, Signature(kept, made, of_later)),
        (True, Signature(reads, made, of_later)),
    ]


@cache
def _combine(model: ModelConfig, plan: Plan, block: Block, payload: Payload) -> Candidates:
    check_expert_ranks(model, plan, block)
    gradient = payload is Payload.GRADIENT
    types = dispatched_types(model, plan, gradient=gradient)
    chosen = _chosen_alone(_choice_roles(model, plan, block))
    made = _roles(made_gradient_types(model, plan) if gradient else made_types(model, plan))
    combined = _roles(combined_types(model, plan, gradient=gradient))
    home = (gradient_role(model, plan, block),) if gradient and copies_experts(plan) else ()
    return [(False, Signature((*made, *_roles(types, "counts"), *chosen), combined, home))]

"""Tensors of an mlp whose experts neighbouring replicas share out: rows that travel, copied experts, their gradients.

Each of n expert ranks holds E / n experts of every layer. Its router sends T * k rows; of all n * T * k rows each rank
computes exactly T * k, whatever the routers say: ranks with room take rows of at most one other rank's experts, with
copies of these experts (`targets/program/expert_balance.py`). So every tensor here has a size before the run:

    xn, chosen, weights -> dispatch -> rows, row_weights, bounds, counts, pool -> forward_experts -> made -> combine
    -> returned [T k, h], a row for each choice of each token, summed by the block's forward

The pool has room for copies of E / n experts. It lives from `dispatch` to the products, so layers share its bytes.
Nothing of the rows is saved: the backward exchanges them again, beside the gradients of what they gave.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from ratrain.ratrain_ir.config.tensor_ranks import rank_model
from ratrain.ratrain_ir.config.types import Dtype, TensorType, tensor_type
from ratrain.ratrain_ir.model.blocks import Block, Parameter, block, has_experts, trained_parameters
from ratrain.ratrain_ir.model.expert_blocks import expert_rows, experts_of
from ratrain.ratrain_ir.model.micro_batch import tokens_per_micro_batch

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan

_STACK = "_experts"

Types = dict[str, TensorType]
"""Types by name of tensor, in the order of operands."""


def shares_experts(model: ModelConfig, plan: Plan, block: Block) -> bool:
    """Tell whether replicas share out the experts of a block, and exchange rows for them."""
    return plan.ep > 1 and has_experts(model, block)


def first_with_experts(model: ModelConfig) -> Block:
    """Return the first mlp that has experts; those of all such mlps are as many and as large."""
    return block("mlp", max(0, model.mlp_kinds.find("e")))


class Stack(NamedTuple):
    """Place of the matrices of a rank's experts of one kind, in a block's flat tensor and in the pool of copies."""

    in_block: int
    in_pool: int
    length: int
    """elements of one expert's matrix"""


def expert_stacks(model: ModelConfig, owner: Block) -> list[Parameter]:
    """Return the parameters of an mlp that have a matrix of each expert; `model` is a rank's."""
    return [each for each in trained_parameters(model, owner) if is_stack(each.weight)]


@cache
def stacks_of(model: ModelConfig, owner: Block) -> tuple[Stack, ...]:
    """Return the stacks of a rank's experts, which lie one behind the other in the pool; `model` is the rank's."""
    stacks, at = [], 0
    for each in expert_stacks(model, owner):
        stacks.append(Stack(each.offset, at, each.elements // each.shape[0]))
        at += each.elements
    return tuple(stacks)


def copied_stacks(model: ModelConfig, owner: Block) -> list[tuple[str, tuple[int, ...], int]]:
    """Return (name, shape, first element in the pool) of the stacks of copied experts; `model` is a rank's."""
    stacks = zip(expert_stacks(model, owner), stacks_of(model, owner), strict=True)
    return [(each.weight.replace(_STACK, "_copies"), each.shape, stack.in_pool) for each, stack in stacks]


def pool_elements(model: ModelConfig, plan: Plan) -> int:
    """Return the elements of copies of as many experts as a rank holds."""
    return sum(each.elements for each in expert_stacks(rank_model(model, plan), first_with_experts(model)))


def is_stack(weight: str) -> bool:
    """Tell whether a parameter, by its short name, has a matrix of each expert."""
    return weight.endswith(_STACK)


def expert_copies(plan: Plan, weight: str) -> int:
    """Return how many expert ranks hold a parameter of an mlp alike, by its short name: all do, but for experts."""
    return 1 if is_stack(weight) else plan.ep


def dispatched_types(model: ModelConfig, plan: Plan, *, gradient: bool) -> Types:
    """Return what `dispatch` makes: rows and their weights, bounds of experts, counts of all ranks, copied experts.

    With `gradient` also the gradients of what the rows gave. `bounds` are those of the rank's own experts, then of the
    copied ones. `counts` are the rows that each rank's router sends to each expert.
    """
    rows, act, own = expert_rows(model, plan), Dtype(plan.view_dtype), experts_of(model) // plan.ep
    stream = tensor_type(act, (rows, model.hidden_size))
    types = {
        "rows": stream,
        "row_weights": tensor_type(Dtype.F32, (rows, 1)),
        "bounds": tensor_type(Dtype.I32, (2 * own + 1,)),
        "counts": tensor_type(Dtype.I32, (plan.ep, experts_of(model))),
        "pool": tensor_type(act, (pool_elements(model, plan),)),
    }
    return types | ({"drows": stream} if gradient else {})


def made_types(model: ModelConfig, plan: Plan) -> Types:
    """Return what `forward_experts` makes of the rows: the product of each with its expert."""
    return {"made": tensor_type(Dtype(plan.view_dtype), (expert_rows(model, plan), model.hidden_size))}


def made_gradient_types(model: ModelConfig, plan: Plan) -> Types:
    """Return what `backward_experts` makes: gradients of the rows, of their weights, and of copied experts."""
    rows = expert_rows(model, plan)
    return {
        "dsent": tensor_type(Dtype(plan.view_dtype), (rows, model.hidden_size)),
        "drow_weights": tensor_type(Dtype.F32, (rows, 1)),
        "dpool": tensor_type(Dtype(plan.grad_dtype), (pool_elements(model, plan),)),
    }


def combined_types(model: ModelConfig, plan: Plan, *, gradient: bool) -> Types:
    """Return what `combine` makes: a row for each choice of each token; with `gradient` the weights' gradients too."""
    stream = tensor_type(Dtype(plan.view_dtype), (expert_rows(model, plan), model.hidden_size))
    if not gradient:
        return {"returned": stream}
    choices = (tokens_per_micro_batch(plan), expert_rows(model, plan) // tokens_per_micro_batch(plan))
    return {"dreturned": stream, "dweights": tensor_type(Dtype.F32, choices)}


def exchanged_types(model: ModelConfig, plan: Plan, owner: Block) -> Types:
    """Return all tensors that ops of expert ranks leave for each other; none for other blocks."""
    if not shares_experts(model, plan, owner):
        return {}
    types = dispatched_types(model, plan, gradient=True) | made_types(model, plan) | made_gradient_types(model, plan)
    return types | combined_types(model, plan, gradient=False) | combined_types(model, plan, gradient=True)

"""Tensors of an mlp whose experts neighbouring replicas share out: rows that travel, copied experts, their gradients.

Each of n expert ranks holds E / n experts of every layer. Its router sends T * k rows; of all n * T * k rows each rank
computes exactly T * k, whatever the routers say: ranks with room take rows of at most one other rank's experts, with
copies of these experts (`targets/program/expert_balance.py`). So every tensor here has a size before the run:

    xn, chosen, weights -> dispatch -> rows, row_weights, bounds, counts, pool -> forward_experts -> made -> combine
    -> returned [T k, h], a row for each choice of each token, summed by the block's forward

The pool has room for copies of E / n experts. It lives from `dispatch` to the products, so layers share its bytes.
Lowering saves nothing of the rows: the backward exchanges them again, beside the gradients of what they gave. Where
bytes are left, `recompute` keeps rows, and their gate and up, from the forward (`passes/recovery/keep_gathered.py`).

Where the plan has `dispatch = "capacity"`, a rank sends C rows at most to an expert, and drops the others. Then a rank
computes all rows that come for its own experts, without copies: up to E * C, which come from n ranks for E / n experts
each. Its tensors have room for as many; `bounds` say how many there are.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from ratrain.ratrain_ir.config.expert_keys import BALANCED
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
KEPT_OF_ROWS = ("rows", "row_weights", "bounds", "counts")
"""Names of what a dispatch of a backward brings as that of the forward did, if it is not kept."""
PRODUCTS_OF_ROWS = ("gate", "up")
"""Names of what products of a backward make as those of the forward did, if it is not kept."""


def shares_experts(model: ModelConfig, plan: Plan, block: Block) -> bool:
    """Tell whether replicas share out the experts of a block, and exchange rows for them."""
    return plan.ep > 1 and has_experts(model, block)


def first_with_experts(model: ModelConfig) -> Block:
    """Return the first mlp that has experts; those of all such mlps are as many and as large."""
    return block("mlp", max(0, model.mlp_kinds.find("e")))


def biases_choice(model: ModelConfig, plan: Plan, block: Block) -> bool:
    """Tell whether the router of a block chooses with a bias that follows how busy its experts are."""
    return plan.router.bias_update > 0 and has_experts(model, block)


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


def capacity_of(model: ModelConfig, plan: Plan) -> int | None:
    """Return the most rows that a rank sends to one expert in a micro-batch; None: as many as its router says."""
    tokens = tokens_per_micro_batch(plan)
    return plan.experts.capacity(tokens, expert_rows(model, plan) // tokens, experts_of(model))


def copies_experts(plan: Plan) -> bool:
    """Tell whether ranks with room for more rows copy other ranks' experts: all do unless rows are dropped."""
    return plan.experts.dispatch == BALANCED


def rows_of_rank(model: ModelConfig, plan: Plan) -> int:
    """Return the rows that a rank has room for: as many as its router sends, or the most that may come."""
    rows, most = expert_rows(model, plan), capacity_of(model, plan)
    return rows if most is None else min(plan.ep * rows, experts_of(model) * most)


def balanced_rows(model: ModelConfig, plan: Plan) -> int:
    """Return the rows that a rank sends, and computes, if all routers send as many to each expert."""
    return min(expert_rows(model, plan), rows_of_rank(model, plan))


def expected_rows(model: ModelConfig, plan: Plan) -> tuple[int, int] | None:
    """Return the rows that a rank has room for, and those of balanced routers; None if they are equal."""
    room, expected = rows_of_rank(model, plan), balanced_rows(model, plan)
    return (room, expected) if expected < room else None


def dispatched_types(model: ModelConfig, plan: Plan, *, gradient: bool, kept: bool = False) -> Types:
    """Return what `dispatch` makes: rows and their weights, bounds of experts, counts of all ranks, copied experts.

    With `gradient` also the gradients of what the rows gave; with `kept` these and copies alone (`KEPT_OF_ROWS`).
    `bounds` are those of the rank's own experts, then of the copied ones if there are any. `counts` are the rows that
    each rank's router chooses for each expert.
    """
    rows, act, own = rows_of_rank(model, plan), Dtype(plan.view_dtype), experts_of(model) // plan.ep
    stream = tensor_type(act, (rows, model.hidden_size))
    types = {
        "rows": stream,
        "row_weights": tensor_type(Dtype.F32, (rows, 1)),
        "bounds": tensor_type(Dtype.I32, ((2 if copies_experts(plan) else 1) * own + 1,)),
        "counts": tensor_type(Dtype.I32, (plan.ep, experts_of(model))),
    }
    if copies_experts(plan):
        types["pool"] = tensor_type(act, (pool_elements(model, plan),))
    if kept:
        types = {name: type_ for name, type_ in types.items() if name not in KEPT_OF_ROWS}
    return types | ({"drows": stream} if gradient else {})


def product_types(model: ModelConfig, plan: Plan) -> Types:
    """Return what `forward_experts` may leave for the backward, which makes it again otherwise: gate and up of rows."""
    assert model.expert_width is not None
    of_rows = tensor_type(Dtype(plan.view_dtype), (rows_of_rank(model, plan), model.expert_width))
    return dict.fromkeys(PRODUCTS_OF_ROWS, of_rows)


def made_types(model: ModelConfig, plan: Plan) -> Types:
    """Return what `forward_experts` makes of the rows: the product of each with its expert."""
    return {"made": tensor_type(Dtype(plan.view_dtype), (rows_of_rank(model, plan), model.hidden_size))}


def made_gradient_types(model: ModelConfig, plan: Plan) -> Types:
    """Return what `backward_experts` makes: gradients of the rows, of their weights, and of copied experts."""
    rows = rows_of_rank(model, plan)
    types = {
        "dsent": tensor_type(Dtype(plan.view_dtype), (rows, model.hidden_size)),
        "drow_weights": tensor_type(Dtype.F32, (rows, 1)),
    }
    if copies_experts(plan):
        types["dpool"] = tensor_type(Dtype(plan.grad_dtype), (pool_elements(model, plan),))
    return types


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
    types |= product_types(model, plan)
    return types | combined_types(model, plan, gradient=False) | combined_types(model, plan, gradient=True)

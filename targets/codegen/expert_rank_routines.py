"""Steps of an mlp whose experts replicas share out: routing, products of the rows that came, the sum of what came back.

Rows of a rank's own experts come first, then those of copied ones; `bounds` has both in a row. So each product is two
calls, with the stacks of the view and with those of the pool, that fill one tensor:

    made[bounds[0] : bounds[n]]  = rows of own experts    @ w.down_experts        n experts a rank
    made[bounds[n] : bounds[2n]] = rows of copied experts @ pool.down_copies

Where rows above a capacity are dropped, no expert is copied, and each product is the first call alone. Then there may
be room for more rows than come: kernels stop at the end that `bounds` say.

The backward computes gate and up again, unless they were kept from the forward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.ratrain_ir.model.blocks import trained_parameters
from ratrain.ratrain_ir.model.expert_blocks import experts_of
from ratrain.ratrain_ir.model.expert_ranks import PRODUCTS_OF_ROWS, copies_experts, is_stack, rows_of_rank
from ratrain.targets.codegen.expert_routines import (
    add_shared,
    choose,
    count_tokens,
    group_rows,
    router_backward,
    router_logits,
    shared_backward,
    shared_forward,
)
from ratrain.targets.codegen.norms import (
    add_branch,
    block_source,
    branch_gradient,
    branch_of,
    finish_backward,
    has_plain_branch,
    norm,
    source_gradient,
)
from ratrain.targets.program.routine import COPIES

if TYPE_CHECKING:
    from ratrain.targets.codegen.builder import Builder


def route(builder: Builder) -> None:
    """Add the norm of the input, and the choice of experts with its weights."""
    router_logits(builder, norm(builder), again=False)
    choose(builder, "chosen", "weights")


def forward_of_rows(builder: Builder) -> None:
    """Add the products of the rows that came, with own and with copied experts."""
    _activations(builder)
    _products(builder, "prod", "down", "made", trans_b=True)


def backward_of_rows(builder: Builder) -> None:
    """Add the gradients of the rows that came, of their weights, and of own and copied experts.

    The first contribution to the block's gradient zeroes the rest of it, to which the block's backward adds.
    """
    _activations(builder)
    above = _branch_gradient_of_rows(builder)
    _gradients(builder, above, "prod", "down")
    dprod = _of_rows(builder, "dprod", builder.model.expert_width)
    _products(builder, above, "down", dprod)
    gradients = {name: _of_rows(builder, f"d{name}", builder.model.expert_width) for name in PRODUCTS_OF_ROWS}
    operands = {name: name for name in ("gate", "up", "dprod", "dgate", "dup")} | _ends(builder)
    builder.step("weighted_swiglu_backward", operands | {"weights": "row_weights", "dweights": "drow_weights"})
    for index, (name, gradient) in enumerate(gradients.items()):
        _gradients(builder, gradient, "rows", name)
        _products(builder, gradient, name, "dsent", accumulate=index > 0)
    if not builder.accumulates:
        for parameter in trained_parameters(builder.model, builder.block):
            if not is_stack(parameter.weight):
                builder.step("zero", {"a": f"g.{parameter.weight}"})
        builder.zero_gaps()


def forward_of_returned(builder: Builder) -> None:
    """Add the sum of the rows that came back for each token, and the shared expert."""
    if builder.model.shared_expert_size is not None:
        shared_forward(builder, block_source(builder))
    plain = has_plain_branch(builder)
    branch = builder.total if plain else branch_of(builder)
    builder.step("choice_sums", {"a": "returned", "out": branch} | (builder.residual if plain else {}))
    add_shared(builder, branch)
    if not plain:
        add_branch(builder)


def backward_of_returned(builder: Builder) -> None:
    """Add the gradient of the input through the rows that came back, a shared expert and the router."""
    dxn, source = source_gradient(builder), block_source(builder)
    group_rows(builder)
    count_tokens(builder)
    builder.step("choice_sums", {"a": "dreturned", "out": dxn})
    if builder.model.shared_expert_size is not None:
        shared_backward(builder, branch_gradient(builder), source, dxn)
    router_backward(builder, source, dxn)
    finish_backward(builder)


def _branch_gradient_of_rows(builder: Builder) -> str:
    """Add the gradient of what the rows give to the block's branch, from that of the stream; return its operand."""
    if has_plain_branch(builder):
        return "drows"
    scaled = _of_rows(builder, "dbranch", builder.model.hidden_size)
    builder.step("scale", {"a": "drows", "out": scaled}, scale=builder.model.residual_scale)
    return scaled


def _of_rows(builder: Builder, name: str, width: int) -> str:
    """Return an intermediate with a line for each row that came."""
    return builder.temporary(name, rows_of_rank(builder.model, builder.plan), width)


def _activations(builder: Builder) -> None:
    """Add gate and up of the rows that came, unless the forward kept them, and their weighted product."""
    for name in PRODUCTS_OF_ROWS:
        kept = builder.has(name)
        if kept and builder.has("drows"):
            continue
        out = name if kept else _of_rows(builder, name, builder.model.expert_width)
        _products(builder, "rows", name, out, trans_b=True)
    prod = _of_rows(builder, "prod", builder.model.expert_width)
    operands = {"gate": "gate", "up": "up", "weights": "row_weights", "prod": prod} | _ends(builder)
    builder.step("weighted_swiglu_forward", operands)


def _ends(builder: Builder) -> dict[str, str]:
    """Return the operand that says how many rows there are, where that depends on data."""
    return {} if copies_experts(builder.plan) else {"bounds": "bounds"}


def _both(builder: Builder, name: str, own: str, copied: str) -> list[tuple[str, str]]:
    """Return (matrices, bounds) of a rank's own experts, then of any copied ones, in the formals of these names."""
    if not copies_experts(builder.plan):
        return [(f"{own}.{name}_experts", "bounds")]
    count = experts_of(builder.model) // builder.plan.ep
    return [
        (f"{own}.{name}_experts", f"bounds[0:{count + 1}]"),
        (f"{copied}.{name}_copies", f"bounds[{count}:{2 * count + 1}]"),
    ]


def _products(
    builder: Builder, a: str, name: str, out: str, *, trans_b: bool = False, accumulate: bool = False
) -> None:
    """Add the products of rows with one matrix of their experts."""
    for matrices, bounds in _both(builder, name, "w", COPIES):
        operands = {"a": a, "b": matrices, "bounds": bounds, "out": out}
        options = {"trans_b": True} if trans_b else {}
        builder.step("expert_rows", operands, **options, **({"accumulate": True} if accumulate else {}))


def _gradients(builder: Builder, a: str, b: str, name: str) -> None:
    """Add the gradients of one matrix of own and of copied experts."""
    for matrices, bounds in _both(builder, name, "g", f"d{COPIES}"):
        accumulates = builder.accumulates and matrices.startswith("g.")
        operands = {"a": a, "b": b, "bounds": bounds, "out": matrices}
        builder.step("expert_gradients", operands, gathers_a=False, accumulate=accumulates)


OF_EXPERT_RANKS = {
    "route": route,
    "forward_experts": forward_of_rows,
    "forward": forward_of_returned,
    "backward_experts": backward_of_rows,
    "backward": backward_of_returned,
}
"""Ops of an mlp whose experts replicas share out."""

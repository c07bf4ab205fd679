"""Steps of an mlp with experts: router, order of rows, grouped products, the sum over a token's experts, gradients.

The weight of a choice multiplies the activation before the last product, not the product after it: that is the same
sum, and the gradient of the weight needs no second product.

    y[t] = sum over the rows r of t:  (weight * silu(gate) * up)[r] @ down
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.ratrain_ir.config.types import Dtype
from ratrain.ratrain_ir.model.expert_blocks import expert_rows, experts_of
from ratrain.targets.codegen.builder import INPUT, WEIGHT
from ratrain.targets.codegen.expert_adapters import (
    GROUPS,
    add_down_adapter,
    add_down_adapter_gradient,
    add_down_low,
    add_input_adapter,
    down_adapter_gradients,
    input_adapter_gradients,
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

if TYPE_CHECKING:
    from ratrain.targets.codegen.builder import Builder


def experts_forward(builder: Builder) -> None:
    """Add the steps of the forward, with all slots that it saves."""
    model, source = builder.model, norm(builder)
    router_logits(builder, source, again=False)
    choose(builder, builder.slot("chosen"), builder.slot("weights"))
    group_rows(builder)
    for name in ("gate", "up"):
        operands = {"a": source, "b": f"w.{name}_experts", **GROUPS, "out": builder.slot(name)}
        builder.step("expert_rows", operands, trans_b=True)
        add_input_adapter(builder, name, source, operands["out"])
    operands = {"gate": "gate", "up": "up", "weights": "weights", "prod": builder.slot("prod"), "order": "order"}
    builder.step("weighted_swiglu_forward", operands)
    add_down_low(builder)
    if model.shared_expert_size is not None:
        shared_forward(builder, source)
    if not builder.has("y") and not builder.norms_branch:
        builder.add_low("shared_down", "shared_prod")
        return
    plain = has_plain_branch(builder)
    branch = builder.total if plain else branch_of(builder)
    sums = builder.temporary("sums", builder.rows, model.hidden_size, dtype=Dtype.F32)
    operands = {"a": "prod", "b": "w.down_experts", **GROUPS, "sums": sums, "out": branch}
    builder.step("expert_sums", operands | (builder.residual if plain else {}), trans_b=True)
    add_down_adapter(builder, sums, branch)
    add_shared(builder, branch)
    if not plain:
        add_branch(builder)


def add_shared(builder: Builder, branch: str) -> None:
    """Add the last product of the shared expert to a block's branch, if the model has such an expert."""
    if builder.model.shared_expert_size is not None:
        operands = {"a": "shared_prod", "b": "w.shared_down_proj", "out": branch}
        builder.step("gemm", operands, trans_b=True, accumulate=True)
        builder.add_adapter("shared_down", "shared_prod", branch)


def router_logits(builder: Builder, source: str, *, again: bool) -> None:
    """Add the router's logits, in float32; the forward does so first, the backward `again`."""
    out = builder.temporary("logits", builder.rows, experts_of(builder.model), dtype=Dtype.F32)
    builder.step("gemm", {"a": source, "b": "w.router_proj", "out": out}, trans_b=True)
    builder.add_adapter("router", source, out, again=again)


def choose(builder: Builder, chosen: str, weights: str) -> None:
    """Add the choice of experts by their logits, and by the router's bias if it has one."""
    operands = {"logits": "logits", "chosen": chosen, "weights": weights}
    operands |= {"bias": "bias"} if builder.has("bias") else {}
    builder.step("route_forward", operands, normalise=builder.model.router_normalised)


def count_tokens(builder: Builder) -> None:
    """Add the rows of each expert to the counts of the step, if the router's bias follows them."""
    if builder.has("load"):
        builder.step_of(WEIGHT, "add_rows", {"bounds": "bounds", "counts": "load"})


def group_rows(builder: Builder) -> None:
    """Add the order of rows by expert, which is made anew from the choice where it is needed."""
    builder.temporary("order", expert_rows(builder.model, builder.plan), dtype=Dtype.I32)
    builder.temporary("bounds", experts_of(builder.model) + 1, dtype=Dtype.I32)
    builder.step("group_rows", {"chosen": "chosen", **GROUPS})


def shared_forward(builder: Builder, source: str) -> None:
    """Add the shared expert up to its last product, and the sigmoid that weights it."""
    logits = builder.temporary("shared_logits", builder.rows, 1, dtype=Dtype.F32)
    builder.step("gemm", {"a": source, "b": "w.shared_router_proj", "out": logits}, trans_b=True)
    builder.add_adapter("shared_router", source, logits)
    builder.step("sigmoid_forward", {"x": logits, "y": builder.slot("shared_weights")})
    for name in ("gate", "up"):
        operands = {"a": source, "b": f"w.shared_{name}_proj", "out": builder.slot(f"shared_{name}")}
        builder.step("gemm", operands, trans_b=True)
        builder.add_adapter(f"shared_{name}", source, operands["out"])
    operands = {name: f"shared_{name}" for name in ("gate", "up", "weights")}
    builder.step("weighted_swiglu_forward", {**operands, "prod": builder.slot("shared_prod")})


def experts_backward(builder: Builder) -> None:
    """Add the steps of the backward, or of the half of it that the builder is for."""
    dxn = source_gradient(builder)
    above, source = branch_gradient(builder), block_source(builder)
    group_rows(builder)
    count_tokens(builder)
    _expert_gradients(builder, above, "prod", "down", gathers_a=True)
    down_adapter_gradients(builder, above)
    gradients = {name: builder.slot(f"d{name}") for name in ("gate", "up")}
    if INPUT in builder.halves:
        _input_gradients(builder, above)
    for index, (name, gradient) in enumerate(gradients.items()):
        _expert_gradients(builder, gradient, source, name, gathers_a=False)
        sums = builder.temporary("sums", builder.rows, builder.model.hidden_size, dtype=Dtype.F32)
        operands = {"a": gradient, "b": f"w.{name}_experts", **GROUPS, "sums": sums, "out": dxn}
        builder.step_of(INPUT, "expert_sums", operands, accumulate=index > 0)
        input_adapter_gradients(builder, name, gradient, source, sums, dxn)
    if builder.model.shared_expert_size is not None:
        shared_backward(builder, above, source, dxn)
    router_backward(builder, source, dxn)
    finish_backward(builder)


def router_backward(builder: Builder, source: str, dxn: str) -> None:
    """Add the gradients of the router and, through it, of the block's normed input."""
    logits = builder.slot("dlogits")
    if INPUT in builder.halves:
        _router_gradient(builder, source)
    builder.linear_gradients(logits, source, "router_proj")
    builder.step_of(INPUT, "gemm", {"a": logits, "b": "w.router_proj", "out": dxn}, accumulate=True)
    builder.add_adapter_gradient("router", dxn)


def _expert_gradients(builder: Builder, a: str, b: str, name: str, *, gathers_a: bool) -> None:
    """Add the gradients of one matrix of all experts."""
    operands = {"a": a, "b": b, **GROUPS, "out": f"g.{name}_experts"}
    builder.step_of(WEIGHT, "expert_gradients", operands, gathers_a=gathers_a, accumulate=builder.accumulates)


def _input_gradients(builder: Builder, above: str) -> None:
    """Add the gradients of both inputs of the activation, and of the weights of choices."""
    model, rows = builder.model, expert_rows(builder.model, builder.plan)
    dprod = builder.temporary("dprod", rows, model.expert_width)
    builder.step("expert_rows", {"a": above, "b": "w.down_experts", **GROUPS, "out": dprod})
    add_down_adapter_gradient(builder, dprod)
    dweights = builder.temporary("dweights", builder.rows, rows // builder.rows, dtype=Dtype.F32)
    operands = {name: name for name in ("gate", "up", "weights", "dprod", "dgate", "dup", "order")}
    builder.step("weighted_swiglu_backward", operands | {"dweights": dweights})


def _router_gradient(builder: Builder, source: str) -> None:
    """Add the gradient of the router's logits, which are computed again."""
    router_logits(builder, source, again=True)
    operands = {name: name for name in ("logits", "chosen", "weights", "dweights", "bounds", "dlogits")}
    plan = builder.plan.whole
    losses = {"balance": plan.router.balance_loss, "z": plan.router.z_loss}
    # The mean over a replica's micro-batches; over replicas it is taken where their gradients meet. Tensor-parallel
    # ranks each have the gradient of these losses, and their gradients are added up. Labels that do not count are no
    # matter: a router sees all tokens.
    shares = {name: factor / (plan.micro_batches * plan.tp) for name, factor in losses.items() if factor}
    if shares:
        operands["scale"] = "scale"
    builder.step("route_backward", operands, normalise=builder.model.router_normalised, **shares)


def shared_backward(builder: Builder, above: str, source: str, dxn: str) -> None:
    """Add the gradients of the shared expert and of its gate."""
    width = builder.model.shared_expert_size or 0
    builder.linear_gradients(above, "shared_prod", "shared_down_proj")
    gradients = {name: builder.slot(f"dshared_{name}") for name in ("gate", "up", "logits")}
    if INPUT in builder.halves:
        dprod = builder.temporary("dshared_prod", builder.rows, width)
        builder.step("gemm", {"a": above, "b": "w.shared_down_proj", "out": dprod})
        builder.add_adapter_gradient("shared_down", dprod)
        dweights = builder.temporary("dshared_weights", builder.rows, 1, dtype=Dtype.F32)
        operands = {name: f"shared_{name}" for name in ("gate", "up", "weights")}
        operands |= {f"d{name}": f"dshared_{name}" for name in ("prod", "gate", "up", "weights")}
        builder.step("weighted_swiglu_backward", operands)
        builder.step("sigmoid_backward", {"y": "shared_weights", "dy": dweights, "dx": gradients["logits"]})
    stems = {"gate": "shared_gate", "up": "shared_up", "logits": "shared_router"}
    for name, gradient in gradients.items():
        weight = f"{stems[name]}_proj"
        builder.linear_gradients(gradient, source, weight)
        builder.step_of(INPUT, "gemm", {"a": gradient, "b": f"w.{weight}", "out": dxn}, accumulate=True)
        builder.add_adapter_gradient(stems[name], dxn)

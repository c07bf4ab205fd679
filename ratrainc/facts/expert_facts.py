"""Facts of a model with experts: total and active parameters, and the rows that each expert gets at a time.

A micro-batch of T tokens, each of which goes to k of E experts, has T k / E rows for each expert on average. All its
weights are read for them, which takes longer than their products do if the rows are few:

    Qwen3-30B-A3B, T = 2048, k = 8, E = 128: 128 rows each; on the MT-3000 weights bind below 189
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ratrain.ratrain_ir.config.types import Dtype
from ratrain.ratrain_ir.model.expert_ranks import capacity_of
from ratrain.ratrain_ir.support.quantities import number_of
from ratrain.targets.machine.cost import weight_bound_rows
from ratrain.targets.machine.routing import dropped_share

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.targets.machine.machine import Machine
    from ratrain.targets.machine.routing import Routing


def experts_text(model: ModelConfig) -> str:
    """Return experts, active parameters and the experts' share of all parameters in one line; "" for a dense model."""
    if model.experts is None:
        return ""
    share = 100 * model.expert_parameters / model.parameters
    shared = "" if model.shared_expert_size is None else f", and one of {model.shared_expert_size:,} for all tokens"
    where = kinds_text(model) if model.mlp_kinds else "a layer"
    return (
        f"experts: {model.experts} {where}, {model.expert_width:,} wide, {model.experts_per_token} for each token"
        f"{shared}; they hold {share:.1f} % of the parameters, and a token uses {model.active_parameters:,} in all"
    )


def kinds_text(model: ModelConfig) -> str:
    """Return in how many layers there are experts, in words."""
    return f"in {model.expert_layers} of {number_of(model.layers, 'layer')}"


def dropped_rows_note(model: ModelConfig, plan: Plan, routing: Routing | None) -> str:
    """Return which part of all rows a routing makes expert ranks drop, as a run's log calls it; "" if none can be."""
    share = dropped_share(routing, model, plan)
    return "" if share is None else f"dropped_rows: {100 * share:.2f} % of all rows are above the capacity of an expert"


NOT_COUNTED = "experts that a token does not use are not counted"
"""Remark on utilisation of a model with experts."""


def experts_json(model: ModelConfig) -> dict[str, Any] | None:
    """Return the same as plain data; None for a dense model."""
    if model.experts is None:
        return None
    return {
        "experts": model.experts,
        "layers": model.expert_layers,
        "experts_per_token": model.experts_per_token,
        "expert_width": model.expert_width,
        "shared_expert_width": model.shared_expert_size,
        "active_parameters": model.active_parameters,
        "expert_parameters": model.expert_parameters,
    }


def expert_rows_note(model: ModelConfig, plan: Plan, machine: Machine, routing: Routing | None = None) -> str:
    """Return the rows of each expert in a micro-batch, and a way out if weights bind them; "" for a dense model.

    Under a `routing` that is not balanced, the rows of the busiest one. With slices the rows are of the shortest one.
    Tensor-parallel ranks cut the experts, not their rows.
    """
    if model.experts is None or model.experts_per_token is None:
        return ""
    tokens = plan.micro_batch_size * min(plan.slices or (plan.seq_len,))
    rows = tokens * model.experts_per_token / model.experts
    least = weight_bound_rows(machine, Dtype(plan.view_dtype).itemsize, half_sums=plan.half_run is not None)
    part = "the shortest slice" if plan.slices else "a micro-batch"
    choices = f"{tokens:,} tokens, {model.experts_per_token} of {model.experts} experts each"
    capacity = capacity_of(model, plan)
    taken = f"; of a rank's rows an expert takes {capacity:,} at most, and the others are dropped" if capacity else ""
    if routing is not None and routing.busiest > 1:
        most = f"the busiest expert gets {rows * routing.busiest:,.0f} rows in {part} ({choices})"
        even = f"not a balanced one with {rows:,.0f} rows each"
        return f"{most}: times assume the routing '{routing.name}', {even}{taken}"
    said = f"experts get {rows:,.0f} rows each in {part} ({choices}), if all get as many, as times assume{taken}"
    if rows >= least:
        return said
    way_out = "larger micro-batches, or fewer slices," if plan.slices else "larger micro-batches"
    return (
        f"{said}: below {least:.0f} rows reading their weights takes longer on {machine.name} than their products do; "
        f"{way_out} have more"
    )

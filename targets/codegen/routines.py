"""Routines of the block ops: their kernels in order, and the places of their intermediates in the workspace.

Forward writes the saved slots that its op keeps; slots it does not keep are intermediates. Recovery is forward without
the parts that nothing needs. Backward follows the chain rule through the same kernels. Each half of a split backward
runs its share of these very steps, so that the two together give the same bits as the whole.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from attrs import frozen

from ratrain.ratrain_ir.config.tensor_ranks import rank_model, trained_model
from ratrain.ratrain_ir.config.types import Dtype, StateKind
from ratrain.ratrain_ir.model.adapters import adapter_module, stems_of_first
from ratrain.ratrain_ir.model.blocks import Block, block, has_backward, has_experts, parameters, passes_gradient_on
from ratrain.ratrain_ir.model.expert_ranks import PRODUCTS_OF_ROWS, shares_experts
from ratrain.ratrain_ir.model.expert_slots import routed_slots
from ratrain.ratrain_ir.model.micro_batch import tokens_per_micro_batch
from ratrain.ratrain_ir.model.slice_plan import SlicePlan, slice_plan
from ratrain.ratrain_ir.model.slots import (
    HEADS,
    OUTPUT_GRADIENT,
    STARTS,
    made_by_project,
    saved_slots,
    scores_type,
)
from ratrain.ratrain_ir.ops.compute import BlockOp, Recompute
from ratrain.ratrain_ir.ops.context_ranks import Attend, AttendBackward
from ratrain.ratrain_ir.ops.expert_ranks import BackwardExperts, ForwardExperts
from ratrain.ratrain_ir.ops.roles import is_of_other_slice
from ratrain.ratrain_ir.ops.signatures import Binding, bind
from ratrain.targets.codegen.builder import INPUT, WEIGHT, Builder
from ratrain.targets.codegen.context_routines import Heads, context_backward, context_forward, positions, runs_of
from ratrain.targets.codegen.expert_rank_routines import OF_EXPERT_RANKS
from ratrain.targets.codegen.expert_routines import experts_backward, experts_forward
from ratrain.targets.codegen.head_groups import group_heads, put_side_by_side, side_by_side
from ratrain.targets.codegen.mlp_routines import mlp_backward, mlp_forward
from ratrain.targets.codegen.norms import (
    add_branch,
    add_branch_backward,
    add_branch_forward,
    block_source,
    branch_gradient,
    branch_of,
    finish_backward,
    has_plain_branch,
    head_norm_backward,
    norm,
    norm_steps,
    of_input,
    qk_norms,
    qk_norms_backward,
    source_gradient,
    statistics,
    summed_norms_backward,
    sums_of_products,
    sums_of_squares,
)
from ratrain.targets.codegen.slice_routines import sliced_backward, sliced_forward
from ratrain.targets.program.routine import FROZEN, PACKED

if TYPE_CHECKING:
    from collections.abc import Callable

    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.targets.program.routine import Routine


def routine_of(op: BlockOp, model: ModelConfig, plan: Plan) -> Routine:
    """Return the routine of a block op, under the roles its operands bind."""
    binding = bind(op, model, plan)
    roles = tuple(binding.tensors)
    form = RoutineForm(
        op.keyword,
        representative(op.block, model, plan),
        roles,
        _given(op, binding),
        binding.accumulates,
        op.slice,
        op.head_group if isinstance(op, Attend | AttendBackward) else None,
    )
    return derived_routine(form, model, plan)


@frozen
class RoutineForm:
    """Everything that distinguishes one routine of a model and plan from another."""

    keyword: str
    block: Block
    """block of the first layer of its kind, which stands for all layers of that kind"""
    roles: tuple[str, ...]
    """operands that the op binds, without its workspace"""
    given: tuple[str, ...]
    """saved slots a recovery reads, because they were kept"""
    accumulates: bool
    slice: int | None = None
    """which slice, where micro-batches are cut: later slices see more keys"""
    head_group: int | None = None
    """which group of heads, where keys are gathered in groups"""


def _given(op: BlockOp, binding: Binding) -> tuple[str, ...]:
    if not isinstance(op, Recompute):
        return ()
    roles = {tensor: role for role, tensor in binding.tensors.items()}
    saved = [roles[t] for t in op.reads if t.kind is StateKind.SAVED]
    return tuple(role for role in saved if not is_of_other_slice(role))


def representative(one: Block, model: ModelConfig, plan: Plan) -> Block:
    """Return the block of the first layer of its kind: like layers share one routine.

    Mlp blocks differ by having experts or not, and by which of their parameters train.
    """
    if one.layer is None:
        return one
    alike = block(one.kind, model.first_alike(one.kind, one.layer))
    return _first_trained_alike(one, alike, model, plan) if plan.training else alike


@cache
def _first_trained_alike(one: Block, alike: Block, model: ModelConfig, plan: Plan) -> Block:
    """Return the first block that is like `alike` and trains as `one` does."""
    form = _trained_form(one, model, plan)
    layers = range(alike.layer or 0, model.layers)
    of_kind = [layer for layer in layers if model.first_alike(one.kind, layer) == alike.layer]
    others = (block(one.kind, layer) for layer in of_kind)
    return next(each for each in others if _trained_form(each, model, plan) == form)


@cache
def _trained_form(one: Block, model: ModelConfig, plan: Plan) -> tuple[object, ...]:
    """Return what distinguishes the routines of a block by what trains: parameters, scales and gradients."""
    own = [(each.weight, each.trains, each.shape) for each in parameters(rank_model(model, plan), one)]
    stems = stems_of_first(weight for weight, *_ in own)
    training = trained_model(model, plan).training
    scales = [training.scale_of(adapter_module(model, one.kind, one.layer, stem)) for stem in stems]
    return (*own, *scales, has_backward(model, plan, one), passes_gradient_on(model, plan, one))


_OF_ROWS = (ForwardExperts.keyword, BackwardExperts.keyword)
"""Ops that may leave gate and up of rows for each other."""


def _key(form: RoutineForm, model: ModelConfig, plan: Plan) -> str:
    """Return the name of a routine: block kind, op, and its differences from the plain routine."""
    parts = [f"{form.block.kind}.{form.keyword}"]
    if form.block.layer:
        parts.append(f"like{form.block.layer}")
    if form.slice is not None:
        parts.append(f"s{form.slice}")
    if form.head_group is not None:
        parts.append(f"g{form.head_group}")
    slots = _may_keep(form, model, plan)
    if slots:
        made = [name for name in slots if name in form.roles and name not in form.given]
        if form.given:
            parts.append("from-" + "-".join(form.given))
        if len(made) + len(form.given) < len(slots):
            parts.append("keep-" + "-".join(made) if made else "keep-none")
    if form.keyword == "recompute" and "y" in form.roles:
        parts.append("y")
    if form.keyword in _OF_ROWS and PRODUCTS_OF_ROWS[0] in form.roles:
        parts.append("products")
    if form.accumulates:
        parts.append("add")
    return "-".join(parts)


def _may_keep(form: RoutineForm, model: ModelConfig, plan: Plan) -> list[str]:
    """Return the saved slots that an op may keep or leave out."""
    slots = [slot.name for slot in saved_slots(model, plan, form.block)]
    before = (*made_by_project(model, plan, form.block), *routed_slots(model, plan, form.block))
    projected = [slot.name for slot in before]
    if form.keyword == "project":
        return [name for name in slots if name in projected]
    if form.keyword == "forward":
        return [name for name in slots if name not in projected]
    return slots if form.keyword == "recompute" else []


def _recipe(form: RoutineForm, model: ModelConfig, plan: Plan) -> Callable[[Builder], None]:
    """Return the function that adds the steps of a form."""
    kind, backward = form.block.kind, form.keyword in _BACKWARDS
    if plan.cp > 1 and (kind, form.keyword) == ("attention", "forward"):
        return _attend
    if shares_experts(model, plan, form.block):
        return OF_EXPERT_RANKS[form.keyword]
    return (OF_BRANCHES | _AROUND_SUMS).get(form.keyword) or {
        ("embed", False): _embed_forward,
        ("attention", False): _attention_forward,
        ("mlp", False): experts_forward if has_experts(model, form.block) else mlp_forward,
        ("head", False): _head_forward,
        ("embed", True): _embed_backward,
        ("attention", True): _attention_backward,
        ("mlp", True): experts_backward if has_experts(model, form.block) else mlp_backward,
        ("head", True): _head_backward,
    }[kind, backward]


@cache
def derived_routine(form: RoutineForm, model: ModelConfig, plan: Plan) -> Routine:
    """Return the routine of a form; equal arguments give the same object."""
    plan = slice_plan(plan, form.slice)
    halves = _BACKWARDS.get(form.keyword, frozenset())
    builder = Builder(model, plan, form.block, form.roles, form.accumulates, halves, form.head_group)
    _recipe(form, model, plan)(builder)
    if form.keyword == "recompute":
        read = (*form.given, "x", "w", "bias", FROZEN, PACKED)
        builder.prune_steps({role for role in form.roles if role not in read}, form.given)
    elif form.keyword == "backward" and not passes_gradient_on(model, plan, form.block) and form.block.kind != "embed":
        builder.prune_backward()
    if WEIGHT in halves and not form.accumulates:
        builder.zero_gaps()
    return builder.finish(_key(form, model, plan))


_BACKWARDS = {
    "backward": frozenset({INPUT, WEIGHT}),
    "backward_input": frozenset({INPUT}),
    "backward_weight": frozenset({WEIGHT}),
    "add_branch_backward": frozenset({INPUT}),
    "backward_heads": frozenset({INPUT}),
    "backward_experts": frozenset({INPUT, WEIGHT}),
}
"""Halves of a backward that each op runs."""


OF_BRANCHES = {"add_branch": add_branch_forward, "add_branch_backward": add_branch_backward}
"""Ops that norm the branches of blocks and add them to the stream."""


def attention_options(builder: Builder) -> dict[str, Any]:
    """Return the options of attention kernels that come from the model and the layer; default ones are left out."""
    model = builder.model
    special = {"scale": model.attention_scale, "softcap": model.attention_softcap}
    return {
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "window": builder.layer_kind.window,
        "alibi": model.position == "alibi",
        **({"all_heads": builder.whole.heads} if model.position == "alibi" and builder.plan.tp > 1 else {}),
        **{name: value for name, value in special.items() if value is not None},
    }


def _sequence_options(builder: Builder) -> dict[str, Any]:
    plan = builder.plan
    return {"batch": plan.micro_batch_size, "seq_len": plan.seq_len, **attention_options(builder)}


def _rope(builder: Builder, x: str, heads: int, *, inverse: bool) -> None:
    model, kind = builder.model, builder.layer_kind
    if not kind.rope_theta:
        return
    options: dict[str, Any] = {"heads": heads, "head_dim": model.head_dim}
    if model.rotary_dim not in (None, model.head_dim):
        options["rotary_dim"] = model.rotary_dim
    if model.rope_interleaved:
        options["interleaved"] = True
    if kind.rope_scaling:
        options["scaling"] = kind.rope_scaling
    options |= {"theta": kind.rope_theta, "inverse": inverse}
    for run in runs_of(builder.plan, builder.rows):
        places, by_rank = positions(builder.plan, run)
        builder.step_by_rank(by_rank, "rope", run.of_all({"x": x, **builder.documents}), **places, **options)


def _embed_forward(builder: Builder) -> None:
    operands = {"tokens": "tokens", "table": "w.table", "y": "y"}
    builder.step("embedding_forward", operands, **_scale_of(builder.model.embedding_scale))
    if builder.model.position == "learned":
        for run in runs_of(builder.plan, builder.rows):
            places, by_rank = positions(builder.plan, run)
            operands = {"positions": "w.positions", **run.of_all({"y": "y", **builder.documents})}
            builder.step_by_rank(by_rank, "position_forward", operands, **places)


def _scale_of(scale: float) -> dict[str, float]:
    """Return the option of a kernel that scales its result."""
    return {} if scale == 1 else {"scale": scale}


def _embed_backward(builder: Builder) -> None:
    operands = {"tokens": "tokens", "dy": "dy", "dtable": "g.table"}
    options: dict[str, Any] = _scale_of(builder.model.embedding_scale)
    if builder.whole.padding_row is not None:
        options["padding_token"] = builder.whole.padding_row
    builder.step("embedding_backward", operands, accumulate=builder.accumulates, **options)
    if builder.model.position == "learned":
        adds = builder.accumulates
        for run in reversed(runs_of(builder.plan, builder.rows)):
            places, by_rank = positions(builder.plan, run)
            operands = {"dpositions": "g.positions", **run.of_all({"dy": "dy", **builder.documents})}
            builder.step_by_rank(by_rank, "position_backward", operands, **places, accumulate=adds)
            adds = True


def _attend_with_part(builder: Builder) -> None:
    """Add attention with a part of the heads: a context rank's share, over whole sequences, or a group."""
    if builder.plan.exchanges_keys:
        of = _heads_of(builder)
        context_forward(builder, _options_of(builder, of), of)
        return
    operands = dict(zip(("q", "k", "v", "o", "lse"), (*HEADS, "o_heads", "lse_heads"), strict=True))
    builder.step("attention_forward", {**operands, **_starts(builder)}, **_options_of_share(builder))


def _attend_with_part_backward(builder: Builder) -> None:
    """Add the steps from the gradient of its output to those of its queries, keys and values."""
    if builder.plan.exchanges_keys:
        of = _heads_of(builder)
        context_backward(builder, _options_of(builder, of), OUTPUT_GRADIENT, of)
        return
    names = (*HEADS, "o_heads", "lse_heads", "do_heads", *(f"d{name}" for name in HEADS))
    operands = dict(zip(("q", "k", "v", "o", "lse", "do", "dq", "dk", "dv"), names, strict=True))
    options, rows = _options_of_share(builder), builder.plan.cp * builder.rows
    operands["delta"] = builder.temporary("delta", options["heads"], rows, dtype=Dtype.F32)
    builder.step("attention_backward", {**operands, **_starts(builder)}, **options)


def _heads_of(builder: Builder) -> Heads:
    """Return the group of heads that an op works on."""
    assert builder.head_group is not None  # the signature of such an op has a group
    return Heads(builder.head_group, builder.plan.context_groups)


def _options_of(builder: Builder, of: Heads) -> dict[str, Any]:
    """Return the options of attention kernels for some heads."""
    options = attention_options(builder)
    return {**options, "heads": of.part(options["heads"]), "kv_heads": of.part(options["kv_heads"])}


def _options_of_share(builder: Builder) -> dict[str, Any]:
    options, ranks = _sequence_options(builder), builder.plan.cp
    return {**options, "heads": options["heads"] // ranks, "kv_heads": max(1, options["kv_heads"] // ranks)}


def _starts(builder: Builder) -> dict[str, str]:
    """Return the starts of documents of all tokens, as attention kernels take them; nothing if it reads none."""
    return {"documents": STARTS} if builder.has(STARTS) else {}


def _project(builder: Builder) -> None:
    """Add queries, keys and values, for context ranks normed and rotated; else sums that norms over ranks need."""
    _projections(builder)
    if builder.plan.cp > 1:
        _norms_and_positions(builder)
        _group_heads(builder)
    else:
        sums_of_squares(builder)


def _projections(builder: Builder) -> None:
    """Add queries and keys, before their norms, and values."""
    model = builder.model
    source = norm(builder)
    for name in ("q", "k", "v"):
        normed = name != "v" and model.qk_norm != "none"
        out = builder.slot(f"{name}_in") if normed else side_by_side(builder, name)
        operands = {"a": source, "b": f"w.{name}_proj", "out": out}
        if model.qkv_bias:
            operands["bias"] = f"w.{name}_bias"
        builder.step("gemm", operands, trans_b=True)
        builder.add_adapter(name, source, operands["out"])


def _attention_forward(builder: Builder) -> None:
    if builder.has("x"):  # else `_project` has made them
        _projections(builder)
    _norms_and_positions(builder)
    _group_heads(builder)
    _attend(builder)


def _norms_and_positions(builder: Builder) -> None:
    """Add the norms and rotations of queries and keys."""
    qk_norms(builder)
    _rope(builder, side_by_side(builder, "q"), builder.model.heads, inverse=False)
    _rope(builder, side_by_side(builder, "k"), builder.model.kv_heads, inverse=False)


def _group_heads(builder: Builder) -> None:
    """Add copies of queries, keys and values with groups of heads below one another, where there are some."""
    if builder.plan.context_groups > 1:
        for name in ("q", "k", "v"):
            group_heads(builder, side_by_side(builder, name), builder.slot(name))


def _attend(builder: Builder) -> None:
    """Add the steps from queries, keys and values to the block's output."""
    model = builder.model
    _softmax_forward(builder)
    o = put_side_by_side(builder, "o")
    if not builder.has("y") and not builder.norms_branch:
        builder.add_low("o", o)
        return
    bias = {"bias": "w.o_bias"} if model.o_bias else {}
    if has_plain_branch(builder):
        operands = {"a": o, "b": "w.o_proj", "out": builder.total, **builder.residual, **bias}
        builder.step("gemm", operands, trans_b=True)
        builder.add_adapter("o", o, builder.total)
    else:
        branch = branch_of(builder)
        builder.step("gemm", {"a": o, "b": "w.o_proj", "out": branch, **bias}, trans_b=True)
        builder.add_adapter("o", o, branch)
        add_branch(builder)
    if builder.has("y"):
        builder.pass_input_on()


def _softmax_forward(builder: Builder) -> None:
    """Add the steps from queries, keys and values to the output of the heads."""
    if builder.plan.attends_apart:
        return  # `attend` has done it
    options, o = _sequence_options(builder), builder.slot("o")
    if builder.plan.cp > 1:
        context_forward(builder, attention_options(builder))
    elif isinstance(builder.plan, SlicePlan):
        sliced_forward(builder, builder.plan, attention_options(builder))
    elif builder.plan.attention == "fused":
        operands = {"q": "q", "k": "k", "v": "v", "o": o, "lse": builder.slot("lse"), **builder.documents}
        builder.step("attention_forward", operands, **options)
    else:
        _probabilities(builder)
        builder.step("attention_values_forward", {"probs": "probs", "v": "v", "o": o}, **options)


def _probabilities(builder: Builder) -> None:
    """Add the whole score matrix, and its softmax in the same bytes: a saved slot, else an intermediate."""
    options, matrix = _sequence_options(builder), scores_type(builder.whole, builder.plan)
    if not builder.has("probs"):
        builder.temporary("probs", *matrix.shape)
    builder.step("attention_scores_forward", {"q": "q", "k": "k", "scores": "probs"}, **options)
    operands = {"scores": "probs", "probs": "probs", **builder.documents}
    builder.step("attention_softmax_forward", operands, **options)


def _softmax_backward(builder: Builder) -> None:
    """Add the steps from the gradient `do` of the heads' output to the gradients of queries, keys and values."""
    options = _sequence_options(builder)
    if builder.plan.cp > 1:
        context_backward(builder, attention_options(builder), "do")
        return
    gradients = {name: builder.slot(name) for name in ("dq", "dk", "dv")}
    if isinstance(builder.plan, SlicePlan):
        sliced_backward(builder, builder.plan, attention_options(builder))
        return
    if builder.plan.attention == "fused":
        operands = {name: name for name in ("q", "k", "v", "o", "lse", "do")} | gradients | builder.documents
        operands["delta"] = builder.temporary("delta", builder.model.heads, builder.rows, dtype=Dtype.F32)
        builder.step("attention_backward", operands, **options)
        return
    if not builder.has("probs"):
        _probabilities(builder)
    scores = builder.temporary("dscores", *scores_type(builder.whole, builder.plan).shape)
    operands = {"probs": "probs", "v": "v", "do": "do", "dprobs": scores, "dv": gradients["dv"]}
    builder.step("attention_values_backward", operands, **options)
    operands = {"probs": "probs", "dprobs": scores, "dscores": scores, **builder.documents}
    builder.step("attention_softmax_backward", operands, **options)
    operands = {"q": "q", "k": "k", "dscores": scores, "dq": gradients["dq"], "dk": gradients["dk"]}
    builder.step("attention_scores_backward", operands, **options)


def _attention_backward(builder: Builder) -> None:
    model = builder.model
    above = branch_gradient(builder)
    trains = "o_proj" not in builder.frozen or "o" in builder.firsts
    o = put_side_by_side(builder, "o") if WEIGHT in builder.halves and trains else "o"
    builder.linear_gradients(above, o, "o_proj")
    if model.o_bias:
        builder.bias_gradient(above, "o_bias")
    if INPUT in builder.halves and builder.norms_over_ranks:
        summed_norms_backward(builder)
    elif INPUT in builder.halves:
        if builder.plan.cp > 1:
            _take_head_gradients(builder)
        else:
            _heads_backward(builder, above)
        _rope(builder, "dq", model.heads, inverse=True)
        _rope(builder, "dk", model.kv_heads, inverse=True)
        qk_norms_backward(builder)
    dxn = source_gradient(builder)
    for index, name in enumerate(("q", "k", "v")):
        gradient = f"d{name}_in" if builder.norms_over_ranks and name != "v" else f"d{name}"
        builder.linear_gradients(gradient, block_source(builder), f"{name}_proj")
        if model.qkv_bias:
            builder.bias_gradient(gradient, f"{name}_bias")
        operands = {"a": gradient, "b": f"w.{name}_proj", "out": dxn}
        builder.step_of(INPUT, "gemm", operands, accumulate=index > 0)
        builder.add_adapter_gradient(name, dxn)
    finish_backward(builder)


def _heads_backward(builder: Builder, above: str) -> None:
    """Add the steps from the gradient `above` of the branch to the gradients of normed queries, normed keys, values."""
    _output_gradient(builder, above, builder.temporary("do", builder.rows, builder.model.q_size))
    _softmax_backward(builder)


def _output_gradient(builder: Builder, above: str, do: str) -> None:
    """Add the steps from the gradient `above` of the branch to the gradient `do` of the heads' output."""
    builder.step("gemm", {"a": above, "b": "w.o_proj", "out": do})
    builder.add_adapter_gradient("o", do)


def _take_head_gradients(builder: Builder) -> None:
    """Add copies of the gradients that context ranks have summed, which are then rotated and normed in place."""
    for name in ("dq", "dk", "dv"):
        if builder.plan.context_groups > 1:
            group_heads(builder, f"{name}_out", builder.slot(name), inverse=True)
            continue
        builder.step("cast", {"src": f"{name}_out", "dst": builder.slot(name)})


def _backward_heads(builder: Builder) -> None:
    """Add `_heads_backward`; where norms over tensor-parallel ranks follow, the rotation and the sums they need."""
    above = branch_gradient(builder)
    builder.gradient_through_adapter(above, "o")
    if builder.plan.attends_apart:
        grouped = builder.plan.context_groups > 1
        do = side_by_side(builder, OUTPUT_GRADIENT) if grouped else OUTPUT_GRADIENT
        _output_gradient(builder, above, do)
        if grouped:
            group_heads(builder, do, OUTPUT_GRADIENT)
        return
    _heads_backward(builder, above)
    if builder.plan.cp == 1:
        _rope(builder, "dq", builder.model.heads, inverse=True)
        _rope(builder, "dk", builder.model.kv_heads, inverse=True)
        sums_of_products(builder)


_AROUND_SUMS = {
    "project": _project,
    "backward_heads": _backward_heads,
    "attend": _attend_with_part,
    "attend_backward": _attend_with_part_backward,
}
"""Ops around exchanges of tensor-parallel or context ranks that attention waits for."""


def _head_norm(builder: Builder) -> None:
    builder.temporary("xn", builder.rows, builder.model.hidden_size)
    for statistic in statistics(builder.model):
        builder.temporary(statistic, builder.rows, dtype=Dtype.F32)
    norm_steps(builder, of_input(builder))


def _head_options(builder: Builder) -> dict[str, Any]:
    """Return the options of the head's kernels that come from the model; default ones are left out."""
    model = builder.model
    softcap = {} if model.logit_softcap is None else {"softcap": model.logit_softcap}
    scale = {} if model.logit_scale == 1 else {"scale_of_logits": model.logit_scale}
    return {"normalise": model.normalised_head, **scale, **softcap}


def _head_logits(builder: Builder, name: str) -> str:
    """Return an f32 matrix of the logits, or of their gradient, for the rows that the head computes at a time."""
    rows = builder.rows if builder.plan.holds_logits else min(builder.plan.head_chunk, builder.rows)
    return name if builder.has(name) else builder.temporary(name, rows, builder.model.vocab_size, dtype=Dtype.F32)


def _head_forward(builder: Builder) -> None:
    _head_norm(builder)
    operands = {"xn": "xn", "table": "w.table"} | {name: name for name in ("labels", "lse", "loss")}
    operands["logits"] = _head_logits(builder, "logits")
    options = {**_head_options(builder), "accumulate": builder.accumulates}
    builder.step("head_forward", operands, **options)


def _head_backward(builder: Builder) -> None:
    _head_norm(builder)
    operands = {name: name for name in ("xn", "labels", "lse", "scale")}
    operands["logits"] = _head_logits(builder, "logits")
    operands |= {"table": "w.table", "dxn": builder.temporary("dxn", builder.rows, builder.model.hidden_size)}
    operands["dtable"] = "g.table"
    options = {**_head_options(builder), "accumulate": builder.accumulates}
    # The labels of a step on one replica: the mean over replicas is taken where they meet (engine/collectives.py).
    # Context ranks' gradients are summed, so each divides by the labels of all of them.
    denominator = float(builder.plan.micro_batches * builder.plan.cp * tokens_per_micro_batch(builder.plan.whole))
    if builder.plan.holds_logits:
        operands["dlogits"] = _head_logits(builder, "dlogits")
    kernel = "head_backward_from_logits" if builder.plan.holds_logits else "head_backward"
    builder.step(kernel, operands, denominator=denominator, **options)
    head_norm_backward(builder)

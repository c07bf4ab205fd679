"""Slots and types: the tensors that a block's forward saves, those between ops of a block, and types between blocks.

Only this file knows the slots that a forward saves for its backward. Targets add none. Types are of one tensor-parallel
rank's part, and of a micro-batch or, with the plan of a slice, of that slice.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

from attrs import frozen

from ratrain.ratrain_ir.config.tensor_ranks import adds_branches_apart, copies_of_keys, norms_over_ranks, rank_model
from ratrain.ratrain_ir.config.types import Dtype, TensorType, tensor_type
from ratrain.ratrain_ir.model.adapters import FIRST, is_stack
from ratrain.ratrain_ir.model.blocks import Block, has_backward, has_experts, parameters, trained_parameters
from ratrain.ratrain_ir.model.context_rows import held_runs
from ratrain.ratrain_ir.model.expert_blocks import expert_rows, expert_slots, pending_expert_slots
from ratrain.ratrain_ir.model.expert_ranks import shares_experts
from ratrain.ratrain_ir.model.micro_batch import tokens_per_micro_batch
from ratrain.ratrain_ir.model.slice_plan import SlicePlan, slice_plan

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan


@frozen
class Slot:
    """One tensor that a block's forward saves for its backward."""

    name: str
    type: TensorType


@cache
def saved_slots(model: ModelConfig, plan: Plan, block: Block) -> tuple[Slot, ...]:
    """Return the tensors that the backward of a block reads in addition to its input, in the order that ops list them.

    With tensor parallelism shapes are of one rank's part. A block without a backward saves only what later slices read.
    """
    slots = forward_slots(model, plan, block)
    if not plan.training:
        return slots
    if not has_backward(model, plan, block):
        return tuple(slot for slot in slots if slot.name in kept_in_forward(model, plan, block))
    unread = _unread_slots(model, plan, block)
    return tuple(slot for slot in slots if slot.name not in unread)


_INPUTS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "attention": {"xn": ("q", "k", "v")},
    "mlp": {"xn": ("gate", "up"), "prod": ("down",), "act": ("down",)},
    "experts": {"prod": ("down_experts",), "shared_prod": ("shared_down",)},
}
"""Slots that only weight gradients read: the inputs of linear layers, with these layers.

With experts the normed input is read for the router's logits, through which the input's gradient goes."""


def _unread_slots(model: ModelConfig, plan: Plan, block: Block) -> list[str]:
    """Return the slots that no gradient reads, as no weight or adapter of their linear layers trains."""
    kind = "experts" if has_experts(model, block) else block.kind
    model = rank_model(model, plan)
    trained = {parameter.weight for parameter in trained_parameters(model, block)}
    read = {weight.rpartition("_lora_")[0] or weight.removesuffix("_proj") for weight in trained}
    return [slot for slot, of in _INPUTS.get(kind, {}).items() if read.isdisjoint(of)]


@cache
def forward_slots(model: ModelConfig, plan: Plan, block: Block) -> tuple[Slot, ...]:
    """Return the tensors that a forward may save if everything trains, and products of adapters' first matrices."""
    whole, model = model, rank_model(model, plan)
    rows = tokens_per_micro_batch(plan)
    branch = () if adds_branches_apart(model, plan) else branch_slots(model, plan)
    if block.kind == "attention":
        widths = {"q": model.q_size, "k": model.kv_size, "v": model.kv_size, "o": model.q_size}
        if plan.exchanges_heads:  # `project` leaves the others for an exchange alone
            widths = {"o": model.q_size}
        first = (*projected_slots(whole, plan, block), *row_sum_slots(whole, plan, block, SQUARES))
        if first:  # `first` has `v` already
            del widths["v"]
        return (
            *_normed_slots(model, plan),
            *(first or _projected_slots(model, plan)),
            *(Slot(name, heads_type(plan, width)) for name, width in widths.items()),
            *(() if plan.exchanges_heads else _softmax_slots(whole, plan)),
            *_low_slots(model, plan, block),
            *branch,
            *_statistics_slots(model, plan, "") * model.has_pre_norm,
        )
    if block.kind == "mlp":
        return (
            *_normed_slots(model, plan),
            *_mlp_slots(model, plan, block),
            *_low_slots(model, plan, block),
            *branch,
            *_statistics_slots(model, plan, "") * model.has_pre_norm,
        )
    if block.kind == "head":
        lse = Slot("lse", tensor_type(Dtype.F32, (rows,)))
        logits = Slot("logits", tensor_type(Dtype.F32, (rows, model.vocab_size)))
        return (lse, logits) if plan.holds_logits else (lse,)
    return ()


def _low_slots(model: ModelConfig, plan: Plan, block: Block) -> tuple[Slot, ...]:
    """Return the slots of a block's adapters: scale * x A^T of each, [tokens, rank]; of stacks a row a choice."""
    firsts = [each for each in parameters(model, block) if each.weight.endswith(FIRST)]
    stems = [each.weight.removesuffix(FIRST) for each in firsts]
    rows = [expert_rows(model, plan) if is_stack(stem) else tokens_per_micro_batch(plan) for stem in stems]
    sizes = [(count, each.shape[-2]) for count, each in zip(rows, firsts, strict=True)]
    types = [tensor_type(Dtype(plan.view_dtype), size) for size in sizes]
    return tuple(Slot(f"{stem}_low", type_) for stem, type_ in zip(stems, types, strict=True))


def _mlp_slots(model: ModelConfig, plan: Plan, block: Block) -> tuple[Slot, ...]:
    """Return what an mlp saves between its norm and its branch: inputs of products; with experts also their choice."""
    if has_experts(model, block):
        return tuple(Slot(*slot) for slot in expert_slots(model, plan))
    wide = tensor_type(Dtype(plan.view_dtype), (tokens_per_micro_batch(plan), model.ffn_size))
    return tuple(Slot(name, wide) for name in (("gate", "up", "prod") if model.gated_mlp else ("up", "act")))


def _normed_slots(model: ModelConfig, plan: Plan) -> tuple[Slot, ...]:
    """Return the slot of the normed input."""
    return (Slot("xn", stream_type(model, plan)),) if model.has_pre_norm else ()


def _statistics_slots(model: ModelConfig, plan: Plan, of: str, rows: int | None = None) -> tuple[Slot, ...]:
    """Return the slots of a norm's statistics, one f32 per row.

    `of` is the prefix of their names, empty for the norm of the input. `rows` defaults to the micro-batch's.
    """
    line = tensor_type(Dtype.F32, (rows or tokens_per_micro_batch(plan),))
    names = ("mean", "rstd") if model.has_layer_norm else ("rstd",)
    return tuple(Slot(f"{of}{name}", line) for name in names)


def _projected_slots(model: ModelConfig, plan: Plan) -> tuple[Slot, ...]:
    """Return the slots of queries and keys before their norm, and of its statistics."""
    if model.qk_norm == "none":
        return ()
    rows, slots = tokens_per_micro_batch(plan), []
    for name, heads in (("q", model.heads), ("k", model.kv_heads)):
        slots.append(Slot(f"{name}_in", tensor_type(Dtype(plan.view_dtype), (rows, heads * model.head_dim))))
        normed = rows * (heads if model.qk_norm == "head" else 1)
        slots.append(Slot(f"{name}_rstd", tensor_type(Dtype.F32, (normed,))))
    return tuple(slots)


SQUARES, PRODUCTS = "squares", "products"
"""Names of the row sums that norms of queries and keys take over tensor-parallel ranks: in the forward the squares
of the norm's input, in the backward the products of that input with the gradient of the output."""


def projected_slots(model: ModelConfig, plan: Plan, block: Block) -> tuple[Slot, ...]:
    """Return queries, keys and values before a norm that sums over tensor-parallel ranks; else nothing.

    A separate op makes them. They come first among the saved slots.
    """
    if block.kind != "attention" or not norms_over_ranks(model, plan):
        return ()
    peer = rank_model(model, plan)
    rows, act = tokens_per_micro_batch(plan), Dtype(plan.view_dtype)
    widths = {"q_in": peer.q_size, "k_in": peer.kv_size, "v": peer.kv_size}
    return tuple(Slot(name, tensor_type(act, (rows, width))) for name, width in widths.items())


KEY_SLOTS = ("k", "v")
"""Saved slots of an attention that later slices of its micro-batch read."""

KEY_GRADIENTS = ("dk_out", "dv_out")
"""Gradients of a context rank's keys and values, summed over ranks, in the order of `KEY_SLOTS`."""

WHOLE_KEYS = ("keys", "values")
"""Keys and values of all context ranks, in rank order."""

ATTENDED = ("o", "lse")
"""Saved slots that ops of their own make where they attend (`Plan.attends_apart`); `lse` with groups of heads."""

_BEHIND_KEYS = (*ATTENDED, "probs", "o_low", "branch", "branch_mean", "branch_rstd")
"""Slots of an attention that a forward makes from keys of all context ranks; `project` makes the others before it."""


_BEFORE_LOWS = ("xn", "q_in", "q_rstd", "k_in", "k_rstd", "q", *KEY_SLOTS, "o", "lse")
_BEHIND_LOWS = ("branch", "branch_mean", "branch_rstd", "mean", "rstd")


def place_in_attention(name: str) -> int:
    """Return the place of a saved slot in an attention's signatures, where no norm is over ranks; equal for adapters.

    Products of adapters (`..._low`) stand together, in the order in which they are made.
    """
    if name.endswith("_low"):
        return len(_BEFORE_LOWS)
    return _BEFORE_LOWS.index(name) if name in _BEFORE_LOWS else len(_BEFORE_LOWS) + 1 + _BEHIND_LOWS.index(name)


def made_by_project(model: ModelConfig, plan: Plan, block: Block) -> tuple[Slot, ...]:
    """Return what `project` makes before context ranks exchange: queries, keys, values, then earlier saved slots.

    Nothing for other blocks, and without context ranks.
    """
    if block.kind != "attention" or plan.cp == 1:
        return ()
    own = rank_model(model, plan)
    widths = {"q": own.q_size, "k": own.kv_size, "v": own.kv_size}
    first = [Slot(name, heads_type(plan, width)) for name, width in widths.items()]
    saved = [slot for slot in saved_slots(model, plan, block) if slot.name not in (*_BEHIND_KEYS, *widths)]
    return (*first, *saved)


def heads_type(plan: Plan, width: int) -> TensorType:
    """Return the type of what all heads of a rank have of its tokens; groups of heads lie one below the other."""
    groups = plan.context_groups
    return tensor_type(Dtype(plan.view_dtype), (groups * tokens_per_micro_batch(plan), width // groups))


def whole_key_slots(model: ModelConfig, plan: Plan, block: Block) -> tuple[Slot, ...]:
    """Return the slots of gathered keys and values, as `held_runs` orders them; nothing unless ranks gather them.

    With groups of heads they are of one group.
    """
    if block.kind != "attention" or not plan.exchanges_keys:
        return ()
    assert block.layer is not None
    width = rank_model(model, plan).kv_size // plan.context_groups
    held = len(held_runs(plan, model.layer_kind(block.layer).window, 0))
    rows = held * tokens_per_micro_batch(plan) // plan.context_runs
    return tuple(Slot(name, tensor_type(Dtype(plan.view_dtype), (rows, width))) for name in WHOLE_KEYS)


def key_part_types(model: ModelConfig, plan: Plan, block: Block) -> dict[str, TensorType]:
    """Return the types of a context rank's parts of the gradients of all keys and values, f32, by role."""
    slots = whole_key_slots(model, plan, block)
    return {f"d{slot.name}": tensor_type(Dtype.F32, slot.type.shape) for slot in slots}


def head_gradient_slots(model: ModelConfig, plan: Plan, block: Block) -> tuple[Slot, ...]:
    """Return the slots of the gradients of queries, keys and values, as they enter the softmax; for context ranks.

    `backward_heads` makes that of queries, `reduce_keys` the others; or `return_heads` all of them.
    """
    made = made_by_project(model, plan, block)
    return tuple(Slot(name, slot.type) for name, slot in zip(("dq_out", *KEY_GRADIENTS), made, strict=False))


HEADS = ("q_heads", "k_heads", "v_heads")
"""Queries, keys and values of all tokens, of a context rank's share of the heads, in the order of `q`, `k` and `v`."""

STARTS = "starts"
"""Starts of documents of all tokens of a micro-batch, in the order of positions."""

OUTPUT_GRADIENT = "do_out"
"""Gradient of the heads' output, which `backward_heads` leaves for an exchange of heads."""

SHARED_BY_OWN = {
    **dict(zip(("q", *KEY_SLOTS), HEADS, strict=True)),
    "documents": STARTS,
    "o": "o_heads",
    OUTPUT_GRADIENT: "do_heads",
    **{name: f"d{shared}" for name, shared in zip(("dq_out", *KEY_GRADIENTS), HEADS, strict=True)},
}
"""Tensors of all tokens of a share of the heads, by those of a rank's tokens of all heads with which they exchange."""


def shared_head_slots(model: ModelConfig, plan: Plan, block: Block) -> tuple[Slot, ...]:
    """Return what `gather_heads` makes for attention: queries, keys, values, and starts of documents if it reads them.

    Rows are those of a whole micro-batch, one sequence after the other. Nothing unless context ranks exchange heads.
    """
    if block.kind != "attention" or not plan.exchanges_heads:
        return ()
    widths, rows = _shared_widths(model, plan), plan.cp * tokens_per_micro_batch(plan)
    of = {name: tensor_type(Dtype(plan.view_dtype), (rows, widths[name])) for name in HEADS}
    if reads_documents(model, plan, block):
        of[STARTS] = tensor_type(Dtype.I32, (rows,))
    return tuple(Slot(name, type_) for name, type_ in of.items())


def attended_slots(model: ModelConfig, plan: Plan, block: Block) -> tuple[Slot, ...]:
    """Return what `attend` makes of them: the output of the rank's heads, and its log-sum-exp of each query."""
    if block.kind != "attention" or not plan.exchanges_heads:
        return ()
    width, rows = _shared_widths(model, plan)["q_heads"], plan.cp * tokens_per_micro_batch(plan)
    output = Slot("o_heads", tensor_type(Dtype(plan.view_dtype), (rows, width)))
    heads = rank_model(model, plan).heads // plan.cp
    return output, Slot("lse_heads", tensor_type(Dtype.F32, (heads, rows)))


def output_gradient_slots(model: ModelConfig, plan: Plan, block: Block) -> tuple[Slot, ...]:
    """Return the gradient of the heads' output, of own tokens and all heads, then of all tokens and own heads.

    The latter where context ranks exchange heads; nothing where `forward` attends.
    """
    if block.kind != "attention" or not plan.attends_apart:
        return ()
    (own,) = (slot for slot in forward_slots(model, plan, block) if slot.name == "o")
    shared = [Slot("do_heads", slot.type) for slot in attended_slots(model, plan, block)[:1]]
    return Slot(OUTPUT_GRADIENT, own.type), *shared


def shared_gradient_slots(model: ModelConfig, plan: Plan, block: Block) -> tuple[Slot, ...]:
    """Return the gradients of `HEADS`, which `attend_backward` makes."""
    slots = shared_head_slots(model, plan, block)
    return tuple(Slot(f"d{slot.name}", slot.type) for slot in slots if slot.name in HEADS)


def _shared_widths(model: ModelConfig, plan: Plan) -> dict[str, int]:
    own = rank_model(model, plan)
    keys = own.kv_size * copies_of_keys(own, plan.cp) // plan.cp
    return dict(zip(HEADS, (own.q_size // plan.cp, keys, keys), strict=True))


def row_sum_slots(model: ModelConfig, plan: Plan, block: Block, name: str) -> tuple[Slot, ...]:
    """Return the slot of these norms' sums over all ranks: one sum per row of queries, then one per row of keys."""
    if block.kind != "attention" or not norms_over_ranks(model, plan):
        return ()
    return (Slot(name, row_sums_type(plan)),)


def row_sums_type(plan: Plan) -> TensorType:
    """Return the type of these norms' row sums: f32 [2 * tokens], queries first, then keys."""
    return tensor_type(Dtype.F32, (2 * tokens_per_micro_batch(plan),))


def normed_gradient_slots(model: ModelConfig, plan: Plan, block: Block) -> tuple[Slot, ...]:
    """Return the slots of the gradients of normed queries, normed keys and values, before these norms' backward."""
    of = {"q_in": "dq", "k_in": "dk", "v": "dv"}
    return tuple(Slot(of[slot.name], slot.type) for slot in projected_slots(model, plan, block))


def branch_slots(model: ModelConfig, plan: Plan) -> tuple[Slot, ...]:
    """Return the slots of a block's output before its post-norm, and of that norm's statistics; else nothing.

    They have the rows that a rank holds between blocks.
    """
    if not model.has_post_norm:
        return ()
    type_ = exchanged_type(model, plan)
    return (Slot("branch", type_), *_statistics_slots(model, plan, "branch_", type_.shape[0]))


def scores_type(model: ModelConfig, plan: Plan) -> TensorType:
    """Return the type of an attention's scores [heads * tokens, seq_len]: each query of each head with each key."""
    heads = rank_model(model, plan).heads
    return tensor_type(Dtype(plan.view_dtype), (heads * tokens_per_micro_batch(plan), plan.seq_len))


def _softmax_slots(model: ModelConfig, plan: Plan) -> tuple[Slot, ...]:
    """Return what attention saves of its softmax: the log-sum-exp of each query, all probabilities, or nothing."""
    if plan.attention == "fused":
        # a context rank's runs one after the other, as kernels work on one at a time
        heads, runs = rank_model(model, plan).heads, plan.context_runs
        return (Slot("lse", tensor_type(Dtype.F32, (runs * heads, tokens_per_micro_batch(plan) // runs))),)
    return (Slot("probs", scores_type(model, plan)),) if plan.attention == "scores-kept" else ()


SPLIT_KINDS = ("attention", "mlp")
"""Kinds of blocks whose backward can be split. The embedding's backward is all weight gradient; the head works in
chunks of rows, so its backward stays whole."""

_NORMS = ("mean", "rstd", "branch", "branch_mean", "branch_rstd")
_CHOICE = ("xn", "chosen", "weights")
_SHARED = ("shared_gate", "shared_up", "shared_weights")
INPUT_HALF_SLOTS = {
    "attention": ("q_in", "q_rstd", "k_in", "k_rstd", SQUARES, "q", "k", "v", "o", "lse", "probs", *_NORMS),
    "mlp": ("gate", "up", *_CHOICE, *_SHARED, *_NORMS),
}
"""Saved slots that the input half of a split backward reads, if the model and the plan have them."""

_OF_HEADS = ("q", "k", "lse", "probs", "v")
HEADS_SLOTS = {"attention": ("q_in", "k_in", "o", *_OF_HEADS)}
"""Saved slots that the backward reads before norms of queries and keys that sum over tensor-parallel ranks."""

WEIGHT_HALF_SLOTS = {"attention": ("xn", "o"), "mlp": ("xn", "prod", "act", "chosen", "shared_prod")}
"""Saved slots that the weight half of a split backward reads, if the model has them."""


def half_slots(model: ModelConfig, plan: Plan, block: Block, read: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return the names of a block's slots that a half of its split backward reads; `read` is a table above."""
    names = [slot.name for slot in saved_slots(model, plan, block)]
    if plan.cp > 1 and block.kind == "attention":
        return _half_slots_behind_keys(plan, names, read)
    through_heads = read is HEADS_SLOTS or (read is INPUT_HALF_SLOTS and not projected_slots(model, plan, block))
    if through_heads and plan.attention != "fused" and "o" in names:
        # The softmax gradient subtracts each row's mean of the probabilities' gradient. Whole probabilities give it
        # directly; fused attention computes it from its output `o`.
        names.remove("o")
    if read is INPUT_HALF_SLOTS and block.kind == "mlp" and not has_experts(model, block) and "xn" in names:
        names.remove("xn")  # only a router's gradient is computed from its input again
    if read is INPUT_HALF_SLOTS and not through_heads:
        names = [name for name in names if name in ("q_in", "k_in", SQUARES)]
    return tuple(name for name in names if name in read[block.kind])


def _half_slots_behind_keys(plan: Plan, names: list[str], read: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return a half's slots where `backward_heads` has done the part through the scores, for context ranks.

    That op reads keys and values of all ranks instead of its own; or where others attend, nothing of the heads.
    """
    without = ("o_low", "q", *ATTENDED) if plan.attends_apart else ("o_low",)
    if read is HEADS_SLOTS:
        return tuple(name for name in names if name in ("q", *_BEHIND_KEYS) and name not in without)
    through = ("q", *KEY_SLOTS, "lse") + (("o",) if read is INPUT_HALF_SLOTS else ())
    return tuple(name for name in names if name in read["attention"] and name not in through)


def slots_behind_heads(model: ModelConfig, plan: Plan, block: Block) -> tuple[str, ...]:
    """Return the names of a block's slots that a whole backward reads behind `backward_heads`."""
    names = [slot.name for slot in saved_slots(model, plan, block)]
    if plan.cp > 1:
        return tuple(name for name in names if name not in ("q", *KEY_SLOTS, "lse"))
    halves = (INPUT_HALF_SLOTS, WEIGHT_HALF_SLOTS)
    read = {name for half in halves for name in half_slots(model, plan, block, half)}
    return tuple(name for name in names if name in read)


@cache
def pending_slots(model: ModelConfig, plan: Plan, block: Block) -> tuple[Slot, ...]:
    """Return the slots that the input half of a split backward leaves for the weight half, in the order of operands.

    They are the gradients of the outputs of the block's matrix products, and the gradients of norm weights and biases
    as exact f32 sums. These are rounded once, when they are added to the gradient, as in a whole backward.
    """
    over_peers = norms_over_ranks(model, plan)
    whole, model = model, rank_model(model, plan)
    rows = tokens_per_micro_batch(plan)
    act = Dtype(plan.view_dtype)
    if block.kind == "attention" and over_peers:
        widths = {"dq_in": model.q_size, "dk_in": model.kv_size}
    elif block.kind == "attention":
        widths = {"dq": model.q_size, "dk": model.kv_size, "dv": model.kv_size}
    elif has_experts(model, block):
        return (*(Slot(*slot) for slot in pending_expert_slots(model, plan)), *_pending_norm_slots(whole, plan, block))
    elif block.kind == "mlp":
        widths = dict.fromkeys(("dgate", "dup") if model.gated_mlp else ("dup",), model.ffn_size)
    else:
        return ()
    products = [Slot(name, tensor_type(act, (rows, width))) for name, width in widths.items()]
    return (*products, *_pending_norm_slots(whole, plan, block))


def _pending_norm_slots(model: ModelConfig, plan: Plan, block: Block) -> list[Slot]:
    """Return the gradient of a normed branch, and the sums of the gradients of norms that the block itself leaves."""
    apart, model = adds_branches_apart(model, plan), rank_model(model, plan)
    branch = [Slot("dbranch", stream_type(model, plan))] if model.has_post_norm and not apart else []
    left = branch_sums(model, plan, block)
    return [*branch, *(slot for slot in _sum_slots(model, block) if slot not in left)]


def branch_sums(model: ModelConfig, plan: Plan, block: Block) -> tuple[Slot, ...]:
    """Return the gradient sums of a block's post-norm that a separate op leaves for its backward; else nothing."""
    if block.kind not in SPLIT_KINDS or not adds_branches_apart(model, plan):
        return ()
    return tuple(slot for slot in _sum_slots(model, block) if slot.name.startswith("dpost_"))


def _sum_slots(model: ModelConfig, block: Block) -> tuple[Slot, ...]:
    return tuple(Slot(name, tensor_type(Dtype.F32, (width,))) for name, _, width in norm_sums(model, block))


def norm_sums(model: ModelConfig, block: Block) -> tuple[tuple[str, str, int], ...]:
    """Return (name of the gradient sum, parameter's short name, elements) for each norm parameter of a block."""
    hidden, sums = model.hidden_size, []
    for of in ("",) * model.has_pre_norm + ("post_",) * model.has_post_norm:
        sums.append((f"d{of}gamma", f"{of}norm", hidden))
        sums += [(f"d{of}beta", f"{of}norm_bias", hidden)] * model.has_layer_norm
    if block.kind == "attention" and model.qk_norm != "none":
        widths = {"q": model.q_size, "k": model.kv_size}
        for name, width in widths.items():
            sums.append((f"d{name}_gamma", f"{name}_norm", model.head_dim if model.qk_norm == "head" else width))
    return tuple(sums)


SUM_SLOTS = ("dk_sum", "dv_sum")
"""Sums in which later slices collect the gradients of a slice's keys and values, one for each of `KEY_SLOTS`."""


def seen_slices(model: ModelConfig, plan: Plan) -> tuple[int, ...]:
    """Return the earlier slices, ascending, with keys that this slice's queries see; `plan` is the slice's plan.

    A sliding window may hide the first ones. Empty if `plan` is of whole micro-batches.
    """
    if not isinstance(plan, SlicePlan):
        return ()
    window = model.widest_window
    first_seen = 0 if window is None else max(0, plan.first_position - window + 1)
    starts = [slice_plan(plan.parent, index).first_position for index in range(plan.index + 1)]
    return tuple(index for index in range(plan.index) if starts[index + 1] > first_seen)


@cache
def last_viewer(model: ModelConfig, plan: Plan) -> int | None:
    """Return the last later slice that sees some keys of this slice; None if there is none.

    `plan` is the slice's plan.
    """
    if not isinstance(plan, SlicePlan):
        return None
    later = range(len(plan.parent.slices) - 1, plan.index, -1)
    return next((each for each in later if plan.index in seen_slices(model, slice_plan(plan.parent, each))), None)


def begins_key_gradients(model: ModelConfig, plan: Plan, owner: Plan) -> bool:
    """Tell whether the slice of `plan` is the first to add to the gradients of the keys of the slice of `owner`.

    It is the last one that sees them, as slices go backward in descending order; their own slice if no other does.
    """
    last = last_viewer(model, owner)
    return plan == owner if last is None else isinstance(plan, SlicePlan) and plan.index == last


def sum_slots(model: ModelConfig, plan: Plan, block: Block) -> tuple[Slot, ...]:
    """Return the sums that later slices leave for an attention's backward, f32 [tokens, key-value width] each.

    `plan` is the slice's plan. Nothing if no later slice sees this one's keys, and for context ranks, where they add to
    the parts that `reduce_keys` sums.
    """
    if block.kind != "attention" or plan.cp > 1 or last_viewer(model, plan) is None:
        return ()
    width = rank_model(model, plan).kv_heads * model.head_dim
    type_ = tensor_type(Dtype.F32, (tokens_per_micro_batch(plan), width))
    return tuple(Slot(name, type_) for name in SUM_SLOTS)


def kept_in_forward(model: ModelConfig, plan: Plan, block: Block) -> tuple[str, ...]:
    """Return the saved slots that a forward must keep, whatever is recomputed.

    These are keys and values that later slices see (`plan` is the slice's plan), or that context ranks gather; the
    heads' output, and what comes with it, where ops of their own attend; all of an mlp whose experts replicas share
    out; and sums over tensor-parallel ranks.
    """
    if shares_experts(model, plan, block):
        return tuple(slot.name for slot in saved_slots(model, plan, block))
    if block.kind == "attention" and plan.cp > 1:
        return (*KEY_SLOTS, *ATTENDED * plan.attends_apart) if plan.exchanges_keys else ("o",)
    sums = tuple(slot.name for slot in row_sum_slots(model, plan, block, SQUARES))
    return (*KEY_SLOTS, *sums) if block.kind == "attention" and last_viewer(model, plan) is not None else sums


def reads_documents(model: ModelConfig, plan: Plan, block: Block) -> bool:
    """Tell whether a block reads where documents start: attention, and an embedding with learned positions.

    Only if the plan keeps documents apart.
    """
    of_positions = block.kind == "embed" and model.learned_positions is not None
    return plan.keeps_documents_apart and (of_positions or block.kind == "attention")


def stream_type(model: ModelConfig, plan: Plan) -> TensorType:
    """Return the type of the residual stream inside blocks: [tokens of a micro-batch, hidden]."""
    return tensor_type(Dtype(plan.view_dtype), (tokens_per_micro_batch(plan), model.hidden_size))


def shares_rows(plan: Plan) -> bool:
    """Tell whether tensor-parallel ranks each hold a run of the stream's rows between blocks (sequence sharding)."""
    return plan.tp > 1 and plan.sequence_sharding


def exchanged_type(model: ModelConfig, plan: Plan) -> TensorType:
    """Return the type of the residual stream between blocks and in messages: all rows, or this rank's if sharded."""
    rows = tokens_per_micro_batch(plan)
    return tensor_type(Dtype(plan.view_dtype), (rows // plan.tp if shares_rows(plan) else rows, model.hidden_size))


def takes_pair(model: ModelConfig, plan: Plan, block: Block) -> bool:
    """Tell whether a block is a parallel mlp without tensor parallelism, whose input is two stacked tensors (a pair).

    The upper half is the input of the layer, from which the mlp is computed. The lower half is that input plus
    attention's output, to which the mlp adds. In the gradient the upper half is that of the layer's input along all
    paths except through attention; the lower half is that of attention's output. Tensor-parallel ranks need no pair
    (`tensor_blocks.is_parallel_mlp`).
    """
    return plan.tp == 1 and model.parallel_residual and block.kind == "mlp"


def activation_type(model: ModelConfig, plan: Plan, block: Block) -> TensorType:
    """Return the type of a block's input, or of its gradient, between blocks: the stream, or a pair (`takes_pair`)."""
    return _or_pair(model, plan, block, exchanged_type(model, plan))


def computed_type(model: ModelConfig, plan: Plan, block: Block) -> TensorType:
    """Return the type of a block's input, or of its gradient, inside the block: with all its rows."""
    return _or_pair(model, plan, block, stream_type(model, plan))


def _or_pair(model: ModelConfig, plan: Plan, block: Block, stream: TensorType) -> TensorType:
    rows, hidden = stream.shape
    return tensor_type(stream.dtype, (2 * rows, hidden)) if takes_pair(model, plan, block) else stream


def token_type(plan: Plan) -> TensorType:
    """Return the type of a micro-batch's tokens, labels or document starts: one i32 per row."""
    return tensor_type(Dtype.I32, (tokens_per_micro_batch(plan),))

"""Blocks: the units a model is scheduled in, with their parameters and what their backward needs.

A model is the chain `embed, attention.0, mlp.0, ..., attention.L-1, mlp.L-1, head`. This file is the only place that knows
the parameter layout of a block (used for Hugging Face names and for the decay exemption of norms and biases) and the slots
its forward saves. Targets add none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from math import prod
from typing import TYPE_CHECKING

from attrs import field, frozen

from ratrain.ratrain_ir.frontend.plan import SlicePlan, slice_plan
from ratrain.ratrain_ir.types import Dtype, TensorType, tensor_type

if TYPE_CHECKING:
    from ratrain.ratrain_ir.frontend.model_config import ModelConfig
    from ratrain.ratrain_ir.frontend.plan import Plan

PARAMETER_ALIGNMENT = 64
"""Elements: parameters start at multiples of this inside a block's flat tensor; shards are multiples of it too."""

BLOCK_KINDS = ("embed", "attention", "mlp", "head")


@frozen(cache_hash=True)
class Block:
    """One block of the chain; `layer` is None for `embed` and `head`. Make one through `block` only."""

    kind: str
    layer: int | None
    _text: str = field(init=False, eq=False, repr=False)

    @_text.default
    def _written(self) -> str:
        return self.kind if self.layer is None else f"{self.kind}.{self.layer}"

    def __str__(self) -> str:
        return self._text


@cache
def block(kind: str, layer: int | None = None) -> Block:
    """The one object of this block, so that blocks compare with `is`."""
    return Block(kind, layer)


def parse_block(text: str) -> Block | None:
    """The block a text names (`embed`, `attention.3`), or None."""
    kind, _, layer = text.partition(".")
    if kind in ("embed", "head"):
        return block(kind) if not layer else None
    if (
        kind in ("attention", "mlp")
        and layer.isascii()
        and layer.isdigit()
        and len(layer) < 10
        and str(int(layer)) == layer
    ):
        return block(kind, int(layer))
    return None


@cache
def block_chain(model: ModelConfig) -> tuple[Block, ...]:
    """All blocks of the model in forward order."""
    layers = [block(kind, layer) for layer in range(model.layers) for kind in ("attention", "mlp")]
    return (block("embed"), *layers, block("head"))


def next_block(model: ModelConfig, previous: Block) -> Block:
    """The block after one in forward order."""
    if previous.kind == "embed":
        return block("attention", 0)
    if previous.kind == "attention":
        return block("mlp", previous.layer)
    assert previous.layer is not None
    return block("attention", previous.layer + 1) if previous.layer + 1 < model.layers else block("head")


@frozen
class Parameter:
    """One parameter of a block: its name in the Hugging Face layout, shape, place in the flat tensor, decay."""

    name: str
    weight: str
    """short name, as kernels call it"""
    shape: tuple[int, ...]
    offset: int
    decayed: bool

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)


def _named_parameters(model: ModelConfig, block: Block) -> list[tuple[str, str, tuple[int, ...], bool]]:
    if model.is_gpt2:
        return _gpt2_parameters(model, block)
    hidden, ffn, vocab = model.hidden_size, model.ffn_size, model.vocab_size
    q_width, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
    prefix = f"model.layers.{block.layer}"
    if block.kind == "embed":
        return [("model.embed_tokens.weight", "table", (vocab, hidden), True)]
    if block.kind == "head":
        name = "model.embed_tokens.weight" if model.tied_embeddings else "lm_head.weight"
        return [(name, "table", (vocab, hidden), True), ("model.norm.weight", "norm", (hidden,), False)]
    if block.kind == "mlp":
        return [
            (f"{prefix}.post_attention_layernorm.weight", "norm", (hidden,), False),
            (f"{prefix}.mlp.gate_proj.weight", "gate_proj", (ffn, hidden), True),
            (f"{prefix}.mlp.up_proj.weight", "up_proj", (ffn, hidden), True),
            (f"{prefix}.mlp.down_proj.weight", "down_proj", (hidden, ffn), True),
        ]
    widths = {"q": q_width, "k": kv_width, "v": kv_width}
    named: list[tuple[str, str, tuple[int, ...], bool]] = [
        (f"{prefix}.input_layernorm.weight", "norm", (hidden,), False)
    ]
    for name, width in widths.items():
        named.append((f"{prefix}.self_attn.{name}_proj.weight", f"{name}_proj", (width, hidden), True))
        if model.qkv_bias:
            named.append((f"{prefix}.self_attn.{name}_proj.bias", f"{name}_bias", (width,), False))
    named.append((f"{prefix}.self_attn.o_proj.weight", "o_proj", (hidden, q_width), True))
    return named


def _gpt2_parameters(model: ModelConfig, block: Block) -> list[tuple[str, str, tuple[int, ...], bool]]:
    """Those of GPT-2; matrices are [outputs, inputs] here, and query, key and value apart, as in every family."""
    hidden, ffn, table = model.hidden_size, model.ffn_size, (model.vocab_size, model.hidden_size)
    if block.kind == "embed":
        assert model.learned_positions is not None
        positions = (model.learned_positions, hidden)
        return [
            ("transformer.wte.weight", "table", table, True),
            ("transformer.wpe.weight", "positions", positions, True),
        ]

    def norm(name: str) -> list[tuple[str, str, tuple[int, ...], bool]]:
        return [(f"{name}.weight", "norm", (hidden,), False), (f"{name}.bias", "norm_bias", (hidden,), False)]

    def linear(name: str, weight: str, outputs: int, inputs: int) -> list[tuple[str, str, tuple[int, ...], bool]]:
        return [
            (f"{name}.weight", f"{weight}_proj", (outputs, inputs), True),
            (f"{name}.bias", f"{weight}_bias", (outputs,), False),
        ]

    prefix = f"transformer.h.{block.layer}"
    if block.kind == "head":
        name = "transformer.wte.weight" if model.tied_embeddings else "lm_head.weight"
        return [(name, "table", table, True), *norm("transformer.ln_f")]
    if block.kind == "mlp":
        return [
            *norm(f"{prefix}.ln_2"),
            *linear(f"{prefix}.mlp.c_fc", "up", ffn, hidden),
            *linear(f"{prefix}.mlp.c_proj", "down", hidden, ffn),
        ]
    projections = [linear(f"{prefix}.attn.{part}_proj", part, hidden, hidden) for part in ("q", "k", "v")]
    output = linear(f"{prefix}.attn.c_proj", "o", hidden, hidden)
    return [*norm(f"{prefix}.ln_1"), *(named for projection in projections for named in projection), *output]


@cache
def parameters(model: ModelConfig, block: Block) -> tuple[Parameter, ...]:
    """The parameters of a block in flat order, each starting at a multiple of `PARAMETER_ALIGNMENT` elements."""
    placed: list[Parameter] = []
    offset = 0
    for name, weight, shape, decayed in _named_parameters(model, block):
        placed.append(Parameter(name, weight, shape, offset, decayed))
        offset += -(-prod(shape) // PARAMETER_ALIGNMENT) * PARAMETER_ALIGNMENT
    return tuple(placed)


def parameters_within(
    model: ModelConfig, block: Block, start: int, elements: int
) -> Iterator[tuple[Parameter, int, int]]:
    """The parameters in a part of a block's flat tensor, each with where it begins and ends in that part."""
    for parameter in parameters(model, block):
        low = max(parameter.offset - start, 0)
        high = min(parameter.offset + parameter.elements - start, elements)
        if low < high:
            yield parameter, low, high


@cache
def flat_elements(model: ModelConfig, plan: Plan, owner: Block) -> int:
    """Elements of a block's flat tensors: its parameters and the padding that makes D equal shards.

    With tied embeddings `embed` and `head`, whose flat tensors start with the same table, are padded to the length of the longer one:
    shards of equal index then hold the same rows, and can be summed.
    """
    tied = model.tied_embeddings and owner.kind in ("embed", "head")
    lasts = [parameters(model, each)[-1] for each in ((block("embed"), block("head")) if tied else (owner,))]
    quantum = PARAMETER_ALIGNMENT * plan.dp
    return -(-max(last.offset + last.elements for last in lasts) // quantum) * quantum


def tied_table_elements(model: ModelConfig) -> int:
    """Elements of the table that `embed` and `head` share, which stands first in both flat tensors; 0 where they share none."""
    return parameters(model, block("embed"))[0].elements if model.tied_embeddings else 0


def is_sharded(plan: Plan) -> bool:
    """Whether optimizer state is sharded over the replicas (ZeRO 1 and up, with more than one replica)."""
    return plan.zero >= 1 and plan.dp > 1


def gathers_within_step(plan: Plan) -> bool:
    """Whether views are sharded too and gathered for each use (ZeRO 3), instead of once a step."""
    return plan.zero == 3 and is_sharded(plan)


def reduces_each_micro_batch(plan: Plan) -> bool:
    """Whether gradients are reduced into shards after every micro-batch, so that no full gradient is kept."""
    return is_sharded(plan) and plan.reduce == "each-micro-batch"


def shard_elements(model: ModelConfig, plan: Plan, block: Block) -> int:
    """Elements of one replica's shard of a block."""
    whole = flat_elements(model, plan, block)
    return whole // plan.dp if is_sharded(plan) else whole


@frozen
class Slot:
    """One tensor that a block's forward saves for its backward."""

    name: str
    type: TensorType


def tokens_per_micro_batch(plan: Plan) -> int:
    """Rows of an activation: sequences of a micro-batch times their length."""
    return plan.micro_batch_size * plan.seq_len


@cache
def saved_slots(model: ModelConfig, plan: Plan, block: Block) -> tuple[Slot, ...]:
    """What backward of a block reads beside its input, in the order ops list it."""
    rows = tokens_per_micro_batch(plan)
    act = Dtype(plan.view_dtype)
    hidden, ffn = model.hidden_size, model.ffn_size
    q_width, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
    rstd = Slot("rstd", tensor_type(Dtype.F32, (rows,)))
    statistics = (Slot("mean", rstd.type), rstd) if model.is_gpt2 else (rstd,)
    normed = Slot("xn", tensor_type(act, (rows, hidden)))
    if block.kind == "attention":
        return (
            normed,
            Slot("q", tensor_type(act, (rows, q_width))),
            Slot("k", tensor_type(act, (rows, kv_width))),
            Slot("v", tensor_type(act, (rows, kv_width))),
            Slot("o", tensor_type(act, (rows, q_width))),
            *_softmax_slots(model, plan),
            *statistics,
        )
    if block.kind == "mlp":
        wide = tensor_type(act, (rows, ffn))
        names = ("up", "act") if model.is_gpt2 else ("gate", "up", "prod")
        return (normed, *(Slot(name, wide) for name in names), *statistics)
    if block.kind == "head":
        lse = Slot("lse", tensor_type(Dtype.F32, (rows,)))
        whole = Slot("logits", tensor_type(Dtype.F32, (rows, model.vocab_size)))
        return (lse, whole) if plan.holds_logits else (lse,)
    return ()


def scores_type(model: ModelConfig, plan: Plan) -> TensorType:
    """Type of an attention's score matrix: every query of a micro-batch, by head, with every key of its sequence."""
    return tensor_type(Dtype(plan.view_dtype), (model.heads * tokens_per_micro_batch(plan), plan.seq_len))


def _softmax_slots(model: ModelConfig, plan: Plan) -> tuple[Slot, ...]:
    """What an attention saves of its softmax: of each query the log of its sum, all probabilities, or nothing."""
    if plan.attention == "fused":
        return (Slot("lse", tensor_type(Dtype.F32, (model.heads, tokens_per_micro_batch(plan)))),)
    return (Slot("probs", scores_type(model, plan)),) if plan.attention == "scores-kept" else ()


SPLIT_KINDS = ("attention", "mlp")
"""Kinds of blocks whose backward can be split. The embedding's is all weight; the head's stays whole, as it works in chunks."""

INPUT_HALF_SLOTS = {
    "attention": ("q", "k", "v", "o", "lse", "probs", "mean", "rstd"),
    "mlp": ("gate", "up", "mean", "rstd"),
}
"""The saved slots that the input half of a split backward reads, as far as a model and a plan have and need them."""

WEIGHT_HALF_SLOTS = {"attention": ("xn", "o"), "mlp": ("xn", "prod", "act")}
"""The saved slots that the weight half reads, as far as a model has them."""


def half_slots(model: ModelConfig, plan: Plan, block: Block, read: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """The names of the slots of a block that a half of its split backward reads: `read` is one of the tables above."""
    known = {slot.name for slot in saved_slots(model, plan, block)}
    if read is INPUT_HALF_SLOTS and plan.attention != "fused":
        known.discard(
            "o"
        )  # whole probabilities give the mean of their gradient; fused attention takes it from its output
    return tuple(name for name in read[block.kind] if name in known)


@cache
def pending_slots(model: ModelConfig, plan: Plan, block: Block) -> tuple[Slot, ...]:
    """What the input half of a split backward leaves for the weight half, in the order ops list it.

    Gradients of what the products of the block give, and the gradients of the norm's weights (and biases) as the exact f32 [hidden]
    sums, so that they are rounded once, where they are added to the gradient, as in a whole backward.
    """
    rows = tokens_per_micro_batch(plan)
    act = Dtype(plan.view_dtype)
    sums = tensor_type(Dtype.F32, (model.hidden_size,))
    norm = [Slot(name, sums) for name in (("dgamma", "dbeta") if model.is_gpt2 else ("dgamma",))]
    if block.kind == "attention":
        q_width, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
        widths = {"dq": q_width, "dk": kv_width, "dv": kv_width}
    elif block.kind == "mlp":
        widths = dict.fromkeys(("dup",) if model.is_gpt2 else ("dgate", "dup"), model.ffn_size)
    else:
        return ()
    return (*(Slot(name, tensor_type(act, (rows, width))) for name, width in widths.items()), *norm)


KEY_SLOTS = ("k", "v")
"""The saved slots of an attention that the later slices of its micro-batch read."""

SUM_SLOTS = ("dk_sum", "dv_sum")
"""What later slices add up for the gradients of a slice's keys and values, one for each of `KEY_SLOTS`."""


def seen_slices(model: ModelConfig, plan: Plan) -> tuple[int, ...]:
    """Of the plan of a slice: the earlier slices of whose keys its queries see some, ascending; a window may hide the first ones."""
    if not isinstance(plan, SlicePlan):
        return ()
    first_seen = 0 if model.sliding_window is None else max(0, plan.first_position - model.sliding_window + 1)
    starts = [slice_plan(plan.parent, index).first_position for index in range(plan.index + 1)]
    return tuple(index for index in range(plan.index) if starts[index + 1] > first_seen)


@cache
def last_viewer(model: ModelConfig, plan: Plan) -> int | None:
    """Of the plan of a slice: the last later slice that sees some of its keys; None where none does."""
    if not isinstance(plan, SlicePlan):
        return None
    later = range(len(plan.parent.slices) - 1, plan.index, -1)
    return next((each for each in later if plan.index in seen_slices(model, slice_plan(plan.parent, each))), None)


def sum_slots(model: ModelConfig, plan: Plan, block: Block) -> tuple[Slot, ...]:
    """Of the plan of a slice: what later slices leave of an attention block for its backward, f32 [rows, key-value width] each."""
    if block.kind != "attention" or last_viewer(model, plan) is None:
        return ()
    type_ = tensor_type(Dtype.F32, (tokens_per_micro_batch(plan), model.kv_heads * model.head_dim))
    return tuple(Slot(name, type_) for name in SUM_SLOTS)


def kept_in_forward(model: ModelConfig, plan: Plan, block: Block) -> tuple[str, ...]:
    """The saved slots that a forward must keep: of the plan of a slice, the keys and values that later slices see."""
    return KEY_SLOTS if block.kind == "attention" and last_viewer(model, plan) is not None else ()


def activation_type(model: ModelConfig, plan: Plan) -> TensorType:
    """Type of a block's input, output, or a gradient of either: [tokens of a micro-batch, hidden]."""
    return tensor_type(Dtype(plan.view_dtype), (tokens_per_micro_batch(plan), model.hidden_size))


def token_type(plan: Plan) -> TensorType:
    """Type of the tokens, and of the labels, of one micro-batch."""
    return tensor_type(Dtype.I32, (tokens_per_micro_batch(plan),))

"""Blocks: the units a model is scheduled in, with their parameters and what their backward needs.

A model is the chain `embed, attention.0, mlp.0, ..., attention.L-1, mlp.L-1, head`. This file is the only place that knows
the parameter layout of a block (used for Hugging Face names and for the decay exemption of norms and biases) and the slots
its forward saves. Targets add none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from math import prod
from typing import TYPE_CHECKING

from attrs import field, frozen

from ratrain.ratrain_ir.config.plan import SlicePlan, slice_plan
from ratrain.ratrain_ir.config.quantised import FORMATS
from ratrain.ratrain_ir.config.tensor_peers import adds_branches_apart, norms_over_peers, peer_model
from ratrain.ratrain_ir.config.types import Dtype, TensorType, tensor_type
from ratrain.ratrain_ir.model.parameter_names import parameter_name

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan

PARAMETER_ALIGNMENT = 64
"""Elements: parameters start at multiples of this inside a block's flat tensor; shards are multiples of it too."""

BLOCK_KINDS = ("embed", "attention", "mlp", "head")


@frozen(eq=False)
class Block:
    """One block of the chain; `layer` is None for `embed` and `head`. Make one through `block` only: there is one object of each."""

    kind: str
    layer: int | None
    _text: str = field(init=False, repr=False)

    def __reduce__(self) -> tuple[Callable[..., Block], tuple[object, ...]]:
        return block, (self.kind, self.layer)

    @_text.default
    def _written(self) -> str:
        return self.kind if self.layer is None else f"{self.kind}.{self.layer}"

    def __str__(self) -> str:
        return self._text


def block(kind: str, layer: int | None = None) -> Block:
    """The one object of this block, so that blocks compare with `is`."""
    return _block(kind, layer)


@cache
def _block(kind: str, layer: int | None) -> Block:
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


def named_block(name: str) -> Block:
    """The block of a name in a program. Raises ValueError where it is none."""
    owner = parse_block(name)
    if owner is None:
        raise ValueError(f"'{name}' is not a block")
    return owner


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


def previous_block(later: Block, model: ModelConfig) -> Block:
    """The block before one in forward order, which is not the embedding."""
    if later.kind == "head":
        return block("mlp", model.layers - 1)
    if later.kind == "mlp":
        return block("attention", later.layer)
    assert later.layer is not None
    return block("mlp", later.layer - 1) if later.layer else block("embed")


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


def _shapes(model: ModelConfig, block: Block) -> list[tuple[str, tuple[int, ...]]]:
    """The parameters of a block: short names and shapes, matrices as [outputs, inputs], in flat order."""
    hidden, table = model.hidden_size, ("table", (model.vocab_size, model.hidden_size))
    if block.kind == "embed":
        positions = model.learned_positions
        return [table] if positions is None else [table, ("positions", (positions, hidden))]
    if block.kind == "head":
        return [table, *_norm_shapes(model, "norm", hidden)]
    shapes = _norm_shapes(model, "norm", hidden) if model.has_pre_norm else []
    if block.kind == "attention":
        widths = {"q": model.q_size, "k": model.kv_size, "v": model.kv_size}
        for name, width in widths.items():
            shapes += _linear_shapes(name, width, hidden, bias=model.qkv_bias)
        shapes += _linear_shapes("o", hidden, model.q_size, bias=model.o_bias)
        for name in ("q", "k") if model.qk_norm != "none" else ():
            shapes.append((f"{name}_norm", (model.head_dim if model.qk_norm == "head" else widths[name],)))
    else:
        for name in model.mlp_matrices:
            outputs, inputs = (hidden, model.ffn_size) if name == "down" else (model.ffn_size, hidden)
            shapes += _linear_shapes(name, outputs, inputs, bias=model.mlp_bias)
    return shapes + (_norm_shapes(model, "post_norm", hidden) if model.has_post_norm else [])


def _norm_shapes(model: ModelConfig, weight: str, width: int) -> list[tuple[str, tuple[int, ...]]]:
    names = (weight, f"{weight}_bias") if model.has_layer_norm else (weight,)
    return [(name, (width,)) for name in names]


def _linear_shapes(name: str, outputs: int, inputs: int, *, bias: bool) -> list[tuple[str, tuple[int, ...]]]:
    matrix: tuple[str, tuple[int, ...]] = (f"{name}_proj", (outputs, inputs))
    return [matrix, (f"{name}_bias", (outputs,))] if bias else [matrix]


@cache
def parameters(model: ModelConfig, block: Block) -> tuple[Parameter, ...]:
    """The parameters of a block in flat order, each starting at a multiple of `PARAMETER_ALIGNMENT` elements."""
    placed: list[Parameter] = []
    offset = 0
    for weight, shape in _shapes(model, block):
        name = parameter_name(model, block.kind, block.layer, weight)
        placed.append(Parameter(name, weight, shape, offset, decayed=len(shape) > 1))
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
    """Elements of a block's flat tensors: the parameters that a tensor peer has, and the padding that makes D equal shards.

    With tied embeddings `embed` and `head`, whose flat tensors start with the same table, are padded to the length of the longer one:
    shards of equal index then hold the same rows, and can be summed.
    """
    model = peer_model(model, plan)
    tied = model.tied_embeddings and owner.kind in ("embed", "head")
    lasts = [parameters(model, each)[-1] for each in ((block("embed"), block("head")) if tied else (owner,))]
    quantum = PARAMETER_ALIGNMENT * plan.dp
    return -(-max(last.offset + last.elements for last in lasts) // quantum) * quantum


def tied_table_elements(model: ModelConfig) -> int:
    """Elements of the table that `embed` and `head` share, which stands first in both flat tensors; 0 where they share none."""
    return parameters(model, block("embed"))[0].elements if model.tied_embeddings else 0


def zero_level(plan: Plan, block: Block) -> int:
    """The ZeRO level of a block: that of the plan, unless it says another for the block."""
    levels = plan.zero_blocks
    return plan.zero if levels is None else levels.level(block.kind, block.layer, plan.zero)


def is_sharded(plan: Plan, block: Block) -> bool:
    """Whether a block's optimizer state is sharded over the replicas (ZeRO 1 and up, with more than one replica)."""
    return plan.dp > 1 and zero_level(plan, block) >= 1


def shard_count(plan: Plan, block: Block) -> int:
    """Into how many shards a block's optimizer state is cut; 1 where every replica has all of it."""
    return (plan.shard_group or plan.dp) if is_sharded(plan, block) else 1


def gathered_bits(plan: Plan, block: Block) -> int | None:
    """To how many bits an element of a block is rounded to be gathered; None where it is not."""
    return FORMATS[plan.gather_quantised] if plan.gather_quantised is not None and is_sharded(plan, block) else None


def reduced_bits(plan: Plan, block: Block) -> int | None:
    """To how many bits an element of a block's gradient is rounded on each replica to be reduced into shards; None where it is not."""
    return FORMATS[plan.reduce_quantised] if plan.reduce_quantised is not None and is_sharded(plan, block) else None


def gathers_within_step(plan: Plan, block: Block) -> bool:
    """Whether a block's view is gathered for each use (ZeRO 3), instead of once a step; of one replica from its own masters alone."""
    return zero_level(plan, block) == 3


def parts_view(plan: Plan, block: Block) -> bool:
    """Whether groups of replicas have a block's view between them from step to step, and gather it there (`view_group`)."""
    return plan.view_group is not None and is_sharded(plan, block) and gathers_within_step(plan, block)


def gathers_at_step_end(plan: Plan, block: Block) -> bool:
    """Whether a block's view, or a replica's part of it, is made of masters once a step, for the next one."""
    return is_sharded(plan, block) and (parts_view(plan, block) or not gathers_within_step(plan, block))


def view_shard_elements(model: ModelConfig, plan: Plan, block: Block) -> int:
    """Elements of one replica's part of a view that a group has between them."""
    assert plan.view_group is not None
    return flat_elements(model, plan, block) // plan.view_group


def any_gathered_within_step(plan: Plan, blocks: Iterable[Block]) -> bool:
    """Whether any of some blocks has its view gathered for each use."""
    return any(gathers_within_step(plan, block) for block in blocks)


def gathers_layers_within_step(plan: Plan) -> bool:
    """Whether any layer may have its view gathered for each use: recovery, which reads it, then waits for that of the backward."""
    levels = plan.zero_blocks
    if levels is None:
        return plan.zero == 3
    return 3 in levels.of_layers.values() or any(levels.level(kind, None, plan.zero) == 3 for kind in SPLIT_KINDS)


def keeps_view(plan: Plan, block: Block) -> bool:
    """Whether every rank has a block's view whole from step to step, written by its own update."""
    return not is_sharded(plan, block) and not gathers_within_step(plan, block)


def reduces_each_micro_batch(plan: Plan, block: Block) -> bool:
    """Whether a block's gradient is reduced into shards after every micro-batch, so that no full gradient is kept."""
    return plan.reduce == "each-micro-batch" and plan.dp > 1 and zero_level(plan, block) >= 2


def shard_elements(model: ModelConfig, plan: Plan, block: Block) -> int:
    """Elements of one replica's shard of a block."""
    return flat_elements(model, plan, block) // shard_count(plan, block)


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
    """What backward of a block reads beside its input, in the order ops list it; of a tensor peer its own part."""
    whole, model = model, peer_model(model, plan)
    rows = tokens_per_micro_batch(plan)
    act = Dtype(plan.view_dtype)
    branch = () if adds_branches_apart(model, plan) else branch_slots(model, plan)
    if block.kind == "attention":
        widths = {"q": model.q_size, "k": model.kv_size, "v": model.kv_size, "o": model.q_size}
        first = (*projected_slots(whole, plan, block), *row_sum_slots(whole, plan, block, SQUARES))
        if first:
            del widths["v"]
        return (
            *_normed_slots(model, plan),
            *(first or _projected_slots(model, plan)),
            *(Slot(name, tensor_type(act, (rows, width))) for name, width in widths.items()),
            *_softmax_slots(whole, plan),
            *branch,
            *_statistics_slots(model, plan, "") * model.has_pre_norm,
        )
    if block.kind == "mlp":
        wide = tensor_type(act, (rows, model.ffn_size))
        names = ("gate", "up", "prod") if model.gated_mlp else ("up", "act")
        return (
            *_normed_slots(model, plan),
            *(Slot(name, wide) for name in names),
            *branch,
            *_statistics_slots(model, plan, "") * model.has_pre_norm,
        )
    if block.kind == "head":
        lse = Slot("lse", tensor_type(Dtype.F32, (rows,)))
        logits = Slot("logits", tensor_type(Dtype.F32, (rows, model.vocab_size)))
        return (lse, logits) if plan.holds_logits else (lse,)
    return ()


def _normed_slots(model: ModelConfig, plan: Plan) -> tuple[Slot, ...]:
    """The normed input."""
    return (Slot("xn", stream_type(model, plan)),) if model.has_pre_norm else ()


def _statistics_slots(model: ModelConfig, plan: Plan, of: str, rows: int | None = None) -> tuple[Slot, ...]:
    """What a norm keeps of each row; `of` stands before the names of those that are not of the norm of the input."""
    line = tensor_type(Dtype.F32, (rows or tokens_per_micro_batch(plan),))
    names = ("mean", "rstd") if model.has_layer_norm else ("rstd",)
    return tuple(Slot(f"{of}{name}", line) for name in names)


def _projected_slots(model: ModelConfig, plan: Plan) -> tuple[Slot, ...]:
    """Queries and keys before their norm, and its statistics."""
    if model.qk_norm == "none":
        return ()
    rows, slots = tokens_per_micro_batch(plan), []
    for name, heads in (("q", model.heads), ("k", model.kv_heads)):
        slots.append(Slot(f"{name}_in", tensor_type(Dtype(plan.view_dtype), (rows, heads * model.head_dim))))
        normed = rows * (heads if model.qk_norm == "head" else 1)
        slots.append(Slot(f"{name}_rstd", tensor_type(Dtype.F32, (normed,))))
    return tuple(slots)


SQUARES, PRODUCTS = "squares", "products"
"""What norms of queries and keys over tensor peers sum over each row, forward and backward: squares of their source, and its products with
the gradient of their result."""


def projected_slots(model: ModelConfig, plan: Plan, block: Block) -> tuple[Slot, ...]:
    """Where norms of queries and keys take sums over tensor peers: what an op of its own projects before them, first among the saved slots."""
    if block.kind != "attention" or not norms_over_peers(model, plan):
        return ()
    peer = peer_model(model, plan)
    rows, act = tokens_per_micro_batch(plan), Dtype(plan.view_dtype)
    widths = {"q_in": peer.q_size, "k_in": peer.kv_size, "v": peer.kv_size}
    return tuple(Slot(name, tensor_type(act, (rows, width))) for name, width in widths.items())


def row_sum_slots(model: ModelConfig, plan: Plan, block: Block, name: str) -> tuple[Slot, ...]:
    """There too: the sums of each row of queries, and below them those of each row of keys, of all peers."""
    if block.kind != "attention" or not norms_over_peers(model, plan):
        return ()
    return (Slot(name, row_sums_type(plan)),)


def row_sums_type(plan: Plan) -> TensorType:
    """Type of the sums over rows that norms of queries and keys take: one of each row of queries, then one of each row of keys."""
    return tensor_type(Dtype.F32, (2 * tokens_per_micro_batch(plan),))


def normed_gradient_slots(model: ModelConfig, plan: Plan, block: Block) -> tuple[Slot, ...]:
    """There too: what an op of its own makes in the backward before those norms, gradients of normed queries and keys and of values."""
    of = {"q_in": "dq", "k_in": "dk", "v": "dv"}
    return tuple(Slot(of[slot.name], slot.type) for slot in projected_slots(model, plan, block))


def branch_slots(model: ModelConfig, plan: Plan) -> tuple[Slot, ...]:
    """What an attention or mlp block adds to the stream, before the norm of that, and its statistics: of the rows that a rank has between blocks."""
    if not model.has_post_norm:
        return ()
    type_ = exchanged_type(model, plan)
    return (Slot("branch", type_), *_statistics_slots(model, plan, "branch_", type_.shape[0]))


def scores_type(model: ModelConfig, plan: Plan) -> TensorType:
    """Type of an attention's score matrix: every query of a micro-batch, by head, with every key of its sequence."""
    heads = peer_model(model, plan).heads
    return tensor_type(Dtype(plan.view_dtype), (heads * tokens_per_micro_batch(plan), plan.seq_len))


def _softmax_slots(model: ModelConfig, plan: Plan) -> tuple[Slot, ...]:
    """What an attention saves of its softmax: of each query the log of its sum, all probabilities, or nothing."""
    if plan.attention == "fused":
        heads = peer_model(model, plan).heads
        return (Slot("lse", tensor_type(Dtype.F32, (heads, tokens_per_micro_batch(plan)))),)
    return (Slot("probs", scores_type(model, plan)),) if plan.attention == "scores-kept" else ()


SPLIT_KINDS = ("attention", "mlp")
"""Kinds of blocks whose backward can be split. The embedding's is all weight; the head's stays whole, as it works in chunks."""

_NORMS = ("mean", "rstd", "branch", "branch_mean", "branch_rstd")
INPUT_HALF_SLOTS = {
    "attention": ("q_in", "q_rstd", "k_in", "k_rstd", SQUARES, "q", "k", "v", "o", "lse", "probs", *_NORMS),
    "mlp": ("gate", "up", *_NORMS),
}
"""The saved slots that the input half of a split backward reads, as far as a model and a plan have and need them."""

_OF_HEADS = ("q", "k", "lse", "probs", "v")
HEADS_SLOTS = {"attention": ("q_in", "k_in", "o", *_OF_HEADS)}
"""Where norms of queries and keys take sums over tensor peers: the saved slots that the op before those norms reads in the backward."""

WEIGHT_HALF_SLOTS = {"attention": ("xn", "o"), "mlp": ("xn", "prod", "act")}
"""The saved slots that the weight half reads, as far as a model has them."""


def half_slots(model: ModelConfig, plan: Plan, block: Block, read: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """The names of the slots of a block that a half of its split backward reads: `read` is one of the tables above."""
    names = [slot.name for slot in saved_slots(model, plan, block)]
    through_heads = read is HEADS_SLOTS or (read is INPUT_HALF_SLOTS and not projected_slots(model, plan, block))
    if through_heads and plan.attention != "fused" and "o" in names:
        names.remove(
            "o"
        )  # whole probabilities give the mean of their gradient; fused attention takes it from its output
    if read is INPUT_HALF_SLOTS and not through_heads:
        names = [name for name in names if name in ("q_in", "k_in", SQUARES)]
    return tuple(name for name in names if name in read[block.kind])


@cache
def pending_slots(model: ModelConfig, plan: Plan, block: Block) -> tuple[Slot, ...]:
    """What the input half of a split backward leaves for the weight half, in the order ops list it.

    Gradients of what the products of the block give, and the gradients of the norms' weights (and biases) as the exact f32
    sums, so that they are rounded once, where they are added to the gradient, as in a whole backward.
    """
    over_peers = norms_over_peers(model, plan)
    model = peer_model(model, plan)
    rows = tokens_per_micro_batch(plan)
    act = Dtype(plan.view_dtype)
    if block.kind == "attention" and over_peers:
        widths = {"dq_in": model.q_size, "dk_in": model.kv_size}
    elif block.kind == "attention":
        widths = {"dq": model.q_size, "dk": model.kv_size, "dv": model.kv_size}
    elif block.kind == "mlp":
        widths = dict.fromkeys(("dgate", "dup") if model.gated_mlp else ("dup",), model.ffn_size)
    else:
        return ()
    products = [Slot(name, tensor_type(act, (rows, width))) for name, width in widths.items()]
    apart = adds_branches_apart(model, plan)
    branch = [Slot("dbranch", stream_type(model, plan))] if model.has_post_norm and not apart else []
    left = branch_sums(model, plan, block)
    sums = [slot for slot in _sum_slots(model, block) if slot not in left]
    return (*products, *branch, *sums)


def branch_sums(model: ModelConfig, plan: Plan, block: Block) -> tuple[Slot, ...]:
    """The sums of the norm of what a block adds, where an op of its own adds it and leaves them for the block's backward."""
    if block.kind not in SPLIT_KINDS or not adds_branches_apart(model, plan):
        return ()
    return tuple(slot for slot in _sum_slots(model, block) if slot.name.startswith("dpost_"))


def _sum_slots(model: ModelConfig, block: Block) -> tuple[Slot, ...]:
    return tuple(Slot(name, tensor_type(Dtype.F32, (width,))) for name, _, width in norm_sums(model, block))


def norm_sums(model: ModelConfig, block: Block) -> tuple[tuple[str, str, int], ...]:
    """Of the norms of a block: the name of the sum that is a parameter's gradient, the parameter, and its elements."""
    hidden, sums = model.hidden_size, []
    for of in ("",) * model.has_pre_norm + ("post_",) * model.has_post_norm:
        sums.append((f"d{of}gamma", f"{of}norm", hidden))
        sums += [(f"d{of}beta", f"{of}norm_bias", hidden)] * model.has_layer_norm
    if block.kind == "attention" and model.qk_norm != "none":
        widths = {"q": model.q_size, "k": model.kv_size}
        for name, width in widths.items():
            sums.append((f"d{name}_gamma", f"{name}_norm", model.head_dim if model.qk_norm == "head" else width))
    return tuple(sums)


KEY_SLOTS = ("k", "v")
"""The saved slots of an attention that the later slices of its micro-batch read."""

SUM_SLOTS = ("dk_sum", "dv_sum")
"""What later slices add up for the gradients of a slice's keys and values, one for each of `KEY_SLOTS`."""


def seen_slices(model: ModelConfig, plan: Plan) -> tuple[int, ...]:
    """Of the plan of a slice: the earlier slices of whose keys its queries see some, ascending; a window may hide the first ones."""
    if not isinstance(plan, SlicePlan):
        return ()
    window = model.widest_window
    first_seen = 0 if window is None else max(0, plan.first_position - window + 1)
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
    width = peer_model(model, plan).kv_heads * model.head_dim
    type_ = tensor_type(Dtype.F32, (tokens_per_micro_batch(plan), width))
    return tuple(Slot(name, type_) for name in SUM_SLOTS)


def kept_in_forward(model: ModelConfig, plan: Plan, block: Block) -> tuple[str, ...]:
    """The saved slots that a forward must keep: of the plan of a slice, the keys and values that later slices see; sums over tensor peers."""
    sums = tuple(slot.name for slot in row_sum_slots(model, plan, block, SQUARES))
    return (*KEY_SLOTS, *sums) if block.kind == "attention" and last_viewer(model, plan) is not None else sums


def reads_documents(model: ModelConfig, plan: Plan, block: Block) -> bool:
    """Whether a block asks where documents start: attention, and an embedding that adds learned positions, if documents are kept apart."""
    of_positions = block.kind == "embed" and model.learned_positions is not None
    return plan.keeps_documents_apart and (of_positions or block.kind == "attention")


def stream_type(model: ModelConfig, plan: Plan) -> TensorType:
    """Type of the residual stream as blocks compute with it: [tokens of a micro-batch, hidden]."""
    return tensor_type(Dtype(plan.view_dtype), (tokens_per_micro_batch(plan), model.hidden_size))


def shares_rows(plan: Plan) -> bool:
    """Whether the residual stream between blocks is sharded by rows over tensor peers, each of which has a run of them."""
    return plan.tp > 1 and plan.sequence_sharding


def exchanged_type(model: ModelConfig, plan: Plan) -> TensorType:
    """Type of the residual stream as a rank has it between blocks, and as stages exchange it: all its rows, or its tensor peer's."""
    rows = tokens_per_micro_batch(plan)
    return tensor_type(Dtype(plan.view_dtype), (rows // plan.tp if shares_rows(plan) else rows, model.hidden_size))


def takes_pair(model: ModelConfig, plan: Plan, block: Block) -> bool:
    """Whether the input of a block is a pair, one above the other: what its mlp is computed of, and what that is added to.

    With attention and mlp side by side these are the input of the layer and its sum with what attention adds. The gradient of a pair has
    that of the input on all ways but through attention above, and that of what attention adds below. Tensor peers do without it
    (`peer_blocks.stands_beside`).
    """
    return plan.tp == 1 and model.parallel_residual and block.kind == "mlp"


def activation_type(model: ModelConfig, plan: Plan, block: Block) -> TensorType:
    """Type of the input of a block, which is the output of the one before, or of its gradient, between blocks: the stream, or a pair of two."""
    return _or_pair(model, plan, block, exchanged_type(model, plan))


def computed_type(model: ModelConfig, plan: Plan, block: Block) -> TensorType:
    """Type of the input of a block, or of its gradient, as the block computes with it: with all its rows."""
    return _or_pair(model, plan, block, stream_type(model, plan))


def _or_pair(model: ModelConfig, plan: Plan, block: Block, stream: TensorType) -> TensorType:
    rows, hidden = stream.shape
    return tensor_type(stream.dtype, (2 * rows, hidden)) if takes_pair(model, plan, block) else stream


def token_type(plan: Plan) -> TensorType:
    """Type of the tokens, the labels, and the starts of documents, of one micro-batch: one number a row."""
    return tensor_type(Dtype.I32, (tokens_per_micro_batch(plan),))

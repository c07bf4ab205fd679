"""Bytes that autograd saves of one layer's forward, and what its backward adds while it runs.

A layer of a LLaMA under `transformers` in bf16, T tokens, hidden size h, MLP width f, queries q, keys k:

    norm        f32 copy of the input 4 T h, normalised 2 T h, a root of each row 4 T        twice
    attention   input 2 T h, query 2 T q, key and value 2 T k each, output 2 T q, row sums 4 T heads
    mlp         input 2 T h, gate, up, silu(gate) and their product 2 T f each

An op saves what its derivative reads (torch tools/autograd/derivatives.yaml: mul both factors, silu its input, pow its
base, softmax its result, a linear its input); views save their storage once. The residual stream itself is not saved:
an addition reads nothing. tests/ratrainc/fit/test_saved_tensors.py counts the storages of real modules against this.

With dropout under Megatron-LM the sums are Korthikanti et al. 2022 (arXiv 2205.05198), equations 1, 2, 4 and 6: a layer
keeps s b h (34 + 5 a s / h) bytes, s b h (10 + 24 / t + 5 a s / (h t)) over t tensor-parallel ranks, all of it divided
by t with sequence parallelism, without the 5 a s / h under selective recomputation, and 2 s b h under full. The paper
leaves row statistics out, which `ROW_STATISTICS` names here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from attrs import frozen

from ratrain.ratrainc.bridge.jobs.job import Attention, Checkpointing
from ratrain.ratrainc.fit.holdings.adapters import adapts_head, inputs_kept
from ratrain.ratrainc.fit.holdings.context import EXCHANGE, exchange_backward, exchange_forward
from ratrain.ratrainc.fit.holdings.experts import (
    ROUTER,
    experts_kept,
    gradients_inside,
    router_logits_kept,
    stack_gradients,
)
from ratrain.ratrainc.fit.holdings.frozen_layers import as_frozen, layers_of, recomputes_frozen, trains_head
from ratrain.ratrainc.fit.holdings.part import Part, share
from ratrain.ratrainc.fit.holdings.styles import MEGATRON, TRANSFORMERS, RmsForm
from ratrain.ratrainc.fit.holdings.terms import Bytes, together

ATTENTION = "activations: attention"
MLP = "activations: mlp"
NORMS = "activations: norms"
SCORES = "activations: scores"
MASKS = "activations: masks"
CHECKPOINTS = "activations: checkpoints"
GRADIENTS = "activations: gradients in the backward"
ROW_STATISTICS = "row statistics"
"""Name of the numbers that a norm or a softmax keeps of each row: f32 means, roots and log sums."""
_F32 = 4


@frozen
class Kept:
    """One saved tensor, or several of the same kind."""

    owner: str
    name: str
    bytes: int


def account(kept: Iterable[Kept], times: int = 1) -> Bytes:
    """Return the bytes of saved tensors by owner, for several layers of the same kind."""
    return together({each.owner: times * each.bytes} for each in kept)


def layer_kept(part: Part) -> tuple[Kept, ...]:
    """Return the tensors that the forward of one layer saves if nothing is recomputed."""
    assert not part.model.mlp_kinds, "one kind of layer is asked for"
    return (*_attention(part), *_mlp(part), *_residual_masks(part))


def checkpoint(part: Part) -> Kept:
    """Return the input of a layer, which a checkpoint keeps."""
    return Kept(CHECKPOINTS, "input", part.stream_item * part.rows * part.model.hidden_size)


def _norm(part: Part, width: int, rows: int, item: int, groups: int = 1) -> Iterator[Kept]:
    """Yield what one norm keeps of `rows` rows of `width` elements in `groups` groups, each with its own statistics."""
    elements = rows * width
    model = part.model
    if model.has_layer_norm or part.rms is RmsForm.FUSED or part.job.compiled:
        # torch derivatives.yaml native_layer_norm, _fused_rms_norm: input, mean and reciprocal root. Compiled: assumed,
        # the partitioner recomputes elementwise results (torch/_functorch/partitioners.py) and keeps the input.
        yield Kept(NORMS, "input", item * elements)
        yield Kept(NORMS, ROW_STATISTICS, _F32 * rows * groups * (2 if model.has_layer_norm else 1))
        return
    yield Kept(NORMS, "f32 input", _F32 * elements)
    if part.job.adapter is None:  # only the gradient of the norm's weights reads it
        yield Kept(NORMS, "normalised", (_F32 if part.rms is RmsForm.WHOLE else item) * elements)
    yield Kept(NORMS, ROW_STATISTICS, _F32 * rows * groups)
    if model.norm_unit_offset:
        yield Kept(NORMS, "weights + 1", _F32 * width // groups)


def _block_norms(part: Part) -> Iterator[Kept]:
    """Yield the norms around one block: of its input, of its output, or both."""
    for _ in range(part.model.has_pre_norm + part.model.has_post_norm):
        yield from _norm(part, part.model.hidden_size, part.rows, part.stream_item)


def _projection_input(part: Part, owner: str, projections: int) -> Iterator[Kept]:
    """Yield the input of the projections that open a block.

    Autocast casts it once a projection. Compiled, it is recomputed from the norm's input. Megatron-LM keeps the share
    of a sequence-sharded input and gathers again (core/tensor_parallel/layers.py
    LinearWithGradAccumulationAndAsyncCommunication); a DTensor input is kept gathered.
    """
    if part.job.adapter is not None:
        role = "attention input" if owner == ATTENTION else "mlp input"
        yield from _for_adapters(part, owner, role, part.tokens * part.model.hidden_size)
        return
    if part.job.compiled and part.model.has_pre_norm:
        return
    rows = part.tokens if part.style.gathered_input else part.rows
    copies = projections if part.casts else 1
    yield Kept(owner, "input", copies * part.item * rows * part.model.hidden_size)


def _for_adapters(part: Part, owner: str, role: str, elements: int) -> Iterator[Kept]:
    """Yield what adapters keep of the tensor that linears of a role read."""
    for name, nbytes in inputs_kept(part, role, elements):
        yield Kept(owner, name, nbytes)


def _attention(part: Part) -> Iterator[Kept]:
    """Yield what an attention block saves."""
    model, item, tokens = part.model, part.item, part.tokens
    yield from _block_norms(part)
    yield from _projection_input(part, ATTENTION, 1 if part.packed else 3)
    if model.qk_norm == "head":
        yield from _norm(part, part.query, tokens, item, part.heads)
        yield from _norm(part, part.key, tokens, item, part.key // model.head_dim)
    elif model.qk_norm == "whole":
        yield from _norm(part, part.query, tokens, item)
        yield from _norm(part, part.key, tokens, item)
    yield from _core(part)
    output = Kept(ATTENTION, "output", item * tokens * part.query)
    if part.job.adapter is None:
        yield output
        return
    # a fused kernel's backward reads its result, of which another layout makes a copy for the projection
    fused = part.job.attention is not Attention.EAGER and not part.copies_result
    if fused:
        yield output
    kept = _for_adapters(part, ATTENTION, "attention output", tokens * part.query)
    yield from (each for each in kept if not (fused and each.name == output.name))


def _core(part: Part) -> Iterator[Kept]:
    """Yield query, key, value and scores, or the log sums that a fused kernel keeps in place of scores."""
    item, tokens, query, key = part.item, part.tokens, part.query, part.key
    eager = part.job.attention is Attention.EAGER
    if eager or (part.style.repeats_heads and query != key):
        # a matrix product takes keys and values repeated to all heads, and contiguous (repeat_kv, torch.bmm)
        yield Kept(ATTENTION, "query", item * tokens * query)
        yield Kept(ATTENTION, "key", item * tokens * query)
        yield Kept(ATTENTION, "value", item * tokens * query)
    elif part.packed:
        rotated = query + key if part.model.position == "rope" else 0
        yield Kept(ATTENTION, "query and key", item * tokens * rotated)
        yield Kept(ATTENTION, "value", item * tokens * (query + 2 * key))  # a view, so the whole projection
    else:
        key = part.exchanged_key if part.job.cp > 1 else key
        yield Kept(ATTENTION, "query", item * tokens * query)
        yield Kept(ATTENTION, "key", item * tokens * key)
        yield Kept(ATTENTION, "value", item * tokens * key)
    if not eager:
        yield Kept(ATTENTION, ROW_STATISTICS, _F32 * tokens * part.heads)
        if part.copies_result:
            yield Kept(ATTENTION, "output by head", item * tokens * query)
        return
    yield from _scores(part)


def _scores(part: Part) -> Iterator[Kept]:
    """Yield the matrices of a x s x s scores that eager attention saves.

    `transformers` computes softmax in f32 and casts its result, except for GPT-2 (models/gpt2/modeling_gpt2.py
    eager_attention_forward); Megatron-LM's fused kernel returns the compute type. Dropout saves a mask of bytes, and
    the product with values reads what dropout returns.
    """
    elements = part.heads * score_rows(part)
    upcast = part.job.framework not in MEGATRON and part.model.family != "gpt2"
    if part.model.attention_softcap is not None:
        yield Kept(SCORES, "tanh", part.item * elements)
    yield Kept(SCORES, "softmax", (_F32 if upcast else part.item) * elements)
    if part.job.dropout:
        yield Kept(SCORES, "dropout mask", elements)
        yield Kept(SCORES, "dropout", part.item * elements)
    elif upcast and part.item != _F32:
        yield Kept(SCORES, "cast", part.item * elements)


def score_rows(part: Part) -> int:
    """Return the scores of one head: a row of keys for each token."""
    assert part.job.seq_len is not None
    return part.tokens * part.job.seq_len


def _mlp(part: Part) -> Iterator[Kept]:
    """Yield what an MLP block saves."""
    model = part.model
    wide = part.item * part.tokens * part.ffn
    # parallel blocks norm the same input, which one storage holds
    yield from (each for each in _block_norms(part) if not (model.parallel_residual and each.name == "input"))
    if model.experts is not None:
        yield from (Kept(*each) for each in experts_kept(part))
        return
    yield from _projection_input(part, MLP, len(model.mlp_matrices) - 1)
    if part.job.compiled:
        names = ("gate", "up")[: len(model.mlp_matrices) - 1]
    elif model.gated_mlp:
        names = ("gate", "up", "product") if part.style.fused_activation else ("gate", "up", "activation", "product")
    elif model.family == "gpt2" and part.job.framework in TRANSFORMERS and model.activation == "gelu-tanh":
        # activations.py NewGELUActivation: the cube reads its base, the products read x / 2 and 1 + tanh, tanh itself
        names = ("up", "half", "tanh", "1 + tanh", "activation")
    else:
        names = ("up", "activation")
    if part.job.adapter is None:
        yield from (Kept(MLP, name, wide) for name in names)
        return
    # the last one is the input of the down projection, which a frozen one does not read again
    last = () if part.job.compiled else names[-1:]
    yield from (Kept(MLP, name, part.result_item * part.tokens * part.ffn) for name in names if name not in last)
    yield from _for_adapters(part, MLP, "mlp product", part.tokens * part.ffn)


def _residual_masks(part: Part) -> Iterator[Kept]:
    """Yield the masks of dropout on the results of both blocks, a byte an element."""
    residual = part.style.residual_masks or (part.job.framework in TRANSFORMERS and part.model.family == "gpt2")
    if part.job.dropout and residual:
        yield Kept(MASKS, "dropout masks", 2 * part.rows * part.model.hidden_size)


def embedding_mask(part: Part) -> int:
    """Return the bytes of the mask of dropout on the embedded tokens of one micro-batch."""
    masked = part.first and part.job.dropout and bool(tuple(_residual_masks(part)))
    return part.rows * part.model.hidden_size if masked else 0


def head_kept(part: Part) -> Bytes:
    """Return what the final norm saves, and the input of the head; nothing on other stages."""
    if not part.last:
        return {}
    rows = part.tokens if part.style.gathered_input else part.rows
    norm = part if part.job.thawed is None else as_frozen(part)
    entries = [*_norm(norm, part.model.hidden_size, part.rows, part.stream_item)]
    reads = trains_head(part) if part.job.adapter is None else adapts_head(part)
    if reads:  # a frozen head does not read its input again
        entries.append(Kept(NORMS, "head input", part.item * rows * part.model.hidden_size))
    return account(entries)


# Checkpointing


def _saved_by_ops(part: Part) -> Iterator[Kept]:
    """Yield what torchtitan's per-op policy keeps of a layer in addition to its input.

    distributed/activation_checkpoint.py SelectiveAC: results of attention and of every second matrix product, which are
    in order wq, wk, wv, wo, w1, w3, w2; with tensor parallelism also
    the results of the two reduce-scatters.
    """
    item, tokens, hidden = part.item, part.tokens, part.model.hidden_size
    yield Kept(ATTENTION, "query", item * tokens * part.query)
    yield Kept(ATTENTION, "value", item * tokens * part.key)
    yield Kept(ATTENTION, "output", item * tokens * part.query)
    yield Kept(ATTENTION, ROW_STATISTICS, _F32 * tokens * part.heads)
    yield Kept(MLP, "gate", item * tokens * part.ffn)
    if not part.job.compiled:  # nothing reads it: dead code to a compiler
        yield Kept(MLP, "down", item * tokens * hidden)
    if part.job.tp > 1:
        yield Kept(MLP, "reduced", 2 * item * part.rows * hidden)


def kept_by_policy(part: Part) -> tuple[Kept, ...]:
    """Return what one recomputed layer keeps from its forward to its backward."""
    policy = part.job.checkpointing
    if policy is Checkpointing.NONE:
        return layer_kept(part)
    if policy is Checkpointing.FULL:
        return (checkpoint(part),)
    if policy is Checkpointing.ATTENTION:
        return tuple(each for each in layer_kept(part) if each.owner != SCORES)
    return (checkpoint(part), *_saved_by_ops(part))


def recomputed_layers(part: Part) -> int:
    """Return how many of the stage's layers follow the policy; the others keep everything."""
    if part.job.checkpointing is Checkpointing.NONE:
        return 0
    layers = layers_of(part).trained
    return layers if part.job.checkpoint_layers is None else min(part.job.checkpoint_layers, layers)


def kept_activations(part: Part, layers: int) -> Bytes:
    """Return the saved bytes of the first `layers` layers, counted once a micro-batch in flight, by owner.

    Inputs of layers that are moved to the host leave two here: the one in use and the one that is copied (assumed).
    """
    if part.job.thawed is not None and layers:
        return _beside_frozen(part, layers)
    kept, moved, logits = [], 0, 0
    for each, count in part.first_layers(layers):
        by_policy = _kept_by_policy(each, count)
        whole = count - by_policy
        if part.job.checkpointing is Checkpointing.FULL:
            by_policy = share(by_policy, part.job.checkpoint_every)
        if part.job.offload_activations:
            by_policy = min(by_policy, 2 - moved)
            moved += by_policy
        logits += count * router_logits_kept(each)  # an auxiliary loss reads the logits of all layers
        kept += [account(kept_by_policy(each), by_policy), account(layer_kept(each), whole)]
    return together([*kept, {MASKS: share(layers, part.layers) * embedding_mask(part), ROUTER: logits}])


def _kept_by_policy(part: Part, layers: int) -> int:
    """Return how many of some layers are recomputed: of a part of the stage's as large a share as of the stage."""
    marked = recomputed_layers(part)
    passes, rest = divmod(layers, part.layers)
    return passes * marked + rest * marked // part.layers


def _beside_frozen(part: Part, layers: int) -> Bytes:
    """Return the saved bytes of all layers, or of the lowest that trains if one is left of the backward."""
    there, below = layers_of(part), part.layers - layers
    trained, above = (1, 0) if below else (there.trained, there.above)
    marked = trained if recomputed_layers(part) else 0
    kept = account(kept_by_policy(part), min(marked, 2) if part.job.offload_activations else marked)
    whole = account(layer_kept(part), trained - marked)
    frozen = as_frozen(part)
    again = bool(marked) and recomputes_frozen(part.job)
    return together([kept, whole, account(kept_by_policy(frozen) if again else layer_kept(frozen), above)])


def recomputed(part: Part) -> Bytes:
    """Return the bytes that the recomputation of one checkpoint adds before its backward; nothing without one."""
    policy = part.job.checkpointing
    if not recomputed_layers(part):
        return {}
    if policy is Checkpointing.FULL:
        return account(layer_kept(part), min(part.job.checkpoint_every, part.layers))
    if policy is Checkpointing.ATTENTION:
        return account(each for each in layer_kept(part) if each.owner == SCORES)
    saved = {each.name for each in _saved_by_ops(part)} - {"query"}  # the rotated query is another tensor
    return account(each for each in layer_kept(part) if (each.name not in saved) or each.owner == NORMS)


def norm_gradients(part: Part) -> int:
    """Return the bytes of gradients inside the backward of one norm of the stream.

    Written op by op an RMSNorm has four f32 tensors at once: the gradient, its product with the root, and of the square
    the base and its multiple (torch derivatives.yaml mul, pow). A fused one has its input's gradient.
    """
    elements = part.rows * part.model.hidden_size
    fused = part.model.has_layer_norm or part.rms is RmsForm.FUSED or part.job.compiled
    return (part.stream_item + (part.stream_item if fused else 4 * _F32)) * elements


def inside_backward(part: Part) -> Bytes:
    """Return the bytes of gradients, and of context ranks' exchanges, inside one layer's backward at its fullest.

    The stream's gradient stays; in addition those of the MLP's product, and of its two factors (one without a gate), or
    all inside experts; or of query, key and value; or of softmax's result and its input where scores are kept. While
    context ranks exchange, in the forward of an attention or in its backward, nothing of its layer's MLP is kept: that
    is made later, and freed before (torch/csrc/autograd/generated/Functions.cpp release_variables). What their
    exchanges take beyond it counts.
    """
    model, item, tokens = part.model, part.item, part.tokens
    stream = part.stream_item * part.rows * model.hidden_size
    mlp = part.result_item * tokens * part.ffn * (2 if model.gated_mlp else 1)
    if model.experts is not None:
        mlp = gradients_inside(part) + stack_gradients(part)
    attention = item * tokens * (2 * part.query + 2 * part.key)
    scores = 2 * item * part.heads * score_rows(part) if part.job.attention is Attention.EAGER else 0
    later = sum(each.bytes for each in _mlp(part))
    exchange = max(exchange_forward(part), attention + exchange_backward(part)) - later
    gradients = max(mlp, attention, scores)
    return {GRADIENTS: stream + gradients, EXCHANGE: max(0, exchange - gradients) if part.job.cp > 1 else 0}

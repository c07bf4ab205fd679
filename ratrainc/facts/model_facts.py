"""Facts of a model configuration: parameters, arithmetic, widths, saved bytes of a layer, unusual features."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from math import isclose
from typing import Any

from attrs import frozen

from ratrain.passes.recovery.kept_bytes import kept_with_checkpoint_bytes
from ratrain.passes.recovery.layer_choice import CHOICES
from ratrain.ratrain_ir.config.hf_keys import INITIALIZER_RANGE, ROPE_THETA
from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.config.model_flops import model_flops_per_token
from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrain_ir.config.plan_text import check_plan
from ratrain.ratrain_ir.config.types import Dtype, tensor_type
from ratrain.ratrain_ir.model.blocks import BLOCK_KINDS, Block, block_chain, has_experts, parameters
from ratrain.ratrain_ir.model.slots import stream_type
from ratrain.ratrain_ir.support.quantities import number_of
from ratrain.ratrainc.console.console import size_text
from ratrain.ratrainc.console.parts import Part, Shown, TextTable
from ratrain.ratrainc.facts.expert_facts import experts_json, experts_text

USUAL_SEQ_LEN = 2048
"""Default tokens of a sequence, as in the paper's plans."""

_POLICIES = ("full", "attention", "mlp", "none")
"""Recompute policies that treat all layers alike, from the fewest bytes kept to the most; `auto` has more choices."""


@frozen(repr=False)
class ModelFacts(Shown):
    """Figures of a model; activations have the default plan's type (f16), a micro-batch has one sequence."""

    model: ModelConfig
    seq_len: int
    """tokens of a sequence"""
    blocks: tuple[tuple[Block, int], ...]
    """blocks in forward order, with their parameters; a tied matrix counts for the first block that has it"""
    flops_per_token: float
    """operations of training, forward and backward (a multiply-add is two); a third of them are forward"""
    boundary_bytes_per_token: int
    """bytes of an activation between blocks, and between stages"""
    kv_bytes_per_token: int
    """bytes of keys and values of all layers"""
    saved_bytes_per_layer: dict[str, int]
    """most bytes that a layer keeps of a sequence from forward to backward, by policy of `recompute`"""
    unusual: tuple[str, ...]
    """differences from LLaMA-2, a sentence each"""

    def parts(self) -> Iterator[Part]:
        """Yield tables of its blocks and of a layer's saved bytes, and its unusual features."""
        return model_parts(self)

    def to_json(self) -> dict[str, Any]:
        """Return the figures as `--json` prints them."""
        model = self.model
        return {
            "model": model.name,
            "family": model.family,
            "parameters": model.parameters,
            "layers": model.layers,
            "hidden_size": model.hidden_size,
            "vocab_size": model.vocab_size,
            "heads": model.heads,
            "kv_heads": model.kv_heads,
            "kv_width": model.kv_size,
            "seq_len": self.seq_len,
            "flops_per_token": self.flops_per_token,
            "forward_flops_per_token": self.flops_per_token / 3,
            "boundary_bytes_per_token": self.boundary_bytes_per_token,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "saved_bytes_per_layer": self.saved_bytes_per_layer,
            "blocks": [{"name": str(block), "parameters": count} for block, count in self.blocks],
            "unusual": list(self.unusual),
            "unsupported": [],
            "experts": experts_json(model),
        }


def model_facts(model: ModelConfig, seq_len: int | None = None) -> ModelFacts:
    """Compute the facts of a model on sequences of `seq_len` tokens.

    None takes `USUAL_SEQ_LEN`, or the model's number of positions if that is less. Raises `DiagnosticError` RT064 if
    the model has fewer positions than `seq_len`.
    """
    length = seq_len or min(USUAL_SEQ_LEN, model.learned_positions or USUAL_SEQ_LEN)
    plan = Plan(pp=1, dp=1, cuts=(), micro_batch_size=1, micro_batches=1, seq_len=length)
    check_plan(plan, model)
    key_and_value = tensor_type(Dtype(plan.view_dtype), (2 * model.kv_size,)).nbytes
    return ModelFacts(
        model,
        length,
        tuple(_counted_blocks(model)),
        model_flops_per_token(model, length),
        stream_type(model, plan).nbytes // length,
        model.layers * key_and_value,
        {policy: kept_with_checkpoint_bytes(model, plan, *CHOICES[policy]) for policy in _POLICIES},
        tuple(_unusual(model)),
    )


def model_parts(facts: ModelFacts) -> Iterator[Part]:
    """Yield the tables and lines that describe a model."""
    model = facts.model
    rows = []
    named = sorted((*_place(model, block), count) for block, count in facts.blocks)
    for (_, name, count), group in groupby(named):
        number = sum(1 for _ in group)
        share = f"{100 * number * count / model.parameters:.1f} %"
        rows.append([name, str(number), f"{count:,}", f"{number * count:,}", share])
    yield TextTable(f"{model.name}, {model.family}", ("block", "blocks", "parameters each", "together", "share"), rows)
    kept = [
        [policy, size_text(count), f"{count // facts.seq_len:,}"]
        for policy, count in facts.saved_bytes_per_layer.items()
    ]
    most = ", at most" if model.mlp_kinds else ""
    title = f"what a layer keeps of a sequence of {number_of(facts.seq_len, 'token')} for its backward{most}, in f16"
    yield TextTable(title, ("recompute policy", "kept", "bytes a token"), kept)
    yield (
        f"a token has {facts.boundary_bytes_per_token:,} bytes between layers, and {facts.kv_bytes_per_token:,} "
        "bytes of keys and "
        "values in all layers, in f16"
    )
    yield from summary(facts)


def summary(facts: ModelFacts) -> list[str]:
    """Return the model in one line, its experts in another, and its unusual features in a third, if there are any."""
    model = facts.model
    line = (
        f"{model.name}: {number_of(model.parameters, 'parameter', ',')}, {number_of(model.layers, 'layer')}, "
        f"{facts.flops_per_token / 1e9:,.3g} GFLOP a token "
        f"(forward and backward, sequences of {facts.seq_len}), keys and values {model.kv_size:,} wide"
    )
    unusual = f"unusual: {'; '.join(facts.unusual)}" if facts.unusual else ""
    return [each for each in (line, experts_text(model), unusual) if each]


def _place(model: ModelConfig, block: Block) -> tuple[int, str]:
    """Return the sort key of a block in the table of blocks, and its kind in words."""
    name = f"{block.kind} of {model.experts} experts" if has_experts(model, block) else block.kind
    return BLOCK_KINDS.index(block.kind), name


def _counted_blocks(model: ModelConfig) -> Iterator[tuple[Block, int]]:
    seen: set[str] = set()
    for block in block_chain(model):
        own = [parameter for parameter in parameters(model, block) if parameter.name not in seen]
        seen.update(parameter.name for parameter in own)
        yield block, sum(parameter.elements for parameter in own)


def _unusual(model: ModelConfig) -> Iterator[str]:
    yield from _unusual_positions(model)
    yield from _unusual_attention(model)
    yield from _unusual_blocks(model)
    if model.tied_embeddings:
        yield "embedding and head are one matrix: both ends of a pipeline hold it"
    if model.normalised_head:
        yield "the head's rows are scaled to unit length"
    if model.logit_softcap is not None:
        yield f"logits are capped at {model.logit_softcap:g}"
    scales = {"embeddings": model.embedding_scale, "what blocks add": model.residual_scale, "logits": model.logit_scale}
    for what, scale in scales.items():
        if scale != 1:
            yield f"{what} {'are' if what != 'what blocks add' else 'is'} multiplied by {scale:.6g}"
    if model.initializer_range != INITIALIZER_RANGE:
        yield f"initial matrices have a deviation of {model.initializer_range:g}, not {INITIALIZER_RANGE:g}"


def _unusual_positions(model: ModelConfig) -> Iterator[str]:
    if model.position == "alibi":
        yield "ALiBi: attention scores fall with distance, no position is embedded"
    if model.position == "learned":
        yield f"learned positions: sequences of {model.learned_positions:,} tokens at most"
    if model.position != "rope":
        return
    if model.rope_theta != ROPE_THETA:
        yield f"the rotary base is {model.rope_theta:,.10g}, not {ROPE_THETA:,.10g}"
    if model.local_rope_theta not in (None, model.rope_theta):
        yield f"in layers with a window the rotary base is {model.local_rope_theta:,.10g}"
    if model.rope_scaling:
        yield f"rotary frequencies are scaled: {model.rope_scaling}"
    if model.rotary_dim not in (None, model.head_dim):
        yield f"{model.rotary_dim} of the {model.head_dim} elements of a head are rotated"
    if model.rope_interleaved:
        yield "neighbouring elements are rotated"
    if "n" in model.layer_kinds:
        yield f"{model.layer_kinds.count('n')} of {model.layers} layers are not rotated"


def _unusual_attention(model: ModelConfig) -> Iterator[str]:
    if model.kv_heads != model.heads:
        yield f"grouped queries: {model.heads} heads share {model.kv_heads} of keys and values"
    if model.q_size != model.hidden_size:
        yield f"heads of {model.head_dim}: queries are {model.q_size:,} wide, the model {model.hidden_size:,}"
    if model.sliding_window is not None:
        windowed = model.layer_kinds.count("w")
        where = f" in {windowed} of {number_of(model.layers, 'layer')}" if windowed else ""
        yield f"a sliding window: a token sees {model.sliding_window:,} tokens{where}"
    if model.qk_norm != "none":
        yield f"queries and keys are normed, {'each head' if model.qk_norm == 'head' else 'whole'}"
    if model.attention_scale is not None and not isclose(model.attention_scale, model.head_dim**-0.5):
        yield f"scores are multiplied by {model.attention_scale:.6g}, not 1 / sqrt({model.head_dim})"
    if model.attention_softcap is not None:
        yield f"scores are capped at {model.attention_softcap:g}"


def _unusual_blocks(model: ModelConfig) -> Iterator[str]:
    if model.has_layer_norm:
        yield "layer norms with biases"
    if model.norm_placement != "pre":
        where = {"post": "after what a block computes, not before", "both": "before and after what a block computes"}
        yield f"norms stand {where[model.norm_placement]}"
    if model.norm_unit_offset:
        yield "norms multiply by 1 + weight"
    if model.parallel_residual:
        yield "attention and MLP side by side: both are computed of the layer's input"
    biased = {"queries, keys and values": model.qkv_bias, "attention's output": model.o_bias, "the MLP": model.mlp_bias}
    if any(biased.values()):
        yield f"biases of {', '.join(what for what, has in biased.items() if has)}"
    if not model.gated_mlp:
        yield "an MLP of two matrices, without a gate"
    if model.activation != "silu":
        yield f"the activation is {model.activation}"
    if model.experts and not model.router_normalised:
        yield "the weights of a token's experts do not sum to 1: softmax over all experts"

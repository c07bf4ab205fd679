"""Models that the arguments of a Megatron-LM script describe.

Defaults are those of megatron/training/arguments.py, validate_args, in commit d98e8a64 (2026-08-22).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ratrain.ratrainc.bridge.jobs.job_common import dense, model_of_name

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrainc.bridge.jobs.job_reader import JobReader

_DIVISOR = 128
"""Default of --make-vocab-size-divisible-by."""
_GPT2_TOKENS = 50257
"""Tokens of GPT-2's own vocabulary file."""
_WITHOUT = "how many tokens the vocabulary has is not in the script, and no model is built without"


def described_model(reader: JobReader, tp: int, given: ModelConfig | None) -> ModelConfig | None:
    """Return the model that the arguments describe; None if they lack its sizes or its vocabulary.

    A missing vocabulary is noted, unless a model is `given` anyway.
    The vocabulary is padded to a multiple for all `tp` tensor-parallel ranks, as Megatron-LM pads it.
    """
    layers = reader.size("num-layers") or reader.size("encoder-num-layers")
    hidden, heads = reader.size("hidden-size"), reader.size("num-attention-heads")
    ffn, channels = reader.size("ffn-hidden-size"), reader.size("kv-channels")
    groups = reader.size("num-query-groups") if reader.take("group-query-attention", bool) else None
    gated = bool(reader.take("swiglu", bool))
    vocabulary = _take_vocabulary(reader, tp, given)
    more = _take_make_up(reader, gated=gated)
    experts = reader.size("num-experts")
    if experts is not None:
        reader.unknown("num-experts", "experts are not counted")
    if layers is None or hidden is None or heads is None or vocabulary is None or (experts or 1) > 1:
        return None
    if channels is None and hidden % heads:
        text = f"hidden-size {hidden} is not a multiple of {heads} heads: say kv-channels"
        reader.wrong("num-attention-heads", text, code="RT064")
        return None
    if heads % (groups or heads):
        text = f"num-attention-heads {heads} is not a multiple of num-query-groups {groups}"
        reader.wrong("num-query-groups", text, code="RT064")
        return None
    if ffn is None:
        ffn = int((4 * hidden * 2 / 3) / 64) * 64 if gated else 4 * hidden
    return dense(
        "megatron",
        _closest_family(more),
        vocabulary=vocabulary,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=groups,
        ffn=ffn,
        eps=1e-5,
        head_dim=channels or hidden // heads,
        **more,
    )


def _take_vocabulary(reader: JobReader, tp: int, given: ModelConfig | None) -> int | None:
    """Return the rows of the embedding; None, with a note, if the script does not say its vocabulary."""
    divisor = reader.size("make-vocab-size-divisible-by") or _DIVISOR
    padded, tokens = reader.size("padded-vocab-size"), reader.size("vocab-size")
    kind, name = reader.take("tokenizer-type", str), reader.take("tokenizer-model", str)
    file = reader.settings.get("vocab-file")
    if padded is not None:
        return padded
    if tokens is None and kind == "HuggingFaceTokenizer":
        known = model_of_name(name)
        tokens = None if known is None else known.vocab_size
    elif tokens is None and kind == "GPT2BPETokenizer" and file is not None and "gpt2" in str(file.value):
        tokens = _GPT2_TOKENS
    if tokens is None and given is not None:
        return None
    if tokens is None:
        where = "tokenizer-type" if reader.has("tokenizer-type") else "num-layers"
        reader.unknown(where, f"{_WITHOUT}: say --vocab-size, or give --model")
        return None
    if reader.take("disable-pad-vocab-size", bool) or reader.take("no-pad-vocab-size", bool):
        return tokens
    multiple = divisor * tp
    return -(-tokens // multiple) * multiple


def _take_make_up(reader: JobReader, *, gated: bool) -> dict[str, Any]:
    """Return the fields of the model's make-up: activation, norms, biases, positions and windows."""
    unbiased = bool(reader.take("disable-bias-linear", bool))
    biased = not unbiased or bool(reader.take("add-qkv-bias", bool))
    kind = reader.take("position-embedding-type", str) or "learned_absolute"
    if reader.take("use-rotary-position-embeddings", bool):
        kind = "rope"
    longest = reader.size("max-position-embeddings")
    learned = kind == "learned_absolute" and not reader.take("no-position-embedding", bool)
    squared = reader.take("squared-relu", bool)
    window = reader.take("window-size", str)
    before = (window or "").strip("()").replace(",", " ").split()
    return {
        "tied_embeddings": not reader.take("untie-embeddings-and-output-weights", bool),
        "norm": "rms" if reader.take("normalization", str) == "RMSNorm" else "layer",
        "qk_norm": "head" if reader.take("qk-layernorm", bool) else "none",
        "qkv_bias": biased,
        "o_bias": not unbiased,
        "mlp_bias": not unbiased,
        "gated_mlp": gated,
        "activation": "silu" if gated else "relu2" if squared else "gelu-tanh",
        "position": "learned" if learned else "rope",
        "learned_positions": longest if learned else None,
        "parallel_residual": False,
        "packed_qkv": False,
        "sliding_window": int(before[0]) + 1 if before and before[0].isdigit() else None,
    }


def _closest_family(more: dict[str, Any]) -> str:
    """Return the family that is closest by its norms and biases."""
    if more["norm"] == "layer":
        return "gpt2" if more["position"] == "learned" else "gpt_neox"
    if more["qk_norm"] == "head":
        return "qwen3"
    return "qwen2" if more["qkv_bias"] and not more["o_bias"] else "llama"

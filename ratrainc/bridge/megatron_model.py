"""Arguments of Megatron-LM that describe a model, and the parts of a model that none of them does.

What the arguments do is looked up in commit d98e8a64 (2026-08-22). `ratrainc/bridge/jobs/megatron_shape.py` reads
them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.config.hf_export import rotary_share
from ratrain.ratrain_ir.config.rope_scaling import RopeScaling, parse_scaling
from ratrain.ratrainc.bridge.settings import Missing

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan

_WHY_NOT = {
    "norm_placement": "a block norms its input there",
    "parallel_residual": "an MLP takes what attention gives there",
    "attention_scale": "scores are divided by the root of kv-channels there, and no argument says another factor",
    "attention_softcap": "no argument caps scores",
    "logit_softcap": "no argument caps logits",
    "embedding_scale": "only --use-mup scales embedded tokens there, together with the optimizer's rates",
    "residual_scale": "no argument scales what a block adds",
    "logit_scale": "only --use-mup scales logits there, together with the optimizer's rates",
    "normalised_head": "no argument scales the head's rows to unit length",
    "local_rope_theta": "all layers have one rotary base there",
    "padding_token": "each row of the embedding is trained there",
}
"""Fields of a model that no argument says, where they differ from what Megatron-LM does without arguments."""
_USUAL = {
    "norm_placement": "pre",
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "logit_scale": 1.0,
    "parallel_residual": False,
    "normalised_head": False,
}
_NO_SCALE = "with the factor 1 attention has none"
_MOST_PADDING = 128
"""Default of --make-vocab-size-divisible-by."""
_LLAMA_3 = (1.0, 4.0, 8192.0)
"""Low and high frequency factor and length that --use-rope-scaling takes: RotaryEmbedding._apply_scaling."""


class _Flags:
    """Arguments collected so far, and the fields that they do not express."""

    def __init__(self, model: ModelConfig) -> None:
        self.model = model
        self.flags: list[str] = []
        self.missing: list[Missing] = []

    def add(self, *flags: str) -> None:
        """Append arguments, without their dashes."""
        self.flags += flags

    def lacks(self, field: str, instead: object, why: str) -> None:
        """Record a field that the arguments do not express, and the value that they give it; None: they give none."""
        value = getattr(self.model, field)
        self.missing.append(
            Missing(field, _word(value), None if instead is None else _word(instead), f"{why} (Megatron-LM)")
        )


def model_flags(model: ModelConfig, plan: Plan) -> tuple[list[str], tuple[Missing, ...]]:
    """Write a model as arguments without their dashes; return them, and the fields that they cannot express.

    The plan says how long sequences are, and over how many ranks the vocabulary is shared out.
    """
    out = _Flags(model)
    out.add(
        f"num-layers {model.layers}",
        f"hidden-size {model.hidden_size}",
        f"ffn-hidden-size {model.ffn_size}",
        f"num-attention-heads {model.heads}",
        f"kv-channels {model.head_dim}",
    )
    if model.kv_heads != model.heads:
        out.add("group-query-attention", f"num-query-groups {model.kv_heads}")
    _norms(out)
    _mlp(out)
    _biases(out)
    _positions(out, plan)
    _windows(out)
    _vocabulary(out, plan)
    out.add(f"init-method-std {model.initializer_range!r}", "attention-dropout 0.0", "hidden-dropout 0.0")
    for field, why in _WHY_NOT.items():
        usual = _USUAL.get(field)
        if getattr(model, field) not in (None, usual):
            out.lacks(field, usual, why)
    return out.flags, tuple(out.missing)


def _word(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else str(value)


def _norms(out: _Flags) -> None:
    model = out.model
    out.add(
        f"normalization {'LayerNorm' if model.has_layer_norm else 'RMSNorm'}",
        f"norm-epsilon {model.norm_eps!r}",
        *["apply-layernorm-1p"] * model.norm_unit_offset,
        *["qk-layernorm"] * (model.qk_norm == "head"),
    )
    if model.qk_norm == "whole":
        out.lacks("qk_norm", "none", "--qk-layernorm norms each head alone")


def _all_biased(model: ModelConfig) -> bool:
    """Tell whether all linear layers of blocks have biases, as they have there without arguments."""
    return model.qkv_bias and model.o_bias and model.mlp_bias


def _mlp(out: _Flags) -> None:
    """Write the activation.

    With biases GELU is fused, and then it is the approximation by tanh; without it is exact. --openai-gelu has no
    effect.
    """
    model = out.model
    biased = _all_biased(model)
    kind = (model.activation, model.gated_mlp)
    if kind == ("silu", True):
        out.add("swiglu")
        return
    there = "gelu-tanh" if biased else "gelu"
    if kind == ("relu2", False):
        out.add("squared-relu", *["no-bias-gelu-fusion"] * biased)
    elif kind == ("gelu", False):
        out.add(*["no-bias-gelu-fusion"] * biased)
    elif model.gated_mlp:
        out.add("swiglu")
        out.lacks("activation", "silu", "of gated MLPs --swiglu and --quick-geglu are all that there is")
    elif kind != (there, False):
        out.lacks("activation", there, "an MLP that is not gated has GELU or --squared-relu there")


def _biases(out: _Flags) -> None:
    model = out.model
    if _all_biased(model):
        return
    out.add("disable-bias-linear", *["add-qkv-bias"] * model.qkv_bias)
    for field in ("o_bias", "mlp_bias"):
        if getattr(model, field):
            out.lacks(field, False, "linear layers all have biases there, or --add-qkv-bias alone")


def _positions(out: _Flags, plan: Plan) -> None:
    model = out.model
    known = model.inert.get("max_position_embeddings")
    scaling = parse_scaling(model.rope_scaling) if model.rope_scaling else None
    longest = model.learned_positions or max(plan.seq_len, known if isinstance(known, int) else 0)
    out.add(f"max-position-embeddings {longest}")
    if model.position == "learned":
        out.add("position-embedding-type learned_absolute")
        return
    if model.position != "rope":
        out.add("position-embedding-type none")
        out.lacks("position", "none", "no argument says such positions")
        return
    base = round(model.rope_theta)
    kind = "yarn" if scaling is not None and scaling.kind == "yarn" else "rope"
    out.add(f"position-embedding-type {kind}", f"rotary-base {base}")
    if base != model.rope_theta:
        out.lacks("rope_theta", base, "--rotary-base is a whole number")
    if model.rotary_dim is not None:
        out.add(f"rotary-percent {rotary_share(model.rotary_dim, model.head_dim)!r}")
    out.add(*["rotary-interleaved"] * model.rope_interleaved)
    if "n" in model.layer_kinds:
        out.add(f"no-rope-freq '{_pattern(model.layer_kinds, 'n')}'")
    if scaling is not None:
        _scaling(out, scaling)


def _scaling(out: _Flags, scaling: RopeScaling) -> None:
    factor = scaling["factor"]
    if scaling.kind == "yarn":
        _yarn(out, scaling)
    elif scaling.kind == "linear" and factor.is_integer():
        out.add(f"rotary-seq-len-interpolation-factor {round(factor)}")
    elif scaling.kind == "llama3" and scaling.values[1:] == _LLAMA_3:
        out.add("use-rope-scaling", f"rope-scaling-factor {factor!r}")
    else:
        why = {
            "linear": "--rotary-seq-len-interpolation-factor is a whole number",
            "llama3": "--use-rope-scaling has the factors 1 and 4 and the length 8192",
            "dynamic": "no argument lets the base follow the length of a sequence",
        }
        out.lacks("rope_scaling", "", why[scaling.kind])


def _yarn(out: _Flags, scaling: RopeScaling) -> None:
    """Write YaRN; its factor of attention is 1 + 0.1 * mscale * log(factor) there."""
    factor, attention = scaling["factor"], scaling["attention_factor"]
    out.add(
        f"rotary-scaling-factor {factor!r}",
        f"yarn-original-max-position-embeddings {round(scaling['original_positions'])}",
        f"yarn-beta-fast {scaling['beta_fast']!r}",
        f"yarn-beta-slow {scaling['beta_slow']!r}",
        f"{'' if scaling['truncate'] else 'no-'}yarn-correction-range-round-to-int",
    )
    if factor > 1:
        scale = (attention - 1) / (0.1 * math.log(factor))
        out.add(f"mscale {round(scale, 9)!r}", "mscale-all-dim 0.0")
    elif attention != 1:
        out.lacks(
            "rope_scaling", RopeScaling("yarn", (factor, *scaling.values[1:4], 1.0, scaling.values[5])), _NO_SCALE
        )


def _pattern(kinds: str, letter: str) -> str:
    """Return a list with 1 for the layers of a kind and 0 for the others."""
    return f"[{','.join(str(int(each == letter)) for each in kinds)}]"


def _windows(out: _Flags) -> None:
    model = out.model
    if model.sliding_window is None:
        return
    # pairs of tokens before and after: the token itself counts in neither
    out.add(f"window-size {model.sliding_window - 1},0")
    if model.layer_kinds:
        out.add(f"window-attn-skip-freq '{_pattern(model.layer_kinds, 'w')}'")


def _vocabulary(out: _Flags, plan: Plan) -> None:
    """Write the vocabulary, padded to as few rows as its ranks allow."""
    model = out.model
    out.add(f"vocab-size {model.vocab_size}", *["untie-embeddings-and-output-weights"] * (not model.tied_embeddings))
    divisor = _MOST_PADDING
    while divisor > 1 and model.vocab_size % (divisor * plan.tp):
        divisor //= 2
    out.add(f"make-vocab-size-divisible-by {divisor}")
    rows = -(-model.vocab_size // (divisor * plan.tp)) * divisor * plan.tp
    if rows != model.vocab_size:
        out.lacks("vocab_size", rows, f"{plan.tp} tensor-parallel ranks have equal shares of the matrix")

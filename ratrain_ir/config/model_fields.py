"""Reading and checking of a `ModelConfig`'s fields, from a text's header or a translated `config.json`.

Fields are checked alone, against each other, and against the family.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from math import sqrt
from typing import Any

from attrs import evolve, fields

from ratrain.ratrain_ir.config.families import FAMILIES, FAMILY, where
from ratrain.ratrain_ir.config.fields import FieldReader, Report
from ratrain.ratrain_ir.config.hf_config import check_inert
from ratrain.ratrain_ir.config.hf_keys import INITIALIZER_RANGE, PADDING_TOKEN_KEY
from ratrain.ratrain_ir.config.model_config import CONFIG_PREFIX, SIZES, ModelConfig, usual_value
from ratrain.ratrain_ir.config.rope_scaling import parse_scaling
from ratrain.ratrain_ir.support.json_fields import of_field
from ratrain.ratrain_ir.support.limits import MAX_HIDDEN, MAX_LAYERS
from ratrain.ratrain_ir.support.text import Places, nowhere, shown

POSITIONS = ("rope", "alibi", "learned")
NORMS = ("rms", "layer")
NORM_PLACEMENTS = ("pre", "post", "both")
QK_NORMS = ("none", "head", "whole")
ACTIVATIONS = ("silu", "gelu", "gelu-tanh", "relu2")

# Bounds far above any model: they catch typing errors.
_MAX_VOCAB = 1 << 24
_MAX_HEADS = 1 << 14
_MAX_HEAD_DIM = 1 << 14
_MAX_FFN = 1 << 22
_MAX_WINDOW = 1 << 30
_MAX_POSITIONS = 1 << 30
_MAX_EXPERTS = 1 << 14
_MAX_THETA = 1e12
_POSITIVE = "a number from 1e-6 to 1e6"

_EVERYWHERE = frozenset({*SIZES, "rope_theta", "tied_embeddings", "initializer_range", "inert", "training"})
"""Fields that a model of any family chooses."""
_FLAGS = (
    "qkv_bias",
    "o_bias",
    "mlp_bias",
    "tied_embeddings",
    "normalised_head",
    "packed_qkv",
    "norm_unit_offset",
    "parallel_residual",
    "gated_mlp",
    "rope_interleaved",
    "router_normalised",
)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def model_from_fields(values: Mapping[str, object], *, places: Places = nowhere) -> ModelConfig:
    """Return the model of a text's header: the inverse of `ModelConfig.to_fields`. `places` finds a field in that text.

    Raises RT062 with all fields that are missing, unknown, mistyped, out of range or contradictory.
    """
    report = Report(places)
    inert = {key: of_field(value) for key, value in values.items() if key.startswith(CONFIG_PREFIX)}
    reader = FieldReader({key: value for key, value in values.items() if key not in inert}, report, "RT062")
    reader.refuse_unknown({attribute.name for attribute in fields(ModelConfig)} - {"inert", "training"})
    config = read_model(reader)
    inert = {key.removeprefix(CONFIG_PREFIX): value for key, value in inert.items()}
    check_inert(inert, config.family, report)
    if config.padding_token is not None and PADDING_TOKEN_KEY in inert:
        key = f"{CONFIG_PREFIX}{PADDING_TOKEN_KEY}"
        report.error("RT062", key, f"'{key}' and 'padding_token' mean the same", help=f"remove '{key}'")
    report.check()
    return evolve(config, inert=inert)


def check_model(config: ModelConfig) -> None:
    """Raise RT062 if a configuration built in Python is out of range or contradicts itself."""
    model_from_fields(config.to_fields())


def read_model(reader: FieldReader) -> ModelConfig:
    """Return the configuration that a reader's fields describe; use it only after the reader's report is checked."""
    family = reader.word("family", FAMILIES)
    hidden_size = reader.integer("hidden_size", 1, MAX_HIDDEN)
    heads = reader.integer("heads", 1, _MAX_HEADS)
    position = _word(reader, family, "position", POSITIONS)
    layers = reader.integer("layers", 1, MAX_LAYERS)
    flags: dict[str, Any] = {name: reader.flag(name, default=bool(usual_value(family, name))) for name in _FLAGS}
    config = ModelConfig(
        name=reader.text("name", lambda name: _NAME.fullmatch(name) is not None, "letters, digits, '.', '_' and '-'"),
        family=family,
        vocab_size=reader.integer("vocab_size", 2, _MAX_VOCAB),
        hidden_size=hidden_size,
        layers=layers,
        heads=heads,
        kv_heads=reader.integer("kv_heads", 1, _MAX_HEADS, default=heads),
        head_dim=_head_dim(reader, hidden_size, heads),
        ffn_size=reader.integer("ffn_size", 1, _MAX_FFN),
        norm_eps=reader.number("norm_eps", lambda eps: 0 < eps < 1, "a number above 0 and below 1"),
        position=position,
        rope_theta=_rope_theta(reader, position),
        sliding_window=reader.integer_or_none("sliding_window", 1, _MAX_WINDOW),
        learned_positions=_learned_positions(reader, position),
        initializer_range=reader.number(
            "initializer_range", lambda std: 0 < std <= 1, "a number above 0 and up to 1", default=INITIALIZER_RANGE
        ),
        norm=_word(reader, family, "norm", NORMS),
        norm_placement=_word(reader, family, "norm_placement", NORM_PLACEMENTS),
        qk_norm=_word(reader, family, "qk_norm", QK_NORMS),
        activation=_word(reader, family, "activation", ACTIVATIONS),
        rotary_dim=reader.integer_or_none("rotary_dim", 2, _MAX_HEAD_DIM),
        rope_scaling=_optional_text(
            reader, "rope_scaling", _is_scaling, "a scaling of a rotary embedding, like llama3 8 1 4 8192"
        ),
        local_rope_theta=_number_or_none(reader, "local_rope_theta", lambda theta: 1 < theta <= _MAX_THETA),
        layer_kinds=_optional_text(
            reader,
            "layer_kinds",
            lambda kinds: len(kinds) in (0, layers) and set(kinds) <= set("fwn"),
            "a letter for each layer: f (full attention), w (the window) or n (full, nothing rotated)",
        ),
        attention_scale=_number_or_none(reader, "attention_scale", _is_scale),
        attention_softcap=_number_or_none(reader, "attention_softcap", _is_scale),
        logit_softcap=_number_or_none(reader, "logit_softcap", _is_scale),
        embedding_scale=reader.number("embedding_scale", _is_scale, _POSITIVE, default=1.0),
        residual_scale=reader.number("residual_scale", _is_scale, _POSITIVE, default=1.0),
        logit_scale=reader.number("logit_scale", _is_scale, _POSITIVE, default=1.0),
        experts=reader.integer_or_none("experts", 1, _MAX_EXPERTS),
        experts_per_token=reader.integer_or_none("experts_per_token", 1, _MAX_EXPERTS),
        expert_size=reader.integer_or_none("expert_size", 1, _MAX_FFN),
        shared_expert_size=reader.integer_or_none("shared_expert_size", 1, _MAX_FFN),
        mlp_kinds=_optional_text(
            reader,
            "mlp_kinds",
            lambda kinds: len(kinds) in (0, layers) and set(kinds) <= set("de"),
            "a letter for each layer: e (experts) or d (a dense MLP)",
        ),
        padding_token=reader.integer_or_none("padding_token", -_MAX_VOCAB, _MAX_VOCAB),
        **flags,
    )
    _check_shape(reader, config)
    _check_activation(reader, config)
    _check_experts(reader, config)
    _check_layers(reader, config)
    _check_family(reader, config)
    return config


def _word(reader: FieldReader, family: str, name: str, choices: Sequence[str]) -> str:
    return reader.word(name, choices, default=str(usual_value(family, name)))


def _optional_text(reader: FieldReader, name: str, accept: Callable[[str], bool], expected: str) -> str:
    return reader.text(name, accept, expected) if name in reader.values else ""


def _number_or_none(reader: FieldReader, name: str, accept: Callable[[float], bool]) -> float | None:
    return None if reader.values.get(name) is None else reader.number(name, accept, _POSITIVE)


def _is_scale(value: float) -> bool:
    return 1e-6 <= value <= 1e6


def _is_scaling(text: str) -> bool:
    return not text or parse_scaling(text) is not None


def _head_dim(reader: FieldReader, hidden_size: int, heads: int) -> int:
    """Return the given head dimension, else hidden_size / heads, which must be whole."""
    if "head_dim" in reader.values:
        return reader.integer("head_dim", 1, _MAX_HEAD_DIM)
    if reader.good("hidden_size", "heads"):
        if hidden_size % heads == 0 and hidden_size // heads <= _MAX_HEAD_DIM:
            return hidden_size // heads
        size, count = reader.label("hidden_size"), reader.label("heads")
        reader.contradiction(
            "RT062",
            "heads",
            f"'{size}' {hidden_size} is not a multiple of '{count}' {heads}"
            if hidden_size % heads
            else f"'{size}' {hidden_size} shared by '{count}' {heads} makes heads wider than {_MAX_HEAD_DIM}",
            help=f"change one of them, or give '{reader.label('head_dim')}'",
        )
    reader.bad.add("head_dim")
    return 1


def _learned_positions(reader: FieldReader, position: str) -> int | None:
    if position == "learned":
        return reader.integer("learned_positions", 1, _MAX_POSITIONS)
    return reader.integer_or_none("learned_positions", 1, _MAX_POSITIONS)


def _rope_theta(reader: FieldReader, position: str) -> float:
    if position != "rope":
        why = "ALiBi rotates nothing" if position == "alibi" else "learned positions rotate nothing"
        return reader.number("rope_theta", lambda theta: theta == 0, f"0.0, as {why}", default=0.0)
    return reader.number("rope_theta", lambda theta: 1 < theta <= _MAX_THETA, "a number above 1 and up to 1e12")


def _check_shape(reader: FieldReader, config: ModelConfig) -> None:
    """Check sizes that must fit together in any family."""
    label = reader.label
    if reader.good("heads", "kv_heads") and config.heads % config.kv_heads:
        reader.contradiction(
            "RT062",
            "kv_heads",
            f"'{label('heads')}' {config.heads} is not a multiple of '{label('kv_heads')}' {config.kv_heads}",
            help="each key-value head serves the same number of query heads",
        )
    if reader.good("padding_token", "vocab_size") and not _is_token(config.padding_token, config.vocab_size):
        reader.contradiction(
            "RT062",
            "padding_token",
            f"'{label('padding_token')}' {config.padding_token} is outside the vocabulary of "
            f"{config.vocab_size} tokens: no row of "
            "the embedding is its own",
            help="write null: then the rows of all tokens are trained",
        )
    if reader.good("position", "head_dim") and config.position == "rope" and config.head_dim % 2:
        reader.contradiction(
            "RT062",
            "head_dim",
            f"the head dimension {config.head_dim} is odd, but RoPE rotates pairs of elements",
            help="use an even head dimension",
        )


def _is_token(number: int | None, vocab_size: int) -> bool:
    """Tell whether a number is None or a token. Negative numbers count from the vocabulary's end."""
    return number is None or -vocab_size <= number < vocab_size


def _check_activation(reader: FieldReader, config: ModelConfig) -> None:
    """Check that there is a kernel: squared ReLU exists without a gate only, SiLU with one only."""
    if reader.good("activation", "gated_mlp") and config.activation == ("relu2" if config.gated_mlp else "silu"):
        how = "with" if config.gated_mlp else "without"
        message = f"an MLP {how} a gate and with the activation {config.activation} is not supported"
        help_text = f"supported {how} a gate are {'silu, ' if config.gated_mlp else 'relu2, '}gelu and gelu-tanh"
        reader.contradiction("RT062", "activation", message, help=help_text)


def _check_experts(reader: FieldReader, config: ModelConfig) -> None:
    """Check the fields of a mixture of experts: its kernels are of MLPs with a SiLU gate and without biases."""
    label = reader.label
    others = ("experts_per_token", "expert_size", "shared_expert_size", "mlp_kinds")
    if config.experts is None:
        asked = reader.good("family") and "experts" in FAMILY[config.family].free  # then their absence is reported
        for name in others if reader.good("experts") and not asked else ():
            if reader.good(name) and getattr(config, name) not in (None, ""):
                text = f"'{label(name)}' is {getattr(config, name)}, but the model has no experts"
                reader.contradiction("RT062", name, text, help=f"give '{label('experts')}', or leave it out")
        return
    if config.experts_per_token is None and reader.good("experts_per_token"):
        text = f"'{label('experts_per_token')}' is missing: how many experts a token goes to"
        reader.contradiction("RT062", "experts_per_token", text)
    elif reader.good("experts", "experts_per_token") and (config.experts_per_token or 0) > config.experts:
        text = f"a token cannot go to {config.experts_per_token} of {config.experts} experts"
        reader.contradiction("RT062", "experts_per_token", text)
    if reader.good("activation", "gated_mlp") and (config.activation, config.gated_mlp) != ("silu", True):
        text = f"experts with the activation {config.activation} are not supported"
        reader.contradiction("RT062", "activation", text, help="supported is silu with a gate")
    if len(set(config.mlp_kinds)) == 1 and reader.good("mlp_kinds"):
        text = f"'mlp_kinds' is {config.mlp_kinds}: all layers are alike"
        way_out = "leave it out" if "e" in config.mlp_kinds else "give some layers an e; without any, leave out experts"
        reader.contradiction("RT062", "mlp_kinds", text, help=way_out)
    for name in ("mlp_bias", "parallel_residual"):
        if reader.good(name) and getattr(config, name):
            text = f"'{label(name)}' does not go with experts"
            reader.contradiction("RT062", name, text, help="supported are experts without biases, behind attention")


def _check_layers(reader: FieldReader, config: ModelConfig) -> None:
    """Check the fields in which layers may differ."""
    windowed = "w" in config.layer_kinds
    if config.layer_kinds and reader.good("layer_kinds", "sliding_window"):
        if windowed and config.sliding_window is None:
            reader.contradiction("RT062", "layer_kinds", "some layers have a window, but no 'sliding_window' is given")
        if not windowed and config.sliding_window is not None:
            reader.contradiction("RT062", "sliding_window", "a window is given, but no layer has it")
        if len(set(config.layer_kinds)) == 1 and "n" not in config.layer_kinds:
            reader.contradiction("RT062", "layer_kinds", "all layers are alike", help="leave 'layer_kinds' out")
    rotary = ("rotary_dim", "rope_interleaved", "rope_scaling", "local_rope_theta")
    for name in rotary if config.position != "rope" else ():
        if reader.good(name, "position") and getattr(config, name):
            reader.contradiction(
                "RT062", name, f"'{reader.label(name)}' is for rotated positions, which this model has not"
            )
    width = config.rotary_dim
    if width is not None and reader.good("rotary_dim", "head_dim") and (width % 2 or width >= config.head_dim):
        message = (
            f"{width} rotated elements of a head: an even number below the head dimension {config.head_dim} is expected"
        )
        reader.contradiction("RT062", "rotary_dim", message)


def _check_family(reader: FieldReader, config: ModelConfig) -> None:
    """Check the fields that only some families have.

    Weights of other shapes could not be exchanged with Hugging Face.
    """
    if not reader.good("family"):
        return
    family = config.family
    for name in (each.name for each in fields(ModelConfig)):
        if name in _EVERYWHERE or name in FAMILY[family].free or not reader.good(name):
            continue
        value = getattr(config, name)
        if value != usual_value(family, name) and not (name == "rope_theta" and config.position == "rope"):
            text = f"'{reader.label(name)}' {shown(value)} contradicts family '{family}' ({where(name)})"
            reader.contradiction("RT062", name, text)
    _check_exchange(reader, config)
    _check_family_experts(reader, config)
    if reader.good("tied_embeddings", "normalised_head") and config.tied_embeddings and config.normalised_head:
        message = "tied embeddings do not go with a normalised head"
        reader.contradiction("RT062", "tied_embeddings", message)
    shape = ("heads", "kv_heads", "head_dim", "hidden_size")
    equal = config.kv_size == config.q_size == config.hidden_size
    if FAMILY[family].equal_widths and reader.good(*shape) and not equal:
        reader.contradiction(
            "RT062",
            "heads",
            f"packed QKV has three parts of the hidden size, but here they have {config.q_size}, {config.kv_size} and "
            f"{config.kv_size} columns, and the hidden size is {config.hidden_size}",
            help=f"a {family} model has as many key-value heads as heads, and heads * head_dim = hidden size",
        )


def _check_family_experts(reader: FieldReader, config: ModelConfig) -> None:
    """Check that a model of a family with experts has them, with the sizes that its `config.json` always says."""
    family, known = config.family, FAMILY[config.family]
    for name in ("experts", "expert_size", "shared_expert_size"):
        if name in known.free and reader.good(name) and getattr(config, name) is None:
            text = f"'{reader.label(name)}' is missing, which family '{family}' always says"
            reader.contradiction("RT062", name, text, help="give a whole number from 1 on")
    shape = ("heads", "head_dim", "hidden_size")
    if known.normed_widths and reader.good(*shape) and config.q_size != config.hidden_size:
        text = f"the queries of family '{family}' are as wide as the model ({config.hidden_size}), not {config.q_size}"
        reader.contradiction("RT062", "head_dim", text, help="heads * head_dim = hidden size")


def _check_exchange(reader: FieldReader, config: ModelConfig) -> None:
    """Check for choices that no `config.json` of the family can express."""
    family, known = config.family, FAMILY[config.family]
    if {"qkv_bias", "o_bias"} <= known.free and reader.good("qkv_bias", "o_bias") and config.qkv_bias != config.o_bias:
        message = f"all of attention has biases or none of it in family '{family}'"
        reader.contradiction("RT062", "o_bias", message, help="give 'qkv_bias' and 'o_bias' the same value")
    letters = set(config.layer_kinds) - set(known.layer_letters)
    if letters and "layer_kinds" in known.free and reader.good("layer_kinds"):
        text = f"'layer_kinds' has {' and '.join(sorted(letters))}, which layers of family '{family}' cannot be"
        reader.contradiction("RT062", "layer_kinds", text, help=f"letters are {' and '.join(known.layer_letters)}")
    scaling = parse_scaling(config.rope_scaling)
    if scaling is not None and "rope_scaling" in known.free and scaling.kind not in known.scalings:
        text = f"'{reader.label('rope_scaling')}' is {scaling.kind}, which family '{family}' has not"
        reader.contradiction("RT062", "rope_scaling", text, help=f"it has {' and '.join(known.scalings)}")
    elif scaling is not None and family == "gemma3_text" and scaling.kind == "yarn" and not scaling["truncate"]:
        text = f"'{reader.label('rope_scaling')}' does not truncate, but yarn always does in the class of gemma3_text"
        reader.contradiction("RT062", "rope_scaling", text)
    if "attention_scale" in known.free and config.attention_scale is None:
        text = f"'attention_scale' is missing, which family '{family}' always says"
        reader.contradiction("RT062", "attention_scale", text, help="usual is 1 / sqrt(head_dim)")
    if "local_rope_theta" in known.free and (config.local_rope_theta is None) != (config.sliding_window is None):
        text = f"'local_rope_theta' is for layers with a window, and each of family '{family}' has it"
        reader.contradiction("RT062", "local_rope_theta", text, help="give it and 'sliding_window', or neither")
    if family in ("gemma2", "gemma3_text") and reader.good("hidden_size", "embedding_scale"):
        expected = sqrt(config.hidden_size)
        if config.embedding_scale != expected:
            text = (
                f"'embedding_scale' is {config.embedding_scale}, but sqrt(hidden_size) = {expected} in "
                f"family '{family}'"
            )
            reader.contradiction("RT062", "embedding_scale", text)

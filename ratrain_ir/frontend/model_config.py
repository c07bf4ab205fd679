"""The model: its shape and the few choices that change its mathematics, from a preset or a `config.json`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import sqrt
from typing import Any

from attrs import asdict, evolve, field, fields, frozen

from ratrain.ratrain_ir.frontend.families import FAMILIES, FAMILY, where
from ratrain.ratrain_ir.frontend.fields import FieldReader, Report, Value
from ratrain.ratrain_ir.frontend.hf_config import check_inert
from ratrain.ratrain_ir.frontend.hf_keys import INITIALIZER_RANGE, ROPE_THETA
from ratrain.ratrain_ir.frontend.inert_values import as_field, of_field
from ratrain.ratrain_ir.frontend.text import Places, nowhere, shown
from ratrain.ratrain_ir.rotary import parse_scaling

POSITIONS = ("rope", "alibi", "learned")
NORMS = ("rms", "layer")
NORM_PLACEMENTS = ("pre", "post", "both")
QK_NORMS = ("none", "head", "whole")
ACTIVATIONS = ("silu", "gelu", "gelu-tanh", "relu2")

# Bounds far above any model, so that a slip of the keyboard is told from a size.
_MAX_VOCAB = 1 << 24
_MAX_HIDDEN = 1 << 20
_MAX_LAYERS = 1 << 14
_MAX_HEADS = 1 << 14
_MAX_HEAD_DIM = 1 << 14
_MAX_FFN = 1 << 22
_MAX_WINDOW = 1 << 30
_MAX_POSITIONS = 1 << 30
_MAX_THETA = 1e12
_POSITIVE = "a number from 1e-6 to 1e6"

_CONFIG = "config."
"""Before an inert key of the `config.json`, among the fields of a text's header."""
_NO_MATHEMATICS = frozenset({"name", "family", "packed_qkv", "initializer_range", "inert"})
"""Fields that do not change what a model computes with given weights: its name, how they are stored, how others are drawn."""

_SIZES = (
    "name",
    "family",
    "vocab_size",
    "hidden_size",
    "layers",
    "heads",
    "kv_heads",
    "head_dim",
    "ffn_size",
    "norm_eps",
)
_ALWAYS = (
    *_SIZES,
    "position",
    "rope_theta",
    "sliding_window",
    "qkv_bias",
    "tied_embeddings",
    "normalised_head",
    "packed_qkv",
    "initializer_range",
)
"""Fields that a text's header has in any case; others where they are not as usual in the family."""
_EVERYWHERE = frozenset({*_SIZES, "rope_theta", "tied_embeddings", "initializer_range", "inert"})
"""Fields that a model of any family chooses."""
_FLAGS = (
    "qkv_bias",
    "o_bias",
    "mlp_bias",
    "tied_embeddings",
    "normalised_head",
    "packed_qkv",
    "norm_unit_offset",
    "gated_mlp",
    "rope_interleaved",
)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@frozen(cache_hash=True)
class LayerKind:
    """In what a layer differs from others of its model: what its queries see, and how they are rotated."""

    window: int | None
    """Tokens that a token sees, itself included; None: all before it."""
    rope_theta: float
    """Base of the rotary embedding; 0.0 where nothing is rotated."""
    rope_scaling: str
    """Text of a `RopeScaling`; empty: none."""


@frozen(cache_hash=True)
class ModelConfig:
    """A dense decoder-only language model: its sizes, and what its blocks are made of.

    Without further words it is of the LLaMA kind: pre-norm RMSNorm, gated SiLU MLP, causal attention, no biases. `head_dim * heads`
    need not be `hidden_size`.
    """

    name: str
    family: str
    """The `model_type` of its `config.json` (`FAMILIES`): decides the names of exported weights."""
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    """Heads of keys and values; each serves `heads // kv_heads` query heads."""
    head_dim: int
    ffn_size: int
    norm_eps: float
    position: str = "rope"
    """`rope`, `alibi` or `learned`."""
    rope_theta: float = ROPE_THETA
    """Base of the rotary embedding; 0.0 where nothing is rotated."""
    sliding_window: int | None = None
    """Tokens that a token sees, itself included, in every layer or those that `layer_kinds` says; None: all before it."""
    qkv_bias: bool = False
    """Whether the projections to queries, keys and values have biases."""
    tied_embeddings: bool = False
    """Embedding and head share one matrix."""
    normalised_head: bool = False
    """The head's rows are scaled to unit length before use."""
    packed_qkv: bool = False
    """Query, key and value are stored as one matrix outside this program; the mathematics is the same."""
    learned_positions: int | None = None
    """Rows of the table of learned positions, the longest sequence there can be; None without such a table."""
    initializer_range: float = INITIALIZER_RANGE
    """Standard deviation of the matrices that a run starts from where it is given no weights."""
    inert: Mapping[str, object] = field(factory=dict, eq=False)
    """Keys of the `config.json` it came from that change nothing here (lengths, token numbers, ...): exported as they came in."""
    norm: str = "rms"
    """`rms` (RMSNorm) or `layer` (layer norm with biases)."""
    norm_placement: str = "pre"
    """`pre`: what a block computes is computed of its normed input; `post`: what it adds to the stream is normed; `both`."""
    norm_unit_offset: bool = False
    """Norms scale by 1 + weight."""
    qk_norm: str = "none"
    """Norm of queries and keys before they are rotated: `none`, of each `head` with the same weights, or of the `whole` projection."""
    o_bias: bool = False
    """Whether the output projection of attention has a bias."""
    mlp_bias: bool = False
    """Whether the linear layers of the MLP have biases."""
    activation: str = "silu"
    """`silu`, `gelu` (exact), `gelu-tanh` or `relu2`."""
    gated_mlp: bool = True
    """Whether the MLP is activation(gate) * up, or activation(up)."""
    rotary_dim: int | None = None
    """Elements of a head that are rotated, its first ones; None: all."""
    rope_interleaved: bool = False
    """Rotated pairs are neighbours, not elements half the rotated width apart."""
    rope_scaling: str = ""
    """Text of a `ratrain_ir.rotary.RopeScaling`; empty: none."""
    local_rope_theta: float | None = None
    """Base of the rotary embedding of the layers with a window, which is not scaled; None: as in the others."""
    layer_kinds: str = ""
    """A letter for each layer where not all are alike: `f` full attention, `w` with the window, `n` full and nothing rotated."""
    attention_scale: float | None = None
    """What scores are multiplied by; None: 1 / sqrt(head_dim)."""
    attention_softcap: float | None = None
    """Scores s become softcap * tanh(s / softcap); None: they stay."""
    logit_softcap: float | None = None
    """The same of logits."""
    embedding_scale: float = 1.0
    """What embedded tokens are multiplied by."""
    residual_scale: float = 1.0
    """What blocks add to the stream is multiplied by this."""
    logit_scale: float = 1.0
    """What logits are multiplied by."""

    @property
    def q_size(self) -> int:
        """Width of the queries of one token: heads * head_dim."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the keys (and of the values) of one token: kv_heads * head_dim."""
        return self.kv_heads * self.head_dim

    @property
    def has_layer_norm(self) -> bool:
        """Whether norms subtract a mean and have biases."""
        return self.norm == "layer"

    @property
    def has_pre_norm(self) -> bool:
        """Whether blocks norm their input."""
        return self.norm_placement in ("pre", "both")

    @property
    def has_post_norm(self) -> bool:
        """Whether blocks norm what they add to the stream."""
        return self.norm_placement in ("post", "both")

    @property
    def mlp_matrices(self) -> tuple[str, ...]:
        """The linear layers of an MLP."""
        return ("gate", "up", "down") if self.gated_mlp else ("up", "down")

    def layer_kind(self, layer: int) -> LayerKind:
        """In what a layer may differ from others."""
        letter = self.layer_kinds[layer] if self.layer_kinds else "f" if self.sliding_window is None else "w"
        window = self.sliding_window if letter == "w" else None
        if letter == "n" or self.position != "rope":
            return LayerKind(window, 0.0, "")
        if letter == "w" and self.local_rope_theta is not None:
            return LayerKind(window, self.local_rope_theta, "")
        return LayerKind(window, self.rope_theta, self.rope_scaling)

    def first_alike(self, layer: int) -> int:
        """The first layer of the kind of a layer, which stands for all of them."""
        return self.layer_kinds.index(self.layer_kinds[layer]) if self.layer_kinds else 0

    def with_one_layer(self) -> ModelConfig:
        """The model with a single layer, of the kind that has least to do: what its layers need at least."""
        kind = "w" if self.sliding_window is not None else "n" if "n" in self.layer_kinds else "f"
        return evolve(self, layers=1, layer_kinds=kind if kind == "n" else "")

    @property
    def widest_window(self) -> int | None:
        """Tokens that a token sees in the layer that shows most; None: all before it."""
        return None if set(self.layer_kinds) & set("fn") else self.sliding_window

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding block: a row for each token, and for each learned position."""
        return (self.vocab_size + (self.learned_positions or 0)) * self.hidden_size

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm over the hidden size: weights, and in a layer norm biases."""
        return self.hidden_size * (2 if self.has_layer_norm else 1)

    @property
    def matrix_elements_per_layer(self) -> int:
        """Elements of the matrices of one layer: query, key, value, output, and the MLP's."""
        return self.hidden_size * (2 * self.q_size + 2 * self.kv_size + len(self.mlp_matrices) * self.ffn_size)

    @property
    def _block_norm_parameters(self) -> int:
        return (self.has_pre_norm + self.has_post_norm) * self.norm_parameters

    @property
    def attention_parameters(self) -> int:
        """Parameters of one attention block: norms, query, key, value and output (with biases where there are any)."""
        projected = self.q_size + 2 * self.kv_size
        biases = (projected if self.qkv_bias else 0) + (self.hidden_size if self.o_bias else 0)
        normed = {"none": 0, "head": 2 * self.head_dim, "whole": self.q_size + self.kv_size}[self.qk_norm]
        return self._block_norm_parameters + self.hidden_size * (projected + self.q_size) + biases + normed

    @property
    def mlp_parameters(self) -> int:
        """Parameters of one MLP block: norms and matrices (with biases where there are any)."""
        matrices = len(self.mlp_matrices)
        biases = (matrices - 1) * self.ffn_size + self.hidden_size if self.mlp_bias else 0
        return self._block_norm_parameters + matrices * self.hidden_size * self.ffn_size + biases

    @property
    def parameters_per_layer(self) -> int:
        """Parameters of one layer: an attention and an MLP block."""
        return self.attention_parameters + self.mlp_parameters

    @property
    def head_parameters(self) -> int:
        """Parameters the head block computes with: final norm and output matrix, even where that one is tied."""
        return self.norm_parameters + self.vocab_size * self.hidden_size

    @property
    def parameters(self) -> int:
        """Trainable parameters of the model; a tied matrix counts once."""
        total = self.embedding_parameters + self.layers * self.parameters_per_layer + self.head_parameters
        return total - (self.vocab_size * self.hidden_size if self.tied_embeddings else 0)

    def to_fields(self) -> dict[str, Value]:
        """The configuration as flat `field = value`, as the IR text's header holds it."""
        values: dict[str, Value] = asdict(self, recurse=False)
        del values["inert"]
        for name in values.keys() - set(_ALWAYS):
            if values[name] == _usual(self.family, name):
                del values[name]
        return values | {f"{_CONFIG}{key}": as_field(value) for key, value in self.inert.items()}

    def differences(self, other: ModelConfig) -> Iterator[tuple[str, object, object]]:
        """The fields that make two models compute another thing with the same weights: name, value here, value there."""
        for name in (attribute.name for attribute in fields(ModelConfig) if attribute.name not in _NO_MATHEMATICS):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                yield name, mine, theirs

    @classmethod
    def from_fields(cls, values: Mapping[str, object], *, places: Places = nowhere) -> ModelConfig:
        """The inverse of `to_fields`; `places` finds a field in the text it was read from.

        Raises RT062 with everything that is missing, unknown, of the wrong type, out of range or contradictory.
        """
        report = Report(places)
        inert = {key: of_field(value) for key, value in values.items() if key.startswith(_CONFIG)}
        reader = FieldReader({key: value for key, value in values.items() if key not in inert}, report, "RT062")
        reader.refuse_unknown(attribute.name for attribute in fields(cls) if attribute.name != "inert")
        config = read_model(reader)
        inert = {key.removeprefix(_CONFIG): value for key, value in inert.items()}
        check_inert(inert, config.family, report)
        report.check()
        return evolve(config, inert=inert)


def check_model(config: ModelConfig) -> None:
    """Raise RT062 where a configuration that was built in Python is out of range or contradicts itself."""
    ModelConfig.from_fields(config.to_fields())


def read_model(reader: FieldReader) -> ModelConfig:
    """The configuration that a reader's fields describe; to be used after its report is checked."""
    family = reader.word("family", FAMILIES)
    hidden_size = reader.integer("hidden_size", 1, _MAX_HIDDEN)
    heads = reader.integer("heads", 1, _MAX_HEADS)
    position = _word(reader, family, "position", POSITIONS)
    layers = reader.integer("layers", 1, _MAX_LAYERS)
    flags: dict[str, Any] = {name: reader.flag(name, default=bool(_usual(family, name))) for name in _FLAGS}
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
        **flags,
    )
    _check_shape(reader, config)
    _check_activation(reader, config)
    _check_layers(reader, config)
    _check_family(reader, config)
    return config


def _word(reader: FieldReader, family: str, name: str, choices: Sequence[str]) -> str:
    return reader.word(name, choices, default=str(_usual(family, name)))


def _optional_text(reader: FieldReader, name: str, accept: Callable[[str], bool], expected: str) -> str:
    return reader.text(name, accept, expected) if name in reader.values else ""


def _number_or_none(reader: FieldReader, name: str, accept: Callable[[float], bool]) -> float | None:
    return None if reader.values.get(name) is None else reader.number(name, accept, _POSITIVE)


def _is_scale(value: float) -> bool:
    return 1e-6 <= value <= 1e6


def _is_scaling(text: str) -> bool:
    return not text or parse_scaling(text) is not None


def _usual(family: str, name: str) -> object:
    """What a field is where nothing is said of it."""
    implied = FAMILY[family].implied if family in FAMILY else {}
    return implied.get(name, getattr(fields(ModelConfig), name).default)


def _head_dim(reader: FieldReader, hidden_size: int, heads: int) -> int:
    """The given head dimension, else hidden_size / heads, which must be whole."""
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
    """Sizes that must go together whatever the family."""
    label = reader.label
    if reader.good("heads", "kv_heads") and config.heads % config.kv_heads:
        reader.contradiction(
            "RT062",
            "kv_heads",
            f"'{label('heads')}' {config.heads} is not a multiple of '{label('kv_heads')}' {config.kv_heads}",
            help="each key-value head serves the same number of query heads",
        )
    if reader.good("position", "head_dim") and config.position == "rope" and config.head_dim % 2:
        reader.contradiction(
            "RT062",
            "head_dim",
            f"the head dimension {config.head_dim} is odd, but RoPE rotates pairs of elements",
            help="use an even head dimension",
        )


def _check_activation(reader: FieldReader, config: ModelConfig) -> None:
    """The kernels there are: squared ReLU goes without a gate, SiLU with one."""
    if reader.good("activation", "gated_mlp") and config.activation == ("relu2" if config.gated_mlp else "silu"):
        how = "with" if config.gated_mlp else "without"
        message = f"an MLP {how} a gate and with the activation {config.activation} is not supported"
        help_text = f"supported {how} a gate are {'silu, ' if config.gated_mlp else 'relu2, '}gelu and gelu-tanh"
        reader.contradiction("RT062", "activation", message, help=help_text)


def _check_layers(reader: FieldReader, config: ModelConfig) -> None:
    """What layers may differ in."""
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
    """Choices that only some families have: weights of no other shape could be exchanged with Hugging Face."""
    if not reader.good("family"):
        return
    family = config.family
    for name in (each.name for each in fields(ModelConfig)):
        if name in _EVERYWHERE or name in FAMILY[family].free or not reader.good(name):
            continue
        value = getattr(config, name)
        if value != _usual(family, name) and not (name == "rope_theta" and config.position == "rope"):
            text = f"'{reader.label(name)}' {shown(value)} contradicts family '{family}' ({where(name)})"
            reader.contradiction("RT062", name, text)
    _check_exchange(reader, config)
    if reader.good("tied_embeddings", "normalised_head") and config.tied_embeddings and config.normalised_head:
        message = "tied embeddings do not go with a normalised head"
        reader.contradiction("RT062", "tied_embeddings", message)
    shape = ("heads", "kv_heads", "head_dim", "hidden_size")
    equal = config.kv_size == config.q_size == config.hidden_size
    if family in ("baichuan", "gpt2") and reader.good(*shape) and not equal:
        reader.contradiction(
            "RT062",
            "heads",
            f"packed QKV has three parts of the hidden size, but here they have {config.q_size}, {config.kv_size} and "
            f"{config.kv_size} columns, and the hidden size is {config.hidden_size}",
            help=f"a {family} model has as many key-value heads as heads, and heads * head_dim = hidden size",
        )


def _check_exchange(reader: FieldReader, config: ModelConfig) -> None:
    """Choices that no `config.json` of the family can say."""
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
            text = f"'embedding_scale' is {config.embedding_scale}, but sqrt(hidden_size) = {expected} in family '{family}'"
            reader.contradiction("RT062", "embedding_scale", text)

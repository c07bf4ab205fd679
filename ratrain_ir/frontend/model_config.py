"""The model: its shape and the few choices that change its mathematics, from a preset or a `config.json`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn

from attrs import asdict, evolve, field, fields, frozen

from ratrain.ratrain_ir.diagnostics import Note, fail, nearest
from ratrain.ratrain_ir.files import is_directory, is_there
from ratrain.ratrain_ir.frontend.fields import FieldReader, Report, Value
from ratrain.ratrain_ir.frontend.hf_config import check_inert, inert_keys, translate
from ratrain.ratrain_ir.frontend.hf_keys import FAMILIES, INITIALIZER_RANGE, ROPE_THETA
from ratrain.ratrain_ir.frontend.inert_values import as_field, of_field
from ratrain.ratrain_ir.frontend.text import Place, Places, Source, json_places, nowhere, read_text, shown

POSITIONS = ("rope", "alibi", "learned")

# Bounds far above any model, so that a slip of the keyboard is told from a size.
_MAX_VOCAB = 1 << 24
_MAX_HIDDEN = 1 << 20
_MAX_LAYERS = 1 << 14
_MAX_HEADS = 1 << 14
_MAX_HEAD_DIM = 1 << 14
_MAX_FFN = 1 << 22
_MAX_WINDOW = 1 << 30
_MAX_POSITIONS = 1 << 30

_CONFIG = "config."
"""Before an inert key of the `config.json`, among the fields of a text's header."""
_NO_MATHEMATICS = frozenset({"name", "family", "packed_qkv", "initializer_range", "inert"})
"""Fields that do not change what a model computes with given weights: its name, how they are stored, how others are drawn."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_WHAT = "a Hugging Face style config.json"


@frozen(cache_hash=True)
class ModelConfig:
    """A decoder-only language model of the LLaMA kind: pre-norm RMSNorm, gated SiLU MLP, causal attention; or GPT-2 (`is_gpt2`).

    A linear layer has no bias except where `qkv_bias` says so. `head_dim * heads` need not be `hidden_size`.
    """

    name: str
    family: str
    """`llama`, `mistral`, `qwen2`, `baichuan` or `gpt2`: decides the names of exported weights."""
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
    """Tokens that a token sees, itself included, in every layer; None: all before it."""
    qkv_bias: bool = False
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

    @property
    def is_gpt2(self) -> bool:
        """Whether blocks are GPT-2's: layer norms, a bias in every norm and linear layer, and two matrices with GELU as MLP."""
        return self.family == "gpt2"

    @property
    def q_size(self) -> int:
        """Width of the queries of one token: heads * head_dim."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the keys (and of the values) of one token: kv_heads * head_dim."""
        return self.kv_heads * self.head_dim

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding block: a row for each token, and for each learned position."""
        return (self.vocab_size + (self.learned_positions or 0)) * self.hidden_size

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm: weights, and in GPT-2 biases."""
        return self.hidden_size * (2 if self.is_gpt2 else 1)

    @property
    def matrix_elements_per_layer(self) -> int:
        """Elements of the matrices of one layer: query, key, value, output, and the MLP's."""
        mlp = (2 if self.is_gpt2 else 3) * self.ffn_size
        return self.hidden_size * (2 * self.q_size + 2 * self.kv_size + mlp)

    @property
    def attention_parameters(self) -> int:
        """Parameters of one attention block: norm, query, key, value and output (with biases where there are any)."""
        projected = self.q_size + 2 * self.kv_size
        biases = (projected if self.qkv_bias else 0) + (self.hidden_size if self.is_gpt2 else 0)
        return self.norm_parameters + self.hidden_size * (projected + self.q_size) + biases

    @property
    def mlp_parameters(self) -> int:
        """Parameters of one MLP block: norm, gate, up, down; in GPT-2 norm, up and down, with biases."""
        if self.is_gpt2:
            return self.norm_parameters + 2 * self.hidden_size * self.ffn_size + self.ffn_size + self.hidden_size
        return self.norm_parameters + 3 * self.hidden_size * self.ffn_size

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
        if self.learned_positions is None:
            del values["learned_positions"]
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
        config = _read(reader)
        inert = {key.removeprefix(_CONFIG): value for key, value in inert.items()}
        check_inert(inert, config.family, report)
        report.check()
        return evolve(config, inert=inert)


def check_model(config: ModelConfig) -> None:
    """Raise RT062 where a configuration that was built in Python is out of range or contradicts itself."""
    ModelConfig.from_fields(config.to_fields())


def preset_names() -> list[str]:
    """The models known by name, sorted."""
    return sorted(entry.name.removesuffix(".json") for entry in _presets().iterdir() if entry.name.endswith(".json"))


def load_model(name_or_path: str) -> ModelConfig:
    """A model by preset name, or from a `config.json` or a directory that holds one.

    A preset's name wins over a file of that name (`./name` is the file). Raises RT004 (no such preset), RT002 (file
    cannot be read), RT060, RT061, RT062 (file is not a supported model).
    """
    if name_or_path in preset_names():
        entry = _presets() / f"{name_or_path}.json"
        return _parse_text(entry.read_text("utf-8"), name=name_or_path, file=str(entry))
    exists = is_there if _looks_like_a_path(name_or_path) else os.path.exists  # any text may be meant as a name
    if not exists(name_or_path):
        _no_such_model(name_or_path)
    path = Path(name_or_path)
    if is_directory(path):
        path /= "config.json"
        if not is_there(path):
            fail("RT002", f"the directory {shown(name_or_path)} holds no config.json", help=f"name {_WHAT}")
    name = path.resolve().parent.name if path.name == "config.json" else path.stem
    return _parse_text(read_text(path, "RT060", _WHAT), name=name, file=str(path))


def parse_config(data: Mapping[str, object], *, name: str, file: str, places: Places | None = None) -> ModelConfig:
    """A model from the content of a `config.json`; `places` finds a key in its text.

    Raises RT060, RT061 and RT062, all of the file at once.
    """
    report = Report(places or (lambda _key: Source(file, "").top()))
    translated = translate(data, report)
    if translated is None:
        report.check()
        raise AssertionError("a family is refused with a diagnostic")
    reader = FieldReader({**translated.fields, "name": _clean_name(name)}, report, "RT060", translated.keys)
    config = _read(reader)
    expected = data.get("parameters_expected")
    if expected is not None and not report.diagnostics.errors and expected != config.parameters:
        report.error(
            "RT062",
            "parameters_expected",
            f"'parameters_expected' is {shown(expected)}, but this model has {config.parameters} parameters",
        )
    report.check()
    return evolve(config, inert=inert_keys(data, config.family))


def _presets() -> resources.abc.Traversable:
    return resources.files("ratrain.ratrain_ir.frontend") / "presets"


def _no_such_model(name: str) -> NoReturn:
    """Refuse a name that is neither a preset nor a file; a Hub id is matched by its last part."""
    presets = preset_names()
    last = name.rstrip("/").rpartition("/")[2]
    way_out = nearest(last.lower(), presets)
    known = f"presets are {', '.join(presets)}; a path to {_WHAT} works too"
    help_text = f"{way_out} {known}" if way_out else known
    if _looks_like_a_path(name):
        fail("RT002", f"there is no file {shown(name)}", help=help_text)
    fail("RT004", f"no model is called {shown(name)}", help=help_text)


def _looks_like_a_path(name: str) -> bool:
    return "/" in name or os.sep in name or name.endswith(".json")


def _clean_name(name: str) -> str:
    """A name the IR's text can hold: letters, digits, dots, dashes and underscores."""
    cleaned = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:100]
    return cleaned or "model"


def _parse_text(text: str, *, name: str, file: str) -> ModelConfig:
    """`parse_config` of a JSON text, with the places of its keys."""
    source = Source(file, text)
    repeats: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for key, value in items:
            if key in fields:
                repeats.append(key)
            fields[key] = value
        return fields

    try:
        data = json.loads(text, object_pairs_hook=pairs, parse_constant=_no_constant)
        if not isinstance(data, dict):
            kind = "a list" if isinstance(data, list) else shown(data)
            place = source.at(1, 1)
            fail("RT060", f"a JSON object is expected, not {kind}", place.location, source=place.source)
        places, repeated = json_places(source)
    except json.JSONDecodeError as error:
        place = source.at(error.lineno, error.colno)
        fail("RT060", f"the file is not valid JSON: {error.msg}", place.location, source=place.source)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error).split(";")[0]
        fail("RT060", f"the file is not usable JSON: {reason}", source.top().location)
    _refuse_repeats(source, repeats, repeated)
    return parse_config(data, name=name, file=file, places=places)


def _no_constant(word: str) -> NoReturn:
    msg = f"{word} is not a JSON number"
    raise ValueError(msg)


def _refuse_repeats(source: Source, names: list[str], repeated: list[tuple[str, Place, Place]]) -> None:
    """Refuse keys that appear twice: at the top, where both places are known, or inside a value."""
    report = Report()
    for key, first, later in repeated:
        notes = [Note("it appears here first", first.location)]
        message = f"the key {shown(key)} appears twice"
        report.diagnostics.error("RT060", message, later.location, notes=notes, source=later.source, help="keep one")
    at_top = [key for key, _, _ in repeated]
    for key in names:
        if key in at_top:
            at_top.remove(key)
        else:
            message = f"the key {shown(key)} appears twice inside a value"
            report.diagnostics.error("RT060", message, source.top().location, help="keep one")
    report.check()


def _read(reader: FieldReader) -> ModelConfig:
    """The configuration that a reader's fields describe; to be used after its report is checked."""
    family = reader.word("family", FAMILIES)
    hidden_size = reader.integer("hidden_size", 1, _MAX_HIDDEN)
    heads = reader.integer("heads", 1, _MAX_HEADS)
    position = reader.word("position", POSITIONS, default="rope")
    config = ModelConfig(
        name=reader.text("name", lambda name: _NAME.fullmatch(name) is not None, "letters, digits, '.', '_' and '-'"),
        family=family,
        vocab_size=reader.integer("vocab_size", 2, _MAX_VOCAB),
        hidden_size=hidden_size,
        layers=reader.integer("layers", 1, _MAX_LAYERS),
        heads=heads,
        kv_heads=reader.integer("kv_heads", 1, _MAX_HEADS, default=heads),
        head_dim=_head_dim(reader, hidden_size, heads),
        ffn_size=reader.integer("ffn_size", 1, _MAX_FFN),
        norm_eps=reader.number("norm_eps", lambda eps: 0 < eps < 1, "a number above 0 and below 1"),
        position=position,
        rope_theta=_rope_theta(reader, position),
        sliding_window=reader.integer_or_none("sliding_window", 1, _MAX_WINDOW),
        qkv_bias=reader.flag("qkv_bias", default=family in {"qwen2", "gpt2"}),
        tied_embeddings=reader.flag("tied_embeddings", default=False),
        normalised_head=reader.flag("normalised_head", default=False),
        packed_qkv=reader.flag("packed_qkv", default=family in {"baichuan", "gpt2"}),
        learned_positions=_learned_positions(reader, position),
        initializer_range=reader.number(
            "initializer_range", lambda std: 0 < std <= 1, "a number above 0 and up to 1", default=INITIALIZER_RANGE
        ),
    )
    _check_shape(reader, config)
    _check_family(reader, config)
    return config


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
    return reader.number("rope_theta", lambda theta: 1 < theta <= 1e12, "a number above 1 and up to 1e12")


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


def _check_family(reader: FieldReader, config: ModelConfig) -> None:
    """Choices that only some families have: weights of no other shape could be exchanged with Hugging Face."""
    if not reader.good("family"):
        return
    family = config.family
    rules = (
        (
            "qkv_bias",
            config.qkv_bias == (family in {"qwen2", "gpt2"}),
            "query, key and value biases: always in qwen2 and gpt2, else never",
        ),
        (
            "packed_qkv",
            config.packed_qkv == (family in {"baichuan", "gpt2"}),
            "packed QKV: always in baichuan and gpt2, else never",
        ),
        ("position", config.position != "alibi" or family == "baichuan", "ALiBi: only in baichuan"),
        (
            "position",
            (config.position == "learned") == (family == "gpt2"),
            "learned positions: always in gpt2, else never",
        ),
        (
            "learned_positions",
            (config.learned_positions is None) == (family != "gpt2"),
            "a table of learned positions: always in gpt2, else never",
        ),
        ("normalised_head", not config.normalised_head or family == "baichuan", "a normalised head: only in baichuan"),
        (
            "sliding_window",
            config.sliding_window is None or family in {"mistral", "qwen2"},
            "a sliding window: only in mistral and qwen2",
        ),
        (
            "tied_embeddings",
            not (config.tied_embeddings and config.normalised_head),
            "tied embeddings: not with a normalised head",
        ),
    )
    for name, sound, rule in rules:
        if reader.good(name) and not sound:
            value = shown(getattr(config, name))
            reader.contradiction(
                "RT062", name, f"'{reader.label(name)}' {value} contradicts family '{family}' ({rule})"
            )
    shape = ("heads", "kv_heads", "head_dim", "hidden_size")
    if config.packed_qkv and reader.good(*shape) and not config.kv_size == config.q_size == config.hidden_size:
        reader.contradiction(
            "RT062",
            "heads",
            f"packed QKV has three parts of the hidden size, but here they have {config.q_size}, {config.kv_size} and "
            f"{config.kv_size} columns, and the hidden size is {config.hidden_size}",
            help=f"a {family} model has as many key-value heads as heads, and heads * head_dim = hidden size",
        )

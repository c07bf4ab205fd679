"""A Hugging Face `config.json`, translated into the fields of a `ModelConfig`.

The rules of the families are those of the model classes in `transformers`, and of Baichuan's own model code, including
what these classes assume where a key is absent. `hf_keys` says what happens to every key.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from attrs import define, field

from ratrain.ratrain_ir.diagnostics import nearest
from ratrain.ratrain_ir.frontend.fields import Report, as_float
from ratrain.ratrain_ir.frontend.hf_keys import (
    ARCHITECTURES,
    FAMILIES,
    LAYER_NORM_EPS,
    RMS_NORM_EPS,
    ROPE_THETA,
    Keys,
    keys_of,
)
from ratrain.ratrain_ir.frontend.text import shown


@define
class Translation:
    """Fields of a `ModelConfig`, values as the file has them, and the key of the file each field is known by."""

    fields: dict[str, object] = field(factory=dict)
    keys: dict[str, str] = field(factory=dict)


def translate(data: Mapping[str, object], report: Report) -> Translation | None:
    """The fields a `config.json` means; None where its family is not supported and no other key can be judged.

    Reports RT060 (not readable), RT061 (not supported) and RT062 (contradicts itself). Types and ranges of the fields
    are left to `ModelConfig`, which checks them for every source alike.
    """
    family = _family(data, report)
    if family is None:
        return None
    known = keys_of(family)
    out = Translation({"family": family}, {"family": "model_type"})
    for name, keys in known.renamed.items():
        _renamed(data, name, keys, out, report)
    _defaults(family, out)
    _kv_heads(data, family, report)
    _position(data, family, out, report)
    out.fields["sliding_window"] = _window(data, family, report)
    _biases(data, family, report)
    out.fields["qkv_bias"] = family in {"qwen2", "gpt2"}
    out.fields["packed_qkv"] = family in {"baichuan", "gpt2"}
    out.fields["normalised_head"] = _normalised_head(data, family, report)
    _other_keys(data, known, report)
    return out


def _defaults(family: str, out: Translation) -> None:
    """What the model classes assume where a key is absent."""
    if family != "gpt2":
        out.fields.setdefault("norm_eps", RMS_NORM_EPS)
        return
    out.fields.setdefault("norm_eps", LAYER_NORM_EPS)
    out.fields.setdefault("tied_embeddings", True)
    hidden = out.fields.get("hidden_size")
    usable = type(hidden) is int and hidden > 0  # else it is reported itself
    out.fields.setdefault("ffn_size", 4 * hidden if usable else 4)  # type: ignore[operator]


def _family(data: Mapping[str, object], report: Report) -> str | None:
    """The model family, from `model_type` or, where that is absent, from `architectures`."""
    architectures = data.get("architectures")
    if architectures is None:
        architectures = []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        report.error(
            "RT060", "architectures", f"'architectures' is {shown(architectures)}: a list of names is expected"
        )
        architectures = []
    named = {ARCHITECTURES.get(name, "") for name in architectures} - {""}
    family = data.get("model_type")
    if family is None and len(named) == 1:
        family = named.pop()
    if not isinstance(family, str):
        what = "missing" if family is None else f"{shown(family)}, not a name"
        report.error("RT060", "model_type", f"'model_type' is {what}", help=f"supported are {', '.join(FAMILIES)}")
        return None
    if family not in FAMILIES:
        help_text = f"supported are {', '.join(FAMILIES)}"
        if near := nearest(family, FAMILIES):
            help_text = f"{near} {help_text}"
        report.error("RT061", "model_type", f"the model family {shown(family)} is not supported", help=help_text)
        return None
    for name in architectures:
        if ARCHITECTURES.get(name) != family:
            fitting = [known for known, of in ARCHITECTURES.items() if of == family]
            report.error(
                "RT061",
                "architectures",
                f"the architecture {shown(name)} is not supported for model_type '{family}'",
                help=f"supported is {' or '.join(fitting)}: a language model that predicts the next token",
            )
    return family


def _renamed(data: Mapping[str, object], name: str, keys: tuple[str, ...], out: Translation, report: Report) -> None:
    """One field that a key holds as it is; null means absent, as Hugging Face reads it, where absence has a meaning."""
    nullable = {"head_dim", "kv_heads", "initializer_range"} | ({"ffn_size"} if "n_inner" in keys else set())
    present = [key for key in keys if key in data and not (data[key] is None and name in nullable)]
    out.keys[name] = present[0] if present else keys[0]
    for other in present[1:]:
        if data[present[0]] != data[other]:
            values = " and ".join(f"'{key}' is {shown(data[key])}" for key in (present[0], other))
            report.error("RT062", other, f"{values}: they mean the same", help=f"remove '{other}'")
    if present:
        out.fields[name] = data[present[0]]


def _kv_heads(data: Mapping[str, object], family: str, report: Report) -> None:
    """Absent key-value heads mean as many as heads in LLaMA and Baichuan; the other classes have other defaults."""
    if "num_key_value_heads" not in data and family in {"mistral", "qwen2"}:
        report.error(
            "RT060",
            "num_key_value_heads",
            f"'num_key_value_heads' is missing: a {family} model needs it",
            help="write the number of attention heads for attention without grouped queries",
        )


def _position(data: Mapping[str, object], family: str, out: Translation, report: Report) -> None:
    """RoPE and its base; ALiBi, which only the Baichuan family has (the 13B models, not the 7B ones); GPT-2's learned positions."""
    out.keys["position"] = "position_embedding"
    out.keys["rope_theta"] = "rope_theta"
    thetas = {"rope_theta": data["rope_theta"]} if data.get("rope_theta") is not None else {}
    for key in ("rope_parameters", "rope_scaling"):
        theta = _rope_table(data, key, report)
        if theta is not None:
            thetas[key] = theta
    if len({repr(as_float(theta)) for theta in thetas.values()}) > 1:
        said = " and ".join(f"'{key}' says {shown(theta)}" for key, theta in thetas.items())
        report.error(
            "RT062", next(reversed(thetas)), f"the rotary base is given twice: {said}", help="keep one of them"
        )
    position = _position_kind(data, family, report)
    out.fields["position"] = position
    if position != "rope" and thetas:
        uses = "ALiBi" if position == "alibi" else "learned positions"
        way_out = ', or write "position_embedding": "rope" if the model does rotate queries and keys'
        report.error(
            "RT062",
            next(iter(thetas)),
            f"a rotary base is given, but this model uses {uses}, which {'has' if position == 'alibi' else 'have'} none",
            help="remove it" + (way_out if position == "alibi" else ""),
        )
    if position != "rope":
        out.fields["rope_theta"] = 0.0
    elif thetas:
        out.keys["rope_theta"], out.fields["rope_theta"] = next(iter(thetas.items()))
    else:
        out.fields["rope_theta"] = ROPE_THETA


def _position_kind(data: Mapping[str, object], family: str, report: Report) -> str:
    """`rope`, `alibi` or `learned`: the explicit key, else what the family, and in Baichuan the size, implies."""
    explicit = data.get("position_embedding")
    allowed = {"baichuan": ("rope", "alibi"), "gpt2": ("learned",)}.get(family, ("rope",))
    if explicit is not None:
        if explicit not in allowed:
            report.error(
                "RT061",
                "position_embedding",
                f"'position_embedding' {shown(explicit)} is not supported in a {family} model",
                help=f"supported is {' or '.join(allowed)}"
                + (", and alibi for baichuan" if allowed == ("rope",) else ""),
            )
        if family == "gpt2":
            return "learned"
        return "alibi" if explicit == "alibi" and family == "baichuan" else "rope"
    if family == "gpt2":
        return "learned"
    size = (data.get("hidden_size"), data.get("num_hidden_layers"))
    if family != "baichuan" or size == (4096, 32):
        return "rope"
    if size == (5120, 40):
        return "alibi"
    if all(isinstance(count, int) for count in size):
        report.error(
            "RT060",
            "position_embedding",
            "this Baichuan model has neither the size of the 7B models (RoPE) nor of the 13B ones (ALiBi), so its "
            "position embedding is not known",
            help='add "position_embedding": "rope" or "position_embedding": "alibi"',
        )
    return "rope"


def _rope_table(data: Mapping[str, object], key: str, report: Report) -> object | None:
    """The rotary base of a `rope_scaling` or `rope_parameters` table, which may ask for plain RoPE only."""
    table = data.get(key)
    if table is None:
        return None
    if not isinstance(table, Mapping):
        report.error("RT060", key, f"'{key}' is {shown(table)}: null or an object is expected")
        return None
    plain = "supported is plain RoPE: null, or type 'default' with nothing but 'rope_theta'"
    for name in ("rope_type", "type"):
        if table.get(name, "default") != "default":
            report.error("RT061", key, f"'{key}' asks for {shown(table[name])} scaling, not supported", help=plain)
            return None
    for name, value in table.items():
        if name == "partial_rotary_factor" and value in (None, 1):
            continue
        if name not in {"rope_type", "type", "rope_theta"}:
            report.error("RT061", key, f"'{key}' has {shown(name)} = {shown(value)}, not supported", help=plain)
    theta: object | None = table.get("rope_theta")
    return theta


def _window(data: Mapping[str, object], family: str, report: Report) -> object | None:
    """The sliding window that all layers use, or None. A window of w: each token sees itself and w - 1 before it."""
    kind = _layer_kind(data, report)
    used = data.get("use_sliding_window")
    if used is not None and not isinstance(used, bool):
        report.error("RT060", "use_sliding_window", f"'use_sliding_window' is {shown(used)}: true or false is expected")
        return None
    if family == "qwen2":
        if used:
            return _qwen2_window(data, kind, report)
        _refuse_sliding(kind, report)
        return None
    if used or (used is False and family == "mistral" and data.get("sliding_window", 4096) is not None):
        report.error(
            "RT061",
            "use_sliding_window",
            f"'use_sliding_window' is not supported in a {family} model: only qwen2 has it",
            help="remove it; in a mistral model, 'sliding_window' alone decides, and null means none",
        )
    if data.get("max_window_layers") is not None:
        report.error(
            "RT061",
            "max_window_layers",
            f"'max_window_layers' is not supported in a {family} model: only qwen2 has it",
            help="remove it",
        )
    if family == "mistral":
        window = data.get("sliding_window", 4096)  # the class's own default
        if kind is not None and (kind == "sliding_attention") != (window is not None):
            report.error(
                "RT062",
                "layer_types",
                f"'layer_types' says {kind}, but 'sliding_window' is {shown(window)}",
                help="make them agree, or remove 'layer_types'",
            )
        return window
    if data.get("sliding_window") is not None:
        report.error(
            "RT061",
            "sliding_window",
            f"'sliding_window' {shown(data['sliding_window'])} is not supported in a {family} model",
            help="supported in mistral and qwen2 models; elsewhere it must be null",
        )
        return None
    _refuse_sliding(kind, report)
    return None


def _refuse_sliding(kind: str | None, report: Report) -> None:
    """Report `layer_types` that ask for a window where none is in use."""
    if kind == "sliding_attention":
        report.error(
            "RT062",
            "layer_types",
            "'layer_types' asks for sliding attention, but the model has no sliding window in use",
            help="make every entry full_attention, or give the window",
        )


def _qwen2_window(data: Mapping[str, object], kind: str | None, report: Report) -> object | None:
    """Qwen2 with `use_sliding_window`: the layers from `max_window_layers` on use the window, the first ones do not."""
    window = data.get("sliding_window", 4096)  # 4096 and 28 are the class's own defaults
    if window is None or kind == "full_attention":
        _refuse_sliding(kind, report)
        return None
    first, layers = data.get("max_window_layers", 28), data.get("num_hidden_layers")
    if kind == "sliding_attention" or first == 0:
        return window
    if type(first) is not int or first < 0:
        report.error("RT060", "max_window_layers", f"'max_window_layers' is {shown(first)}: a count is expected")
    elif isinstance(layers, int) and first < layers:
        report.error(
            "RT061",
            "max_window_layers",
            f"the first {first} layers use full attention and the others a sliding window: such a mix is not supported",
            help="supported is one kind of attention in all layers: set max_window_layers to 0, or use_sliding_window "
            "to false",
        )
    return None


def _layer_kind(data: Mapping[str, object], report: Report) -> str | None:
    """The one kind of attention `layer_types` names for all layers; None where it says nothing usable."""
    types = data.get("layer_types")
    if types is None:
        return None
    if not isinstance(types, list) or not types:
        report.error("RT060", "layer_types", f"'layer_types' is {shown(types)}: a list of one name a layer is expected")
        return None
    supported = "supported is full_attention in all layers, or sliding_attention in all layers"
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            report.error("RT061", "layer_types", f"layers of type {shown(kind)} are not supported", help=supported)
            return None
    layers = data.get("num_hidden_layers")
    if isinstance(layers, int) and len(types) != layers:
        report.error("RT062", "layer_types", f"'layer_types' has {len(types)} entries, but the model {layers} layers")
        return None
    if types.count(types[0]) != len(types):
        report.error("RT061", "layer_types", "layers of different attention types are not supported", help=supported)
        return None
    return str(types[0])


def _biases(data: Mapping[str, object], family: str, report: Report) -> None:
    """`attention_bias` also biases the output projection in Hugging Face; `attention_bias_qkv` says QKV only."""
    bias = data.get("attention_bias")
    if family == "gpt2":
        if bias not in (None, True):
            message = f"'attention_bias' is {shown(bias)}: a gpt2 model has biases in all of attention"
            report.error("RT061", "attention_bias", message, help="supported is true, or leave it out")
    elif bias is not None and (bias is not False or family == "qwen2"):
        if family == "qwen2":
            message = (
                f"'attention_bias' is {shown(bias)}: not supported in a qwen2 model, which always has biases in the "
                "query, key and value projections and none in the output projection"
            )
        else:
            message = (
                f"'attention_bias' is {shown(bias)}: it adds biases to the query, key, value and output projections, "
                "which is not supported"
            )
        supported = "no attention bias (false); biases of query, key and value in the qwen2 family, without the key"
        report.error("RT061", "attention_bias", message, help=f"supported is {supported}")
    expected = family in {"qwen2", "gpt2"}
    if data.get("attention_bias_qkv") not in (None, expected):
        report.error(
            "RT061",
            "attention_bias_qkv",
            f"'attention_bias_qkv' is {shown(data['attention_bias_qkv'])}: not supported in a {family} model",
            help=f"supported is {shown(expected)}: qwen2 and gpt2 always have these biases, the other families never",
        )


def _normalised_head(data: Mapping[str, object], family: str, report: Report) -> object:
    """Baichuan2 (vocabulary 125696) normalises the rows of its head; Baichuan (vocabulary 64000) does not."""
    explicit = data.get("normalised_head")
    if family != "baichuan":
        if explicit not in (None, False):
            report.error(
                "RT061",
                "normalised_head",
                f"'normalised_head' is {shown(explicit)}: not supported in a {family} model",
                help="supported in baichuan models only",
            )
        return False
    if explicit is not None:
        return explicit
    vocab = data.get("vocab_size")
    if isinstance(vocab, int) and vocab not in (64000, 125696):
        report.error(
            "RT060",
            "normalised_head",
            "this Baichuan model has neither the vocabulary of Baichuan2 (125696, normalised head) nor of Baichuan "
            "(64000, plain head), so its kind of head is not known",
            help='add "normalised_head": true or "normalised_head": false',
        )
    return vocab == 125696


_WINDOW_OF_QWEN2 = ("use_sliding_window", "sliding_window", "max_window_layers")


def inert_keys(data: Mapping[str, object], family: str) -> dict[str, object]:
    """The keys of a readable `config.json` of a family that change nothing in the mathematics of training, in its order.

    The type of stored weights is not among them: it is that of a file of weights. Qwen2's window is, where it is not in use.
    """
    unused = _WINDOW_OF_QWEN2 if not data.get("use_sliding_window") and "use_sliding_window" in data else ()
    inert = keys_of(family).inert
    return {key: value for key, value in data.items() if key in inert or key in unused}


def _is_finite(value: object) -> bool:
    """Whether all numbers in a JSON value are: a number too large to be held is none that could be written again."""
    if isinstance(value, Mapping):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def check_inert(data: Mapping[str, object], family: str, report: Report) -> None:
    """Report, as RT062, what cannot be among `inert_keys`."""
    known = keys_of(family)
    inert = known.inert
    for key, value in data.items():
        allowed = known.neutral[key][0] if key in known.neutral else None
        if (key not in inert and key not in _WINDOW_OF_QWEN2) or (key == "use_sliding_window" and value):
            report.error("RT062", key, f"'config.{key}' is not a key that leaves the mathematics of a model as it is")
        elif not _is_finite(value):
            report.error("RT062", key, f"'config.{key}' has a number that cannot be held: {shown(value)}")
        elif allowed is not None and value not in allowed:
            report.error("RT062", key, f"'config.{key}' is {shown(value)}, which would change what the model computes")


def _other_keys(data: Mapping[str, object], known: Keys, report: Report) -> None:
    """Neutral keys must be switched off; a key that is not known at all is refused, never ignored."""
    read = known.read
    for key, value in data.items():
        if key in read:
            continue
        if not _is_finite(value):
            report.error("RT062", key, f"'{key}' has a number that cannot be held: {shown(value)}")
            continue
        if key in known.harmless:
            continue
        if key in known.neutral:
            allowed, meaning = known.neutral[key]
            if value not in allowed:
                report.error(
                    "RT061",
                    key,
                    f"'{key}' is {shown(value)}: {meaning} other than {shown(allowed[-1])} is not supported"
                    if isinstance(allowed[-1], str)
                    else f"'{key}' is {shown(value)}: {meaning} is not supported",
                    help=f"supported is {' or '.join(shown(item) for item in allowed)}",
                )
            continue
        near = nearest(key, [*sorted(read), *sorted(known.neutral), *sorted(known.harmless)])
        way_out = "remove it if it does not change what the model computes"
        report.error(
            "RT061",
            key,
            f"the key {shown(key)} is not known: it may change what the model computes, so it is not ignored",
            help=f"{near} Otherwise {way_out}" if near else way_out,
        )

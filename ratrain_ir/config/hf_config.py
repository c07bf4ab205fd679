"""Translation of a Hugging Face `config.json` into the fields of a `ModelConfig`.

The rules of the families, including the defaults for absent keys, follow the model classes in `transformers` and
Baichuan's own model code. `hf_keys` says what happens to every key.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.config.families import ARCHITECTURES, FAMILIES, FAMILY, UNBUILT_EXPERTS
from ratrain.ratrain_ir.config.hf_keys import (
    CALLED_ELSEWHERE,
    CLASS_DEFAULTS,
    DENSE_LAYERS,
    LAYER_NORM_EPS,
    PADDING_TOKEN_KEY,
    RMS_NORM_EPS,
    Keys,
    keys_of,
)
from ratrain.ratrain_ir.config.hf_rope import Translation, positions
from ratrain.ratrain_ir.config.hf_rules import WINDOW_OF_QWEN, activation, biases, layers, mlp_kinds, scales
from ratrain.ratrain_ir.support.diagnostics import nearest
from ratrain.ratrain_ir.support.text import shown

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.fields import Report


_CLOSE = 0.85
"""Least similarity at which a known key is suggested for an unknown one. Less similar keys mean other things."""


def translate(data: Mapping[str, object], report: Report) -> Translation | None:
    """Translate a `config.json` into fields; None if its family is not supported, so that no other key can be judged.

    Reports RT060 (not readable), RT061 (not supported) and RT062 (contradicts itself). Types and ranges of the fields
    are checked later, in the same way for every source (`model_fields`).
    """
    family = _family(data, report)
    if family is None:
        return None
    known = keys_of(family)
    out = Translation({"family": family}, {"family": "model_type"})
    for name, keys in known.renamed.items():
        _renamed(data, name, keys, out, report)
    _unread_number_of_experts(data, family, known, report)
    _defaults(family, out)
    _kv_heads(data, family, report)
    out.fields |= layers(data, family, report)
    if "mlp_kinds" in FAMILY[family].free:
        out.fields |= mlp_kinds(data, report)
    positions(data, family, out, report)
    out.fields |= biases(data, family, report)
    out.fields |= scales(data, family, out.fields.get("hidden_size"), report)
    of_mlp = activation(data, family, report)
    if of_mlp is not None:
        out.fields["activation"] = of_mlp
        out.keys["activation"] = known.activation
    out.fields["normalised_head"] = _normalised_head(data, family, report)
    _other_keys(data, known, report)
    return out


def _defaults(family: str, out: Translation) -> None:
    """Fill in the defaults of the family's model class for absent keys."""
    vocab = out.fields.get("vocab_size")
    for name, value in CLASS_DEFAULTS.get(family, {}).items():
        if name == "padding_token" and type(vocab) is int and vocab <= value:  # type: ignore[operator]
            continue  # the class itself cannot be built with this default
        out.fields.setdefault(name, value)
    out.fields.setdefault("norm_eps", LAYER_NORM_EPS if family == "gpt2" else RMS_NORM_EPS)
    if family == "gpt2":
        hidden = out.fields.get("hidden_size")
        usable = type(hidden) is int and hidden > 0  # else `hidden_size` is reported
        out.fields.setdefault("ffn_size", 4 * hidden if usable else 4)  # type: ignore[operator]


def _family(data: Mapping[str, object], report: Report) -> str | None:
    """Return the family from `model_type`, or from `architectures` if that is absent; None after an error."""
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
        message, help_text = (
            f"the model family {shown(family)} is not supported",
            f"supported are {', '.join(FAMILIES)}",
        )
        if family in UNBUILT_EXPERTS:
            message += ": the experts of this family are not built"
            built = [name for name, known in FAMILY.items() if "experts" in known.free]
            help_text = f"supported with experts are {', '.join(built)}"
        elif near := nearest(family, FAMILIES):
            help_text = f"{near} {help_text}"
        report.error("RT061", "model_type", message, help=help_text)
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
    """Translate a field that one key holds unchanged.

    Null means absent if absence has a meaning, as in Hugging Face's classes.
    """
    nullable = {"head_dim", "kv_heads", "initializer_range"} | ({"ffn_size"} if "n_inner" in keys else set())
    present = [key for key in keys if key in data and not (data[key] is None and name in nullable)]
    out.keys[name] = present[0] if present else keys[0]
    for other in present[1:]:
        if data[present[0]] != data[other]:
            values = " and ".join(f"'{key}' is {shown(data[key])}" for key in (present[0], other))
            report.error("RT062", other, f"{values}: they mean the same", help=f"remove '{other}'")
    if present:
        out.fields[name] = data[present[0]]


def _unread_number_of_experts(data: Mapping[str, object], family: str, known: Keys, report: Report) -> None:
    """Report a number of experts under a key that the family's class does not read, unless its own key repeats it.

    The classes of mixtral, qwen3_moe and olmoe read both (`attribute_map` in `transformers`). The others would take
    their default number.
    """
    own, other = known.renamed.get("experts", ("", ""))
    if family in ("qwen2_moe", "granitemoe") and data.get(other) is not None and own not in data:
        message = f"'{other}' is not read in a {family} model"
        report.error("RT061", other, message, help=f"write it as '{own}'")


def _kv_heads(data: Mapping[str, object], family: str, report: Report) -> None:
    """Report an absent number of key-value heads, unless it defaults to the number of heads (LLaMA, Baichuan, ...)."""
    if "num_key_value_heads" not in data and family in {
        "mistral",
        "qwen2",
        "qwen3",
        "gemma2",
        "gemma3_text",
        "smollm3",
        "mixtral",
        "qwen2_moe",
        "qwen3_moe",
    }:
        report.error(
            "RT060",
            "num_key_value_heads",
            f"'num_key_value_heads' is missing: a {family} model needs it",
            help="write the number of attention heads for attention without grouped queries",
        )


def _normalised_head(data: Mapping[str, object], family: str, report: Report) -> object:
    """Return whether the head's rows are normalised: in Baichuan2 (vocabulary 125696), not in Baichuan (64000).

    Other vocabularies of Baichuan need the explicit key. Other families have no normalised head.
    """
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


def inert_keys(data: Mapping[str, object], family: str) -> dict[str, object]:
    """Return the keys of a readable `config.json` that change nothing in the mathematics of training, in its order.

    The dtype of stored weights is not among them, as each file of weights has its own. Qwen's window is, if it is
    unused. So is a key of layers with a dense MLP, if it names none.
    """
    unused = WINDOW_OF_QWEN if not data.get("use_sliding_window") and "use_sliding_window" in data else ()
    known = keys_of(family)
    said = {key for key in DENSE_LAYERS if key in data and data[key] not in known.neutral.get(key, ((), ""))[0]}
    inert = known.inert - said
    return {key: value for key, value in data.items() if key in inert or key in unused}


def _is_finite(value: object) -> bool:
    """Tell whether all numbers in a JSON value are finite. Others could not be written out again."""
    if isinstance(value, Mapping):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def check_inert(data: Mapping[str, object], family: str, report: Report) -> None:
    """Report, as RT062, keys and values that cannot be among `inert_keys`.

    The key of the padding token is accepted. A text that has it here, and not as a field, trains that token's row.
    """
    known = keys_of(family)
    inert = known.inert
    for key, value in data.items():
        allowed = known.neutral[key][0] if key in known.neutral else None
        if (key not in inert and key not in (*WINDOW_OF_QWEN, PADDING_TOKEN_KEY)) or (
            key == "use_sliding_window" and value
        ):
            report.error("RT062", key, f"'config.{key}' may change the mathematics of a model")
        elif not _is_finite(value):
            report.error("RT062", key, f"'config.{key}' has a number that cannot be held: {shown(value)}")
        elif allowed is not None and value is not None and value not in allowed:
            report.error("RT062", key, f"'config.{key}' is {shown(value)}, which would change what the model computes")


def _other_keys(data: Mapping[str, object], known: Keys, report: Report) -> None:
    """Check the keys that no rule reads: neutral ones must be switched off; unknown ones are refused, never ignored."""
    read = known.read
    for key, value in data.items():
        if key in read:
            continue
        if not _is_finite(value):
            report.error("RT062", key, f"'{key}' has a number that cannot be held: {shown(value)}")
            continue
        if key in known.harmless or value is None:
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
        fields = {key: key for key in read} | {means: keys[0] for means, keys in known.renamed.items()}
        others = {name: fields[means] for name, means in CALLED_ELSEWHERE.items() if means in fields}
        near = nearest(key, sorted(read | known.neutral.keys() | known.harmless), others, cutoff=_CLOSE)
        way_out = "look up what it means: remove it only if the model computes the same without it"
        report.error(
            "RT061",
            key,
            f"the key {shown(key)} is not known: it may change what the model computes, so it is not ignored",
            help=f"{near} Otherwise {way_out}" if near else way_out,
        )

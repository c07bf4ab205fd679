"""Rules for keys of a `config.json` that no field holds unchanged: biases, activations, scales, windows of layers.

Each rule reads some keys and returns fields of a `ModelConfig`. It reports choices that the family does not support.
"""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.config.families import FAMILY
from ratrain.ratrain_ir.config.fields import as_float
from ratrain.ratrain_ir.support.text import shown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ratrain.ratrain_ir.config.fields import Report

ACTIVATION_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu-tanh",
    "gelu_new": "gelu-tanh",
    "gelu_fast": "gelu-tanh",
    "relu2": "relu2",
}
"""Names of activations in `config.json`, with those used here."""

ACTIVATION_KEYS = {
    "gpt2": ("activation_function", "hidden_act", "hidden_activation"),
    "gemma2": ("hidden_activation", "hidden_act"),
    "gemma3_text": ("hidden_activation", "hidden_act"),
}
"""Keys of the activation by family, the one that its class reads first; in other families `hidden_act`."""

WINDOW_OF_QWEN = ("use_sliding_window", "sliding_window", "max_window_layers")
_QWEN = ("qwen2", "qwen3")
_QWEN_EXPERTS = ("qwen2_moe", "qwen3_moe")
_GEMMA = ("gemma2", "gemma3_text")
_GRANITE = ("granite", "granitemoe")
_ALL_WINDOWED = ("mistral", "phi3", "mixtral")
"""Families in which all layers have the window, or none."""
_BIASED = (
    *("llama", "qwen3", "gemma2", "gemma3_text", "olmo2", "granite", "smollm3"),
    *("qwen3_moe", "olmoe", "granitemoe"),
)
"""Families whose `attention_bias` adds biases to the query, key, value and output projections."""


def activation(data: Mapping[str, object], family: str, report: Report) -> str | None:
    """Return the activation of the MLP; None if the file names none.

    Gemma's files name the activation of the published code in `hidden_act`, which its class does not read.
    """
    keys = ACTIVATION_KEYS.get(family, ("hidden_act", "hidden_activation"))
    said = [key for key in keys if data.get(key) is not None]
    if family in _GEMMA:
        said = said[:1] if said[:1] == ["hidden_activation"] else []
    names = {}
    for key in said:
        name = data[key]
        if not isinstance(name, str) or name not in ACTIVATION_NAMES:
            known = " or ".join(f'"{each}"' for each in ACTIVATION_NAMES)
            message = f"'{key}' is {shown(name)}: the activation of the MLP is not supported"
            report.error("RT061", key, message, help=f"supported is {known}")
            return None
        if "experts" in FAMILY[family].free and ACTIVATION_NAMES[name] != "silu":
            message = f"'{key}' is {shown(name)}: experts with this activation are not supported"
            report.error("RT061", key, message, help='supported is "silu"')
            return None
        names[key] = ACTIVATION_NAMES[name]
    if len(set(names.values())) > 1:
        text = " and ".join(f"'{key}' is {shown(data[key])}" for key in names)
        report.error("RT062", said[-1], f"{text}: they mean the same", help=f"remove '{said[-1]}'")
    return next(iter(names.values()), None)


def biases(data: Mapping[str, object], family: str, report: Report) -> dict[str, object]:
    """Return the fields of biases. `attention_bias` includes the output projection; `attention_bias_qkv` does not."""
    fields: dict[str, object] = {}
    bias = data.get("attention_bias")
    if family in _BIASED:
        fields |= _flags(data, "attention_bias", ("qkv_bias", "o_bias"), report)
    elif family == "internlm2":
        fields |= _flags(data, "bias", ("qkv_bias", "o_bias"), report)
    elif family == "gpt_neox":
        fields |= _flags(data, "attention_bias", ("qkv_bias", "o_bias"), report, absent=True)
    elif family == "qwen2_moe" and bias is None:
        fields |= _flags(data, "qkv_bias", ("qkv_bias",), report, absent=True)
    elif family == "gpt2":
        if bias not in (None, True):
            message = f"'attention_bias' is {shown(bias)}: a gpt2 model has biases in all of attention"
            report.error("RT061", "attention_bias", message, help="supported is true, or leave it out")
    elif bias is not None and (bias is not False or family in ("qwen2", "qwen2_moe")):
        why = {
            "qwen2": "which always has biases in the query, key and value projections and none in the output "
            "projection",
            "qwen2_moe": "whose class reads 'qkv_bias'",
        }.get(family, "whose class has none")
        message = f"'attention_bias' is {shown(bias)}: not supported in a {family} model, {why}"
        report.error("RT061", "attention_bias", message, help="leave it out")
    _check_qkv_bias(data, family, fields, report)
    if family in ("llama", "granite", "smollm3"):
        fields |= _flags(data, "mlp_bias", ("mlp_bias",), report)
    return fields


def _check_qkv_bias(data: Mapping[str, object], family: str, fields: Mapping[str, object], report: Report) -> None:
    expected = fields.get("qkv_bias", family in {"qwen2", "gpt2"})
    if data.get("attention_bias_qkv") not in (None, expected):
        report.error(
            "RT061",
            "attention_bias_qkv",
            f"'attention_bias_qkv' is {shown(data['attention_bias_qkv'])}: not supported in this {family} model",
            help=f"supported is {shown(expected)}: qwen2 and gpt2 always have these biases, others as "
            "'attention_bias' says",
        )


def _flags(
    data: Mapping[str, object], key: str, names: tuple[str, ...], report: Report, *, absent: bool = False
) -> dict[str, object]:
    value = data.get(key)
    if value is not None and not isinstance(value, bool):
        report.error("RT060", key, f"'{key}' is {shown(value)}: true or false is expected")
        return {}
    return dict.fromkeys(names, absent if value is None else value)


def scales(data: Mapping[str, object], family: str, hidden: object, report: Report) -> dict[str, object]:
    """Return the factors of attention scores, logits, embedded tokens and branches."""
    if family in _GEMMA:
        scalar = _positive(data, "query_pre_attn_scalar", 256.0, report)
        width = hidden if type(hidden) is int and hidden > 0 else 1
        return {"attention_scale": scalar**-0.5, "embedding_scale": sqrt(width)}
    if family in _GRANITE:
        return {
            "attention_scale": _positive(data, "attention_multiplier", 1.0, report),
            "embedding_scale": _positive(data, "embedding_multiplier", 1.0, report),
            "residual_scale": _positive(data, "residual_multiplier", 1.0, report),
            "logit_scale": 1 / _positive(data, "logits_scaling", 1.0, report),
        }
    return {}


def _positive(data: Mapping[str, object], key: str, absent: float, report: Report) -> float:
    value = as_float(data.get(key, absent))
    if value is None or not 1e-6 <= value <= 1e6:
        report.error("RT060", key, f"'{key}' is {shown(data[key])}: a number from 1e-6 to 1e6 is expected")
        return 1.0
    return value


# which layers see how much


def layers(data: Mapping[str, object], family: str, report: Report) -> dict[str, object]:
    """Return the sliding window, and which layers have it or are not rotated.

    With a window of w each token sees itself and the w - 1 tokens before it.
    """
    kinds = _layer_types(data, report)
    used = data.get("use_sliding_window")
    if used is not None and not isinstance(used, bool):
        report.error("RT060", "use_sliding_window", f"'use_sliding_window' is {shown(used)}: true or false is expected")
        return {}
    if family in _QWEN:
        return _qwen_layers(data, kinds, report) if used else _unwindowed(kinds, report)
    if family in _QWEN_EXPERTS:
        if used:
            message = f"'use_sliding_window' is true: a sliding window is not supported in a {family} model"
            report.error("RT061", "use_sliding_window", message, help="supported is false: then the model has none")
        return {} if used else _unwindowed(kinds, report)
    if family in _GEMMA:
        return _gemma_layers(data, family, kinds, report)
    if family == "smollm3":
        return _smollm_layers(data, kinds, report)
    default = 4096 if family == "mistral" else None  # of the family's class
    window = data.get("sliding_window", default)
    if used or (used is False and family in ("mistral", "mixtral") and window is not None):
        message = f"'use_sliding_window' is not supported in a {family} model: only qwen2 and qwen3 have it"
        way_out = "remove it; in mistral and mixtral models, 'sliding_window' alone decides, and null means none"
        report.error("RT061", "use_sliding_window", message, help=way_out)
    if data.get("max_window_layers") is not None:
        message = f"'max_window_layers' is not supported in a {family} model: only qwen2 and qwen3 have it"
        report.error("RT061", "max_window_layers", message, help="remove it")
    if family not in _ALL_WINDOWED:
        if window is not None:
            report.error(
                "RT061",
                "sliding_window",
                f"'sliding_window' {shown(window)} is not supported in a {family} model",
                help="supported in mistral, mixtral, phi3, qwen2, qwen3, gemma2 and gemma3_text models; elsewhere it "
                "must be null",
            )
            return {}
        return _unwindowed(kinds, report)
    if kinds and set(kinds) != {"f" if window is None else "w"}:
        message = f"'layer_types' says {_words(kinds)}, but 'sliding_window' is {shown(window)}"
        report.error("RT062", "layer_types", message, help="make them agree, or remove 'layer_types'")
    return {"sliding_window": window}


def _words(kinds: str) -> str:
    names = {"f": "full_attention", "w": "sliding_attention"}
    return " and ".join(names[kind] for kind in sorted(set(kinds)))


def _layer_types(data: Mapping[str, object], report: Report) -> str | None:
    """Return the letters of `layer_types`; None if it is absent or refused."""
    types = data.get("layer_types")
    if types is None:
        return None
    if not isinstance(types, list) or not types:
        report.error("RT060", "layer_types", f"'layer_types' is {shown(types)}: a list of one name a layer is expected")
        return None
    letters = {"full_attention": "f", "sliding_attention": "w"}
    for kind in types:
        if not isinstance(kind, str) or kind not in letters:
            supported = "supported is full_attention or sliding_attention"
            report.error("RT061", "layer_types", f"layers of type {shown(kind)} are not supported", help=supported)
            return None
    count = data.get("num_hidden_layers")
    if isinstance(count, int) and len(types) != count:
        report.error("RT062", "layer_types", f"'layer_types' has {len(types)} entries, but the model {count} layers")
        return None
    return "".join(letters[kind] for kind in types)


def mlp_kinds(data: Mapping[str, object], report: Report) -> dict[str, object]:
    """Return which layers have experts, by Qwen's rule: every n-th one, but those with a dense MLP by their numbers.

    n is `decoder_sparse_step`, and the others are listed in `mlp_only_layers`. No field where all layers have experts.
    """
    step, dense = data.get("decoder_sparse_step"), data.get("mlp_only_layers")
    step, dense = 1 if step is None else step, [] if dense is None else dense
    if type(step) is not int or step < 1:
        message = f"'decoder_sparse_step' is {shown(step)}: a count of layers, from 1 on, is expected"
        report.error("RT060", "decoder_sparse_step", message)
        return {}
    if not isinstance(dense, list) or not all(type(each) is int for each in dense):
        message = f"'mlp_only_layers' is {shown(dense)}: a list of numbers of layers is expected"
        report.error("RT060", "mlp_only_layers", message)
        return {}
    others = set(dense)
    letters = "".join(
        "e" if layer not in others and (layer + 1) % step == 0 else "d" for layer in range(_layer_count(data))
    )
    if "e" not in letters:
        key = "mlp_only_layers" if len(others) >= len(letters) else "decoder_sparse_step"
        message = f"'{key}' is {shown(data[key])}: no layer of the model has experts"
        report.error("RT061", key, message, help="supported are models of which some layers have experts")
    return {"mlp_kinds": letters} if set(letters) == {"d", "e"} else {}


def _unwindowed(kinds: str | None, report: Report) -> dict[str, object]:
    """Return no fields; report `layer_types` that ask for a window when none is in use."""
    if kinds and "w" in kinds:
        report.error(
            "RT062",
            "layer_types",
            "'layer_types' asks for sliding attention, but the model has no sliding window in use",
            help="make every entry full_attention, or give the window",
        )
    return {}


def _mixed(window: object, kinds: str) -> dict[str, object]:
    """Return the fields of a window that the layers with letter `w` have."""
    if "w" not in kinds:
        return {}
    return {"sliding_window": window} if set(kinds) == {"w"} else {"sliding_window": window, "layer_kinds": kinds}


def _layer_count(data: Mapping[str, object]) -> int:
    """Return the number of layers, at least 1. A wrong number is reported elsewhere."""
    count = data.get("num_hidden_layers")
    return count if type(count) is int and 0 < count <= 1 << 14 else 1


def _qwen_layers(data: Mapping[str, object], kinds: str | None, report: Report) -> dict[str, object]:
    """Apply Qwen's rule with `use_sliding_window`: the layers from `max_window_layers` on have the window."""
    window = data.get("sliding_window", 4096)  # 4096 and 28 are the defaults of Qwen's classes
    if window is None:
        return _unwindowed(kinds, report)
    if kinds:
        return _mixed(window, kinds)
    first = data.get("max_window_layers", 28)
    if type(first) is not int or first < 0:
        report.error("RT060", "max_window_layers", f"'max_window_layers' is {shown(first)}: a count is expected")
        return {}
    count = _layer_count(data)
    return _mixed(window, "f" * min(first, count) + "w" * (count - min(first, count)))


def _gemma_layers(data: Mapping[str, object], family: str, kinds: str | None, report: Report) -> dict[str, object]:
    """Apply Gemma's rule: every n-th layer is full, the others have the window.

    n is 2 in Gemma 2; in Gemma 3 it is `sliding_window_pattern`, by default 6.
    """
    pattern = data.get("sliding_window_pattern", 6) if family == "gemma3_text" else 2
    if type(pattern) is not int or pattern < 1:
        message = f"'sliding_window_pattern' is {shown(pattern)}: a count is expected"
        report.error("RT060", "sliding_window_pattern", message)
        return {}
    count = _layer_count(data)
    kinds = kinds or "".join("w" if (layer + 1) % pattern else "f" for layer in range(count))
    window = data.get("sliding_window", 4096)
    other = data.get("sliding_window_size")
    if family == "gemma2" and other is not None and other != window:
        text = (
            f"'sliding_window_size' is {shown(other)}, but the window is {shown(window)}: the class reads "
            "'sliding_window'"
        )
        report.error("RT062", "sliding_window_size", text, help="make them agree, or remove 'sliding_window_size'")
    if window is None and "w" in kinds:
        report.error("RT062", "sliding_window", "'sliding_window' is null, but some layers use sliding attention")
        return {}
    return _mixed(window, kinds)


def _smollm_layers(data: Mapping[str, object], kinds: str | None, report: Report) -> dict[str, object]:
    """Apply SmolLM 3's rule: layers with a 0 in `no_rope_layers` are not rotated.

    Without that list every `no_rope_layer_interval`-th layer (default 4) is not rotated.
    """
    if data.get("use_sliding_window") and data.get("sliding_window") is not None:
        message = "a sliding window in the layers that are not rotated is not supported"
        report.error("RT061", "use_sliding_window", message, help="set use_sliding_window to false")
    _unwindowed(kinds, report)
    count, rotated = _layer_count(data), data.get("no_rope_layers")
    if rotated is None:
        interval = data.get("no_rope_layer_interval", 4)
        if type(interval) is not int or interval < 1:
            message = f"'no_rope_layer_interval' is {shown(interval)}: a count is expected"
            report.error("RT060", "no_rope_layer_interval", message)
            return {}
        rotated = [int((layer + 1) % interval != 0) for layer in range(count)]
    if not isinstance(rotated, list) or len(rotated) != count or not all(each in (0, 1) for each in rotated):
        message = f"'no_rope_layers' is {shown(rotated)}: a 1 for each rotated layer, a 0 for each other is expected"
        report.error("RT060", "no_rope_layers", message, help=f"the model has {count} layers")
        return {}
    letters = "".join("f" if each else "n" for each in rotated)
    return {"layer_kinds": letters} if "n" in letters else {}

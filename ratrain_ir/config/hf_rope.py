"""Positions in a `config.json`: rotary embedding (base, rotated share of a head, scaling), ALiBi, learned positions.

`transformers` reads `rope_theta`, `rope_scaling` and `partial_rotary_factor`, or all three from `rope_parameters`. In
Gemma 3 that table must have an entry per type of layer. GPT-NeoX has `rotary_emb_base` and `rotary_pct` in place of the
first and the last. A file may give a value twice if the two agree.
"""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING

from attrs import define, field

from ratrain.ratrain_ir.config.families import FAMILY
from ratrain.ratrain_ir.config.fields import as_float
from ratrain.ratrain_ir.config.hf_keys import ROPE_THETA
from ratrain.ratrain_ir.config.rope_scaling import PARAMETERS, make_scaling
from ratrain.ratrain_ir.support.text import shown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ratrain.ratrain_ir.config.fields import Report

_KINDS = "supported are default, linear, dynamic, llama3 and yarn"
_NAMED = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
"""Keys that any table of a rotary embedding may have."""
_USUAL_THETA = {"gemma3_text": 1e6, "smollm3": 2e6, "mixtral": 1e6}
"""Default rotary base of classes that differ from LLaMA."""
_LOCAL_THETA = 10000.0
"""Default rotary base of Gemma 3's layers with a window."""
_NEOX_SHARE = 0.25
"""Default share of each head that GPT-NeoX rotates."""


@define
class Translation:
    """Fields of a `ModelConfig` with the file's values, and for each field the key of the file that it came from."""

    fields: dict[str, object] = field(factory=dict)
    keys: dict[str, str] = field(factory=dict)


def positions(data: Mapping[str, object], family: str, out: Translation, report: Report) -> None:
    """Translate the keys of positions into fields of `out`; report contradictions."""
    out.keys["position"] = "position_embedding"
    out.keys["rope_theta"] = "rope_theta"
    tables = _tables(data, family, report)
    thetas = _given(data, ("rotary_emb_base", "rope_theta") if family == "gpt_neox" else ("rope_theta",))
    _unread_of_neox(data, family, tables, report)
    thetas |= {key: table["rope_theta"] for key, table in tables.items() if table.get("rope_theta") is not None}
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
            f"a rotary base is given, but this model uses {uses}, which "
            f"{'has' if position == 'alibi' else 'have'} none",
            help="remove it" + (way_out if position == "alibi" else ""),
        )
    if position != "rope":
        out.fields["rope_theta"] = 0.0
        for key in ("rope_parameters", "rope_scaling", "partial_rotary_factor"):
            if data.get(key) is not None and key not in thetas:
                message = f"'{key}' is for rotated positions, which this model has not"
                report.error("RT062", key, message, help="remove it")
        return
    out.fields["rope_theta"] = _USUAL_THETA.get(family, ROPE_THETA)
    if thetas:
        out.keys["rope_theta"], out.fields["rope_theta"] = next(iter(thetas.items()))
    _scaling(data, family, tables, out, report)
    _width(data, family, tables, out, report)
    if family == "gemma3_text":
        _local(data, out, report)


def _given(data: Mapping[str, object], keys: tuple[str, ...]) -> dict[str, object]:
    return {key: data[key] for key in keys if data.get(key) is not None}


def _unread_of_neox(
    data: Mapping[str, object], family: str, tables: Mapping[str, Mapping[str, object]], report: Report
) -> None:
    """Report usual keys alone in a GPT-NeoX file, whose class does not read them; they may only repeat its own keys."""
    for own, usual in (("rotary_emb_base", "rope_theta"), ("rotary_pct", "partial_rotary_factor")):
        said = data.get(own) is not None or any(table.get(usual) is not None for table in tables.values())
        if family == "gpt_neox" and data.get(usual) is not None and not said:
            message = f"'{usual}' is not read in a gpt_neox model"
            report.error("RT061", usual, message, help=f"write it as '{own}'")


def _tables(data: Mapping[str, object], family: str, report: Report) -> dict[str, Mapping[str, object]]:
    """Return, by key, the rotary tables that hold for layers with full attention."""
    tables: dict[str, Mapping[str, object]] = {}
    for key in ("rope_parameters", "rope_scaling"):
        table = data.get(key)
        if table is None:
            continue
        if not isinstance(table, dict):
            report.error("RT060", key, f"'{key}' is {shown(table)}: null or an object is expected")
            continue
        tables[key] = table
        if family == "gemma3_text" and key == "rope_parameters":
            tables[key] = _of_full_layers(table, report)
    return tables


def _of_full_layers(table: Mapping[str, object], report: Report) -> Mapping[str, object]:
    """Return the entry for full attention in Gemma 3's `rope_parameters`; its class reads entries per layer type."""
    for name in table:
        if name not in ("full_attention", "sliding_attention"):
            message = f"'rope_parameters' has {shown(name)}, but a gemma3_text model reads it for each type of layers"
            help_text = "write it in an entry full_attention or sliding_attention"
            report.error("RT061", "rope_parameters", message, help=help_text)
    entry = table.get("full_attention")
    if entry is not None and not isinstance(entry, dict):
        message = f"'rope_parameters' has full_attention = {shown(entry)}: null or an object is expected"
        report.error("RT060", "rope_parameters", message)
    return entry if isinstance(entry, dict) else {}


def _scaling(
    data: Mapping[str, object],
    family: str,
    tables: Mapping[str, Mapping[str, object]],
    out: Translation,
    report: Report,
) -> None:
    found = {key: _scaling_of(data, key, table, report) for key, table in tables.items()}
    for key, text in found.items():
        if text and text.split(" ")[0] not in (known := FAMILY[family].scalings):
            message = f"'{key}' asks for {shown(text.split(' ')[0])} scaling, not supported in a {family} model"
            report.error("RT061", key, message, help=f"supported is {' or '.join(('default', *known))}")
            return
    texts = {text for text in found.values() if text is not None}
    if len(texts) > 1:
        report.error("RT062", "rope_scaling", "'rope_parameters' and 'rope_scaling' differ", help="keep one of them")
    for key, text in found.items():
        if text:
            out.fields["rope_scaling"], out.keys["rope_scaling"] = text, key


def _scaling_of(data: Mapping[str, object], key: str, table: Mapping[str, object], report: Report) -> str | None:
    """Return the text of a table's scaling, empty for none; None if the table is refused."""
    kinds = {str(table[name]) for name in ("rope_type", "type") if table.get(name) is not None}
    if len(kinds) > 1:
        report.error("RT062", key, f"'{key}' has two types: {' and '.join(sorted(kinds))}", help="keep one of them")
        return None
    kind = next(iter(kinds), "default")
    others = {name: value for name, value in table.items() if name not in _NAMED and value is not None}
    if kind not in ("default", *PARAMETERS):
        report.error("RT061", key, f"'{key}' asks for {shown(kind)} scaling, not supported", help=_KINDS)
        return None
    known = {
        "default": (),
        "linear": ("factor",),
        "dynamic": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        "yarn": (
            *("factor", "beta_fast", "beta_slow", "original_max_position_embeddings"),
            *("attention_factor", "truncate", "mscale", "mscale_all_dim"),
        ),
    }[kind]
    if not _refuse_others(key, others, known, report) or kind == "default":
        return "" if kind == "default" else None
    numbers = {name: _number(value) for name, value in others.items()}
    if kind != "linear" and "original_max_position_embeddings" not in numbers:
        numbers["original_max_position_embeddings"] = as_float(data.get("max_position_embeddings"))
    scaling = None
    if all(number is not None for number in numbers.values()):
        given = {name: number for name, number in numbers.items() if number is not None}
        given["original_positions"] = given.pop("original_max_position_embeddings", 0.0)
        completed = _completed_yarn(given) if kind == "yarn" and "factor" in given else given
        if completed.keys() >= set(PARAMETERS[kind]):
            scaling = make_scaling(kind, completed)
    if scaling is None:
        needed = ", ".join(name for name in known if name not in ("mscale", "mscale_all_dim", "truncate"))
        message = f"'{key}' is no usable {kind} scaling: {shown(dict(table))}"
        limit = ", and max_position_embeddings" if kind == "dynamic" else ""
        report.error("RT060", key, message, help=f"it has {needed} as numbers in range{limit}")
        return None
    return str(scaling)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, bool) else as_float(value)


def _completed_yarn(given: dict[str, float]) -> dict[str, float]:
    """Return the parameters of YaRN, completed by the defaults of its class."""
    factor = given["factor"]

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * log(factor) + 1.0

    usual = magnitude(1.0)
    if given.get("mscale") and given.get("mscale_all_dim"):
        usual = magnitude(given["mscale"]) / magnitude(given["mscale_all_dim"])
    defaults = {"beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": usual, "truncate": 1.0}
    return {**defaults, **given}


def _refuse_others(key: str, others: Mapping[str, object], known: tuple[str, ...], report: Report) -> bool:
    """Report the parameters that a kind of scaling does not have; tell whether there were none."""
    for name, value in others.items():
        if name not in known:
            report.error("RT061", key, f"'{key}' has {shown(name)} = {shown(value)}, not supported", help=_KINDS)
    return set(others) <= set(known)


def _width(
    data: Mapping[str, object],
    family: str,
    tables: Mapping[str, Mapping[str, object]],
    out: Translation,
    report: Report,
) -> None:
    """Translate the share of a head that is rotated into `rotary_dim` of `out`."""
    given = _given(
        data, ("rotary_pct", "partial_rotary_factor") if family == "gpt_neox" else ("partial_rotary_factor",)
    )
    for key, table in tables.items():
        if table.get("partial_rotary_factor") is not None:
            given[key] = table["partial_rotary_factor"]
    if len({repr(as_float(share)) for share in given.values()}) > 1:
        said = " and ".join(f"'{key}' says {shown(share)}" for key, share in given.items())
        message = f"the share of a head that is rotated is given twice: {said}"
        report.error("RT062", next(reversed(given)), message, help="keep one of them")
        return
    usual = ("rotary_pct", _NEOX_SHARE) if family == "gpt_neox" else ("", 1)
    key, share = next(iter(given.items()), usual)
    number = as_float(share)
    if number == 1:
        return
    sizes = [data.get(name) for name in ("head_dim", "hidden_size", "num_attention_heads")]
    if "rotary_dim" not in FAMILY[family].free or number is None or not 0 < number < 1:
        message = f"'{key}' asks to rotate {shown(share)} of each head, not supported in a {family} model"
        report.error("RT061", key, message, help="supported is all of it (1), or in phi3 and gpt_neox a part")
        return
    dim, hidden, heads = (size if type(size) is int and size > 0 else None for size in sizes)
    width = dim or (hidden // heads if hidden and heads else None)
    if width is not None:
        out.fields["rotary_dim"], out.keys["rotary_dim"] = int(width * number), key


def _local(data: Mapping[str, object], out: Translation, report: Report) -> None:
    """Translate the rotary base of Gemma 3's layers with a window, which is their own and unscaled."""
    theta: object = data.get("rope_local_base_freq", _LOCAL_THETA)
    table = data.get("rope_parameters")
    nested = table.get("sliding_attention") if isinstance(table, dict) else None
    if isinstance(nested, dict):
        theta = nested.get("rope_theta", theta)
        if nested.get("rope_type", nested.get("type", "default")) != "default":
            message = "scaled rotary embeddings in layers with a window are not supported"
            report.error("RT061", "rope_parameters", message, help="supported is type default there")
        elif nested.get("partial_rotary_factor") not in (None, 1):
            message = "layers with a window that rotate a part of each head are not supported"
            report.error("RT061", "rope_parameters", message, help="supported is all of it (1)")
        else:
            others = {name: value for name, value in nested.items() if name not in _NAMED and value is not None}
            _refuse_others("rope_parameters", others, (), report)
    elif nested is not None:
        message = f"'rope_parameters' has sliding_attention = {shown(nested)}: null or an object is expected"
        report.error("RT060", "rope_parameters", message)
    if "w" in str(out.fields.get("layer_kinds", "")) or out.fields.get("sliding_window") is not None:
        out.fields["local_rope_theta"], out.keys["local_rope_theta"] = theta, "rope_local_base_freq"


def _position_kind(data: Mapping[str, object], family: str, report: Report) -> str:
    """Return `rope`, `alibi` or `learned`: the explicit key, else what the family (in Baichuan its size) implies."""
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

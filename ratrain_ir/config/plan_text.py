"""A plan as text: from a TOML file and back, and from the fields of the IR text's header."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from ratrain.ratrain_ir.config.balance import balance_cuts
from ratrain.ratrain_ir.config.fields import FieldReader, Report
from ratrain.ratrain_ir.config.plan import KEYS, Plan
from ratrain.ratrain_ir.config.plan_checks import check_said, check_together
from ratrain.ratrain_ir.config.plan_keys import table_of
from ratrain.ratrain_ir.config.slicing import with_slices
from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.ratrain_ir.support.files import checked
from ratrain.ratrain_ir.support.text import Place, Places, Source, nowhere, read_text, toml_places
from ratrain.ratrain_ir.support.toml_text import toml_data

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig

_WHAT = "a plan in TOML"


def plan_from_fields(
    values: Mapping[str, object], *, model: ModelConfig | None = None, places: Places = nowhere
) -> Plan:
    """The inverse of `Plan.to_fields`; `places` finds a field in the text it was read from.

    Raises RT064 with everything that is missing, unknown, of the wrong type, out of range, contradictory, not
    built in this version or, where a model is given, contrary to the model.
    """
    report = Report(places)
    reader = FieldReader(KEYS.without_words(values), report, "RT064")
    reader.refuse_unknown(KEYS.keys)
    plan = KEYS.read(reader)
    check_together(reader, plan, model, auto_cuts=False)
    report.check()
    return plan


def check_plan(plan: Plan, model: ModelConfig) -> None:
    """Raise RT064 where a plan that was built in Python contradicts itself or the model, or is not built yet."""
    plan_from_fields(plan.to_fields(), model=model)


@frozen
class Overlay:
    """Keys of a plan that something beside its file says: they take the place of those of the file."""

    values: Mapping[str, object]
    """by name, without the section, as a file has them"""
    places: Places
    """from the name of a key to where it is said; of the empty name, and others that are not said, the whole"""


def load_plan(
    path: str | Path,
    model: ModelConfig,
    overlay: Overlay | None = None,
    shape: Mapping[str, object] | None = None,
) -> Plan:
    """The plan of a TOML file. Raises RT002 (cannot be read), RT063 (not a plan), RT064 (contradictory)."""
    return parse_plan(read_text(path, "RT063", _WHAT), file=str(path), model=model, overlay=overlay, shape=shape)


def parse_plan(
    text: str,
    *,
    file: str,
    model: ModelConfig | None,
    overlay: Overlay | None = None,
    shape: Mapping[str, object] | None = None,
) -> Plan:
    """The plan of a TOML text, with what an overlay says; `cuts = "auto"`, or none, is resolved for the model.

    Without a model such cuts are left empty, and what depends on one is not checked.
    `shape` has values for keys that the text leaves out. Where the text says another value of one of them it is for another shape, and
    none is taken.

    Raises RT063 (syntax, unknown, missing or mistyped keys) and RT064 (contradictions), all of the text at once.
    """
    source = Source(file, text)
    places = toml_places(source)
    data = toml_data(source, "RT063")
    if overlay is not None:
        _lay_over(data, overlay)
        places = _places_under(overlay, places if text else overlay.places)
    report = Report(places)
    values = with_slices(KEYS.flat(data, report), model)
    if shape is not None and all(_fits(values.get(name, value), value) for name, value in shape.items()):
        values = with_slices({**shape, **values}, model)
    auto_cuts = values.get("cuts", "auto") == "auto"
    reader = FieldReader(values, report, "RT063", KEYS.labels)
    plan = KEYS.read(reader, {"cuts": ()} if auto_cuts else {})
    check_together(reader, plan, model, auto_cuts=auto_cuts)
    check_said(reader, plan)
    report.check()
    if model is None or not auto_cuts:
        return plan
    return evolve(plan, cuts=balance_cuts(model, plan.pp * plan.chunks, plan.seq_len))


def _fits(said: object, value: object) -> bool:
    """Whether a text says a value; of slices, whose lengths it has, how many there are."""
    return (len(said) if isinstance(said, tuple | list) else said) == value


def _lay_over(data: dict[str, Any], overlay: Overlay) -> None:
    for name, value in overlay.values.items():
        section = data.setdefault(KEYS.keys[name].section, {})
        if isinstance(section, dict):  # what is none is reported as such
            section[name] = value


def _places_under(overlay: Overlay, below: Places) -> Places:
    """The places of an overlay's keys, and of others."""

    def place(label: str) -> Place:
        name = label.rpartition(".")[2]
        return overlay.places(name) if name in overlay.values else below(label)

    return place


def place_in_plan(path: str | Path, key: str) -> Place:
    """Where a plan's file has a key, as far as it has it; of what can be read but once, as a pipe, only the name."""
    if not Path(path).is_file():
        return Source(str(path), "").top()
    return toml_places(Source(str(path), read_text(path, "RT063", _WHAT)))(KEYS.labels[key])


def plan_to_toml(plan: Plan) -> str:
    """A TOML text that `parse_plan` reads back as an equal plan; every key is written out that changes something."""
    words = plan_words(plan)
    blocks = []
    for section, names in table_of(type(plan)).sections.items():
        lines = [f"{name} = {words[name]}" for name in names if name in words]
        if lines:
            blocks.append("\n".join([f"[{section}]", *lines]) + "\n")
    return "\n".join(blocks)


def checked_plan_text(text: str, plan: Plan, left_out: Collection[str] = ()) -> str:
    """Return the text of a plan's file, with comments, once it reads back as the plan; cuts may be left to be chosen.

    `left_out` are keys that the file is meant to leave out, and so to have as they are by default.

    Raises `DiagnosticError` RT011 with the key that does not.
    """

    def read(text: str) -> None:
        said, meant = plan_words(parse_plan(text, file="P.toml", model=None)), plan_words(plan)
        for name in (*meant, *said):
            if (
                name not in left_out
                and said.get(name) != meant.get(name)
                and not (name == "cuts" and said[name] == "[]")
            ):
                fail("RT063", f"'{KEYS.labels[name]}' is read back as {said.get(name)}, not as {meant.get(name)}")

    return checked(text, "plan", read)


def changes_text(before: Plan, after: Plan) -> str:
    """The keys whose values differ, as a plan's file has them afterwards."""
    known = plan_words(before)
    return ", ".join(f"{key} = {value}" for key, value in plan_words(after).items() if known.get(key) != value)


def plan_words(plan: Plan) -> dict[str, str]:
    """Each key of a plan file with its value as the file has it, in the file's order; keys that the file would leave out are not there."""
    return table_of(type(plan)).words(plan)

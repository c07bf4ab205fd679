"""Files of plans, in TOML: read with the keys that lie over them, and checked where they are written.

Cuts that a file leaves open are chosen here, for the model and for what the file says of training.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from ratrain.ratrain_ir.config.cuts import with_slices
from ratrain.ratrain_ir.config.fields import FieldReader, Report
from ratrain.ratrain_ir.config.made_for import MadeFor, take_made_for
from ratrain.ratrain_ir.config.plan import KEYS, Plan
from ratrain.ratrain_ir.config.plan_checks import check_together
from ratrain.ratrain_ir.config.plan_text import plan_words
from ratrain.ratrain_ir.model.layer_cuts import balance_cuts
from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.ratrain_ir.support.files import checked
from ratrain.ratrain_ir.support.text import Place, Places, Source, read_text, toml_places
from ratrain.ratrain_ir.support.toml_text import toml_data
from ratrain.ratrain_ir.text.said_keys import check_said

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig

_WHAT = "a plan in TOML"


@frozen
class Overlay:
    """Keys of a plan from another source than its file, such as the command line; they override the file's."""

    values: Mapping[str, object]
    """by name, without the section, as in a file"""
    places: Places
    """returns the place of a key by name; for other names, also the empty one, the place of the whole"""


def load_plan(
    path: str | Path,
    model: ModelConfig,
    overlay: Overlay | None = None,
    shape: Mapping[str, object] | None = None,
) -> Plan:
    """Load the plan of a TOML file. Raises RT002 (cannot be read), RT063 (not a plan), RT064 (contradictory)."""
    text = _PEEKED.pop(str(path), None)
    text = read_text(path, "RT063", _WHAT) if text is None else text
    return parse_plan(text, file=str(path), model=model, overlay=overlay, shape=shape)


def made_for(path: str | Path) -> MadeFor | None:
    """Return the machine that the plan of a TOML file was made for, its path as the working directory sees it.

    None if the file does not say. Raises RT002 and RT063 for the file, and for what it says of its machine.
    """
    source = Source(str(path), read_text(path, "RT063", _WHAT))
    if not Path(path).is_file():
        _PEEKED[str(path)] = source.text
    report = Report(toml_places(source))
    found = take_made_for(toml_data(source, "RT063"), report)
    report.check()
    return None if found is None else found.beside(path)


_PEEKED: dict[str, str] = {}
"""Texts that `made_for` read from pipes, which can be read once: the next `load_plan` of that path takes them."""


def parse_plan(
    text: str,
    *,
    file: str,
    model: ModelConfig | None,
    overlay: Overlay | None = None,
    shape: Mapping[str, object] | None = None,
) -> Plan:
    """Parse the plan of a TOML text with an overlay; resolve absent cuts and `cuts = "auto"` for the model.

    Without a model such cuts stay empty, and checks that need one are skipped. `shape` has values for keys that the
    text leaves out. If the text has another value for one of these keys, it is meant for another shape, and none are
    taken.

    Raises RT063 (syntax, unknown, missing or mistyped keys) and RT064 (contradictions), all of the text at once.
    """
    source = Source(file, text)
    places = toml_places(source)
    data = toml_data(source, "RT063")
    if overlay is not None:
        places = _places_under(overlay, places if text else overlay.places)
    report = Report(places)
    take_made_for(data, report)
    if overlay is not None:
        _lay_over(data, overlay)
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
    return evolve(plan, cuts=balance_cuts(model, plan.pp * plan.chunks, plan.seq_len, plan.training))


def _fits(said: object, value: object) -> bool:
    """Tell whether a text's value equals that of a shape; of slices, which the text has as lengths, their number."""
    return (len(said) if isinstance(said, tuple | list) else said) == value


def _lay_over(data: dict[str, Any], overlay: Overlay) -> None:
    for name, value in overlay.values.items():
        section = data.setdefault(KEYS.keys[name].section, {})
        if isinstance(section, dict):  # anything else is reported as no section
            section[name] = value


def _places_under(overlay: Overlay, below: Places) -> Places:
    """Return the places of an overlay's keys, and for others those below."""

    def place(label: str) -> Place:
        name = label.rpartition(".")[2]
        return overlay.places(name) if name in overlay.values else below(label)

    return place


def place_in_plan(path: str | Path, key: str) -> Place:
    """Return the place of a key in a plan's file; only the file's name if it can be read just once, such as a pipe."""
    if not Path(path).is_file():
        return Source(str(path), "").top()
    return toml_places(Source(str(path), read_text(path, "RT063", _WHAT)))(KEYS.labels[key])


def checked_plan_text(text: str, plan: Plan, left_out: Collection[str] = ()) -> str:
    """Return the text of a plan's file, comments included, if it reads back as the plan; cuts may be left open.

    `left_out` are keys that the file is meant to leave out, so to have at their defaults.

    Raises `DiagnosticError` RT011 with the key that is not read back.
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

"""Models from presets, names on the Hugging Face Hub, `config.json` files, and directories that contain one."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from attrs import evolve

from ratrain.ratrain_ir.config.fields import FieldReader, Report
from ratrain.ratrain_ir.config.hf_config import inert_keys, translate
from ratrain.ratrain_ir.config.hub_names import hub_model, hub_names
from ratrain.ratrain_ir.config.model_fields import read_model
from ratrain.ratrain_ir.support.diagnostics import Note, fail, nearest
from ratrain.ratrain_ir.support.files import existing_like, is_directory, is_there
from ratrain.ratrain_ir.support.text import Place, Places, Source, json_places, read_text, shown

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig

_LIKE = 0.8
"""Likeness above which a name of the Hub is suggested: owners and families make all of them somewhat alike."""
_WHAT = "a Hugging Face style config.json"


def preset_names() -> list[str]:
    """Return the names of the presets, sorted."""
    return sorted(entry.name.removesuffix(".json") for entry in _presets().iterdir() if entry.name.endswith(".json"))


def load_model(name_or_path: str) -> ModelConfig:
    """Load a model by preset name, from a `config.json` or a directory that contains one, or by its name on the Hub.

    A preset wins over a file of the same name (`./name` is the file), and a file over a name on the Hub. Raises RT004
    (no such preset), RT002 (file cannot be read), RT060, RT061, RT062 (no supported model).
    """
    if name_or_path in preset_names():
        return _preset(name_or_path)
    if not _is_there(name_or_path):
        return model_of_hub_name(name_or_path) or _no_such_model(name_or_path)
    path = Path(name_or_path)
    if is_directory(path):
        path /= "config.json"
        if not is_there(path):
            fail("RT002", f"the directory {shown(name_or_path)} holds no config.json", help=f"name {_WHAT}")
    name = path.resolve().parent.name if path.name == "config.json" else path.stem
    return parse_config_text(read_text(path, "RT060", _WHAT), name=name, file=str(path))


def model_of_hub_name(name: str) -> ModelConfig | None:
    """Return the configuration of a model of the Hub; None for an unknown name."""
    known = hub_model(name)
    return _preset(known.preset) if known else None


def preset_of_hub_name(name_or_path: str) -> str | None:
    """Return the preset that `load_model` takes for a name on the Hub.

    None if the name is a preset's own, a path's or an unknown one.
    """
    if name_or_path in preset_names() or _is_there(name_or_path):
        return None
    known = hub_model(name_or_path)
    return None if known is None else known.preset


def _preset(name: str) -> ModelConfig:
    entry = _presets() / f"{name}.json"
    return parse_config_text(entry.read_text("utf-8"), name=name, file=str(entry))


def _is_there(name_or_path: str) -> bool:
    """Tell whether a path leads to anything.

    Text without path characters may be a misspelt preset: `os.path.exists` does not raise RT002 for it.
    """
    return is_there(name_or_path) if _looks_like_a_path(name_or_path) else os.path.exists(name_or_path)  # noqa: PTH110


def parse_config(data: Mapping[str, object], *, name: str, file: str, places: Places | None = None) -> ModelConfig:
    """Return the model of a parsed `config.json`; `places` finds a key in its text.

    Raises RT060, RT061 and RT062 with all errors of the file at once.
    """
    report = Report(places or (lambda _key: Source(file, "").top()))
    translated = translate(data, report)
    if translated is None:
        report.check()
        raise AssertionError("a family is refused with a diagnostic")
    reader = FieldReader({**translated.fields, "name": _clean_name(name)}, report, "RT060", translated.keys)
    config = read_model(reader)
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
    return resources.files("ratrain.ratrain_ir.config") / "presets"


def _no_such_model(name: str) -> NoReturn:
    """Refuse a name that is no preset, no file and no known name of the Hub (RT002, RT004); suggest a near one."""
    presets = preset_names()
    last = name.rstrip("/").rpartition("/")[2]
    way_out = nearest(name, hub_names(), cutoff=_LIKE) if "/" in name else None
    way_out = way_out or nearest(last.lower(), presets)
    known = f"presets are {', '.join(presets)}; their names on the Hub and a path to {_WHAT} work too"
    help_text = f"{way_out} {known}" if way_out else known
    if _looks_like_a_path(name):
        of_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and not name.endswith(".json")
        more = ", and the name is none on the Hub that is known here" if of_hub else ""
        fail("RT002", f"there is no file {shown(name)}{more}", help=existing_like(name) or help_text)
    fail("RT004", f"no model is called {shown(name)}", help=help_text)


def _looks_like_a_path(name: str) -> bool:
    return "/" in name or os.sep in name or name.endswith(".json")


def _clean_name(name: str) -> str:
    """Return a name that the IR's text can hold: letters, digits, dots, dashes and underscores."""
    cleaned = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:100]
    return cleaned or "model"


def parse_config_text(text: str, *, name: str, file: str) -> ModelConfig:
    """Return the model of a JSON text; errors show the places of its keys. Raises as `parse_config` does."""
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
    """Refuse keys that appear twice, at the top (where both places are known) or inside a value."""
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

"""Interpolation as OmegaConf does it: `${name}` in a value stands for another setting of the same file.

    max_len: 2048
    tokenizer: {max_seq_len: "${max_len}"}          # the number 2048, not a text
    output_dir: /runs/${run.tag}                    # a part of a text
    loss: ${teacher.loss}                           # a whole table
    block: {width: 8, depth: "${.width}"}           # a name from the table that holds it

A whole value takes the type of what it names; a part of a text becomes text. A name may stand for a table, and is then
copied with all its settings. Resolvers (`${oc.env:HOME}`) are left as they are: their values are not in the file.
Numbers without a dot (`5e-6`), which YAML 1.1 reads as texts, are numbers to OmegaConf.
Read in omry/omegaconf: omegaconf/_utils.py, get_yaml_loader; omegaconf/grammar_parser.py.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ratrain.ratrain_ir.support.diagnostics import Diagnostics
from ratrain.ratrainc.bridge.settings import Setting

if TYPE_CHECKING:
    from ratrain.ratrain_ir.support.text import Place

_NAME = re.compile(r"\$\{\s*([^${}:\s]+)\s*\}")
_EXPONENT = re.compile(r"[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+")
"""Numbers that OmegaConf's loader adds to YAML 1.1's."""
_MOST_SETTINGS = 100_000
"""Most settings after tables were copied: copies of copies grow without bound in a few lines."""


def interpolated(settings: dict[str, Setting]) -> tuple[dict[str, Setting], set[str]]:
    """Replace `${name}` in all settings by what it names; return them, and the names that others take values from.

    Raises `DiagnosticError` RT063 for a name that the file does not have, and for names that name one another.
    """
    resolver = _Resolver(_without_tables(settings))
    found = {name: Setting(resolver.value(name), setting.place) for name, setting in resolver.settings.items()}
    resolver.report.check()
    return found, resolver.used


def _without_tables(settings: dict[str, Setting]) -> dict[str, Setting]:
    """Copy tables that `${name}` stands for, until none is left."""
    found = dict(settings)
    for _ in range(len(settings) + 1):
        copies = {name: table for name in found if (table := _table(name, found[name].value, found)) is not None}
        if not copies or len(found) > _MOST_SETTINGS:
            return found
        for name, table in copies.items():
            place = found.pop(name).place
            for key in [key for key in found if key.startswith(f"{table}.")]:
                found.setdefault(f"{name}.{key.removeprefix(f'{table}.')}", Setting(found[key].value, place))
    return found


def _table(name: str, value: Any, settings: dict[str, Setting]) -> str | None:
    """Return the table that a value as a whole names; None if it names none, or one that holds it."""
    match = _NAME.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return None
    table = _absolute(match[1], name)
    inside = f"{name}.".startswith(f"{table}.")
    return table if not inside and any(key.startswith(f"{table}.") for key in settings) else None


def _absolute(name: str, at: str) -> str:
    """Return a name from the top of the file; dots in front count tables upwards from the setting `at`."""
    dots = len(name) - len(name.lstrip("."))
    if not dots:
        return name
    parents = at.split(".")[:-dots]
    return ".".join([*parents, name[dots:]])


class _Resolver:
    """The settings of one file, and those that are being looked up."""

    def __init__(self, settings: dict[str, Setting]) -> None:
        self.settings = settings
        self.report = Diagnostics()
        self.known: dict[str, Any] = {}
        self.open: list[str] = []
        self.used: set[str] = set()

    def value(self, name: str) -> Any:
        """Return the value of a setting; None after an error."""
        if name not in self.known:
            self.open.append(name)
            self.known[name] = self.replaced(self.settings[name].value, name, self.settings[name].place)
            self.open.pop()
        return self.known[name]

    def replaced(self, value: Any, at: str, place: Place) -> Any:
        """Return a value with all names in it replaced, in lists and tables too."""
        if isinstance(value, list):
            return [self.replaced(each, at, place) for each in value]
        if isinstance(value, dict):
            return {key: self.replaced(each, at, place) for key, each in value.items()}
        if not isinstance(value, str):
            return value
        if (whole := _NAME.fullmatch(value)) is not None:
            return self.named(whole[1], at, place)
        if _EXPONENT.fullmatch(value):
            return float(value)
        return _NAME.sub(lambda match: str(self.named(match[1], at, place)), value)

    def named(self, name: str, at: str, place: Place) -> Any:
        """Return the value that a name stands for; None after an error."""
        full = _absolute(name, at)
        if full in self.open:
            text = f"${{{name}}} stands for itself: {' -> '.join([*self.open, full])}"
            self.report.error("RT063", text, place.location, source=place.source, help="write its value")
            return None
        if full not in self.settings:
            text = f"${{{name}}} names no setting of the file"
            self.report.error("RT063", text, place.location, source=place.source, help="write its value")
            return None
        self.used.add(full)
        return self.value(full)

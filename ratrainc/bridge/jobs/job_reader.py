"""Reader of one settings file as a `Job`: takes settings, notes each field's origin, and leaves nothing unsaid.

A format's reader takes every setting that decides bytes (`put`, `choose`), states the framework's defaults with their
source (`assume`), and lists the names that change no byte in a table (`inert`). At the end (`finish`) a setting that
nothing took is `ignored` if that table has it, and `not_understood` otherwise, so that the answer says "at least".

    reader = JobReader("axolotl", settings, top)
    size = reader.choose("micro_batch_size", "micro_batch_size", int, 1, "axolotl: training.py, micro_batch_size")
    reader.put("seq_len", reader.take("sequence_len", int), "sequence_len")
    job = reader.finish(inert=INERT)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from attrs import define, field, fields_dict, frozen

from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.support.diagnostics import Diagnostics
from ratrain.ratrain_ir.support.text import Place, shown
from ratrain.ratrainc.bridge.jobs.job import ADAPTER, NOT_KNOWN, Job, Note, Origin, Training
from ratrain.ratrainc.bridge.settings import EXPECTED, MOST, Setting, as_flag, as_integer, as_number

T = TypeVar("T")
_CONVERT: Mapping[type, Callable[[Any], Any]] = {
    int: as_integer,
    float: as_number,
    bool: as_flag,
    str: lambda value: value if isinstance(value, str) else None,
    list: lambda value: value if isinstance(value, list) else None,
}


@frozen
class SettingsFormat:
    """A kind of settings file that `fit` reads."""

    name: str
    """the framework's name, as `--format` and `Job.framework` have it"""
    title: str
    """the framework's name in sentences"""
    recognises: Callable[[Path, str], bool]
    """tells whether a file, given its path and text, is of this kind; never raises"""
    read: Callable[[Path, str, Asked], Job]
    """reads a file and the files it names; raises `DiagnosticError` with all errors"""
    phrase: Callable[[Job, str, Any], str | None]
    """says in the file's own words that a field of the job takes another value (`gradient_checkpointing: true`);
    None if the framework cannot express it"""
    reads_script: bool = False
    """true if a launch script, whose variables the environment may set, says the settings"""


@frozen
class Asked:
    """Options of the command, for what a file leaves open."""

    devices: int | None = None
    device_bytes: int | None = None
    model: ModelConfig | None = None
    """model configuration given by --model, which goes before the file's name of one"""
    seq_len: int | None = None
    micro_batch_size: int | None = None
    beside: tuple[Path, ...] = ()
    """further files of the same run: an accelerate file, a ds_config.json"""
    given: Mapping[str, str] = field(factory=dict)
    """values for variables of a script"""


@define
class JobReader:
    """The settings of one run, and the fields that were made of them so far. Errors collect in `report`."""

    framework: str
    settings: dict[str, Setting]
    top: Place
    values: dict[str, Any] = field(factory=dict)
    """fields of the job"""
    training: dict[str, Any] = field(factory=dict)
    """fields of the job's `training`"""
    origins: dict[str, Origin] = field(factory=dict)
    taken: set[str] = field(factory=set)
    notes: list[Note] = field(factory=list)
    """settings that may change memory and are not understood"""
    idle: list[Note] = field(factory=list)
    """settings that change no byte"""
    report: Diagnostics = field(factory=Diagnostics)
    mark: str = ""
    """what stands before the name of a setting in the file: `--` in a launch script"""

    def has(self, name: str) -> bool:
        """Tell whether the file has a setting with a value; `key:` without one and `null` count as left out."""
        return name in self.settings and self.settings[name].value is not None

    def take(self, name: str, kind: type[T]) -> T | None:
        """Take a setting as a whole or finite number, truth value, text or list, also written as a text.

        Return None without it. Report a value of another kind or a number out of range, and return None.
        """
        self.taken.add(name)
        if not self.has(name):
            return None
        said = self.settings[name].value
        value: T | None = _CONVERT[kind](said)
        if value is None:
            self.wrong(name, f"{name} is {shown(said)}: {EXPECTED[kind]} is expected")
        elif kind is int and not -1 <= int(value) <= MOST:  # type: ignore[call-overload]
            self.wrong(name, f"{name} is {shown(said)}, which is out of range")
            return None
        return value

    def glance(self, name: str, kind: type[T]) -> T | None:
        """Return a setting as `take` does; it counts as not taken: it changes no byte, and `finish` says why."""
        value = self.take(name, kind)
        self.taken.discard(name)
        return value

    def size(self, name: str) -> int | None:
        """Take a whole number of at least 1; report another value, and return None."""
        value = self.take(name, int)
        if value is not None and value < 1:
            self.wrong(name, f"{self.mark}{name} is {value}: at least 1 is expected")
            return None
        return value

    def put(self, name: str, value: Any, key: str) -> None:
        """Set a field of the job, or of its training, from the setting `key`; nothing happens if the value is None."""
        if value is None:
            return
        self._set(name, value)
        self.origins[name] = Origin(key, self.where(key))

    def assume(self, name: str, value: Any, key: str, source: str) -> None:
        """Set a field to the framework's default: `source` is its repository, file and symbol."""
        self._set(name, value)
        self.origins[name] = Origin(key, source, default=True)

    def put_or_assume(self, name: str, value: Any, key: str, source: str, *, says: bool) -> None:
        """Set a field as `put` does if the setting `key` says its value, else as `assume` does."""
        if says:
            self.put(name, value, key)
        else:
            self.assume(name, value, key, source)

    def trace(self, part: str, key: str, source: str = "", of: str = ADAPTER) -> None:
        """Note the setting, or table, that a part of the job's adapter comes from, for messages; or one of `THAWED`.

        Without the setting it is a default: `source` is its place in the framework, and without one nothing is noted.
        """
        said = next((name for name in self.settings if name == key or name.startswith(f"{key}.")), None)
        if said is not None and (said != key or self.has(key)):
            self.origins[f"{of}{part}"] = Origin(key, self.where(said))
        elif source:
            self.origins[f"{of}{part}"] = Origin(key, source, default=True)

    def choose(self, name: str, key: str, kind: type[T], default: T, source: str) -> T:
        """Set a field from a setting, or to the framework's default without it; return the value."""
        value = self.take(key, kind)
        if value is None:
            self.assume(name, default, key, source)
            return default
        self.put(name, value, key)
        return value

    def choose_size(self, name: str, key: str, default: int, source: str) -> int:
        """Set a field as `choose` does; report a number below 1, and set the field to 1."""
        value: int = self.choose(name, key, int, default, source)
        if value < 1:
            self.wrong(key, f"{self.mark}{key} is {value}: at least 1 is expected")
            self.values[name] = value = 1
        return value

    def ignore(self, key: str, why: str, *, less: bool = False) -> None:
        """Note a setting that changes no byte; nothing happens if the file does not have it.

        `less`: it may lower memory, which is not counted.
        """
        self.taken.add(key)
        if key in self.settings:
            self.idle.append(Note(key, self.settings[key].value, self.where(key), why, less))

    def unknown(self, key: str, why: str) -> None:
        """Note a setting that may change memory, and that no field carries: the answer becomes a lower bound."""
        self.taken.add(key)
        if key in self.settings:
            self.notes.append(Note(key, self.settings[key].value, self.where(key), why))

    def doubt(self, key: str, value: Any, why: str) -> None:
        """Note that memory is not known for a reason that the file does not have as a setting: a default, a model."""
        self.notes.append(Note(key, value, self.where(key), why))

    def wrong(self, key: str, message: str, *, code: str = "RT063", way_out: str | None = None) -> None:
        """Report an error at a setting; at the top of the file if it does not have the setting."""
        place = self.settings[key].place if key in self.settings else self.top
        self.report.error(code, message, place.location, help=way_out, source=place.source)

    def where(self, key: str) -> str:
        """Return the place of a setting as `file:line`; the file alone if it does not have the setting."""
        place = self.settings[key].place if key in self.settings else self.top
        location = place.location
        return "" if location is None else f"{location.file}:{location.line}" if key in self.settings else location.file

    def finish(self, inert: Mapping[str, str], **fields: Any) -> Job:
        """Make the job; `inert` maps names that change no byte (a regular expression, matched whole) to the reason.

        Raises `DiagnosticError` with all errors that were reported.
        """
        patterns = [(re.compile(pattern), why) for pattern, why in inert.items()]
        for key in self.settings.keys() - self.taken:
            why = next((why for pattern, why in patterns if pattern.fullmatch(key)), None)
            if why is not None:
                self.ignore(key, why)
            elif self.has(key):
                self.unknown(key, f"{NOT_KNOWN} as a setting of {self.framework}")
        self.report.check()
        order = {name: place for place, name in enumerate(self.settings)}
        values = {"framework": self.framework, **self.values, **fields}
        for name in ("model_name", "model", "seq_len", "micro_batch_size", "gradient_accumulation"):
            values.setdefault(name, None)
        return Job(
            **values,
            training=Training(**self.training),
            origins=self.origins,
            not_understood=tuple(sorted(self.notes, key=lambda each: order.get(each.key, -1))),
            ignored=tuple(sorted(self.idle, key=lambda each: order.get(each.key, -1))),
        )

    def _set(self, name: str, value: Any) -> None:
        """Set a field by its name; a name that neither a job nor its training has is a mistake of ours."""
        where = self.values if name in _JOB else self.training
        if name not in _JOB and name not in _TRAINING:
            raise AssertionError(name)
        where[name] = value


_JOB = fields_dict(Job).keys()
_TRAINING = fields_dict(Training).keys()

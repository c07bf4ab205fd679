"""Declarations of a plan's fields: one `Key` each, from which reading, the file's sections and printing follow.

A field is declared once, in its class: `micro_batches: int = field(metadata=key("batch", "...", integer(1, 1 << 20)))`.
`table_of` collects the declarations of a class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Generic, Protocol, TypeVar

from attrs import NOTHING, Attribute, Factory, fields, frozen

from ratrain.ratrain_ir.config.fields import FieldReader, Report, Value
from ratrain.ratrain_ir.config.made_for import SECTION
from ratrain.ratrain_ir.schedules.named import SCHEDULES
from ratrain.ratrain_ir.support.diagnostics import nearest
from ratrain.ratrain_ir.support.plugins import WAY_OUT
from ratrain.ratrain_ir.support.text import shown
from ratrain.ratrain_ir.support.toml_text import toml_value

T = TypeVar("T")

_KEY, _PART = "key", "part"

ZIGZAG = "zigzag"
CONTIGUOUS = "contiguous"
CONTEXT_LAYOUTS = (ZIGZAG, CONTIGUOUS)

OF_KEYS = "keys"
OF_HEADS = "heads"
CONTEXT_EXCHANGES = (OF_KEYS, OF_HEADS)


def runs_of_context(cp: int, layout: str) -> int:
    """Return the equal runs that context ranks cut a sequence, or a slice of it, into."""
    return cp * (2 if cp > 1 and layout == ZIGZAG else 1)


class Reading(Protocol):
    """Reader of one field, which reports a wrong value.

    `default` is the value of an absent field; None: it is required.
    """

    def __call__(self, reader: FieldReader, name: str, default: Any, /) -> Any:
        """Return the value, or a stand-in for a wrong one."""


def integer(low: int, high: int) -> Reading:
    """Return a reading of a whole number in [low, high], both included."""
    return lambda reader, name, default: reader.integer(name, low, high, default=default)


def integer_or_none(low: int, high: int) -> Reading:
    """Return a reading of a whole number in [low, high], or None if absent."""
    return lambda reader, name, _default: reader.integer_or_none(name, low, high)


def integers(expected: str) -> Reading:
    """Return a reading of a required list of whole numbers; `expected` describes it in words."""
    return lambda reader, name, _default: reader.integers(name, expected)


def number(accept: Callable[[float], bool], expected: str) -> Reading:
    """Return a reading of a finite number that `accept` approves; `expected` describes it in words."""
    return lambda reader, name, default: reader.number(name, accept, expected, default=default)


def number_or_none(accept: Callable[[float], bool], expected: str) -> Reading:
    """Return a reading of a `number`, or of None if that is given, or is the default of an absent field."""

    def read(reader: FieldReader, name: str, default: Any) -> float | None:
        if reader.values.get(name, default) is None:
            return None
        return reader.number(name, accept, expected, default=default)

    return read


def numbers(count: int, accept: Callable[[float], bool], expected: str) -> Reading:
    """Return a reading of a list of `count` finite numbers that `accept` approves."""
    return lambda reader, name, default: reader.numbers(name, count, accept, expected, default=default)


def word(choices: Sequence[str], others: Mapping[str, str] | None = None) -> Reading:
    """Return a reading of one of `choices`. Other names of them (`others`) are refused with the right one as a hint."""
    return lambda reader, name, default: reader.word(name, choices, others or {}, default=default)


def word_or_none(choices: Sequence[str]) -> Reading:
    """Return a reading of one of `choices`, or None if absent."""

    def read(reader: FieldReader, name: str, default: Any) -> str | None:
        return None if reader.values.get(name, default) is None else reader.word(name, choices)

    return read


def parsed(parse: Callable[[str], T | None], expected: str) -> Reading:
    """Return a reading of a text that `parse` gives a value for, or of None if absent; `expected` describes it."""

    def read(reader: FieldReader, name: str, default: Any) -> T | None:
        if reader.values.get(name, default) is None:
            return None
        return parse(reader.text(name, lambda text: parse(text) is not None, expected))

    return read


def flag(reader: FieldReader, name: str, default: Any) -> bool:
    """Read true or false (this function is itself a `Reading`)."""
    return reader.flag(name, default=default)


def _as_it_is(value: Any) -> Value:
    kept: Value = value
    return kept


def _never(_holder: Any) -> bool:
    return False


@frozen
class Key:
    """Form of a plan's field in a plan's file and in the header of the IR text."""

    section: str
    """section of the file"""
    changes: str
    """effect of the field, as shown in `docs/keys.md`"""
    read: Reading
    default: Callable[[Mapping[str, Any]], object] | None = None
    """value of an absent field, computed from the fields before it; None: the class's default"""
    text: Callable[[Any], Value] = _as_it_is
    """conversion of a value other than None for a text"""
    none_word: str | None = None
    """word for None in a file and in the IR text; without one, a file leaves the key out"""
    in_header_if_default: bool = True
    """whether a header has the key even at its default; if not, texts without the key keep their meaning and form"""
    not_in_file: Callable[[Any], bool] = _never
    """tells for which plans a file leaves the key out because it would change nothing"""


def key(section: str, changes: str, read: Reading, **more: Any) -> dict[str, Key]:
    """Return the metadata of a field: its `Key`."""
    return {_KEY: Key(section, changes, read, **more)}


def part(cls: type) -> dict[str, type]:
    """Return the metadata of a field that is an object whose own fields are keys of the plan too."""
    return {_PART: cls}


@frozen
class Table(Generic[T]):
    """Keys of a class and of its parts, in the order of the IR text's header."""

    cls: type[T]
    own: Mapping[str, Key]
    parts: Mapping[str, Table[Any]]
    keys: Mapping[str, Key]
    """keys of the class, then the keys of its parts"""
    sections: Mapping[str, tuple[str, ...]]
    """keys of each section, in the file's order"""
    labels: Mapping[str, str]
    """`section.key` of each key, in the file's order"""
    _defaults: Mapping[str, object]
    """defaults of the class's own keys; None if there is none"""

    def read(self, reader: FieldReader, settled: Mapping[str, object] | None = None) -> T:
        """Return the object that a reader's fields describe; use it only after the reader's report is checked.

        Fields in `settled` are taken from there and not read.
        """
        values: dict[str, Any] = dict(settled or {})
        for name, declared in self.own.items():
            if name not in values:
                default = declared.default(values) if declared.default else self._defaults[name]
                values[name] = declared.read(reader, name, default)
        return self.cls(**values, **{name: table.read(reader) for name, table in self.parts.items()})

    def header(self, of: T) -> dict[str, Value]:
        """Return an object's fields as the header of the IR text holds them."""
        values: dict[str, Value] = {}
        for name, declared in self.own.items():
            value = getattr(of, name)
            if declared.in_header_if_default or value != self._defaults[name]:
                values[name] = None if value is None else declared.text(value)
        for name, table in self.parts.items():
            values |= table.header(getattr(of, name))
        return values

    def with_words(self, header: Mapping[str, Value]) -> dict[str, Value]:
        """Return a header's fields with None replaced by the key's word for it, if there is one."""
        return {name: self.keys[name].none_word if value is None else value for name, value in header.items()}

    def without_words(self, values: Mapping[str, object]) -> dict[str, object]:
        """Return fields with words for None replaced by None: the inverse of `with_words`.

        None itself is accepted too.
        """
        return {name: self._meant(name, value) for name, value in values.items()}

    def _meant(self, name: str, value: object) -> object:
        word = self.keys[name].none_word if name in self.keys else None
        return None if word is not None and value == word else value

    def words(self, of: T) -> dict[str, str]:
        """Return each key with its value as TOML text, in the file's order, except keys the file leaves out."""
        values = self.file_values(of)
        return {name: toml_value(values[name]) for name in self.labels if values.get(name) is not None}

    def file_values(self, of: T) -> dict[str, Value]:
        """Return each key with its value in a file; None, or no entry, if the file leaves it out."""
        values: dict[str, Value] = {}
        for name, declared in self.own.items():
            value = getattr(of, name)
            if not declared.not_in_file(of):
                values[name] = declared.none_word if value is None else declared.text(value)
        for name, table in self.parts.items():
            values |= table.file_values(getattr(of, name))
        return values

    def flat(self, data: Mapping[str, Any], report: Report) -> dict[str, object]:
        """Return the known keys of all sections of a file in one mapping; report everything else as RT063."""
        values: dict[str, object] = {}
        elsewhere: dict[str, object] = {}
        for section, content in data.items():
            if section not in self.sections:
                self._report_section(section, content, report)
                elsewhere |= {section: content} if section in self.keys else {}
            elif not isinstance(content, Mapping):
                text = f"'{section}' is {shown(content)}: a section is expected"
                report.error("RT063", section, text, help=f"[{section}]")
            else:
                for name, value in content.items():
                    if name not in self.sections[section]:
                        self._report_key(section, name, report)
                        elsewhere |= {name: value} if name in self.keys else {}
                    else:
                        values[name] = self._meant(name, value)
        # A key in the wrong place is reported for that, and must not be said to be missing too.
        return {name: self._meant(name, value) for name, value in elsewhere.items()} | values

    def _report_section(self, section: str, content: object, report: Report) -> None:
        home = self.keys[section].section if section in self.keys else None
        near = f"'{section}' belongs in [{home}]" if home else nearest(section, (*self.sections, SECTION))
        kind = "section" if isinstance(content, Mapping) else "key"
        known = ", ".join(f"[{name}]" for name in (*self.sections, SECTION))
        text = f"the {kind} {shown(section)} is not known at the top of a plan"
        report.error("RT063", section, text, help=near or f"the sections are {known}")

    def _report_key(self, section: str, name: str, report: Report) -> None:
        home = self.keys[name].section if name in self.keys else None
        known = self.sections[section]
        help_text = f"'{name}' belongs in [{home}]" if home else nearest(name, known) or nearest(name, self.labels)
        text = f"the key {shown(name)} is not known in [{section}]"
        report.error("RT063", f"{section}.{name}", text, help=help_text or f"known are {', '.join(known)}")


def table_of(cls: type[T]) -> Table[T]:
    """Return the declarations of a class's fields.

    Raises TypeError, with the field's name, for a declaration that is incomplete or contradicts itself.
    """
    kind: Any = cls  # to the type checker, not every class is hashable
    table: Table[T] = _table(kind)
    return table


@cache
def _table(cls: Any) -> Table[Any]:
    attributes = {attribute.name: attribute for attribute in fields(cls)}
    parts = {name: table_of(item.metadata[_PART]) for name, item in attributes.items() if _PART in item.metadata}
    own = {name: _declared(cls, item) for name, item in attributes.items() if name not in parts}
    keys = dict(own)
    for name, table in parts.items():
        if twice := keys.keys() & table.keys.keys():
            raise TypeError(f"the fields {sorted(twice)} of {cls.__name__}.{name} are those of {cls.__name__} too")
        keys |= table.keys
    sections: dict[str, tuple[str, ...]] = {}
    for name, declared in keys.items():
        sections[declared.section] = (*sections.get(declared.section, ()), name)
    labels = {name: f"{section}.{name}" for section, names in sections.items() for name in names}
    return Table(cls, own, parts, keys, sections, labels, {name: _default(attributes[name]) for name in own})


def _declared(cls: type, attribute: Attribute[Any]) -> Key:
    """Return the key of a field. Raises TypeError if its declaration is incomplete."""
    where = f"the field '{attribute.name}' of {cls.__name__}"
    declared = attribute.metadata.get(_KEY)
    if not isinstance(declared, Key):
        raise TypeError(f"{where} declares neither a key of the plan nor a part of it")
    for what in ("section", "changes"):
        if not getattr(declared, what):
            raise TypeError(f"{where} declares no {what}")
    if isinstance(attribute.default, Factory):  # type: ignore[arg-type]
        raise TypeError(f"{where} has no plain value as its default")
    if attribute.default is not NOTHING:
        _check_default(where, attribute, declared)
    return declared


def _check_default(where: str, attribute: Attribute[Any], declared: Key) -> None:
    """Raise TypeError if the default of a field is not read back from an absent field and from its own text."""
    name, default = attribute.name, attribute.default
    texts: list[dict[str, object]] = [{name: None if default is None else declared.text(default)}]
    if declared.default is None:
        texts.append({})
    for values in texts:
        report = Report()
        if declared.read(FieldReader(values, report, "RT064"), name, default) != default or report.diagnostics.errors:
            raise TypeError(f"{where} declares the default {default!r}, which its reader refuses")


def _default(attribute: Attribute[Any]) -> object:
    return None if attribute.default is NOTHING else attribute.default


def read_schedule(reader: FieldReader, name: str, default: Any) -> str | None:
    """Read the name of the schedule, None if absent.

    Schedules that this version does not build are refused as unknown.
    """
    said = reader.values.get(name, default)
    if said is None:
        return None
    if isinstance(said, str) and said in SCHEDULES:
        return said
    if isinstance(said, str):
        reader.contradiction(
            "RT064",
            name,
            f"this version does not build the schedule {shown(said)}",
            help=f"use {' or '.join(map(shown, SCHEDULES))}; {WAY_OUT}",
        )
        return said
    return reader.word(name, tuple(SCHEDULES))


def read_slices(reader: FieldReader, name: str, default: Any) -> tuple[int, ...]:
    """Read the lengths of the slices; an absent field or an empty list means no slices."""
    if reader.values.get(name, default) in ([], ()):
        return ()
    return reader.integers(name, 'a number of slices, "even-work" and their number, or a list of lengths in tokens,')

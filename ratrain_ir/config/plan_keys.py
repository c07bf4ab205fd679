"""What a field of a plan declares of itself, and what follows from that: reading, the file's sections, printing.

A field is declared once, in its class: `micro_batches: int = field(metadata=key("batch", "...", integer(1, 1 << 20)))`. `table_of` has all
that a class of such fields declares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Generic, Protocol, TypeVar

from attrs import NOTHING, Attribute, Factory, fields, frozen

from ratrain.ratrain_ir.config.fields import FieldReader, Report, Value
from ratrain.ratrain_ir.support.diagnostics import nearest
from ratrain.ratrain_ir.support.text import shown
from ratrain.ratrain_ir.support.toml_text import toml_value

T = TypeVar("T")

_KEY, _PART = "key", "part"


class Reading(Protocol):
    """Reads a field of a name, and reports it where it is wrong; `default` is its value where it is absent, None where it may not be."""

    def __call__(self, reader: FieldReader, name: str, default: Any, /) -> Any:
        """The value, or a stand-in for one that is wrong."""


def integer(low: int, high: int) -> Reading:
    """A whole number of [low, high]."""
    return lambda reader, name, default: reader.integer(name, low, high, default=default)


def integer_or_none(low: int, high: int) -> Reading:
    """A whole number of [low, high], or None where it is absent."""
    return lambda reader, name, _default: reader.integer_or_none(name, low, high)


def integers(expected: str) -> Reading:
    """A list of whole numbers; `expected` says in words of what. It is required."""
    return lambda reader, name, _default: reader.integers(name, expected)


def number(accept: Callable[[float], bool], expected: str) -> Reading:
    """A finite number that `accept` holds for; `expected` says in words what that is."""
    return lambda reader, name, default: reader.number(name, accept, expected, default=default)


def number_or_none(accept: Callable[[float], bool], expected: str) -> Reading:
    """A `number`, or None where it is given, or absent and the default."""

    def read(reader: FieldReader, name: str, default: Any) -> float | None:
        if reader.values.get(name, default) is None:
            return None
        return reader.number(name, accept, expected, default=default)

    return read


def numbers(count: int, accept: Callable[[float], bool], expected: str) -> Reading:
    """A list of `count` finite numbers that `accept` holds for."""
    return lambda reader, name, default: reader.numbers(name, count, accept, expected, default=default)


def word(choices: Sequence[str], others: Mapping[str, str] | None = None) -> Reading:
    """One of a few names; `others` are what people call some of them, which are refused with the name that is meant."""
    return lambda reader, name, default: reader.word(name, choices, others or {}, default=default)


def word_or_none(choices: Sequence[str]) -> Reading:
    """One of a few names, or None where it is absent."""

    def read(reader: FieldReader, name: str, default: Any) -> str | None:
        return None if reader.values.get(name, default) is None else reader.word(name, choices)

    return read


def flag(reader: FieldReader, name: str, default: Any) -> bool:
    """True or false."""
    return reader.flag(name, default=default)


def _as_it_is(value: Any) -> Value:
    kept: Value = value
    return kept


def _never(_holder: Any) -> bool:
    return False


@frozen
class Key:
    """How a field of a plan stands in a plan's file and in the header of the IR text."""

    section: str
    """of the file"""
    changes: str
    """what the field is for, as `docs/keys.md` says it"""
    read: Reading
    default: Callable[[Mapping[str, Any]], object] | None = None
    """what a text that leaves it out means, from the fields before it; None: the default of the class"""
    text: Callable[[Any], Value] = _as_it_is
    """the value as a text has it, unless it is None"""
    none_word: str | None = None
    """the word for None of a file and of the IR text; without one, a file leaves the key out"""
    in_header_if_default: bool = True
    """whether a header says it where it is what the class has by default; else texts from before there was the key stay as they are"""
    not_in_file: Callable[[Any], bool] = _never
    """for which objects a file leaves the key out, as it would change nothing there"""


def key(section: str, changes: str, read: Reading, **more: Any) -> dict[str, Key]:
    """The metadata of a field: its `Key`."""
    return {_KEY: Key(section, changes, read, **more)}


def part(cls: type) -> dict[str, type]:
    """The metadata of a field whose own fields stand among those of the plan."""
    return {_PART: cls}


@frozen
class Table(Generic[T]):
    """The keys of a class, and of the classes that are parts of it, in the order of the IR text's header."""

    cls: type[T]
    own: Mapping[str, Key]
    parts: Mapping[str, Table[Any]]
    keys: Mapping[str, Key]
    """its own, and after them those of its parts"""
    sections: Mapping[str, tuple[str, ...]]
    """sections of the file, each with its keys, in the file's order"""
    labels: Mapping[str, str]
    """`section.key` of each key, in the file's order"""
    _defaults: Mapping[str, object]
    """of its own keys, as the class has them; None where there is none"""

    def read(self, reader: FieldReader, settled: Mapping[str, object] | None = None) -> T:
        """What a reader's fields describe, to be used after its report is checked; fields that are `settled` are not read."""
        values: dict[str, Any] = dict(settled or {})
        for name, declared in self.own.items():
            if name not in values:
                default = declared.default(values) if declared.default else self._defaults[name]
                values[name] = declared.read(reader, name, default)
        return self.cls(**values, **{name: table.read(reader) for name, table in self.parts.items()})

    def header(self, of: T) -> dict[str, Value]:
        """The fields of an object as the header of the IR text holds them."""
        values: dict[str, Value] = {}
        for name, declared in self.own.items():
            value = getattr(of, name)
            if declared.in_header_if_default or value != self._defaults[name]:
                values[name] = None if value is None else declared.text(value)
        for name, table in self.parts.items():
            values |= table.header(getattr(of, name))
        return values

    def with_words(self, header: Mapping[str, Value]) -> dict[str, Value]:
        """The fields of a header as the IR text has them: a key that is None by its word, where it has one."""
        return {name: self.keys[name].none_word if value is None else value for name, value in header.items()}

    def without_words(self, values: Mapping[str, object]) -> dict[str, object]:
        """The inverse of `with_words`; texts from before it, which say none, are read too."""
        return {name: self._meant(name, value) for name, value in values.items()}

    def _meant(self, name: str, value: object) -> object:
        word = self.keys[name].none_word if name in self.keys else None
        return None if word is not None and value == word else value

    def words(self, of: T) -> dict[str, str]:
        """Each key with its value as a file has it, in the file's order; keys that the file leaves out are not there."""
        values = self.file_values(of)
        return {name: toml_value(values[name]) for name in self.labels if values.get(name) is not None}

    def file_values(self, of: T) -> dict[str, Value]:
        """Each key with its value as a file has it; None, or no entry, where the file leaves it out."""
        values: dict[str, Value] = {}
        for name, declared in self.own.items():
            value = getattr(of, name)
            if not declared.not_in_file(of):
                values[name] = declared.none_word if value is None else declared.text(value)
        for name, table in self.parts.items():
            values |= table.file_values(getattr(of, name))
        return values

    def flat(self, data: Mapping[str, Any], report: Report) -> dict[str, object]:
        """The known keys of all sections of a file in one mapping; everything else is reported, as RT063."""
        values: dict[str, object] = {}
        for section, content in data.items():
            if section not in self.sections:
                self._report_section(section, content, report)
            elif not isinstance(content, Mapping):
                text = f"'{section}' is {shown(content)}: a section is expected"
                report.error("RT063", section, text, help=f"[{section}]")
            else:
                for name, value in content.items():
                    if name not in self.sections[section]:
                        self._report_key(section, name, report)
                    else:
                        values[name] = self._meant(name, value)
        return values

    def _report_section(self, section: str, content: object, report: Report) -> None:
        home = self.keys[section].section if section in self.keys else None
        near = f"'{section}' belongs in [{home}]" if home else nearest(section, self.sections)
        kind = "section" if isinstance(content, Mapping) else "key"
        known = ", ".join(f"[{name}]" for name in self.sections)
        text = f"the {kind} {shown(section)} is not known at the top of a plan"
        report.error("RT063", section, text, help=near or f"the sections are {known}")

    def _report_key(self, section: str, name: str, report: Report) -> None:
        home = self.keys[name].section if name in self.keys else None
        known = self.sections[section]
        help_text = f"'{name}' belongs in [{home}]" if home else nearest(name, known) or nearest(name, self.labels)
        text = f"the key {shown(name)} is not known in [{section}]"
        report.error("RT063", f"{section}.{name}", text, help=help_text or f"known are {', '.join(known)}")


def table_of(cls: type[T]) -> Table[T]:
    """What the fields of a class declare.

    Raises TypeError for a field that declares too little to be read and printed, by its name.
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
    """The key of a field, if its declaration is whole."""
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
    """Raise TypeError where the default of a field is not what is read where it is absent, or printed and read back."""
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

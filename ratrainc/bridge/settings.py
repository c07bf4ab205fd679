"""Settings of another framework, read by a table of rules: each is carried over into a plan's keys, or named with the reason why not."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from attrs import define, field, frozen

from ratrain.ratrain_ir.support.diagnostics import Diagnostics, nearest
from ratrain.ratrain_ir.support.text import Place, shown

T = TypeVar("T")
EXPECTED: dict[type, str] = {
    int: "a whole number",
    float: "a finite number",
    bool: "true or false",
    str: "a word",
    list: "a list",
}
MOST = 1 << 40
"""The largest whole number that is read: far above any run, and small enough to be multiplied."""


@frozen
class Setting:
    """A setting as a file has it: under the name that rules know it by."""

    value: Any
    place: Place


@frozen
class Rule:
    """What becomes of a setting."""

    keys: str
    """of a plan, in words; empty where it is not carried over"""
    says: str
    """how it is carried over, or why not"""
    default: Any = None
    """what the framework takes where a file leaves it out, and the plan therefore says"""
    source: str = ""
    """where the default stands: a file of the framework, and the symbol in it"""
    refused: bool = False
    """nothing of a file with it is carried over: what it decides cannot be said, or is in another file"""


@frozen
class Default:
    """A value that the framework takes where a file leaves a setting out."""

    value: Any
    source: str
    """as in `Rule`; empty where none is known"""


@frozen
class Left:
    """A setting that the plan does not say."""

    key: str
    value: Any
    why: str


@frozen
class Framework:
    """A framework whose settings can be read."""

    title: str
    file: str
    """what is read, in words"""
    settings: Callable[..., dict[str, Setting]]
    """of a file's name and text, and of a script what the command line says of its variables"""
    rules: Mapping[str, Rule]
    read: Callable[[SettingsReader], None]
    tables: Mapping[str, str] = field(factory=dict)
    """tables of the file of which nothing is carried over, and why"""
    strict: tuple[str, ...] = ()
    """tables that decide what is trained: a name in them, or in one whose name is close, that no rule knows stops the import"""
    stops: Callable[[str], bool] = lambda _name: False
    """whether a setting of this name, which no rule knows, stops the import for another reason"""
    others: Callable[[str], str | None] = lambda _name: None
    """why a setting that has no rule is not carried over; None where it is not known"""
    script: bool = False
    """its file is a script, with variables"""

    def settings_of(self, file: str, text: str, asked: Asked) -> dict[str, Setting]:
        """The settings of a file by its name and text."""
        return self.settings(file, text, asked) if self.script else self.settings(file, text)


@frozen
class Asked:
    """What the command line says, as a file may not."""

    clusters: int | None = None
    pp: int | None = None
    seq_len: int | None = None
    micro_batch_size: int | None = None
    global_batch: int | None = None
    dtype: str | None = None
    lr: float | None = None
    weight_decay: float | None = None
    max_norm: float | None = None
    warmup_steps: int | None = None
    steps: int | None = None
    given: Mapping[str, str] = field(factory=dict)
    """variables of a script"""


@define
class SettingsReader:
    """Takes settings one by one, and puts keys of a plan; what nobody took is left, by name."""

    framework: Framework
    settings: dict[str, Setting]
    top: Place
    asked: Asked
    report: Diagnostics = field(factory=Diagnostics)
    values: dict[str, Any] = field(factory=dict)
    places: dict[str, Place] = field(factory=dict)
    left: list[Left] = field(factory=list)
    passes: list[str] = field(factory=list)
    taken: set[str] = field(factory=set)
    defaults: dict[str, Default] = field(factory=dict)
    """settings that the file leaves out, as the framework has them then"""
    called: dict[str, str] = field(factory=dict)
    """names that the file has for settings, where they are of an older version than those of the rules"""
    unsaid: set[str] = field(factory=set)
    """keys that the plan's file leaves out, because neither the file nor the framework says them"""
    unset: dict[str, str] = field(factory=dict)
    """variables that a script takes as not set, and what it has instead"""

    def has(self, name: str) -> bool:
        """Whether the file says it."""
        return name in self.settings

    def name(self, name: str) -> str:
        """Return the name that the file has for a setting."""
        return self.called.get(name, name)

    def integer(self, name: str) -> int | None:
        """A whole number from 0 to `MOST`, the framework's default, or None where it has none."""
        value = self._read(name, int, _integer)
        if value is not None and not -1 <= value <= MOST:
            self.wrong(name, f"{self.name(name)} is {shown(value)}, which is out of range")
            return None
        return value

    def size(self, name: str) -> int | None:
        """A whole number of at least 1."""
        value = self.integer(name)
        if value is not None and value < 1:
            self.wrong(name, f"{self.name(name)} is {value}: at least 1 is expected")
            return None
        return value

    def number(self, name: str) -> float | None:
        """A finite number."""
        return self._read(name, float, _number)

    def flag(self, name: str) -> bool:
        """Whether it is set."""
        return bool(self._read(name, bool, _flag))

    def word(self, name: str) -> str | None:
        """A word."""
        return self._read(name, str, lambda value: value if isinstance(value, str) else None)

    def items(self, name: str) -> list[Any] | None:
        """A list."""
        return self._read(name, list, lambda value: value if isinstance(value, list) else None)

    def _read(self, name: str, kind: type[T], convert: Callable[[Any], T | None]) -> T | None:
        rule = self.framework.rules[name]
        if name not in self.settings:
            return None if rule.default is None else self.default(name, rule.default, rule.source)
        self.taken.add(name)
        value = convert(self.settings[name].value)
        if value is None:
            text = f"{self.name(name)} is {shown(self.settings[name].value)}: {EXPECTED[kind]} is expected"
            self.wrong(name, text, code="RT063")
        return value

    def default(self, name: str, value: T, source: str) -> T:
        """Take what the framework takes where the file leaves a setting out; the plan's head names it with its source.

        The default of a `Rule` comes here by itself. Call it where the default depends on other settings.
        """
        self.defaults[name] = Default(value, source)
        return value

    def wrong(self, name: str, message: str, *, code: str = "RT064", way_out: str | None = None) -> None:
        """Report something about a setting."""
        place = self.settings[name].place if name in self.settings else self.top
        if any(each.message == message and each.location == place.location for each in self.report.items):
            return  # a setting that several keys follow from is read more than once
        self.report.error(code, message, place.location, help=way_out, source=place.source)

    def put(self, key: str, value: Any, *names: str) -> None:
        """Have the plan say something, which the settings of these names say."""
        self.values[key] = value
        self.places[key] = next((self.settings[name].place for name in names if name in self.settings), self.top)

    def carry(self, key: str, value: Any, name: str) -> None:
        """Have the plan say the value of one setting, where it has one."""
        if value is not None:
            self.put(key, value, name)

    def leave(self, name: str, why: str) -> None:
        """Say why a setting is not carried over; nothing where the file does not have it."""
        if name in self.settings and all(each.key != self.name(name) for each in self.left):
            self.left.append(Left(self.name(name), self.settings[name].value, why))
        self.taken.add(name)

    def differ(self, name: str, why: str) -> None:
        """Say how the plan does otherwise than a setting, or than the framework's default in its place."""
        if name in self.defaults and name not in self.settings and all(each.key != name for each in self.left):
            self.left.append(Left(name, self.defaults[name].value, f"{why} (the default of {self.framework.title})"))
        self.leave(name, why)

    def leave_rest(self) -> None:
        """Name what nobody took, and refuse what no rule knows where it may decide what is trained."""
        rules = self.framework.rules
        for name in self.settings:
            if name in self.taken:
                continue
            if name not in rules and (why := self.framework.others(name)) is not None:
                self.leave(name, why)
            elif name not in rules:
                hint = nearest(name, rules)
                if (table := self._table_above(name)) is not None:
                    self.leave(name, table)
                elif near(name.split(".")[0], self.framework.strict) or self.framework.stops(name):
                    text = f"{name} is not known here as a setting of {self.framework.title}"
                    self.wrong(name, text, code="RT063", way_out=hint or "correct its name, or take it out of the file")
                else:
                    self.leave(name, f"not known here as one of {self.framework.title}" + (f"; {hint}" if hint else ""))
            else:
                self.leave(name, rules[name].says if not rules[name].keys else "has no effect with the other settings")

    def _table_above(self, name: str) -> str | None:
        """Return why nothing is carried over of the table that a setting stands in, or None where it is read."""
        rules, tables = self.framework.rules, self.framework.tables
        while name:
            if name in tables:
                return tables[name]
            if name in rules and not rules[name].keys:
                return rules[name].says
            name = name.rpartition(".")[0]
        return None


def _integer(value: Any) -> int | None:
    if isinstance(value, str):
        try:
            return int(value) if len(value) < 20 and value.isascii() else None
        except ValueError:
            return None
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if abs(number) < float("inf") else None


def _flag(value: Any) -> bool | None:
    if isinstance(value, str) and value.lower() in ("true", "false"):  # as pydantic reads them
        return value.lower() == "true"
    return value if isinstance(value, bool) else None


def near(name: str, known: Iterable[str]) -> bool:
    """Tell whether a name is one of the known ones, or a misspelt one: closer than what `nearest` proposes."""
    return bool(difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.8))


def flat(values: dict[str, Any], within: str = "") -> list[tuple[str, Any]]:
    """The values of tables in tables, by names with dots; an empty table is a value."""
    found: list[tuple[str, Any]] = []
    for key, value in values.items():
        name = f"{within}{key}"
        found += flat(value, f"{name}.") if isinstance(value, dict) and value else [(name, value)]
    return found


# what all frameworks say alike


def put_ranks(reader: SettingsReader, world: int | None, world_name: str, *others: tuple[str, int]) -> int | None:
    """The replicas that are left of the ranks, of which the command line may say how many; `others` divide them."""
    clusters = reader.asked.clusters
    if clusters is not None and world is not None and clusters != world:
        reader.wrong(world_name, f"--clusters {clusters} contradicts the file, which says {world} ranks")
        return None
    ranks = clusters if clusters is not None else world
    if ranks is None:
        reader.wrong("", f"{reader.framework.file} does not say on how many ranks it runs", way_out="give --clusters N")
        return None
    each = 1
    for _, count in others:
        each *= count
    if ranks % each:
        text = " * ".join(f"{name} {count}" for name, count in others)
        way_out = "give another --clusters" if world is None else "change one of them in the file"
        reader.wrong(world_name, f"{ranks} ranks are not a multiple of {text}", way_out=way_out)
        return None
    return ranks // each


def put_batch(
    reader: SettingsReader, micro: tuple[str, int | None], whole: tuple[str, int | None], dp: int | None
) -> None:
    """`micro_batch_size`, and `micro_batches` of the sequences of a step."""
    micro_name, size = micro
    whole_name, batch = whole
    if size is None or dp is None:
        return
    reader.put("micro_batch_size", size, micro_name)
    if batch is not None and batch % (size * dp):
        text = f"{whole_name} {batch} is not a multiple of {micro_name} {size} * {dp} replicas"
        reader.wrong(whole_name, text)
    else:
        reader.put("micro_batches", 1 if batch is None else batch // (size * dp), whole_name, micro_name)


def put_clip(reader: SettingsReader, name: str) -> None:
    """`clip` and `max_norm`; 0 clips nothing."""
    norm = reader.number(name)
    if norm:
        reader.put("clip", "global", name)
        reader.put("max_norm", norm, name)
    elif norm is not None:
        reader.put("clip", "none", name)


def put_seq_len(reader: SettingsReader, name: str | None) -> None:
    """`seq_len`, of the file or the command line."""
    asked = reader.asked.seq_len
    said = reader.size(name) if name and (asked is None or reader.has(name)) else None
    if said is not None and asked is not None and said != asked:
        reader.wrong(name or "", f"--seq-len {asked} contradicts {name} {said}")
    elif said is None and asked is None:
        reader.wrong("", f"{reader.framework.file} does not say how long sequences are", way_out="give --seq-len S")
    else:
        reader.put("seq_len", said if said is not None else asked, *([name] if name else []))


def one_of(reader: SettingsReader, name: str, said: int | None, asked: int | None, option: str) -> int:
    """A size that the file or the command line says; 1 where neither does, and a contradiction where both do differently."""
    if said is not None and asked is not None and said != asked:
        reader.wrong(name, f"{option} {asked} contradicts {name} {said}")
    return said or asked or 1

"""Settings of another framework, read by a table of rules. Each becomes keys of a plan, or is listed with a reason."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeVar

from attrs import define, field, frozen

from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.config.optimizer import Optimizer
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
UNREAD = "no other setting needs it here"
"""Reason for a setting that nothing read; the frameworks have better ones (`Framework.idle`)."""
MOST = 1 << 40
"""Largest whole number that is accepted: far above any run's sizes, and small enough to multiply."""


@frozen
class Setting:
    """A value of a setting, and its place in the file."""

    value: Any
    place: Place


@frozen
class Rule:
    """The rule for one setting."""

    keys: str
    """keys of the plan that it sets, in words; empty if it is not carried over"""
    says: str
    """how it is carried over, or why it is not"""
    default: Any = None
    """the framework's default, which the plan states if a file leaves the setting out"""
    source: str = ""
    """source of the default: a file of the framework, and the symbol in it"""
    refused: bool = False
    """true if a file with it is refused: a plan cannot express its effect, or another file decides it"""


@frozen
class Default:
    """A default of the framework for a setting that the file leaves out."""

    value: Any
    source: str
    """file and symbol of the framework; empty if unknown"""


@frozen
class Left:
    """A setting that is not carried over, and the reason."""

    key: str
    value: Any
    why: str
    trains: bool = False
    """true if something else is trained without it, as far as is known"""


@frozen
class Missing:
    """A key of a plan, or of its model, that the settings of a framework cannot express."""

    key: str
    value: str
    instead: str | None
    """value that the settings have in its place; None: they have none"""
    why: str

    def __str__(self) -> str:
        instead = "" if self.instead is None else f", there it is {self.instead}"
        return f"{self.key} = {self.value}{instead}: {self.why}"


@frozen
class Framework:
    """A framework whose settings can be read."""

    title: str
    file: str
    """kind of the file, in words"""
    settings: Callable[..., dict[str, Setting]]
    """reads the settings from a file's name and text; for a script it takes `Asked` too"""
    rules: Mapping[str, Rule]
    read: Callable[[SettingsReader], None]
    """takes the settings from a reader, and puts keys of the plan"""
    tables: Mapping[str, str] = field(factory=dict)
    """tables that are not carried over, with the reason"""
    strict: tuple[str, ...] = ()
    """tables that decide what is trained: an unknown name in them, or in a table named alike, stops the import"""
    stops: Callable[[str], bool] = lambda _name: False
    """tells whether an unknown setting of this name stops the import for another reason"""
    others: Callable[[str], str | None] = lambda _name: None
    """returns why a setting without a rule is not carried over; None if it is unknown"""
    idle: Mapping[str, str] = field(factory=dict)
    """reasons why settings that set keys have no effect where nothing reads them"""
    trains: frozenset[str] = frozenset()
    """reasons of settings that set no key, where something else is trained without them unless they are off"""
    agrees: Mapping[str, tuple[Any, ...]] = field(factory=dict)
    """values of such settings that say what the plan does anyway, beside those that `is_off` knows"""
    takes_text: Callable[[str], bool] = lambda _name: False
    """tells whether a setting's number or truth value may be written as a text, as all are in a script"""
    script: bool = False
    """true if its file is a script, with variables"""

    def settings_of(self, file: str, text: str, asked: Asked) -> dict[str, Setting]:
        """Read the settings of a file, given its name and text."""
        return self.settings(file, text, asked) if self.script else self.settings(file, text)


@frozen
class Asked:
    """Options of the command, for values that a file may lack."""

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
    """values for variables of a script"""
    beside: tuple[Path, ...] = ()
    """further files of the same run: an accelerate file, a ds_config.json"""
    model: ModelConfig | None = None
    """the model, where its file's name of it is not known here, or is another one's"""
    f32_state: bool = False
    """true if a plan with f32 masters and moments may stand for a file that keeps them in fewer bits"""


@define
class SettingsReader:
    """Reader of one file's settings: the framework's `read` takes settings and puts keys of a plan.

    Settings that no rule takes are reported at the end (`leave_rest`). Errors collect in `report`.
    """

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
    """defaults of the framework for settings that the file leaves out"""
    called: dict[str, str] = field(factory=dict)
    """the file's name of a setting, if it has an older one"""
    unsaid: set[str] = field(factory=set)
    """keys left out of the plan's file, since neither the file nor the framework determines them"""
    unset: dict[str, str] = field(factory=dict)
    """variables that a script is taken to lack, and the text that it uses instead"""

    def has(self, name: str) -> bool:
        """Tell whether the file has a setting."""
        return name in self.settings

    def name(self, name: str) -> str:
        """Return the file's own name of a setting."""
        return self.called.get(name, name)

    def integer(self, name: str) -> int | None:
        """Take a whole number from -1 to `MOST`; return the framework's default without one, None if there is none.

        Report another value, and return None.
        """
        value = self._read(name, int, as_integer)
        if value is not None and not -1 <= value <= MOST:
            self.wrong(name, f"{self.name(name)} is {shown(value)}, which is out of range")
            return None
        return value

    def size(self, name: str) -> int | None:
        """Take a whole number of at least 1, as `integer` does; None after an error or without a value."""
        value = self.integer(name)
        if value is not None and value < 1:
            self.wrong(name, f"{self.name(name)} is {value}: at least 1 is expected")
            return None
        return value

    def number(self, name: str) -> float | None:
        """Take a finite number; return the default or None as `integer` does."""
        return self._read(name, float, as_number)

    def flag(self, name: str) -> bool:
        """Take a truth value; return the framework's default without one, else False."""
        return bool(self._read(name, bool, as_flag))

    def word(self, name: str) -> str | None:
        """Take a text; return the default or None as `integer` does."""
        return self._read(name, str, lambda value: value if isinstance(value, str) else None)

    def items(self, name: str) -> list[Any] | None:
        """Take a list; return the default or None as `integer` does."""
        return self._read(name, list, lambda value: value if isinstance(value, list) else None)

    def _read(self, name: str, kind: type[T], convert: Callable[[Any], T | None]) -> T | None:
        rule = self.framework.rules[name]
        if name not in self.settings:
            return None if rule.default is None else self.default(name, rule.default, rule.source)
        self.taken.add(name)
        said = self.settings[name].value
        value = convert(said)
        if value is None:
            self.wrong(name, f"{self.name(name)} is {shown(said)}: {EXPECTED[kind]} is expected", code="RT063")
        elif isinstance(said, str) and kind in (int, float, bool) and not self.framework.takes_text(name):
            text = f"{self.name(name)} is the text {shown(said)}: {self.framework.title} expects {EXPECTED[kind]}"
            self.wrong(name, text, code="RT063", way_out=f"write it without quotation marks: {said}")
            return None
        return value

    def default(self, name: str, value: T, source: str) -> T:
        """Use a default of the framework for a setting that the file leaves out, and record it with its source.

        Rules record their defaults themselves. Call this for a default that depends on other settings.
        """
        self.defaults[name] = Default(value, source)
        return value

    def wrong(self, name: str, message: str, *, code: str = "RT064", way_out: str | None = None) -> None:
        """Report an error at a setting; at the top of the file if it does not have the setting."""
        place = self.settings[name].place if name in self.settings else self.top
        if any(each.message == message and each.location == place.location for each in self.report.items):
            return  # a setting that several keys follow from is read more than once
        self.report.error(code, message, place.location, help=way_out, source=place.source)

    def put(self, key: str, value: Any, *names: str) -> None:
        """Set a key of the plan; its place is the first of the settings `names` that the file has."""
        self.values[key] = value
        self.places[key] = next((self.settings[name].place for name in names if name in self.settings), self.top)

    def carry(self, key: str, value: Any, name: str) -> None:
        """Set a key of the plan from one setting, unless the value is None."""
        if value is not None:
            self.put(key, value, name)

    def leave(self, name: str, why: str, *, trains: bool = False) -> None:
        """Record that a setting is not carried over, and why; nothing happens if the file does not have it.

        `trains` says that something else is trained without it.
        """
        if name in self.settings and all(each.key != self.name(name) for each in self.left):
            self.left.append(Left(self.name(name), self.settings[name].value, why, trains))
        self.taken.add(name)

    def differ(self, name: str, why: str, *, trains: bool = True) -> None:
        """Record how the plan differs from a setting, or from the framework's default for it."""
        if name in self.defaults and name not in self.settings and all(each.key != name for each in self.left):
            text = f"{why} (the default of {self.framework.title})"
            self.left.append(Left(name, self.defaults[name].value, text, trains))
        self.leave(name, why, trains=trains)

    def leave_rest(self) -> None:
        """Record the settings that nothing took; refuse unknown ones that may decide what is trained."""
        rules = self.framework.rules
        for name in self.settings:
            if name in self.taken:
                continue
            if name not in rules and (why := self.framework.others(name)) is not None:
                self._leave_or_agree(name, why)
            elif name not in rules:
                hint = nearest(name, rules)
                if (table := self._table_above(name)) is not None:
                    self._leave_or_agree(name, table)
                elif near(name.split(".")[0], self.framework.strict) or self.framework.stops(name):
                    text = f"{name} is not known here as a setting of {self.framework.title}"
                    self.wrong(name, text, code="RT063", way_out=hint or "correct its name, or take it out of the file")
                else:
                    text = f"not known here as one of {self.framework.title}" + (f"; {hint}" if hint else "")
                    self.leave(name, text, trains=True)
            elif rules[name].keys:
                self.leave(name, self.framework.idle.get(name, UNREAD))
            elif rules[name].refused:
                self.refuse(name)
            else:
                self._leave_or_agree(name, rules[name].says)

    def refuse(self, name: str, way_out: str | None = None) -> None:
        """Report a setting that a file must not have, unless it is off, or says one rank or one expert."""
        self.taken.add(name)
        value = self.settings[name].value
        if not is_off(value) and not (is_one(value) and name.endswith(("size", "degree", "experts"))):
            said = "" if value is True else f" {shown(value)}" if not isinstance(value, str) else f" {value}"
            text = f"{self.name(name)}{said} is not carried over: {self.framework.rules[name].says}"
            self.wrong(name, text, way_out=way_out or "take it out of the file")

    def _leave_or_agree(self, name: str, why: str) -> None:
        """Record a setting that no key needs; drop one that says what the plan does anyway."""
        trains, value = why in self.framework.trains, self.settings[name].value
        if trains and (is_off(value) or value in self.framework.agrees.get(name, ())):
            self.taken.add(name)
        else:
            self.leave(name, why, trains=trains)

    def _table_above(self, name: str) -> str | None:
        """Return why the table around a setting is not carried over; None if the table is read."""
        rules, tables = self.framework.rules, self.framework.tables
        while name:
            if name in tables:
                return tables[name]
            if name in rules and not rules[name].keys:
                return rules[name].says
            name = name.rpartition(".")[0]
        return None


def as_integer(value: Any) -> int | None:
    """Return a whole number that is written as a number or a text; None if the value is none."""
    if isinstance(value, str):
        try:
            return int(value) if len(value) < 20 and value.isascii() else None
        except ValueError:
            return None
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def as_number(value: Any) -> float | None:
    """Return a finite number that is written as a number or a text; None if the value is none."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if abs(number) < float("inf") else None


def as_flag(value: Any) -> bool | None:
    """Return a truth value; None if the value is none."""
    if isinstance(value, str) and value.lower() in ("true", "false"):  # as pydantic reads them
        return value.lower() == "true"
    return value if isinstance(value, bool) else None


_OFF = ("", "0", "0.0", "false", "none", "null", "fp32", "float32")
"""Words that switch something off, or ask for the type that state has anyway."""


def is_off(value: Any) -> bool:
    """Tell whether a setting that switches something on leaves it off with this value."""
    return value.lower() in _OFF if isinstance(value, str) else value in (None, 0, [], {})


def is_one(value: Any) -> bool:
    """Tell whether a value is the number 1, as a number or in a script."""
    return value == "1" or (value == 1 and value is not True)


def near(name: str, known: Iterable[str]) -> bool:
    """Tell whether a name is a known one or a close misspelling (stricter than `nearest`)."""
    return bool(difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.8))


def product(a: float, b: float) -> float:
    """Multiply numbers as people do who read them: 0.1 * 3e-4 is 3e-05, where floats give 2.9999999999999997e-05."""
    return float(Decimal(repr(a)) * Decimal(repr(b)))


def flat(values: dict[str, Any], within: str = "") -> list[tuple[str, Any]]:
    """List the values of nested tables by dotted names; an empty table is a value."""
    found: list[tuple[str, Any]] = []
    for key, value in values.items():
        name = f"{within}{key}"
        found += flat(value, f"{name}.") if isinstance(value, dict) and value else [(name, value)]
    return found


# what all frameworks say alike


def until_said(keys: Sequence[str]) -> str:
    """Return the values that a plan has for keys of its optimizer that its file leaves out."""
    own = {key: getattr(Optimizer(), key) for key in keys if key not in ("max_norm", "min_lr")}  # idle by default
    values = [
        f"no {key}" if value is None else f"{key} = {shown(list(value) if key == 'betas' else value)}"
        for key, value in own.items()
    ]
    return f"the plan has {', '.join(values)}"


def put_ranks(reader: SettingsReader, world: int | None, world_name: str, *others: tuple[str, int]) -> int | None:
    """Return the number of replicas: the ranks divided by all of `others` (a name and a count each).

    `world` is the file's number of ranks; `--clusters` may give it instead. Report a contradiction or a remainder, and
    return None.
    """
    clusters = reader.asked.clusters
    if clusters is not None and world is not None and clusters != world:
        reader.wrong(world_name, f"--clusters {clusters} contradicts the file, which says {world} ranks")
        return None
    ranks = clusters if clusters is not None else world
    if ranks is None:
        reader.wrong("", f"{reader.framework.file} does not say on how many ranks it runs", way_out="give --clusters N")
        return None
    each = math.prod(count for _, count in others)
    if ranks % each:
        text = " * ".join(f"{name} {count}" for name, count in others)
        way_out = _other_ranks(reader, ranks, [count for _, count in others]) if clusters is None else None
        way_out = f"give --clusters {each * max(1, ranks // each)}" if world is None else way_out
        way_out = way_out or "change one of them in the file"
        reader.wrong(world_name, f"{ranks} ranks are not a multiple of {text}", way_out=way_out)
        return None
    return ranks // each


def put_context_ranks(reader: SettingsReader, name: str) -> int:
    """Put `cp` if a setting says several context ranks; return how many there are."""
    context = reader.size(name) or 1
    if context > 1:
        reader.put("cp", context, name)
    return context


def replicas_of(reader: SettingsReader) -> int | None:
    """Return the ranks that hold the same weights, replicas times context ranks; None before `dp` is put."""
    dp: int | None = reader.values.get("dp")
    return None if dp is None else dp * int(reader.values.get("cp", 1))


def _other_ranks(reader: SettingsReader, ranks: int, counts: list[int]) -> str | None:
    """Return the advice to give a variable another value, if the command line gives one that counts ranks."""
    rules, given = reader.framework.rules, reader.asked.given
    for name, value in given.items():
        if not any(
            str(setting.value) == value and {"pp", "tp", "cp", "dp"} & {*rules[key].keys.split(", ")}
            for key, setting in reader.settings.items()
            if key in rules
        ):
            continue
        # The largest smaller count that shares out the ranks, where the variable is one of the counts.
        others = math.prod(counts) // int(value) if value.isdecimal() and int(value) in counts else 0
        fits = [less for less in range(1, int(value)) if ranks % (others * less) == 0] if others else []
        return f"give another value: --set {name}={max(fits, default='VALUE')}"
    return None


def put_batch(
    reader: SettingsReader, micro: tuple[str, int | None], whole: tuple[str, int | None], dp: int | None
) -> None:
    """Put `micro_batch_size`, and `micro_batches` by the sequences of a step. Each pair is a name and a value.

    Report a remainder. Nothing is put without a micro-batch size or replicas.
    """
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
    """Put `clip` and `max_norm`; a norm of 0 means no clipping."""
    norm = reader.number(name)
    if norm:
        reader.put("clip", "global", name)
        reader.put("max_norm", norm, name)
    elif norm is not None:
        reader.put("clip", "none", name)


def put_seq_len(reader: SettingsReader, name: str | None) -> None:
    """Put `seq_len`, from the file or `--seq-len`; report a contradiction, or that neither gives it."""
    asked = reader.asked.seq_len
    said = reader.size(name) if name and (asked is None or reader.has(name)) else None
    if said is not None and asked is not None and said != asked:
        reader.wrong(name or "", f"--seq-len {asked} contradicts {name} {said}")
    elif said is None and asked is None:
        reader.wrong("", f"{reader.framework.file} does not say how long sequences are", way_out="give --seq-len S")
    else:
        reader.put("seq_len", said if said is not None else asked, *([name] if name else []))


def one_of(reader: SettingsReader, name: str, said: int | None, asked: int | None, option: str) -> int:
    """Return a size that the file or an option gives, 1 without either; report a contradiction."""
    if said is not None and asked is not None and said != asked:
        reader.wrong(name, f"{option} {asked} contradicts {name} {said}")
    return said or asked or 1

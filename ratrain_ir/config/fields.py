"""Typed reading of a flat `field -> value` mapping: all problems are reported at once, each at the place of its key."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from attrs import define, field

from ratrain.ratrain_ir.support.diagnostics import Diagnostics, nearest
from ratrain.ratrain_ir.support.text import Places, nowhere, shown

Value = int | float | str | bool | None | tuple[int, ...] | tuple[float, ...]
"""Possible values of a field in the header of the IR text."""


@define
class Report:
    """Problems of one input, each at the place of its key."""

    places: Places = nowhere
    diagnostics: Diagnostics = field(factory=Diagnostics)

    def error(self, code: str, key: str, message: str, *, help: str | None = None) -> None:  # noqa: A002
        """Report an error at the place of `key` and go on."""
        place = self.places(key)
        self.diagnostics.error(code, message, place.location, help=help, source=place.source, key=key)

    def check(self) -> None:
        """Raise `DiagnosticError` with all errors so far, if there are any."""
        self.diagnostics.check()


@define
class FieldReader:
    """Typed access to a mapping of fields.

    A missing, mistyped or out-of-range value is reported under `code`, its field is added to `bad`, and a stand-in is
    returned so that reading goes on. Use nothing that was read before `report.check()` has passed. `labels` maps field
    names to the keys that the user wrote, where these differ.
    """

    values: Mapping[str, object]
    report: Report
    code: str
    labels: Mapping[str, str] = field(factory=dict)
    bad: set[str] = field(factory=set)

    def label(self, name: str) -> str:
        """Return the key by which the user knows a field."""
        return self.labels.get(name, name)

    def good(self, *names: str) -> bool:
        """Tell whether all these fields were read without error, so that they may be compared."""
        return self.bad.isdisjoint(names)

    def contradiction(self, code: str, name: str, message: str, *, help: str | None = None) -> None:  # noqa: A002
        """Report readable fields that contradict each other, at the place of one of them."""
        self.report.error(code, self.label(name), message, help=help)

    def integer(self, name: str, low: int, high: int, *, default: int | None = None) -> int:
        """Read a whole number in [low, high], both included. Without a default the field is required."""
        expected = f"a whole number from {low} to {high}"
        if name not in self.values and default is not None:
            return default
        if not self._present(name, expected):
            return low
        value = self.values[name]
        if type(value) is int and low <= value <= high:  # `type`: True is an int to isinstance
            return value
        self._wrong(name, expected)
        return low

    def integer_or_none(self, name: str, low: int, high: int) -> int | None:
        """Read a whole number in [low, high]; None if the field is absent or null."""
        return None if self.values.get(name) is None else self.integer(name, low, high)

    def number(
        self, name: str, accept: Callable[[float], bool], expected: str, *, default: float | None = None
    ) -> float:
        """Read a finite number that `accept` approves. `expected` describes it in words for the error."""
        if name not in self.values and default is not None:
            return default
        if not self._present(name, expected):
            return 1.0
        value = as_float(self.values[name])
        if value is not None and accept(value):
            return value
        self._wrong(name, expected)
        return 1.0

    def numbers(
        self, name: str, count: int, accept: Callable[[float], bool], expected: str, *, default: tuple[float, ...]
    ) -> tuple[float, ...]:
        """Read a list of `count` finite numbers that `accept` approves."""
        value = self.values.get(name, default)
        if isinstance(value, (list, tuple)) and len(value) == count:
            read = [as_float(item) for item in value]
            kept = tuple(item for item in read if item is not None and accept(item))
            if len(kept) == count:
                return kept
        self._wrong(name, expected)
        return default

    def integers(self, name: str, expected: str) -> tuple[int, ...]:
        """Read a list of whole numbers of any length; the field is required."""
        if not self._present(name, expected):
            return ()
        value = self.values[name]
        if isinstance(value, (list, tuple)) and all(type(item) is int for item in value):
            return tuple(value)
        self._wrong(name, expected)
        return ()

    def word(
        self, name: str, choices: Sequence[str], others: Mapping[str, str] | None = None, *, default: str | None = None
    ) -> str:
        """Read one of `choices`. A word that `others` maps to one of them is refused with that one as a hint."""
        expected = " or ".join(f'"{choice}"' for choice in choices)
        if name not in self.values and default is not None:
            return default
        if not self._present(name, expected):
            return choices[0]
        value = self.values[name]
        if isinstance(value, str) and value in choices:
            return value
        self._wrong(name, expected, nearest(value, choices, others) if isinstance(value, str) else None)
        return choices[0]

    def text(self, name: str, accept: Callable[[str], bool], expected: str) -> str:
        """Read a string that `accept` approves."""
        if not self._present(name, expected):
            return ""
        value = self.values[name]
        if isinstance(value, str) and accept(value):
            return value
        self._wrong(name, expected)
        return ""

    def flag(self, name: str, *, default: bool) -> bool:
        """Read true or false."""
        value = self.values.get(name, default)
        if isinstance(value, bool):
            return value
        self._wrong(name, "true or false")
        return default

    def refuse_unknown(self, known: Iterable[str]) -> None:
        """Report, under `code`, the fields that are not in `known`.

        The help of each is the most similar known one, else all known ones.
        """
        names = list(known)
        for name in self.values:
            if name not in names:
                self.report.error(
                    self.code,
                    name,
                    f"{shown(name)} is not a known field",
                    help=nearest(name, names) or f"known are {', '.join(names)}",
                )

    def _present(self, name: str, expected: str) -> bool:
        if name in self.values:
            return True
        self.bad.add(name)
        self.report.error(self.code, self.label(name), f"'{self.label(name)}' is missing: {expected} is expected")
        return False

    def _wrong(self, name: str, expected: str, help: str | None = None) -> None:  # noqa: A002
        value = self.values[name]
        self.bad.add(name)
        self.report.error(
            self.code,
            self.label(name),
            f"'{self.label(name)}' is {shown(value)}: {expected} is expected",
            help=help or _type_hint(value, expected),
        )


def as_float(value: object) -> float | None:
    """Return a finite number as a float; None for anything else. Booleans are no numbers."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _type_hint(value: object, expected: str) -> str | None:
    """Describe how to write a value that is clear but has the wrong type; None if there is no hint."""
    if "whole number" in expected:
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
            return f"write {int(value)}, without a fraction or an exponent"
        if isinstance(value, str) and value.strip().isdecimal() and len(value) < 20:
            return f"write {int(value)}, without quotes"
        if isinstance(value, bool):
            return "a truth value is not a number"
    return None

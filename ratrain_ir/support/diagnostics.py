"""Diagnostics: the fault, its place, the reason, and a way out.

Every message that a user can cause carries a stable code (`RT0xx`, listed in `CODES`) and, if there is a text, a place
in it. Problems are collected, so that one run shows all errors of a file. A `DiagnosticError` carries them across
layers and the driver prints them; no other exception may reach the user.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from html import escape
from typing import NoReturn

from attrs import define, field, frozen

CODES: dict[str, str] = {
    # text
    "RT001": "the text is not valid .rtir",
    "RT002": "a file cannot be read",
    "RT003": "the format version is not supported",
    "RT004": "a name is not known",
    "RT005": "a field has a value of the wrong type or out of range",
    "RT006": "a name is declared twice",
    "RT007": "a schedule table (CSV) has a cell that is not an action",
    "RT008": "the parameters of a sharded stage are not gathered where a schedule table uses them",
    "RT009": "the gradients of a sharded stage are never reduced in a schedule table",
    "RT010": "a schedule table (CSV) does not fit the plan, or asks for what a module cannot say",
    "RT011": "what a command was about to write is not what its own reader reads",
    # structure and types of a module
    "RT020": "a tensor is used before it is defined",
    "RT021": "a tensor is used after its release",
    "RT022": "a tensor is defined while it is live",
    "RT023": "a step tensor is never released",
    "RT024": "the carried tensors differ between the two ends of a step",
    "RT025": "an operand has the wrong state kind or type for its op",
    "RT026": "an op is not allowed at this level",
    "RT027": "an op names a block or micro-batch that the model, plan or stage does not have",
    "RT028": "a release names a tensor that is not live",
    # completeness
    "RT030": "a forward, backward or input is missing or appears twice",
    "RT031": "a gradient is not reduced and applied exactly once",
    "RT032": "a saved tensor is recovered twice or not at all",
    "RT033": "tensor-parallel ranks exchange the wrong data, twice or never: a part is read as whole, or a sum "
    "is missing",
    "RT034": "a tensor is in another memory than the op works in, or a store, fetch, offload or stream has the "
    "wrong one",
    # communication
    "RT040": "a send has no matching receive, or the other way round",
    "RT041": "a channel's receive order differs from its send order",
    "RT042": "the program cannot make progress",
    "RT043": "members of a group disagree on the order of collectives",
    "RT044": "the order, or the number of micro-batches in flight, is not that of the schedule the plan names",
    # memory
    "RT050": "two tensors that are live together share a byte",
    "RT051": "an offset is missing, unaligned or out of range",
    "RT052": "the arena is larger than the capacity",
    "RT053": "the live bytes exceed the capacity: no allocation can fit",
    # model, plan, machine
    "RT060": "the model configuration cannot be read",
    "RT061": "the model uses something that is not supported",
    "RT062": "the model configuration contradicts itself",
    "RT063": "the plan cannot be read",
    "RT064": "the plan contradicts itself or the model",
    "RT065": "the machine file cannot be read or contradicts itself",
    # passes
    "RT070": "the pass pipeline cannot be read",
    "RT071": "a pass cannot run at this point of the pipeline",
    "RT072": "a plugin, or a pass or target of one, is at fault",
    "RT073": "an option of a pass changes nothing here",
    # programs
    "RT080": "the file is not a sound .rtx program",
    "RT081": "two instructions of a program race, or compute does not wait for a blocking collective",
    # data and runs
    "RT090": "the training data cannot be used",
    "RT091": "the weights do not fit the model",
    "RT092": "the checkpoint cannot be used",
    "RT093": "training cannot go on",
    "RT094": "no text can be generated",
}


class Severity(Enum):
    """Severity of a diagnostic; only errors make a command fail."""

    ERROR = "error"
    WARNING = "warning"


@frozen
class Location:
    """A place in a text: line and column, both from 1; `length` characters are underlined."""

    file: str
    line: int
    column: int = 1
    length: int = 1

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@frozen
class Note:
    """An additional message of a diagnostic: the other half of a conflict, or one step of a chain of reasons."""

    message: str
    location: Location | None = None


@frozen
class Diagnostic:
    """One problem.

    `help` is the way out; `source` is the text of the line that `location` points at; `key` is the key of a
    configuration file that the problem is about.
    """

    code: str
    message: str
    location: Location | None = None
    notes: Sequence[Note] = ()
    help: str | None = None
    source: str | None = None
    severity: Severity = Severity.ERROR
    key: str | None = None

    def render(self, wrap: Callable[[str], str] = str) -> str:
        """Format the diagnostic as a compiler prints it: place, code, line, caret, notes, help.

        `wrap` is applied to every part except the source line and the caret line.
        """
        place = f"{self.location}: " if self.location else ""
        lines = [wrap(f"{place}{self.severity.value}[{self.code}]: {self.message}")]
        if self.source is not None and self.location is not None:
            lines.extend(_underlined(self.source, self.location))
        for note in self.notes:
            where = f"{note.location}: " if note.location else ""
            lines.append(wrap(f"  note: {where}{note.message}"))
        if self.help:
            lines.append(wrap(f"  help: {self.help}"))
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.render()

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.render())}</pre>"

    def to_json(self) -> dict[str, object]:
        """Return the diagnostic as plain data, for `--json`."""
        return {
            "severity": self.severity.value,
            "code": self.code,
            "message": self.message,
            "file": self.location.file if self.location else None,
            "line": self.location.line if self.location else None,
            "column": self.location.column if self.location else None,
            "notes": [n.message for n in self.notes],
            "help": self.help,
        }


_STEERING = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f"  # control characters except tab and newline; escape sequences begin with one
    "\\u061c\\u200e\\u200f\\u202a-\\u202e\\u2066-\\u2069"  # changes of writing direction
    "\\u2028\\u2029\\ud800-\\udfff]"  # other line ends; lone surrogates, which no stream can write
)


def printable(text: str) -> str:
    r"""Escape characters that steer a terminal or cannot be written, as Python does (`\x1b`).

    Tabs and newlines stay.
    """
    return _STEERING.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


_SHOWN_WIDTH = 160


def _underlined(source: str, location: Location) -> list[str]:
    """Return the source line and a caret line below it; long lines are cut around the place."""
    text = source.rstrip("\n").replace("\t", " ")
    column = min(location.column, len(text) + 1) - 1
    start = max(0, column - _SHOWN_WIDTH // 2) if len(text) > _SHOWN_WIDTH else 0
    shown = text[start : start + _SHOWN_WIDTH]
    at = column - start
    before, marked = (len(printable(part)) for part in (shown[:at], shown[at : at + location.length]))
    return [f"  {printable(shown)}", "  " + " " * before + "^" + "~" * (max(1, marked) - 1)]


class DiagnosticError(Exception):
    """Error of work that cannot go on; carries every diagnostic found so far."""

    def __init__(self, diagnostics: Iterable[Diagnostic]) -> None:
        self.diagnostics = list(diagnostics)
        super().__init__("\n".join(d.render() for d in self.diagnostics))

    def _render_traceback_(self) -> list[str]:
        """Return the lines that a notebook shows instead of a traceback, which would not help with a faulty input."""
        return str(self).split("\n")

    def __reduce__(self) -> tuple[type[DiagnosticError], tuple[list[Diagnostic]]]:
        """Pickle the diagnostics; by default the message would be pickled, which `__init__` does not take."""
        return type(self), (self.diagnostics,)


class ToldError(DiagnosticError):
    """Error whose diagnostics were shown when they were found; `notes` were added later and are left to show."""

    def __init__(self, diagnostics: Iterable[Diagnostic], notes: Sequence[Note]) -> None:
        self.notes = tuple(notes)
        super().__init__(diagnostics)

    def __reduce__(self) -> tuple[type[ToldError], tuple[list[Diagnostic], tuple[Note, ...]]]:  # type: ignore[override]
        """Pickle the diagnostics and the notes."""
        return type(self), (self.diagnostics, self.notes)


@define
class Diagnostics:
    """Collector of diagnostics. `check()` raises if an error has been reported."""

    items: list[Diagnostic] = field(factory=list)

    def error(
        self,
        code: str,
        message: str,
        location: Location | None = None,
        *,
        notes: Sequence[Note] = (),
        help: str | None = None,  # noqa: A002 - the word users see
        source: str | None = None,
        key: str | None = None,
    ) -> None:
        """Report an error and continue."""
        self.items.append(Diagnostic(code, message, location, tuple(notes), help, source, key=key))

    def warning(
        self,
        code: str,
        message: str,
        location: Location | None = None,
        *,
        help: str | None = None,  # noqa: A002
    ) -> None:
        """Report something suspicious that does not stop the work."""
        self.items.append(Diagnostic(code, message, location, (), help, None, Severity.WARNING))

    @property
    def errors(self) -> list[Diagnostic]:
        """The errors among the items."""
        return [d for d in self.items if d.severity is Severity.ERROR]

    def check(self) -> None:
        """Raise `DiagnosticError` if any error has been reported."""
        if self.errors:
            raise DiagnosticError(self.items)


def fail(
    code: str,
    message: str,
    location: Location | None = None,
    *,
    notes: Sequence[Note] = (),
    help: str | None = None,  # noqa: A002
    source: str | None = None,
) -> NoReturn:
    """Raise one error at once."""
    raise DiagnosticError([Diagnostic(code, message, location, tuple(notes), help, source)])


MISUSE = "usage"
"""Stands in place of a code where the arguments contradict each other, whatever the files contain."""


def misuse(message: str) -> NoReturn:
    """Raise `DiagnosticError` for arguments that exclude each other, or would change nothing."""
    fail(MISUSE, message)


def nearest(
    name: str, known: Iterable[str], others: Mapping[str, str] | None = None, *, cutoff: float = 0.6
) -> str | None:
    """Return a help text with the known name that is most like a misspelt one; None if none is like it.

    Case does not count. A name that begins with the misspelt one comes first if it is the only such name. `others` maps
    further accepted spellings to known names. Likeness is a ratio from 0 to 1 (`difflib`); below `cutoff` a name is not
    suggested.
    """
    import difflib

    meant = {word.lower(): word for word in known} | dict(others or {})
    begun = [word for word in meant if len(name) > 1 and word.startswith(name.lower())]
    matches = begun if len(begun) == 1 else difflib.get_close_matches(name.lower(), list(meant), n=1, cutoff=cutoff)
    return f"did you mean '{meant[matches[0]]}'?" if matches else None

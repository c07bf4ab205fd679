"""Lark parser of `.rtir` text into plain records, and its errors in users' words.

Records hold lines and words only; `ratrain.ratrain_ir.text.parser` interprets them.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

from attrs import define, frozen
from lark import Lark, Token, Transformer
from lark.exceptions import UnexpectedCharacters, UnexpectedInput, UnexpectedToken

from ratrain.grammar import grammar_text
from ratrain.ratrain_ir.support.diagnostics import Diagnostic, Location


@frozen
class HeaderRecord:
    """A section `name { key = value, ... }`."""

    name: str
    line: int
    values: dict[str, Any]
    duplicates: tuple[str, ...]


@frozen
class MachineRecord:
    """A section `machine { | text ... }`: the lines after the mark and one blank."""

    line: int
    lines: tuple[str, ...]


@frozen
class PipelineRecord:
    """A line `pipeline "text"`."""

    line: int
    text: str


@define
class DeclarationRecord:
    """A declaration `kind %name : type [carried] [in home] [at offset]`."""

    kind: str
    name: str
    type: str
    carried: bool
    home: str | None
    offset: str | None
    line: int


@define
class OpRecord:
    """An op `writes = updates += keyword words (reads) using scratch`; tensor names without their sigil."""

    keyword: str
    words: list[str]
    writes: list[str]
    updates: list[str]
    reads: list[str]
    scratch: list[str]
    line: int


StatementRecord = DeclarationRecord | OpRecord
"""Statements are many, so their classes are not frozen: creation takes half the time."""


@frozen
class StageRecord:
    """A stage `stage @index { ... }`."""

    index: str
    line: int
    statements: list[StatementRecord]


@frozen
class ModuleRecord:
    """The whole file."""

    version: str
    name: str
    level: str
    line: int
    headers: list[HeaderRecord]
    machines: list[MachineRecord]
    pipelines: list[PipelineRecord]
    stages: Iterable[StageRecord]


class _Records(Transformer[Token, ModuleRecord]):
    """Builder of records while Lark reduces rules, so that no parse tree is made."""

    def start(self, children: list[Any]) -> ModuleRecord:
        version, (name, level, items) = children
        return ModuleRecord(
            version=str(version),
            name=str(name)[1:],
            level=str(level),
            line=name.line,
            headers=[i for i in items if isinstance(i, HeaderRecord)],
            machines=[i for i in items if isinstance(i, MachineRecord)],
            pipelines=[i for i in items if isinstance(i, PipelineRecord)],
            stages=[i for i in items if isinstance(i, StageRecord)],
        )

    def module(self, children: list[Any]) -> tuple[Token, Token, list[Any]]:
        return children[0], children[1], children[2:]

    def header(self, children: list[Any]) -> HeaderRecord:
        pairs = [c for c in children[1:] if c is not None]
        values = dict(pairs)
        seen: set[str] = set()
        duplicates = tuple(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        return HeaderRecord(str(children[0]), children[0].line, values, duplicates)

    def pair(self, children: list[Any]) -> tuple[str, Any]:
        return str(children[0]), children[1]

    def integer(self, children: list[Any]) -> int | str:
        text = str(children[0])
        return int(text) if len(text) <= _MAX_INTEGER_DIGITS else text

    def number(self, children: list[Any]) -> float:
        return float(children[0])

    def string(self, children: list[Any]) -> str:
        return str(children[0])[1:-1]

    def constant(self, children: list[Any]) -> Any:
        return _CONSTANTS.get(str(children[0]), str(children[0]))

    def values(self, children: list[Any]) -> tuple[Any, ...]:
        return tuple(c for c in children if c is not None)

    def machine(self, children: list[Any]) -> MachineRecord:
        keyword, *lines = children
        return MachineRecord(keyword.line, tuple(str(line)[1:].removeprefix(" ").rstrip(" \t\r") for line in lines))

    def pipeline(self, children: list[Any]) -> PipelineRecord:
        return PipelineRecord(children[0].line, str(children[0])[1:-1])

    def stage(self, children: list[Any]) -> StageRecord:
        return StageRecord(str(children[0])[1:], children[0].line, children[1:])

    def carried(self, children: list[Any]) -> bool:
        return children[0] is not None

    def offset(self, children: list[Any]) -> str | None:
        return None if children[0] is None else str(children[0])

    home = offset

    def declaration(self, children: list[Any]) -> DeclarationRecord:
        kind, name, type_text, carried, home, offset = children
        return DeclarationRecord(str(kind), str(name)[1:], str(type_text), carried, home, offset, kind.line)

    def tensors(self, children: list[Any]) -> list[str]:
        return [str(token)[1:] for token in children]

    def fields(self, children: list[Any]) -> list[str]:
        return [str(token) for token in children]

    def reads(self, children: list[Any]) -> list[str]:
        return children[0] or []

    scratch = reads

    def call(self, children: list[Any]) -> list[Any]:
        return children

    def op(self, children: list[Any]) -> OpRecord:
        return _op_record([], [], children[0])

    def defining_op(self, children: list[Any]) -> OpRecord:
        return _op_record(children[0], [], children[1])

    def updating_op(self, children: list[Any]) -> OpRecord:
        return _op_record([], children[0], children[1])

    def defining_and_updating_op(self, children: list[Any]) -> OpRecord:
        return _op_record(children[0], children[1], children[2])


def _op_record(writes: list[str], updates: list[str], call: list[Any]) -> OpRecord:
    keyword, words, reads, scratch = call
    return OpRecord(str(keyword), words, writes, updates, reads, scratch, keyword.line)


_CONSTANTS = {"true": True, "false": False, "none": None}
_MAX_INTEGER_DIGITS = 20  # a seed may have 19; a longer one stays a text, which the field refuses

_TERMINALS = {
    "TENSOR": "a tensor (%name)",
    "SYMBOL": "a symbol (@name)",
    "TYPE": "a type like f16[2048, 4096]",
    "HEX": "an offset like 0x1000",
    "INT": "a number",
    "FLOAT": "a number",
    "NAME": "a word",
    "STRING": "a quoted text",
    "_NL": "the end of the line",
    "CARRIED": "'carried'",
    "VERBATIM": "a line of the machine's text ('| ...')",
    "COMMA": "','",
    "COLON": "':'",
    "EQUAL": "'='",
    "LPAR": "'('",
    "RPAR": "')'",
    "LBRACE": "'{'",
    "RBRACE": "'}'",
    "LSQB": "'['",
    "RSQB": "']'",
    "$END": "the end of the file",
    "__ANON_0": "'+='",
}

_MISTAKES = {
    "the tensor's type is missing: write '%name : f16[...]'": ["view %w carried", "view %w"],
    "a ',' is missing between two tensors": ["release (%a %b)"],
    "the list of tensors is not closed with ')'": ["release (%a", "release (%a, %b"],
    "the stage above is not closed: write '}' before the next stage": ["stage @1 {"],
    "an offset is written 'at 0x...'": ["view %w : f16[1] 0x10", "view %w : f16[1] at 16"],
}
_FRAMES = [  # Lark compares the depth of the parser's stack, which is larger after a header or a statement
    f"rtir 2\nmodule @m level placed {{\n{header}  stage @0 {{\n{statement}    MISTAKE\n  }}\n}}\n"
    for header in ("", "  plan { pp = 1 }\n")
    for statement in ("", "    release (%z)\n")
]


@cache
def _lark() -> Lark:
    return Lark(grammar_text(), parser="lalr", transformer=_Records(), maybe_placeholders=True)


@cache
def terminals() -> dict[str, str]:
    """Return the regular expression of each terminal of the grammar, by name."""
    return {terminal.name: terminal.pattern.to_regexp() for terminal in _lark().terminals}


def parse_records(text: str) -> ModuleRecord:
    """Parse a whole file.

    Raises lark's `UnexpectedInput` at the first syntax error; `explain` turns it into a diagnostic.
    """
    return _lark().parse(text if text.endswith("\n") else text + "\n")  # type: ignore[return-value]


def ends_early(error: UnexpectedInput) -> bool:
    """Tell whether a text ended where more was expected."""
    return isinstance(error, UnexpectedToken) and error.token.type == "$END"


def explain(error: UnexpectedInput, file: str, lines: tuple[str, ...]) -> Diagnostic:
    """Translate a syntax error into a diagnostic: the word found, the words expected, help for common mistakes."""
    line, column = error.line, error.column
    if not 1 <= line <= len(lines):  # at the end of the file
        line, column = max(1, len(lines)), len(lines[-1]) + 1 if lines else 1
    expected: set[str] = set()
    found = "the end of the file"
    length = 1
    if isinstance(error, UnexpectedCharacters):
        expected = set(error.allowed or ())
        found = f"'{error.char}'"
    elif isinstance(error, UnexpectedToken):
        expected = set(error.accepts or error.expected)
        if error.token.type == "_NL":
            found = "the end of the line"
            column = len(lines[line - 1].rstrip()) + 1
        elif error.token.type != "$END":
            found = f"'{error.token}'"
            length = len(str(error.token))
    words = sorted({_TERMINALS.get(name, f"'{name.lower()}'") for name in expected})
    message = f"unexpected {found}" + (f", expected {_either(words)}" if words else "")
    return Diagnostic(
        "RT001",
        message,
        Location(file, line, column, length),
        help=_hint(error),
        source=lines[line - 1] if lines else "",
    )


def _hint(error: UnexpectedInput) -> str | None:
    """Return the help for the example mistake that stops the parser in the same state, if there is one."""
    try:
        return error.match_examples(_lark().parse, _examples(), token_type_match_fallback=True)
    except (
        TypeError
    ):  # a fault of Lark's log message, where an example stops in the same state with other continuations
        return None


@cache
def _examples() -> dict[str, list[str]]:
    """Return whole files with one mistake each, by the help for the mistake."""
    return {
        label: [frame.replace("MISTAKE", mistake) for frame in _FRAMES for mistake in mistakes]
        for label, mistakes in _MISTAKES.items()
    }


def _either(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"

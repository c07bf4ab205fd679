"""Fast reader of the records of `ratrain.ratrain_ir.text.syntax`: one regular expression for each statement.

Lark reads only the frame of the text: the head of the module, its sections, and the stages with their bodies blanked
out. The expressions are built from the grammar's own terminals, and accept a subset of its language. A statement in
another layout than the printer's, or with a mistake, raises `UnusualTextError`; the caller then has Lark read or refuse
the whole text. Declarations that repeat the kind and type of an earlier one are read without an expression
(`_Declarations`). The time is linear in the text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

from attrs import define, evolve, field, frozen

from ratrain.ratrain_ir.text.syntax import (
    DeclarationRecord,
    ModuleRecord,
    OpRecord,
    StageRecord,
    StatementRecord,
    parse_records,
    terminals,
)


class UnusualTextError(ValueError):
    """Error of a text with a syntax error, or in a layout that only the grammar reads."""


@frozen
class _Patterns:
    """Expressions of the lines of a stage. No line fits two of them."""

    begin: re.Pattern[str]
    end: re.Pattern[str]
    declaration: re.Pattern[str]
    op: re.Pattern[str]
    empty: re.Pattern[str]
    no_name: re.Pattern[str]
    """finds a line that is not a valid name of a tensor (without its sigil)"""
    no_offset: re.Pattern[str]


@cache
def _patterns() -> _Patterns:
    patterns = terminals()
    name, symbol, tensor = patterns["NAME"], patterns["SYMBOL"], patterns["TENSOR"]
    tensors = f"{tensor}(?:, {tensor})*"
    # The words of an op end at `using`, which would otherwise be taken for one.
    words = rf"(?: (?!using(?:\s|/|$))(?:{name}|{symbol}))*"
    rest = r"[ \t\r]*(?://.*)?"  # blanks and a comment; statements never contain '/'
    return _Patterns(
        begin=re.compile(rf"[ \t]*stage {symbol} \{{{rest}"),
        end=re.compile(rf"[ \t]*\}}{rest}"),
        declaration=re.compile(
            rf"[ \t]*(?P<kind>{name}) (?P<name>{tensor}) : (?P<type>{patterns['TYPE']})(?P<carried> carried)?"
            rf"(?: in (?P<home>{name}))?"
            rf"(?: at (?P<offset>{patterns['HEX']}))?{rest}"
        ),
        op=re.compile(
            rf"[ \t]*(?:(?P<writes>{tensors}) = )?(?:(?P<updates>{tensors}) \+= )?(?P<keyword>{name})(?P<words>{words})"
            rf"(?: \((?P<reads>{tensors})\))?(?: using (?P<scratch>{tensors}))?{rest}"
        ),
        empty=re.compile(rest),
        no_name=re.compile(rf"^(?!{tensor.removeprefix('%')}$)", re.MULTILINE),
        no_offset=re.compile(rf"^(?!{patterns['HEX']}$)", re.MULTILINE),
    )


def quick_records(lines: Sequence[str]) -> ModuleRecord:
    """Return the records of a text. Its stages can be iterated once; each is read when its turn comes.

    Raises `UnusualTextError`, also during that iteration, or Lark's `UnexpectedInput`.
    """
    bodies = _bodies(lines)
    frame = list(lines)
    for body in bodies:
        frame[body.start : body.stop] = [""] * len(body)
    record = parse_records("\n".join(frame))
    # Lark must have found the same stages: a line that looks like a stage may be part of a machine's text, for example.
    if [stage.line for stage in record.stages] != [body.start for body in bodies]:
        raise UnusualTextError
    stages = (
        StageRecord(stage.index, stage.line, _statements(lines, body))
        for stage, body in zip(record.stages, bodies, strict=True)
    )
    return evolve(record, stages=stages)


def _bodies(lines: Sequence[str]) -> list[range]:
    """Return the line indices (from 0) inside each stage.

    So `start` of a range is also the number, from 1, of the stage's own line.
    """
    patterns = _patterns()
    bodies: list[range] = []
    start: int | None = None
    for index, line in enumerate(lines):
        if start is None:
            if patterns.begin.fullmatch(line):
                start = index + 1
        elif "}" in line and patterns.end.fullmatch(line):
            bodies.append(range(start, index))
            start = None
    return bodies


def _statements(lines: Sequence[str], body: range) -> list[StatementRecord]:
    patterns = _patterns()
    declaration, op, empty = patterns.declaration.fullmatch, patterns.op.fullmatch, patterns.empty.fullmatch
    alike = _Declarations()
    statements: list[StatementRecord] = []
    for index in body:
        line = lines[index]
        if record := alike.record(line, index + 1):
            statements.append(record)
        elif match := declaration(line):
            record = _declaration_record(match, index + 1)
            alike.learn(line, record)
            statements.append(record)
        elif match := op(line):
            statements.append(_op_record(match, index + 1))
        elif not empty(line):
            raise UnusualTextError
    alike.check()
    return statements


def quick_statement(line: str, number: int) -> StatementRecord:
    """Return the record of one line. Raises `UnusualTextError` unless it is a statement in the usual layout."""
    if match := _patterns().declaration.fullmatch(line):
        return _declaration_record(match, number)
    if match := _patterns().op.fullmatch(line):
        return _op_record(match, number)
    raise UnusualTextError


def _declaration_record(match: re.Match[str], number: int) -> DeclarationRecord:
    kind, name, type_, carried, home, offset = match.group("kind", "name", "type", "carried", "home", "offset")
    return DeclarationRecord(kind, name[1:], type_, carried is not None, home, offset, number)


def _op_record(match: re.Match[str], number: int) -> OpRecord:
    keyword, words, *operands = match.group("keyword", "words", "writes", "updates", "reads", "scratch")
    writes, updates, reads, scratch = [text[1:].split(", %") if text else [] for text in operands]
    return OpRecord(keyword, words.split(), writes, updates, reads, scratch, number)


@define
class _Declarations:
    """Reader of declarations that differ from earlier ones only in name and offset.

    Names and offsets are collected, and checked together by one search at the end (`check`).
    """

    kinds: dict[str, str] = field(factory=dict)
    """kind by the text before a name"""
    forms: dict[str, tuple[str, bool, str | None]] = field(factory=dict)
    """type, carried and home by the text between name and offset"""
    names: list[str] = field(factory=list)
    offsets: list[str] = field(factory=list)

    def learn(self, line: str, record: DeclarationRecord) -> None:
        """Remember the parts of a declaration other than name and offset, if it has no comment or trailing blanks."""
        before, _, after = line.partition(" : ")
        if "/" not in line and line == line.rstrip():
            self.kinds[before.partition(" %")[0]] = record.kind
            self.forms[after.partition(" at ")[0]] = record.type, record.carried, record.home

    def record(self, line: str, number: int) -> DeclarationRecord | None:
        """Return the record of a line made of known parts, else None.

        Its name and its offset are not checked yet.
        """
        before, colon, after = line.partition(" : ")
        if not colon:
            return None
        start, _, name = before.partition(" %")
        known, at, offset = after.partition(" at ")
        kind, form = self.kinds.get(start), self.forms.get(known)
        if kind is None or form is None:
            return None
        self.names.append(name)
        if not at:
            return DeclarationRecord(kind, name, *form, None, number)
        self.offsets.append(offset)
        return DeclarationRecord(kind, name, *form, offset, number)

    def check(self) -> None:
        """Raise `UnusualTextError` if a collected name or offset is invalid."""
        patterns = _patterns()
        for texts, wrong in (self.names, patterns.no_name), (self.offsets, patterns.no_offset):
            if texts and wrong.search("\n".join(texts)):
                raise UnusualTextError

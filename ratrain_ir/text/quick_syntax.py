"""The records of `ratrain.ratrain_ir.text.syntax` at many times the speed: one regular expression a statement.

Lark reads what stands around the statements: the head of the module, its sections, the stages without their content. The
expressions are made of the grammar's own terminals. They only accept: a statement in another layout than usual, or with a
mistake, raises `UnusualTextError`, and the whole text is for Lark to read or to refuse.
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
    """A text in a layout that only the grammar knows, or with a syntax error."""


@frozen
class _Patterns:
    """What the lines of a stage look like. No line fits two of them."""

    begin: re.Pattern[str]
    end: re.Pattern[str]
    declaration: re.Pattern[str]
    op: re.Pattern[str]
    empty: re.Pattern[str]
    no_name: re.Pattern[str]
    """a line that is no name of a tensor, which stands without its sigil"""
    no_offset: re.Pattern[str]


@cache
def _patterns() -> _Patterns:
    patterns = terminals()
    name, symbol, tensor = patterns["NAME"], patterns["SYMBOL"], patterns["TENSOR"]
    tensors = f"{tensor}(?:, {tensor})*"
    words = rf"(?: (?!using(?:\s|/|$))(?:{name}|{symbol}))*"
    rest = r"[ \t\r]*(?://.*)?"  # blanks and a comment; no statement has a '/' of its own
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
    """The records of a text. Its stages can be gone through once: each is read when its turn comes.

    Raises `UnusualTextError`, also while going through the stages, or Lark's `UnexpectedInput`.
    """
    bodies = _bodies(lines)
    frame = list(lines)
    for body in bodies:
        frame[body.start : body.stop] = [""] * len(body)
    record = parse_records("\n".join(frame))
    if [stage.line for stage in record.stages] != [body.start for body in bodies]:
        raise UnusualTextError
    stages = (
        StageRecord(stage.index, stage.line, _statements(lines, body))
        for stage, body in zip(record.stages, bodies, strict=True)
    )
    return evolve(record, stages=stages)


def _bodies(lines: Sequence[str]) -> list[range]:
    """The lines inside each stage, as indices. A stage's own line has the number of the first one, counted from 1."""
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
    """The record of one line. Raises `UnusualTextError` where it is no statement in the usual layout."""
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
    """Declarations that differ from earlier ones in name and offset alone, read without the expression of a whole line."""

    kinds: dict[str, str] = field(factory=dict)
    """by what stands before a name"""
    forms: dict[str, tuple[str, bool, str | None]] = field(factory=dict)
    """by what stands between a name and an offset: type, whether carried, home"""
    names: list[str] = field(factory=list)
    offsets: list[str] = field(factory=list)

    def learn(self, line: str, record: DeclarationRecord) -> None:
        """What a declaration begins with and what it says of its tensor, if nothing follows that counts for nothing."""
        before, _, after = line.partition(" : ")
        if "/" not in line and line == line.rstrip():
            self.kinds[before.partition(" %")[0]] = record.kind
            self.forms[after.partition(" at ")[0]] = record.type, record.carried, record.home

    def record(self, line: str, number: int) -> DeclarationRecord | None:
        """The declaration in a line made of what is known; its name and its offset are still to be checked."""
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
        """Raise `UnusualTextError` where a name or an offset is none."""
        patterns = _patterns()
        for texts, wrong in (self.names, patterns.no_name), (self.offsets, patterns.no_offset):
            if texts and wrong.search("\n".join(texts)):
                raise UnusualTextError

r"""Examples and tables of `--help` that fit eighty columns: long commands are continued, remarks stand above them.

    ratrainc compile --model M --plan P.toml -o x.rtx    if P fits

becomes, where that is too wide:

    # if P fits
    ratrainc compile --model M --plan P.toml \
        -o x.rtx

A command is broken only between options, and a remark behind one is a comment of the shell, so what is shown can still
be typed. Rows of tables are wrapped in their last column, or below it where that begins too far right; lines of prose
as paragraphs.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator

HELP_WIDTH = 78
"""Columns of a help text, less the indentation that is put before it."""
_COMMAND = re.compile(r"\s*((\w+=\S+ )?(ratrainc|mpirun|torchrun|python|srun) .*?)(?:\s{2,}(\S.*))?$")
_ROW = re.compile(r"(\s*\S.*\s{3,})(\S.*)$")
_NO_PROSE = re.compile(r"\S\s{2,}\S|^\s*\S+,\S+,\S+,\S")
"""In rows of tables: columns, and values between commas."""
_BREAK = re.compile(r" (?=-{1,2}[a-z]|&& )")
_LEAST = 20
"""Columns that the last column of a table has at least."""
_FAR = 40
"""Columns of indentation from which on a line goes on with the remark of the line before."""


def fitted(text: str) -> str:
    """Return a text of examples, tables and prose with no line wider than help may be, but for single words."""
    return "\n".join(_lines(_joined(text.split("\n"))))


def _joined(lines: list[str]) -> list[str]:
    """Join a remark that goes on in the next line."""
    joined: list[str] = []
    for line in lines:
        is_rest = len(line) - len(line.lstrip()) >= _FAR
        if is_rest and joined and (found := _COMMAND.match(joined[-1])) is not None and found[4]:
            joined[-1] += f" {line.strip()}"
        else:
            joined.append(line)
    return joined


def _lines(lines: list[str]) -> Iterator[str]:
    prose: list[str] = []
    for line in lines:
        is_prose = line.strip() not in ("", "\b") and not _NO_PROSE.search(line) and not _COMMAND.match(line)
        if prose and (not is_prose or _indent(line) != _indent(prose[0])):
            yield from _paragraph(prose)
            prose = []
        if is_prose:
            prose.append(line)
        else:
            yield from _fitted_line(line)
    yield from _paragraph(prose)


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _paragraph(lines: list[str]) -> list[str]:
    if max(map(len, lines), default=0) <= HELP_WIDTH:
        return lines
    return textwrap.wrap(
        " ".join(line.strip() for line in lines),
        HELP_WIDTH,
        initial_indent=_indent(lines[0]),
        subsequent_indent=_indent(lines[0]),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _fitted_line(line: str) -> list[str]:
    indent = _indent(line)
    if (command := _COMMAND.match(line)) is not None:
        remark = (command[4] or "").removeprefix("# ")
        whole = f"{line[: command.start(4)]}# {remark}" if remark else line
        if len(whole) <= HELP_WIDTH:
            return [whole]
        parts = textwrap.wrap(remark, HELP_WIDTH - len(indent) - 2)
        return [*(f"{indent}# {part}" for part in parts), *_continued(command[1], indent)]
    row = _ROW.match(line)
    if len(line) <= HELP_WIDTH or row is None:
        return [line]
    if len(row[1]) > HELP_WIDTH - _LEAST:
        below = f"{indent}    "
        return [row[1].rstrip(), *textwrap.wrap(row[2], HELP_WIDTH, initial_indent=below, subsequent_indent=below)]
    return textwrap.wrap(row[2], HELP_WIDTH, initial_indent=row[1], subsequent_indent=" " * len(row[1]))


def _continued(command: str, indent: str) -> Iterator[str]:
    """Yield a command in lines that end in a backslash but for the last."""
    line = indent
    for part in _BREAK.split(command):
        if line.strip() and len(line) + len(part) + len(" \\") + 1 > HELP_WIDTH:
            yield f"{line} \\"
            line = f"{indent}    {part}"
        else:
            line = f"{line} {part}" if line.strip() else f"{indent}{part}"
    yield line

r"""Examples and notes of help pages, which are written as they stand, brought to the width of a terminal.

A line that is too wide becomes a command that can be copied, with its remark under it:

    ratrainc run a.rtx --steps 9 --interleave 7    another order

    ratrainc run a.rtx --steps 9 \
        --interleave 7
        (another order)
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from itertools import groupby

import click

_AS_IT_STANDS = "\b"
_COMMAND = re.compile(r"(\S+=\S+ )*(ratrainc|mpirun|torchrun|python) ")
_COLUMNS = re.compile(r"\S {2,}(?=\S)")
_WORD = re.compile(r"""(?:[^\s"']|"[^"]*"|'[^']*')+""")
_HANGING = 4
_REMARKS = 20
"""Columns to the left of a line that only goes on with a remark."""
_FEWEST_WORDS = 4
"""Words of a line of prose; a line of fewer is a row of a table, which has no place to break."""


class HelpFormatter(click.HelpFormatter):
    """A formatter that keeps the width in paragraphs too that click leaves as they stand."""

    def write_text(self, text: str) -> None:
        """Write paragraphs, each wrapped in its own way."""
        super().write_text(fitted(text, self.width - self.current_indent))


class HelpContext(click.Context):
    """A context whose help keeps the width of the terminal."""

    formatter_class = HelpFormatter


def fitted(text: str, width: int) -> str:
    """Bring paragraphs that are written as they stand to at most `width` columns; others are unchanged."""
    return "\n\n".join(
        "\n".join([_AS_IT_STANDS, *_lines(part.split("\n")[1:], width)]) if part.startswith(_AS_IT_STANDS) else part
        for part in text.split("\n\n")
    )


def _lines(lines: list[str], width: int) -> Iterator[str]:
    """Yield lines that fit; lines of prose that follow each other become one paragraph if one of them is too wide."""
    for (is_prose, indent), found in groupby(_whole(lines, width), lambda line: (_is_prose(line), _indent(line))):
        group = list(found)
        if all(len(line) <= width for line in group):
            yield from group
        elif is_prose:
            joined = " ".join(line.strip() for line in group)
            yield from _filled(joined, " " * indent, width)
        else:
            for line in group:
                yield from [line] if len(line) <= width else _in_two(line, width)


def _whole(lines: list[str], width: int) -> list[str]:
    """Join what goes on far to the right with the line that it belongs to, if either is too wide."""
    kept: list[str] = []
    for line in lines:
        if kept and _indent(line) >= _REMARKS and max(len(line), len(kept[-1])) > width:
            kept[-1] += f" {line.strip()}"
        else:
            kept.append(line)
    return kept


def _filled(text: str, indent: str, width: int) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _in_two(line: str, width: int) -> Iterator[str]:
    """Yield a command, broken so that it can be copied, and its remark; of a table the first cell and the rest."""
    cut = _COLUMNS.search(line, _indent(line))
    head, remark = (line, "") if cut is None else (line[: cut.start() + 1], line[cut.end() :])
    indent = " " * (_indent(line) + _HANGING)
    yield from _broken(head, width) if _COMMAND.match(head.strip()) else [head]
    if remark:
        told = f"({remark})" if _COMMAND.match(head.strip()) else remark
        yield from _filled(told, indent, width)


def _broken(command: str, width: int) -> Iterator[str]:
    """Yield the lines of a command, each but the last with the mark that it goes on."""
    indent = _indent(command)
    line = " " * indent
    is_empty = True
    for word in _WORD.findall(command):
        if not is_empty and len(line) + 1 + len(word) > width - 2:
            yield f"{line} \\"
            line, is_empty = " " * (indent + _HANGING), True
        line, is_empty = f"{line}{word}" if is_empty else f"{line} {word}", False
    yield line


def _is_prose(line: str) -> bool:
    plain = line.strip()
    return len(plain.split()) >= _FEWEST_WORDS and _COLUMNS.search(plain) is None and _COMMAND.match(plain) is None


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())

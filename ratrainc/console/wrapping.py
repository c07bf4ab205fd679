"""Lines that fit a terminal: prose is wrapped at words, and a table that is too wide becomes lines per row."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

_WORD = re.compile(r"('ratrainc [^'\n]*'|\S+)(\s*)")
"""A word and the space after it. A quoted command is one word, so that it can be copied whole."""
_HANGING = 2


def wrapped(text: str, width: int | None) -> str:
    """Break a text between words into lines of at most `width` characters; longer words stay whole. None: unchanged."""
    if width is None:
        return text
    return "\n".join(part for line in text.split("\n") for part in _parts(line, width))


def _parts(line: str, width: int) -> Iterator[str]:
    if len(line) <= width:
        yield line
        return
    indent = len(line) - len(line.lstrip())
    hanging = " " * min(indent + _HANGING, width // 2)
    kept, gap = line[:indent], ""
    is_empty = True
    for match in _WORD.finditer(line, indent):
        if not is_empty and len(kept) + len(gap) + len(match[1]) > width:
            yield kept
            kept, gap = hanging, ""
        kept, gap, is_empty = kept + gap + match[1], match[2], False
    yield kept


def records(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    """Yield the rows of a too wide table as lines: the first cell, then the others with their columns' names."""
    for head, *cells in rows:
        yield wrapped(head, width)
        named = [(name, cell) for name, cell in zip(columns[1:], cells, strict=True) if cell]
        texts = [cell if len(columns) == 2 or not name else f"{name} {cell}" for name, cell in named]
        line = " " * _HANGING
        for text in texts:
            if line.strip() and len(line) + len(text) > width:
                yield line.rstrip()
                line = " " * _HANGING
            line += f"{text}  "
            if len(line.rstrip()) > width:
                yield wrapped(line.rstrip(), width)
                line = " " * _HANGING
        if line.strip():
            yield line.rstrip()

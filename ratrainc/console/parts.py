"""Results as tables and sentences, shown alike on a terminal, as plain text and in a notebook."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from html import escape

from attrs import frozen

from ratrain.ratrainc.console.console import PlainConsole, rich_table, say, shortened, table

MOST_ROWS = 64
"""Default for the most rows of a table; the middle of a longer one is left out."""


@frozen
class TextTable:
    """A table of texts: the first column to the left, the others to the right."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    most: int = MOST_ROWS
    """rows that are shown"""


Part = TextTable | str


class Shown:
    """A result with the same content in a command, in `print`, at a prompt and in a notebook.

    Its class is an attrs class with `repr=False`.
    """

    __slots__ = ()

    def parts(self) -> Iterable[Part]:
        """Yield tables and sentences in order."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return text_of(self.parts())

    def html(self) -> str:
        """Return the HTML that a notebook shows."""
        return html_of(self.parts())

    def _repr_html_(self) -> str:
        return self.html()


def show(parts: Iterable[Part]) -> None:
    """Write parts to stdout, fitted to its width."""
    for part in parts:
        if isinstance(part, str):
            say(part)
        else:
            table(part.title, part.columns, part.rows, most=part.most)


def text_of(parts: Iterable[Part]) -> str:
    """Return parts as lines of text of any width."""
    lines: list[str] = []
    for part in parts:
        if isinstance(part, str):
            lines.append(part)
            continue
        written = io.StringIO()
        PlainConsole(file=written, width=_WIDEST).print(rich_table(part.columns, part.rows, most=part.most))
        lines += [part.title, *(line.rstrip() for line in written.getvalue().rstrip("\n").split("\n"))]
    return "\n".join(lines)


_WIDEST = 1 << 16


def html_of(parts: Iterable[Part]) -> str:
    """Return parts as HTML, without styles except the alignment of columns."""
    return f"<div>{''.join(_html(part) for part in parts)}</div>"


def _html(part: Part) -> str:
    if isinstance(part, str):
        return f"<p>{escape(part)}</p>"
    head = "".join(_cell("th", index, name) for index, name in enumerate(part.columns))
    rows = shortened(part.columns, part.rows, part.most)
    body = "".join(f"<tr>{''.join(_cell('td', at, cell) for at, cell in enumerate(row))}</tr>" for row in rows)
    return f"<table><caption>{escape(part.title)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(tag: str, column: int, text: str) -> str:
    side = "left" if column == 0 else "right"
    return f'<{tag} style="text-align:{side}">{escape(text)}</{tag}>'

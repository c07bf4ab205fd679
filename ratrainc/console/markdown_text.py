"""Markdown in lines of limited length, and users' texts in it: escaped, or as prose without HTML."""

from __future__ import annotations

import re
import textwrap

WIDTH = 119
"""Characters of a line."""
_LIST_ITEM = re.compile(r"(- |[0-9]+\. )")
_WOULD_BE_MARKUP = re.compile(r" (?=([-+*#>|]|[0-9]+\.)( |$))")
"""A space before characters that are markup at the beginning of a line."""
_CODE = re.compile(r"`[^`]{1,100}`")


_MARKUP = re.compile(r"[\\`*\[\]<>&|]|(?<!\w)_|_(?!\w)")


def escaped(text: str) -> str:
    """Escape a text so that Markdown shows it literally, on one line: no markup, no HTML."""
    return _MARKUP.sub(lambda mark: _ENTITIES.get(mark[0], f"\\{mark[0]}"), " ".join(text.split()))


_ENTITIES = {"<": "&lt;", ">": "&gt;", "&": "&amp;"}
_PIECE = re.compile(
    r"(?P<code>(?P<ticks>`+)(?!`).*?(?<!`)(?P=ticks)(?!`))"  # a span of code ends with as many ticks as it begins with
    r"|\\.|`+|[^\\`]+|\\",  # an escaped tick begins none
    re.DOTALL,
)


def prose(paragraph: str) -> str:
    """Escape the HTML of a Markdown paragraph: tags appear as text. Code stays unchanged, as it shows them anyway."""
    pieces = _PIECE.finditer(paragraph)
    return "".join(piece[0] if piece["code"] else piece[0].replace("<", "&lt;") for piece in pieces)


def wrapped(text: str) -> str:
    """Wrap paragraphs and list items of Markdown at `WIDTH` characters.

    Code (fenced or indented), tables and headings stay unchanged, as they cannot be broken.
    """
    lines: list[str] = []
    paragraph: list[str] = []
    fenced = False

    def flush() -> None:
        lines.extend(_filled(paragraph))
        paragraph.clear()

    for line in text.split("\n"):
        fenced ^= line.startswith("```")
        in_list = bool(paragraph) and _LIST_ITEM.match(paragraph[0])
        if fenced or not line or line.startswith(("```", "|", "#", "<!--")) or (line[0] == " " and not in_list):
            flush()
            lines.append(line)
            continue
        if _LIST_ITEM.match(line):
            flush()
        paragraph.append(line)
    flush()
    return "\n".join(lines)


def _filled(paragraph: list[str]) -> list[str]:
    """Wrap the lines of one paragraph or list item again if one is too long or ends inside inline code."""
    if all(len(line) <= WIDTH and line.count("`") % 2 == 0 for line in paragraph):
        return paragraph
    text = " ".join(line.strip() for line in paragraph)
    text = _CODE.sub(lambda code: code[0].replace(" ", "\0"), _WOULD_BE_MARKUP.sub("\0", text))
    item = _LIST_ITEM.match(paragraph[0])
    indent = " " * len(item[0]) if item else ""
    filled = textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\0", " ") for line in filled]

"""Markdown in lines of a bounded length."""

from __future__ import annotations

import re
import textwrap

WIDTH = 119
"""Characters of a line."""
_LIST_ITEM = re.compile(r"(- |[0-9]+\. )")
_WOULD_BE_MARKUP = re.compile(r" (?=([-+*#>|]|[0-9]+\.)( |$))")
"""The space before what must not begin a line."""
_CODE = re.compile(r"`[^`]{1,100}`")


def wrapped(text: str) -> str:
    """Markdown with its paragraphs and list items in lines of at most `WIDTH` characters; all else as it is.

    Code, fenced or indented, tables and headings cannot be broken.
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
    """The lines of one paragraph or list item, broken anew where one is too long or ends amid code."""
    if all(len(line) <= WIDTH and line.count("`") % 2 == 0 for line in paragraph):
        return paragraph
    text = " ".join(line.strip() for line in paragraph)
    text = _CODE.sub(lambda code: code[0].replace(" ", "\0"), _WOULD_BE_MARKUP.sub("\0", text))
    item = _LIST_ITEM.match(paragraph[0])
    indent = " " * len(item[0]) if item else ""
    filled = textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\0", " ") for line in filled]

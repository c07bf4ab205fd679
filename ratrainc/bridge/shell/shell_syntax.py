"""Parsing of bash, by the grammar that editors use (tree-sitter-bash)."""

from __future__ import annotations

import re
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.ratrain_ir.support.text import shown

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tree_sitter import Node, Parser

    from ratrain.ratrainc.bridge.shell.shell_text import Script

_ESCAPED = re.compile(r"\\[^\w'`\n]")
"""Escaped characters that stand for themselves wherever a backslash has an effect; single quotes keep them."""
_BACKQUOTED = re.compile(r"`[^`\n]*`")
_NOTHING = re.compile(r"(?<!\S)(?:`[ \t]*(?:#[^`\n]*)?`|\$\(\s*(?:#[^\n]*\n\s*)*\))(?!\S)")
"""Words that run nothing, such as comments in backquotes between lines; the grammar takes them for broken commands."""
_LAST_BACKSLASH = re.compile(r"\\(?=(?:\n\s*)?\Z)")


@cache
def _parser() -> Parser:
    import tree_sitter_bash
    from tree_sitter import Language, Parser

    return Parser(Language(tree_sitter_bash.language()))


def parse(script: Script) -> Node:
    """Parse a script; indices of nodes count characters of its text. Raises `DiagnosticError` RT063 for a syntax error.

    The grammar misreads some texts. So it gets a copy of the same length, with a letter or a blank in place of:
    characters outside ASCII (letters to a shell; one byte each in the copy), escaped characters, commands in backquotes
    within a word, words that run nothing, and a backslash at the end of the file.
    """
    # Each step keeps the length: indices into the copy are indices into the script.
    text = "".join(each if each < "\x80" else "_" for each in script.text)
    text = _NOTHING.sub(lambda match: " " * len(match[0]), text)
    text = _ESCAPED.sub("..", _LAST_BACKSLASH.sub(" ", text))
    text = _BACKQUOTED.sub(_in_word, text)
    root = _parser().parse(text.encode("ascii")).root_node
    # A repair can show the next misreading. It removes its own cause, so the loop ends.
    while repairs := {**_lost(root, text), **_joined(root, text)}:
        letters = list(text)
        for at, letter in repairs.items():
            letters[at] = letter
        text = "".join(letters)
        root = _parser().parse(text.encode("ascii")).root_node
    if root.has_error:
        wrong = next((node for node in walk(root) if node.is_error or node.is_missing), root)
        place = script.place(wrong.start_byte, max(wrong.end_byte, wrong.start_byte + 1))
        part = script.text[wrong.start_byte : wrong.end_byte].strip()
        reason = f"{wrong.type} is missing" if wrong.is_missing else f"{shown(part)} does not fit"
        fail("RT063", f"the file is no shell text: {reason}", place.location, source=place.source)
    return root


def _in_word(match: re.Match[str]) -> str:
    """Return letters in place of a command in backquotes that continues a word; the grammar would end the word."""
    before = match.string[match.start() - 1 : match.start()]
    return "." * len(match[0]) if before and (before.isalnum() or before in "_/.-:}") else match[0]


def _lost(root: Node, text: str) -> dict[int, str]:
    """Return a letter, by place, for each `$` that the grammar splits from its variable (tree-sitter-bash 0.25).

    The grammar ends a word there, as before `$B` in `$A/$B.c`. With the letter in place of `$` it reads one word; the
    expander finds the variable in the script's own text.
    """
    return {
        child.start_byte: "."
        for node in walk(root)
        if node.type == "concatenation"
        for child in node.children
        if child.type == "$" and re.match(r"\w", text[child.end_byte : child.end_byte + 1])
    }


def _joined(root: Node, text: str) -> dict[int, str]:
    """Return a `;`, by place, for each line of assignments that the grammar adds to the next line's command."""
    found: dict[int, str] = {}
    for node in walk(root):
        children = [each for each in node.children if each.type != "comment"] if node.type == "command" else []
        for child, after in pairwise(children):
            between = text[child.end_byte : after.start_byte]
            if child.type == "variable_assignment" and "\n" in between.replace("\\\n", "") and between[0] != ";":
                found[child.end_byte] = ";"
    return found


def walk(node: Node) -> Iterator[Node]:
    """Yield a node and everything under it, in the order of the text."""
    nodes = [node]
    while nodes:
        node = nodes.pop()
        yield node
        nodes += reversed(node.children)


def source_of(node: Node, script: Script) -> str:
    """Return the source text of a node."""
    return script.text[node.start_byte : node.end_byte]

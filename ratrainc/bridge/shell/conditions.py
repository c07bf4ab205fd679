"""Conditions of the shell: `[ ... ]`, `[[ ... ]]`, `test`, `((...))` and the patterns of `case`."""

from __future__ import annotations

import operator
import re
from typing import TYPE_CHECKING

from attrs import evolve

from ratrain.ratrainc.bridge.shell.path_state import CommandOutcome
from ratrain.ratrainc.bridge.shell.patterns import matches
from ratrain.ratrainc.bridge.shell.shell_syntax import source_of
from ratrain.ratrainc.bridge.shell.shell_text import Text, Unknown, literal

if TYPE_CHECKING:
    from collections.abc import Callable

    from tree_sitter import Node

    from ratrain.ratrainc.bridge.shell.words import Expander

_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}
_TEXTS = {"=", "==", "!=", "<", ">", "=~"}
_OPERATORS = {*_NUMBERS, *_TEXTS, "&&", "||", "-a", "-o", "-nt", "-ot", "-ef"}
_LITERAL = re.compile(r"[^*?\[\]\\$]*")


class Conditions:
    """Evaluation of conditions of one script in one state."""

    def __init__(self, expander: Expander) -> None:
        self.expander = expander

    def answer(self, node: Node) -> CommandOutcome:
        """Evaluate a node `test_command`: `[ ... ]`, `[[ ... ]]` or `((...))`."""
        shown = " ".join(source_of(node, self.expander.script).split())
        inner = [child for child in node.children if child.type not in ("[", "]", "[[", "]]", "((", "))")]
        place = self.expander.script.place(node.start_byte, node.end_byte)
        if node.children and node.children[0].type == "((":
            found = self.number(node)
        elif len(inner) == 1:
            found = self._expression(inner[0], double=node.children[0].type == "[[")
        else:
            found = _known(value=False) if not inner else CommandOutcome(None, key=(shown, "odd"))
        return evolve(found, shown=shown, place=place)

    def number(self, node: Node) -> CommandOutcome:
        """Evaluate `((...))`: true unless its value is 0."""
        begin, stop = node.start_byte + 2, node.end_byte - 2
        text = self.expander.range(node, begin, stop)
        value = self.expander.whole(text)
        if isinstance(value, int):
            return _known(value=value != 0)
        return CommandOutcome(None, key=("((", text.key), because=value)

    def words(self, words: list[Text]) -> CommandOutcome:
        """Evaluate `test` with these words, without brackets."""
        if words and words[0].shown == "!":
            return self.words(words[1:]).other()
        if len(words) == 1:
            return self._filled(words[0])
        if len(words) == 2:
            return self._one(words[0].shown, words[1])
        if len(words) == 3:
            return self._two(words[1].shown, words[0], words[2], None)
        return CommandOutcome(None, key=tuple(each.key for each in words)) if words else _known(value=False)

    def _expression(self, node: Node, *, double: bool) -> CommandOutcome:
        kind = node.type
        if kind == "parenthesized_expression":
            inner = [child for child in node.children if child.type not in ("(", ")")]
            return self._expression(inner[0], double=double) if len(inner) == 1 else self._odd(node)
        if kind == "unary_expression" and len(node.children) == 2:
            sign = source_of(node.children[0], self.expander.script)
            if sign == "!":
                return self._expression(node.children[1], double=double).other()
            fields = self._fields(node.children[1], double=double)
            if not fields and not double:  # [ -z $A ] with nothing in A: one word, which is not empty
                return _known(value=sign != "-n") if sign in ("-z", "-n") else CommandOutcome(None, key=(sign, ""))
            return self._one(sign, fields[0] if fields else Text())
        if kind == "binary_expression" and len(node.children) == 3:
            left, sign_node, right = node.children
            sign = source_of(sign_node, self.expander.script)
            if sign in ("&&", "-a", "||", "-o"):
                return _both(
                    self._expression(left, double=double), self._expression(right, double=double), sign in ("||", "-o")
                )
            if sign in _OPERATORS:
                texts = [self._fields(each, double=double) for each in (left, right)]
                if any(len(each) > 1 for each in texts):
                    return self._odd(node)
                first, second = (each[0] if each else Text() for each in texts)
                pattern = self.expander.pattern(right) if double else None
                return self._two(sign, first, second, pattern[1] if pattern is not None else None)
            return self._odd(node)
        if kind in ("binary_expression", "unary_expression", "ternary_expression"):
            return self._odd(node)
        fields = self._fields(node, double=double)
        return self._filled(fields[0]) if len(fields) == 1 else _known(value=bool(fields))

    def _fields(self, node: Node, *, double: bool) -> list[Text]:
        return [self.expander.text(node)] if double else self.expander.fields(node)

    def _odd(self, node: Node) -> CommandOutcome:
        return CommandOutcome(None, key=("odd", source_of(node, self.expander.script)))

    def _filled(self, text: Text) -> CommandOutcome:
        return self._one("-n", text)

    def _one(self, sign: str, text: Text) -> CommandOutcome:
        key = (sign, text.key)
        if sign in ("-z", "-n"):
            unknown = text.unknown
            if unknown is None:
                return _known(value=bool(text.shown) == (sign == "-n"))
            # Never assigned in the script: taken as empty, unless the environment sets it. `-n` has the key of the
            # negated `-z`, so that a decision for one holds for the other.
            if text.sole is not None and text.sole.unset:
                return CommandOutcome(
                    sign == "-z",
                    key=("-z", text.key) if sign == "-z" else ("not", ("-z", text.key)),
                    assumed=True,
                    because=unknown,
                )
            # Some characters are known, so the text is not empty.
            if any(isinstance(each, str) for each in text.key):
                return _known(value=sign == "-n")
            answer = CommandOutcome(None, key=("-z", text.key), because=unknown)
            return answer if sign == "-z" else answer.other()
        if sign == "-v" and text.plain is not None:
            name = text.shown
            if name in self.expander.state.variables:
                return _known(value=True)
            return CommandOutcome(
                False, key=key, assumed=True, because=Unknown(name, f"{name} is not set in the file", text.place())
            )
        return CommandOutcome(None, key=key, because=text.unknown)

    def _two(self, sign: str, left: Text, right: Text, pattern: str | None) -> CommandOutcome:
        key = (sign, left.key, right.key)
        unknown = left.unknown or right.unknown
        if sign in _NUMBERS:
            return self._numbers(sign, left, right, key)
        if sign not in _TEXTS:
            return CommandOutcome(None, key=key, because=unknown)
        if unknown is None:
            return self._texts(sign, left.shown, right.shown, pattern, key)
        # If `$X = text` holds, X is known from there on (`binds`). A pattern that matches many texts does not say
        # which.
        sides = [(left, right), (right, left)] if pattern is None or _LITERAL.fullmatch(pattern) else []
        for one, other in sides:
            if sign in ("=", "==", "!=") and one.sole is not None and other.plain is not None:
                if one.sole.unset and not other.shown:
                    return CommandOutcome(sign != "!=", key=key, assumed=True, because=one.sole)
                answer = CommandOutcome(None, key=("=", one.key, other.key), because=unknown, binds=(one.sole, other))
                return answer if sign != "!=" else answer.other()
        return CommandOutcome(None, key=key, because=unknown)

    def _texts(self, sign: str, left: str, right: str, pattern: str | None, key: object) -> CommandOutcome:
        if sign == "=~":
            try:
                # The limit bounds the time of a backtracking search: a longer text does not match.
                return _known(value=len(left) < 1000 and re.search(right, left) is not None)
            except re.error:
                return CommandOutcome(None, key=key)
        if sign in ("<", ">"):
            return _known(value=left < right if sign == "<" else left > right)
        same = left == right if pattern is None else matches(left, pattern)
        return _known(value=same == (sign != "!="))

    def _numbers(self, sign: str, left: Text, right: Text, key: object) -> CommandOutcome:
        values = [self.expander.whole(each) for each in (left, right)]
        first, second = values
        if isinstance(first, int) and isinstance(second, int):
            return _known(value=_NUMBERS[sign](first, second))
        unknown = next((each for each in values if isinstance(each, Unknown)), None)
        # Without arguments on the command line, a run is taken to have none.
        if left.shown == "$#" and isinstance(second, int) and unknown is not None:
            return CommandOutcome(_NUMBERS[sign](0, second), key=key, assumed=True, because=unknown)
        binds = None
        if sign == "-eq" and left.sole is not None and isinstance(second, int):
            binds = (left.sole, literal(str(second), right))
        return CommandOutcome(None, key=key, because=unknown, binds=binds)

    def case(self, word: Text, pattern: Node) -> CommandOutcome:
        """Evaluate one pattern of `case WORD in`."""
        found = self.expander.pattern(pattern)
        shown = source_of(pattern, self.expander.script)
        place = self.expander.script.place(pattern.start_byte, pattern.end_byte)
        if found is None:
            return CommandOutcome(None, shown, place, ("case", word.key, shown))
        text, escaped = found
        # `*` matches any word, also an unknown one.
        if escaped and set(escaped) == {"*"}:
            return _known(value=True)
        if word.unknown is None:
            return _known(value=matches(word.shown, escaped))
        binds = (word.sole, text) if word.sole is not None and _LITERAL.fullmatch(escaped) else None
        return CommandOutcome(None, shown, place, ("=", word.key, text.key, escaped), word.unknown, binds)


def _known(*, value: bool) -> CommandOutcome:
    return CommandOutcome(value)


def _both(left: CommandOutcome, right: CommandOutcome, either: bool) -> CommandOutcome:
    """Combine two outcomes by `||` if `either`, else by `&&`, in three-valued logic."""
    if left.value is either or right.value is either:
        # A side that equals `either` decides alone. If both do, the result is assumed only if both are.
        decides = left if left.value is either else right
        return (
            decides
            if not (left.value is either and right.value is either)
            else evolve(decides, assumed=left.assumed and right.assumed)
        )
    if left.value is not None and right.value is not None:
        return evolve(
            right,
            assumed=left.assumed or right.assumed,
            key=(left.key, right.key, either),
            because=left.because or right.because,
        )
    if left.value is not None:
        return right
    if right.value is not None:
        return left
    return CommandOutcome(None, key=(left.key, right.key, either), because=left.because or right.because)

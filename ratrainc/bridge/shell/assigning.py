"""Assignments of shell scripts: texts, arrays, associative arrays, and additions to them (`+=`)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from attrs import evolve

from ratrain.ratrainc.bridge.shell.shell_syntax import source_of
from ratrain.ratrainc.bridge.shell.shell_text import Script, Text, Unknown, joined, literal, nothing_known

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tree_sitter import Node

    from ratrain.ratrainc.bridge.shell.path_state import PathState, Value
    from ratrain.ratrainc.bridge.shell.words import Expander


class Assigning:
    """Assignment of values to variables. Values from the command line (`--set`) replace unknown ones."""

    def __init__(self, given: Mapping[str, Text]) -> None:
        self.given = given
        self.used: set[str] = set()
        """variables that were read"""
        self.overridden: dict[str, Text] = {}
        """variables of the command line that the script sets itself, with its values"""

    def assign(self, node: Node, expander: Expander, *, by_words: bool = False) -> str:
        """Follow an assignment; return the variable's name. `by_words` makes an array literal associative."""
        script, state = expander.script, expander.state
        target, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        if target is None:
            return ""
        adds = any(each.type == "+=" for each in node.children)
        index: str | None = None
        name = source_of(target, script)
        if target.type == "subscript":
            name, _, index = name.partition("[")
            index = index.rstrip("]")
        before = state.variables.get(name)
        if adds and before is None:
            # An addition to a variable that was never set: the script relies on its being empty.
            state.assumed.setdefault(name, "")
        if value is not None and value.type == "array":
            new: Value = self._array(value, script, expander, by_words=by_words or isinstance(before, dict))
            if adds and isinstance(before, (Text, list)) and isinstance(new, list):
                new = [*([before] if isinstance(before, Text) else before), *new]
            elif adds and isinstance(before, dict) and isinstance(new, dict):
                new = before | new
        else:
            text = expander.text(value) if value is not None else Text()
            old = before if isinstance(before, Text) else None
            if index is not None:
                new = self._element(before, index, text, expander, adds=adds)
            # Without a subscript, the name of an array means its element 0.
            elif isinstance(before, list) and before:
                new = [joined([before[0], text]) if adds else text, *before[1:]]
            else:
                new = joined([old, text]) if adds and old is not None else text
        self.put(name, new, state)
        return name

    def put(self, name: str, value: Value, state: PathState) -> None:
        """Set a variable. For an unknown value, take the one from the command line if it gives one.

        An unknown value that no variable decides is named after this one, so that advice can propose `--set
        NAME=VALUE`.
        """
        if isinstance(value, Text):
            given = self.given.get(name)
            if value.unknown is not None:
                if given is not None:
                    self.used.add(name)
                    value = given
                else:
                    pieces = [
                        evolve(each, unknown=evolve(each.unknown, name=name, unset=False))
                        if each.unknown is not None and not each.unknown.name
                        else each
                        for each in value.pieces
                    ]
                    value = Text(tuple(pieces))
            elif given is not None and name not in self.used:
                self.overridden[name] = value
        state.variables[name] = value

    def fill(self, name: str, value: Text, state: PathState) -> None:
        """Set an array to unknown elements, or to the words that the command line gives for its name.

        The unknown value is not named after the array: advice asks for a value that the script derives from the array,
        such as the number of its elements.
        """
        given = self.given.get(name)
        if given is None:
            state.variables[name] = value
        else:
            self.used.add(name)
            state.variables[name] = [given.part(*match.span()) for match in re.finditer(r"\S+", given.shown)]

    def _array(self, node: Node, script: Script, expander: Expander, *, by_words: bool) -> Value:
        words: dict[str, Text] = {}
        written: list[Node] = []
        for child in node.children:
            if not child.is_named or child.type == "comment":
                continue
            source = source_of(child, script)
            if source.startswith("[") and "]=" in source:
                # `[KEY]=VALUE`: the array is associative if it is declared so or if a key is not a number.
                key, _, _ = source[1:].partition("]=")
                text = expander.text(child)
                words[key.strip("\"'")] = text.part(text.shown.index("]=") + 2, len(text.shown))
            else:
                written.append(child)
        items = expander.words(written)
        if words and (by_words or not all(key.isdigit() for key in words)):
            return words
        return items + [words[key] for key in sorted(words, key=int)] if words else ({} if by_words else items)

    def _element(self, before: Value | None, index: str, text: Text, expander: Expander, *, adds: bool) -> Value:
        if isinstance(before, dict):
            key = index.strip("\"'")
            return before | {key: joined([before[key], text]) if adds and key in before else text}
        items = [] if before is None else [before] if isinstance(before, Text) else list(before)
        # bash fills a gap before a new element with empty ones. The limit keeps a script from asking for an array of
        # any length.
        number = expander.whole(literal(index))
        if not isinstance(number, int) or not -len(items) <= number <= len(items) + 1000:
            why = f"its element {index} is not known"
            return nothing_known(index, Unknown("", why, text.place()))
        items += [Text()] * (number + 1 - len(items))
        items[number] = joined([items[number], text]) if adds else text
        return items

    def declared(self, words: list[Text], state: PathState, *, exports: bool) -> None:
        """Assign words `NAME=VALUE` that were expanded first, as in `export "$NAME=$VALUE"`."""
        for word in words:
            name, sign, _ = word.shown.partition("=")
            if sign and name.isidentifier():
                self.put(name, word.part(len(name) + 1, len(word.shown)), state)
                if exports:
                    state.exported.add(name)

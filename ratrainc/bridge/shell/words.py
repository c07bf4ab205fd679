"""Expansion of a shell's words: quotes, variables, arrays and sums, as bash does them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from attrs import evolve

from ratrain.ratrainc.bridge.shell.arithmetic import ArithmeticError_, evaluate
from ratrain.ratrainc.bridge.shell.patterns import changed_by
from ratrain.ratrainc.bridge.shell.shell_syntax import source_of
from ratrain.ratrainc.bridge.shell.shell_text import Script, Text, TextRun, Unknown, joined, literal, nothing_known
from ratrain.ratrainc.bridge.shell.splitting import MOST, WordPart, bounded, split

if TYPE_CHECKING:
    from tree_sitter import Node

    from ratrain.ratrain_ir.support.text import Place
    from ratrain.ratrainc.bridge.shell.path_state import PathState, Value

_ALWAYS = frozenset(
    [
        "HOME",
        "USER",
        "PWD",
        "HOSTNAME",
        "SHELL",
        "LOGNAME",
        "RANDOM",
        "SECONDS",
        "UID",
        "EUID",
        "OLDPWD",
        "PATH",
        "BASHPID",
        "PPID",
        "?",
        "$",
        "!",
        "-",
        "_",
    ]
)
"""Variables that every shell sets, to values that the script does not determine."""
_HEAD = re.compile(r"\$\{([!#]?)(\w+|[@*#?$!-])(?:\[([^][]*|\$\{?\w+\}?)\])?")
"""The beginning of `${...}`: a prefix `!` or `#`, the name, and a subscript."""
_OPERATOR = re.compile(r":?[-=?+]|%%?|##?|//?[#%]?|\^\^?|,,?|@|:")
"""The operator of `${NAME...}`: a default, a removed part, a replacement, a change of case, or a slice."""
_EXPANSIONS = {"simple_expansion", "expansion", "command_substitution", "arithmetic_expansion", "process_substitution"}
_ANSI = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b", "e": "\033", "f": "\f"}
_SPECIAL = re.compile(r"\$([A-Za-z_]\w*|\d)|\\(.)|(`[^`\n]*`?)", re.DOTALL)
"""A variable, an escaped character, or a command in backquotes within a word (see `parse`)."""
_LIST = re.compile(r"(?<![$\\])\{[^{}\s]*,[^{}\s]*\}")
"""A list in braces: `{a,b}`."""
_RANGE = re.compile(r"\{(-?\d{1,6})\.\.(-?\d{1,6})(?:\.\.(-?\d{1,6}))?\}")
"""A range in braces: `{1..8}` or `{1..8..2}`."""

Output = Callable[["Node", Script, "PathState"], Text]
"""Function that returns the output of a command substitution."""


class Expander:
    """Expansion of words of one script in one state; `used` is called with each variable that is read."""

    def __init__(self, state: PathState, script: Script, output: Output, used: Callable[[str], None]) -> None:
        self.state = state
        self.script = script
        self.output = output
        self.used = used

    def fields(self, node: Node) -> list[Text]:
        """Expand one word of a command; splitting may give no word, or several."""
        return self._split(list(self._parts(node, quoted=False)))

    def words(self, nodes: Iterable[Node]) -> list[Text]:
        """Expand words. Parts without a space between them are one word, although the grammar may have two."""
        found: list[Text] = []
        parts: list[WordPart] = []
        end = -1
        for node in nodes:
            # A node that begins where the last one ended continues its word.
            if node.start_byte != end:
                found += self._split(parts)
                parts = []
            parts += self._parts(node, quoted=False)
            end = node.end_byte
        return found + self._split(parts)

    def text(self, node: Node) -> Text:
        """Expand a word that is not split, as in an assignment."""
        parts = list(self._parts(node, quoted=False))
        between = literal(" ")
        texts: list[Text] = []
        for part in parts:
            texts.append(part.text)
            if part.ends:
                texts.append(between)
        return bounded(joined(texts[:-1] if parts and parts[-1].ends else texts))

    def pattern(self, node: Node) -> tuple[Text, str] | None:
        """Return the text of a pattern, and the pattern with quoted characters escaped; None if a part is unknown."""
        parts = list(self._parts(node, quoted=False))
        text = joined(part.text for part in parts)
        if text.plain is None:
            return None
        escaped = "".join(re.sub(r"([*?[\]\\])", r"[\1]", p.text.shown) if p.quoted else p.text.shown for p in parts)
        return text, escaped

    def body(self, node: Node) -> Text:
        """Expand the text of a here-document."""
        return joined(part.text for part in self._between(node, node.start_byte, node.end_byte, quoted=True))

    def raw(self, node: Node) -> Text:
        """Return the source text of a node, unexpanded."""
        return self._literal(node.start_byte, node.end_byte)

    # parts

    def _literal(self, start: int, end: int) -> Text:
        return Text((TextRun(self.script.text[start:end], self.script.place, start, end),)) if start < end else Text()

    def _place(self, node: Node) -> Place:
        return self.script.place(node.start_byte, node.end_byte)

    def _not_followed(self, node: Node, why: str) -> Text:
        shown = source_of(node, self.script)
        return nothing_known(shown, Unknown("", f"{shown.strip()[:60]} is {why}", self._place(node)))

    def _parts(self, node: Node, *, quoted: bool) -> Iterator[WordPart]:
        kind = node.type
        if kind in _EXPANSIONS:
            yield from self._expansion(node, quoted=quoted)
        elif kind == "string":
            # `""` is an empty word, but `"$@"` without arguments is none.
            parts = list(self._between(node, node.start_byte + 1, node.end_byte - 1, quoted=True))
            yield from parts if parts or _has_array(node) else [self._empty(node)]
        elif kind == "raw_string":
            text = self._literal(node.start_byte + 1, node.end_byte - 1)
            yield WordPart(text, quoted=True) if text.pieces else self._empty(node)
        elif kind == "ansi_c_string":
            inner = source_of(node, self.script)[2:-1]
            plain = re.sub(r"\\(.)", lambda match: _ANSI.get(match[1], match[0]), inner, flags=re.DOTALL)
            yield WordPart(Text((TextRun(plain, self.script.place, *_span(node), exact=False),)), quoted=True)
        elif kind == "brace_expression":
            yield from self._braces(node)
        elif kind in ("concatenation", "command_name", "translated_string"):
            for child in node.children:
                if child.type == "brace_expression" and kind == "concatenation":
                    yield WordPart(self._not_followed(child, "a list that is not followed"), quoted)
                elif child.type != "$":
                    yield from self._parts(child, quoted=quoted)
        elif kind in ("subshell", "array"):
            yield WordPart(self._not_followed(node, "not followed"), quoted=True)
        elif kind == "word" and _LIST.search(source_of(node, self.script)):
            yield WordPart(self._not_followed(node, "a list that is not followed"), quoted)
        else:  # words, numbers, patterns
            yield from self._between(node, node.start_byte, node.end_byte, quoted=quoted, words=True)

    def _empty(self, node: Node) -> WordPart:
        return WordPart(Text((TextRun("", self.script.place, *_span(node), exact=False),)), quoted=True)

    def _between(self, node: Node, start: int, end: int, *, quoted: bool, words: bool = False) -> Iterator[WordPart]:
        """Yield the parts of a range of the text: its expansions, and the text between them without escapes.

        The grammar leaves out, or moves into its neighbours, spaces at the edges of a string's contents.
        """
        at = start
        for child in node.children:
            if child.end_byte <= at or child.start_byte >= end or not child.is_named:
                continue
            inner = child.type in ("string", "raw_string", "ansi_c_string", "concatenation", "brace_expression")
            if child.type in _EXPANSIONS or (inner and words):
                begin = child.start_byte
                if child.type in _EXPANSIONS:
                    # The node may begin with spaces that belong to the text before it.
                    begin = min(i for i in (self.script.text.find(c, begin) for c in "$`<>") if i >= 0)
                yield from self._unescaped(at, begin, quoted=quoted)
                yield from self._parts(child, quoted=quoted)
                at = child.end_byte
            elif child.type in ("word", "regex", "extglob_pattern", "heredoc_content") and child.named_child_count:
                yield from self._between(child, max(at, child.start_byte), child.end_byte, quoted=quoted, words=words)
                at = child.end_byte
        yield from self._unescaped(at, end, quoted=quoted)

    def _unescaped(self, start: int, end: int, *, quoted: bool) -> Iterator[WordPart]:
        """Yield a range without its escapes; expand variables that the grammar has missed."""
        text, at = self.script.text, start
        while match := _SPECIAL.search(text, at, end):
            if match.start() > at:
                yield WordPart(self._literal(at, match.start()), quoted)
            if match[1]:
                yield from self._variable(match[1], None, match.span(), quoted=quoted)
            elif match[3]:
                unknown = Unknown("", "it has a command in backquotes within a word", self.script.place(*match.span()))
                yield WordPart(nothing_known(match[0], unknown), quoted)
            # A backslash at the end of a line joins it with the next one.
            elif match[2] == "\n":
                pass
            # In double quotes a backslash escapes only these four characters.
            elif quoted and match[2] not in '$`"\\':
                yield WordPart(self._literal(*match.span()), quoted)
            else:
                yield WordPart(self._literal(match.end() - 1, match.end()), quoted=True)
            at = match.end()
        if at < end:
            yield WordPart(self._literal(at, end), quoted)

    def _braces(self, node: Node) -> Iterator[WordPart]:
        match = _RANGE.fullmatch(source_of(node, self.script))
        if match is None:
            yield WordPart(self._not_followed(node, "a list that is not followed"), quoted=True)
            return
        first, last, step = int(match[1]), int(match[2]), abs(int(match[3] or 1)) or 1
        numbers = range(first, last + 1, step) if first <= last else range(first, last - 1, -step)
        origin = self._literal(node.start_byte, node.end_byte)
        for number in numbers[:MOST]:
            yield WordPart(literal(str(number), origin), quoted=True, ends=True)

    def _split(self, parts: list[WordPart]) -> list[Text]:
        return split(parts, self._plain("IFS", " \t\n"))

    # variables

    def _expansion(self, node: Node, *, quoted: bool) -> Iterator[WordPart]:
        if node.type == "command_substitution":
            yield WordPart(self.output(node, self.script, self.state), quoted)
        elif node.type == "arithmetic_expansion":
            yield WordPart(self.sum(node), quoted)
        elif node.type == "process_substitution":
            yield WordPart(self._not_followed(node, "a pipe"), quoted=True)
        elif node.type == "simple_expansion":
            start = self.script.text.index("$", node.start_byte)
            name = self.script.text[start + 1 : node.end_byte]
            yield from self._variable(name, None, _span(node), quoted=quoted)
        else:
            yield from self._braced(node, quoted=quoted)

    def _braced(self, node: Node, *, quoted: bool) -> Iterator[WordPart]:
        start = self.script.text.index("$", node.start_byte)
        match = _HEAD.match(self.script.text, start, node.end_byte)
        if match is None:
            yield WordPart(self._not_followed(node, "an expansion that is not followed"), quoted)
            return
        prefix, name, index = match[1], match[2], match[3]
        stop = node.end_byte - 1
        operator = _OPERATOR.match(self.script.text, match.end(), stop)
        if prefix == "#":
            yield WordPart(self._length(name, index, node), quoted)
            return
        if prefix == "!":
            if index in ("@", "*"):
                value = self.state.variables.get(name, Text())
                # `${!NAME[@]}` lists the keys of an array. Otherwise `${!NAME}` is the variable whose name NAME holds.
                keys = [*value] if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else [0]
                yield from self._listed([literal(str(each)) for each in keys], "@", quoted=quoted)
                return
            pointed = self._scalar(name, None, _span(node))
            name = pointed.plain or ""
            if not re.fullmatch(r"\w+", name):
                yield WordPart(self._not_followed(node, "the name of a variable that is not known"), quoted)
                return
        if operator is None:
            if match.end() != stop:
                yield WordPart(self._not_followed(node, "an expansion that is not followed"), quoted)
            else:
                yield from self._variable(name, index, _span(node), quoted=quoted)
            return
        yield from self._operated(node, (name, index), operator, stop, quoted=quoted)

    def _operated(
        self, node: Node, variable: tuple[str, str | None], operator: re.Match[str], stop: int, *, quoted: bool
    ) -> Iterator[WordPart]:
        name, index = variable
        sign = operator[0]
        if sign in ("-", ":-", "=", ":=", "+", ":+", "?", ":?"):
            is_set = self._is_set(name, index, colon=sign[0] == ":")
            if sign[-1] in "-=" and is_set is False:
                parts = list(self._between(node, operator.end(), stop, quoted=quoted, words=True))
                text = joined(part.text for part in parts)
                # The default counts only while the environment does not set the variable.
                self._assume(name, index, text)
                if sign[-1] == "=":
                    self.state.variables[name] = text
                yield from parts
            elif sign[-1] == "+":
                if is_set is None:
                    yield WordPart(self._not_followed(node, "there where a variable is set that is not known"), quoted)
                elif is_set:
                    yield from self._between(node, operator.end(), stop, quoted=quoted, words=True)
                else:
                    self._assume(name, index, Text())
            else:
                yield from self._variable(name, index, _span(node), quoted=quoted)
            return
        values = list(self._variable(name, index, _span(node), quoted=quoted))
        argument = list(self._between(node, operator.end(), stop, quoted=False, words=True))
        # Quoted characters of the pattern match literally.
        words = "".join(
            re.sub(r"([*?[\]\\])", r"[\1]", part.text.shown) if part.quoted else part.text.shown for part in argument
        )
        known = all(part.text.plain is not None for part in argument)
        whole = index in ("@", "*") or name in ("@", "*")
        if whole and sign == ":":
            yield from _sliced(values, words, self._number)
            return
        for part in values:
            plain = part.text.plain
            changed = None if plain is None or not known else changed_by(plain, sign, words, self._number)
            if changed is None:
                yield WordPart(self._hanging(node, part.text.unknown), part.quoted, part.ends)
            else:
                yield WordPart(literal(changed, part.text), part.quoted, part.ends)

    def _number(self, text: str) -> int | None:
        result = self.whole(literal(text))
        return result if isinstance(result, int) else None

    def _hanging(self, node: Node, unknown: Unknown | None) -> Text:
        """Return an unknown text in place of an expansion that depends on an unknown part."""
        if unknown is None:
            return self._not_followed(node, "an expansion that is not followed")
        return nothing_known(source_of(node, self.script).strip(), evolve(unknown, unset=False))

    def _assume(self, name: str, index: str | None, text: Text) -> None:
        if index is None and name not in self.state.variables and (not name.isdigit() or self.state.arguments):
            self.state.assumed.setdefault(name, text.shown)

    def _is_set(self, name: str, index: str | None, *, colon: bool) -> bool | None:
        """Tell whether a variable is set (with a colon: and not empty); None if that is unknown."""
        if name in ("@", "*"):
            return bool(self.state.arguments)
        if index not in ("@", "*"):
            text = self._held(name, index)
            if text is None:
                return None if self._may_be_set(name) else False
            if text.sole is not None and text.sole.unset:
                return False
            return (bool(text.shown) or text.unknown is not None or not colon) if text.unknown is None else None
        value = self.state.variables.get(name)
        return False if value is None else any(each.shown for each in _items(value)) if colon else bool(_items(value))

    def _may_be_set(self, name: str) -> bool:
        return name in _ALWAYS or name in self.state.environment or bool(self.state.unread)

    def _held(self, name: str, index: str | None) -> Text | None:
        """Return the value of a variable or array element; None if it was never set, or the index is unknown."""
        self.used(name)
        if name.isdigit() and name != "0":
            arguments = self.state.arguments
            # `$1` and on; beyond the last argument they are empty.
            number = int(name) - 1
            if arguments is None:
                return None
            if number < len(arguments):
                return arguments[number]
            self._assume(name, None, Text())
            return Text()
        value = self.state.variables.get(name)
        if value is None:
            return None
        if isinstance(value, dict):
            key = self._subscript(index or "0")
            return None if key is None else value.get(key, Text()).replaced(self.state.known)
        items = _items(value)
        number_ = 0 if index is None else self._number(index)
        if number_ is None:
            return None
        if -len(items) <= number_ < len(items):
            return items[number_].replaced(self.state.known)
        return Text()

    def _subscript(self, index: str) -> str | None:
        match = re.fullmatch(r"\$\{?(\w+)\}?", index.strip("\"'"))
        return self._scalar(match[1], None, None).plain if match else index.strip("\"'")

    def _scalar(self, name: str, index: str | None, span: tuple[int, int] | None) -> Text:
        held = self._held(name, index)
        if held is not None:
            return held
        shown = f"${name}" if span is None else self.script.text[slice(*span)].strip()
        place = self.script.place(*(span or (0, 1)))
        key = Unknown(name if name not in "@*#?$!-_" else "", *self._reason(name), place)
        # A variable that nothing sets is empty in a run without it in the environment. Conditions rely on that
        # (`assumed`).
        unset = not self._may_be_set(name)
        found = nothing_known(shown, evolve(key, unset=unset))
        return found.replaced(self.state.known)

    def _reason(self, name: str) -> tuple[str]:
        if name in self.state.environment:
            return (f"{name} is set by the scheduler",)
        if name in _ALWAYS:
            return (f"{name} is of the shell that runs it",)
        if name.isdigit():
            return (f"${name} is an argument of the script",)
        if self.state.unread:
            return (f"{name} is not set in the file, and {', '.join(self.state.unread)} is not read",)
        return (f"{name} is not set in the file",)

    def _variable(self, name: str, index: str | None, span: tuple[int, int], *, quoted: bool) -> Iterator[WordPart]:
        if name in ("@", "*"):
            self.used("@")
            yield from self._listed(self.state.arguments or [], name, quoted=quoted)
        elif name == "#":
            yield WordPart(self.count(span), quoted)
        elif index in ("@", "*"):
            self.used(name)
            value = self.state.variables.get(name)
            if value is None:
                yield WordPart(self._scalar(name, None, span), quoted)
            else:
                items = [each.replaced(self.state.known) for each in _items(value)]
                yield from self._listed(items, index, quoted=quoted)
        elif name == "0" or (name == "BASH_SOURCE" and name not in self.state.variables):
            yield WordPart(literal(self.script.path or "-", self._literal(*span)), quoted)
        else:
            yield WordPart(self._scalar(name, index, span), quoted)

    def count(self, span: tuple[int, int]) -> Text:
        """Return `$#`, the number of arguments; unknown if the arguments are."""
        if self.state.arguments is not None:
            return literal(str(len(self.state.arguments)), self._literal(*span))
        why = "the file does not say with which arguments it is started"
        return nothing_known("$#", Unknown("1", why, self.script.place(*span), unset=True))

    def _listed(self, items: list[Text], sign: str, *, quoted: bool) -> Iterator[WordPart]:
        # `"$*"` joins its items with the first character of IFS. `"$@"` gives a word for each item.
        if sign == "*" and quoted:
            yield WordPart(joined(items, literal(self._plain("IFS", " ")[:1])), quoted=True)
            return
        for number, item in enumerate(items):
            yield WordPart(item, quoted, ends=number + 1 < len(items))

    def _length(self, name: str, index: str | None, node: Node) -> Text:
        if name in ("@", "*"):
            return self.count(_span(node))
        origin = self._literal(node.start_byte, node.end_byte)
        if index in ("@", "*"):
            self.used(name)
            items = _items(self.state.variables.get(name, []))
            unknown = next((each.unknown for each in items if each.unknown is not None), None)
            return literal(str(len(items)), origin) if unknown is None else self._hanging(node, unknown)
        text = self._scalar(name, index, _span(node))
        return literal(str(len(text.shown)), origin) if text.plain is not None else self._hanging(node, text.unknown)

    def _plain(self, name: str, default: str) -> str:
        value = self.state.variables.get(name)
        return default if not isinstance(value, Text) or value.plain is None else value.plain

    # sums

    def sum(self, node: Node) -> Text:
        """Evaluate `$((...))`."""
        opens = self.script.text.index("(", node.start_byte) + 2
        value = self.whole(self.range(node, opens, node.end_byte - 2))
        origin = self._literal(node.start_byte, node.end_byte)
        if isinstance(value, int):
            return literal(str(value), origin)
        return (
            self._hanging(node, value)
            if isinstance(value, Unknown)
            else self._not_followed(node, "a sum without a value")
        )

    def range(self, node: Node, start: int, stop: int) -> Text:
        """Return the text between two indices, with the expansions in it expanded."""
        return joined(self._within(node, start, stop))

    def _within(self, node: Node, start: int, stop: int) -> Iterator[Text]:
        at = start
        for child in _expansions_within(node):
            if child.start_byte >= at and child.end_byte <= stop:
                begin = (
                    self.script.text.index("$", child.start_byte)
                    if child.type != "command_substitution"
                    else child.start_byte
                )
                yield joined(part.text for part in self._unescaped(at, begin, quoted=True))
                yield joined(part.text for part in self._parts(child, quoted=True))
                at = child.end_byte
        yield joined(part.text for part in self._unescaped(at, stop, quoted=True))

    def whole(self, text: Text) -> int | Unknown | None:
        """Evaluate an arithmetic expression; return its value, the unknown part it depends on, or None if invalid."""
        if text.plain is None:
            return text.unknown
        try:
            return evaluate(text.shown.strip('"'), self._read, self._write)
        except _HangsError as error:
            return error.unknown
        except (ArithmeticError_, RecursionError):
            return None

    def _read(self, name: str) -> int:
        base, _, index = name.partition("[")
        text = self._scalar(base, index.rstrip("]") or None, None)
        if text.unknown is not None:
            raise _HangsError(text.unknown)
        # As in bash, a variable's value is an expression itself. One that refers to itself ends in a RecursionError.
        return evaluate(text.shown, self._read, self._write) if text.shown.strip() else 0

    def _write(self, name: str, value: int) -> None:
        self.state.variables[name.partition("[")[0]] = literal(str(value))


class _HangsError(Exception):
    def __init__(self, unknown: Unknown) -> None:
        super().__init__(unknown)
        self.unknown = unknown


def _span(node: Node) -> tuple[int, int]:
    return node.start_byte, node.end_byte


def _items(value: Value) -> list[Text]:
    return [value] if isinstance(value, Text) else list(value.values()) if isinstance(value, dict) else value


def _has_array(node: Node) -> bool:
    return any(child.type in ("expansion", "simple_expansion") for child in node.children)


def _expansions_within(node: Node) -> Iterator[Node]:
    for child in node.children:
        if child.type in _EXPANSIONS:
            yield child
        else:
            yield from _expansions_within(child)


def _sliced(values: list[WordPart], words: str, number: Callable[[str], int | None]) -> Iterator[WordPart]:
    first, _, count = words.partition(":")
    start, length = number(first), number(count) if count else None
    if start is not None and (length is not None or not count):
        yield from values[start:] if length is None else values[start : start + length]

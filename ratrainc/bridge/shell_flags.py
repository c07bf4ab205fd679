"""The flags of a launch script or of a file of arguments, without running any of it: assignments and sums are followed, no more."""

from __future__ import annotations

import ast
import operator
import re
import shlex

from ratrain.ratrain_ir.diagnostics import fail
from ratrain.ratrain_ir.frontend.text import Place, Source, shown
from ratrain.ratrainc.bridge.settings import Setting

_SUM = re.compile(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)")
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)\+?=(.*)", re.DOTALL)
_USED = re.compile(r"\$(?:\{(\w+)(?::?-([^{}]*))?\}|(\w+))")
_FLAG = re.compile(r"--([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
_ENDS = re.compile(r".*\.py|\$\{?\w+(\[@\])?\}?|[|;&)>].*|[12]>.*")
"""What is no value of the flag before it: the program that is started, a list of flags that is used, the next command."""
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv}
_MOST = 1 << 64
WORLD = "WORLD_SIZE"
"""The variable that scripts keep the number of ranks in."""


def shell_flags(file: str, text: str) -> dict[str, Setting]:
    """The flags with their values by name, with dashes; of those without a value, True. `WORLD_SIZE` is among them where it is assigned.

    Raises `DiagnosticError` RT063 where quotes are not closed, RT064 where a flag is said twice with different values.
    """
    source = Source(file, text)
    variables: dict[str, str] = {}
    found: dict[str, Setting] = {}
    for name, value in _flags(_words(source, text), variables, source):
        place = _place(source, name)
        if name in found and found[name].value != value:
            said = f"--{name} is said twice, {shown(found[name].value)} and {shown(value)}"
            fail("RT064", said, place.location, source=place.source, help="leave one of them")
        found[name] = Setting(value, place)
    if variables.get(WORLD, "").isdigit():
        found[WORLD] = Setting(variables[WORLD], _place(source, WORLD))
    return found


def _words(source: Source, text: str) -> list[str]:
    text = _SUM.sub(lambda match: "".join(match[0].split()), text.replace("\\\n", " "))
    try:
        return shlex.split(text, comments=True)
    except ValueError as error:
        fail("RT063", f"the file is no shell text: {error}", source.top().location)


def _flags(words: list[str], variables: dict[str, str], source: Source) -> list[tuple[str, object]]:
    flags: list[tuple[str, object]] = []
    name, values = "", list[str]()

    def end() -> None:
        nonlocal name, values
        if name:
            flags.append((name, " ".join(values) if values else True))
        name, values = "", []

    for word in words:
        closes = "$" not in word and word.endswith(")") and "(" not in word
        bare = word.rstrip(";")
        if closes:
            bare = bare[:-1]
        if assigned := _ASSIGNED.fullmatch(bare) if not bare.startswith("-") else None:
            end()
            value = assigned[2].removeprefix("(")
            if "--" in value:
                flags += _flags(_words(source, value), variables, source)
            else:
                variables[assigned[1]] = _expanded(value, variables)
        elif flag := _FLAG.fullmatch(bare.removeprefix("(")):
            end()
            name, values = flag[1].replace("_", "-"), [] if flag[2] is None else [_expanded(flag[2], variables)]
        elif name and bare:
            value = _expanded(bare, variables)
            if _ENDS.fullmatch(value):
                end() if not _USED.fullmatch(bare) or values else values.append(value)
            else:
                values.append(value)
        if closes:
            end()
    end()
    return flags


def _expanded(text: str, variables: dict[str, str]) -> str:
    """A text with the variables that are known, and sums, worked out."""

    def value(match: re.Match[str]) -> str:
        return variables.get(match[1] or match[3]) or (match[2] if match[2] is not None else match[0])

    text = _USED.sub(value, text)
    return _SUM.sub(lambda match: _sum(match, variables), text)


def _sum(match: re.Match[str], variables: dict[str, str]) -> str:
    named = re.sub(r"[A-Za-z_]\w*", lambda name: variables.get(name[0], name[0]), match[1])
    try:
        result = _worked_out(ast.parse(named.replace("/", "//"), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return match[0]
    return str(result)


def _worked_out(node: ast.expr) -> int:
    """The value of a sum of whole numbers. Raises ValueError where it is something else, or beyond all sizes."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        result = node.value
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        result = _OPERATORS[type(node.op)](_worked_out(node.left), _worked_out(node.right))
    else:
        raise ValueError(node)
    if abs(result) > _MOST:
        raise ValueError(result)
    return result


def _place(source: Source, name: str) -> Place:
    """Where a flag stands, for the first time."""
    pattern = "[-_]".join(re.escape(part) for part in re.split("[-_]", name))
    match = re.search(rf"(--|\b){pattern}(?![\w-])", source.text)
    return source.span(*match.span()) if match else source.top()

"""Whole-number arithmetic of the shell, `$((...))`: C's operators and their order, division towards zero."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

_TOKEN = re.compile(
    r"\s*(0[xX][0-9a-fA-F]+|\d+#\w+|\d+|[A-Za-z_]\w*(?:\[[^][]*\])?|<<=|>>=|\*\*|&&|\|\||<=|>=|==|!=|<<|>>|\+\+|--"
    r"|[-+*/%&|^]=|[-+*/%<>=!~&|^?:(),])"
)
_MOST = 1 << 63
_MOST_TOKENS = 2000
_ASSIGNS = {"=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>="}
# Precedence of binary operators, as in C; `**` binds tightest, as in bash. Assignments and `?:` bind more loosely: see
# `_choice`.
_ORDER = {
    "||": 3,
    "&&": 4,
    "|": 5,
    "^": 6,
    "&": 7,
    **dict.fromkeys(("==", "!="), 8),
    **dict.fromkeys(("<", ">", "<=", ">="), 9),
    **dict.fromkeys(("<<", ">>"), 10),
    **dict.fromkeys(("+", "-"), 11),
    **dict.fromkeys(("*", "/", "%"), 12),
    "**": 13,
}
_WORK: dict[str, Callable[[int, int], int]] = {
    "|": operator.or_,
    "^": operator.xor,
    "&": operator.and_,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le,
    ">=": operator.ge,
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
}


class ArithmeticError_(ValueError):  # noqa: N801, N818 - `ArithmeticError` is a builtin
    """An expression without a value: a syntax error, a division by zero, or a result outside 64 bits."""


def evaluate(text: str, read: Callable[[str], int], write: Callable[[str, int], None]) -> int:
    """Evaluate an expression to a whole number; an empty one is 0.

    `read` returns the value of a variable by its name, and `write` assigns one. A name may have a subscript: `A[3]`.
    Raises `ArithmeticError_`.
    """
    tokens: list[str] = []
    at = 0
    text = text.strip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None or len(tokens) > _MOST_TOKENS:
            raise ArithmeticError_(text[at:])
        tokens.append(match[1])
        at = match.end()
        while at < len(text) and text[at].isspace():
            at += 1
    return _Evaluator(read, write).value(_Reader(tokens).whole()) if tokens else 0


class _Reader:
    """A recursive-descent parser. A tree is a token (name or number) or `(operator, operand, ...)`."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = [*tokens, ""]
        self._at = 0

    def whole(self) -> Any:
        tree = self._comma()
        if self._tokens[self._at]:
            raise ArithmeticError_(self._tokens[self._at])
        return tree

    def _next(self) -> str:
        self._at += 1
        return self._tokens[self._at - 1]

    def _takes(self, word: str) -> bool:
        found = self._tokens[self._at] == word
        self._at += found
        return found

    def _comma(self) -> Any:
        tree = self._choice()
        while self._takes(","):
            tree = (",", tree, self._choice())
        return tree

    def _choice(self) -> Any:
        tree = self._binary(3)
        if self._tokens[self._at] in _ASSIGNS and isinstance(tree, str):
            return (self._next(), tree, self._choice())
        if self._takes("?"):
            yes = self._comma()
            if not self._takes(":"):
                raise ArithmeticError_("?")
            return ("?", tree, yes, self._choice())
        return tree

    def _binary(self, least: int) -> Any:
        tree = self._unary()
        # Precedence climbing: the right side takes only operators that bind tighter. `**` groups from the right, so its
        # right side takes further `**` too.
        while _ORDER.get(self._tokens[self._at], 0) >= least:
            sign = self._next()
            tree = (sign, tree, self._binary(_ORDER[sign] + (sign != "**")))
        return tree

    def _unary(self) -> Any:
        word = self._next()
        if word in ("+", "-", "!", "~"):
            return (f"unary {word}", self._unary())
        if word in ("++", "--"):
            return (f"before {word}", self._unary())
        if word == "(":
            tree = self._comma()
            if not self._takes(")"):
                raise ArithmeticError_("(")
            return tree
        if not word or not (word[0].isalnum() or word[0] == "_"):
            raise ArithmeticError_(word)
        if self._tokens[self._at] in ("++", "--"):
            return (f"after {self._next()}", word)
        return word


class _Evaluator:
    """An evaluator of trees. It skips the side of `&&`, `||` and `?:` that does not count, since it may assign."""

    def __init__(self, read: Callable[[str], int], write: Callable[[str, int], None]) -> None:
        self._read, self._write = read, write

    def value(self, tree: Any) -> int:
        result = self._name(tree) if isinstance(tree, str) else self._operation(*tree)
        # A shell wraps around at 64 bits. No size of a training is that large, so the expression is refused instead.
        if abs(result) >= _MOST:
            raise ArithmeticError_("too large")
        return int(result)

    def _name(self, word: str) -> int:
        if not word[0].isdigit():
            return self._read(word)
        try:
            # Notations of bash: BASE#DIGITS, 0x for hexadecimal, a leading 0 for octal.
            if "#" in word:
                base, digits = word.split("#")
                return int(digits, int(base))
            return int(word, 16 if word[:2] in ("0x", "0X") else 8 if word[0] == "0" and len(word) > 1 else 10)
        except ValueError:
            raise ArithmeticError_(word) from None

    def _operation(self, sign: str, *operands: Any) -> int:
        if sign in _ASSIGNS:
            return self._assign(sign[:-1], *operands)
        if sign in ("&&", "||"):
            # A left side that decides alone is the result: true for ||, false for &&.
            left = bool(self.value(operands[0]))
            return int(left if left is (sign == "||") else bool(self.value(operands[1])))
        if sign == "?":
            return self.value(operands[1] if self.value(operands[0]) else operands[2])
        if sign.startswith(("before", "after")):
            if not isinstance(operands[0], str):
                raise ArithmeticError_(sign)
            before = self.value(operands[0])
            after = self._assign("+", operands[0], "1" if sign.endswith("++") else ("unary -", "1"))
            return after if sign.startswith("before") else before
        values = [self.value(each) for each in operands]
        if sign.startswith("unary"):
            (only,) = values
            return {"+": only, "-": -only, "!": int(not only), "~": ~only}[sign[-1]]
        return values[1] if sign == "," else self._two(sign, *values)

    def _two(self, sign: str, left: int, right: int) -> int:
        if sign in _WORK:
            return int(_WORK[sign](left, right))
        if sign in ("/", "%"):
            if right == 0:
                raise ArithmeticError_("division by zero")
            # Python rounds quotients down; the shell truncates them towards zero.
            quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
            return quotient if sign == "/" else left - quotient * right
        # Only <<, >> and ** are left. The bound keeps a script from asking for a number of any length.
        if not 0 <= right < 64:
            raise ArithmeticError_(sign)
        return left << right if sign == "<<" else left >> right if sign == ">>" else left**right

    def _assign(self, sign: str, name: Any, tree: Any) -> int:
        if not isinstance(name, str) or name[0].isdigit():
            raise ArithmeticError_(str(name))
        value = self.value((sign, name, tree)) if sign else self.value(tree)
        self._write(name, value)
        return value

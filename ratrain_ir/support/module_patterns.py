"""Names of modules as PEFT matches them: ends of paths, regular expressions, and numbers by either.

A module is named by its path, or by the end of it after a dot. `rank_pattern` and `alpha_pattern` give numbers by such
ends, which may be regular expressions too; the first that matches counts:

    rank_pattern = "layers.0.self_attn.q_proj 4, down_proj 32, .*[13].mlp.up_proj 8"

Rules are those of huggingface/peft 0.21.2 (peft/utils/other.py, `get_pattern_key` and `match_target_against_key`).
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

EXPRESSION = "re:"
"""Start of targets that are one regular expression, which matches paths as a whole."""

_SIGNS = re.compile(r"[\\*+?()\[\]{}|^$]")
_END = r"(.*\.)?({})$"
"""PEFT's expression for the key of a pattern."""


def is_named(module: str, name: str) -> bool:
    """Tell whether a name is a layer's path, or the end of it after a dot."""
    return module == name or module.endswith(f".{name}")


def expression_of(targets: str) -> str | None:
    """Return the regular expression of a plan's targets; None if they are names."""
    return targets.removeprefix(EXPRESSION) if targets.startswith(EXPRESSION) else None


def is_expression(name: str) -> bool:
    """Tell whether a name has characters of a regular expression, which no module's path has."""
    return _SIGNS.search(name) is not None


@cache
def expression_error(expression: str) -> str | None:
    """Return the reason why a regular expression does not compile; None if it does."""
    try:
        re.compile(expression)
    except (re.error, RecursionError, OverflowError) as error:
        return str(error)
    return None


def matches_whole(expression: str, module: str) -> bool:
    """Tell whether a regular expression matches a module's path as a whole."""
    return re.fullmatch(expression, module) is not None


def matches_end(pattern: str, module: str) -> bool:
    """Tell whether the key of a pattern names a module: it matches the path, or the end of it after a dot."""
    return re.match(_END.format(pattern), module) is not None


@frozen
class ModuleNumbers:
    """Numbers of modules by the ends of their paths, in the order in which they are tried.

    As text: `q_proj 8, mlp.down_proj 32`.
    """

    entries: tuple[tuple[str, float], ...]

    @classmethod
    def parse(cls, text: str, accept: Callable[[float], bool]) -> ModuleNumbers | None:
        """Return the numbers that a text describes; None if it describes none, or a number is not accepted."""
        entries: list[tuple[str, float]] = []
        for part in text.split(", "):
            pattern, _, number = part.rpartition(" ")
            if re.fullmatch(r"[0-9]+(\.[0-9]+)?(e[-+]?[0-9]{1,3})?", number, re.ASCII) is None:
                return None
            entries.append((pattern, float(number)))
        return cls.of_entries(entries, accept)

    @classmethod
    def of_entries(cls, entries: list[tuple[str, float]], accept: Callable[[float], bool]) -> ModuleNumbers | None:
        """Return numbers by patterns; None if there are none, or a pattern or number is not usable.

        A pattern has no whitespace, so that a text of it is read back, and compiles within PEFT's expression.
        """
        usable = all(
            pattern
            and pattern.split() == [pattern]
            and expression_error(_END.format(pattern)) is None
            and accept(number)
            for pattern, number in entries
        )
        twice = len({pattern for pattern, _ in entries}) < len(entries)
        return cls(tuple(entries)) if entries and usable and not twice else None

    def __str__(self) -> str:
        return ", ".join(f"{pattern} {number_text(number)}" for pattern, number in self.entries)

    def __iter__(self) -> Iterator[tuple[str, float]]:
        return iter(self.entries)

    def of(self, module: str, usual: float) -> float:
        """Return the number of a module; `usual` if no pattern names it."""
        return next((number for pattern, number in self.entries if matches_end(pattern, module)), usual)


def number_text(number: float) -> str:
    """Return a number as the shortest text that is read back as it; a whole one without a point."""
    return str(int(number)) if number == int(number) else repr(number)

"""The `.rtir` grammar: `rtir.lark` is the only definition of the language's syntax."""

from __future__ import annotations

from functools import cache
from importlib import resources


@cache
def grammar_text() -> str:
    """The Lark grammar of `.rtir`."""
    return (resources.files(__name__) / "rtir.lark").read_text(encoding="utf-8")

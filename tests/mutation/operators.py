"""Mutation operators: one small change each, and the codes with which a verifier may refuse it.

An operator changes its subject in place and says what it did, or returns None where it finds nothing to change. Codes are those of
the faults that the change can cause, found by thinking about the change, not by looking at what is reported: an operator that
only drops releases must never be answered with "messages are crossed".
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Generic, TypeVar

from attrs import frozen

T = TypeVar("T")
Change = Callable[[T, Random], str | None]


@frozen
class Operator(Generic[T]):
    """A named change."""

    name: str
    codes: frozenset[str]
    change: Change[T]
    always: bool
    """whether every mutant of it must be refused, since what it changes shows in no run"""


class Registry(Generic[T]):
    """The operators on one kind of subject, by name."""

    def __init__(self) -> None:
        self.operators: dict[str, Operator[T]] = {}

    def __call__(self, *codes: str, always: bool = False) -> Callable[[Change[T]], Change[T]]:
        """Register a function under its name, with the codes that fit it; codes may be given several in a text."""

        def register(change: Change[T]) -> Change[T]:
            name = change.__name__.replace("_", "-")
            assert name not in self.operators
            self.operators[name] = Operator(name, frozenset(" ".join(codes).split()), change, always)
            return change

        return register

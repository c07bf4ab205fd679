"""Consecutive numbers for things, in the order in which they are first looked up."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class Numbers(dict[T, int], Generic[T]):
    """Mapping from things to numbers; looking up an unknown thing gives it the next number, from 0."""

    def __missing__(self, thing: T) -> int:
        number = self[thing] = len(self)
        return number

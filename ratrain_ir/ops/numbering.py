"""Things by number, in the order in which they are first asked for."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class Numbers(dict[T, int], Generic[T]):
    """Numbers of things from 0: one that has none is given the next."""

    def __missing__(self, thing: T) -> int:
        number = self[thing] = len(self)
        return number

"""How many of some changes, in their order, an arena holds."""

from __future__ import annotations

from collections.abc import Callable


def most_that_fits(count: int, excess_bytes: Callable[[int], int]) -> int:
    """The most changes, `count` at most, under which nothing exceeds the budget; 0 where one alone does. More changes need more bytes."""
    if not count or not excess_bytes(count):
        return count
    low, high = 0, count - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (low, middle - 1) if excess_bytes(middle) else (middle, high)
    return low

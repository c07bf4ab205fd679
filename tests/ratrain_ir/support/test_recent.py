"""Results of the last few questions."""

from __future__ import annotations

from functools import partial

from ratrain.ratrain_ir.support.recent import _MOST, Recent


class _Squares:
    """Squares, with a record of those that were computed."""

    def __init__(self) -> None:
        self.made: list[int] = []
        self.recent: Recent[int, int] = Recent()

    def of(self, number: int) -> int:
        return self.recent.of(number, partial(self.computed, number))

    def computed(self, number: int) -> int:
        self.made.append(number)
        return number * number


def test_what_was_asked_lately_is_not_made_again() -> None:
    squares = _Squares()
    assert [squares.of(number) for number in (3, 4, 3)] == [9, 16, 9]
    assert squares.made == [3, 4]


def test_few_results_are_held() -> None:
    squares = _Squares()
    asked = [*range(_MOST + 1), 0]
    assert [squares.of(number) for number in asked] == [number * number for number in asked]
    assert squares.made == asked

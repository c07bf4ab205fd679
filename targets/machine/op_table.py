"""Measured seconds of ops by their kind and size, and how they are carried over to sizes that were not measured."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from math import log
from typing import TypeGuard

from attrs import frozen

MEMBERS_MARK = "*"
"""Stands between a collective's keyword and the number of its members."""
SHAPES_MARK = "/"
"""Stands between the kernels of a routine and the shapes they work on."""
_ALIKE = {"all_reduce": "reduce_scatter", "reduce_scatter": "all_reduce"}
"""Collective that takes about the same time a byte, by collective: used where the collective itself was not
measured."""
_MOST_DIGITS = 18


def is_op_key(value: object) -> TypeGuard[str]:
    """Return whether a value is the key of an op. The key of a collective ends with the number of members."""
    if not isinstance(value, str):
        return False
    _, mark, members = value.partition(MEMBERS_MARK)
    return not mark or (members.isascii() and members.isdigit() and len(members) < _MOST_DIGITS)


@frozen
class MeasuredOp:
    """Median seconds of an op of a kind and size.

    The size is bytes of its own tensors; for a routine, seconds by the rates of the machine. The seconds of a
    collective are a member's share.
    """

    key: str
    size: float
    seconds: float


@frozen(slots=False, cache_hash=True)
class OpTable:
    """All measured ops of a machine."""

    ops: tuple[MeasuredOp, ...] = ()

    @cached_property
    def _by_key(self) -> dict[str, dict[float, float]]:
        seconds: dict[str, dict[float, float]] = {}
        for op in self.ops:
            seconds.setdefault(op.key, {})[op.size] = op.seconds
        return seconds

    @cached_property
    def _by_kernels(self) -> dict[str, dict[float, float]]:
        """Map the kernels of each measured routine, whatever their shapes, to its seconds by size.

        The kernels are the part of the key before the last `SHAPES_MARK`; sizes are as in `MeasuredOp`.
        """
        seconds: dict[str, dict[float, float]] = {}
        for op in self.ops:
            kernels, mark, _ = op.key.rpartition(SHAPES_MARK)
            if mark:
                seconds.setdefault(kernels, {})[op.size] = op.seconds
        return seconds

    def seconds(self, key: str, size: float) -> float | None:
        """Return the measured seconds of an op, else an estimate from other sizes of its kind, else None."""
        kernels, is_routine, _ = key.rpartition(SHAPES_MARK)
        known = self._by_key.get(key)
        if is_routine and known:
            return next(iter(known.values()))
        if is_routine:
            known = self._by_kernels.get(kernels)
        known = known or self._other_members(key)
        return _of_size(known, size) if known else None

    def _other_members(self, key: str) -> dict[float, float] | None:
        """Return the seconds by size of the same collective with the nearest number of members; None if there is none.

        A similar collective is the last resort. A member's share depends on its bytes alone; measurements with one
        member, which meets nobody, count only for one member.
        """
        keyword, mark, members = key.partition(MEMBERS_MARK)
        if not mark:
            return None
        for kind in (keyword, _ALIKE.get(keyword, keyword)):
            found = [int(other.partition(MEMBERS_MARK)[2]) for other in self._by_key if other.startswith(kind + mark)]
            counts = [count for count in found if count > 1 or int(members) == 1]
            if counts:
                nearest = min(counts, key=lambda count: abs(count - int(members)))
                return self._by_key[f"{kind}{mark}{nearest}"]
        return None


def _of_size(known: Mapping[float, float], size: float) -> float:
    """Return the seconds of a size: measured, or the nearest measured seconds scaled along a line through all."""
    if size in known:
        return known[size]
    positive = [each for each in known if each > 0]
    if not positive or size <= 0:
        return next(iter(known.values()))
    nearest = min(positive, key=lambda each: abs(log(each / size)))
    start, slope = line_through({each: known[each] for each in positive})
    return known[nearest] * (start + slope * size) / (start + slope * nearest)


def line_through(points: Mapping[float, float]) -> tuple[float, float]:
    """Return seconds at size 0 and seconds a unit of size of a line through points, neither negative.

    Least squares of the relative errors 1 - (start + slope * size) / seconds. One size alone gives a slope and start 0.
    """
    scales = [(1 / seconds, size / seconds) for size, seconds in points.items()]
    ones, mixed, squares = (sum(a * a for a, _ in scales), sum(a * b for a, b in scales), sum(b * b for _, b in scales))
    a, b = sum(a for a, _ in scales), sum(b for _, b in scales)
    # Normal equations of the two unknowns. If one comes out negative, it is set to 0 and the other is fitted alone.
    determinant = ones * squares - mixed * mixed
    if len(points) > 1 and determinant > 1e-12 * ones * squares:
        start, slope = (a * squares - b * mixed) / determinant, (b * ones - a * mixed) / determinant
        if start >= 0 and slope >= 0:
            return start, slope
        if slope < 0:
            return a / ones, 0.0
    return 0.0, b / squares

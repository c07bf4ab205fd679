"""Measured seconds of ops, by what they are and how many bytes they touch."""

from __future__ import annotations

from functools import cached_property
from math import log
from typing import TypeGuard

from attrs import frozen

MEMBERS_MARK = "*"
"""Between a collective's keyword and the number of its members."""
_MOST_DIGITS = 18


def is_op_key(value: object) -> TypeGuard[str]:
    """Whether a value is the key of an op; of a collective, it ends with the number of members."""
    if not isinstance(value, str):
        return False
    _, mark, members = value.partition(MEMBERS_MARK)
    return not mark or (members.isascii() and members.isdigit() and len(members) < _MOST_DIGITS)


@frozen
class MeasuredOp:
    """An op of a kind and size (bytes of its own tensors; 0 for a routine, whose key says all) and its median seconds.

    Of a collective, seconds are a member's share.
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
        found: dict[str, dict[float, float]] = {}
        for op in self.ops:
            found.setdefault(op.key, {})[op.size] = op.seconds
        return found

    def seconds(self, key: str, size: float) -> float | None:
        """Seconds of an op; of another size of its kind in proportion to the nearest that was measured; None of an unknown kind."""
        sizes = self._by_key.get(key) or self._other_members(key)
        if sizes is None:
            return None
        if size in sizes:
            return sizes[size]
        known = [each for each in sizes if each > 0]
        if not known or size <= 0:
            return next(iter(sizes.values()))
        nearest = min(known, key=lambda each: abs(log(each / size)))
        return sizes[nearest] * size / nearest

    def _other_members(self, key: str) -> dict[float, float] | None:
        """The same collective with another number of members: a member's share goes by its bytes."""
        keyword, mark, members = key.partition(MEMBERS_MARK)
        if not mark:
            return None
        counts = [int(other.partition(MEMBERS_MARK)[2]) for other in self._by_key if other.startswith(keyword + mark)]
        if not counts:
            return None
        nearest = min(counts, key=lambda count: abs(count - int(members)))
        return self._by_key[f"{keyword}{mark}{nearest}"]

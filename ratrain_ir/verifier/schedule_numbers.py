"""Stages, ranks, micro-batches and slices as words, with neighbours joined to ranges."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ratrain.ratrain_ir.analysis.actions import Part

_MAX_RANGES = 6
"""Most ranges that are shown; longer lists are cut."""


def parts_text(parts: Iterable[Part]) -> str:
    """Format micro-batches and slices: `micro-batches 2, 4 to 7, slice 1 of micro-batch 3`."""
    slices: dict[int, list[int]] = {}
    whole: list[int] = []
    for micro_batch, place in parts:
        assert micro_batch is not None
        if place is None:
            whole.append(micro_batch)
        else:
            slices.setdefault(micro_batch, []).append(place)
    words = [numbers_text("micro-batch", whole)] if whole else []
    words += [f"{numbers_text('slice', slices[m])} of micro-batch {m}" for m in sorted(slices)[:_MAX_RANGES]]
    return ", ".join(words) + (", ..." if len(slices) > _MAX_RANGES else "")


def numbers_text(what: str, numbers: Iterable[int]) -> str:
    """Format numbers of a kind of thing (`what`), neighbours joined: `micro-batches 2, 4 to 7`."""
    ranges: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return ranges_text(what, ranges)


def ranges_text(what: str, ranges: Sequence[tuple[int, int]]) -> str:
    """Format ranges of numbers, given as (first, last), both inclusive."""
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return f"{what} {ranges[0][0]}"
    plural = f"{what}es" if what.endswith("ch") else f"{what}s"
    shown = ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in ranges[:_MAX_RANGES])
    return f"{plural} {shown}" + (", ..." if len(ranges) > _MAX_RANGES else "")

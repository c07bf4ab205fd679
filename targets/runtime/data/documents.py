"""Documents in a stream of tokens: where each begins, and tokens that are made document by document where they are read."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
from attrs import define, frozen
from numpy.typing import NDArray

from ratrain.targets.runtime.data.token_file import ReadTokens

Positions = NDArray[np.int64]
"""Positions in a stream of tokens."""


@frozen(eq=False)
class PiecedTokens(ReadTokens):
    """Tokens of pieces in a row, which are read, or made, where a slice asks for them."""

    bounds: Positions
    """[pieces + 1]: where each piece begins, and where the last one ends"""
    read: Callable[[int, int, int], NDArray[Any]]
    """tokens [low, high) of a piece, given its number, low and high"""

    def read_at(self, position: int, count: int) -> NDArray[Any]:
        """So many tokens of the pieces from a position on."""
        out = np.empty(count, self.dtype)
        done = 0
        number = int(np.searchsorted(self.bounds, position, "right")) - 1
        while done < count:
            first, end = int(self.bounds[number]), int(self.bounds[number + 1])
            taken = min(end - position, count - done)
            if taken:
                out[done : done + taken] = self.read(number, position - first, position - first + taken)
            done, position, number = done + taken, position + taken, number + 1
        return out


def pieced(
    lengths: NDArray[Any] | list[int], read: Callable[[int, int, int], NDArray[Any]], dtype: Any
) -> PiecedTokens:
    """Tokens of pieces of these lengths, all of them."""
    bounds = bounds_of(lengths)
    return PiecedTokens(bounds, read, dtype=np.dtype(dtype), start=0, stop=int(bounds[-1]))


def bounds_of(lengths: NDArray[Any] | list[int]) -> Positions:
    """Where pieces of these lengths begin, and where the last one ends."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def end_tokens(eos: int | None, least: type[np.unsignedinteger[Any]]) -> NDArray[Any]:
    """The tokens at the end of each document, in a type that holds them and all of `least`."""
    if eos is None:
        return np.array([], least)
    return np.array([eos], np.promote_types(least, np.min_scalar_type(eos)))


@define(eq=False, slots=False)
class Documents:
    """Where the documents of a stream lie, and which of their tokens the loss is of."""

    bounds: Positions
    """[documents + 1]: where each document begins, and where the last one ends"""
    counted_from: Positions | None = None
    """[documents]: the first token of each that counts as a label, and all behind it do; None: every token counts"""

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def part(self, start: int, stop: int) -> Documents:
        """Those of tokens [start, stop) of the stream, of the first and the last perhaps only a part."""
        first = int(np.searchsorted(self.bounds, start, "right")) - 1
        end = int(np.searchsorted(self.bounds, stop, "left"))
        counted = self.counted_from
        return Documents(
            np.clip(self.bounds[first : end + 1], start, stop) - start,
            None if counted is None else np.clip(counted[first:end], start, stop) - start,
        )

    def in_order(self, order: Positions) -> Documents:
        """The same documents in another order."""
        bounds = bounds_of(np.diff(self.bounds)[order])
        counted = self.counted_from
        return Documents(bounds, None if counted is None else bounds[:-1] + (counted - self.bounds[:-1])[order])

    def start_before(self, position: int) -> int:
        """Where the document begins that a position is in."""
        return int(self.bounds[int(np.searchsorted(self.bounds, position, "right")) - 1])

    def starts(self, start: int, stop: int) -> Positions:
        """Of each token in [start, stop) where its document begins."""
        found: Positions = self.bounds[self._holding(np.arange(start, stop))]
        return found

    def counted(self, start: Positions, stop: Positions) -> Positions:
        """Return the number of tokens in each range [start, stop) that count as labels."""
        found: Positions = self._counted_below(stop) - self._counted_below(start)
        return found

    def is_counted(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Of each token in [start, stop) whether it counts as a label."""
        positions = np.arange(start, stop)
        if self.counted_from is None:
            return np.ones(stop - start, np.bool_)
        found: NDArray[np.bool_] = positions >= self.counted_from[self._holding(positions)]
        return found

    def _holding(self, positions: Positions) -> Positions:
        """The numbers of the documents that hold these positions; the last one where a position is the stream's end."""
        numbers: Positions = np.searchsorted(self.bounds, positions, "right") - 1
        return np.minimum(numbers, len(self) - 1)

    def _counted_below(self, positions: Positions) -> Positions:
        if self.counted_from is None:
            return positions
        numbers = self._holding(positions)
        found: Positions = self._counted_before[numbers] + np.maximum(0, positions - self.counted_from[numbers])
        return found

    @cached_property
    def _counted_before(self) -> Positions:
        """[documents + 1]: tokens that count in all documents before each."""
        assert self.counted_from is not None
        return bounds_of(self.bounds[1:] - self.counted_from)

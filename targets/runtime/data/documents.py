"""Documents in a stream of tokens: their bounds, and tokens that are produced by document when they are read."""

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
    """Tokens of consecutive pieces, read or produced when a slice asks for them."""

    bounds: Positions
    """[pieces + 1]: start of each piece, and the end of the last"""
    read: Callable[[int, int, int], NDArray[Any]]
    """function of (piece number, low, high) that returns tokens [low, high) of the piece"""

    def read_at(self, position: int, count: int) -> NDArray[Any]:
        """Return `count` tokens from `position` on."""
        out = np.empty(count, self.dtype)
        done = 0
        # "right" skips empty pieces: of several bounds equal to `position`, the last one begins the piece that holds
        # it.
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
    """Return the tokens of all pieces of these lengths, in a row."""
    bounds = bounds_of(lengths)
    return PiecedTokens(bounds, read, dtype=np.dtype(dtype), start=0, stop=int(bounds[-1]))


def bounds_of(lengths: NDArray[Any] | list[int]) -> Positions:
    """Return [pieces + 1] bounds from lengths: start of each piece, and the end of the last."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def end_tokens(eos: int | None, least: type[np.unsignedinteger[Any]]) -> NDArray[Any]:
    """Return the tokens that end a document (one or none), in a type that holds them and all of `least`."""
    if eos is None:
        return np.array([], least)
    return np.array([eos], np.promote_types(least, np.min_scalar_type(eos)))


@define(eq=False, slots=False)
class Documents:
    """Bounds of a stream's documents, and the tokens of each that count in the loss."""

    bounds: Positions
    """[documents + 1]: start of each document, and the end of the last"""
    answers: Positions | None = None
    """[ranges, 2]: first and last + 1 of each run of tokens that count as labels, ascending, none empty or across the
    end of a document; None: every token counts"""

    @classmethod
    def ending_in_answers(cls, bounds: Positions, firsts: Positions) -> Documents:
        """Make documents of which the tokens from `firsts` on [documents] count as labels."""
        answers = np.stack([firsts, bounds[1:]], axis=1)
        return cls(bounds, answers[firsts < bounds[1:]])

    @property
    def counted_from(self) -> Positions | None:
        """Return the first token of each document that counts, where all after it do; else None."""
        if self.answers is None:
            return None
        numbers = self._holding(self.answers[:, 0])
        if len(np.unique(numbers)) < len(numbers) or (self.answers[:, 1] != self.bounds[numbers + 1]).any():
            return None
        firsts = self.bounds[1:].copy()
        firsts[numbers] = self.answers[:, 0]
        return firsts

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def part(self, start: int, stop: int) -> Documents:
        """Return the documents of tokens [start, stop), counted from `start`; the first and the last may be cut."""
        first = int(np.searchsorted(self.bounds, start, "right")) - 1
        end = int(np.searchsorted(self.bounds, stop, "left"))
        # The documents at both ends may reach beyond the part: clipping cuts them.
        bounds = np.clip(self.bounds[first : end + 1], start, stop) - start
        if self.answers is None:
            return Documents(bounds)
        answers = np.clip(self.answers, start, stop) - start
        return Documents(bounds, answers[answers[:, 0] < answers[:, 1]])

    def in_order(self, order: Positions) -> Documents:
        """Return the same documents in another order."""
        bounds = bounds_of(np.diff(self.bounds)[order])
        if self.answers is None:
            return Documents(bounds)
        moved = np.empty(len(self), np.int64)
        moved[order] = bounds[:-1] - self.bounds[:-1][order]
        answers = self.answers + moved[self._holding(self.answers[:, 0])][:, None]
        return Documents(bounds, answers[np.argsort(answers[:, 0], kind="stable")])

    def start_near(self, position: int) -> int | None:
        """Return the start of the document that holds a position, of the second one if that is the first.

        None if there is but one document.
        """
        starts = np.unique(self.bounds[1:-1])
        starts = starts[(starts > self.bounds[0]) & (starts < self.bounds[-1])]
        return int(starts[max(int(np.searchsorted(starts, position, "right")) - 1, 0)]) if len(starts) else None

    def starts(self, start: int, stop: int) -> Positions:
        """Return, for each token in [start, stop), the start of its document."""
        found: Positions = self.bounds[self._holding(np.arange(start, stop))]
        return found

    def counted(self, start: Positions, stop: Positions) -> Positions:
        """Return the number of tokens in each range [start, stop) that count as labels."""
        found: Positions = self._counted_below(stop) - self._counted_below(start)
        return found

    def is_counted(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Return, for each token in [start, stop), whether it counts as a label."""
        if self.answers is None:
            return np.ones(stop - start, np.bool_)
        below = self._counted_below(np.arange(start, stop + 1))
        found: NDArray[np.bool_] = below[1:] > below[:-1]
        return found

    def _holding(self, positions: Positions) -> Positions:
        """Return the numbers of the documents that hold these positions; for the stream's end, the last document."""
        numbers: Positions = np.searchsorted(self.bounds, positions, "right") - 1
        return np.minimum(numbers, len(self) - 1)

    def _counted_below(self, positions: Positions) -> Positions:
        """Return the number of labels that count in [0, position), for each position."""
        if self.answers is None:
            return positions
        if not len(self.answers):
            return np.zeros_like(positions)
        begun = np.searchsorted(self.answers[:, 0], positions, "left")
        # All tokens of the ranges begun before, less those of the last one that are still to come.
        last = np.maximum(begun - 1, 0)
        rest = np.where(begun > 0, np.maximum(0, self.answers[last, 1] - positions), 0)
        found: Positions = self._counted_before[begun] - rest
        return found

    @cached_property
    def _counted_before(self) -> Positions:
        """[ranges + 1]: tokens in all ranges before each."""
        assert self.answers is not None
        return bounds_of(self.answers[:, 1] - self.answers[:, 0])

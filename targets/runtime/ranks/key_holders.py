"""Ranks that hold the keys and values of a text between them, as processes: gathers, and a tree of softmax states.

States are merged by recursive doubling: in each round a rank swaps its state with the one whose number differs in one
bit. Ranks beyond the largest power of two hand theirs in before, and get the result behind:

    6 ranks:   4 -> 0, 5 -> 1     0-1 2-3     0-2 1-3     0 -> 4, 1 -> 5

Both ranks of a pair add the state of the higher number to that of the lower, so all have the same bits.
"""

from __future__ import annotations

from itertools import permutations
from typing import TYPE_CHECKING, Any

import numpy as np

from ratrain.targets.runtime.engine.forward import SoftmaxState
from ratrain.targets.runtime.ranks.waiting import finish

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ratrain.targets.runtime.ranks.communicator import Communicator


class RankHolders:
    """Ranks that hold keys and values between them; the protocol `KeyHolders` documents the calls."""

    def __init__(self, ranks: Communicator) -> None:
        """Take ranks that nothing else talks with meanwhile. All of them must call it."""
        channels = list(permutations(range(ranks.size), 2))
        self._ranks = ranks.for_messages(channels)
        self._tags = {channel: tag for tag, channel in enumerate(channels)}
        self._paired = 1 << (ranks.size.bit_length() - 1)
        """largest power of two that is not above the number of ranks"""

    @property
    def rank(self) -> int:
        """Number of this rank."""
        return self._ranks.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._ranks.size

    def gather(self, own: NDArray[Any], counts: Sequence[int]) -> NDArray[Any]:
        """Return the rows of all ranks, in their order."""
        width = own.shape[1]
        whole = np.empty(sum(counts) * width, own.dtype)
        finish(self._ranks.iallgatherv(whole, own.reshape(-1), [rows * width for rows in counts]))
        return whole.reshape(-1, width)

    def merge(self, state: SoftmaxState) -> None:
        """Merge the states of all ranks."""
        if self.rank >= self._paired:
            self._send(state, self.rank - self._paired)
            _put(self._received(state, self.rank - self._paired), state)
            return
        extra = self.rank + self._paired
        if extra < self.size:
            state.merge(self._received(state, extra))
        bit = 1
        while bit < self._paired:
            other = self.rank ^ bit
            theirs = self._swapped(state, other)
            lower, higher = (state, theirs) if self.rank < other else (theirs, state)
            lower.merge(higher)
            _put(lower, state)
            bit *= 2
        if extra < self.size:
            self._send(state, extra)

    def from_rank(self, values: NDArray[Any], rank: int) -> None:
        """Replace `values` with those of one rank."""
        counts = [values.size if each == rank else 0 for each in range(self.size)]
        whole = np.empty(values.size, values.dtype)
        finish(self._ranks.iallgatherv(whole, values.reshape(-1)[: counts[self.rank]], counts))
        values.reshape(-1)[:] = whole

    def _send(self, state: SoftmaxState, to: int) -> None:
        finish(self._ranks.isend(_packed(state), to, self._tags[self.rank, to]))

    def _received(self, like: SoftmaxState, source: int) -> SoftmaxState:
        """Return the state of a rank, which has the shape of one at hand."""
        packed = _packed(like)
        finish(self._ranks.irecv(packed, source, self._tags[source, self.rank]))
        return _unpacked(packed, like)

    def _swapped(self, state: SoftmaxState, other: int) -> SoftmaxState:
        """Send a state to a rank, and return that rank's."""
        mine, theirs = _packed(state), _packed(state)
        sending = self._ranks.isend(mine, other, self._tags[self.rank, other])
        finish(self._ranks.irecv(theirs, other, self._tags[other, self.rank]))
        finish(sending)
        return _unpacked(theirs, state)


def _packed(state: SoftmaxState) -> NDArray[np.float32]:
    """Return a state as one row of numbers."""
    return np.concatenate([each.reshape(-1) for each in (state.acc, state.peak, state.total)])


def _unpacked(packed: NDArray[np.float32], like: SoftmaxState) -> SoftmaxState:
    """Return the state of one row of numbers, in the shape of another."""
    ends = np.cumsum([like.acc.size, like.peak.size])
    acc, peak, total = np.split(packed, ends)
    return SoftmaxState(acc.reshape(like.acc.shape), peak.reshape(like.peak.shape), total.reshape(like.total.shape))


def _put(source: SoftmaxState, into: SoftmaxState) -> None:
    """Copy a state into another, unless it is that one."""
    if source is not into:
        into.acc[...], into.peak[...], into.total[...] = source.acc, source.peak, source.total

"""What ranks that are processes ask of the library that moves their bytes: some non-blocking calls, and an end of the job.

Everything else, which call is made when and what is summed by whom, is the engine's, and the same over every library.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NoReturn, Protocol, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

Buffer: TypeAlias = NDArray[Any]
"""Contiguous memory, of the host or of what the library can reach beside it. It is read from or written to until the request that took it is done, and never copied by the caller."""


class Request(Protocol):
    """A call that is under way."""

    def test(self) -> bool:
        """Whether it is done. Never waits; true for ever after.

        Raises `DiagnosticError` RT093 where it cannot be done any more and the library says so.
        """


def whole_bytes(buffer: Buffer) -> NDArray[np.uint8]:
    """The bytes of contiguous memory of any type."""
    return buffer.reshape(-1).view(np.uint8)


class Communicator(Protocol):
    """Some ranks that talk with one another, numbered from 0. All make the same collective calls in the same order.

    Collectives move bytes of any type; those that compute name it.
    """

    @property
    def rank(self) -> int:
        """The number of this process."""

    @property
    def size(self) -> int:
        """How many there are."""

    @property
    def tagged(self) -> bool:
        """Whether messages between two ranks are told apart by tags, so that any channel may be used unannounced."""

    def for_messages(self, channels: Sequence[tuple[int, int]]) -> Self:
        """These ranks, to send messages on channels: tag t is the one from rank `channels[t][0]` to rank `channels[t][1]`.

        All make the call. A library whose messages have no tags may want to know beforehand what they would tell apart.
        """

    def isend(self, data: Buffer, to: int, tag: int) -> Request:
        """Send a message. Messages of one tag between two ranks arrive in the order in which they are sent."""

    def irecv(self, into: Buffer, source: int, tag: int) -> Request:
        """Receive a message that is as long as `into`."""

    def iallgather(self, whole: Buffer, part: Buffer | None = None) -> Request:
        """Give every rank the parts of all, in rank order; None: this rank's part stands in its place in `whole`."""

    def iallgatherv(self, whole: Buffer, part: Buffer, counts: Sequence[int]) -> Request:
        """The same for parts of unequal length, of the host: of rank r `counts[r]` elements."""

    def ialltoall(self, gathered: Buffer, parts: Buffer) -> Request:
        """Send part r of `parts` to rank r; what the ranks sent here goes to `gathered`, in rank order."""

    def iallreduce_max(self, values: NDArray[np.uint8]) -> Request:
        """Make every value the greatest of all ranks', in place."""

    def ireduce_scatter_block(self, total: NDArray[np.float32], whole: NDArray[np.float32]) -> Request:
        """Sum all ranks' `whole` in an order that the library chooses; each gets its part. `whole` is left as it is."""

    def ibarrier(self) -> Request:
        """Done when all ranks have made the call."""

    def split(self, colour: int | None) -> Self | None:
        """The ranks that gave the same colour, numbered in the order they have here; None where this one gave none. All make the call."""


class Transport(Protocol):
    """A library, as the job that a launcher has started sees it."""

    engine: ClassVar[str]
    """What `--engine` calls it."""

    @property
    def number(self) -> int:
        """What the launcher calls this process, from 0."""

    @property
    def count(self) -> int:
        """How many processes there are."""

    @property
    def launcher(self) -> str:
        """Who started them, as messages call it."""

    @property
    def description(self) -> str:
        """The library, in words."""

    def start_command(self, processes: int) -> str:
        """How so many would have been started, for messages."""

    def world(self, rank: int) -> Communicator:
        """All processes, of which this one is number `rank`. All make the call; communicators of an earlier one are used no more."""

    def abort(self, code: int) -> NoReturn:
        """End all processes, whatever they do, with this exit code as far as the launcher passes it on."""

    def close(self) -> None:
        """Wait for all others, which are done too: afterwards any may end, and with any exit code."""

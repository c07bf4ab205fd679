"""Protocol between ranks that are processes and the library that moves their bytes.

It has non-blocking calls, and an end of the job. Everything else is decided by the engine (when a call is made, who
sums what), so it is the same over every library.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NoReturn, Protocol, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

Buffer: TypeAlias = NDArray[Any]
"""Contiguous memory, of the host or of a device that the library can reach.

The library reads or writes it until the request that took it is done. The caller must not touch it until then, and
makes no copy.
"""


class Request(Protocol):
    """A call that is under way."""

    def test(self) -> bool:
        """Return whether the call is done, without waiting; once true, always true.

        Raises `DiagnosticError` RT093 if the library reports that it can no longer complete.
        """


def whole_bytes(buffer: Buffer) -> NDArray[np.uint8]:
    """View contiguous memory of any type as one row of bytes."""
    return buffer.reshape(-1).view(np.uint8)


class Communicator(Protocol):
    """A group of ranks, numbered from 0. All members make the same collective calls in the same order.

    Collectives that only move bytes take any type; those that compute name theirs. Every call returns at once.
    """

    @property
    def rank(self) -> int:
        """Number of this process within the group."""

    @property
    def size(self) -> int:
        """Number of members."""

    @property
    def tagged(self) -> bool:
        """True if messages between two ranks are told apart by tags, so that channels need not be announced."""

    def for_messages(self, channels: Sequence[tuple[int, int]]) -> Self:
        """Return these ranks, ready for messages: those with tag t go from `channels[t][0]` to `channels[t][1]`.

        All members make the call. A library without tags prepares here whatever keeps the channels apart.
        """

    def isend(self, data: Buffer, to: int, tag: int) -> Request:
        """Send a message to rank `to`.

        Messages with the same tag between two ranks arrive in the order in which they are sent.
        """

    def irecv(self, into: Buffer, source: int, tag: int) -> Request:
        """Receive a message from rank `source`, exactly as long as `into`."""

    def iallgather(self, whole: Buffer, part: Buffer | None = None) -> Request:
        """Gather the parts of all ranks into `whole`, in rank order.

        If `part` is None, this rank's part is already in its place there.
        """

    def iallgatherv(self, whole: Buffer, part: Buffer, counts: Sequence[int]) -> Request:
        """Gather host parts of unequal length into `whole`; rank r contributes `counts[r]` elements."""

    def ialltoall(self, gathered: Buffer, parts: Buffer) -> Request:
        """Send part r of `parts` to rank r; `gathered` receives what all ranks sent here, in rank order."""

    def ialltoallv(self, gathered: Buffer, parts: Buffer, arriving: Sequence[int], leaving: Sequence[int]) -> Request:
        """Send `leaving[r]` elements of `parts` to rank r; `gathered` receives `arriving[r]` from it, in rank order."""

    def iallreduce_max(self, values: NDArray[np.uint8]) -> Request:
        """Replace every value with the maximum over all ranks, in place."""

    def ireduce_scatter_block(self, total: NDArray[np.float32], whole: NDArray[np.float32]) -> Request:
        """Sum all ranks' `whole` in an order that the library chooses; part r goes to `total` of rank r.

        `whole` is not changed.
        """

    def ibarrier(self) -> Request:
        """Enter a barrier; the request is done when all ranks have entered it."""

    def split(self, colour: int | None) -> Self | None:
        """Return the communicator of the ranks that gave the same colour; None without a colour.

        They keep their order. All members make the call.
        """


class Transport(Protocol):
    """A library and the job that its launcher started, as one process sees them."""

    engine: ClassVar[str]
    """Name of the library as a value of `--engine`."""

    @property
    def number(self) -> int:
        """Number of this process as the launcher counts, from 0."""

    @property
    def count(self) -> int:
        """Number of processes of the job."""

    @property
    def launcher(self) -> str:
        """Name of the launcher in messages."""

    @property
    def description(self) -> str:
        """Name and version of the library, for messages."""

    def start_command(self, processes: int) -> str:
        """Return the command line that would start `processes` processes, for messages."""

    def world(self, rank: int) -> Communicator:
        """Return the communicator of all processes, with this one as number `rank`.

        All make the call. Communicators made from an earlier world must not be used after it.
        """

    def abort(self, code: int) -> NoReturn:
        """End all processes at once, with this exit code as far as the launcher passes it on."""

    def close(self) -> None:
        """Wait until all other processes are done too; after it any process may end, with any exit code."""

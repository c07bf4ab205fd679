"""MPI as a transport of ranks. Each call is one of MPI's own: the protocol is a subset of MPI."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import ClassVar, NoReturn

import numpy as np
from attrs import frozen
from mpi4py import MPI
from numpy.typing import NDArray

from ratrain.targets.runtime.ranks.communicator import Buffer, whole_bytes


@frozen(eq=False)
class _MpiRequest:
    request: MPI.Request

    def test(self) -> bool:
        return bool(self.request.Test())


@frozen(eq=False)
class MpiCommunicator:
    """A communicator of MPI; the protocol `Communicator` documents the calls."""

    comm: MPI.Comm

    @property
    def rank(self) -> int:
        """Number of this process."""
        return int(self.comm.rank)

    @property
    def size(self) -> int:
        """Number of members."""
        return int(self.comm.size)

    @property
    def tagged(self) -> bool:
        """True: MPI's messages have tags."""
        return True

    def for_messages(self, channels: Sequence[tuple[int, int]]) -> MpiCommunicator:
        """Return these ranks; messages have tags, so nothing is prepared."""
        del channels
        return self

    def isend(self, data: Buffer, to: int, tag: int) -> _MpiRequest:
        """Send a message."""
        return _MpiRequest(self.comm.Isend(whole_bytes(data), to, tag))

    def irecv(self, into: Buffer, source: int, tag: int) -> _MpiRequest:
        """Receive a message."""
        return _MpiRequest(self.comm.Irecv(whole_bytes(into), source, tag))

    def iallgather(self, whole: Buffer, part: Buffer | None = None) -> _MpiRequest:
        """Gather the parts of all ranks."""
        mine = MPI.IN_PLACE if part is None else whole_bytes(part)
        return _MpiRequest(self.comm.Iallgather(mine, whole_bytes(whole)))

    def iallgatherv(self, whole: Buffer, part: Buffer, counts: Sequence[int]) -> _MpiRequest:
        """Gather parts of unequal length; sizes are in bytes, as all buffers go as bytes."""
        sizes = [count * whole.itemsize for count in counts]
        return _MpiRequest(self.comm.Iallgatherv(whole_bytes(part), (whole_bytes(whole), sizes)))

    def ialltoall(self, gathered: Buffer, parts: Buffer) -> _MpiRequest:
        """Send part r to rank r."""
        return _MpiRequest(self.comm.Ialltoall(whole_bytes(parts), whole_bytes(gathered)))

    def ialltoallv(
        self, gathered: Buffer, parts: Buffer, arriving: Sequence[int], leaving: Sequence[int]
    ) -> _MpiRequest:
        """Send parts of unequal length; sizes are in bytes, as all buffers go as bytes."""
        sides = ((parts, leaving), (gathered, arriving))
        given, taken = ((whole_bytes(side), [each * side.itemsize for each in counts]) for side, counts in sides)
        return _MpiRequest(self.comm.Ialltoallv(given, taken))

    def iallreduce_max(self, values: NDArray[np.uint8]) -> _MpiRequest:
        """Replace every value with the maximum over all ranks."""
        return _MpiRequest(self.comm.Iallreduce(MPI.IN_PLACE, values, MPI.MAX))

    def ireduce_scatter_block(self, total: NDArray[np.float32], whole: NDArray[np.float32]) -> _MpiRequest:
        """Sum all ranks' `whole`; each gets its part."""
        return _MpiRequest(self.comm.Ireduce_scatter_block(whole, total, MPI.SUM))

    def ibarrier(self) -> _MpiRequest:
        """Enter a barrier; the request is done when all ranks have entered it."""
        return _MpiRequest(self.comm.Ibarrier())

    def split(self, colour: int | None) -> MpiCommunicator | None:
        """Return the communicator of the ranks that gave the same colour, in their order here; None without a colour.

        All ranks call it, those without a colour too.
        """
        part = self.comm.Split(MPI.UNDEFINED if colour is None else colour, self.comm.rank)
        return None if colour is None else MpiCommunicator(part)


class MpiTransport:
    """The job that mpirun has started, which this process is part of."""

    engine: ClassVar[str] = "mpi"
    launcher = "MPI"

    @property
    def number(self) -> int:
        """Number of this process in `COMM_WORLD`."""
        return int(MPI.COMM_WORLD.rank)

    @property
    def count(self) -> int:
        """Number of processes."""
        return int(MPI.COMM_WORLD.size)

    @property
    def description(self) -> str:
        """Name and version of the MPI library."""
        library = MPI.Get_library_version().split("\n")[0].strip().replace("Version:", "").split()
        return f"MPI ({' '.join(library[:2])})"

    def start_command(self, processes: int) -> str:
        """Return the command of mpirun."""
        return f"mpirun -n {processes} ratrainc run ... --engine mpi"

    def world(self, rank: int) -> MpiCommunicator:
        """Return the communicator of all processes, with this one as number `rank`."""
        return MpiCommunicator(MPI.COMM_WORLD.Split(0, rank))

    def abort(self, code: int) -> NoReturn:
        """End all processes."""
        MPI.COMM_WORLD.Abort(code)
        sys.exit(code)  # not reached: MPI has ended the process

    def close(self) -> None:
        """Do nothing: mpirun lets processes end one by one, and waits for all."""

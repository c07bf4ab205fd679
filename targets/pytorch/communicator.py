"""Process groups of torch.distributed as the communicators of ranks.

Arena bytes go to the backend as tensors that share their memory: nothing is copied here. Backends may copy; gloo does in
its gathers.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from attrs import frozen
from numpy.typing import NDArray
from torch.distributed import ProcessGroup

from ratrain.targets.pytorch.requests import DONE, Calls, TorchRequest
from ratrain.targets.runtime.ranks.communicator import Buffer, whole_bytes
from ratrain.targets.runtime.ranks.waiting import finish

if TYPE_CHECKING:
    from torch import Tensor

BACKEND = "gloo"
"""What moves host memory, in which all arenas are."""
TIMEOUT = timedelta(days=365)
"""Ranks wait for one another as long as the watchdog finds nothing wrong with that; a backend's own limit knows less."""

# PyTorch 2.13 gave both a new name, and warns of the old one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@frozen(eq=False)
class TorchCommunicator:
    """A process group."""

    group: ProcessGroup
    members: Sequence[int]
    """their numbers in the group of all"""
    rank: int
    calls: Calls

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self.members)

    def isend(self, data: Buffer, to: int, tag: int) -> TorchRequest:
        """Send a message."""
        if not data.size:  # gloo never ends a message without bytes
            return DONE
        tensor, peer = _tensor(data), self.members[to]
        return self.calls.waited(lambda: dist.isend(tensor, peer, group=self.group, tag=tag))

    def irecv(self, into: Buffer, source: int, tag: int) -> TorchRequest:
        """Receive a message."""
        if not into.size:
            return DONE
        tensor, peer = _tensor(into), self.members[source]
        return self.calls.waited(lambda: dist.irecv(tensor, peer, group=self.group, tag=tag))

    def iallgather(self, whole: Buffer, part: Buffer | None = None) -> TorchRequest:
        """Give every rank the parts of all."""
        return self._gather(_tensor(whole), None if part is None else _tensor(part))

    def _gather(self, whole: Tensor, part: Tensor | None) -> TorchRequest:
        if not whole.numel():
            return DONE
        mine = whole.chunk(self.size)[self.rank] if part is None else part
        return self.calls.polled(lambda: _all_gather(whole, mine, group=self.group, async_op=True))

    def iallgatherv(self, whole: Buffer, part: Buffer, counts: Sequence[int]) -> TorchRequest:
        """Give every rank the parts of all, of unequal length: as parts that are all as long as the longest."""
        if not whole.size:
            return DONE
        longest = max(counts)
        padded = np.zeros(longest, whole.dtype)
        padded[: part.size] = part
        every = np.empty((self.size, longest), whole.dtype)

        def unpad() -> None:
            np.concatenate([row[:count] for row, count in zip(every, counts, strict=True)], out=whole)

        everything, mine = _tensor(every), _tensor(padded)
        return self.calls.polled(lambda: _all_gather(everything, mine, group=self.group, async_op=True), unpad)

    def ialltoall(self, gathered: Buffer, parts: Buffer) -> TorchRequest:
        """Send part r to rank r."""
        if not parts.size:
            return DONE
        out, source = _tensor(gathered), _tensor(parts)
        return self.calls.polled(lambda: dist.all_to_all_single(out, source, group=self.group, async_op=True))

    def iallreduce_max(self, values: NDArray[np.uint8]) -> TorchRequest:
        """Make every value the greatest of all ranks'."""
        if not values.size:
            return DONE
        tensor = _tensor(values)
        return self.calls.polled(lambda: dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group, async_op=True))

    def ireduce_scatter_block(self, total: NDArray[np.float32], whole: NDArray[np.float32]) -> TorchRequest:
        """Sum all ranks' `whole`; each gets its part. Gloo copies the sum out of a temporary only for who waits."""
        if not whole.size:
            return DONE
        out, source = torch.from_numpy(total.reshape(-1)), torch.from_numpy(whole.reshape(-1))
        return self.calls.waited(lambda: _reduce_scatter(out, source, group=self.group, async_op=True))

    def ibarrier(self) -> TorchRequest:
        """Done when all ranks have made the call."""
        return self.calls.polled(lambda: dist.barrier(group=self.group, async_op=True))

    def split(self, colour: int | None) -> TorchCommunicator | None:
        """The ranks that gave the same colour."""
        colours = np.zeros(self.size, np.int64)
        colours[self.rank] = -1 if colour is None else colour
        finish(self.iallgather(colours))
        if colour is None:
            return None
        numbers = [number for number, other in enumerate(colours.tolist()) if other == colour]
        members = [self.members[number] for number in numbers]
        # Only members make the call: a job of many ranks has many groups, and each has to do with few of them.
        group = dist.new_group(members, timeout=TIMEOUT, backend=BACKEND, use_local_synchronization=True)
        return TorchCommunicator(group, members, numbers.index(self.rank), self.calls)


def _tensor(buffer: Buffer) -> Tensor:
    """The bytes of a buffer as a tensor, which shares its memory and keeps it alive."""
    return torch.from_numpy(whole_bytes(buffer))

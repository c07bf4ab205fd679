"""Process groups of torch.distributed as the communicators of ranks.

Arena bytes are given to the backend as tensors that share their memory: nothing is copied here. Backends may copy; gloo
does in its gathers. NCCL moves device memory, gloo host memory, in groups that have both. A call of NCCL starts behind
the work of the current stream and is done when the GPU is done with it, so no event is needed afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from attrs import evolve, frozen
from numpy.typing import NDArray
from torch.distributed import ProcessGroup

from ratrain.targets.pytorch.ranks.channel_groups import channel_groups
from ratrain.targets.pytorch.ranks.requests import DONE, Calls, TorchRequest
from ratrain.targets.runtime.ranks.communicator import Buffer, whole_bytes
from ratrain.targets.runtime.ranks.waiting import finish

if TYPE_CHECKING:
    from torch import Tensor

HOST_BACKEND = "gloo"
"""Backend for host memory: everything in runs on the processor, and whatever ranks on GPUs exchange besides tensors."""
GPU_BACKEND = "nccl"
BOTH_BACKENDS = f"cpu:{HOST_BACKEND},cuda:{GPU_BACKEND}"
"""Backend of each kind of memory, as torch.distributed takes it."""
TIMEOUT = timedelta(days=365)
"""Ranks wait for one another until the watchdog objects, which knows more than a backend's own limit."""

# PyTorch 2.13 gave both a new name, and warns of the old one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@frozen(eq=False)
class TorchCommunicator:
    """A process group; the protocol `Communicator` documents the calls."""

    group: ProcessGroup
    members: Sequence[int]
    """their numbers in the world group"""
    rank: int
    calls: Calls
    backend: str = HOST_BACKEND
    """backend of its groups"""
    tagged: bool = True
    """whether messages have tags; NCCL's have none"""
    channels: Sequence[ProcessGroup] = ()
    """groups of channels by tag; empty if messages have tags"""

    @property
    def message_backend(self) -> str:
        """Backend of groups of channels, on which only parts of arenas are sent."""
        return GPU_BACKEND if self.backend == BOTH_BACKENDS else self.backend

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.members)

    def for_messages(self, channels: Sequence[tuple[int, int]]) -> TorchCommunicator:
        """Return these ranks; if messages have no tags, with a group for each channel.

        All members make the call, with the same channels in the same order, even where they are no end of one. Where
        groups are made, raises ValueError for a channel from a rank to itself.
        """
        if self.tagged:
            return self
        groups = [self._group(ends, self.message_backend) for ends in channel_groups(channels, self.rank)]
        return evolve(self, channels=groups)

    def _group(self, numbers: Sequence[int], backend: str) -> ProcessGroup:
        """Make a group of some of these ranks.

        Only members make the call: a job of many ranks has many groups, and each rank is in few. But all ranks make
        equally many groups, since PyTorch names a group by the number made before.
        """
        members = [self.members[number] for number in numbers]
        return dist.new_group(members, timeout=TIMEOUT, backend=backend, use_local_synchronization=True)

    def isend(self, data: Buffer, to: int, tag: int) -> TorchRequest:
        """Send a message."""
        return self._message(dist.isend, data, to, tag)

    def irecv(self, into: Buffer, source: int, tag: int) -> TorchRequest:
        """Receive a message."""
        return self._message(dist.irecv, into, source, tag)

    def _message(self, post: Callable[..., Any], data: Buffer, other: int, tag: int) -> TorchRequest:
        tensor, peer = _tensor(data), self.members[other]
        if not tensor.numel():  # gloo never ends a message without bytes
            return DONE
        # gloo reports the end of a message only to a thread that waits for it; NCCL can be asked
        made = self.calls.polled if tensor.is_cuda else self.calls.waited
        if self.tagged:
            return made(lambda: post(tensor, peer, group=self.group, tag=tag))
        return made(lambda: post(tensor, peer, group=self.channels[tag]))

    def iallgather(self, whole: Buffer, part: Buffer | None = None) -> TorchRequest:
        """Gather the parts of all ranks."""
        return self._gather(_tensor(whole), None if part is None else _tensor(part))

    def _gather(self, whole: Tensor, part: Tensor | None) -> TorchRequest:
        if not whole.numel():
            return DONE
        mine = whole.chunk(self.size)[self.rank] if part is None else part
        return self.calls.polled(lambda: _all_gather(whole, mine, group=self.group, async_op=True))

    def iallgatherv(self, whole: Buffer, part: Buffer, counts: Sequence[int]) -> TorchRequest:
        """Gather parts of unequal length, each padded to the longest: torch.distributed gathers equal parts only."""
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
        out, source = _tensor(gathered), _tensor(parts)
        if not source.numel():
            return DONE
        return self.calls.polled(lambda: dist.all_to_all_single(out, source, group=self.group, async_op=True))

    def ialltoallv(
        self, gathered: Buffer, parts: Buffer, arriving: Sequence[int], leaving: Sequence[int]
    ) -> TorchRequest:
        """Send parts of unequal length."""
        out, source = _tensor(gathered), _tensor(parts)
        sizes = [[count * parts.itemsize for count in counts] for counts in (arriving, leaving)]
        return self.calls.polled(lambda: dist.all_to_all_single(out, source, *sizes, group=self.group, async_op=True))

    def iallreduce_max(self, values: NDArray[np.uint8]) -> TorchRequest:
        """Replace every value with the maximum over all ranks."""
        tensor = _tensor(values)
        if not tensor.numel():  # gloo never completes a message without bytes
            return DONE
        return self.calls.polled(lambda: dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group, async_op=True))

    def ireduce_scatter_block(self, total: NDArray[np.float32], whole: NDArray[np.float32]) -> TorchRequest:
        """Sum all ranks' `whole`; each gets its part."""
        out, source = (_tensor(each).view(torch.float32) for each in (total, whole))
        if not source.numel():
            return DONE
        # gloo copies the sum out of a temporary only in `wait`, so that polling would never see it in `out`
        made = self.calls.polled if source.is_cuda else self.calls.waited
        return made(lambda: _reduce_scatter(out, source, group=self.group, async_op=True))

    def ibarrier(self) -> TorchRequest:
        """Enter a barrier; the request is done when all ranks have entered it."""
        nothing = torch.zeros(1)  # on the host: the library's own barrier would choose a device
        return self.calls.polled(lambda: dist.all_reduce(nothing, group=self.group, async_op=True))

    def split(self, colour: int | None) -> TorchCommunicator | None:
        """Return the communicator of the ranks that gave the same colour; None without a colour."""
        colours = np.zeros(self.size, np.int64)
        colours[self.rank] = -1 if colour is None else colour
        # a group needs its members' numbers first, so the colours are exchanged
        finish(self.iallgather(colours))
        if colour is None:
            # unused, but every rank must have made equally many groups
            self._group([self.rank], self.backend)
            return None
        numbers = [number for number, other in enumerate(colours.tolist()) if other == colour]
        members = [self.members[number] for number in numbers]
        return evolve(self, group=self._group(numbers, self.backend), members=members, rank=numbers.index(self.rank))


def _tensor(buffer: Buffer | Tensor) -> Tensor:
    """View the bytes of a buffer, or of a contiguous tensor, as a tensor that shares and keeps alive its memory."""
    if isinstance(buffer, torch.Tensor):
        return buffer.view(-1).view(torch.uint8)
    return torch.from_numpy(whole_bytes(buffer))

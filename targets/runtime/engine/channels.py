"""Messages in transit between the ranks of one process, in memory outside the arenas."""

from __future__ import annotations

from collections import defaultdict, deque
from threading import Lock
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from ratrain.targets.runtime.arena.kernel_memory import HOST, Memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ratrain.ratrain_ir.topology import Hop


class Channels:
    """Queue of messages for each channel of each rank of a stage. Ranks may send and receive concurrently."""

    def __init__(self, memory: Memory = HOST) -> None:
        self._memory = memory
        self.nbytes = 0
        """Bytes of all messages in transit."""
        self.peak_nbytes = 0
        self._queues: dict[tuple[Hop, int], deque[NDArray[Any]]] = {}
        self._lock = Lock()
        self._spare: defaultdict[tuple[Any, Any], list[NDArray[Any]]] = defaultdict(list)
        """Buffers of messages that have been received, by shape and dtype, for reuse."""

    def reserve(self, data: NDArray[Any], count: int) -> None:
        """Allocate buffers for `count` messages like `data`: up to that many, sending allocates nothing."""
        spare = self._spare[data.shape, data.dtype]
        while len(spare) < count:
            spare.append(self._memory.empty_like(data))

    def send(self, hop: Hop, lane: int, parts: Sequence[NDArray[Any]]) -> None:
        """Copy a message out, part by part."""
        for data in parts:
            self._count(data.nbytes)
            with self._lock:
                spare = self._spare[data.shape, data.dtype]
                message = spare.pop() if spare else self._memory.empty_like(data)
            self._memory.copy(message, data)
            self._queue(hop, lane).append(message)

    def has_message(self, hop: Hop, lane: int, parts: int = 1) -> bool:
        """Return True if a message has arrived with all its parts."""
        return len(self._queue(hop, lane)) >= parts

    def receive(self, hop: Hop, lane: int, parts: Sequence[NDArray[Any]]) -> None:
        """Copy the oldest message of a channel into `parts`.

        Raises IndexError where there is none.
        """
        queue = self._queue(hop, lane)
        # The parts leave the queue only after all copies: until then `has_message` is true, and a sender that must not
        # run ahead (`ready_to_meet`) waits.
        for place, out in enumerate(parts):
            self._memory.copy(out, queue[place])
        for _ in parts:
            data = queue.popleft()
            self._count(-data.nbytes)
            with self._lock:
                self._spare[data.shape, data.dtype].append(data)

    def _queue(self, hop: Hop, lane: int) -> deque[NDArray[Any]]:
        """Return a channel's queue. It has one sender and one receiver, so a deque needs no lock."""
        return self._queues.setdefault((hop, lane), deque())

    def _count(self, change: int) -> None:
        with self._lock:
            self.nbytes += change
            self.peak_nbytes = max(self.peak_nbytes, self.nbytes)

"""Messages between the ranks of one process, on their way: transport memory outside the arenas."""

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
    """A queue of messages for each channel of each rank of a stage. Ranks may send and receive side by side."""

    def __init__(self, memory: Memory = HOST) -> None:
        self._memory = memory
        self.nbytes = 0
        """Of all messages on their way."""
        self.peak_nbytes = 0
        self._queues: dict[tuple[Hop, int], deque[NDArray[Any]]] = {}
        self._lock = Lock()
        self._spare: defaultdict[tuple[Any, Any], list[NDArray[Any]]] = defaultdict(list)
        """Messages that have arrived, for others of their shape."""

    def reserve(self, data: NDArray[Any], count: int) -> None:
        """Have room for so many messages that look like `data`: within that, sending allocates nothing."""
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
        """Whether there is one to receive, with all its parts."""
        return len(self._queue(hop, lane)) >= parts

    def receive(self, hop: Hop, lane: int, parts: Sequence[NDArray[Any]]) -> None:
        """Copy a message in that has arrived: the one that was sent first. It is there until all of it is copied.

        Raises IndexError where there is none.
        """
        queue = self._queue(hop, lane)
        for place, out in enumerate(parts):
            self._memory.copy(out, queue[place])
        for _ in parts:
            data = queue.popleft()
            self._count(-data.nbytes)
            with self._lock:
                self._spare[data.shape, data.dtype].append(data)

    def _queue(self, hop: Hop, lane: int) -> deque[NDArray[Any]]:
        return self._queues.setdefault((hop, lane), deque())

    def _count(self, change: int) -> None:
        with self._lock:
            self.nbytes += change
            self.peak_nbytes = max(self.peak_nbytes, self.nbytes)

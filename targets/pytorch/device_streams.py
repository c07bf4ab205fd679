"""Engines as streams of a device, waits as events: work overlaps as far as the program allows, and no further.

Each engine of a rank has a stream. An instruction is issued to it behind the events of exactly what it waits for:

    compute  [forward m0]-e1     [forward m1]           e1, e2: events
    send          wait e1 [send m0]-e2
    recv (next stage)        wait e2 [recv m0]

A message is received behind the event of its sending. Sends share buffers, so a send waits for the receipts so far: one
of them may still read the buffer. A collective runs on its first member's stream, behind the other members' earlier
instructions and before their later ones.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch

from ratrain.ratrain_ir.ops.base import Engine
from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.ratrain_ir.topology import Hop, Rank

if TYPE_CHECKING:
    from ratrain.targets.runtime.arena.streams import Graph, Issue

_Key: TypeAlias = tuple[Rank, Engine]
_MILLISECONDS = 1e3
"""Units of CUDA's clock in a second."""
_CYCLES = 2e9
"""Cycles of a multiprocessor in a second, of the fastest ones."""


class Device(Protocol):
    """Interface to a device's streams and events."""

    def stream(self) -> Any:
        """Make a stream."""

    def record(self, stream: Any) -> Any:
        """Make an event that marks all work issued to a stream so far."""

    def wait(self, stream: Any, event: Any) -> None:
        """Let work issued to a stream from here on wait for an event."""

    def running(self, stream: Any) -> AbstractContextManager[Any]:
        """Issue the work of the body to that stream."""

    def synchronize(self) -> None:
        """Wait for all streams."""

    def current(self) -> Any:
        """Return the stream that the caller's own work is issued to."""

    def graph(self, issue: Callable[[], None]) -> Graph:
        """Record all that `issue` issues to the current stream and those that wait for it, without executing it."""


class CudaDevice:
    """`Device` of CUDA."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stream(self) -> torch.cuda.Stream:
        """Make a stream."""
        return torch.cuda.Stream(self._device)

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Make an event that marks all work issued to a stream so far."""
        return stream.record_event()

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """Let work issued to a stream from here on wait for an event."""
        stream.wait_event(event)

    def running(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        """Issue the work of the body to that stream."""
        return torch.cuda.stream(stream)

    def synchronize(self) -> None:
        """Wait for all streams."""
        torch.cuda.synchronize(self._device)

    def current(self) -> torch.cuda.Stream:
        """Return PyTorch's current stream; while a graph is recorded, the stream that it is recorded from."""
        return torch.cuda.current_stream(self._device)

    def graph(self, issue: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Record a CUDA graph. Raises `DiagnosticError` RT093 if something cannot be recorded."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=torch.cuda.Stream(self._device)):
                issue()
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            fail("RT093", f"CUDA cannot capture a step: {reason}", help="leave --graph out")
        return graph


class CudaStopwatch:
    """`Stopwatch` of CUDA: events on the current stream, so the device's work and its waits for the host count."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def hold(self, seconds: float) -> None:
        """Let the current stream wait for about so long, by the clock of a fast GPU."""
        with torch.cuda.device(self._device):
            torch.cuda._sleep(int(seconds * _CYCLES))  # noqa: SLF001  PyTorch has no other name for it

    def mark(self) -> torch.cuda.Event:
        """Record an event behind all work issued so far."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, marks: Sequence[torch.cuda.Event]) -> list[float]:
        """Wait for the last event; return the seconds between neighbouring events."""
        marks[-1].synchronize()
        return [before.elapsed_time(after) / _MILLISECONDS for before, after in pairwise(marks)]

    def now(self) -> float:
        """Return the host's clock (seconds) once the device has done everything."""
        torch.cuda.synchronize(self._device)
        return perf_counter()


class StreamOrder:
    """`Order` of a device's streams."""

    captures = True

    def __init__(self, device: Device) -> None:
        self._device = device
        self._streams: dict[_Key, Any] = {}
        self._done: defaultdict[_Key, dict[int, Any]] = defaultdict(dict)
        """Events of this step's instructions: engine -> number of instructions done with this one -> event."""
        self._sent: defaultdict[tuple[Hop, Rank], deque[Any]] = defaultdict(deque)
        """Events of messages on their way, by channel and sending rank."""
        self._start: Any = None
        """Event of the work that the caller had issued when the step began."""
        self._received: dict[tuple[Hop, Rank], Any] = {}
        """Event of the last receipt, by channel and sending rank.

        The next message of any channel may use its buffer.
        """

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Fork all streams from the current one, and join them at the end; later steps need none of their events."""
        device, current = self._device, self._device.current()
        self._start = device.record(current)
        for stream in self._streams.values():
            device.wait(stream, self._start)
        yield
        for stream in self._streams.values():
            device.wait(current, device.record(stream))
        self._done.clear()
        self._received.clear()

    @contextmanager
    def issuing(self, issues: Sequence[Issue], hop: Hop | None, *, sends: bool) -> Iterator[None]:
        """Issue the work of the body to the engine's stream, behind everything that it waits for."""
        device, first = self._device, issues[0]
        stream = self._stream((first.place, first.engine))
        for issue in issues:
            for engine, count in issue.waits:
                self._wait(stream, (issue.place, engine), count)
            if issue is not first:
                self._wait(stream, (issue.place, issue.engine), issue.number)
        # A channel's events are a queue: the k-th receive waits for the k-th send, whatever else is on its way.
        channel = None if hop is None else (hop, first.place._replace(stage=hop.source))
        if channel is not None and not sends:
            device.wait(stream, self._sent[channel].popleft())
        elif channel is not None:
            for event in self._received.values():
                device.wait(stream, event)
        with device.running(stream):
            yield
        # One event serves all members of a collective, whose own streams wait for it. It is filed under the number of
        # instructions done with this one, which is how later instructions name their waits.
        event = device.record(stream)
        for issue in issues:
            self._done[issue.place, issue.engine][issue.number + 1] = event
            if issue is not first:
                device.wait(self._stream((issue.place, issue.engine)), event)
        if channel is not None and sends:
            self._sent[channel].append(event)
        elif channel is not None:
            self._received[channel] = event

    def synchronize(self) -> None:
        """Return when all issued work is done."""
        self._device.synchronize()

    def graph(self, issue: Callable[[], None]) -> Graph:
        """Record all that `issue` issues, without executing it; of a `joined` step, all streams with their waits."""
        return self._device.graph(issue)

    def _stream(self, key: _Key) -> Any:
        if key not in self._streams:
            # a stream made during a step was not forked with the others: it waits for the step's begin here
            self._streams[key] = self._device.stream()
            self._device.wait(self._streams[key], self._start)
        return self._streams[key]

    def _wait(self, stream: Any, key: _Key, count: int) -> None:
        """Wait for an engine's first `count` instructions, unless they are of a step before."""
        # instructions of earlier steps have no event: the fork at the step's begin is behind all of them
        event = self._done[key].get(count)
        if event is not None:
            self._device.wait(stream, event)

"""Engines as streams of a device, waits as events: what the program lets overlap may overlap there, and nothing else.

An instruction is issued to the stream of its rank's engine behind events of exactly what it waits for; a message is
received behind the event of its sending, and a buffer written anew behind the receipts before, one of which it may come
from; a collective runs on its first member's stream, behind and before the other members' own.
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
"""The unit of CUDA's clock, a second."""


class Device(Protocol):
    """What streams and events are made of."""

    def stream(self) -> Any:
        """A new stream."""

    def record(self, stream: Any) -> Any:
        """A new event: all that was issued to a stream."""

    def wait(self, stream: Any, event: Any) -> None:
        """Let what is issued to a stream from now on wait for an event."""

    def running(self, stream: Any) -> AbstractContextManager[Any]:
        """Issue to that stream what the body does."""

    def synchronize(self) -> None:
        """Wait for all streams."""

    def current(self) -> Any:
        """The stream that the caller's own work is issued to."""

    def graph(self, issue: Callable[[], None]) -> Graph:
        """Whatever `issue` issues, to the current stream and those that wait for it, recorded and not done."""


class CudaDevice:
    """`Device` of CUDA."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stream(self) -> torch.cuda.Stream:
        """A new stream."""
        return torch.cuda.Stream(self._device)

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """A new event: all that was issued to a stream."""
        return stream.record_event()

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """Let what is issued to a stream from now on wait for an event."""
        stream.wait_event(event)

    def running(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        """Issue to that stream what the body does."""
        return torch.cuda.stream(stream)

    def synchronize(self) -> None:
        """Wait for all streams."""
        torch.cuda.synchronize(self._device)

    def current(self) -> torch.cuda.Stream:
        """PyTorch's current stream: while a graph is recorded, the one that it is recorded from."""
        return torch.cuda.current_stream(self._device)

    def graph(self, issue: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """A graph of CUDA. Raises `DiagnosticError` RT093 where something cannot be recorded."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=torch.cuda.Stream(self._device)):
                issue()
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            fail("RT093", f"CUDA cannot capture a step: {reason}", help="leave --graph out")
        return graph


class CudaStopwatch:
    """`Stopwatch` of CUDA: events on the stream that is current, so that it counts what the device does, and waits for its host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        """An event behind what was issued."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, marks: Sequence[torch.cuda.Event]) -> list[float]:
        """Seconds between events, once the last has happened."""
        marks[-1].synchronize()
        return [before.elapsed_time(after) / _MILLISECONDS for before, after in pairwise(marks)]

    def now(self) -> float:
        """The host's clock when the device has done everything."""
        torch.cuda.synchronize(self._device)
        return perf_counter()


class StreamOrder:
    """`Order` of a device's streams."""

    captures = True

    def __init__(self, device: Device) -> None:
        self._device = device
        self._streams: dict[_Key, Any] = {}
        self._done: defaultdict[_Key, dict[int, Any]] = defaultdict(dict)
        """By engine: the event of each of its instructions of this step, by how many were done with it."""
        self._sent: defaultdict[tuple[Hop, Rank], deque[Any]] = defaultdict(deque)
        """By channel and the rank that sends: the events of messages on their way."""
        self._start: Any = None
        """What the caller had issued when a step began."""
        self._received: dict[tuple[Hop, Rank], Any] = {}
        """By channel and the rank that sends: the event of the last receipt. Its buffer the next message may use, of whichever channel: they share them."""

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Fork all streams from the current one, and join them to it; nothing that a later step waits for is left then."""
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
        """Issue what the body does to the engine's stream, behind what it waits for."""
        device, first = self._device, issues[0]
        stream = self._stream((first.place, first.engine))
        for issue in issues:
            for engine, count in issue.waits:
                self._wait(stream, (issue.place, engine), count)
            if issue is not first:
                self._wait(stream, (issue.place, issue.engine), issue.number)
        channel = None if hop is None else (hop, first.place._replace(stage=hop.source))
        if channel is not None and not sends:
            device.wait(stream, self._sent[channel].popleft())
        elif channel is not None:
            for event in self._received.values():
                device.wait(stream, event)
        with device.running(stream):
            yield
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
        """Return when all is done that was issued."""
        self._device.synchronize()

    def graph(self, issue: Callable[[], None]) -> Graph:
        """Whatever `issue` issues, recorded and not done: of a `joined` step all streams, each where the program lets it go on."""
        return self._device.graph(issue)

    def _stream(self, key: _Key) -> Any:
        if key not in self._streams:
            self._streams[key] = self._device.stream()
            self._device.wait(self._streams[key], self._start)
        return self._streams[key]

    def _wait(self, stream: Any, key: _Key, count: int) -> None:
        """Wait for an engine's first `count` instructions, unless they are of a step before."""
        event = self._done[key].get(count)
        if event is not None:
            self._device.wait(stream, event)

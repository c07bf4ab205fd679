"""A device that does later what it is asked, in any order that its streams and events allow: real kernels, on real arenas.

Streams of a GPU may run one after the other, so that a wait that is missing changes nothing. Here a stream that may run at once often has to
stand back until all others can do no more, as chance has it: whoever should have been waited for is late. Streams take
turns operator by operator, so that two instructions which share a number outside the arenas are found too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from attrs import define, field

from ratrain.targets.pytorch.device.device_kernels import TorchDevice
from ratrain.targets.pytorch.device.device_memory import DeviceMemory
from ratrain.targets.pytorch.device_streams import StreamOrder
from tests.end_to_end.tiny_runs import start
from tests.targets.pytorch.recording import Recorder, no_host_reads

if TYPE_CHECKING:
    from ratrain.targets.program.program import Program

ANEW = 0.1
"""How often the order in which streams are asked is drawn anew."""


@define(eq=False)
class _Event:
    done: bool = False


@define(eq=False)
class _Stream:
    todo: deque[Any] = field(factory=deque)
    """closures to run; events to set; events, in a list, to wait for"""


@define(eq=False)
class ShuffledDevice:
    """`Device` of streams and events that runs nothing before it is synchronized."""

    random: Random
    streams: list[_Stream] = field(factory=lambda: [_Stream()])
    """the first is the caller's own"""
    used: _Stream | None = None

    def stream(self) -> _Stream:
        self.streams.append(_Stream())
        return self.streams[-1]

    def record(self, stream: _Stream) -> _Event:
        event = _Event()
        stream.todo.append(event)
        return event

    def wait(self, stream: _Stream, event: _Event) -> None:
        stream.todo.append([event])

    @contextmanager
    def running(self, stream: _Stream) -> Iterator[None]:
        self.used = stream
        yield
        self.used = None

    def current(self) -> _Stream:
        return self.streams[0]

    def do(self, action: Callable[[], None]) -> None:
        """Do something on the stream that is issued to."""
        assert self.used is not None
        self.used.todo.append(action)

    def synchronize(self) -> None:
        """Run everything: always what comes first in a random order of streams, and can run."""
        order = list(self.streams)
        while any(stream.todo for stream in order):
            if self.random.random() < ANEW:
                self.random.shuffle(order)
            assert any(map(self._advance, order)), "streams wait for each other"

    def _advance(self, stream: _Stream) -> bool:
        """Run a stream up to the end of its next action; whether it went on at all."""
        moved = False
        while stream.todo:
            item = stream.todo[0]
            if isinstance(item, list) and not item[0].done:
                return moved
            stream.todo.popleft()
            moved = True
            if isinstance(item, _Event):
                item.done = True
            elif not isinstance(item, list):
                item()
                return True
        return moved


class _DeferringMemory(DeviceMemory):
    """Memory whose engines overlap, on a device that shuffles."""

    overlaps = True  # type: ignore[assignment]

    def __init__(self, device: ShuffledDevice, make_order: Callable[[Any], StreamOrder]) -> None:
        super().__init__(torch.device("cpu"))
        self._order = make_order(device)

    def order(self) -> StreamOrder:
        return self._order


class _Messages:
    """Memory of channels: who keeps which buffer is settled when a message is issued, its bytes move when the stream runs."""

    def __init__(self, memory: Any, device: ShuffledDevice) -> None:
        self._memory, self._device = memory, device

    def empty_like(self, array: Any) -> Any:
        return self._memory.empty_like(array)

    def copy(self, target: Any, source: Any) -> None:
        self._device.do(lambda: self._memory.copy(target, source))


class ShuffledRun:
    """Steps of a program on a shuffling device, from the same state again and again."""

    def __init__(
        self, program: Program, steps: int = 2, make_order: Callable[[Any], StreamOrder] = StreamOrder
    ) -> None:
        self.steps = steps
        self._random = Random()
        self._make_order = make_order
        plain = start(program, steps, kernels="torch-device").engine
        self.ranks = [rank for ranks in plain.ranks for rank in ranks]
        self._first = [rank.arena.clone() for rank in self.ranks]
        self.expected = self._outcome(plain)

    def _outcome(self, engine: Any) -> tuple[float, list[bytes]]:
        """The loss, and all bytes that the next step depends on, after some steps between which nobody waits."""
        engine.updater.begin_step(1, engine.loss_scale[0])
        engine._run_pass(self.steps, 0)
        ranks = [rank for ranks in engine.ranks for rank in ranks]
        carried = [
            engine.kernels.memory.bytes_of(view).numpy().tobytes()
            for rank in ranks
            for view, tensor in zip(rank.views, rank.stage.tensors, strict=True)
            if tensor.carried
        ]
        return engine.updater.log.loss, carried

    def outcome(self, program: Program, seed: int) -> tuple[float, list[bytes]]:
        """The outcome of a program with the same arenas, under an order of its streams; numbers that are no numbers are as good as any."""
        device = ShuffledDevice(Random(seed))
        kernels = TorchDevice()
        kernels.memory = _DeferringMemory(device, self._make_order)
        engine: Any = start_engine(program, kernels)
        for rank, bytes_ in zip((rank for ranks in engine.ranks for rank in ranks), self._first, strict=True):
            rank.arena.copy_(bytes_)
        engine.channels._memory = _Messages(kernels.memory, device)
        execute = engine.execute

        def issued(members: Any, step: int) -> None:
            if members[0][1].ends(members[0][0].stage_index) is not None:
                execute(members, step)
                return
            with Recorder() as recorder, no_host_reads():
                execute(members, step)
            for call in recorder.calls:
                device.do(call)

        engine.execute = issued
        with np.errstate(all="ignore"):
            return self._outcome(engine)

    def changes(self, program: Program, seed: int) -> bool:
        """Whether a program leaves other bits under an order than the sound one leaves under its own; a failure is a change."""
        try:
            loss, carried = self.outcome(program, seed)
        except (IndexError, RuntimeError):  # of a token that is none: inputs were read before they were there
            return True
        return carried != self.expected[1] or np.float64(loss).tobytes() != np.float64(self.expected[0]).tobytes()


def start_engine(program: Program, kernels: Any) -> Any:
    """An engine of a program, whose arenas hold nothing yet."""
    from ratrain.targets.runtime.data.data import Batches
    from ratrain.targets.runtime.engine.local import LocalEngine
    from tests.end_to_end.tiny_runs import run_settings, stream_for

    batches = Batches(stream_for(program), program.plan, run_settings(1).order, program.plan.seed)
    return LocalEngine(program, kernels, batches)

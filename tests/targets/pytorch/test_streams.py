"""Engines as streams: what a device may do at the same time is what the program lets overlap, on a device that only keeps clocks."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from attrs import define, evolve, field

from ratrain.ratrain_ir.ops.base import Engine
from ratrain.ratrain_ir.topology import Rank
from tests.end_to_end.tiny_runs import MODEL, make_program, start

pytestmark = pytest.mark.parity
StreamOrder = pytest.importorskip("ratrain.targets.pytorch.device_streams", exc_type=ImportError).StreamOrder

_Key = tuple[Rank, Engine, int]
"""A rank's engine, and a number of its instructions."""
Clock = dict[int, int]
"""How much of each stream, by its number, comes before."""


@define(eq=False)
class _Stream:
    number: int
    clock: Clock = field(factory=dict)


@define(eq=False)
class ClockDevice:
    """Streams and events as vector clocks: everything is issued, nothing is known but what must come before what."""

    streams: list[_Stream] = field(factory=lambda: [_Stream(0)])
    """the first is the caller's own"""
    used: _Stream | None = None
    synchronized: int = 0

    def stream(self) -> _Stream:
        self.streams.append(_Stream(len(self.streams)))
        return self.streams[-1]

    def record(self, stream: _Stream) -> Clock:
        stream.clock[stream.number] = stream.clock.get(stream.number, 0) + 1
        return dict(stream.clock)

    def wait(self, stream: _Stream, event: Clock) -> None:
        for number, count in event.items():
            stream.clock[number] = max(stream.clock.get(number, 0), count)

    @contextmanager
    def running(self, stream: _Stream) -> Iterator[None]:
        self.used = stream
        yield
        self.used = None

    def current(self) -> _Stream:
        return self.streams[0]

    def synchronize(self) -> None:
        self.synchronized += 1
        everything = {stream.number: stream.clock.get(stream.number, 0) for stream in self.streams}
        for stream in self.streams:
            self.wait(stream, everything)


def before(one: Clock, other: Clock) -> bool:
    return all(other.get(number, 0) >= count for number, count in one.items())


PROGRAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "2x2": ("ratrain", {"zero": 3}),
    "tied": ("ratrain", {"zero": 2, "reduce": "each-micro-batch"}),
    "interleaved": ("interleaved", {"chunks": 2, "micro_batches": 4, "cuts": (1, 2, 3)}),
    "slices": ("seq1f1b", {"slices": (5, 5)}),
}


@define(eq=False)
class Spy:
    """An order under watch: every wait, message and buffer must be an order of its streams."""

    order: Any
    device: ClockDevice
    began: dict[_Key, Clock] = field(factory=dict)
    ended: dict[_Key, Clock] = field(factory=dict)
    """by how many instructions the engine was issued until then"""
    sent: defaultdict[Any, list[Clock]] = field(factory=lambda: defaultdict(list))
    received: defaultdict[Any, list[Clock]] = field(factory=lambda: defaultdict(list))

    @contextmanager
    def issuing(self, issues: Any, hop: Any, *, sends: bool) -> Iterator[None]:
        first = issues[0]
        with self.order.issuing(issues, hop, sends=sends):
            stream = self.device.used
            assert stream is not None
            clock = dict(stream.clock)
            yield
        done = dict(stream.clock)
        for issue in issues:
            for engine, count in (*issue.waits, (issue.engine, issue.number)):
                assert not count or before(self.ended[issue.place, engine, count], clock), "an instruction overtakes"
            self.began[issue.place, issue.engine, issue.number] = clock
            self.ended[issue.place, issue.engine, issue.number + 1] = done
        if hop is None:
            return
        sent, received = self.sent[hop, first.place.replica], self.received[hop, first.place.replica]
        if sends:
            freed = [done for channel in self.received.values() for done in channel]  # channels share their buffers
            assert all(before(each, clock) for each in freed), (
                "a buffer is written anew before its message was received"
            )
            sent.append(done)
        else:
            assert before(sent[len(received)], clock), "a message is received before it was sent"
            received.append(done)

    @contextmanager
    def joined(self) -> Iterator[None]:
        caller = self.device.current()
        given, earlier = self.device.record(caller), len(self.began)
        with self.order.joined():
            yield
        began = list(self.began.values())[earlier:]
        assert began
        assert all(before(given, clock) for clock in began), "a step begins before what it is given"
        assert all(before(done, caller.clock) for done in self.ended.values()), "a step is not joined"

    def synchronize(self) -> None:
        self.order.synchronize()


def watched(kind: str, order: Callable[[ClockDevice], Any]) -> Spy:
    """Two steps of a program under watch."""
    name, keys = PROGRAMS[kind]
    program = make_program(evolve(MODEL, layers=4, tied_embeddings=kind == "tied"), name, **keys)
    engine: Any = start(program, 2).engine
    device = ClockDevice()
    engine.order = spy = Spy(order(device), device)
    engine.run_step(0)
    engine.run_step(1)
    return spy


@pytest.mark.parametrize("kind", PROGRAMS)
def test_every_wait_and_message_is_an_order_of_streams(kind: str) -> None:
    spy = watched(kind, StreamOrder)
    assert spy.device.synchronized == 2
    assert sum(map(len, spy.sent.values())) == sum(map(len, spy.received.values())) > 0
    ended, began = list(spy.ended.items())[:80], list(spy.began.items())[:80]
    apart = [
        (one, other) for one, end in ended for other, begin in began if one[:2] != other[:2] and not before(end, begin)
    ]
    assert apart, "nothing may overlap: this order is stricter than the program"


def test_an_evaluation_between_steps_leaves_no_message_behind() -> None:
    engine: Any = start(make_program(), 2).engine
    device = ClockDevice()
    engine.order = spy = Spy(StreamOrder(device), device)
    engine.run_step(0)
    sent = sum(map(len, spy.sent.values()))
    engine.run_forward(engine.batches, 0)
    assert sent < sum(map(len, spy.sent.values())) < 2 * sent
    spy.began.clear()  # the next step has the numbers of the one that was evaluated
    engine.run_step(1)
    assert sum(map(len, spy.sent.values())) == sum(map(len, spy.received.values()))


class _WithoutWaits(StreamOrder):
    def _wait(self, stream: Any, key: Any, count: int) -> None:
        """Wait for nothing."""


def _without_messages(device: ClockDevice) -> StreamOrder:
    order = StreamOrder(device)
    order._sent = defaultdict(lambda: deque([{}] * 10**4))
    return order


def without_receipts(device: ClockDevice) -> StreamOrder:
    class Forgetful(dict[Any, Any]):
        def __setitem__(self, _key: Any, _event: Any) -> None: ...

    order = StreamOrder(device)
    order._received = Forgetful()
    return order


@pytest.mark.parametrize(
    ("order", "seen"),
    [
        (_WithoutWaits, "overtakes"),
        (_without_messages, "before it was sent"),
        (without_receipts, "written anew"),
    ],
)
def test_a_wait_that_is_dropped_is_seen(order: Any, seen: str) -> None:
    with pytest.raises(AssertionError, match=seen):
        watched("2x2", order)

"""One order of the whole pipeline: the run of a schedule in which every forward, and every half of a backward, takes one unit of time.

Messages take none and pass as soon as what they carry is made. Stage lists that follow the order of this run agree with it, and so
with each other, message by message.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from attrs import define, field, frozen

from ratrain.ratrain_ir.ops.base import Payload
from ratrain.ratrain_ir.schedules.action import Action, ActionKind, Work


@frozen
class Computation:
    """A stage does an action of its order."""

    stage: int
    action: Action


@frozen
class Message:
    """What a stage has made passes to the stage of the chunk before or after."""

    payload: Payload
    into: int
    """the chunk whose input it is, or the gradient of whose input"""
    micro_batch: int
    slice: int
    source: int
    destination: int


Event = Computation | Message

_UNITS = {ActionKind.BACKWARD: 2}
"""A whole backward has two halves; all else takes one unit."""

_STEPS = {
    ActionKind.FORWARD: (Payload.ACTIVATION, 1),
    ActionKind.BACKWARD: (Payload.GRADIENT, -1),
    ActionKind.BACKWARD_INPUT: (Payload.GRADIENT, -1),
}
"""What each action takes from one neighbouring chunk and makes for the other, and how far on that one is."""

_Item = tuple[Payload, int, int, int]
"""A payload, the chunk that it is for, its micro-batch and slice."""


def unit_run(orders: Sequence[Sequence[Action]], chunk_stages: Sequence[int]) -> list[Event]:
    """The events of the run of one order a stage, in the order of time; a message comes before what starts when it passes.

    `chunk_stages[c]` is the stage of chunk c. Raises ValueError where the orders wait for each other in a circle.
    """
    run = _Run(orders, chunk_stages)
    run.go()
    return [event for _, _, _, event in sorted(run.events, key=lambda item: item[:3])]


def computations(
    orders: Sequence[Sequence[Action]], chunk_stages: Sequence[int]
) -> list[dict[Action, tuple[int, int]]]:
    """Of each stage, from when to when each of its actions takes in the run of `unit_run`.

    Raises ValueError where the orders wait for each other in a circle.
    """
    run = _Run(orders, chunk_stages)
    run.go()
    found: list[dict[Action, tuple[int, int]]] = [{} for _ in orders]
    for start, _, _, event in run.events:
        if isinstance(event, Computation):
            found[event.stage][event.action] = start, start + _UNITS.get(event.action.kind, 1)
    return found


def gradient_waits(orders: Sequence[Sequence[Action]], chunk_stages: Sequence[int]) -> list[list[Work]]:
    """Of each stage, what it works on backward after it has waited for the gradient in the run of `unit_run`, the longest wait first.

    Raises ValueError where the orders wait for each other in a circle.
    """
    run = _Run(orders, chunk_stages)
    run.go()
    return [[work for _, work in sorted(waits, key=lambda item: -item[0])] for waits in run.gradient_waits]


@define
class _Run:
    orders: Sequence[Sequence[Action]]
    chunk_stages: Sequence[int]
    events: list[tuple[int, bool, int, Event]] = field(factory=list)
    """Time, whether it is a computation, number, event."""
    made: dict[_Item, int] = field(factory=dict)
    """When what a chunk takes was there."""
    ready: list[tuple[int, int]] = field(factory=list)
    """A heap of (start, stage) of the actions that have their input."""
    gradient_waits: list[list[tuple[int, Work]]] = field(factory=list)
    """Of each stage, in order: how long it waits for a gradient, and what that is of."""

    def go(self) -> None:
        count = len(self.orders)
        self.gradient_waits = [[] for _ in range(count)]
        position, free = [0] * count, [0] * count
        for stage in range(count):
            self.wake(stage, position, free)
        while self.ready:
            start, stage = heappop(self.ready)
            action = self.orders[stage][position[stage]]
            position[stage] += 1
            free[stage] = start + _UNITS.get(action.kind, 1)
            self.record(start, Computation(stage, action))
            item = self.makes(action)
            if item is not None:
                self.made[item] = free[stage]
            self.wake(stage, position, free)
            if item is not None:
                taker = self.chunk_stages[item[1]]
                if taker != stage:
                    into = item[1] if item[0] is Payload.ACTIVATION else action.chunk
                    self.record(free[stage], Message(item[0], into, action.micro_batch, action.slice, stage, taker))
                    if self.needs(taker, position) == item:
                        self.wake(taker, position, free)
        if any(done < len(order) for done, order in zip(position, self.orders, strict=True)):
            raise ValueError("the orders of the stages wait for each other in a circle")

    def record(self, time: int, event: Event) -> None:
        self.events.append((time, isinstance(event, Computation), len(self.events), event))

    def wake(self, stage: int, position: list[int], free: list[int]) -> None:
        """Make a stage's next action ready if its input is there."""
        if position[stage] == len(self.orders[stage]):
            return
        start = free[stage]
        item = self.needs(stage, position)
        if item is not None:
            passed = self.made.get(item)
            if passed is None:
                return
            if passed > start and item[0] is Payload.GRADIENT:
                self.gradient_waits[stage].append((passed - start, item[1:]))
            start = max(start, passed)
        heappush(self.ready, (start, stage))

    def needs(self, stage: int, position: list[int]) -> _Item | None:
        """What the next action of a stage takes from a neighbouring chunk."""
        if position[stage] == len(self.orders[stage]):
            return None
        action = self.orders[stage][position[stage]]
        if action.kind not in _STEPS:
            return None
        payload, step = _STEPS[action.kind]
        before = action.chunk - step
        return (payload, *action.work) if 0 <= before < len(self.chunk_stages) else None

    def makes(self, action: Action) -> _Item | None:
        """What an action makes for a neighbouring chunk."""
        if action.kind not in _STEPS:
            return None
        payload, step = _STEPS[action.kind]
        after = action.chunk + step
        return (payload, after, action.micro_batch, action.slice) if 0 <= after < len(self.chunk_stages) else None

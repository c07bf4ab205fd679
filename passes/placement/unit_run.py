"""One order of the whole pipeline: the run of a schedule in which every forward, and every half of a backward, takes one unit of time.

Messages take none and pass as soon as what they carry is made. Stage lists that follow the order of this run agree with it, and so
with each other, message by message.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from attrs import define, field, frozen

from ratrain.ratrain_ir.ops import Payload
from ratrain.ratrain_ir.schedules import Action, ActionKind


@frozen
class Computation:
    """A stage does an action of its order."""

    stage: int
    action: Action


@frozen
class Message:
    """What a stage has made passes to its neighbour."""

    payload: Payload
    micro_batch: int
    source: int
    destination: int


Event = Computation | Message

_UNITS = {ActionKind.BACKWARD: 2}
"""A whole backward has two halves; all else takes one unit."""

_DIRECTIONS = {
    ActionKind.FORWARD: (Payload.ACTIVATION, 1),
    ActionKind.BACKWARD: (Payload.GRADIENT, -1),
    ActionKind.BACKWARD_INPUT: (Payload.GRADIENT, -1),
}
"""What each action takes from one neighbour and makes for the other, and how far on that one is."""


def unit_run(orders: Sequence[Sequence[Action]]) -> list[Event]:
    """The events of the run of one order a stage, in the order of time; a message comes before what starts when it passes.

    Raises ValueError where the orders wait for each other in a circle.
    """
    run = _Run(orders)
    run.go()
    return [event for _, _, _, event in sorted(run.events, key=lambda item: item[:3])]


@define
class _Run:
    orders: Sequence[Sequence[Action]]
    events: list[tuple[int, bool, int, Event]] = field(factory=list)
    """Time, whether it is a computation, number, event."""
    made: dict[tuple[Payload, int, int], int] = field(factory=dict)
    """When a payload of a micro-batch passed to a stage."""
    ready: list[tuple[int, int]] = field(factory=list)
    """A heap of (start, stage) of the actions that have their input."""

    def go(self) -> None:
        count = len(self.orders)
        position, free = [0] * count, [0] * count
        for stage in range(count):
            self.wake(stage, position, free)
        while self.ready:
            start, stage = heappop(self.ready)
            action = self.orders[stage][position[stage]]
            position[stage] += 1
            free[stage] = start + _UNITS.get(action.kind, 1)
            self.record(start, Computation(stage, action))
            self.wake(stage, position, free)
            message = self.message(stage, action)
            if message is not None:
                self.record(free[stage], message)
                self.made[message.payload, message.micro_batch, message.destination] = free[stage]
                if self.takes(message, position):
                    self.wake(message.destination, position, free)
        if any(done < len(order) for done, order in zip(position, self.orders, strict=True)):
            raise ValueError("the orders of the stages wait for each other in a circle")

    def record(self, time: int, event: Event) -> None:
        self.events.append((time, isinstance(event, Computation), len(self.events), event))

    def wake(self, stage: int, position: list[int], free: list[int]) -> None:
        """Make a stage's next action ready if its input is there."""
        if position[stage] == len(self.orders[stage]):
            return
        action = self.orders[stage][position[stage]]
        start = free[stage]
        if action.kind in _DIRECTIONS:
            payload, step = _DIRECTIONS[action.kind]
            if 0 <= stage - step < len(self.orders):
                passed = self.made.get((payload, action.micro_batch, stage))
                if passed is None:
                    return
                start = max(start, passed)
        heappush(self.ready, (start, stage))

    def message(self, stage: int, action: Action) -> Message | None:
        """What an action makes for a neighbour."""
        if action.kind not in _DIRECTIONS:
            return None
        payload, step = _DIRECTIONS[action.kind]
        neighbour = stage + step
        inside = 0 <= neighbour < len(self.orders)
        return Message(payload, action.micro_batch, stage, neighbour) if inside else None

    def takes(self, message: Message, position: list[int]) -> bool:
        """Whether the next action of a message's destination is the one that needs it."""
        stage = message.destination
        if position[stage] == len(self.orders[stage]):
            return False
        action = self.orders[stage][position[stage]]
        return action.kind in _DIRECTIONS and (_DIRECTIONS[action.kind][0], action.micro_batch) == (
            message.payload,
            message.micro_batch,
        )

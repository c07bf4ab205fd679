"""Total order of a pipeline's work: the run in which a forward, and each half of a backward, takes one unit of time.

Messages take no time and pass as soon as their contents are made. A computation starts at the end of the longest path
to it through the wait graph. Op lists of stages that follow the order of this run agree with each other on every
message.

    1F1B, 2 stages, 2 micro-batches     time     0  1  2  3  4  5  6  7  8
                                        stage 0  F0 F1 .  .  B0 B0 .  B1 B1
                                        stage 1  .  F0 B0 B0 F1 B1 B1

Cost: n log n in the number of actions.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from ratrain.ratrain_ir.analysis.wait_graph import WaitGraph, edge_ends
from ratrain.ratrain_ir.ops.base import Payload
from ratrain.ratrain_ir.schedules.action import Action, ActionKind, Work


@frozen
class Computation:
    """Event: a stage does an action of its order."""

    stage: int
    action: Action


@frozen
class UnitMessage:
    """Event: an action's result passes to the stage of the chunk before or after."""

    payload: Payload
    into: int
    """the chunk that takes it as its input, or that has made it as the gradient of its input"""
    micro_batch: int
    slice: int
    source: int
    destination: int


Event = Computation | UnitMessage

_STEPS = {
    ActionKind.FORWARD: (Payload.ACTIVATION, 1),
    ActionKind.BACKWARD: (Payload.GRADIENT, -1),
    ActionKind.BACKWARD_INPUT: (Payload.GRADIENT, -1),
}
"""Payload that each action takes from one neighbouring chunk and makes for the other, and the way to that one."""

_Item = tuple[Payload, int, int, int]
"""Payload, the chunk that receives it, its micro-batch and slice."""


def unit_run(orders: Sequence[Sequence[Action]], chunk_stages: Sequence[int]) -> list[Event]:
    """Return the events of the unit-time run of one order per stage, sorted by time.

    A message comes before the computations that start when it passes. `chunk_stages[c]` is the stage of chunk c. Raises
    ValueError if the orders wait for each other in a cycle.
    """
    run = _Run(orders, chunk_stages)
    found: list[tuple[tuple[int, bool, int, int], Event]] = []
    for each, end in zip(run.computations, run.ends, strict=True):
        # Sorted by time; at equal times messages (False) come before computations (True), which may need them.
        action, stage, start = each.action, each.stage, end - _units(each.action)
        found.append(((start, True, start, stage), each))
        item = run.makes(action)
        if item is not None and chunk_stages[item[1]] != stage:
            into = item[1] if item[0] is Payload.ACTIVATION else action.chunk
            message = UnitMessage(item[0], into, action.micro_batch, action.slice, stage, chunk_stages[item[1]])
            found.append(((end, False, start, stage), message))
    return [event for _, event in sorted(found, key=lambda item: item[0])]


def computations(
    orders: Sequence[Sequence[Action]], chunk_stages: Sequence[int]
) -> list[dict[Action, tuple[int, int]]]:
    """Return (start, end) of each action in the run of `unit_run`, one dict per stage.

    Raises ValueError if the orders wait for each other in a cycle.
    """
    run = _Run(orders, chunk_stages)
    found: list[dict[Action, tuple[int, int]]] = [{} for _ in orders]
    for each, end in zip(run.computations, run.ends, strict=True):
        found[each.stage][each.action] = end - _units(each.action), end
    return found


def gradient_waits(orders: Sequence[Sequence[Action]], chunk_stages: Sequence[int]) -> list[list[Work]]:
    """Return each stage's backward work that waits for its gradient in the run of `unit_run`, the longest wait first.

    Raises ValueError if the orders wait for each other in a cycle.
    """
    run = _Run(orders, chunk_stages)
    waits: list[list[tuple[int, Work]]] = [[] for _ in orders]
    free = [0] * len(orders)
    for each, end in zip(run.computations, run.ends, strict=True):
        waited = end - _units(each.action) - free[each.stage]
        if waited and each.action.kind is not ActionKind.FORWARD:  # weight halves never wait
            waits[each.stage].append((waited, each.action.work))
        free[each.stage] = end
    return [[work for _, work in sorted(each, key=lambda item: -item[0])] for each in waits]


def _units(action: Action) -> int:
    """Return the units of time of an action: a whole backward has two halves."""
    return 2 if action.kind is ActionKind.BACKWARD else 1


class _Run:
    """Computations of all orders, stage by stage, and their ends if each starts as soon as it has its input."""

    def __init__(self, orders: Sequence[Sequence[Action]], chunk_stages: Sequence[int]) -> None:
        self.computations = [Computation(stage, action) for stage, order in enumerate(orders) for action in order]
        # gradients go no further down than the lowest chunk with a backward
        back = (each.action.chunk for each in self.computations if each.action.kind is not ActionKind.FORWARD)
        self.chunks = {1: range(len(chunk_stages)), -1: range(min(back, default=0), len(chunk_stages))}
        actions = [each.action for each in self.computations]
        makers = {self.makes(action): number for number, action in enumerate(actions)}
        # `computations` are numbered stage by stage: a stage's order links neighbours, except across stages
        firsts = {sum(map(len, orders[:stage])) for stage in range(len(orders))}
        edges = [(number - 1, number) for number in range(len(actions)) if number not in firsts]
        for number, action in enumerate(actions):
            payload, step = _STEPS.get(action.kind, (None, 0))
            if payload is not None and action.chunk - step in self.chunks[step]:
                # an input that no action makes never comes: its taker waits for itself, which is a cycle
                edges.append((makers.get((payload, *action.work), number), number))
        graph = WaitGraph(len(actions))
        graph.add_waits(*edge_ends(edges))
        ends = graph.ends([_units(action) for action in actions])
        if ends is None:
            raise ValueError("the orders of the stages wait for each other in a circle")
        self.ends = [int(end) for end in ends]

    def makes(self, action: Action) -> _Item | None:
        """Return what an action makes for a neighbouring chunk; None if nothing."""
        payload, step = _STEPS.get(action.kind, (None, 0))
        after = action.chunk + step
        if payload is None or after not in self.chunks[step]:
            return None
        return payload, after, action.micro_batch, action.slice

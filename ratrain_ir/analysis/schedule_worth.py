"""What a sound table of actions is worth: how long a step takes, how long its ranks are idle, and how much they hold."""

from __future__ import annotations

from collections import defaultdict

from attrs import frozen

from ratrain.ratrain_ir.analysis.actions import COMPUTES, ActionTable
from ratrain.ratrain_ir.analysis.schedule_progress import ActionIndex
from ratrain.ratrain_ir.analysis.wait_graph import WaitGraph, edge_ends
from ratrain.ratrain_ir.schedules.action import ActionKind, most_in_flight


@frozen
class PassTimes:
    """How long a pass of a micro-batch, or of a slice of it, through one stage of the table takes, in any unit of time."""

    forward: float
    backward: float
    """a whole one: both halves"""
    weight: float
    """the half of it that makes the gradients of the parameters"""

    def of(self, kind: ActionKind) -> float:
        """Return the time of an action; one that computes nothing takes none."""
        if kind is ActionKind.FORWARD:
            return self.forward
        if kind is ActionKind.BACKWARD:
            return self.backward
        if kind is ActionKind.BACKWARD_INPUT:
            return self.backward - self.weight
        return self.weight if kind is ActionKind.BACKWARD_WEIGHT else 0.0


UNIT_TIMES = PassTimes(1.0, 2.0, 1.0)
"""A forward and each half of a backward take one unit."""


@frozen
class StepTime:
    """How long a step takes, and how long each rank of it works. A rank without any action is none of the step's ranks."""

    seconds: float
    """in the unit of the times it was made of"""
    busy: dict[int, float]

    @property
    def bubble_fraction(self) -> float:
        """The share of the step in which its ranks are idle."""
        return 1.0 - self.mean_busy / self.seconds

    @property
    def bubble_to_work(self) -> float:
        """The idle time of the ranks as a share of their work: (P - 1) / M under 1F1B."""
        return self.seconds / self.mean_busy - 1.0

    @property
    def mean_busy(self) -> float:
        """How long a rank works, on average."""
        return sum(self.busy.values()) / len(self.busy)


def step_time(table: ActionTable, times: PassTimes) -> StepTime:
    """One step of a sound table: each rank takes its computations one by one, messages and gathers take no time.

    Two actions that share a cell are one after the other, as one processor does them.
    """
    index = ActionIndex(table)
    rows = [[action for action in row if action.kind in COMPUTES] for row in table.rows]
    actions = [action for row in rows for action in row]
    numbers = {id(action): number for number, action in enumerate(actions)}
    edges = [
        (number - 1, number) for number in range(1, len(actions)) if actions[number].rank == actions[number - 1].rank
    ]
    awaited = [(index.producer(action), number) for number, action in enumerate(actions)]
    edges += [(numbers[id(producer)], number) for producer, number in awaited if producer is not None]
    graph = WaitGraph(len(actions))
    graph.after(*edge_ends(edges))
    ends = graph.ends([times.of(action.kind) for action in actions])
    assert ends is not None  # the table is sound
    busy = {rank: sum((times.of(action.kind) for action in row), 0.0) for rank, row in enumerate(rows)}
    return StepTime(max(ends, default=0.0), {rank: busy[rank] for rank, row in enumerate(table.rows) if row})


def in_flight_on_ranks(table: ActionTable) -> list[int]:
    """Most passes through a stage that are in flight on each rank."""
    return [most_in_flight(action.kind for action in row) for row in table.rows]


def in_flight_on_stages(table: ActionTable) -> dict[int, int]:
    """Most passes that are in flight on each stage, where a rank may hold several."""
    kinds: dict[int, list[ActionKind]] = defaultdict(list)
    for action in table.actions:
        kinds[action.stage].append(action.kind)
    return {stage: most_in_flight(kinds[stage]) for stage in sorted(kinds)}

"""What a sound table of actions is worth: how long a step takes, how long its ranks are idle, and how much they hold."""

from __future__ import annotations

from collections import defaultdict

from attrs import define, field, frozen

from ratrain.ratrain_ir.analysis.actions import COMPUTES, ActionTable, PlacedAction
from ratrain.ratrain_ir.analysis.schedule_progress import ActionIndex
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
        """How long an action takes; those that compute nothing take no time."""
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
    run = _TimedRun(ActionIndex(table), times)
    run.finish()
    return StepTime(max(run.clocks), {rank: run.busy[rank] for rank, row in enumerate(table.rows) if row})


def in_flight_on_ranks(table: ActionTable) -> list[int]:
    """Most passes through a stage that are in flight on each rank."""
    return [most_in_flight(action.kind for action in row) for row in table.rows]


def in_flight_on_stages(table: ActionTable) -> dict[int, int]:
    """Most passes that are in flight on each stage, where a rank may hold several."""
    kinds: dict[int, list[ActionKind]] = defaultdict(list)
    for action in table.actions:
        kinds[action.stage].append(action.kind)
    return {stage: most_in_flight(kinds[stage]) for stage in sorted(kinds)}


@define(eq=False)
class _TimedRun:
    """Lets each rank run as far as it gets; a rank that waits goes on when what it waits for has ended."""

    index: ActionIndex
    times: PassTimes
    rows: list[list[PlacedAction]] = field(init=False)
    clocks: list[float] = field(init=False)
    busy: list[float] = field(init=False)
    positions: list[int] = field(init=False)
    ends: dict[int, float] = field(factory=dict)
    """By the identity of an action: hashing its fields would cost more than all the rest."""
    waiters: dict[int, list[int]] = field(factory=lambda: defaultdict(list))

    def __attrs_post_init__(self) -> None:
        self.rows = [[action for action in row if action.kind in COMPUTES] for row in self.index.table.rows]
        self.clocks, self.busy = [0.0] * len(self.rows), [0.0] * len(self.rows)
        self.positions = [0] * len(self.rows)

    def finish(self) -> None:
        ready = list(range(len(self.rows)))
        while ready:
            self.advance(ready.pop(), ready)

    def advance(self, rank: int, ready: list[int]) -> None:
        """Let a rank run until it must wait; ranks that waited for what it does become ready."""
        row = self.rows[rank]
        while self.positions[rank] < len(row):
            action = row[self.positions[rank]]
            awaited = self.index.producer(action)
            if awaited is not None and id(awaited) not in self.ends:
                self.waiters[id(awaited)].append(rank)
                return
            start = self.clocks[rank] if awaited is None else max(self.clocks[rank], self.ends[id(awaited)])
            seconds = self.times.of(action.kind)
            self.clocks[rank] = self.ends[id(action)] = start + seconds
            self.busy[rank] += seconds
            self.positions[rank] += 1
            ready.extend(self.waiters.pop(id(action), ()))

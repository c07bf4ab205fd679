"""Worth of a sound table of actions: the time of a step, the idle time of its ranks, and the passes they hold."""

from __future__ import annotations

from collections import defaultdict

from attrs import frozen

from ratrain.ratrain_ir.analysis.actions import COMPUTES, ActionTable, PlacedAction, first_with_backward
from ratrain.ratrain_ir.analysis.schedule_progress import ActionIndex
from ratrain.ratrain_ir.analysis.wait_graph import WaitGraph, edge_ends
from ratrain.ratrain_ir.schedules.action import ActionKind, most_in_flight


@frozen
class PassTimes:
    """Times of the passes of a micro-batch (or slice) through one stage of the table, in any unit."""

    forward: float
    backward: float
    """a whole one, both halves"""
    weight: float
    """the weight half, which makes the gradients of the parameters"""

    def of(self, kind: ActionKind) -> float:
        """Return the time of an action; 0 if it computes nothing."""
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
    """Time of a step, and the working time of each rank. Ranks without any action do not count."""

    seconds: float
    """in the unit of `PassTimes`"""
    busy: dict[int, float]

    @property
    def bubble_fraction(self) -> float:
        """Mean share of the step in which a rank is idle."""
        return 1.0 - self.mean_busy / self.seconds

    @property
    def bubble_to_work(self) -> float:
        """Idle time of the ranks divided by their work: (P - 1) / M under 1F1B."""
        return self.seconds / self.mean_busy - 1.0

    @property
    def mean_busy(self) -> float:
        """Mean working time of a rank."""
        return sum(self.busy.values()) / len(self.busy)


Span = tuple[PlacedAction, float, float]
"""An action with its start and its end."""


def step_spans(table: ActionTable, times: PassTimes) -> list[list[Span]]:
    """Return the computations of each rank in one step of a sound table; messages and gathers take no time.

    Each rank takes its computations one by one. Two actions that share a cell run one after the other, as on one
    processor.
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
    graph.add_waits(*edge_ends(edges))
    ends = graph.ends([times.of(action.kind) for action in actions])
    assert ends is not None  # the table is sound
    spans = (
        (action, float(end) - times.of(action.kind), float(end)) for action, end in zip(actions, ends, strict=True)
    )
    return [[next(spans) for _ in row] for row in rows]


def step_time(table: ActionTable, times: PassTimes) -> StepTime:
    """Compute the time of one step of a sound table, as `step_spans` has it."""
    ranks = step_spans(table, times)
    busy = {rank: sum((times.of(action.kind) for action, _, _ in spans), 0.0) for rank, spans in enumerate(ranks)}
    end = max((end for spans in ranks for _, _, end in spans), default=0.0)
    return StepTime(end, {rank: busy[rank] for rank, row in enumerate(table.rows) if row})


def in_flight_on_ranks(table: ActionTable) -> list[int]:
    """Return the most passes through a stage that each rank has in flight at once."""
    lowest = first_with_backward(table)
    return [most_in_flight(((action.kind, action.stage) for action in row), lowest) for row in table.rows]


def in_flight_on_stages(table: ActionTable) -> dict[int, int]:
    """Return the most passes that each stage has in flight at once; a rank may hold several stages."""
    lowest = first_with_backward(table)
    passes: dict[int, list[tuple[ActionKind, int]]] = defaultdict(list)
    for action in table.actions:
        passes[action.stage].append((action.kind, action.stage))
    return {stage: most_in_flight(passes[stage], lowest) for stage in sorted(passes)}

"""A step in units of time: every stage takes its order's actions one by one, and waits only for what they take.

A forward through a chunk takes a unit, a whole backward two, each of its halves one, a message none. It shares nothing with the code that
makes orders, and nothing with the lint.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from ratrain.ratrain_ir.schedules.action import Action, ActionKind
from ratrain.ratrain_ir.schedules.named import SCHEDULES
from ratrain.ratrain_ir.schedules.shape import PipelineShape

F, B, I, W = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT  # noqa: E741
UNITS = {F: 1, B: 2, I: 1, W: 1}
MADE = {F: F, B: I, I: I, W: W}
"""What is there when an action has ended: the chunk's output, the gradient of its input, the gradients of its parameters."""

Work = tuple[ActionKind, int, int, int]


@frozen
class Step:
    """When each stage works, in units from the step's start."""

    starts: list[int]
    ends: list[int]
    busy: list[int]

    @property
    def makespan(self) -> int:
        return max(self.ends)

    @property
    def pauses(self) -> list[int]:
        """How long each stage waits between its first action and its last."""
        return [end - start - busy for start, end, busy in zip(self.starts, self.ends, self.busy, strict=True)]


def shape_of(kind: str, stages: int, micro_batches: int, chunks: int | None = None, slices: int = 1) -> PipelineShape:
    """A shape with the layout of a schedule, and its chunks where none are said."""
    schedule = SCHEDULES[kind]
    return PipelineShape(stages, micro_batches, chunks or schedule.chunks, schedule.layout, slices)


def orders_of(kind: str, shape: PipelineShape) -> list[Sequence[Action]]:
    assert SCHEDULES[kind].problem(shape) is None
    return [SCHEDULES[kind].actions(shape, stage) for stage in range(shape.stages)]


def run(orders: list[Sequence[Action]], shape: PipelineShape) -> Step:
    """Run a step; fails where the stages wait for each other, or where something is done twice or not at all."""
    done: dict[Work, int] = {}
    clocks, starts, positions = [0] * shape.stages, [-1] * shape.stages, [0] * shape.stages
    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(orders):
            while positions[stage] < len(order):
                action = order[positions[stage]]
                ready = [done.get(work, -1) for work in needs(action, shape)]
                if -1 in ready:
                    break
                start = max([clocks[stage], *ready])
                starts[stage] = start if starts[stage] < 0 else starts[stage]
                clocks[stage] = start + UNITS[action.kind]
                assert action.chunk in shape.chunks_of(stage)
                for work in makes(action):
                    assert work not in done, f"{action} happens twice"
                    done[work] = clocks[stage]
                positions[stage] += 1
                moved = True
    waiting = [order[at] for order, at in zip(orders, positions, strict=True) if at < len(order)]
    assert not waiting, f"stages wait for each other at {waiting}"
    passes = shape.stages * shape.chunks * shape.micro_batches * shape.slices
    assert len(done) == 3 * passes, "something is never done"
    busy = [sum(UNITS[action.kind] for action in order) for order in orders]
    return Step(starts, clocks, busy)


def makes(action: Action) -> list[Work]:
    kinds = (I, W) if action.kind is B else (action.kind,)
    return [(kind, *action.work) for kind in kinds]


def needs(action: Action, shape: PipelineShape) -> list[Work]:
    """What must be there: from the neighbouring chunk, and on the chunk itself from other slices of the micro-batch."""
    chunk, m, place = action.work
    if action.kind is W:
        return [(I, chunk, m, place)]
    if action.kind is F:
        before = [(F, chunk - 1, m, place)] if chunk else []
        return before + ([(F, chunk, m, place - 1)] if place else [])
    after = [(I, chunk + 1, m, place)] if chunk + 1 < shape.stages * shape.chunks else []
    return [*after, (F, chunk, m, place), *([(I, chunk, m, place + 1)] if place + 1 < shape.slices else [])]


def most_held(order: Sequence[Action], until: ActionKind) -> int:
    """Most passes through a chunk that have gone forward and not yet made the gradient of their input (I) or of the parameters (W)."""
    held = most = 0
    for action in order:
        held += (action.kind is F) - (action.kind in (B, until))
        most = max(most, held)
    return most

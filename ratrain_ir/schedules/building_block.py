"""V-Half and V-Min: a building block that repeats every six units of time (Qi et al., "Pipeline Parallelism with Controllable Memory", 2024).

Stage s of P has the chunks s and 2P - 1 - s of a vee. One micro-batch's forwards and input halves of both chunks stand at fixed times, where
a pass through a chunk takes a unit; the next micro-batch's stand six units later, so that no two meet on a stage and two units in six are
left for the weight halves. How long a micro-batch is held is in the block, and so is the memory of the schedule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from heapq import heappop, heappush

from attrs import define, field, frozen

from ratrain.ratrain_ir.schedules.action import Action, ActionKind
from ratrain.ratrain_ir.schedules.shape import PipelineShape

_PERIOD = 6
"""Two forwards, two input halves, two weight halves."""
_Pass = tuple[ActionKind, int, int]
"""Kind, chunk and micro-batch."""


@frozen
class BuildingBlock:
    """When one micro-batch is worked on, and what of it may be kept."""

    times: Callable[[int, int], tuple[int, int, int, int]]
    """of P stages and a stage: when it runs forward of its first and second chunk, and back through the second and first"""
    most_held: Callable[[int], int]
    """of P stages: how many passes through a chunk a stage holds, from their forward to their weight half"""


def _v_half_times(stages: int, stage: int) -> tuple[int, int, int, int]:
    turn = 3 if stages % 2 == 0 else 0
    return (
        2 * stage,
        3 * stages - stage - 2,
        3 * stages + turn + 2 * stage - 1,
        6 * stages + turn - stage - 2,
    )


def _v_min_times(stages: int, stage: int) -> tuple[int, int, int, int]:
    turn = 2 if stages % 3 == 0 else 0
    return stage, 2 * stages - 1 - stage, 2 * stages + turn + stage, 4 * stages + turn - 1 - stage


V_HALF = BuildingBlock(_v_half_times, lambda stages: 2 * (stages // 2) + 2)
V_MIN = BuildingBlock(_v_min_times, lambda stages: 2 * ((stages + 1) // 3) + 2)


def schedule_v_half(shape: PipelineShape, stage: int) -> list[Action]:
    """The V-Half order of one stage: half the activations of 1F1B, half its bubble.

    A stage holds floor(P / 2) + 1 micro-batches (twice as many passes through its two chunks), from their forward to their weight half,
    where the first stage holds P under 1F1B. Where F = B = W and M >= P > 1, the step takes 6 M units and 3 (P - 1), one less where P is odd.
    """
    return list(_orders(V_HALF, shape)[stage])


def schedule_v_min(shape: PipelineShape, stage: int) -> list[Action]:
    """The V-Min order of one stage: a third of the activations of 1F1B, two thirds of its bubble.

    A stage holds floor((P + 1) / 3) + 1 micro-batches (twice as many passes through its two chunks), from their forward to their weight
    half. Where F = B = W and M, P > 1, the step takes 6 M units and 4 P - 5, two more where P is a multiple of 3.
    """
    return list(_orders(V_MIN, shape)[stage])


@lru_cache(maxsize=4)
def _orders(block: BuildingBlock, shape: PipelineShape) -> tuple[tuple[Action, ...], ...]:
    """The orders of all stages.

    Forwards and input halves keep the order of their times. All stages run at once, each action a unit of time; a stage does a weight
    half, the oldest, where its next pass is not ready, or would be one more than it may hold.
    """
    runs = [_StageRun(block, shape, stage) for stage in range(shape.stages)]
    ends: dict[_Pass, int] = {}
    waiting: dict[_Pass, int] = {}
    awake = [(0, stage) for stage in range(shape.stages)]
    while awake:
        now, stage = heappop(awake)
        run = runs[stage]
        action = run.next(ends, now)
        if action is not None:
            made = (action.kind, action.chunk, action.micro_batch)
            ends[made] = now + 1
            if made in waiting:
                heappush(awake, (now + 1, waiting.pop(made)))
            heappush(awake, (now + 1, stage))
        elif run.passes:
            awaited = run.awaited(run.passes[0])
            assert awaited is not None
            if awaited in ends:
                heappush(awake, (ends[awaited], stage))
            else:
                waiting[awaited] = stage
    return tuple(tuple(run.order) for run in runs)


def _passes(block: BuildingBlock, shape: PipelineShape, stage: int) -> Iterator[Action]:
    """Forwards and input halves of a stage in the order of their times."""
    here, back = shape.chunks_of(stage)
    kinds = (ActionKind.FORWARD, ActionKind.FORWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_INPUT)
    parts = list(zip(block.times(shape.stages, stage), kinds, (here, back, back, here), strict=True))
    timed = ((start + _PERIOD * m, kind, chunk, m) for m in range(shape.micro_batches) for start, kind, chunk in parts)
    return (Action(kind, m, chunk) for _, kind, chunk, m in sorted(timed, key=lambda part: part[0]))


@define(eq=False)
class _StageRun:
    """A stage in the run that places the weight halves."""

    block: BuildingBlock
    shape: PipelineShape
    stage: int
    order: list[Action] = field(factory=list)
    passes: deque[Action] = field(factory=deque)
    """Forwards and input halves that are to come."""
    pending: deque[Action] = field(factory=deque)
    """Weight halves that are due."""
    held: int = 0
    most_held: int = 0

    def __attrs_post_init__(self) -> None:
        self.passes.extend(_passes(self.block, self.shape, self.stage))
        self.most_held = self.block.most_held(self.shape.stages)

    def next(self, ends: Mapping[_Pass, int], now: int) -> Action | None:
        """What the stage begins now, if anything."""
        if self.passes and self.is_ready(self.passes[0], ends, now):
            action = self.passes.popleft()
            if action.kind is ActionKind.FORWARD:
                self.held += 1
            else:
                self.pending.append(Action(ActionKind.BACKWARD_WEIGHT, action.micro_batch, action.chunk))
        elif self.pending:
            action = self.pending.popleft()
            self.held -= 1
        else:
            return None
        self.order.append(action)
        return action

    def is_ready(self, action: Action, ends: Mapping[_Pass, int], now: int) -> bool:
        """Whether a pass may begin: there is room to hold it, and what it takes is there."""
        if action.kind is ActionKind.FORWARD and self.held == self.most_held:
            return False
        awaited = self.awaited(action)
        return awaited is None or ends.get(awaited, now + 1) <= now

    def awaited(self, action: Action) -> _Pass | None:
        """The pass on the neighbouring chunk that makes what a pass takes; None at the ends."""
        before = action.chunk + (-1 if action.kind is ActionKind.FORWARD else 1)
        return (action.kind, before, action.micro_batch) if 0 <= before < 2 * self.shape.stages else None

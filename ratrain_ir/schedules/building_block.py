"""V-Half and V-Min: schedules that repeat a building block every six units of time.

Source: Qi et al., "Pipeline Parallelism with Controllable Memory", 2024. Stage s of P has the chunks s and 2P - 1 - s
of a vee. The building block gives fixed start times to one micro-batch's four passes on each stage: forward (F) and
input half of the backward (I) of both chunks, one unit each. The next micro-batch starts six units later. The times of
the four passes differ modulo six, so that micro-batches never collide on a stage; two units in six remain free for the
two weight halves (W). How long the block holds a micro-batch decides the memory of the schedule.

Example, V-Half with P = 2: start times of micro-batch 0 (micro-batch 1: the same plus six)

    time      0  1  2  3  4  5  6  7  8  9 10 11 12 13
    stage 0  F0          F3          I3             I0
    stage 1        F1 F2                   I2    I1

The weight halves are then placed by a run in which every action takes one unit (`_orders`), in O(P M log(P)) steps.
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
"""Units of time from one micro-batch to the next: two forwards, two input halves, two weight halves."""
_Pass = tuple[ActionKind, int, int]
"""Kind, chunk and micro-batch of a pass."""


@frozen
class BuildingBlock:
    """Start times of one micro-batch on each stage, and a limit of the passes that a stage holds."""

    times: Callable[[int, int], tuple[int, int, int, int]]
    """Start times on a stage, from (P, stage): two forwards, then two input halves.

    The forwards are of its first and second chunk, the input halves of its second and first.
    """
    most_held: Callable[[int], int]
    """Most passes through a chunk that a stage holds, from P; each from its forward to its weight half."""


def _v_half_times(stages: int, stage: int) -> tuple[int, int, int, int]:
    # Delay of the turn from forward to backward that keeps the four times different modulo six for this P.
    turn = 3 if stages % 2 == 0 else 0
    return (
        2 * stage,
        3 * stages - stage - 2,
        3 * stages + turn + 2 * stage - 1,
        6 * stages + turn - stage - 2,
    )


def _v_min_times(stages: int, stage: int) -> tuple[int, int, int, int]:
    # As above: without the delay, passes would collide modulo six where P is a multiple of 3.
    turn = 2 if stages % 3 == 0 else 0
    return stage, 2 * stages - 1 - stage, 2 * stages + turn + stage, 4 * stages + turn - 1 - stage


V_HALF = BuildingBlock(_v_half_times, lambda stages: 2 * (stages // 2) + 2)
V_MIN = BuildingBlock(_v_min_times, lambda stages: 2 * ((stages + 1) // 3) + 2)


def schedule_v_half(shape: PipelineShape, stage: int) -> list[Action]:
    """Return the V-Half order of one stage: half the activations of 1F1B, half its bubble.

    A stage holds floor(P / 2) + 1 micro-batches (twice as many passes through its two chunks), from their forward to
    their weight half; under 1F1B the first stage holds P. If F = B = W and M >= P > 1, the step takes 6 M + 3 (P - 1)
    units, one less if P is odd.
    """
    return list(_orders(V_HALF, shape)[stage])


def schedule_v_min(shape: PipelineShape, stage: int) -> list[Action]:
    """Return the V-Min order of one stage: a third of the activations of 1F1B, two thirds of its bubble.

    A stage holds floor((P + 1) / 3) + 1 micro-batches (twice as many passes through its two chunks), from their forward
    to their weight half. If F = B = W and M, P > 1, the step takes 6 M + 4 P - 5 units, two more if P is a multiple of
    3.
    """
    return list(_orders(V_MIN, shape)[stage])


@lru_cache(maxsize=4)
def _orders(block: BuildingBlock, shape: PipelineShape) -> tuple[tuple[Action, ...], ...]:
    """Return the orders of all stages.

    Forwards and input halves keep the order of their start times. All stages run at once, each action taking one unit
    of time. A stage runs its oldest pending weight half when its next pass is not ready, or would exceed its limit of
    held passes.
    """
    # `awake` holds (time, stage) of stages to look at; `ends` the end of each pass done; `waiting` the stage that
    # sleeps
    # until a pass has been run. A pass has one reader (the next chunk's), so one stage is enough.
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
    """Yield forwards and input halves of a stage in the order of their start times."""
    here, back = shape.chunks_of(stage)
    kinds = (ActionKind.FORWARD, ActionKind.FORWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_INPUT)
    parts = list(zip(block.times(shape.stages, stage), kinds, (here, back, back, here), strict=True))
    timed = ((start + _PERIOD * m, kind, chunk, m) for m in range(shape.micro_batches) for start, kind, chunk in parts)
    return (Action(kind, m, chunk) for _, kind, chunk, m in sorted(timed, key=lambda part: part[0]))


@define(eq=False)
class _StageRun:
    """State of one stage in the run that places the weight halves."""

    block: BuildingBlock
    shape: PipelineShape
    stage: int
    order: list[Action] = field(factory=list)
    passes: deque[Action] = field(factory=deque)
    """Forwards and input halves that are still to come."""
    pending: deque[Action] = field(factory=deque)
    """Weight halves whose input half has run."""
    held: int = 0
    most_held: int = 0

    def __attrs_post_init__(self) -> None:
        self.passes.extend(_passes(self.block, self.shape, self.stage))
        self.most_held = self.block.most_held(self.shape.stages)

    def next(self, ends: Mapping[_Pass, int], now: int) -> Action | None:
        """Begin an action at time `now`, record it and return it; None if the stage can begin none."""
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
        """Tell whether a pass may begin: there is room to hold it, and its input has been made."""
        if action.kind is ActionKind.FORWARD and self.held == self.most_held:
            return False
        awaited = self.awaited(action)
        return awaited is None or ends.get(awaited, now + 1) <= now

    def awaited(self, action: Action) -> _Pass | None:
        """Return the pass on the neighbouring chunk that makes the input of a pass; None at the ends of the chain."""
        before = action.chunk + (-1 if action.kind is ActionKind.FORWARD else 1)
        return (action.kind, before, action.micro_batch) if 0 <= before < 2 * self.shape.stages else None

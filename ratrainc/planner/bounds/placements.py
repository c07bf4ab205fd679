"""What the bounds take from an order itself: how many passes a stage holds, and how often anew.

A pass is one micro-batch, or one slice of it, through one chunk of a stage; it is held from its forward until the gradient of its input is
made. Instants are beginnings of such gradients.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from attrs import frozen

from ratrain.ratrain_ir.schedules.action import ActionKind, Order, Work
from ratrain.ratrain_ir.schedules.named import SCHEDULES

if TYPE_CHECKING:
    from ratrain.ratrain_ir.schedules.shape import PipelineShape

_WEIGHT_GRADIENTS = (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)
_FREEING = (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)


@frozen
class StagePlacement:
    """What a stage's order says, at instants before any gradient is final: before the last micro-batch's backward goes on."""

    early: int
    """passes that are held at some instant at least"""
    late: int
    """passes that are held at some instant at which every chunk has gradients already; 0 where there is none such"""
    windows: int
    """instants of that kind, no two of which hold a pass in common"""
    pending: int
    """the most passes whose weight half comes apart from their input half that wait for it at once"""
    pending_held: int
    """passes that are held besides, then"""


@lru_cache(maxsize=4096)
def stage_placements(schedule: str, shape: PipelineShape) -> tuple[StagePlacement, ...]:
    """What the order of each stage says under a schedule."""
    return tuple(_read(SCHEDULES[schedule].actions(shape, stage), shape, stage) for stage in range(shape.stages))


def has_halves(schedule: str, shape: PipelineShape) -> bool:
    """Whether a schedule has the halves of backwards apart; so it has, if at all, for the fewest stages and micro-batches of these chunks."""
    orders = (SCHEDULES[schedule].actions(shape, stage) for stage in range(shape.stages))
    return any(action.kind is ActionKind.BACKWARD_WEIGHT for order in orders for action in order)


def _read(order: Order, shape: PipelineShape, stage: int) -> StagePlacement:
    """All instants once for how many are held, then the late ones for how often that is."""
    last = shape.micro_batches - 1
    chunks = len(shape.chunks_of(stage))
    held: dict[Work, int] = {}
    """when each pass began, in that order"""
    begun: set[int] = set()
    early = late = 0
    waiting: set[Work] = set()
    pending = (0, 0)
    instants: list[tuple[int, int, int]] = []
    for time, action in enumerate(order):
        if action.kind is ActionKind.FORWARD:
            held[action.work] = time
            continue
        if action.kind in _FREEING:
            early = max(early, len(held))
            if len(begun) == chunks and action.micro_batch < last and len(held) >= late:
                late = len(held)
                instants.append((late, time, next(iter(held.values()))))
            del held[action.work]
        if action.kind is ActionKind.BACKWARD_INPUT and not _is_weight_half(order[time + 1 : time + 2], action.work):
            waiting.add(action.work)
            pending = max(pending, (len(waiting), len(held)))
        if action.kind in _WEIGHT_GRADIENTS:
            waiting.discard(action.work)
            begun.add(action.chunk)
        if action.micro_batch == last:
            break
    windows, before = 0, -1
    for count, time, oldest in instants:
        if count == late and oldest > before:
            windows, before = windows + 1, time
    return StagePlacement(early, late, windows, *pending)


def _is_weight_half(actions: Order, work: Work) -> bool:
    return any(action.kind is ActionKind.BACKWARD_WEIGHT and action.work == work for action in actions)

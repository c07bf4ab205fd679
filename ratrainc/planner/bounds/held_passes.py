"""Passes that a stage holds, read off its order for the bounds.

A pass is one micro-batch, or one slice of it, through one chunk of a stage. It is held from its forward until the
gradient of its input is made; an instant is the beginning of such a gradient. Example: in the 1F1B order F0 F1 B0 F2 B1
F3 B2 B3 two passes are held at each instant before B3.
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
class HeldPasses:
    """Numbers of held passes at instants before any gradient is final: before the last micro-batch's backward."""

    early: int
    """the most passes held at an instant"""
    late: int
    """the most passes held at an instant when every chunk has gradients; 0 if there is none"""
    windows: int
    """number of such instants, no two of which hold a common pass"""
    pending: int
    """the most passes that wait at once for a weight half that is apart from their input half"""
    pending_held: int
    """other passes held at that time"""


@lru_cache(maxsize=4096)
def held_passes(schedule: str, shape: PipelineShape) -> tuple[HeldPasses, ...]:
    """Return the held passes of each stage under a schedule."""
    return tuple(_read(SCHEDULES[schedule].actions(shape, stage), shape, stage) for stage in range(shape.stages))


def has_halves(schedule: str, shape: PipelineShape) -> bool:
    """Return True if a schedule splits backwards into halves; the smallest `shape` of these chunks shows it."""
    orders = (SCHEDULES[schedule].actions(shape, stage) for stage in range(shape.stages))
    return any(action.kind is ActionKind.BACKWARD_WEIGHT for order in orders for action in order)


def _read(order: Order, shape: PipelineShape, stage: int) -> HeldPasses:
    """Read an order: the most passes held, then the number of late instants that hold as many."""
    last = shape.micro_batches - 1
    chunks = len(shape.chunks_of(stage))
    held: dict[Work, int] = {}
    """start of each held pass, in order"""
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
            # late: every chunk has gradients, and none of these is final
            if len(begun) == chunks and action.micro_batch < last and len(held) >= late:
                late = len(held)
                # a dictionary keeps its order, so the first entry is the oldest pass
                instants.append((late, time, next(iter(held.values()))))
            del held[action.work]
        # a weight half that follows at once is not apart: nothing waits for it
        if action.kind is ActionKind.BACKWARD_INPUT and not _is_weight_half(order[time + 1 : time + 2], action.work):
            waiting.add(action.work)
            pending = max(pending, (len(waiting), len(held)))
        if action.kind in _WEIGHT_GRADIENTS:
            waiting.discard(action.work)
            begun.add(action.chunk)
        if action.micro_batch == last:
            break
    # Greedy from the left: if the oldest pass of an instant began after the last chosen instant, they share no pass.
    # The earliest choice leaves most room, so the count is the largest.
    windows, before = 0, -1
    for count, time, oldest in instants:
        if count == late and oldest > before:
            windows, before = windows + 1, time
    return HeldPasses(early, late, windows, *pending)


def _is_weight_half(actions: Order, work: Work) -> bool:
    return any(action.kind is ActionKind.BACKWARD_WEIGHT and action.work == work for action in actions)

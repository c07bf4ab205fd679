"""Passes that a stage holds, read off its order for the bounds.

A pass is one micro-batch, or one slice of it, through one chunk of a stage. It is held from its forward until the
gradient of its input is made; an instant is the beginning of such a gradient. Example: in the 1F1B order F0 F1 B0 F2 B1
F3 B2 B3 two passes are held at each instant before B3.

With tensor-parallel ranks `overlap-tensor` may have merged pairs of neighbouring passes (`pass_order.MERGINGS`).
Instants are then those at which a pair, or a pass alone, begins or ends. A backward that begins beside the forward
before it is counted without that forward.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING

from attrs import define, field, frozen

from ratrain.ratrain_ir.schedules.action import ActionKind, Order, Work
from ratrain.ratrain_ir.schedules.named import SCHEDULES
from ratrain.ratrainc.planner.bounds.pass_order import Pass, grouped, passes_of

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
    headed: int
    """the most passes held when the head goes back and every chunk has gradients; 0 without the head"""
    head_windows: int
    """number of such instants, no two of which hold a common pass"""
    pending: int
    """the most passes that wait at once for a weight half that is apart from their input half"""
    pending_held: int
    """other passes held at that time"""
    waiting: int
    """passes that wait for their weight half when most passes wait or are held"""
    waiting_held: int
    """passes held at that time"""
    waits: int
    """number of such times, no two of which hold a common pass"""
    returned: int
    """1 if a slice surely goes back when another one of its micro-batch has done so through the same chunk, else 0"""


@lru_cache(maxsize=4096)
def held_passes(schedule: str, shape: PipelineShape, merging: str = "none") -> tuple[HeldPasses, ...]:
    """Return the held passes of each stage under a schedule whose passes are merged as one of `MERGINGS` says."""
    return tuple(_read(passes_of(schedule, shape, stage), shape, stage, merging) for stage in range(shape.stages))


def has_halves(schedule: str, shape: PipelineShape) -> bool:
    """Return True if a schedule splits backwards into halves; the smallest `shape` of these chunks shows it."""
    orders = (SCHEDULES[schedule].actions(shape, stage) for stage in range(shape.stages))
    return any(action.kind is ActionKind.BACKWARD_WEIGHT for order in orders for action in order)


@frozen
class _State:
    """Passes that are held, and those that wait for a weight half, between two actions of an order."""

    held: int
    waiting: int
    newest: int
    """place of the forward of the newest held pass"""
    oldest: int
    """place of the forward of the oldest held pass"""


@define
class _Instants:
    """Instants at which equally many passes are held, the most so far."""

    held: int = 0
    states: list[_State] = field(factory=list)

    def add(self, state: _State) -> None:
        """Keep an instant if it holds as many passes as any before."""
        if state.held > self.held:
            self.held, self.states = state.held, []
        if state.held == self.held:
            self.states.append(state)

    @property
    def windows(self) -> int:
        """Number of instants, no two of which hold a common pass."""
        return _apart(self.states)


def _read(passes: list[Pass], shape: PipelineShape, stage: int, merging: str) -> HeldPasses:
    """Read an order: the most passes held, then the number of late instants that hold as many."""
    order = [action for each in passes for action in each.actions]
    groups = grouped(passes, merging)
    last = shape.micro_batches - 1
    chunks = len(shape.chunks_of(stage))
    head = len(shape.chunk_stages) - 1
    held: dict[Work, int] = {}
    """start of each held pass, in order"""
    begun: dict[int, int] = {}
    """place of the first weight gradients of each chunk"""
    returns: dict[tuple[int, int], int] = {}
    """places of the first slice to go back, by chunk and micro-batch"""
    returned = 0
    early = 0
    waiting: set[Work] = set()
    states = [_State(0, 0, 0, 0)]
    late, at_head = _Instants(), _Instants()
    time = -1
    for group in groups:
        begin = time + 1
        of_group = [action for each in group for action in each.actions]
        for action in of_group:
            time += 1
            if action.kind in _FREEING:
                beside = time > begin and order[begin].kind is ActionKind.FORWARD
                sure = len(held) - beside
                early = max(early, sure)
                # late: every chunk has gradients, and none of these is final
                has_gradients = len(begun) == chunks and max(begun.values()) < begin
                if has_gradients and action.micro_batch < last and sure:
                    newest = next(islice(reversed(held.values()), int(beside), None))
                    state = _State(sure, 0, newest, next(iter(held.values())))
                    for instants in (late, at_head) if action.chunk == head else (late,):
                        instants.add(state)
                del held[action.work]
                returned |= returns.setdefault((action.chunk, action.micro_batch), time) < begin
            if action.kind is ActionKind.FORWARD:
                held[action.work] = time
            # a weight half that follows at once is not apart: nothing waits for it
            if action.kind is ActionKind.BACKWARD_INPUT and not _is_weight_half(
                order[time + 1 : time + 2], action.work
            ):
                waiting.add(action.work)
            if action.kind in _WEIGHT_GRADIENTS:
                waiting.discard(action.work)
                begun.setdefault(action.chunk, time)
        ends = next(reversed(held.values()), time), next(iter(held.values()), time)
        states.append(_State(len(held), len(waiting), *ends))
        if any(action.kind is not ActionKind.FORWARD and action.micro_batch == last for action in of_group):
            break
    pending = max(states, key=lambda state: (state.waiting, state.held))
    fullest = max(states[:-1], key=lambda state: (state.waiting > 0, state.held + state.waiting, state.held))
    most = [state for state in states[:-1] if state.held >= fullest.held and state.waiting >= fullest.waiting > 0]
    return HeldPasses(
        early,
        late.held,
        late.windows,
        at_head.held,
        at_head.windows,
        pending.waiting,
        pending.held,
        fullest.waiting,
        fullest.held,
        _apart(most),
        returned,
    )


def _apart(states: list[_State]) -> int:
    """Count states no two of which hold a common pass.

    If the oldest pass of a state began after the newest of another, the two share no pass. That of a backward beside a
    forward has not that forward's: with one pass ahead, F0 | F1 B0 | F2 B1 | ..., each backward's state is apart from
    the one before, though the next forward stands before it in the order. Greedy from the left, so each chosen state is
    apart from all before it.
    """
    count, before = 0, -1
    for state in states:
        if state.oldest > before:
            count, before = count + 1, state.newest
    return count


def _is_weight_half(actions: Order, work: Work) -> bool:
    return any(action.kind is ActionKind.BACKWARD_WEIGHT and action.work == work for action in actions)

"""Pipeline schedules as bare orders of forwards and backwards, and what is known of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from functools import cache

from attrs import frozen


class ActionKind(Enum):
    """What a stage can be told to do in a schedule; the values are the names schedules are written with."""

    FORWARD = "F"
    BACKWARD = "B"
    """the whole backward: both halves in one"""
    BACKWARD_INPUT = "I"
    """the half of a backward that makes the gradient of the stage's input, which the stage before waits for"""
    BACKWARD_WEIGHT = "W"
    """the half that makes the gradients of the parameters; nobody else waits for it"""
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    UNSHARD = "UNSHARD"
    """gather the stage's parameters"""
    RESHARD = "RESHARD"
    """drop what was gathered"""
    REDUCE_GRAD = "REDUCE_GRAD"
    """sum the step's gradients over the replicas"""


@frozen
class Action:
    """One micro-batch's forward or backward on a stage."""

    kind: ActionKind
    micro_batch: int


DEFAULT_SCHEDULE = "1f1b"
"""What is placed where neither plan nor strategy says."""


def schedule_1f1b(stages: int, micro_batches: int, stage: int) -> list[Action]:
    """The 1F1B order of one stage: warm-up forwards, alternation, cool-down backwards."""
    warm_up = min(stages - stage - 1, micro_batches)
    actions = [Action(ActionKind.FORWARD, m) for m in range(warm_up)]
    for m in range(warm_up, micro_batches):
        actions.append(Action(ActionKind.FORWARD, m))
        actions.append(Action(ActionKind.BACKWARD, m - warm_up))
    actions.extend(Action(ActionKind.BACKWARD, m) for m in range(micro_batches - warm_up, micro_batches))
    return actions


def schedule_gpipe(stages: int, micro_batches: int, stage: int) -> list[Action]:
    """The GPipe order of one stage: all forwards, then all backwards, ascending; the same on every stage."""
    del stages, stage
    kinds = (ActionKind.FORWARD, ActionKind.BACKWARD)
    return [Action(kind, m) for kind in kinds for m in range(micro_batches)]


def schedule_zb_h1(stages: int, micro_batches: int, stage: int, delay: int | None = None) -> list[Action]:
    """The ZB-H1 order of one stage (Qi et al., "Zero Bubble Pipeline Parallelism", 2023): 1F1B with the backward split.

    Input halves stand where 1F1B has backwards, so as many micro-batches are in flight. Weight halves follow `delay` micro-batches
    later, s of them on stage s where it is None: they fill the time in which the stage would wait, in the warm-up for the next
    forward and in the cool-down for the next gradient. On stage 0, whose input gradient nobody waits for, backwards stay whole.
    """
    later = stage if delay is None else min(delay, stage)
    actions: list[Action] = []
    pending: list[int] = []
    for action in schedule_1f1b(stages, micro_batches, stage):
        if action.kind is ActionKind.FORWARD or stage == 0:
            actions.append(action)
            continue
        actions.append(Action(ActionKind.BACKWARD_INPUT, action.micro_batch))
        pending.append(action.micro_batch)
        if len(pending) > later:
            actions.append(Action(ActionKind.BACKWARD_WEIGHT, pending.pop(0)))
    actions.extend(Action(ActionKind.BACKWARD_WEIGHT, m) for m in pending)
    return actions


def gradient_waits_1f1b(stages: int, micro_batches: int, stage: int) -> list[int]:
    """Micro-batches before whose backward a stage waits for the gradient under 1F1B: of the warm-up, then of the cool-down."""
    behind = stages - 1 - stage
    if behind == 0:
        return []
    return [0, *range(max(1, micro_batches - behind), micro_batches)]


def no_gradient_waits(stages: int, micro_batches: int, stage: int) -> list[int]:
    """None that are known."""
    del stages, micro_batches, stage
    return []


@frozen
class Schedule:
    """A schedule that has a name. Everything that is known of it follows from what stands here.

    Each field is a function of the numbers of stages and micro-batches and of a stage's index.
    """

    actions: Callable[[int, int, int], list[Action]]
    """a stage's order"""
    gradient_waits: Callable[[int, int, int], list[int]] = no_gradient_waits
    """micro-batches before whose backward the stage's compute engine waits for the gradient, the longest wait first"""

    def in_flight(self, stages: int, micro_batches: int, stage: int) -> int:
        """Most micro-batches that have begun forward and not made the gradient of the stage's input."""
        return most_in_flight(self.actions(stages, micro_batches, stage))


def most_in_flight(actions: Iterable[Action]) -> int:
    """Most micro-batches of an order that have begun forward and not made the gradient of the stage's input."""
    held = most = 0
    for action in actions:
        held += _HELD.get(action.kind, 0)
        most = max(most, held)
    return most


_HELD = {ActionKind.FORWARD: 1, ActionKind.BACKWARD: -1, ActionKind.BACKWARD_INPUT: -1}
"""What each action adds to the micro-batches in flight."""

SCHEDULES: dict[str, Schedule] = {
    "1f1b": Schedule(schedule_1f1b, gradient_waits_1f1b),
    "gpipe": Schedule(schedule_gpipe),
    "zb-h1": Schedule(schedule_zb_h1, gradient_waits_1f1b),
}
"""Every schedule that a plan may name."""


@cache
def micro_batches_in_flight(schedule: str | None, stages: int, micro_batches: int, stage: int) -> int:
    """Most micro-batches in flight on a stage under a schedule by its name.

    Of an order that has no name (None) nothing is known: it can be all of them.
    """
    return micro_batches if schedule is None else SCHEDULES[schedule].in_flight(stages, micro_batches, stage)

"""Pipeline schedules as bare orders of forwards and backwards, and what is known of them in closed form."""

from __future__ import annotations

from enum import Enum

from attrs import frozen


class ActionKind(Enum):
    """Forward or backward of one micro-batch through one stage."""

    FORWARD = "F"
    BACKWARD = "B"


@frozen
class Action:
    """One micro-batch's forward or backward on a stage."""

    kind: ActionKind
    micro_batch: int


def in_flight_bound(stages: int, micro_batches: int, stage: int) -> int:
    """Micro-batches in flight on a stage under 1F1B: min(P - s, M)."""
    return min(stages - stage, micro_batches)


def schedule_1f1b(stages: int, micro_batches: int, stage: int) -> list[Action]:
    """The 1F1B order of one stage: warm-up forwards, alternation, cool-down backwards."""
    warm_up = min(stages - stage - 1, micro_batches)
    actions = [Action(ActionKind.FORWARD, m) for m in range(warm_up)]
    for m in range(warm_up, micro_batches):
        actions.append(Action(ActionKind.FORWARD, m))
        actions.append(Action(ActionKind.BACKWARD, m - warm_up))
    actions.extend(Action(ActionKind.BACKWARD, m) for m in range(micro_batches - warm_up, micro_batches))
    return actions

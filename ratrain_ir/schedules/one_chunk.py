"""The schedules of one chunk a stage, and no slices: GPipe, 1F1B and ZB-H1. Chunk s is stage s."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.ratrain_ir.schedules.action import Action, ActionKind

if TYPE_CHECKING:
    from ratrain.ratrain_ir.schedules.shape import PipelineShape


def schedule_1f1b(shape: PipelineShape, stage: int) -> list[Action]:
    """The 1F1B order of one stage: warm-up forwards, alternation, cool-down backwards."""
    micro_batches = shape.micro_batches
    warm_up = min(shape.stages - stage - 1, micro_batches)
    actions = [Action(ActionKind.FORWARD, m, stage) for m in range(warm_up)]
    for m in range(warm_up, micro_batches):
        actions.append(Action(ActionKind.FORWARD, m, stage))
        actions.append(Action(ActionKind.BACKWARD, m - warm_up, stage))
    actions.extend(Action(ActionKind.BACKWARD, m, stage) for m in range(micro_batches - warm_up, micro_batches))
    return actions


def schedule_gpipe(shape: PipelineShape, stage: int) -> list[Action]:
    """The GPipe order of one stage: all forwards, then all backwards, ascending; the same on every stage."""
    kinds = (ActionKind.FORWARD, ActionKind.BACKWARD)
    return [Action(kind, m, stage) for kind in kinds for m in range(shape.micro_batches)]


def schedule_zb_h1(shape: PipelineShape, stage: int, delay: int | None = None) -> list[Action]:
    """The ZB-H1 order of one stage (Qi et al., "Zero Bubble Pipeline Parallelism", 2023): 1F1B with the backward split.

    Input halves stand where 1F1B has backwards, so as many micro-batches are in flight. Weight halves follow `delay` micro-batches
    later, s of them on stage s where it is None: they fill the time in which the stage would wait, in the warm-up for the next
    forward and in the cool-down for the next gradient. On stage 0, whose input gradient nobody waits for, backwards stay whole.
    """
    later = stage if delay is None else min(delay, stage)
    actions: list[Action] = []
    pending: list[int] = []
    for action in schedule_1f1b(shape, stage):
        if action.kind is ActionKind.FORWARD or stage == 0:
            actions.append(action)
            continue
        actions.append(Action(ActionKind.BACKWARD_INPUT, action.micro_batch, stage))
        pending.append(action.micro_batch)
        if len(pending) > later:
            actions.append(Action(ActionKind.BACKWARD_WEIGHT, pending.pop(0), stage))
    actions.extend(Action(ActionKind.BACKWARD_WEIGHT, m, stage) for m in pending)
    return actions

"""Schedules of one chunk a stage, without slices: GPipe, 1F1B, with and without one more ahead, ZB-H1 and ZB-H2.

Chunk s is on stage s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.ratrain_ir.schedules.action import Action, ActionKind

if TYPE_CHECKING:
    from ratrain.ratrain_ir.schedules.shape import PipelineShape


def schedule_1f1b(shape: PipelineShape, stage: int) -> list[Action]:
    """Return the 1F1B order of one stage: warm-up forwards, alternation, cool-down backwards."""
    return _alternating(shape, stage, shape.stages - stage - 1)


def schedule_1f1b_ahead(shape: PipelineShape, stage: int) -> list[Action]:
    """Return the order of 1F1B with one more forward in the warm-up of each stage.

    So a forward stands next to the backward of an earlier micro-batch even on one stage, or on the last: each computes
    while the other waits for exchanges, if they are merged.
    """
    return _alternating(shape, stage, shape.stages - stage)


def _alternating(shape: PipelineShape, stage: int, ahead: int) -> list[Action]:
    """Return forwards and backwards in turns, forwards `ahead` micro-batches before backwards."""
    micro_batches = shape.micro_batches
    warm_up = min(ahead, micro_batches)
    actions = [Action(ActionKind.FORWARD, m, stage) for m in range(warm_up)]
    for m in range(warm_up, micro_batches):
        actions.append(Action(ActionKind.FORWARD, m, stage))
        actions.append(Action(ActionKind.BACKWARD, m - warm_up, stage))
    actions.extend(Action(ActionKind.BACKWARD, m, stage) for m in range(micro_batches - warm_up, micro_batches))
    return actions


def schedule_gpipe(shape: PipelineShape, stage: int) -> list[Action]:
    """Return the GPipe order, the same on every stage: all forwards, then all backwards, in ascending order."""
    kinds = (ActionKind.FORWARD, ActionKind.BACKWARD)
    return [Action(kind, m, stage) for kind in kinds for m in range(shape.micro_batches)]


def schedule_zb_h1(shape: PipelineShape, stage: int, delay: int | None = None) -> list[Action]:
    """Return the ZB-H1 order of one stage: 1F1B with the backward split.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023. Input halves stand where 1F1B has backwards, so the
    same number of micro-batches is in flight. The weight half of a micro-batch follows `delay` micro-batches later (at
    most s on stage s, and s if `delay` is None). Weight halves thus fill the time in which the stage would wait for the
    next forward in the warm-up, and for the next gradient in the cool-down. On stage 0 no stage waits for the input
    gradient, so backwards stay whole.
    """
    later = stage if delay is None else min(delay, stage)
    return _with_halves(schedule_1f1b(shape, stage), stage, later)


def schedule_zb_h2(shape: PipelineShape, stage: int) -> list[Action]:
    """Return the ZB-H2 order of one stage: twice the warm-up of 1F1B, with the backward split.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 2.3. Stage s of P begins with 2 (P - s) - 1
    forwards, so that it need not wait for its first gradient. Weight halves follow 2 s micro-batches later, so every
    stage holds 2 P - 1 micro-batches.
    """
    return _with_halves(_alternating(shape, stage, 2 * (shape.stages - stage - 1)), stage, 2 * stage)


def _with_halves(order: list[Action], stage: int, later: int) -> list[Action]:
    """Split the backwards of an order; each weight half follows `later` micro-batches after its input half.

    Backwards of stage 0 stay whole, because no stage waits for its input gradient.
    """
    actions: list[Action] = []
    pending: list[int] = []
    for action in order:
        if action.kind is ActionKind.FORWARD or stage == 0:
            actions.append(action)
            continue
        actions.append(Action(ActionKind.BACKWARD_INPUT, action.micro_batch, stage))
        pending.append(action.micro_batch)
        if len(pending) > later:
            actions.append(Action(ActionKind.BACKWARD_WEIGHT, pending.pop(0), stage))
    actions.extend(Action(ActionKind.BACKWARD_WEIGHT, m, stage) for m in pending)
    return actions

"""Seq1F1B: 1F1B over slices of micro-batches.

Source: Sun et al., "Seq1F1B: Efficient Sequence-Level Pipeline Parallelism", 2024.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.ratrain_ir.schedules.action import Action, ActionKind
from ratrain.ratrain_ir.schedules.interleaved import loop_problem, schedule_interleaved

if TYPE_CHECKING:
    from ratrain.ratrain_ir.schedules.shape import PipelineShape


def seq1f1b_problem(shape: PipelineShape) -> str | None:
    """Explain why a shape does not suit Seq1F1B; None if it does."""
    if shape.slices < 2:
        instead = "1f1b" if shape.chunks == 1 else "interleaved"
        return f"it has two slices of a micro-batch or more; with whole micro-batches use {instead}"
    return None if shape.chunks == 1 else loop_problem(shape)


def schedule_seq1f1b(shape: PipelineShape, stage: int) -> list[Action]:
    """Return the Seq1F1B order of one stage: min(P - s - 2 + k, M k) slices forward, then alternation, then backwards.

    Backwards are whole. Slices of a micro-batch go forward in ascending and backward in descending order, because a
    slice attends to the keys and values of the earlier ones, and adds to their gradients. If each micro-batch takes F
    forward and B backward, in k equal slices, the step takes (M k + P - 1) (F + B) / k; stage s holds at most
    P - s - 1 + k slices, or all M k. With several chunks a stage it is interleaved 1F1B over slices
    (`schedule_interleaved`).
    """
    if shape.chunks > 1:
        return schedule_interleaved(shape, stage)
    slices = shape.slices
    passes = shape.micro_batches * slices
    warm_up = min(shape.stages - stage - 2 + slices, passes)
    actions: list[Action] = []
    for number in range(passes + warm_up):
        if number < passes:
            micro_batch, place = divmod(number, slices)
            actions.append(Action(ActionKind.FORWARD, micro_batch, stage, place))
        if number >= warm_up:
            micro_batch, place = divmod(number - warm_up, slices)
            actions.append(Action(ActionKind.BACKWARD, micro_batch, stage, slices - 1 - place))
    return actions

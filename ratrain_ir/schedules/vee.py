"""ZB-V and DualPipe-V: two chunks on each stage in a vee, written phase by phase.

Stage s has the chunks s and 2P - 1 - s; so stage 0 has both the first and the last chunk.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.schedules.action import Action, ActionKind
from ratrain.ratrain_ir.schedules.ascending import AscendingOrder, of_first

if TYPE_CHECKING:
    from ratrain.ratrain_ir.schedules.shape import PipelineShape

_F, _B = ActionKind.FORWARD, ActionKind.BACKWARD
_I, _W = ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT


def vee_problem(shape: PipelineShape) -> str | None:
    """Explain why a shape does not suit a schedule of two chunks in a vee; None if it does."""
    if shape.chunks != 2:
        return f"it has two chunks a stage, not {shape.chunks}"
    if shape.layout != "vee":
        return f"its chunks lie in a vee, not in a {shape.layout}"
    if shape.slices > 1:
        return f"it has whole micro-batches, not {shape.slices} slices of each"
    return None


def schedule_zb_v(shape: PipelineShape, stage: int) -> list[Action]:
    """Return the ZB-V order of one stage.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 6; PyTorch's `ScheduleZBVZeroBubble`. Every
    stage holds P micro-batches, as the first stage does under 1F1B (2P passes through chunks of half the size). If F =
    B = W and M >= 2P - 1, stage s works from time s without a pause, and the step takes 6 M + P - 1 units. For fewer
    micro-batches, the order for 2P - 1 is made and restricted to the existing ones.
    """
    here, back = shape.chunks_of(stage)
    behind = shape.stages - stage
    micro_batches = max(shape.micro_batches, 2 * shape.stages - 1)
    order = AscendingOrder()

    def pass_back(chunk: int) -> None:
        order.add(_I, chunk)
        order.add(_W, chunk)

    # Warm-up: forwards of the first chunk until micro-batch 0 can come back to this stage through the vee.
    for _ in range(2 * behind - 1):
        order.add(_F, here)
    for _ in range(stage):
        order.add(_F, back)
        order.add(_F, here)
    for _ in range(behind):
        order.add(_F, back)
        pass_back(back)
    # Steady phase: a forward and a whole backward of each chunk in turn.
    while order.count(_F, back) < micro_batches:
        if order.count(_F, here) < micro_batches:
            order.add(_F, here)
        pass_back(here)
        order.add(_F, back)
        pass_back(back)
    for _ in range(stage):
        order.add(_I, here)
        order.add(_I, back)
    for _ in range(behind):
        pass_back(here)
    # Weight halves that are left fill the end.
    for chunk in (back, here):
        while order.count(_W, chunk) < micro_batches:
            order.add(_W, chunk)
    return of_first(shape.micro_batches, order.actions)


def schedule_dualpipe_v(shape: PipelineShape, stage: int) -> list[Action]:
    """Return the DualPipe-V order of one stage.

    Source: DeepSeek-AI, DualPipe; PyTorch's `ScheduleDualPipeV`. A forward and a backward that overlap there follow
    each other here, the forward first. For fewer than 2P micro-batches, the order for 2P is made and restricted to the
    existing ones.
    """
    here, back = shape.chunks_of(stage)
    behind = shape.stages - stage - 1
    micro_batches = max(shape.micro_batches, 2 * shape.stages)
    order = AscendingOrder()
    due: deque[int] = deque()

    def split_backward(chunk: int) -> None:
        order.add(_I, chunk)
        due.append(chunk)

    def weight_half() -> None:
        if due:
            order.add(_W, due.popleft())

    # The eight phases of DeepSeek's `dualpipev.py`, in its order; steps there that overlap two chunks are two actions
    # here.
    for _ in range(2 * behind):
        order.add(_F, here)
    for _ in range(stage + 1):
        order.add(_F, here)
        order.add(_F, back)
    for _ in range(behind):
        split_backward(back)
        weight_half()
        order.add(_F, back)
    for number in range(micro_batches - shape.stages):
        if number < micro_batches - 2 * shape.stages + stage + 1:
            order.add(_F, here)
        order.add(_B, back)
        order.add(_F, back)
        order.add(_B, here)
    for number in range(2 * (stage + 1)):
        chunk = here if number % 2 else back
        if number <= stage:
            order.add(_B, chunk)
        else:
            split_backward(chunk)
    for _ in range(behind):
        weight_half()
        split_backward(here)
    while due:
        weight_half()
    return of_first(shape.micro_batches, order.actions)

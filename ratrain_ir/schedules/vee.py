"""Two chunks a stage in a vee, in phases: ZB-V and DualPipe-V. Stage s has the chunks s and 2P - 1 - s: the first and the last stage's."""

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
    """What is wrong with a shape for a schedule of two chunks in a vee."""
    if shape.chunks != 2:
        return f"it has two chunks a stage, not {shape.chunks}"
    if shape.layout != "vee":
        return f"its chunks lie in a vee, not in a {shape.layout}"
    if shape.slices > 1:
        return f"it has whole micro-batches, not {shape.slices} slices of each"
    return None


def schedule_zb_v(shape: PipelineShape, stage: int) -> list[Action]:
    """The ZB-V order of one stage (Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 6; PyTorch's `ScheduleZBVZeroBubble`).

    Every stage holds what the first one holds under 1F1B, P micro-batches (2P passes through half as large chunks). Where F = B = W and
    M >= 2P - 1, stage s works from time s without a pause: the step takes 6 M + P - 1 units. Fewer micro-batches have the order of
    2P - 1, without those that are not there.
    """
    here, back = shape.chunks_of(stage)
    behind = shape.stages - stage
    micro_batches = max(shape.micro_batches, 2 * shape.stages - 1)
    order = AscendingOrder()

    def pass_back(chunk: int) -> None:
        order.add(_I, chunk)
        order.add(_W, chunk)

    for _ in range(2 * behind - 1):
        order.add(_F, here)
    for _ in range(stage):
        order.add(_F, back)
        order.add(_F, here)
    for _ in range(behind):
        order.add(_F, back)
        pass_back(back)
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
    for chunk in (back, here):
        while order.count(_W, chunk) < micro_batches:
            order.add(_W, chunk)
    return of_first(shape.micro_batches, order.actions)


def schedule_dualpipe_v(shape: PipelineShape, stage: int) -> list[Action]:
    """The DualPipe-V order of one stage (DeepSeek-AI, DualPipe; PyTorch's `ScheduleDualPipeV`).

    A forward and a backward that overlap there are one after the other here, the forward first. Fewer than 2P micro-batches have the order
    of 2P, without those that are not there.
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

"""Several chunks a stage in a loop: interleaved 1F1B and breadth-first. Chunk c is on stage c mod P."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.ratrain_ir.schedules.action import Action, ActionKind
from ratrain.ratrain_ir.schedules.ascending import AscendingOrder

if TYPE_CHECKING:
    from ratrain.ratrain_ir.schedules.shape import PipelineShape


def interleaved_problem(shape: PipelineShape) -> str | None:
    """What is wrong with a shape for interleaved 1F1B."""
    if shape.layout != "loop":
        return f"its chunks lie in a loop, not in a {shape.layout}"
    return several_chunks_whole(shape, "1f1b")


def breadth_first_problem(shape: PipelineShape) -> str | None:
    """What is wrong with a shape for the breadth-first schedule."""
    return several_chunks_whole(shape, "gpipe")


def several_chunks_whole(shape: PipelineShape, with_one: str) -> str | None:
    """What is wrong with a shape for a schedule of several chunks a stage, `with_one` in effect where there is one, and no slices."""
    if shape.chunks < 2:
        return f"it has two chunks a stage or more; with one use {with_one}"
    if shape.slices > 1:
        return f"it has whole micro-batches, not {shape.slices} slices of each"
    return None


def schedule_interleaved(shape: PipelineShape, stage: int) -> list[Action]:
    """The order of one stage under interleaved 1F1B (Narayanan et al. 2021; Megatron-LM, PyTorch's `ScheduleInterleaved1F1B`).

    Groups of P micro-batches pass the stage's chunks one after the other, forward in ascending and backward in descending order of the
    chunks. After (V - 1) P + 2 (P - s - 1) forwards, forwards and backwards alternate. Where M is no multiple of P the last group is
    smaller: it is the order of the next multiple, without the micro-batches that are not there. With equal chunks the stages are idle for
    (P - 1) / (V M) of the time they work where M is a multiple of P.
    """
    chunks = shape.chunks_of(stage)
    rounded_up = -(-shape.micro_batches // shape.stages) * shape.stages
    passes = rounded_up * len(chunks)
    warm_up = min((len(chunks) - 1) * shape.stages + 2 * (shape.stages - 1 - stage), passes)
    order = AscendingOrder()
    for number in range(passes + warm_up):
        turn = number // shape.stages % len(chunks)
        if number < passes:
            order.add(ActionKind.FORWARD, chunks[turn])
        if number >= warm_up:
            turn = (number - warm_up) // shape.stages % len(chunks)
            order.add(ActionKind.BACKWARD, chunks[-1 - turn])
    return order.of_first(shape.micro_batches)


def schedule_breadth_first(shape: PipelineShape, stage: int) -> list[Action]:
    """The breadth-first order of one stage (Lamy-Poirier 2023; PyTorch's `ScheduleLoopedBFS`): GPipe over chunks.

    All micro-batches pass a chunk forward, then the next chunk; backward begins with the last chunk. Micro-batches ascend both ways, where
    PyTorch's descend in the backward: gradients are summed in one order under all schedules, and the time is the same.
    """
    chunks = shape.chunks_of(stage)
    ways = ((ActionKind.FORWARD, chunks), (ActionKind.BACKWARD, chunks[::-1]))
    return [Action(kind, m, chunk) for kind, turns in ways for chunk in turns for m in range(shape.micro_batches)]

"""Several chunks a stage in a loop: interleaved 1F1B and breadth-first. Chunk c is on stage c mod P."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.ratrain_ir.schedules.action import Action, ActionKind
from ratrain.ratrain_ir.schedules.ascending import of_first

if TYPE_CHECKING:
    from ratrain.ratrain_ir.schedules.shape import PipelineShape


def interleaved_problem(shape: PipelineShape) -> str | None:
    """What is wrong with a shape for interleaved 1F1B."""
    if shape.slices > 1:
        return f"it has whole micro-batches, not {shape.slices} slices of each; with slices use seq1f1b"
    return several_chunks_whole(shape, "1f1b") or loop_problem(shape)


def loop_problem(shape: PipelineShape) -> str | None:
    """What is wrong with the layout of a shape for a schedule whose chunks lie in a loop."""
    return None if shape.layout == "loop" else f"its chunks lie in a loop, not in a {shape.layout}"


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
    chunks. After (V - 1) P + 2 (P - s - 1) forwards, forwards and backwards alternate. With equal chunks the stages are idle for
    (P - 1) / (V M) of the time they work where M is a multiple of P; else the last group is smaller, and they are idle for longer.

    Where micro-batches are cut into k slices, a group is of ceil(P / k) micro-batches, and k - 1 more passes go forward at the start, as a
    micro-batch goes back only when its last slice is there; slices go back in descending order. Then the idle time is (P - 1) / (V M k) of
    the work where M is a multiple of ceil(P / k).
    """
    slices, chunks = shape.slices, shape.chunks_of(stage)
    group = -(-shape.stages // slices)
    passes = -(-shape.micro_batches // group) * group * slices * len(chunks)
    ahead = (len(chunks) - 1) * group * slices + 2 * (shape.stages - 1 - stage) + slices - 1
    warm_up = min(ahead, passes)
    actions: list[Action] = []
    for number in range(passes + warm_up):
        if number < passes:
            turn, micro_batch, place = _pass_of(number, group, slices, len(chunks))
            actions.append(Action(ActionKind.FORWARD, micro_batch, chunks[turn], place))
        if number >= warm_up:
            turn, micro_batch, place = _pass_of(number - warm_up, group, slices, len(chunks))
            actions.append(Action(ActionKind.BACKWARD, micro_batch, chunks[-1 - turn], slices - 1 - place))
    return of_first(shape.micro_batches, actions)


def _pass_of(number: int, group: int, slices: int, chunks: int) -> tuple[int, int, int]:
    """Of a stage's passes one way, by number: which of its chunks, which micro-batch, and which of its slices, each in turn."""
    rest, place = divmod(number, slices)
    rest, in_group = divmod(rest, group)
    groups, turn = divmod(rest, chunks)
    return turn, groups * group + in_group, place


def schedule_breadth_first(shape: PipelineShape, stage: int) -> list[Action]:
    """The breadth-first order of one stage (Lamy-Poirier 2023; PyTorch's `ScheduleLoopedBFS`): GPipe over chunks.

    All micro-batches pass a chunk forward, then the next chunk; backward begins with the last chunk. Micro-batches ascend both ways, where
    PyTorch's descend in the backward: gradients are summed in one order under all schedules, and the time is the same.
    """
    chunks = shape.chunks_of(stage)
    ways = ((ActionKind.FORWARD, chunks), (ActionKind.BACKWARD, chunks[::-1]))
    return [Action(kind, m, chunk) for kind, turns in ways for chunk in turns for m in range(shape.micro_batches)]

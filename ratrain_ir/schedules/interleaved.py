"""Several chunks on each stage in a loop: interleaved 1F1B and breadth-first. Chunk c is on stage c mod P."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.ratrain_ir.schedules.action import Action, ActionKind
from ratrain.ratrain_ir.schedules.ascending import of_first

if TYPE_CHECKING:
    from ratrain.ratrain_ir.schedules.shape import PipelineShape


def interleaved_problem(shape: PipelineShape) -> str | None:
    """Explain why a shape does not suit interleaved 1F1B; None if it does."""
    if shape.slices > 1:
        return f"it has whole micro-batches, not {shape.slices} slices of each; with slices use seq1f1b"
    return several_chunks_whole(shape, "1f1b") or loop_problem(shape)


def loop_problem(shape: PipelineShape) -> str | None:
    """Explain why a shape does not suit a schedule whose chunks lie in a loop; None if it does."""
    return None if shape.layout == "loop" else f"its chunks lie in a loop, not in a {shape.layout}"


def breadth_first_problem(shape: PipelineShape) -> str | None:
    """Explain why a shape does not suit the breadth-first schedule; None if it does."""
    return several_chunks_whole(shape, "gpipe")


def several_chunks_whole(shape: PipelineShape, with_one: str) -> str | None:
    """Explain why a shape does not suit a schedule of several chunks a stage without slices; None if it does.

    `with_one` is the schedule to advise where a stage has one chunk.
    """
    if shape.chunks < 2:
        return f"it has two chunks a stage or more; with one use {with_one}"
    if shape.slices > 1:
        return f"it has whole micro-batches, not {shape.slices} slices of each"
    return None


def schedule_interleaved(shape: PipelineShape, stage: int) -> list[Action]:
    """Return the order of one stage under interleaved 1F1B.

    Source: Narayanan et al. 2021; Megatron-LM; PyTorch's `ScheduleInterleaved1F1B`. Groups of P micro-batches pass the
    stage's chunks one after the other, forward in ascending and backward in descending order of the chunks. After (V -
    1) P + 2 (P - s - 1) forwards, forwards and backwards alternate. With equal chunks the stages are idle for (P - 1) /
    (V M) of the time they work if M is a multiple of P; otherwise the last group is smaller, and they are idle for
    longer.

    Where micro-batches are cut into k slices, a group has ceil(P / k) micro-batches, and k - 1 more passes go forward
    at the start, because a micro-batch starts backward only after its last slice; slices go back in descending order.
    Then the idle time is (P - 1) / (V M k) of the work if M is a multiple of ceil(P / k).
    """
    slices, chunks = shape.slices, shape.chunks_of(stage)
    group = -(-shape.stages // slices)
    # Written for whole groups; `of_first` drops the micro-batches that do not exist.
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
    """Return chunk (by its turn), micro-batch and slice of a stage's pass `number` in one direction.

    Slices vary fastest, then the micro-batches of a group, then chunks, then groups.
    """
    rest, place = divmod(number, slices)
    rest, in_group = divmod(rest, group)
    groups, turn = divmod(rest, chunks)
    return turn, groups * group + in_group, place


def schedule_breadth_first(shape: PipelineShape, stage: int) -> list[Action]:
    """Return the breadth-first order of one stage: GPipe over chunks.

    Source: Lamy-Poirier 2023; PyTorch's `ScheduleLoopedBFS`. All micro-batches pass a chunk forward, then the next
    chunk; backward begins with the last chunk. Micro-batches ascend in both directions, while PyTorch's descend in the
    backward: so gradients are summed in one order under all schedules, and the time is the same.
    """
    chunks = shape.chunks_of(stage)
    ways = ((ActionKind.FORWARD, chunks), (ActionKind.BACKWARD, chunks[::-1]))
    return [Action(kind, m, chunk) for kind, turns in ways for chunk in turns for m in range(shape.micro_batches)]

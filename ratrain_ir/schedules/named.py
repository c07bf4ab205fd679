"""Every schedule that has a name, and what is known of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import inf

from attrs import frozen

from ratrain.ratrain_ir.schedules.action import Order, most_in_flight
from ratrain.ratrain_ir.schedules.building_block import schedule_v_half, schedule_v_min
from ratrain.ratrain_ir.schedules.interleaved import (
    breadth_first_problem,
    interleaved_problem,
    schedule_breadth_first,
    schedule_interleaved,
)
from ratrain.ratrain_ir.schedules.one_chunk import schedule_1f1b, schedule_gpipe, schedule_zb_h1
from ratrain.ratrain_ir.schedules.seq1f1b import schedule_seq1f1b, seq1f1b_problem
from ratrain.ratrain_ir.schedules.shape import PipelineShape
from ratrain.ratrain_ir.schedules.vee import schedule_dualpipe_v, schedule_zb_v, vee_problem


def default_schedule(shape: PipelineShape) -> str:
    """What is placed where neither plan nor strategy says: 1F1B, and where a plan has slices or chunks what was made for these."""
    if shape.slices > 1:
        return "seq1f1b"
    if shape.chunks > 1:
        return "zb-v" if shape.layout == "vee" else "interleaved"
    return "1f1b"


def one_chunk_whole(shape: PipelineShape) -> str | None:
    """What is wrong with a shape for a schedule of one chunk a stage and whole micro-batches."""
    if shape.chunks > 1:
        return f"it has one chunk a stage, not {shape.chunks}"
    if shape.slices > 1:
        return f"it has whole micro-batches, not {shape.slices} slices of each"
    return None


@frozen
class Schedule:
    """A schedule that has a name. Everything that is known of it follows from what stands here."""

    title: str
    """as it is written in a sentence"""
    actions: Callable[[PipelineShape, int], Order]
    """a stage's order"""
    problem: Callable[[PipelineShape], str | None] = one_chunk_whole
    """in what a shape is not one that it can be made for, or None"""
    chunks: int = 1
    """chunks a stage where a plan does not say"""
    layout: str = "loop"
    """how they lie where a plan does not say"""
    held: float = 1.0
    """micro-batches that the first stage holds, as a share of 1F1B's; rough: only the order of the search follows"""
    bubble: float = 1.0
    """idle time, as a share of the way through all other stages over chunks * slices; rough, as `held`"""


SCHEDULES: dict[str, Schedule] = {
    "1f1b": Schedule("1F1B", schedule_1f1b),
    "gpipe": Schedule("GPipe", schedule_gpipe, held=inf),
    "zb-h1": Schedule("ZB-H1", schedule_zb_h1, bubble=0.5),
    "interleaved": Schedule("interleaved 1F1B", schedule_interleaved, problem=interleaved_problem, chunks=2, held=1.5),
    "breadth-first": Schedule(
        "breadth-first", schedule_breadth_first, problem=breadth_first_problem, chunks=2, held=inf
    ),
    "zb-v": Schedule("ZB-V", schedule_zb_v, problem=vee_problem, chunks=2, layout="vee", bubble=0.1),
    "v-half": Schedule("V-Half", schedule_v_half, problem=vee_problem, chunks=2, layout="vee", held=0.5, bubble=0.6),
    "v-min": Schedule("V-Min", schedule_v_min, problem=vee_problem, chunks=2, layout="vee", held=1 / 3),
    "dualpipe-v": Schedule(
        "DualPipe-V", schedule_dualpipe_v, problem=vee_problem, chunks=2, layout="vee", held=1.5, bubble=0.3
    ),
    "seq1f1b": Schedule("Seq1F1B", schedule_seq1f1b, problem=seq1f1b_problem),
}
"""Every schedule that a plan may name."""


@cache
def most_held(schedule: str | None, shape: PipelineShape, stage: int) -> int:
    """Most passes of a (slice of a) micro-batch through a chunk that are in flight on a stage, under a schedule by its name.

    A pass is in flight from the start of its forward until the gradient of its input is made. Of an order that has no name (None) nothing
    is known: it can be all of them.
    """
    if schedule is None:
        return shape.micro_batches * shape.chunks * shape.slices
    return most_in_flight(action.kind for action in SCHEDULES[schedule].actions(shape, stage))

"""Live bytes in a memory over simulated time.

A tensor is live from the start of its first write until its last access has ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ratrain.ratrain_ir.config.types import Home
from ratrain.targets.program.columns import ACCESS, ACCESSES, OPERANDS, TENSOR
from ratrain.targets.program.instruction import Access

if TYPE_CHECKING:
    from ratrain.targets.simulator.flat_program import Float64s, Int64s
    from ratrain.targets.simulator.timeline import Timeline

_DEFINING = (Access.WRITE, Access.SCRATCH)
OUTSIDE = -1
"""Stands in place of an event that is before the first step or after the last one."""


class LiveIntervals(NamedTuple):
    """Intervals in which the tensors of a stage are live, one entry each; grouped by tensor, in the order of time."""

    tensors: Int64s
    """numbers of tensors in the stage"""
    first_events: Int64s
    """the event at whose start the interval begins; OUTSIDE where a carried tensor comes from before the first step"""
    last_events: Int64s
    """the event at whose end the interval ends; OUTSIDE where a carried tensor is kept for a step that is not timed"""
    starts: Float64s
    ends: Float64s


def live_intervals(timeline: Timeline, stage: int, home: Home = Home.DDR) -> LiveIntervals:
    """Return the live intervals of a stage's tensors in a memory over all timed steps.

    A carried tensor is live from the start until its last access before it is overwritten, and from its last writing to
    the end. A tensor without accesses has no interval.
    """
    tensors, events, defines = _accesses(timeline, stage, home)
    if not len(tensors):
        nothing = np.empty(0, np.int64)
        return LiveIntervals(nothing, nothing, nothing, np.empty(0), np.empty(0))
    columns = timeline.columns
    of_tensors = columns.tensor_forms[columns.tensors_of(stage)]
    carried = np.array([form.carried for form in columns.forms], np.bool_)[of_tensors]
    heads = np.concatenate([[True], tensors[1:] != tensors[:-1]])
    firsts = np.flatnonzero(heads | defines)
    lengths = np.diff(np.append(firsts, len(tensors)))
    owners, defined = tensors[firsts], defines[firsts]
    # The access that ends last need not be the last one in order, so accesses are sorted by interval, then by end.
    numbers = np.repeat(np.arange(len(firsts)), lengths)
    by_end = np.lexsort((timeline.ends[events], numbers))
    last_events = events[by_end[firsts + lengths - 1]]
    starts = np.where(defined, timeline.starts[events[firsts]], 0.0)
    ends = timeline.ends[last_events]
    kept = np.append(owners[1:] != owners[:-1], True) & carried[owners]
    ends = np.where(kept, timeline.ends.max(initial=0.0), ends)
    live = defined | carried[owners]
    return LiveIntervals(
        owners[live],
        np.where(defined, events[firsts], OUTSIDE)[live],
        np.where(kept, OUTSIDE, last_events)[live],
        starts[live],
        ends[live],
    )


def live_curve(timeline: Timeline, stage: int, home: Home = Home.DDR) -> tuple[Float64s, Int64s]:
    """Return times, ascending, and the live bytes of a stage in a memory from each of them on."""
    intervals = live_intervals(timeline, stage, home)
    columns = timeline.columns
    taken = columns.form_bytes[columns.tensor_forms[columns.tensors_of(stage)]][intervals.tensors]
    return _curve(np.concatenate([intervals.starts, intervals.ends]), np.concatenate([taken, -taken]))


def _accesses(timeline: Timeline, stage: int, home: Home) -> tuple[Int64s, Int64s, Int64s]:
    """Return tensor, event and a flag (the access defines the tensor) by access.

    Accesses are grouped by tensor, in an order that keeps the program's waits.
    """
    ops, tensors, defines = _operands_in_order(timeline, stage, home)
    events = (np.arange(timeline.steps)[:, None] * timeline.ops + ops).ravel()
    tensors, defines = np.tile(tensors, timeline.steps), np.tile(defines, timeline.steps)
    narrow = tensors.astype(np.uint16) if tensors.max(initial=0) < 1 << 16 else tensors  # sorted by radix
    by_tensor = np.argsort(narrow, kind="stable")
    return tensors[by_tensor], events[by_tensor], defines[by_tensor].astype(bool)


def _operands_in_order(timeline: Timeline, stage: int, home: Home) -> tuple[Int64s, Int64s, Int64s]:
    """Return op, tensor and a flag (it defines the tensor) by operand in a memory, in an order that keeps waits."""
    columns = timeline.columns
    order = columns.execution_order(stage)
    counts = columns.instructions[order, OPERANDS].astype(np.int64)
    firsts = columns.operand_stops[order] - counts
    places = np.repeat(firsts - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
    there = np.array([form.home is home for form in columns.forms], np.bool_)
    places_there = there[columns.tensor_forms[columns.operand_tensors[places]]]
    ops, places = np.repeat(order, counts)[places_there], places[places_there]
    defines = np.isin(columns.operands[places, ACCESS], [ACCESSES.index(access) for access in _DEFINING])
    return ops, columns.operands[places, TENSOR].astype(np.int64), defines.astype(np.int64)


def _curve(times: Float64s, changes: Int64s) -> tuple[Float64s, Int64s]:
    """Return the distinct times, and the bytes after all changes at each.

    Bytes that are freed at a time can be reused at that time.
    """
    moments, places = np.unique(times, return_inverse=True)
    sums = np.zeros(len(moments), np.int64)
    np.add.at(sums, places, changes)
    return moments, np.cumsum(sums)

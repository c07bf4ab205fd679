"""Columns of numbers that the page draws from: ops, events of a step, tensors and their live intervals.

Rows refer to each other by number. Ops have the numbers of the timeline, stream after stream; an event of a step is
`step * ops + op`. Each stream's rows are contiguous, and `streamStop` has the exclusive end of each:

    stream        0        1     2
    events     [ a b c ][ d e ][ f ]        streamStop = 3, 5, 6
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import define
from numpy.typing import NDArray

from ratrain.ratrain_ir.config.types import ALIGNMENT_BYTES, Home, StateKind
from ratrain.ratrain_ir.ops.base import ENGINES
from ratrain.ratrainc.report.packing import packed_columns, packed_lines
from ratrain.targets.program.columns import (
    BLOCKS,
    FLAGS,
    GROUP,
    KEYWORD,
    PEER,
    VARIANT,
    classes,
    classes_of_runs,
)
from ratrain.targets.simulator.bubbles import Bubbles
from ratrain.targets.simulator.flat_program import STREAMS
from ratrain.targets.simulator.live_curve import OUTSIDE, LiveIntervals
from ratrain.targets.simulator.timeline import Timeline

if TYPE_CHECKING:
    from ratrain.targets.simulator.flat_program import Float64s, Int64s

KINDS = tuple(StateKind)


def op_elements(timeline: Timeline, keywords: list[str]) -> Iterator[str]:
    """Yield the ops of a step by number: title, keyword, micro-batch, work and waits."""
    columns, flat = timeline.columns, timeline.flat
    rows = columns.instructions
    # Titles are made once for each class of ops that share one: with a thousand micro-batches few differ.
    kinds, firsts = classes(
        [
            *(rows[:, column] for column in (KEYWORD, VARIANT, GROUP, PEER, FLAGS)),
            columns.slice_numbers,
            classes_of_runs(columns.blocks, columns.block_stops, rows[:, BLOCKS]),
        ]
    )
    titles, title_numbers = _interned(
        kinds, [columns.instruction(first).title_without_micro_batch for first in firsts.tolist()]
    )
    keyword_numbers = columns.by_string({name: number for number, name in enumerate(keywords)}, rows[:, KEYWORD])
    # ops that are timed alike share a row of seconds and bytes
    works, work_numbers = np.unique(timeline.works, return_inverse=True)
    # a wait for `count` ops of a stream is one for its op number count - 1
    awaited = flat.streams["first"][flat.waits["stream"]] + flat.waits["count"] - 1
    yield packed_lines("titles", titles)
    yield packed_columns(
        "ops",
        {
            "title": ("u4", title_numbers),
            "keyword": ("u1", keyword_numbers),
            "microBatch": ("i4", columns.micro_batches),
            "work": ("u4", work_numbers),
            "waitStop": ("u4", flat.ops["wait_stop"]),
        },
    )
    yield packed_columns("waits", {"awaited": ("u4", awaited), "previous": ("u1", flat.waits["previous"])})
    yield packed_columns("works", {name: ("f8", works[name]) for name in ("seconds", "ddr_bytes", "link_bytes")})


@define(eq=False, slots=False)
class StepView:
    """A step as the page shows it, from the first start to the last end of its ops.

    Events of other steps that touch this interval are shown too.
    """

    name: str
    timeline: Timeline
    bubbles: Bubbles
    step: int

    @cached_property
    def _own(self) -> slice:
        return slice(self.step * self.timeline.ops, (self.step + 1) * self.timeline.ops)

    @cached_property
    def start(self) -> float:
        """Seconds since the start of the first step."""
        return 0.0 if self.bubbles.cold else float(self.timeline.starts[self._own].min(initial=np.inf))

    @cached_property
    def end(self) -> float:
        """Seconds since the start of the first step."""
        return float(self.timeline.ends[self._own].max(initial=self.start))

    @cached_property
    def events(self) -> Int64s:
        """The events that touch the interval shown, stream by stream, in the order of time."""
        timeline = self.timeline
        # events of the steps before and after that reach into the interval are drawn too
        shown = np.flatnonzero((timeline.ends >= self.start) & (timeline.starts <= self.end))
        # events ascend by step, then by op in its stream: a stable sort by stream keeps the order of time in each
        return shown[np.argsort(timeline.flat.ops["stream"][shown % timeline.ops], kind="stable")]

    def elements(self) -> Iterator[str]:
        """Yield the events, the idle time and the critical path."""
        timeline, events = self.timeline, self.events
        streams = timeline.flat.ops["stream"][events % timeline.ops]
        stops = np.searchsorted(streams, np.arange(len(timeline.flat.streams)), side="right")
        yield packed_columns(
            f"events-{self.name}",
            {
                "op": ("u4", events % timeline.ops),
                "step": ("i1", events // timeline.ops - self.step),
                "start": ("f8", timeline.starts[events]),
                "end": ("f8", timeline.ends[events]),
                "streamStop": ("u4", stops),
            },
        )
        yield self._idle_element()
        path = self.bubbles.critical_path()
        yield packed_columns(
            f"path-{self.name}",
            {
                "stream": ("u2", np.array([op.stage * STREAMS + ENGINES.index(op.engine) for op in path], np.int64)),
                "start": ("f8", np.array([op.start for op in path])),
                "end": ("f8", np.array([op.end for op in path])),
            },
        )

    def _idle_element(self) -> str:
        pieces = self.bubbles.piece_arrays()
        stops = np.searchsorted(pieces.streams, np.arange(len(self.timeline.flat.streams)), "right")
        return packed_columns(
            f"idle-{self.name}",
            {
                "start": ("f8", pieces.starts),
                "end": ("f8", pieces.ends),
                "cause": ("u1", pieces.causes),
                "stage": ("i2", pieces.awaited_stages),
                "streamStop": ("u4", stops),
            },
        )

    def interval_element(self, stage: int, home: Home, intervals: LiveIntervals) -> str:
        """Return the live intervals of a stage in a memory that touch the step, as first and last rows of `events`.

        OUTSIDE stands for a start before the interval shown, and for an end after it.
        """
        shown = (intervals.ends >= self.start) & (intervals.starts <= self.end)
        return packed_columns(
            f"intervals-{self.name}-{stage}-{home.value}",
            {
                "tensor": ("u4", intervals.tensors[shown]),
                "first": ("i4", self._rows(intervals.first_events[shown], intervals.starts[shown])),
                "last": ("i4", self._rows(intervals.last_events[shown], intervals.ends[shown])),
            },
        )

    def _rows(self, events: Int64s, times: Float64s) -> Int64s:
        """Return the rows of `events` for event numbers; OUTSIDE for events that are not shown."""
        places = np.full(len(self.timeline.starts), OUTSIDE)
        places[self.events] = np.arange(len(self.events))
        # OUTSIDE is -1, so `places[events]` reads the last place for it; `where` discards that
        inside = (events != OUTSIDE) & (times >= self.start) & (times <= self.end)
        return np.where(inside, places[events], OUTSIDE)


def tensor_elements(timeline: Timeline, stage: int) -> Iterator[str]:
    """Yield the tensors of a stage: offset, size, kind, type and name."""
    columns = timeline.columns
    own, forms = columns.tensors_of(stage), columns.forms
    numbers = columns.tensor_forms[own]
    types, type_numbers = _interned(numbers, [f"{form.type}" for form in forms])
    yield packed_lines(f"names-{stage}", columns.names[own])
    yield packed_lines(f"types-{stage}", types)
    yield packed_columns(
        f"tensors-{stage}",
        {
            # in units of the alignment, so that 32 bits reach far beyond 4 GiB
            "offset": ("u4", columns.offsets[own] // ALIGNMENT_BYTES),
            "size": ("u4", columns.form_bytes[numbers] // ALIGNMENT_BYTES),
            "kind": ("u1", np.array([KINDS.index(form.kind) for form in forms], np.int64)[numbers]),
            "carried": ("u1", np.array([form.carried for form in forms], np.int64)[numbers]),
            "type": ("u2", type_numbers),
        },
    )


def _interned(numbers: NDArray[np.integer[Any]], texts: Sequence[str]) -> tuple[list[str], Int64s]:
    """Return the distinct texts of numbered things in order of first use, and each thing's index among them."""
    met, firsts = np.unique(numbers, return_index=True)
    places: dict[str, int] = {}
    of_number = np.zeros(len(texts), np.int64)
    for number in met[np.argsort(firsts)].tolist():
        of_number[number] = places.setdefault(texts[number], len(places))
    return list(places), of_number[numbers]

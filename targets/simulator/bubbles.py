"""Bubble accounting: every idle moment of every engine with its cause, and the critical path of the step.

`idle_walk` explains each idle interval backwards, from its end. The seconds of all causes of an engine and its busy
seconds add up to the window, so that no idle time is lost:

    engine of @1:  |busy |   idle    |busy ...       ends in the step before ... ends in this step
    its causes:          |link|stage |
"""

from __future__ import annotations

from enum import Enum
from functools import cached_property
from typing import NamedTuple

import numpy as np
from attrs import define, frozen

from ratrain.ratrain_ir.ops.base import ENGINES, Engine
from ratrain.ratrain_ir.ops.collectives import TENSOR_OPS, AllGather, AllReduce, AllReduceScalar, ReduceScatter
from ratrain.ratrain_ir.ops.compute import BLOCK_OPS, LoadInput, Release, ScaleUpdate, Update
from ratrain.ratrain_ir.ops.context_ranks import CONTEXT_OPS
from ratrain.ratrain_ir.ops.memory import MEMORY_OPS
from ratrain.ratrain_ir.ops.messages import OFFLOAD_OPS, Recv, Send
from ratrain.ratrain_ir.ops.per_op import PerOp
from ratrain.targets.program.columns import KEYWORD
from ratrain.targets.program.instruction import Instruction
from ratrain.targets.simulator import idle_walk
from ratrain.targets.simulator.flat_program import STREAMS, Float64s, Int64s
from ratrain.targets.simulator.timeline import Timeline, beyond_rounding


class Cause(Enum):
    """Reason for which an engine was idle."""

    FILL = "fill"
    DRAIN = "drain"
    STAGE = "another stage"
    LINK = "link"
    BYTE_REUSE = "byte reuse"
    PEERS = "tensor-parallel ranks"
    CONTEXT = "context ranks"
    MEMORY = "memory"
    GRAD_SYNC = "GradSync"
    UPDATE = "UpdateShard"
    PREFETCH = "PrefetchW"
    BARRIER = "barrier"
    INPUT = "input"
    QUEUE = "queued behind"
    COMPUTE = "own compute"
    SETTLING = "settling"

    __hash__ = object.__hash__


_CAUSES = tuple(Cause)
"""Causes by number, in the order that `idle_walk` uses."""
PIECES = 2
"""Pieces per idle interval that the first attempt makes room for."""
_TAIL = (Cause.GRAD_SYNC, Cause.UPDATE, Cause.PREFETCH, Cause.BARRIER, Cause.QUEUE)
_KINDS = PerOp(
    "cause of waiting",
    {
        **dict.fromkeys(BLOCK_OPS, idle_walk.COMPUTE),
        Send: idle_walk.LINK,
        Recv: idle_walk.LINK,
        **dict.fromkeys(OFFLOAD_OPS, idle_walk.MEMORY),
        ReduceScatter: idle_walk.GRAD_SYNC,
        AllReduce: idle_walk.GRAD_SYNC,
        Update: idle_walk.UPDATE,
        AllGather: idle_walk.PREFETCH,
        AllReduceScalar: idle_walk.BARRIER,
        **dict.fromkeys(TENSOR_OPS, idle_walk.PEERS),
        **dict.fromkeys(CONTEXT_OPS, idle_walk.CONTEXT),
        **dict.fromkeys(MEMORY_OPS, idle_walk.MEMORY),
        ScaleUpdate: idle_walk.BARRIER,
        LoadInput: idle_walk.INPUT,
    },
    never=(Release,),
)
"""Cause that is charged to an engine that waits for an op, by kind of op."""


class IdleArrays(NamedTuple):
    """Parts of idle intervals with one cause each; arrays of one entry a piece."""

    streams: Int64s
    causes: Int64s
    """places in `Cause`"""
    awaited_stages: Int64s
    """stages of the ops that engines waited for"""
    starts: Float64s
    ends: Float64s


@frozen
class PathOp:
    """Instruction on the critical path, and the part of its time that is on it."""

    instruction: Instruction
    stage: int
    engine: Engine
    start: float
    end: float
    alone_seconds: float
    """seconds of the whole instruction if nothing shares with it"""


@define(eq=False, slots=False)
class Bubbles:
    """Idle time of one step: the last one, or with `cold` the first.

    The last step of an engine lasts from its last op's end in the step before to that in the last: `step_seconds` once
    the program has settled. The difference is charged to SETTLING. The first step lasts from 0 to the makespan.
    """

    timeline: Timeline
    cold: bool = False

    @property
    def window_seconds(self) -> float:
        """Seconds that busy and idle time of every engine add up to."""
        return self.timeline.makespan_seconds if self.cold else self.timeline.step_seconds

    def busy_seconds(self, stage: int, engine: Engine) -> float:
        """Return the seconds an engine works in the step."""
        return self.timeline.busy_seconds(stage, engine, 0 if self.cold else None)

    def idle_seconds(self, stage: int, engine: Engine) -> dict[Cause, float]:
        """Return the idle seconds of an engine by cause; causes that do not occur are left out."""
        row = self._by_cause[stage * STREAMS + ENGINES.index(engine)]
        window = self.window_seconds
        causes = zip(_CAUSES, row, strict=True)
        idle = {cause: float(seconds) for cause, seconds in causes if beyond_rounding(seconds, window) > 0}
        first, stop = self.timeline.ops_of(stage, engine)
        if stop > first and not self.cold:
            last = self.timeline.steps * self.timeline.ops - self.timeline.ops + stop - 1
            own_step = float(self.timeline.ends[last] - self.timeline.ends[last - self.timeline.ops])
            if beyond_rounding(window - own_step, window) > 0:
                idle[Cause.SETTLING] = window - own_step
        return idle

    def waited_for(self, stage: int, engine: Engine) -> dict[int, float]:
        """Return the seconds an engine waited for each other stage; fill and drain do not count."""
        seconds = self._by_stage[stage * STREAMS + ENGINES.index(engine)]
        return {int(other): float(seconds[other]) for other in np.flatnonzero(seconds)}

    def waited_for_ops(self, stage: int, engine: Engine) -> dict[int, float]:
        """Return the idle seconds of an engine in the step by the op, as its number, whose end it waited for."""
        timeline = self.timeline
        intervals, bounds = self._idle_intervals()
        mine = intervals[:, 0] == stage * STREAMS + ENGINES.index(engine)
        seconds, met = np.zeros(timeline.ops), np.empty(timeline.ops, np.int64)
        count = idle_walk.waited(
            timeline.flat,
            timeline.starts,
            timeline.ends,
            timeline.relations.reuse,
            timeline.rendezvous,
            intervals[mine],
            bounds[mine],
            seconds,
            met,
        )
        return dict(zip(met[:count].tolist(), seconds[met[:count]].tolist(), strict=True))

    def exposed_tail_seconds(self, stage: int) -> float:
        """Return a stage's idle compute seconds that GradSync, UpdateShard, PrefetchW and barriers cost.

        Idle time queued behind another op counts too.
        """
        idle = self.idle_seconds(stage, Engine.COMPUTE)
        return sum(idle.get(cause, 0.0) for cause in _TAIL)

    def piece_arrays(self) -> IdleArrays:
        """Return all idle pieces, stream by stream, in the order of time.

        SETTLING has no place in time and is not among them.
        """
        order = np.lexsort((self._times[:, 0], self._streams))
        starts, ends = self._times[order].T
        return IdleArrays(self._streams[order], self._causes[order], self._stages[order], starts, ends)

    def critical_path(self) -> list[PathOp]:
        """Return the ops whose times, one after the other, make up the step, the first one first.

        Starts at the end that the step is measured by, and goes back along the op that each op waited for last, for one
        step.
        """
        timeline, flat = self.timeline, self.timeline.flat
        event = self._last_event()
        to = float(timeline.ends[event]) if event >= 0 else 0.0
        begin = to - self.window_seconds
        events = np.empty(timeline.steps * timeline.ops, np.int64)
        count = idle_walk.chain(
            flat,
            timeline.starts,
            timeline.ends,
            timeline.relations.reuse,
            timeline.rendezvous,
            event,
            begin,
            to,
            events,
        )
        path: list[PathOp] = []
        for event in events[:count].tolist():
            op = event % timeline.ops
            start = max(begin, float(timeline.starts[event]))
            if start < to:
                stage, engine = divmod(int(flat.ops["stream"][op]), STREAMS)
                alone = float(timeline.works["seconds"][op])
                path.append(PathOp(timeline.columns.instruction(op), stage, ENGINES[engine], start, to, alone))
            to = start
        return path[::-1]

    def _last_event(self) -> int:
        timeline, flat = self.timeline, self.timeline.flat
        if not timeline.ops:
            return idle_walk.NOBODY
        if self.cold:
            return int(timeline.ends[: timeline.ops].argmax())
        last = (timeline.steps - 1) * timeline.ops + flat.last_ops
        return int(last[(timeline.ends[last] - timeline.ends[last - timeline.ops]).argmax()])

    @cached_property
    def _walked(self) -> tuple[Int64s, Float64s, Int64s]:
        """Pieces as `idle_walk.walk` fills them (numbers, times), and the stream of each."""
        timeline = self.timeline
        kinds = timeline.columns.by_string(dict(_KINDS), timeline.columns.instructions[:, KEYWORD])
        intervals, bounds = self._idle_intervals()
        room = PIECES * len(intervals) + 1
        # The number of pieces is not known before the walk: it runs again with twice the room until all fit.
        while True:
            numbers, times = np.empty((room, 3), np.int64), np.empty((room, 2))
            count = idle_walk.walk(
                timeline.flat,
                timeline.starts,
                timeline.ends,
                timeline.relations.reuse,
                kinds,
                timeline.relations.apart,
                timeline.rendezvous,
                intervals,
                bounds,
                numbers,
                times,
            )
            if count >= 0:
                return numbers[:count], times[:count], intervals[numbers[:count, 0], 0]
            room *= 2

    @property
    def _causes(self) -> Int64s:
        return self._walked[0][:, 1]

    @property
    def _stages(self) -> Int64s:
        return self._walked[0][:, 2]

    @property
    def _times(self) -> Float64s:
        return self._walked[1]

    @property
    def _streams(self) -> Int64s:
        return self._walked[2]

    @cached_property
    def _by_cause(self) -> Float64s:
        """Idle seconds, [streams, causes]."""
        count = len(_CAUSES)
        seconds = self._times[:, 1] - self._times[:, 0]
        table = np.bincount(self._streams * count + self._causes, seconds, len(self.timeline.flat.streams) * count)
        return np.asarray(table, np.float64).reshape(-1, count)

    @cached_property
    def _by_stage(self) -> Float64s:
        """Idle seconds spent waiting for another stage, [streams, stages]."""
        stages, waited = self.timeline.columns.stages, self._causes == idle_walk.STAGE
        seconds = (self._times[:, 1] - self._times[:, 0])[waited]
        places = self._streams[waited] * stages + self._stages[waited]
        table = np.bincount(places, seconds, len(self.timeline.flat.streams) * stages)
        return np.asarray(table, np.float64).reshape(-1, stages)

    def _idle_intervals(self) -> tuple[Int64s, Float64s]:
        """Return the idle intervals of engines that have ops, as `idle_walk.walk` takes them."""
        timeline, flat = self.timeline, self.timeline.flat
        step = 0 if self.cold else timeline.steps - 1
        events = step * timeline.ops + np.arange(timeline.ops)
        before = events - 1
        first_ops, last_ops = flat.first_ops, flat.last_ops
        before[first_ops] = events[last_ops] - timeline.ops
        # An op's idle interval begins at the end of its predecessor: for a stream's first op, of its last op in the
        # step before.
        since = np.zeros(timeline.ops) if self.cold else timeline.ends[np.maximum(before, 0)]
        if self.cold:
            inner = before >= 0
            inner[first_ops] = False
            since[inner] = timeline.ends[before[inner]]
        boundary = np.full(timeline.ops, idle_walk.INSIDE)
        boundary[first_ops] = step
        nobody = np.full(timeline.ops, idle_walk.NOBODY)
        intervals = np.stack([flat.ops["stream"], events, nobody, boundary], axis=1)
        bounds = np.stack([since, timeline.starts[events]], axis=1)
        if self.cold:  # until the whole step is done; what runs then belongs to the drain
            rows = np.empty((len(last_ops), 4), np.int64)
            rows[:] = idle_walk.NOBODY, idle_walk.NOBODY, self._last_event(), step + 1
            rows[:, 0] = flat.ops["stream"][last_ops]
            ends = np.full(len(last_ops), timeline.makespan_seconds)
            intervals = np.concatenate([intervals, rows])
            bounds = np.concatenate([bounds, np.stack([timeline.ends[last_ops], ends], axis=1)])
        idle = bounds[:, 1] > bounds[:, 0]
        return np.ascontiguousarray(intervals[idle]), np.ascontiguousarray(bounds[idle])

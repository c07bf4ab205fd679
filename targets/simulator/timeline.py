"""Result of a timed run: start and end of every instruction of every step, and the figures that need nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from attrs import define, field, frozen

from ratrain.ratrain_ir.ops.base import ENGINES, Engine
from ratrain.targets.program.columns import ProgramColumns
from ratrain.targets.program.instruction import Instruction
from ratrain.targets.program.program import Program
from ratrain.targets.simulator.flat_program import STREAMS, FlatProgram, Float64s, Records
from ratrain.targets.simulator.relations import Relations

_ROUNDING = 1e-12
"""Part of a time that sums of floats leave where nothing is."""


def beyond_rounding(difference: float, whole: float) -> float:
    """Return the difference of two sums of times, each near `whole`; 0 where it is but their rounding."""
    return difference if abs(difference) > _ROUNDING * whole else 0.0


@frozen
class Span:
    """One executed instruction; seconds count from the start of the first step."""

    instruction: Instruction
    start: float
    end: float


@define(eq=False, slots=False)
class Timeline:
    """Start and end seconds of every instruction of every step, [steps * ops], numbered as in `flat_program`."""

    program: Program
    columns: ProgramColumns
    """the program at the time of the run"""
    flat: FlatProgram
    works: Records
    """by op"""
    steps: int
    rendezvous: bool
    starts: Float64s
    ends: Float64s
    moved_bytes: Float64s
    """[stages, DDR | link outwards | link inwards | both links of each outer level]: bytes that have flowed in all
    steps"""
    events: int = field(default=0)
    """number of works that have ended, a measure of the simulation's effort"""

    @property
    def ops(self) -> int:
        """Number of ops of one step."""
        return len(self.flat.ops)

    @cached_property
    def makespan_seconds(self) -> float:
        """Seconds of one step from cold: the end of the last instruction of the first step."""
        return float(self.ends[: self.ops].max(initial=0.0))

    @cached_property
    def step_seconds(self) -> float:
        """Seconds of the steady period: the largest distance between a stream's ends in the last two steps."""
        last = (self.steps - 1) * self.ops + self.flat.last_ops
        return float((self.ends[last] - self.ends[last - self.ops]).max(initial=0.0))

    @cached_property
    def instructions(self) -> list[Instruction]:
        """Instructions of a step by op number: the program's own objects."""
        return [item for stage in self.program.stages for engine in ENGINES for item in stage.streams[engine]]

    @cached_property
    def relations(self) -> Relations:
        """Relations between ops that wait for each other."""
        return Relations(self.flat, self.columns)

    @cached_property
    def spans(self) -> list[dict[Engine, list[Span]]]:
        """Spans by stage and engine, in stream order, step after step."""
        starts, ends = self.starts.tolist(), self.ends.tolist()
        return [
            {
                engine: [Span(self.instructions[e % self.ops], starts[e], ends[e]) for e in self._events(s, engine)]
                for engine in ENGINES
            }
            for s in range(self.columns.stages)
        ]

    def _events(self, stage: int, engine: Engine) -> Iterator[int]:
        first, stop = self.ops_of(stage, engine)
        for step in range(self.steps):
            yield from range(step * self.ops + first, step * self.ops + stop)

    def ops_of(self, stage: int, engine: Engine) -> tuple[int, int]:
        """Return the ops of a stream as first and exclusive end."""
        stream = stage * STREAMS + ENGINES.index(engine)
        return int(self.flat.streams["first"][stream]), int(self.flat.streams["stop"][stream])

    def busy_seconds(self, stage: int, engine: Engine, step: int | None = None) -> float:
        """Return the seconds an engine works in a step, the last one if none is given."""
        first, stop = self.ops_of(stage, engine)
        begin = (self.steps - 1 if step is None else step) * self.ops
        return float((self.ends[begin + first : begin + stop] - self.starts[begin + first : begin + stop]).sum())

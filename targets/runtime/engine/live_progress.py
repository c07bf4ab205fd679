"""Progress of the stages of a running program, for a live view of any engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from attrs import frozen

from ratrain.ratrain_ir.ops.base import ENGINES, Engine
from ratrain.targets.runtime.engine.engine import ProgramEngine

if TYPE_CHECKING:
    from ratrain.targets.program.program import Program

Completed = Mapping[Engine, int]
"""Instructions that each engine of a rank has completed, over all steps."""


class ProgressSource(Protocol):
    """Source of progress, asked by a view from another thread while a step runs; quick and without side effects."""

    def completed(self) -> dict[int, Completed]:
        """Return the counts of one replica by stage; they may be slightly old, and stages may be missing."""


@frozen(eq=False)
class LocalProgress:
    """First replica of every stage in this process. Counters change while they are copied: each is valid by itself."""

    engine: ProgramEngine

    def completed(self) -> dict[int, Completed]:
        """Return the counts by stage: see `ProgressSource`."""
        return {stage: ranks[0].completed.copy() for stage, ranks in enumerate(self.engine.ranks) if ranks}


@frozen
class StageView:
    """Progress of one stage."""

    stage: int
    phase: str
    """the compute engine's next instruction, or if that engine is done, the one that the stage still waits for"""
    done: float
    """fraction of the step's instructions that are completed"""
    live_bytes: int
    """live bytes at the compute engine's place in the program, in execution order"""
    arena_bytes: int


class StageWatch:
    """Conversion of counts into views that people read."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.live = [stage.live_bytes() for stage in program.stages]

    def views(self, source: ProgressSource) -> list[StageView]:
        """Return one view for each stage that the source reports."""
        return [self._view(stage, counts) for stage, counts in sorted(source.completed().items())]

    def _view(self, index: int, counts: Completed) -> StageView:
        stage = self.program.stages[index]
        steps = min(counts[engine] // len(stream) for engine, stream in stage.streams.items() if stream)
        places = {engine: counts[engine] - steps * len(stream) for engine, stream in stage.streams.items()}
        # The least advanced engine has work left in its stream, unless counters changed while they were read.
        left = (engine for engine in (Engine.COMPUTE, *ENGINES) if places[engine] < len(stage.streams[engine]))
        ahead = next(left, None)
        phase = stage.streams[ahead][places[ahead]].title if ahead else ""
        last = len(stage.streams[Engine.COMPUTE]) - 1
        live = self.live[index][Engine.COMPUTE, min(places[Engine.COMPUTE], last)]
        done = sum(places.values()) / stage.instructions
        return StageView(index, phase, min(done, 1.0), live, stage.arena_bytes)

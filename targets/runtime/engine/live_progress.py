"""Where the stages of a running program are: what a live view shows, whatever engine runs the program."""

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
    """What a view asks, from another thread, while a step runs: it must be quick and must not disturb the run."""

    def completed(self) -> dict[int, Completed]:
        """The counts of one replica by stage; they may be a little old, and stages may be out of reach."""


@frozen(eq=False)
class LocalProgress:
    """The first replica of every stage in this process. Counters are copied while they change: each is whole by itself."""

    engine: ProgramEngine

    def completed(self) -> dict[int, Completed]:
        """See `ProgressSource`."""
        return {stage: ranks[0].completed.copy() for stage, ranks in enumerate(self.engine.ranks) if ranks}


@frozen
class StageView:
    """What one stage does."""

    stage: int
    phase: str
    """the compute engine's next instruction, or what the stage still waits for when that engine is done"""
    done: float
    """the part of the step's instructions that are completed"""
    live_bytes: int
    """at the compute engine's place in the program, in execution order"""
    arena_bytes: int


class StageWatch:
    """Turns counts into what people read."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.live = [stage.live_bytes() for stage in program.stages]

    def views(self, source: ProgressSource) -> list[StageView]:
        """One view for each stage in reach."""
        return [self._view(stage, counts) for stage, counts in sorted(source.completed().items())]

    def _view(self, index: int, counts: Completed) -> StageView:
        stage = self.program.stages[index]
        steps = min(counts[engine] // len(stream) for engine, stream in stage.streams.items() if stream)
        places = {engine: counts[engine] - steps * len(stream) for engine, stream in stage.streams.items()}
        # The least advanced engine has some of its stream before it, unless counters changed while they were read.
        left = (engine for engine in (Engine.COMPUTE, *ENGINES) if places[engine] < len(stage.streams[engine]))
        ahead = next(left, None)
        phase = stage.streams[ahead][places[ahead]].title if ahead else ""
        last = len(stage.streams[Engine.COMPUTE]) - 1
        live = self.live[index][Engine.COMPUTE, min(places[Engine.COMPUTE], last)]
        done = sum(places.values()) / stage.instructions
        return StageView(index, phase, min(done, 1.0), live, stage.arena_bytes)

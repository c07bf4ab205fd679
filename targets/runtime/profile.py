"""Wall times of the instructions that an engine runs."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING

from attrs import define, field, frozen

from ratrain_ir.ops import Engine
from targets.program import Instruction

if TYPE_CHECKING:
    from targets.runtime.rank import Rank


@frozen
class RunSpan:
    """One instruction of one rank in one step; start and end in seconds of one clock."""

    stage: int
    replica: int
    engine: Engine
    instruction: Instruction
    step: int
    start: float
    end: float


@define(eq=False)
class Profile:
    """Records when instructions start and end. Members of a collective start and end together, as it runs once for all."""

    clock: Callable[[], float] = perf_counter
    """seconds: wall time, or the CPU time of the process where others use the machine and one thread runs"""
    spans: list[RunSpan] = field(factory=list)
    _started: dict[tuple[int, int, Engine], float] = field(factory=dict)

    def begin(self, rank: Rank, engine: Engine) -> None:
        """An engine of a rank starts its next instruction."""
        self._started[rank.stage_index, rank.replica, engine] = self.clock()

    def complete(self, rank: Rank, engine: Engine, instruction: Instruction) -> None:
        """It is done; the rank has counted it already."""
        end = self.clock()
        step = (rank.completed[engine] - 1) // len(rank.stage.streams[engine])
        start = self._started[rank.stage_index, rank.replica, engine]
        self.spans.append(RunSpan(rank.stage_index, rank.replica, engine, instruction, step, start, end))

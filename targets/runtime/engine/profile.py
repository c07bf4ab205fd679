"""Wall times of the instructions that an engine runs."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from statistics import median
from time import perf_counter, thread_time
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import numpy as np
from attrs import define, evolve, field, frozen
from numpy.typing import NDArray

from ratrain.ratrain_ir.ops.base import Engine
from ratrain.ratrain_ir.topology import Rank
from ratrain.targets.program.instruction import Instruction

if TYPE_CHECKING:
    from ratrain.targets.program.program import Program

Concurrency: TypeAlias = Literal["ordered", "threads", "processes"]
"""Unit that runs at the same time as others: `ordered`: one instruction at a time; `threads`: the engines of all
ranks; `processes`: the ranks."""
CONCURRENCIES: tuple[Concurrency, ...] = get_args(Concurrency)
EngineKey: TypeAlias = tuple[int, int, Engine]
"""Engine as (stage, number among the ranks of the stage, engine)."""
_NUMBERS = 4
"""Numbers recorded for an instruction: CPU and wall time at its begin, wall and CPU time at its end."""
_MOMENTS = slice(1, 3)
_TRIALS = 1000


@frozen
class RunSpan:
    """Instruction of one rank in one step; start and end in seconds of one clock."""

    rank: Rank
    engine: Engine
    instruction: Instruction
    step: int
    start: float
    end: float
    cpu_seconds: float
    """CPU time of the thread that ran it; meaningless if that thread did other work meanwhile"""


@frozen
class StepSpan:
    """Step of the process, from its request to its report."""

    step: int
    start: float
    end: float


@define(eq=False)
class Profile:
    """Record of when instructions start and end. Members of a collective share their times, as it runs once for all.

    An engine repeats its stream, so only numbers are kept: entry k belongs to instruction k mod stream length of step k
    div stream length.
    """

    clock: Callable[[], float] = perf_counter
    steps: list[StepSpan] = field(factory=list)
    recorded: dict[EngineKey, array[float]] = field(factory=dict)
    ranks_per_core: float | None = None
    """number of ranks on the machine where most share a core; None if ranks are not processes"""

    def begin(self, stage: int, lane: int, engine: Engine) -> None:
        """Record that an engine of a rank starts its next instruction."""
        numbers = self.recorded.setdefault((stage, lane, engine), array("d"))
        numbers.append(thread_time())
        numbers.append(self.clock())

    def complete(self, stage: int, lane: int, engine: Engine) -> None:
        """Record that the engine has completed it."""
        end = self.clock()
        numbers = self.recorded[stage, lane, engine]
        # The wall clock was read first: recording is not part of the instruction.
        numbers.append(end)
        numbers.append(thread_time())

    def overhead_seconds(self) -> float:
        """Measure the seconds that recording one instruction takes: the median over empty ones."""
        trial = Profile(self.clock)
        taken = []
        for _ in range(_TRIALS):
            start = perf_counter()
            trial.begin(0, 0, Engine.COMPUTE)
            trial.complete(0, 0, Engine.COMPUTE)
            taken.append(perf_counter() - start)
        return median(taken)

    def by_clock(self, shown: Callable[[NDArray[np.float64]], NDArray[np.float64]]) -> Profile:
        """Return this profile with all times converted to another clock by `shown`."""
        recorded = {}
        for key, numbers in self.recorded.items():
            table = np.array(numbers).reshape(-1, _NUMBERS)
            table[:, _MOMENTS] = shown(table[:, _MOMENTS])
            recorded[key] = array("d", table.tobytes())
        moments = shown(np.array([[step.start, step.end] for step in self.steps]).reshape(-1, 2)).tolist()
        steps = [evolve(step, start=start, end=end) for step, (start, end) in zip(self.steps, moments, strict=True)]
        return Profile(self.clock, steps, recorded, self.ranks_per_core)

    def spans(self, program: Program) -> Iterator[RunSpan]:
        """Yield all instructions, engine by engine."""
        for (stage, lane, engine), numbers in self.recorded.items():
            rank = program.topology.in_lane(stage, lane)
            stream = program.stages[stage].streams[engine]
            for place in range(len(numbers) // _NUMBERS):
                cpu_start, start, end, cpu_end = numbers[place * _NUMBERS : (place + 1) * _NUMBERS]
                step, index = divmod(place, len(stream))
                yield RunSpan(rank, engine, stream[index], step, start, end, cpu_end - cpu_start)

"""Programs timed with a given work for each instruction."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ratrain.ratrain_ir.ops.base import ENGINES, Engine
from ratrain.targets.machine.resource_work import Bandwidths, ResourceWork
from ratrain.targets.program.instruction import Instruction
from ratrain.targets.simulator.op_works import OpWorks
from ratrain.targets.simulator.progress import STEPS
from ratrain.targets.simulator.timed_run import simulate_works

if TYPE_CHECKING:
    from ratrain.targets.program.program import Program
    from ratrain.targets.simulator.timeline import Timeline

WorkOf = Callable[[int, Engine, Instruction], ResourceWork]
"""Work of an instruction of a stage on an engine."""


def simulate_work(
    program: Program, work_of: WorkOf, bandwidths: Bandwidths, *, rendezvous: bool = False, steps: int = STEPS
) -> Timeline:
    works = [
        work_of(index, engine, item)
        for index, stage in enumerate(program.stages)
        for engine in ENGINES
        for item in stage.streams[engine]
    ]
    timed = OpWorks(works, np.arange(len(works)))
    return simulate_works(program, program.columns(), timed, bandwidths, rendezvous=rendezvous, steps=steps)

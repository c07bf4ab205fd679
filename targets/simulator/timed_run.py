"""A timed run of a program: when each instruction starts and ends on every engine of every stage.

Engines take their streams in order. An instruction starts when its engine is free and its waits are met. A buffered
send occupies its engine for the message's time; its receive starts when it is posted and the message has started, and
ends no earlier than the message. A rendezvous send starts and ends with its receive. A collective across stages starts
and ends on all of them together. Instructions that overlap share the bandwidth of DDR and links. Replicas are alike, so
one replica of each stage is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ratrain.ratrain_ir.ops.base import ENGINES
from ratrain.targets.machine.resource_work import Bandwidths, LinkLevel, ResourceWork
from ratrain.targets.program.instruction import Instruction
from ratrain.targets.simulator.flat_program import flatten
from ratrain.targets.simulator.op_works import OpWorks
from ratrain.targets.simulator.progress import STEPS, check_done
from ratrain.targets.simulator.routes import routes_of
from ratrain.targets.simulator.run_state import moved_bytes, new_state
from ratrain.targets.simulator.timeline import Timeline

if TYPE_CHECKING:
    from ratrain.targets.program.columns import ProgramColumns
    from ratrain.targets.program.program import Program

DurationOf = Callable[[int, Instruction], float]
"""Seconds of an instruction of a stage that runs alone."""

UNLIMITED = Bandwidths(np.inf, (LinkLevel(np.inf),), np.inf)
"""Bandwidths for instructions that have no bytes to move."""


def simulate(program: Program, duration_of: DurationOf, *, rendezvous: bool = False, steps: int = STEPS) -> Timeline:
    """Time `steps` consecutive steps in which each instruction takes its given time, as nothing is shared.

    Raises `DiagnosticError` RT042 when the program cannot end, naming who waits.
    """
    works = [
        ResourceWork(duration_of(index, item))
        for index, stage in enumerate(program.stages)
        for engine in ENGINES
        for item in stage.streams[engine]
    ]
    timed = OpWorks(works, np.arange(len(works)))
    return simulate_works(program, program.columns(), timed, UNLIMITED, rendezvous=rendezvous, steps=steps)


def simulate_works(
    program: Program,
    columns: ProgramColumns,
    op_works: OpWorks,
    bandwidths: Bandwidths,
    *,
    rendezvous: bool = False,
    steps: int = STEPS,
) -> Timeline:
    """Time `steps` consecutive steps of a program in columns, whose ops share bandwidth while they overlap.

    Raises `DiagnosticError` RT042 when the program cannot end, naming who waits.
    """
    from ratrain.targets.simulator import event_loop, interpreted_loop

    flat = flatten(columns, program.topology)
    works = op_works.records()
    routes = routes_of(flat, op_works, bandwidths)
    state = new_state(flat, routes, bandwidths.host)
    starts, ends = np.zeros((2, steps * len(works)))
    small = interpreted_loop.ALLOWANCE.take(steps * len(works))
    run = interpreted_loop.run if small else event_loop.run
    events = run(flat, works, state, steps, rendezvous, starts, ends)
    check_done(columns, state.streams["done"], steps, rendezvous=rendezvous)
    return Timeline(
        program,
        columns,
        flat,
        works,
        steps,
        rendezvous,
        starts,
        ends,
        moved_bytes(state, columns.stages, len(bandwidths.links)),
        events,
    )

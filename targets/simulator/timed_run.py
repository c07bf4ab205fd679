"""A timed run of a program's own streams: when each instruction starts and ends on every engine of every stage.

Engines take their streams in order; an instruction starts when its engine is free and its waits are met. A buffered send occupies
its engine for the message's time; its receive starts when it is posted and the message has started, and ends no earlier than the
message. A rendezvous send starts and ends with its receive. A collective across stages starts and ends on all of them together.
Instructions that overlap share the bandwidth of DDR and link. Replicas are alike, so one of each stage is timed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ratrain.ratrain_ir.diagnostics import fail
from ratrain.ratrain_ir.ops import ENGINES, Engine
from ratrain.targets.machine.resource_work import Bandwidths, LinkLevel, ResourceWork
from ratrain.targets.program.program import Instruction, Program
from ratrain.targets.simulator.flat_program import (
    STREAMS,
    Records,
    flatten,
)
from ratrain.targets.simulator.routes import routes_of
from ratrain.targets.simulator.run_state import WORK, RunState, moved_bytes, new_state
from ratrain.targets.simulator.timeline import Timeline

DurationOf = Callable[[int, Instruction], float]
"""Seconds of an instruction of a stage that runs alone."""
WorkOf = Callable[[int, Engine, Instruction], ResourceWork]
"""The works of an instruction of a stage on an engine."""

STEPS = 3
"""Consecutive steps that are timed: the first from cold, the distance of the last two is the steady period."""
UNLIMITED = Bandwidths(np.inf, (LinkLevel(np.inf),), np.inf)
"""Nothing is short, where no instruction has bytes to move."""
_SHOWN_WAITING = 20


def simulate(program: Program, duration_of: DurationOf, *, rendezvous: bool = False, steps: int = STEPS) -> Timeline:
    """Time `steps` consecutive steps; nothing is shared, each instruction takes its time.

    Raises `DiagnosticError` RT042 when the program cannot end, naming who waits.
    """
    return simulate_work(
        program,
        lambda s, _engine, item: ResourceWork(duration_of(s, item)),
        UNLIMITED,
        rendezvous=rendezvous,
        steps=steps,
    )


def simulate_work(
    program: Program,
    work_of: WorkOf,
    bandwidths: Bandwidths,
    *,
    rendezvous: bool = False,
    steps: int = STEPS,
) -> Timeline:
    """Time `steps` consecutive steps of instructions that share what they overlap on.

    Raises `DiagnosticError` RT042 when the program cannot end, naming who waits.
    """
    from ratrain.targets.simulator import event_loop, interpreted_loop

    flat = flatten(program)
    op_works = _works(program, work_of)
    works = _records(op_works)
    routes = routes_of(flat, op_works, bandwidths)
    state = new_state(flat, routes, bandwidths.host)
    starts, ends = np.zeros((2, steps * len(works)))
    small = interpreted_loop.ALLOWANCE.take(steps * len(works))
    run = interpreted_loop.run if small else event_loop.run
    events = run(flat, works, state, steps, rendezvous, starts, ends)
    if (state.streams["done"] < steps * (flat.streams["stop"] - flat.streams["first"])).any():
        _hang(program, state, steps, rendezvous=rendezvous)
    return Timeline(
        program,
        flat,
        works,
        steps,
        rendezvous,
        starts,
        ends,
        moved_bytes(state, len(program.stages), len(bandwidths.links)),
        events,
    )


def _works(program: Program, work_of: WorkOf) -> list[ResourceWork]:
    """By op number."""
    return [
        work_of(index, engine, item)
        for index, stage in enumerate(program.stages)
        for engine in ENGINES
        for item in stage.streams[engine]
    ]


def _records(works: list[ResourceWork]) -> Records:
    records = np.empty(len(works), WORK)
    for name in WORK.names or ():
        records[name] = [getattr(each, name) for each in works]
    return records


def _hang(program: Program, state: RunState, steps: int, *, rendezvous: bool) -> None:
    waiting = []
    for stream, done in enumerate(state.streams["done"].tolist()):
        stage, engine = stream // STREAMS, ENGINES[stream % STREAMS]
        items = program.stages[stage].streams[engine]
        if done < steps * len(items):
            waiting.append(f"stage @{stage} {engine.value} engine at '{items[done % len(items)].title}'")
    mode = "rendezvous" if rendezvous else "buffered"
    text = "; ".join(waiting[:_SHOWN_WAITING])
    fail("RT042", f"the program cannot end with {mode} sends; these wait for ever: {text}")

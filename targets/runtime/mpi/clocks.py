"""The clocks of ranks on several machines, brought to that of process 0."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import numpy as np
from attrs import frozen
from mpi4py import MPI

from ratrain.targets.runtime.mpi.communicators import finish

Clock: TypeAlias = Callable[[], float]
_ROUNDS = 32
_ASK, _ANSWER = 1, 2


@frozen
class ClockOffset:
    """What to add to this process's clock for that of process 0, at a moment."""

    at: float
    """by this process's clock"""
    seconds: float
    error: float
    """at most: half of the shortest round trip"""


def measured_offset(world: MPI.Comm, clock: Clock, machine: str | None = None) -> ClockOffset:
    """The offset of this process's clock; all processes of `world` must call it.

    Processes of process 0's machine (None: this one) have its clock, and the offset 0. The others ask process 0 one after
    another for the time; of some answers the one that took least counts.
    """
    machines: list[str] = world.allgather(this_machine() if machine is None else machine)
    own = ClockOffset(clock(), 0.0, 0.0)
    for process in range(1, world.size):
        if machines[process] == machines[0]:
            continue
        if world.rank == 0:
            _answer(world, clock, process)
        elif world.rank == process:
            own = min((_ask(world, clock) for _ in range(_ROUNDS)), key=lambda offset: offset.error)
    return own


def _answer(world: MPI.Comm, clock: Clock, process: int) -> None:
    time = np.zeros(1)
    for _ in range(_ROUNDS):
        finish(world.Irecv(time, process, _ASK))
        time[0] = clock()
        world.Send(time, process, _ANSWER)


def _ask(world: MPI.Comm, clock: Clock) -> ClockOffset:
    answer = np.zeros(1)
    start = clock()
    world.Send(answer, 0, _ASK)
    world.Recv(answer, 0, _ANSWER)
    end = clock()
    return ClockOffset(end, float(answer[0]) - (start + end) / 2, (end - start) / 2)


def this_machine() -> str:
    """What processes have in common that read one monotonic clock: the running kernel."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return str(MPI.Get_processor_name())

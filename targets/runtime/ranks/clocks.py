"""The clocks of ranks on several machines, brought to that of process 0."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from attrs import frozen

from ratrain.targets.runtime.ranks.communicators import exchanged

if TYPE_CHECKING:
    from ratrain.targets.runtime.ranks.communicator import Communicator, Request

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


def measured_offset(world: Communicator, clock: Clock, machine: str | None = None) -> ClockOffset:
    """The offset of this process's clock; all processes of `world` must call it.

    Processes of process 0's machine (None: this one) have its clock, and the offset 0. The others ask process 0 one after
    another for the time; of some answers the one that took least counts.
    """
    machines = exchanged(world, this_machine() if machine is None else machine)
    own = ClockOffset(clock(), 0.0, 0.0)
    for process in range(1, world.size):
        if machines[process] == machines[0]:
            continue
        if world.rank == 0:
            _answer(world, clock, process)
        elif world.rank == process:
            own = min((_ask(world, clock) for _ in range(_ROUNDS)), key=lambda offset: offset.error)
    return own


def _answer(world: Communicator, clock: Clock, process: int) -> None:
    time = np.zeros(1)
    for _ in range(_ROUNDS):
        _at_once(world.irecv(time, process, _ASK))
        time[0] = clock()
        _at_once(world.isend(time, process, _ANSWER))


def _ask(world: Communicator, clock: Clock) -> ClockOffset:
    answer = np.zeros(1)
    start = clock()
    _at_once(world.isend(answer, 0, _ASK))
    _at_once(world.irecv(answer, 0, _ANSWER))
    end = clock()
    return ClockOffset(end, float(answer[0]) - (start + end) / 2, (end - start) / 2)


def _at_once(request: Request) -> None:
    """Wait without sleeping: a pause would be part of the round trip."""
    while not request.test():
        os.sched_yield()


def this_machine() -> str:
    """What processes have in common that read one monotonic clock: the running kernel."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return socket.gethostname()

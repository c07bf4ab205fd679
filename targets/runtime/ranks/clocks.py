"""Clocks of processes on several machines, mapped to the clock of process 0 (Cristian's algorithm).

    process k:   start --ask-->                        end
    process 0:                 read clock --answer-->
    offset = read - (start + end) / 2, wrong by at most (end - start) / 2

Of 32 round trips the shortest counts.
"""

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
    """Number of seconds to add to this process's clock to get that of process 0, measured at one moment."""

    at: float
    """time of the measurement, by this process's clock"""
    seconds: float
    error: float
    """largest error in seconds: half of the shortest round trip"""


def measured_offset(world: Communicator, clock: Clock, machine: str | None = None) -> ClockOffset:
    """Measure the offset of this process's clock to that of process 0; all processes of `world` must call it.

    `machine` identifies the machine of this process (None: ask the kernel). Processes on the machine of process 0 share
    its clock: their offset is 0, without messages. The others measure one after another.
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
    # process 0 read its clock at some moment between start and end: the middle is off by half of that at most
    return ClockOffset(end, float(answer[0]) - (start + end) / 2, (end - start) / 2)


def _at_once(request: Request) -> None:
    """Wait for a request without sleeping: a pause would count as part of the round trip."""
    while not request.test():
        os.sched_yield()


def this_machine() -> str:
    """Return the running kernel's boot id, or the host name: processes that have it in common share a clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return socket.gethostname()

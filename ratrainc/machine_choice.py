"""The machine that a command is to work for: a file or a built-in one, and its DDR where that is to be another."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from attrs import evolve, frozen

if TYPE_CHECKING:
    from ratrain.targets.machine.machine import Machine

_UNITS = {"GiB": 1 << 30, "GB": 10**9, "MiB": 1 << 20, "MB": 10**6}


@frozen
class MachineChoice:
    """What --machine and --capacity say."""

    machine: str | None = None
    """a file or a name; None: the default one"""
    capacity: int | None = None
    """bytes of DDR; None: those of the machine"""

    def load(self) -> Machine:
        """The machine; with another capacity it has a name of its own, as what is compiled for it is not for the given one.

        Raises `DiagnosticError` where the file is no machine.
        """
        from ratrain.targets.machine.machine import load_machine

        machine = load_machine(self.machine)
        return machine if self.capacity is None else resized(machine, self.capacity)

    @property
    def words(self) -> list[str]:
        """The choice as a command line has it."""
        machine = [] if self.machine is None else ["--machine", self.machine]
        return machine if self.capacity is None else [*machine, "--capacity", str(self.capacity)]

    @property
    def text(self) -> str:
        """What to write behind other words of a command; empty where nothing was chosen."""
        return f" {shlex.join(self.words)}" if self.words else ""


def resized(machine: Machine, capacity: int) -> Machine:
    """The machine with so many bytes of DDR, under a name of its own unless it has as many."""
    from ratrain.ratrainc.planner.machines import with_constants

    if capacity == machine.whole("ddr_capacity"):
        return machine
    changed = with_constants(machine, {"ddr_capacity": float(capacity)})
    return evolve(changed, name=f"{machine.name}-{_short(capacity)}")


def _short(capacity: int) -> str:
    unit = next((name for name, size in _UNITS.items() if capacity % size == 0), "B")
    return f"{capacity // _UNITS.get(unit, 1)}{unit}"

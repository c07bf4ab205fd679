"""The machine that a command is to work for: a file or a built-in one, and its DDR where that is to be another."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from ratrain.ratrainc.console.terminal import echo

if TYPE_CHECKING:
    from ratrain.targets.machine.machine import Machine

_NAMED_IN = ("GiB", "GB", "MiB", "MB", "B")


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
        machine = given_machine(self.machine)
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


def given_machine(name: str | None) -> Machine:
    """What --machine names, and a word on stderr where its file leaves open how sure figures are.

    Raises `DiagnosticError` where the file is no machine.
    """
    from ratrain.targets.machine.machine import load_machine

    machine = load_machine(name)
    if machine.unsaid:
        figures = ", ".join(machine.unsaid)
        echo(f"the machine '{machine.name}' says no certainty of these, which count as assumed: {figures}", err=True)
    return machine


def resized(machine: Machine, capacity: int) -> Machine:
    """The machine with so many bytes of DDR, under a name of its own unless it has as many."""
    from ratrain.ratrainc.choices.machine_changes import with_constants

    if capacity == machine.whole("ddr_capacity"):
        return machine
    changed = with_constants(machine, {"ddr_capacity": float(capacity)})
    return evolve(changed, name=f"{machine.name}-{_short(capacity)}")


def _short(capacity: int) -> str:
    from ratrain.ratrain_ir.support.quantities import BYTES

    unit = next(name for name in _NAMED_IN if capacity % int(BYTES[name]) == 0)
    return f"{capacity // int(BYTES[unit])}{unit}"

"""The machine of a command: built in or from a file, with another DDR capacity if one is given."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from ratrain.ratrainc.console.terminal import echo

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.made_for import MadeFor
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.targets.machine.machine import Machine

_NAMED_IN = ("GiB", "GB", "MiB", "MB", "B")


@frozen
class MachineChoice:
    """The values of --machine and --capacity."""

    machine: str | None = None
    """path or name; None: the default machine"""
    capacity: int | None = None
    """bytes of DDR; None: the machine's own"""

    def load(self) -> Machine:
        """Load the machine. With another capacity it is renamed: programs compiled for it are not for the given one.

        Raises `DiagnosticError` if the file does not describe a machine.
        """
        machine = given_machine(self.machine)
        return machine if self.capacity is None else resized(machine, self.capacity)

    def for_plan(self, plan: str | Path | Plan | None, say: Callable[[str], None] | None = None) -> MachineChoice:
        """Return the choice, or, if it names no machine, the one that the plan's file was made for.

        `say` hears of a machine that differs from the file's, and of one that is taken from it and not the default.
        Raises `DiagnosticError` RT002 or RT063 if the file cannot be read.
        """
        from ratrain.ratrain_ir.text.plan_file import made_for
        from ratrain.targets.machine.machine import DEFAULT_MACHINE

        meant = made_for(plan) if isinstance(plan, str | Path) else None
        if meant is None:
            return self
        told = MachineChoice(meant.machine, meant.capacity)
        if self.machine is None:
            if say is not None and (meant.machine != DEFAULT_MACHINE or (meant.capacity and not self.capacity)):
                say(f"the machine is {told.title}, which {plan} was made for")
            return MachineChoice(meant.machine, meant.capacity if self.capacity is None else self.capacity)
        if say is not None and not self.is_same(told):
            say(f"the machine is {self.title}, of --machine; {plan} was made for {told.title}")
        return self

    def is_same(self, other: MachineChoice) -> bool:
        """Tell whether both name one machine, by name or as one file, with the same capacity."""
        mine, its = self.machine, other.machine
        files = [Path(each) for each in (mine, its) if each is not None and Path(each).exists()]
        one = mine == its or (len(files) == 2 and files[0].samefile(files[1]))
        return one and self.capacity == other.capacity

    @property
    def made_for(self) -> MadeFor | None:
        """The machine as a plan's file names it; None for one that is neither built in nor a file."""
        from ratrain.ratrain_ir.config.made_for import MadeFor
        from ratrain.targets.machine.machine import DEFAULT_MACHINE, machine_names

        name = self.machine or DEFAULT_MACHINE
        known = name in machine_names() or Path(name).is_file()
        return MadeFor(name, self.capacity) if known else None

    @property
    def title(self) -> str:
        """The machine in a message, with its capacity if that is not its own."""
        from ratrain.targets.machine.machine import DEFAULT_MACHINE

        name = f"'{self.machine or DEFAULT_MACHINE}'"
        return name if self.capacity is None else f"{name} with {_short(self.capacity)}"

    @property
    def words(self) -> list[str]:
        """The choice as options of a command line."""
        machine = [] if self.machine is None else ["--machine", self.machine]
        return machine if self.capacity is None else [*machine, "--capacity", str(self.capacity)]

    @property
    def text(self) -> str:
        """The options as text with a leading blank; empty if nothing was chosen."""
        return f" {shlex.join(self.words)}" if self.words else ""


def stated(text: str) -> None:
    """Print a sentence about the machine on stderr."""
    echo(text, err=True)


def given_machine(name: str | None) -> Machine:
    """Load the machine of --machine; name on stderr the constants whose certainty its file does not state.

    Raises `DiagnosticError` if the file does not describe a machine.
    """
    from ratrain.targets.machine.machine import load_machine

    machine = load_machine(name)
    if machine.unsaid:
        figures = ", ".join(machine.unsaid)
        echo(f"the machine '{machine.name}' says no certainty of these, which count as assumed: {figures}", err=True)
    return machine


def resized(machine: Machine, capacity: int) -> Machine:
    """Return the machine with `capacity` bytes of DDR, renamed unless it has as many already."""
    from ratrain.ratrainc.choices.machine_changes import with_constants

    if capacity == machine.whole("ddr_capacity"):
        return machine
    changed = with_constants(machine, {"ddr_capacity": float(capacity)})
    return evolve(changed, name=f"{machine.name}-{_short(capacity)}")


def _short(capacity: int) -> str:
    from ratrain.ratrain_ir.support.quantities import BYTES

    unit = next(name for name in _NAMED_IN if capacity % int(BYTES[name]) == 0)
    return f"{capacity // int(BYTES[unit])}{unit}"

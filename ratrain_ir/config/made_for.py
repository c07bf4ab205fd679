"""The machine of a plan's file: the table `[made_for]`, which travels with the plan and changes no key of it.

    [made_for]
    machine = "h100-node"       # or a file, relative to the folder of the plan's own file
    capacity = "40GiB"          # where it is not the machine's own

A command that is given no machine takes this one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

from ratrain.ratrain_ir.support.diagnostics import nearest
from ratrain.ratrain_ir.support.quantities import QuantityError, whole_bytes
from ratrain.ratrain_ir.support.text import shown
from ratrain.ratrain_ir.support.toml_text import toml_value

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.fields import Report

SECTION = "made_for"
KEYS = ("machine", "capacity")


@frozen
class MadeFor:
    """The machine that a plan was made for."""

    machine: str
    """name of a built-in machine or path of a file"""
    capacity: int | None = None
    """bytes of DDR of a cluster; None: the machine's own"""

    def beside(self, plan_file: str | Path) -> MadeFor:
        """Return the machine with its path seen from the working directory instead of the plan's folder."""
        if "/" not in self.machine and not self.machine.endswith(".toml"):
            return self
        return MadeFor(Path(os.path.normpath(Path(plan_file).parent / self.machine)).as_posix(), self.capacity)

    def text(self, plan_file: str | Path) -> str:
        """Return the table as a plan's file has it, with the path of a machine's file as seen from that file's folder.

        `beside` reads it back.
        """
        named = self.machine
        if "/" in named or named.endswith(".toml"):
            named = Path(os.path.relpath(named, Path(plan_file).parent)).as_posix()
            named = named if "/" in named or named.endswith(".toml") else f"./{named}"
        lines = [f"[{SECTION}]", f"machine = {toml_value(named)}"]
        return "\n".join(lines if self.capacity is None else [*lines, f"capacity = {self.capacity}"]) + "\n"


def take_made_for(data: dict[str, Any], report: Report) -> MadeFor | None:
    """Remove the table from a plan file's data and return it; report what is wrong with it as RT063."""
    if SECTION not in data:
        return None
    table = data.pop(SECTION)
    if not isinstance(table, Mapping):
        report.error("RT063", SECTION, f"'{SECTION}' is {shown(table)}: a section is expected", help=f"[{SECTION}]")
        return None
    for name in table:
        if name not in KEYS:
            text = f"the key {shown(name)} is not known in [{SECTION}]"
            report.error("RT063", f"{SECTION}.{name}", text, help=nearest(name, KEYS) or f"known are {', '.join(KEYS)}")
    machine, capacity = table.get("machine"), table.get("capacity")
    if not isinstance(machine, str) or not machine.strip():
        text = f"'{SECTION}.machine' must be the name of a machine or a file"
        got = "it is missing" if machine is None else f"got {shown(machine)}"
        report.error("RT063", f"{SECTION}.machine", f"{text}: {got}", help='machine = "mt3000"')
        return None
    return MadeFor(machine, None if capacity is None else _bytes(capacity, report))


def _bytes(value: object, report: Report) -> int | None:
    text = f"'{SECTION}.capacity' must be bytes like 20000000000 or \"20GiB\", got {shown(value)}"
    if type(value) is int and value > 0:
        value = str(value)
    try:
        size = whole_bytes(value) if isinstance(value, str) else 0
    except QuantityError as error:
        report.error("RT063", f"{SECTION}.capacity", text, help=error.help)
        return None
    if size <= 0:
        report.error("RT063", f"{SECTION}.capacity", text)
    return size

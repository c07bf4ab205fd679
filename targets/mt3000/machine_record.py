"""What schedules and programs carry of the machine they were compiled for, and the machine again from that.

The digest is of what decides a program and its times: names and numbers, not sources and comments. The text of the whole machine
goes along unless it is, by that digest, one of those that are built in.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache

from ratrain_ir.diagnostics import DiagnosticError, Location, fail
from ratrain_ir.module import TargetInfo
from targets.mt3000.machine import Machine, load_machine, machine_names, parse_machine
from targets.mt3000.machine_writer import machine_lines

_WAY_OUT = "give the machine's file with --machine"


def machine_digest(machine: Machine) -> str:
    """The SHA-256 of a machine's names and numbers, in hexadecimal; equal for machines that differ in sources alone."""
    content = {
        "name": machine.name,
        "update_engine": machine.update_engine.value,
        "cost": machine.cost,
        "constants": {name: constant.value for name, constant in machine.constants.items()},
        "groups": machine.group_names,
        "ops": [[op.key, op.size, op.seconds] for op in machine.table.ops],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@cache
def _built_in_digest(name: str) -> str:
    return machine_digest(load_machine(name)) if name in machine_names() else ""


def target_info(machine: Machine) -> TargetInfo:
    """What a module or a program that is made for a machine carries of it."""
    digest = machine_digest(machine)
    text = "" if digest == _built_in_digest(machine.name) else "\n".join(machine_lines(machine))
    return TargetInfo(machine.name, machine.whole("ddr_capacity"), digest, text)


def compiled_for(info: TargetInfo) -> Machine:
    """The machine that a module or a program was made for.

    Raises `DiagnosticError` RT065 where what it carries contradicts itself, or names a machine that this version does not have.
    """
    if info.machine:
        return carried_machine(info)
    if info.name not in machine_names():
        fail("RT065", f"this was compiled for the machine '{info.name}', which is not built in", help=_WAY_OUT)
    if info.digest not in ("", _built_in_digest(info.name)):
        message = f"this was compiled for another '{info.name}' than is built in here: its numbers were others"
        fail("RT065", message, help=f"{_WAY_OUT}, or take the one of this version with '--machine {info.name}'")
    return load_machine(info.name)


def check_carried(info: TargetInfo, file: str, line: str | None = None) -> None:
    """Raise `DiagnosticError` RT065 where a file carries a machine that is not sound, or not the one its target speaks of.

    `line` is the text of the target's line, where there is one.
    """
    if not info.machine:
        return
    try:
        carried_machine(info)
    except DiagnosticError as error:
        place = Location(file, info.line) if line is not None else None
        first, message = error.diagnostics[0], f"the machine in '{file}': {error.diagnostics[0].message}"
        fail("RT065", message, place, help=first.help, source=line)


def carried_machine(info: TargetInfo) -> Machine:
    """The machine that a text gives.

    Raises `DiagnosticError` RT065 where the text is no machine, cannot be shown, or has another digest or name, or less DDR than is
    to be used.
    """
    odd = next((line for line in info.machine.split("\n") if not line.isprintable()), None)
    if odd is not None:
        fail("RT065", f"a line of the machine cannot be shown: {odd[:60]!a}", help="write such a character as \\uXXXX")
    found = parse_machine(info.machine, file=f"machine '{info.name}'")
    if found.name != info.name:
        fail("RT065", f"the target is '{info.name}', its machine is '{found.name}'", help="give both one name")
    digest = machine_digest(found)
    if digest != info.digest:
        message = f"the machine '{found.name}' is not the one that this was compiled for: their digests differ"
        fail(
            "RT065",
            message,
            help=f'undo the change; or write its file and compile again with --machine, digest = "{digest}"',
        )
    capacity = found.whole("ddr_capacity")
    if info.capacity_bytes > capacity:
        message = f"the target may use {info.capacity_bytes} bytes; its machine has a ddr_capacity of {capacity}"
        fail("RT065", message, help=f"lower the capacity to {capacity} or less")
    return found

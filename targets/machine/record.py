"""The machine as schedules and programs carry it, and the machine read back from that.

The digest covers everything that decides a program and its times: names and numbers, not sources and comments. The text
of the whole machine is carried too, unless the machine is, by that digest, a built-in one.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.module import TargetInfo
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError, Location, fail
from ratrain.targets.machine.capacity import capacity_of
from ratrain.targets.machine.machine import COLLECTIVES, Machine, load_machine, machine_names, parse_machine
from ratrain.targets.machine.placement import placement_of
from ratrain.targets.machine.registry import DEFAULT_TARGET
from ratrain.targets.machine.writer import machine_lines
from ratrain.targets.program.on_chip import on_chip_form

if TYPE_CHECKING:
    from ratrain.ratrain_ir.topology import Topology
    from ratrain.targets.program.program import Program

_WAY_OUT = "give the machine's file with --machine"


def machine_digest(machine: Machine) -> str:
    """Return the SHA-256 of a machine's names and numbers, in hexadecimal; sources do not change it."""
    content = {
        "name": machine.name,
        "update_engine": machine.update_engine.value,
        "cost": machine.cost,
        "constants": {name: constant.value for name, constant in machine.constants.items()},
        "groups": machine.group_names,
        **({} if machine.target == DEFAULT_TARGET else {"target": machine.target}),
        **({} if machine.collectives == COLLECTIVES else {"collectives": machine.collectives}),
        "ops": [[op.key, op.size, op.seconds] for op in machine.table.ops],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@cache
def _built_in_digest(name: str) -> str:
    return machine_digest(load_machine(name)) if name in machine_names() else ""


def machine_info(machine: Machine) -> TargetInfo:
    """Return the facts of a machine that any module carries, with the whole memory as capacity.

    A machine that equals a built-in one is carried by name, without its text.
    """
    digest = machine_digest(machine)
    text = "" if digest == _built_in_digest(machine.name) else "\n".join(machine_lines(machine))
    return TargetInfo(machine.name, machine.whole("ddr_capacity"), digest, text, machine.stores)


def compiled_for(info: TargetInfo) -> Machine:
    """Return the machine that a module or a program was made for.

    Raises `DiagnosticError` RT065 where the carried facts contradict each other, or name a machine that this version
    does not have.
    """
    if info.machine:
        return carried_machine(info)
    if info.name not in machine_names():
        fail("RT065", f"this was compiled for the machine '{info.name}', which is not built in", help=_WAY_OUT)
    if info.digest not in ("", _built_in_digest(info.name)):
        message = f"this was compiled for another '{info.name}' than the built-in one: its numbers differ"
        fail("RT065", message, help=f"{_WAY_OUT}, or take the one of this version with '--machine {info.name}'")
    return load_machine(info.name)


def check_carried(info: TargetInfo, topology: Topology, file: str, line: str | None = None) -> None:
    """Raise `DiagnosticError` RT065 where a file carries an unsound machine, or another than its target names.

    The same error is raised where that machine has less memory left than the target may use. `line` is the text of the
    target's line in the file, if there is one.
    """
    try:
        if info.machine:
            _check_capacity(info, carried_machine(info), topology)
        elif info.name in machine_names() and info.digest in ("", _built_in_digest(info.name)):
            _check_capacity(info, load_machine(info.name), topology)
    except DiagnosticError as error:
        place = Location(file, info.line) if line is not None else None
        first, message = error.diagnostics[0], f"the machine in '{file}': {error.diagnostics[0].message}"
        fail("RT065", message, place, help=first.help, source=line)


def carried_machine(info: TargetInfo) -> Machine:
    """Return the machine whose text is carried.

    Raises `DiagnosticError` RT065 where the text is no machine, cannot be shown, or has another digest or name.
    """
    odd = next((line for line in info.machine.split("\n") if not line.isprintable()), None)
    if odd is not None:
        fail("RT065", f"a line of the machine cannot be shown: {odd[:60]!a}", help="write such a character as \\uXXXX")
    machine = parse_machine(info.machine, file=f"machine '{info.name}'")
    if machine.name != info.name:
        fail("RT065", f"the target is '{info.name}', its machine is '{machine.name}'", help="give both one name")
    digest = machine_digest(machine)
    if digest != info.digest:
        message = f"the machine '{machine.name}' is not the one that this was compiled for: their digests differ"
        fail(
            "RT065",
            message,
            help=f'undo the change; or write its file and compile again with --machine, digest = "{digest}"',
        )
    return machine


def _check_capacity(info: TargetInfo, machine: Machine, topology: Topology) -> None:
    capacity = capacity_of(machine, topology)
    if info.capacity_bytes > capacity.left:
        has = f"has a ddr_capacity of {capacity.installed}"
        has = has if capacity.account is None else f"{has}: {capacity.account}"
        message = f"the target may use {info.capacity_bytes} bytes; its machine {has}"
        fail("RT065", message, help=f"lower the capacity to {capacity.left} or less")
    has_stores = dict(machine.stores)
    for home, nbytes in info.stores:
        if nbytes > has_stores.get(home, 0):
            message = (
                f"the target may use {nbytes} bytes of the memory '{home.value}'; its machine has "
                f"{has_stores.get(home, 0)}"
            )
            fail("RT065", message, help=f"lower the number of '{home.value}', or leave it out")


def check_on_machine(program: Program, file: str) -> None:
    """Check that a program with on-chip schedules or a mapping suits the machine it was made for.

    Raises `DiagnosticError` RT080 where its schedules are for other on-chip memories, RT064 where its mapping is for
    other groups of clusters, RT065 where the machine is not known here.
    """
    schedules = {each for routine in program.routines for step in routine.steps for each in step.on_chip.values()}
    if program.plan.mapping is None and not schedules:
        return
    machine = compiled_for(program.info)
    if program.plan.mapping is not None:
        placement_of(program.plan, machine)
    for schedule in schedules:
        form = on_chip_form(schedule.form)
        if not form.fits(schedule, machine):
            message = f"the {form.title} in '{file}' are for other on-chip memories than those of '{program.target}'"
            fail("RT080", message, help="compile it again")

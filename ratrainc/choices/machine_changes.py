"""Machines with changed constants, for questions such as "what if the link were twice as fast"."""

from __future__ import annotations

import math

from attrs import evolve

from ratrain.ratrain_ir.support.diagnostics import DiagnosticError, fail, nearest
from ratrain.ratrain_ir.support.quantities import SCALES, QuantityError, parse_quantity, with_unit
from ratrain.targets.machine.constants import STORE_UNITS, Constant, unit_of
from ratrain.targets.machine.machine import Machine, optional_constants, parse_machine
from ratrain.targets.machine.writer import machine_lines

_SHORT = {
    "ddr": "ddr_capacity",
    "link": "link_bandwidth",
    "latency": "link_latency",
    "peak": "fp16_peak",
    "gemm": "gemm_efficiency",
    "attention": "attention_efficiency",
}


def changed_machine(machine: Machine, values: dict[str, float]) -> Machine:
    """Replace constants of a machine, and rename it, since programs compiled for it are not for the given machine."""
    return evolve(with_constants(machine, values), name=f"{machine.name}-what-if")


def with_constants(machine: Machine, values: dict[str, float]) -> Machine:
    """Return the machine with some constants replaced or added, under the same name."""
    changed = {name: Constant(value, unit_of(name), "assumed", "what if") for name, value in values.items()}
    return evolve(machine, constants=machine.constants | changed)


def parse_changes(text: str, machine: Machine) -> dict[str, float]:
    """Parse a text like `ddr=16GiB,link=7.4GB/s` into constants by their full names, in the units of machine files.

    Raises `DiagnosticError` RT065 for a constant that machines do not have, or that changes nothing on this one, and
    for a value that is not a size, rate or time.
    """
    changes = {}
    of_memories = {key for key in STORE_UNITS if f"{key.partition('_')[0]}_capacity" in machine.constants}
    constants = {*machine.constants, *optional_constants(machine), *of_memories}
    for part in text.split(","):
        name, _, value = (word.strip() for word in part.partition("="))
        constant = _SHORT.get(name, name.replace("-", "_"))
        if constant in STORE_UNITS and constant not in of_memories:
            text = f"'{name}' changes nothing: the machine has no memory '{constant.partition('_')[0]}'"
            fail("RT065", text, help="leave it out, or give a machine file that has one with --machine")
        if constant not in constants:
            known = {*_SHORT, *constants}
            fail(
                "RT065",
                f"'{name}' is not a constant of a machine",
                help=nearest(name, known) or ", ".join(sorted(known)),
            )
        changes[constant] = _number(value, constant)
    _check(with_constants(machine, changes))
    return changes


def _number(text: str, constant: str) -> float:
    """Parse a number into the unit of a constant.

    Bytes, seconds and rates must have a unit (`16 GiB`), other numbers have none. Raises `DiagnosticError` RT065 if it
    is not a finite number above 0, lacks a unit, or has one of another quantity.
    """
    unit = unit_of(constant)
    try:
        number = parse_quantity(with_unit(text, unit), unit) if unit in SCALES else float(text)
    except QuantityError as error:
        fail("RT065", f"value of {constant}: {error}", help=error.help)
    except ValueError:
        fail("RT065", f"{constant} is a number ({unit}), got '{text}'")
    if not 0 < number < math.inf:
        fail("RT065", f"{constant} ({unit}) is a number above 0, got '{text}'")
    return number


def _check(machine: Machine) -> None:
    """Raise `DiagnosticError` RT065 if the reader of machine files would refuse this machine."""
    try:
        parse_machine("\n".join(machine_lines(machine)), file="what if")
    except DiagnosticError as error:
        first = error.diagnostics[0]
        fail("RT065", first.message, help=first.help)

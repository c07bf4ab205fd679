"""Kernel calls on a machine with a table: the key of a call in the table, and its seconds."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from ratrain.targets.machine.cost import roofline_work
from ratrain.targets.machine.op_table import SHAPES_MARK
from ratrain.targets.machine.resource_work import ResourceWork

if TYPE_CHECKING:
    from ratrain.targets.machine.machine import Machine
    from ratrain.targets.program.routine import Routine, Step

KERNEL_MARK = "kernel:"
"""Prefix of the keys of kernel calls. Keys of routines begin with a kind of block, so never with it."""


def measured_work(routine: Routine, step: Step, machine: Machine) -> ResourceWork:
    """Return the seconds of a kernel call by the machine's table, launch and dispatch included.

    A kind that the table does not have goes by the roofline. Measured calls had DDR to themselves and move no bytes
    here: no measurement says how much bandwidth others could have had meanwhile.
    """
    modelled = roofline_work(routine, step, machine)
    seconds = machine.table.seconds(kernel_key(routine, step), modelled.seconds)
    return modelled if seconds is None else ResourceWork(seconds)


def kernel_key(routine: Routine, step: Step) -> str:
    """Return the table's key of a kernel call: kernel, digest of types and choices, mark, digest of sizes."""
    types = [(name, routine.operand(step.operands[name])[0].value) for name in sorted(step.operands)]
    choices = sorted((name, value) for name, value in step.options.items() if isinstance(value, bool | str))
    return f"{KERNEL_MARK}{step.kernel}:{digest([types, choices])}{SHAPES_MARK}{digest(call_sizes(routine, step))}"


def call_sizes(routine: Routine, step: Step) -> list[object]:
    """Return the shapes, counts and choices of a kernel call; its floats make no difference to its time."""
    operands = [routine.operand(step.operands[name]) for name in sorted(step.operands)]
    options = sorted((name, value) for name, value in step.options.items() if not isinstance(value, float))
    return [[(dtype.value, *shape) for dtype, shape in operands], options]


def digest(facts: object) -> str:
    """Return a short name of plain data: 12 hexadecimal digits."""
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:12]

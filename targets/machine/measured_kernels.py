"""Kernel calls on a machine with a table: what their time depends on, and the seconds that a table has of them."""

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
"""Before the key of a kernel call, which no routine's begins with: those begin with a kind of block."""


def measured_work(routine: Routine, step: Step, machine: Machine) -> ResourceWork:
    """Seconds of a kernel call by the machine's table, launch and dispatch included; by the roofline where it has none of its kind.

    What was measured had DDR to itself: how many of its bytes others could have had meanwhile, no measurement says.
    """
    modelled = roofline_work(routine, step, machine)
    seconds = machine.table.seconds(kernel_key(routine, step), modelled.seconds)
    return modelled if seconds is None else ResourceWork(seconds)


def kernel_key(routine: Routine, step: Step) -> str:
    """What a kernel call's time depends on: kernel, operands, types and choices, and behind the mark shapes and numbers it works with."""
    types = [(name, routine.operand(step.operands[name])[0].value) for name in sorted(step.operands)]
    choices = sorted((name, value) for name, value in step.options.items() if isinstance(value, bool | str))
    return f"{KERNEL_MARK}{step.kernel}:{digest([types, choices])}{SHAPES_MARK}{digest(call_sizes(routine, step))}"


def call_sizes(routine: Routine, step: Step) -> list[object]:
    """Shapes, counts and choices of a kernel call."""
    operands = [routine.operand(step.operands[name]) for name in sorted(step.operands)]
    options = sorted((name, value) for name, value in step.options.items() if not isinstance(value, float))
    return [[(dtype.value, *shape) for dtype, shape in operands], options]


def digest(facts: object) -> str:
    """A short name of plain data."""
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:12]

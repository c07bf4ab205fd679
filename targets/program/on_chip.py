"""On-chip schedules of kernel calls: what a target whose cores have memories of their own adds to the steps of a routine.

A step carries a schedule for each part of its kernel. The program stores them, and hands them to the cost model and to the kernels;
what they mean, only their form knows: what the target that makes them says of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from ratrain.ratrain_ir.support.diagnostics import fail, nearest
from ratrain.ratrain_ir.support.registry import Registry

if TYPE_CHECKING:
    from ratrain.targets.program.kernels import Types
    from ratrain.targets.program.routine import OnChipSchedule, Step

FORMS = Registry("on-chip form", "ratrain.on_chip_forms", {"tiles": "ratrain.targets.mt3000.tile_form:TileForm"})
"""Every form there is: a class. One of another distribution stands in its entry point group `ratrain.on_chip_forms`."""


class Constants(Protocol):
    """The numbers of a machine."""

    def __getitem__(self, name: str, /) -> float:
        """The value of a constant; raises KeyError for one that the machine does not have."""
        ...


class OnChipForm(Protocol):
    """What a target says of its on-chip schedules."""

    title: ClassVar[str]
    """What messages call them."""

    def from_json(self, data: Any) -> OnChipSchedule:
        """The inverse of a schedule's `to_json`.

        Raises IndexError, KeyError, TypeError or ValueError where the data is no schedule, or its parts do not fit together.
        """
        ...

    def step_problem(self, step: Step, types: Types) -> str | None:
        """Why the schedules of a step do not compute it, or None; the step has some."""
        ...

    def lines(self, schedule: OnChipSchedule, steps: Sequence[str], core: int, limit: int) -> Iterator[str]:
        """A schedule in words: the steps that have it, its buffers, and the first `limit` events of a core."""
        ...

    def fits(self, schedule: OnChipSchedule, constants: Constants) -> bool:
        """Whether a schedule is for the on-chip memories of a machine."""
        ...


@cache
def on_chip_form(name: str) -> OnChipForm:
    """The form of that name.

    Raises `DiagnosticError` RT080 for an unknown name.
    """
    try:
        form: OnChipForm = FORMS.load(name)()
    except KeyError:
        known = FORMS.names()
        message = f"the program has on-chip schedules of the form '{name}'; the forms known here are {', '.join(known)}"
        fail("RT080", message, help=nearest(name, known))
    return form


def on_chip_problem(step: Step, types: Types) -> str | None:
    """Why the on-chip schedules of a step do not compute it, or None; a step may have none."""
    forms = {schedule.form for schedule in step.on_chip.values()}
    if len(forms) > 1:
        return f"its on-chip schedules are of several forms: {', '.join(sorted(forms))}"
    return next((on_chip_form(form).step_problem(step, types) for form in forms), None)

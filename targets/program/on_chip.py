"""On-chip schedules of kernel calls: additions to a routine's steps for targets whose cores have memories of their own.

A step carries a schedule for each part of its kernel. The program stores schedules and hands them to the cost model and
to the kernels. Only their form, which belongs to the target that makes them, knows their meaning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from ratrain.ratrain_ir.support.diagnostics import fail, nearest
from ratrain.ratrain_ir.support.registry import Registry

if TYPE_CHECKING:
    from ratrain.targets.program.kernel import Types
    from ratrain.targets.program.routine import OnChipSchedule, Step

FORMS = Registry("on-chip form", "ratrain.on_chip_forms", {"tiles": "ratrain.targets.mt3000.tile_form:TileForm"})
"""Registry of form classes by name. Another distribution registers its own in the entry point group
`ratrain.on_chip_forms`."""


class Constants(Protocol):
    """Numbers of a machine."""

    def __getitem__(self, name: str, /) -> float:
        """Return the value of a constant; raise KeyError for one that the machine does not have."""
        ...


class OnChipForm(Protocol):
    """Interpreter of on-chip schedules, which a target supplies."""

    title: ClassVar[str]
    """Name of the schedules in messages."""

    def from_json(self, data: Any) -> OnChipSchedule:
        """Return the schedule of `to_json`'s data.

        Raises IndexError, KeyError, TypeError or ValueError where the data is no schedule, or its parts do not fit
        together.
        """
        ...

    def step_problem(self, step: Step, types: Types) -> str | None:
        """Return why the schedules of a step, which has some, do not compute it, or None."""
        ...

    def lines(self, schedule: OnChipSchedule, steps: Sequence[str], core: int, limit: int) -> Iterator[str]:
        """Yield a schedule in words: the steps that have it, its buffers, and the first `limit` events of a core."""
        ...

    def cores(self, schedule: OnChipSchedule) -> int:
        """Return the number of cores that a schedule is for."""
        ...

    def fits(self, schedule: OnChipSchedule, constants: Constants) -> bool:
        """Return whether a schedule is for the on-chip memories of a machine."""
        ...


@cache
def on_chip_form(name: str) -> OnChipForm:
    """Return the form of a name.

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
    """Return why the on-chip schedules of a step do not compute it, or None; a step may have none."""
    forms = {schedule.form for schedule in step.on_chip.values()}
    if len(forms) > 1:
        return f"its on-chip schedules are of several forms: {', '.join(sorted(forms))}"
    return next((on_chip_form(form).step_problem(step, types) for form in forms), None)

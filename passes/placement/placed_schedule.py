"""Agreement of the plan's schedule with the one that a placement makes: a contradiction is refused, not overruled."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs

from ratrain.ratrain_ir.module import Level
from ratrain.ratrain_ir.schedules.named import SCHEDULES
from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.ratrain_ir.support.text import Place

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.ratrain_ir.module import Module


def refuse_contradiction(plan: Plan, placed: str, by: str, place: Callable[[], Place] = Place) -> None:
    """Refuse to place another schedule than the one that the plan names; a plan that names none takes any.

    `by` names the pass that places it; `place` returns where the plan names its own. Raises `DiagnosticError` RT064.
    """
    if plan.schedule in (None, placed):
        return
    at = place()
    fail(
        "RT064",
        f'the plan says schedule = "{plan.schedule}", but {by} places {placed}',
        at.location,
        source=at.source,
        help=f'write schedule = "{placed}" or leave the key out; to keep "{plan.schedule}", leave the placement '
        "to the plan: "
        "passes without a 'place-' pass, or a strategy that is not named after a schedule",
    )


def begin_placing(module: Module, schedule: str, by: str | None = None) -> None:
    """Set the plan's schedule to the one that a pass is about to place.

    `by` names the pass, by default `place-SCHEDULE`. Raises `DiagnosticError` RT064 where the plan of a module without
    an order names another schedule, or has chunks or slices that the schedule cannot have. For a module that has an
    order, the new schedule replaces the plan's.
    """
    if module.level is Level.DATAFLOW:
        refuse_contradiction(module.plan, schedule, f"the pass '{by or f'place-{schedule}'}'")
    problem = SCHEDULES[schedule].problem(module.plan.shape)
    if problem is not None:
        title = SCHEDULES[schedule].title
        fail("RT064", f"{title} cannot be placed under this plan: {problem}", help=_OTHER_SHAPE)
    module.plan = attrs.evolve(module.plan, schedule=schedule)


_OTHER_SHAPE = "use another schedule, or other chunks, layout or slices in the plan's [parallel]"

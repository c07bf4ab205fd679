"""Step time, idle time and passes in flight of a schedule table, as text and as JSON: `ratrainc lint`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.analysis.schedule_worth import in_flight_on_ranks, in_flight_on_stages
from ratrain.ratrainc.console.console import seconds_text
from ratrain.ratrainc.console.parts import Part, TextTable

if TYPE_CHECKING:
    from ratrain.ratrain_ir.analysis.actions import ActionTable
    from ratrain.ratrain_ir.analysis.schedule_worth import StepTime


def worth_data(actions: ActionTable, units: StepTime, timed: StepTime | None) -> dict[str, object]:
    """Return the step in units and, if it was timed, in seconds, with the passes in flight by rank and by stage."""
    return {
        "units": units.seconds,
        "bubble_fraction": units.bubble_fraction,
        "bubble_to_work": units.bubble_to_work,
        "in_flight": in_flight_on_ranks(actions),
        "in_flight_of_stages": {str(stage): most for stage, most in in_flight_on_stages(actions).items()},
        "timed": None
        if timed is None
        else {
            "seconds": timed.seconds,
            "bubble_fraction": timed.bubble_fraction,
            "bubble_to_work": timed.bubble_to_work,
        },
    }


def worth_parts(actions: ActionTable, units: StepTime, timed: StepTime | None) -> Iterator[Part]:
    """Yield the same as text."""
    yield f"a step takes {units.seconds:g} units: {_bubble_text(units)}"
    if timed is not None:
        yield f"a step takes {seconds_text(timed.seconds)} with the times given: {_bubble_text(timed)}"
    shown, unit = (units, "units of time") if timed is None else (timed, "times of a step as given")
    form = "{:g}".format if timed is None else seconds_text
    on_stages = in_flight_on_stages(actions)
    rows = []
    for rank, most in enumerate(in_flight_on_ranks(actions)):
        if rank in shown.busy:
            stages = sorted({action.stage for action in actions.rows[rank]})
            each = ", ".join(f"{stage}: {on_stages[stage]}" for stage in stages)
            busy = shown.busy[rank]
            rows.append([str(rank), each, str(most), form(busy), form(shown.seconds - busy)])
    yield TextTable(f"passes in flight at most, and {unit}", ["rank", "of stages", "in flight", "work", "idle"], rows)


def _bubble_text(step: StepTime) -> str:
    return f"the bubble is {step.bubble_fraction:.1%} of it, {step.bubble_to_work:.1%} of the work"

"""Which schedule a pipeline of passes places."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.passes.pipeline_text import parse_pipeline
from ratrain.passes.placement.place_schedule import PlaceSchedulePass
from ratrain.ratrain_ir.schedules.named import SCHEDULES

if TYPE_CHECKING:
    from ratrain.passes.pass_base import Pass

_PLACE = "place-"


def placement_in(pipeline: str) -> Pass | None:
    """The first placement of a pipeline.

    Raises `DiagnosticError` for a text that is no pipeline.
    """
    return next((item for item in parse_pipeline(pipeline) if item.name.startswith(_PLACE)), None)


def placed_by(pipeline: str) -> str | None:
    """The schedule that a pipeline names; None where it leaves that to the plan, or to a file.

    Raises `DiagnosticError` for a text that is no pipeline.
    """
    first = placement_in(pipeline)
    if first is None:
        return None
    name = first.kind if isinstance(first, PlaceSchedulePass) else first.name.removeprefix(_PLACE)
    return name if name in SCHEDULES else None

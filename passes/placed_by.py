"""Which schedule a pipeline of passes places."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.passes.pipeline_text import parse_pipeline
from ratrain.ratrain_ir.schedules.named import SCHEDULES

if TYPE_CHECKING:
    from ratrain.passes.pass_base import Pass

_PLACE = "place-"


def placement_in(pipeline: str) -> Pass | None:
    """The first placement of a pipeline.

    Raises `DiagnosticError` for a text that is no pipeline.
    """
    return next(filter(is_placement, parse_pipeline(pipeline)), None)


def is_placement(item: Pass) -> bool:
    """Tell whether a pass puts a module into the order of a schedule."""
    return item.name.startswith(_PLACE)


def placed_by(pipeline: str) -> str | None:
    """The schedule that a pipeline names; None where it leaves that to the plan, or to a file.

    Raises `DiagnosticError` for a text that is no pipeline.
    """
    first = placement_in(pipeline)
    return None if first is None else schedule_placed(first)


def schedule_placed(placement: Pass) -> str | None:
    """The schedule that a placement names; None where it leaves that to the plan, or to a file."""
    # by name, not by class: the passes in the rooms below import from here, not the other way round
    name = (
        getattr(placement, "kind", None) if placement.name == "place-schedule" else placement.name.removeprefix(_PLACE)
    )
    return name if name in SCHEDULES else None

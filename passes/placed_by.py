"""The schedule that a pipeline of passes places."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.passes.pipeline_text import parse_pipeline

if TYPE_CHECKING:
    from ratrain.passes.pass_base import Pass

_PLACE = "place-"


def placement_in(pipeline: str) -> Pass | None:
    """Return the first placement pass of a pipeline; None if it has none.

    Raises `DiagnosticError` for a text that is no pipeline.
    """
    return next(filter(is_placement, parse_pipeline(pipeline)), None)


def is_placement(item: Pass) -> bool:
    """Tell whether a pass puts a module into the order of a schedule."""
    return item.name.startswith(_PLACE)


def placed_by(pipeline: str) -> str | None:
    """Return the name of the schedule that a pipeline names; None if it leaves that to the plan or a file.

    Raises `DiagnosticError` for a text that is no pipeline.
    """
    first = placement_in(pipeline)
    return None if first is None else first.schedule

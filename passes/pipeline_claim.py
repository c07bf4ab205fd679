"""The pipeline that a schedule or a program says made it: a note, of which is proved what can be without making it again.

It names passes that there are, with options that they have, and places no other schedule than the plan names. Its order is no claim: a
schedule whose addresses were taken out by hand has been through `legalise` twice. Whether the passes made this very program shows where one
is made again (`explain` of a `.rtx`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.passes.pipeline_text import parse_pipeline
from ratrain.passes.placed_by import is_placement
from ratrain.ratrain_ir.support.diagnostics import Diagnostic, DiagnosticError

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.plan import Plan


def claim_problem(pipeline: str, plan: Plan) -> Diagnostic | None:
    """Why a pipeline cannot have made a module of a plan, without a place; None where it can, or nothing is said."""
    try:
        passes = parse_pipeline(pipeline)
    except DiagnosticError as error:
        return error.diagnostics[0]
    last = next(filter(is_placement, reversed(passes)), None)
    named = None if last is None else last.schedule
    if named is not None and plan.schedule not in (None, named):
        return Diagnostic("RT064", f"it places {named}, and the plan says schedule = '{plan.schedule}'")
    return None

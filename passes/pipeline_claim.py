"""Check of the pipeline that a schedule or program file claims to be made by, without running it again.

Checked: the passes exist, their options are valid, and the pipeline places no other schedule than the plan names. The
order of the passes is not checked: a schedule whose addresses were removed by hand has been through `legalise` twice.
Only making the program again shows whether the passes made exactly this one (`explain` of a `.rtx` does).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.passes.pipeline_text import parse_pipeline
from ratrain.passes.placed_by import is_placement
from ratrain.ratrain_ir.support.diagnostics import Diagnostic, DiagnosticError

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.plan import Plan


def claim_problem(pipeline: str, plan: Plan) -> Diagnostic | None:
    """Return why a pipeline cannot have made a module of a plan, as a diagnostic without a location; None if it can.

    An empty pipeline claims nothing.
    """
    try:
        passes = parse_pipeline(pipeline)
    except DiagnosticError as error:
        return error.diagnostics[0]
    last = next(filter(is_placement, reversed(passes)), None)
    named = None if last is None else last.schedule
    if named is not None and plan.schedule not in (None, named):
        return Diagnostic("RT064", f"it places {named}, and the plan says schedule = '{plan.schedule}'")
    return None

"""The pipeline that a schedule or a program says made it: a note, of which is proved what can be without making it again.

It names passes that there are, with options that they have, in an order in which they can run; and it places no other schedule than the
plan names. Whether they made this very program shows where one is made again (`explain` of a `.rtx`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.passes.pass_base import Fact
from ratrain.passes.pipeline_text import parse_pipeline
from ratrain.passes.placement.placed_by import is_placement, schedule_placed
from ratrain.passes.registry import PROVIDERS
from ratrain.ratrain_ir.diagnostics import Diagnostic, DiagnosticError

if TYPE_CHECKING:
    from ratrain.passes.pass_base import Pass
    from ratrain.ratrain_ir.frontend.plan import Plan


def claim_problem(pipeline: str, plan: Plan) -> Diagnostic | None:
    """Why a pipeline cannot have made a module of a plan, without a place; None where it can, or nothing is said."""
    try:
        passes = parse_pipeline(pipeline)
    except DiagnosticError as error:
        return error.diagnostics[0]
    done: dict[Fact, Pass] = {}
    for item in passes:
        before = next((done[fact] for fact in Fact if fact in item.forbids and fact in done), None)
        if before is not None:
            return Diagnostic("RT071", f"'{item.name}' cannot have run after '{before.name}'")
        for fact in Fact:
            if item.name == PROVIDERS[fact] or (fact is Fact.PLACED and is_placement(item)):
                done.setdefault(fact, item)
    last = next(filter(is_placement, reversed(passes)), None)
    named = None if last is None else schedule_placed(last)
    if named is not None and plan.schedule not in (None, named):
        return Diagnostic("RT064", f"it places {named}, and the plan says schedule = '{plan.schedule}'")
    return None

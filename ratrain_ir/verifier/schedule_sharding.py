"""Sharded state: parameters are gathered where they are used, gradients reduced once, after the last backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.analysis.actions import COMPUTES, PlacedAction
from ratrain.ratrain_ir.schedules.action import ActionKind

if TYPE_CHECKING:
    from ratrain.ratrain_ir.verifier.schedule_findings import ScheduleFindings


def check_gathered(found: ScheduleFindings, *, sharded: bool) -> None:
    """Report RT026 unless a stage that is gathered or dropped anywhere is gathered wherever it needs parameters.

    At the end it must be dropped. The weight half of a backward needs no parameters. If stages are `sharded`, each must
    be gathered wherever it needs parameters, and a missing gather is RT008.
    """
    marks = {ActionKind.UNSHARD, ActionKind.RESHARD}
    for actions in found.stages.values():
        if sharded or any(action.kind in marks for action in actions):
            _check_gathered_stage(found, actions, "RT008" if sharded else "RT026")


def _check_gathered_stage(found: ScheduleFindings, actions: Sequence[PlacedAction], not_gathered: str) -> None:
    stage = actions[0].stage
    gathered: PlacedAction | None = None
    said = False
    for action in actions:
        if action.kind is ActionKind.UNSHARD:
            if gathered is not None:
                notes = [found.note("gathered here", gathered)]
                found.report("RT026", f"'{action}': stage {stage} is gathered already", action, notes)
            gathered, said = action, False
        elif action.kind is ActionKind.RESHARD:
            if gathered is None:
                found.report("RT026", f"'{action}': stage {stage} is not gathered here", action)
            gathered = None
        elif action.kind in COMPUTES and action.kind is not ActionKind.BACKWARD_WEIGHT and gathered is None:
            if not said:
                way_out = f"put '{stage}UNSHARD' before it"
                found.report(
                    not_gathered,
                    f"'{action}' needs the parameters of stage {stage}, which are not gathered here",
                    action,
                    (),
                    way_out,
                )
            said = True
    if gathered is not None:
        text = f"'{gathered}' is never undone: the next step would gather stage {stage} again"
        found.report("RT026", text, gathered, (), f"end the row with '{stage}RESHARD'")


def check_reduced(found: ScheduleFindings, *, sharded: bool) -> None:
    """Report RT031 if any stage reduces its gradients, but not every stage does so once, after its last backward.

    If stages are `sharded`, every stage must, and a missing reduction is RT009. Stages that only go forward have none.
    """
    first = next((a for a in found.table.actions if a.kind is ActionKind.REDUCE_GRAD), None)
    if first is None and not sharded:
        return
    for stage, actions in found.stages.items():
        reduction: PlacedAction | None = None
        late: PlacedAction | None = None
        for action in actions:
            if action.kind is ActionKind.REDUCE_GRAD:
                if reduction is not None:
                    notes = [found.note("first done here", reduction)]
                    found.report("RT031", f"'{action}' happens twice", action, notes)
                reduction = reduction or action
            elif action.kind in {ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT} and reduction is not None:
                late = late or action
        if reduction is None and stage < found.forward_only:
            continue
        if reduction is None:
            text = f"the gradients of stage {stage} are never reduced: '{stage}REDUCE_GRAD' is missing"
            notes = [found.note("another stage does it", first)] if first is not None else []
            found.report("RT009" if sharded else "RT031", text, actions[-1], notes)
        elif late is not None:
            text = f"'{reduction}' comes before '{late}', whose gradients it leaves out"
            found.report("RT031", text, reduction, [found.note("it is here", late)])

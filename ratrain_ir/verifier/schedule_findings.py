"""Findings about a table of actions, and the lookups that its rules need."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import define, field

from ratrain.ratrain_ir.analysis.actions import COMPUTES, ActionTable, PlacedAction
from ratrain.ratrain_ir.analysis.schedule_progress import ActionIndex
from ratrain.ratrain_ir.support.diagnostics import Diagnostics, Note
from ratrain.ratrain_ir.verifier.reporter import MAX_REPORTS
from ratrain.ratrain_ir.verifier.schedule_numbers import numbers_text


@define(eq=False)
class ScheduleFindings:
    """A table of actions under its rules; collects their findings."""

    table: ActionTable
    diagnostics: Diagnostics
    forward_only: int = 0
    """Number of first stages without a backward: nothing in them, or below them, trains."""
    index: ActionIndex = field(init=False)
    stages: dict[int, list[PlacedAction]] = field(factory=dict)
    """Actions of each stage, rank by rank, in order."""
    home: dict[int, int] = field(factory=dict)
    """Rank of each stage: where its first computation runs."""
    last_stage: int = 0

    def __attrs_post_init__(self) -> None:
        self.index = ActionIndex(self.table)
        for action in self.table.actions:
            self.stages.setdefault(action.stage, []).append(action)
        for stage, actions in self.stages.items():
            computing = (action for action in actions if action.kind in COMPUTES)
            self.home[stage] = next(computing, actions[0]).rank
        self.last_stage = max(self.stages, default=0)

    def report(
        self, code: str, message: str, action: PlacedAction, notes: Iterable[Note] = (), way_out: str | None = None
    ) -> None:
        """Report a finding at an action, unless there are `MAX_REPORTS` findings already."""
        if len(self.diagnostics.items) < MAX_REPORTS:
            place, text = self.table.locate(action), self.table.text(action)
            self.diagnostics.error(code, message, place, notes=tuple(notes), help=way_out, source=text)

    def note(self, message: str, action: PlacedAction) -> Note:
        """Return a note that points at another action."""
        return Note(f"{message}: {where(action)}", self.table.locate(action))

    def notes_of_empty(self) -> list[Note]:
        """Return a note of the ranks that run nothing: a missing stage may belong to one of them."""
        empty = self.table.ranks_without_actions
        return [Note(f"nothing runs on {numbers_text('rank', empty)}")] if empty else []

    def co_located(self, stage: int, other: int) -> bool:
        """Tell whether two stages share a rank, so that each has the results of the other without a message."""
        return self.home.get(stage) == self.home.get(other)


def where(action: PlacedAction) -> str:
    """Format an action with its rank."""
    return f"'{action}' on rank {action.rank}"

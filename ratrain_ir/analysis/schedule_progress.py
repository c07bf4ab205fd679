"""Progress of a table of actions: whether every rank gets to the end of its row, whatever the timing.

A rank takes its cells one by one. In a lowered table a receive ends after its send; with rendezvous a send ends only
with its receive. In a compute-only table the runtime places the messages, which it can do without a hang exactly where
the stages' dependences and the rows' orders agree; so a computation waits for the one that makes its input, and
rendezvous adds nothing.

What a rank waits for never depends on timing, so one wait graph of all cells decides for all. A rank stands at the
first of its cells that is never done; what keeps it there is on another rank that stands too, and so on round the
circle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define, field, frozen

from ratrain.ratrain_ir.analysis.actions import BACKWARDS, MESSAGES, RECVS, SENDS, ActionTable, Part, PlacedAction
from ratrain.ratrain_ir.analysis.wait_graph import WaitGraph, circle_of, edge_ends
from ratrain.ratrain_ir.schedules.action import ActionKind

if TYPE_CHECKING:
    from collections.abc import Sequence

Key = tuple[ActionKind, int, Part]


@define(eq=False)
class ActionIndex:
    """Finds actions by what they do; of equal ones the first."""

    table: ActionTable
    first: dict[Key, PlacedAction] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        for action in self.table.actions:
            self.first.setdefault((action.kind, action.stage, action.part), action)

    def find(self, kind: ActionKind, stage: int, part: Part) -> PlacedAction | None:
        """The action that does this, or None."""
        return self.first.get((kind, stage, part))

    def forward(self, stage: int, part: Part) -> PlacedAction | None:
        """The forward of (a slice of) a micro-batch on a stage."""
        return self.find(ActionKind.FORWARD, stage, part)

    def backward(self, stage: int, part: Part) -> PlacedAction | None:
        """What makes the gradient of a stage's input: the whole backward, or its input half."""
        whole = self.find(ActionKind.BACKWARD, stage, part)
        return whole or self.find(ActionKind.BACKWARD_INPUT, stage, part)

    def producer(self, action: PlacedAction) -> PlacedAction | None:
        """The computation on the neighbouring stage that makes what a computation takes; None at the ends."""
        if action.kind is ActionKind.FORWARD:
            return self.forward(action.stage - 1, action.part)
        if action.kind in BACKWARDS:
            return self.backward(action.stage + 1, action.part)
        return None

    def slice_before(self, action: PlacedAction) -> PlacedAction | None:
        """The computation on a neighbouring slice of the same micro-batch that one on a slice needs, on its own stage.

        Forward it is the slice before, whose keys it attends to; backward the slice after, which adds to the gradients
        of its keys. None for the first one each way, for weight halves and for whole micro-batches.
        """
        if action.slice is None:
            return None
        if action.kind is ActionKind.FORWARD:
            return self.forward(action.stage, (action.micro_batch, action.slice - 1))
        if action.kind in BACKWARDS:
            return self.backward(action.stage, (action.micro_batch, action.slice + 1))
        return None

    def partner(self, action: PlacedAction) -> PlacedAction | None:
        """The receive of a send, the send of a receive."""
        kind = SENDS.get(action.kind) or RECVS[action.kind]
        return self.find(kind, peer_stage(action), action.part)


def peer_stage(action: PlacedAction) -> int:
    """The stage at the other end of a message: activations go one stage on, gradients one stage back."""
    return action.stage + (1 if action.kind in {ActionKind.SEND_F, ActionKind.RECV_B} else -1)


@frozen
class Blocked:
    """A rank stands at an action until another one is done (or, in a rendezvous, reached)."""

    at: PlacedAction
    awaits: PlacedAction


def waiting_circle(index: ActionIndex, *, rendezvous: bool) -> list[Blocked] | None:
    """Ranks each of which waits for the next and the last for the first, or None where all get to the end of their rows."""
    rows = [_cells(row) for row in index.table.rows]
    cells = [(place, cell) for row in rows for place, cell in enumerate(row)]
    numbers = {id(action): number for number, (_, cell) in enumerate(cells) for action in cell}
    lowered = index.table.is_lowered
    meets = lowered and rendezvous
    edges = [(number - 1, number) for number, (place, _) in enumerate(cells) if place]
    waits: list[tuple[int, Blocked]] = []
    for number, action in ((number, action) for number, (_, cell) in enumerate(cells) for action in cell):
        if not lowered:
            awaited = index.producer(action)
        else:
            awaited = index.partner(action) if action.kind in (MESSAGES if rendezvous else RECVS) else None
        # the other end of a rendezvous need only be reached: the cell before it must be done, if there is one
        if awaited is not None and not (meets and cells[numbers[id(awaited)]][0] == 0):
            waits.append((numbers[id(awaited)] - meets, Blocked(action, awaited)))
            edges.append((waits[-1][0], number))
    graph = WaitGraph(len(cells))
    graph.after(*edge_ends(edges))
    never = graph.never()
    blocked: dict[int, Blocked] = {}
    for source, wait in waits:  # rank by rank, cell by cell: of each rank, the first that keeps it is where it stands
        if never[source]:
            blocked.setdefault(wait.at.rank, wait)
    circle = circle_of({rank: [wait.awaits.rank] for rank, wait in blocked.items()})
    return [blocked[rank] for rank in circle] or None


def _cells(row: Sequence[PlacedAction]) -> list[list[PlacedAction]]:
    """The actions of a row, cell by cell."""
    cells: dict[int, list[PlacedAction]] = {}
    for action in row:
        cells.setdefault(action.slot, []).append(action)
    return list(cells.values())

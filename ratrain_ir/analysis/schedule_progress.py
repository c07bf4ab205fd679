"""Proof of progress for a table of actions: every rank reaches the end of its row under any timing.

A rank takes its cells one by one. In a lowered table a receive ends after its send; with rendezvous a send also ends
only with its receive. In a compute-only table the runtime places the messages. It can do so without a hang exactly if
the dependences of stages agree with the orders of rows. So a computation waits for the one that makes its input, and
rendezvous adds nothing.

Waits never depend on timing, so one wait graph of all cells decides for all timings. Each blocked rank stands at its
first cell that never completes. That cell waits for another blocked rank, and following these waits leads into a cycle:

    rank 0:  0F0  0B0  0F1      0B0 waits for 1B0, which stands behind 1F1;
    rank 1:  1F1  1F0  1B0      that waits for 0F1, which stands behind 0B0: a cycle of two ranks

Cost: one visit of each action and edge. Guarantee: a cycle is returned exactly if a rank never reaches its end.
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
    """Index of actions by kind, stage and part; the first of equal ones."""

    table: ActionTable
    first: dict[Key, PlacedAction] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        for action in self.table.actions:
            self.first.setdefault((action.kind, action.stage, action.part), action)

    def find(self, kind: ActionKind, stage: int, part: Part) -> PlacedAction | None:
        """Return the action of a kind on a stage for a part, or None."""
        return self.first.get((kind, stage, part))

    def forward(self, stage: int, part: Part) -> PlacedAction | None:
        """Return the forward of a micro-batch (or slice) on a stage, or None."""
        return self.find(ActionKind.FORWARD, stage, part)

    def backward(self, stage: int, part: Part) -> PlacedAction | None:
        """Return the action that makes the gradient of a stage's input: whole backward or input half; else None."""
        whole = self.find(ActionKind.BACKWARD, stage, part)
        return whole or self.find(ActionKind.BACKWARD_INPUT, stage, part)

    def producer(self, action: PlacedAction) -> PlacedAction | None:
        """Return the computation on the neighbouring stage that makes the input of a computation; None at the ends."""
        if action.kind is ActionKind.FORWARD:
            return self.forward(action.stage - 1, action.part)
        if action.kind in BACKWARDS:
            return self.backward(action.stage + 1, action.part)
        return None

    def slice_before(self, action: PlacedAction) -> PlacedAction | None:
        """Return the computation on a neighbouring slice, on the same stage, that a computation on a slice needs.

        In the forward it is the slice before, whose keys are attended to. In the backward it is the slice after, which
        adds to the gradients of these keys. None for the first slice each way, for weight halves and for whole
        micro-batches.
        """
        if action.slice is None:
            return None
        if action.kind is ActionKind.FORWARD:
            return self.forward(action.stage, (action.micro_batch, action.slice - 1))
        if action.kind in BACKWARDS:
            return self.backward(action.stage, (action.micro_batch, action.slice + 1))
        return None

    def partner(self, action: PlacedAction) -> PlacedAction | None:
        """Return the receive of a send, or the send of a receive; None if it is missing."""
        kind = SENDS.get(action.kind) or RECVS[action.kind]
        return self.find(kind, peer_stage(action), action.part)


def peer_stage(action: PlacedAction) -> int:
    """Return the stage at the other end of a message: activations go one stage on, gradients one stage back."""
    return action.stage + (1 if action.kind in {ActionKind.SEND_F, ActionKind.RECV_B} else -1)


@frozen
class Blocked:
    """Rank that stands at an action until another one is done (or, in a rendezvous, reached)."""

    at: PlacedAction
    awaits: PlacedAction


def waiting_circle(index: ActionIndex, *, rendezvous: bool) -> list[Blocked] | None:
    """Return ranks each of which waits for the next, the last for the first; None if all reach their rows' ends."""
    rows = [_cells(row) for row in index.table.rows]
    cells = [(place, cell) for row in rows for place, cell in enumerate(row)]
    numbers = {id(action): number for number, (_, cell) in enumerate(cells) for action in cell}
    lowered = index.table.is_lowered
    meets = lowered and rendezvous
    # cells are numbered rank by rank: each waits for the one before it in its row
    edges = [(number - 1, number) for number, (place, _) in enumerate(cells) if place]
    waits: list[tuple[int, Blocked]] = []
    for number, action in ((number, action) for number, (_, cell) in enumerate(cells) for action in cell):
        if not lowered:
            awaited = index.producer(action)
        else:
            awaited = index.partner(action) if action.kind in (MESSAGES if rendezvous else RECVS) else None
        # The other end of a rendezvous need only be reached: the cell before it must be done, if there is one. So the
        # edge comes from that cell, whose number is one less.
        if awaited is not None and not (meets and cells[numbers[id(awaited)]][0] == 0):
            waits.append((numbers[id(awaited)] - meets, Blocked(action, awaited)))
            edges.append((waits[-1][0], number))
    graph = WaitGraph(len(cells))
    graph.add_waits(*edge_ends(edges))
    never = graph.never()
    blocked: dict[int, Blocked] = {}
    # `waits` is sorted by rank and cell: the first hopeless wait of each rank is the one it stands at
    for source, wait in waits:
        if never[source]:
            blocked.setdefault(wait.at.rank, wait)
    circle = circle_of({rank: [wait.awaits.rank] for rank, wait in blocked.items()})
    return [blocked[rank] for rank in circle] or None


def _cells(row: Sequence[PlacedAction]) -> list[list[PlacedAction]]:
    """Return the actions of a row, cell by cell."""
    cells: dict[int, list[PlacedAction]] = {}
    for action in row:
        cells.setdefault(action.slot, []).append(action)
    return list(cells.values())

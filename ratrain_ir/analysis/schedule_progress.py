"""Progress of a table of actions: whether every rank gets to the end of its row, whatever the timing.

A rank takes its cells one by one. In a lowered table a receive ends after its send; with rendezvous a send ends only with its
receive. In a compute-only table the runtime places the messages, which it can do without a hang exactly where the stages'
dependences and the rows' orders agree; so a computation waits for the one that makes its input, and rendezvous adds nothing.

What a rank waits for never depends on timing, so one run of the table, each rank as far as it gets, decides for all.
"""

from __future__ import annotations

from collections import defaultdict

from attrs import define, field, frozen

from ratrain.ratrain_ir.analysis.actions import BACKWARDS, MESSAGES, RECVS, SENDS, ActionTable, Part, PlacedAction
from ratrain.ratrain_ir.schedules.action import ActionKind

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

        Forward it is the slice before, whose keys it attends to; backward the slice after, which adds to the gradients of its keys.
        None for the first one each way, for weight halves and for whole micro-batches.
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
    return _Run(index, rendezvous).circle()


@define(eq=False)
class _Run:
    index: ActionIndex
    rendezvous: bool
    cells: list[list[list[PlacedAction]]] = field(factory=list)
    position: list[int] = field(factory=list)
    done: set[int] = field(factory=set)
    """Identities of actions: hashing their fields would cost more than all the rest."""
    waiters: dict[int, list[int]] = field(factory=lambda: defaultdict(list))
    blocked: dict[int, Blocked] = field(factory=dict)
    lowered: bool = False

    def __attrs_post_init__(self) -> None:
        table = self.index.table
        self.lowered = table.is_lowered
        self.position = [0] * len(table.rows)
        for row in table.rows:
            cells: dict[int, list[PlacedAction]] = {}
            for action in row:
                cells.setdefault(action.slot, []).append(action)
            self.cells.append(list(cells.values()))

    def circle(self) -> list[Blocked] | None:
        ready = list(range(len(self.cells)))
        while ready:
            self.advance(ready.pop(), ready)
        if not self.blocked:
            return None
        rank = min(self.blocked)
        visited: dict[int, int] = {}
        path: list[Blocked] = []
        while rank not in visited:
            visited[rank] = len(path)
            path.append(self.blocked[rank])
            rank = path[-1].awaits.rank
        return path[visited[rank] :]

    def advance(self, rank: int, ready: list[int]) -> None:
        """Let a rank run until it must wait; ranks that waited for what it does become ready."""
        self.blocked.pop(rank, None)
        cells = self.cells[rank]
        while self.position[rank] < len(cells):
            cell = cells[self.position[rank]]
            for action in cell:
                awaited = self.awaited(action)
                if awaited is not None:
                    self.blocked[rank] = Blocked(action, awaited)
                    self.waiters[id(awaited)].append(rank)
                    return
            self.position[rank] += 1
            for action in cell:
                self.done.add(id(action))
                ready.extend(self.waiters.pop(id(action), ()))

    def awaited(self, action: PlacedAction) -> PlacedAction | None:
        """What an action at the head of its rank still waits for."""
        if not self.lowered:
            awaited = self.index.producer(action)
        elif action.kind in RECVS or (self.rendezvous and action.kind in MESSAGES):
            awaited = self.index.partner(action)
        else:
            return None
        if awaited is None or id(awaited) in self.done or (self.rendezvous and self.lowered and self.is_head(awaited)):
            return None
        return awaited

    def is_head(self, action: PlacedAction) -> bool:
        """Whether the action's rank stands at it."""
        cells, position = self.cells[action.rank], self.position[action.rank]
        return position < len(cells) and any(action is other for other in cells[position])

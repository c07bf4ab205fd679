"""Orders that are written phase by phase; each action takes the next micro-batch that its chunk has not done yet."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from attrs import define, field

from ratrain.ratrain_ir.schedules.action import Action, ActionKind

_HALVES = (ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)


@define
class AscendingOrder:
    """Order of a stage under construction. For each kind of action on each chunk, micro-batches ascend."""

    actions: list[Action] = field(factory=list)
    _done: dict[tuple[ActionKind, int], int] = field(factory=lambda: defaultdict(int))

    def count(self, kind: ActionKind, chunk: int) -> int:
        """Return how many micro-batches the chunk has done. A whole backward counts as both of its halves."""
        return self._done[kind, chunk]

    def add(self, kind: ActionKind, chunk: int) -> None:
        """Append the action of the chunk's next micro-batch."""
        counted = _HALVES if kind is ActionKind.BACKWARD else (kind,)
        self.actions.append(Action(kind, self._done[counted[0], chunk], chunk))
        for part in counted:
            self._done[part, chunk] += 1


def of_first(micro_batches: int, actions: Iterable[Action]) -> list[Action]:
    """Return an order restricted to its first `micro_batches` micro-batches.

    It is as sound as the whole order, because no micro-batch depends on another one.
    """
    return [action for action in actions if action.micro_batch < micro_batches]

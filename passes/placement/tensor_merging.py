"""Two neighbouring passes of a stage's list made one: while rows of the one are gathered or summed, the compute engine works on the other.

Either keeps its own order. What both touch keeps the order it had, so sums keep their bits; messages and reductions keep theirs; and the
later pass ends after the earlier one, and starts no forward before an earlier backward is done, so that the order of the schedule, and how
many pieces are in flight, are what they were.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from attrs import define, field

from ratrain.ratrain_ir.ops.base import Engine, Op, Phase
from ratrain.ratrain_ir.ops.collectives import AllGather, GatherRows
from ratrain.ratrain_ir.ops.compute import Backward, BackwardWeight, Forward, InputGradientOp
from ratrain.ratrain_ir.ops.kinds import piece_of
from ratrain.ratrain_ir.ops.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

_TIMED = (Engine.COMPUTE, Engine.TENSOR)
_IN_ORDER = (Engine.SEND, Engine.RECV, Engine.COLLECTIVE)
"""Engines on which the order of two passes stays, because other stages meet it; views may be gathered in any."""


@define(eq=False)
class _Pending:
    """What of the earlier pass is still to come."""

    reads: Counter[Tensor] = field(factory=Counter)
    writes: Counter[Tensor] = field(factory=Counter)
    engines: Counter[Engine] = field(factory=Counter)
    """ops whose order counts, and all that compute"""
    backward_ends: int = 0

    def count(self, op: Op, ends: Collection[int], by: int) -> None:
        """Add an op, or with `by` = -1 take it away."""
        for tensor in op.reads:
            self.reads[tensor] += by
        for tensor in op.writes + op.updates:
            self.writes[tensor] += by
        if not _is_view(op):
            self.engines[op.engine] += by
        self.backward_ends += by * (id(op) in ends and isinstance(op, InputGradientOp))

    def lets(self, op: Op, ends: Collection[int]) -> bool:
        """Whether an op of the later pass may stand before all of that."""
        if any(self.writes[tensor] for tensor in op.operands):
            return False
        if any(self.reads[tensor] for tensor in op.writes + op.updates):
            return False
        if op.engine in _IN_ORDER and not _is_view(op) and self.engines[op.engine]:
            return False
        if id(op) in ends and self.engines[Engine.COMPUTE]:
            return False
        return not (isinstance(op, Forward) and self.backward_ends)


def _is_view(op: Op) -> bool:
    return isinstance(op, AllGather) and op.micro_batch is not None


def merged(
    earlier: Sequence[Op], later: Sequence[Op], ends: Collection[int], seconds: Callable[[Op], float]
) -> list[Op]:
    """The ops of two passes in the order in which they could start, were compute and tensor engine free at the first.

    `ends`: the identities of ops that end a pass, as `chunk_actions` has them.
    """
    pending = _Pending()
    for op in earlier:
        pending.count(op, ends, 1)
    free = dict.fromkeys(_TIMED, 0.0)
    made: dict[Tensor, float] = {}

    def start(op: Op) -> float:
        needed = max((made.get(tensor, 0.0) for tensor in op.reads + op.updates), default=0.0)
        return max(needed, free.get(op.engine, 0.0))

    result: list[Op] = []
    at = behind = 0
    while at < len(earlier) or behind < len(later):
        first = earlier[at] if at < len(earlier) else None
        second = later[behind] if behind < len(later) else None
        if second is not None and first is not None and not pending.lets(second, ends):
            second = None
        if first is not None and (second is None or start(first) <= start(second)):
            op, at = first, at + 1
            pending.count(op, ends, -1)
        else:
            assert second is not None
            op, behind = second, behind + 1
        end = start(op) + (seconds(op) if op.engine in free else 0.0)
        if op.engine in free:
            free[op.engine] = end
        made.update(dict.fromkeys(op.writes + op.updates, end))
        result.append(op)
    return result


def hoisted(ops: Sequence[Op]) -> list[Op]:
    """A stage's list in which what a backward recovers from, or multiplies with, is gathered a block earlier.

    The gather of a block's input needs no gradient: it moves before the input gradient of the block above, and runs beside that, ahead of
    what is exchanged of the gradient.
    """
    result: list[Op] = []
    for op in ops:
        place = _place_of(op, result)
        if place is None:
            result.append(op)
        else:
            result.insert(place, op)
    return result


def _place_of(op: Op, before: Sequence[Op]) -> int | None:
    """Where the gather of the input of a backward may stand, among the ops before it."""
    if not isinstance(op, GatherRows) or op.phase is not Phase.BACKWARD:
        return None
    for place in range(len(before) - 1, max(-1, len(before) - _SEARCHED), -1):
        other = before[place]
        if isinstance(other, Forward) or any(tensor in op.reads for tensor in other.writes + other.updates):
            return None
        if isinstance(other, InputGradientOp):
            return place if piece_of(other) == piece_of(op) else None
    return None


_SEARCHED = 24
"""ops before a gather among which the block above is looked for: there are a dozen at most between two backwards of a pass"""


def halves_behind_the_embedding(ops: Sequence[Op]) -> list[Op]:
    """A stage's list in which the weight half of the first layer's attention follows the backward of the embedding.

    A backward ends with the embedding's, and its weight halves come after that: so says the order of a schedule.
    """
    result = list(ops)
    embeds = [place for place, op in enumerate(ops) if isinstance(op, Backward) and op.block.kind == "embed"]
    for end in embeds:
        piece = piece_of(result[end])  # type: ignore[arg-type]
        first = next(
            (
                place
                for place in range(end - 1, max(-1, end - _SEARCHED), -1)
                if isinstance(op := result[place], BackwardWeight) and op.block.layer == 0 and piece_of(op) == piece
            ),
            None,
        )
        if first is not None:
            stay, go = _apart(result[first : end + 1])
            result[first : end + 1] = stay + go
    return result


def _apart(ops: Sequence[Op]) -> tuple[list[Op], list[Op]]:
    """What does not depend on the first op, and the first op with what does, each in its order."""
    made: set[Tensor] = set()
    stay: list[Op] = []
    go: list[Op] = []
    for op in ops:
        if not go or any(tensor in made for tensor in op.operands):
            go.append(op)
            made.update(op.writes + op.updates)
        else:
            stay.append(op)
    return stay, go

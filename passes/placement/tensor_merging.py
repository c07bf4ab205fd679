"""Merging of two neighbouring passes of a stage's list, so that exchanges of one run while the other computes.

    earlier   gather a1, forward a1, reduce a1        later   gather b1, forward b1, reduce b1          becomes
    gather a1, [forward a1 | gather b1], [forward b1 | reduce a1], reduce b1

Each pass keeps its own order. Ops that touch the same tensor keep their order, so sums keep their bits; messages and
reductions keep theirs. The later pass ends after the earlier one, and starts no forward before an earlier backward is
done, so the order of the schedule and the number of pieces in flight stay the same.

A forward has less to compute than the backward behind it, and its exchanges leave it more room. So it would run ahead,
and all that it keeps for its own backward would be live beside half of what the other one still reads. With `paced`
neither is ahead of the other by more than an op, and their bytes together stay about those of one pass:

    forward of m + 1    layers 0 1 2 3 ...   keeps more and more
    backward of m       layers 9 8 7 6 ...   frees as much

Cost: linear in the operands.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from attrs import define, field

from ratrain.ratrain_ir.ops.base import Engine, Op, Phase
from ratrain.ratrain_ir.ops.collectives import GatherRows
from ratrain.ratrain_ir.ops.compute import Backward, BackwardWeight, Forward, InputGradientOp
from ratrain.ratrain_ir.ops.context_ranks import GatherKeys
from ratrain.ratrain_ir.ops.kinds import brings_parameters, piece_of
from ratrain.ratrain_ir.ops.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

_TIMED = (Engine.COMPUTE, Engine.TENSOR)
"""Engines whose times decide the order; ops of all others count as no time."""
_IN_ORDER = (Engine.SEND, Engine.RECV, Engine.COLLECTIVE)
"""Engines on which ops of the two passes keep their order, because other ranks meet it; gathers of views are exempt."""


@define(eq=False)
class _Pending:
    """Counts of the earlier pass's ops that are still to come."""

    reads: Counter[Tensor] = field(factory=Counter)
    writes: Counter[Tensor] = field(factory=Counter)
    engines: Counter[Engine] = field(factory=Counter)
    """By engine: ops still to come, without gathers of views."""
    backward_ends: int = 0
    """Input gradients still to come that end a backward pass."""

    def count(self, op: Op, ends: Collection[int], by: int) -> None:
        """Add an op, or with `by` = -1 take it away."""
        for tensor in op.reads:
            self.reads[tensor] += by
        for tensor in op.writes + op.updates:
            self.writes[tensor] += by
        if not brings_parameters(op):
            self.engines[op.engine] += by
        self.backward_ends += by * (id(op) in ends and isinstance(op, InputGradientOp))

    def lets(self, op: Op, ends: Collection[int]) -> bool:
        """Tell whether an op of the later pass may stand before the rest of the earlier pass."""
        if any(self.writes[tensor] for tensor in op.operands):
            return False
        if any(self.reads[tensor] for tensor in op.writes + op.updates):
            return False
        if op.engine in _IN_ORDER and not brings_parameters(op) and self.engines[op.engine]:
            return False
        if id(op) in ends and self.engines[Engine.COMPUTE]:
            return False
        return not (isinstance(op, Forward) and self.backward_ends)


@define(eq=False)
class _Progress:
    """Seconds of compute that each of two passes has and has done."""

    of_earlier: float
    of_later: float
    earlier: float = 0.0
    later: float = 0.0

    @property
    def is_ahead(self) -> bool:
        """True if the earlier pass has done the larger share."""
        return self.earlier * self.of_later > self.later * self.of_earlier


def _compute_seconds(ops: Sequence[Op], seconds: Callable[[Op], float]) -> float:
    return sum(seconds(op) for op in ops if op.engine is Engine.COMPUTE)


def merged(
    earlier: Sequence[Op],
    later: Sequence[Op],
    ends: Collection[int],
    seconds: Callable[[Op], float],
    *,
    paced: bool = False,
) -> list[Op]:
    """Return the ops of two passes in the order in which they could start.

    Compute and tensor engine are free at first. `ends`: identities of the ops that end a pass, as `chunk_actions` has
    them. `seconds`: the time of an op. `paced`: while the earlier pass has done a larger share of its compute than the
    later one of its own, an op of the later pass comes first wherever it may.
    """
    pending = _Pending()
    for op in earlier:
        pending.count(op, ends, 1)
    free = dict.fromkeys(_TIMED, 0.0)
    made: dict[Tensor, float] = {}

    def start(op: Op) -> float:
        needed = max((made.get(tensor, 0.0) for tensor in op.reads + op.updates), default=0.0)
        return max(needed, free.get(op.engine, 0.0))

    progress = _Progress(_compute_seconds(earlier, seconds), _compute_seconds(later, seconds))
    result: list[Op] = []
    at = behind = 0
    while at < len(earlier) or behind < len(later):
        first = earlier[at] if at < len(earlier) else None
        second = later[behind] if behind < len(later) else None
        if second is not None and first is not None and not pending.lets(second, ends):
            second = None
        waits = paced and second is not None and progress.is_ahead
        if first is not None and not waits and (second is None or start(first) <= start(second)):
            op, at = first, at + 1
            pending.count(op, ends, -1)
            progress.earlier += seconds(op) if op.engine is Engine.COMPUTE else 0.0
        else:
            assert second is not None
            op, behind = second, behind + 1
            progress.later += seconds(op) if op.engine is Engine.COMPUTE else 0.0
        end = start(op) + (seconds(op) if op.engine in free else 0.0)
        if op.engine in free:
            free[op.engine] = end
        made.update(dict.fromkeys(op.writes + op.updates, end))
        result.append(op)
    return result


def hoisted(ops: Sequence[Op]) -> list[Op]:
    """Return a stage's list with the gathers of backward inputs and of keys moved a block earlier.

    The gather of a block's input, from which its backward recomputes or with which it multiplies, needs no gradient,
    and neither does that of keys. It moves before the input gradient of the block above, and runs at the same time,
    ahead of that gradient's exchanges.
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
    """Return the index in `before` to which the gather of a backward's input may move; None if it must stay."""
    if not isinstance(op, GatherRows | GatherKeys) or op.phase is not Phase.BACKWARD:
        return None
    for place in range(len(before) - 1, max(-1, len(before) - _SEARCHED), -1):
        other = before[place]
        if isinstance(other, Forward) or any(tensor in op.reads for tensor in other.writes + other.updates):
            return None
        if isinstance(other, InputGradientOp):
            return place if piece_of(other) == piece_of(op) else None
    return None


_SEARCHED = 24
"""Ops before a gather that are searched for the block above; a pass has at most a dozen between two backwards."""


def halves_behind_the_embedding(ops: Sequence[Op]) -> list[Op]:
    """Return a stage's list with the weight half of the first layer's attention after the embedding's backward.

    In the order of a schedule a backward ends with the embedding's, and its weight halves come after that.
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
    """Return the ops that do not depend on the first one, and the first one with those that do, each in list order."""
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

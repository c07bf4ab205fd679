"""Dependences within a stage: what each op must wait for on the other engines, this step and the one before.

Read-after-write, write-after-read and write-after-write over the list order; once tensors have addresses, also byte reuse:
whoever first writes new bytes waits for every accessor of the old. A blocking collective waits for the last compute op before it in
the list, and the next compute op waits for it. What is taken back from another stage waits until it was evicted to it. The step is swept twice, so that waits across the step's
end come out of the same rules. Since an engine runs its ops in order, one position an engine is enough, and what another
wait (or the engine's own order) implies is left out: the waits are transitively reduced with vector clocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ratrain.ratrain_ir.analysis.dependence_sweep import NONE, SweptOps, reduced_waits
from ratrain.ratrain_ir.ops import ENGINES, Engine, Evict, Release, TakeBack, Tensor, is_blocking, piece_of
from ratrain.ratrain_ir.types import Home, aligned

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Stage

ENGINE_INDEX = {engine: index for index, engine in enumerate(ENGINES)}
_COMPUTE, _COLLECTIVE = ENGINE_INDEX[Engine.COMPUTE], ENGINE_INDEX[Engine.COLLECTIVE]
_MEMORY = 1 << 56
"""Addresses that each memory has in a space of them all: no offset is as large."""
_BEGINS = {home: number * _MEMORY for number, home in enumerate(Home)}


class Wait(NamedTuple):
    """An op at list position `position`, of this step or the one before, must have completed."""

    engine: Engine
    position: int
    previous_step: bool


class _Numbers(dict[Tensor, int]):
    """Tensors by number, in the order in which they are asked for."""

    def __missing__(self, tensor: Tensor) -> int:
        number = self[tensor] = len(self)
        return number


def stage_waits(stage: Stage, *, reuse: bool = True) -> list[tuple[Wait, ...]]:
    """What each op of a stage waits for on other engines, transitively reduced; releases wait for nothing.

    Without `reuse`: were no bytes used twice, as where tensors have no addresses yet.
    """
    count = len(stage.ops)
    ops = _as_numbers(stage, reuse=reuse)
    kept, needed = reduced_waits(ops, len(ENGINES), _COMPUTE, _COLLECTIVE)
    engines = [ENGINES[number] if number != NONE else Engine.NONE for number in ops.engines]
    all_waits = [Wait(engines[position % count], position % count, position < count) for position in needed]
    waits: list[tuple[Wait, ...]] = []
    first = 0
    for number in kept:
        waits.append(tuple(all_waits[first : first + number]))
        first += number
    return waits


def _as_numbers(stage: Stage, *, reuse: bool) -> SweptOps:
    numbers = _Numbers()
    number_of = numbers.__getitem__
    engines: list[int] = []
    blocks: list[int] = []
    bounds: list[int] = []
    tensors: list[int] = []
    posts: list[int] = []
    awaits: list[int] = []
    kept_elsewhere: dict[object, int] = {}
    for op in stage.ops:
        if type(op) is Release:
            engines.append(NONE)
            blocks.append(0)
            bounds += (len(tensors),) * 3
            posts.append(NONE)
            awaits.append(NONE)
            continue
        engine = ENGINE_INDEX[op.engine]
        engines.append(engine)
        blocks.append(engine == _COLLECTIVE and is_blocking(op))
        tensors += map(number_of, op.reads)
        bounds.append(len(tensors))
        tensors += map(number_of, op.updates)
        bounds.append(len(tensors))
        tensors += map(number_of, op.writes)
        tensors += map(number_of, op.scratch)
        bounds.append(len(tensors))
        slot = NONE
        if type(op) is Evict or type(op) is TakeBack:
            slot = kept_elsewhere.setdefault((op.peer, op.block, piece_of(op)), len(kept_elsewhere))
        posts.append(slot if type(op) is Evict else NONE)
        awaits.append(slot if type(op) is TakeBack else NONE)
    starts = [NONE if t.offset is None or not reuse else _BEGINS[t.home] + t.offset for t in numbers]
    stops = [s if s == NONE else s + aligned(t.type.nbytes) for s, t in zip(starts, numbers, strict=True)]
    return SweptOps(engines, blocks, bounds, tensors, starts, stops, posts, awaits)

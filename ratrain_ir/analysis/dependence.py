"""Dependences within a stage: what each op must wait for on the other engines, this step and the one before.

Read-after-write, write-after-read and write-after-write over the list order; once tensors have addresses, also byte reuse:
whoever first writes new bytes waits for every accessor of the old. A blocking collective waits for the last compute op before it in
the list, and the next compute op waits for it. What is taken back from another stage waits until it was evicted to it. The step is swept twice, so that waits across the step's
end come out of the same rules. Since an engine runs its ops in order, one position an engine is enough, and what another
wait (or the engine's own order) implies is left out: the waits are transitively reduced with vector clocks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

from attrs import define, field, frozen

from ratrain.ratrain_ir.ops import ENGINES, Engine, Evict, Op, Release, TakeBack, Tensor, is_blocking, piece_of
from ratrain.ratrain_ir.types import Home, aligned

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Stage

ENGINE_INDEX = {engine: index for index, engine in enumerate(ENGINES)}
_COMPUTE, _COLLECTIVE = ENGINE_INDEX[Engine.COMPUTE], ENGINE_INDEX[Engine.COLLECTIVE]
_STORE = ENGINE_INDEX[Engine.STORE]
_NONE = -1


@frozen
class Wait:
    """An op at list position `position`, of this step or the one before, must have completed."""

    engine: Engine
    position: int
    previous_step: bool


@define(eq=False)
class _Life:
    """One life of a tensor: its last writer, and by engine the last access since, the writer's included."""

    writer: int = _NONE
    writer_engine: int = 0
    accesses: dict[int, int] = field(factory=dict)


@define(eq=False)
class _Bytes:
    """Which life last held each byte of a memory: disjoint segments, sorted by start."""

    starts: list[int] = field(factory=list)
    stops: list[int] = field(factory=list)
    lives: list[_Life] = field(factory=list)

    def take(self, start: int, stop: int, life: _Life) -> list[_Life]:
        """Give bytes to a life; the lives that held any of them before."""
        first = bisect_right(self.stops, start)
        last = bisect_left(self.starts, stop)
        former = self.lives[first:last]
        kept_starts, kept_stops, kept_lives = [start], [stop], [life]
        if former and self.starts[first] < start:
            kept_starts.insert(0, self.starts[first])
            kept_stops.insert(0, start)
            kept_lives.insert(0, former[0])
        if former and self.stops[last - 1] > stop:
            kept_starts.append(stop)
            kept_stops.append(self.stops[last - 1])
            kept_lives.append(former[-1])
        self.starts[first:last] = kept_starts
        self.stops[first:last] = kept_stops
        self.lives[first:last] = kept_lives
        return former


def raw_dependences(stage: Stage) -> list[list[int]]:
    """For both copies of the step: per op, one needed position an engine (-1: none), unreduced.

    Positions count through both copies: position p of the second copy is len(ops) + p.
    """
    return _Sweep().over(stage.ops)


@define(eq=False)
class _Sweep:
    lives: dict[Tensor, _Life] = field(factory=dict)
    memories: dict[Home, _Bytes] = field(factory=lambda: {home: _Bytes() for home in Home})
    evicted: dict[object, int] = field(factory=dict)
    """where what a stage keeps with another was last sent there"""
    computed: int = _NONE
    """the last compute op so far"""
    blocking: int = _NONE
    """the last blocking collective so far"""

    def over(self, ops: list[Op]) -> list[list[int]]:
        needed: list[list[int]] = []
        for position, op in enumerate([*ops, *ops]):
            needs = [_NONE] * len(ENGINES)
            if type(op) is not Release:
                engine = ENGINE_INDEX[op.engine]
                self.visit(op, position, engine, needs)
                if type(op) is Evict:
                    self.evicted[op.peer, op.block, piece_of(op)] = position
                elif type(op) is TakeBack:
                    sent = self.evicted.get((op.peer, op.block, piece_of(op)), _NONE)
                    needs[_STORE] = max(needs[_STORE], sent)
                if engine == _COMPUTE:
                    needs[_COLLECTIVE] = max(needs[_COLLECTIVE], self.blocking)
                    self.computed = position
                elif engine == _COLLECTIVE and is_blocking(op):
                    needs[_COMPUTE] = max(needs[_COMPUTE], self.computed)
                    self.blocking = position
            needed.append(needs)
        return needed

    def visit(self, op: Op, position: int, engine: int, needs: list[int]) -> None:
        for tensor in op.reads:
            life = self.lives.get(tensor) or self.begin(tensor, needs)
            if life.writer > needs[life.writer_engine]:  # noqa: PLR1730 - the innermost loop makes no calls
                needs[life.writer_engine] = life.writer
            life.accesses[engine] = position
        for tensor in op.updates:
            life = self.lives.get(tensor) or self.begin(tensor, needs)
            _need_all(needs, life)
            _written(life, engine, position)
        for tensor in op.writes + op.scratch:
            former = self.lives.get(tensor)
            if former is not None:
                _need_all(needs, former)
            _written(self.begin(tensor, needs), engine, position)

    def begin(self, tensor: Tensor, needs: list[int]) -> _Life:
        """A new life of a tensor, which must wait for whoever used its bytes before."""
        life = self.lives[tensor] = _Life()
        if tensor.offset is not None:
            end = tensor.offset + aligned(tensor.type.nbytes)
            for former in self.memories[tensor.home].take(tensor.offset, end, life):
                _need_all(needs, former)
        return life


def _need_all(needs: list[int], life: _Life) -> None:
    for engine, position in life.accesses.items():
        if position > needs[engine]:  # noqa: PLR1730
            needs[engine] = position


def _written(life: _Life, engine: int, position: int) -> None:
    """A writer waited for every access before it, so it stands for them all."""
    life.writer, life.writer_engine = position, engine
    life.accesses = {engine: position}


def stage_waits(stage: Stage) -> list[tuple[Wait, ...]]:
    """What each op of a stage waits for on other engines, transitively reduced; releases wait for nothing."""
    count = len(stage.ops)
    needed = raw_dependences(stage)
    clocks: list[list[int]] = []
    """Per op, the last position on each engine known to be complete when the op is."""
    on_engine = [[_NONE] * len(ENGINES) for _ in ENGINES]
    waits: list[tuple[Wait, ...]] = []
    for position, needs in enumerate(needed):
        op = stage.ops[position % count]
        if type(op) is Release:
            clocks.append([])
            kept: list[Wait] = []
        else:
            engine = ENGINE_INDEX[op.engine]
            known = list(on_engine[engine])
            kept = _keep(needs, known, clocks, engine, count)
            known[engine] = position
            clocks.append(known)
            on_engine[engine] = known
        if position >= count:
            waits.append(tuple(kept))
    return waits


def _keep(needs: list[int], known: list[int], clocks: list[list[int]], own: int, count: int) -> list[Wait]:
    """The needs that are not implied, latest first; `known` grows by what they imply."""
    kept: list[Wait] = []
    for position, engine in sorted([(p, e) for e, p in enumerate(needs) if p > known[e] and e != own], reverse=True):
        if position <= known[engine]:
            continue  # one that was kept implies it
        kept.append(Wait(ENGINES[engine], position % count, position < count))
        for other, reached in enumerate(clocks[position]):
            if reached > known[other]:  # noqa: PLR1730
                known[other] = reached
    return kept

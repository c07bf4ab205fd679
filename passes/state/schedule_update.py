"""`schedule-update`: updates each block's shard as soon as its reduced gradient is final and the engine is free.

    reduce_scatter mlp.1        reduce_scatter mlp.1
    reduce_scatter attention.1  update mlp.1              (nothing else is final yet)
    reduce_scatter mlp.0        reduce_scatter attention.1
    reduce_scatter attention.0  reduce_scatter mlp.0
    update attention.0     ->   reduce_scatter attention.0
    update mlp.0                update mlp.0
    update attention.1          update attention.0
    update mlp.1                update attention.1

Gradients become final in backward order, the last layers' first; the next forward needs the views of the first layers
first. So, by the target's own seconds, whenever the engine is free for its next update, it takes among the blocks with
final gradients the one that the next forward visits first.

On the compute engine updates come after all other work, because that work leads to the last gradient of the step and to
the gradients that other stages wait for. Where the machine updates on its host, updates run while the backward goes on.
Clipping by the global norm makes all gradients final at once, at the barrier of the norm: then the order is that of the
next forward. Cost: O(n log n) in updates, plus one sweep over the ops.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar

from attrs import define, field, frozen

from ratrain.passes.pass_base import Decision, Pass, PassContext
from ratrain.passes.trial.list_times import ListTimes
from ratrain.passes.trial.trial import Trials
from ratrain.ratrain_ir.model.blocks import Block
from ratrain.ratrain_ir.module import Module, Stage
from ratrain.ratrain_ir.ops.base import Engine, Op
from ratrain.ratrain_ir.ops.compute import Update
from ratrain.ratrain_ir.ops.state_homes import engine_of_update

if TYPE_CHECKING:
    from ratrain.ratrain_ir.ops.tensor import Tensor


@frozen
class ScheduleUpdatePass(Pass):
    """Put updates where their gradients are final."""

    name: ClassVar[str] = "schedule-update"
    decides: ClassVar[frozenset[Decision]] = frozenset({Decision.UPDATES})

    def run(self, module: Module, context: PassContext) -> None:
        """Move the updates of every stage."""
        overtaken = sum(self.rewrite(stage, Trials(module, context)) for stage in module.stages)
        context.statistics["updates before that of an earlier block"] = overtaken

    def rewrite(self, stage: Stage, trials: Trials) -> int:
        """Rewrite one stage in place; return the number of updates that overtake the update of an earlier block."""
        return _Rescheduling(stage, trials).run()


@frozen
class _Window:
    """Range of positions where an update may stand among the other ops, both ends included.

    It stands before the op there.
    """

    update: Update
    first: int
    last: int
    final_seconds: float
    """Seconds when everything that it reads is final."""


@define(eq=False)
class _Rescheduling:
    """Mover of one stage's updates to where their gradients are final."""

    stage: Stage
    trials: Trials
    rank: Mapping[Block, int] = field(init=False)
    """Position of each block in the forward."""
    rest: list[Op] = field(init=False)
    """All ops but the updates."""
    times: ListTimes = field(init=False)
    """Times of `rest`."""

    def __attrs_post_init__(self) -> None:
        blocks = self.trials.module.topology.stage_blocks[self.stage.index]
        self.rank = {block: index for index, block in enumerate(blocks)}
        self.rest = [op for op in self.stage.ops if type(op) is not Update]
        self.times = self.trials.times(self.stage.draft(self.rest))

    def run(self) -> int:
        """Rewrite the stage; return the number of updates that overtake the update of an earlier block."""
        placed: dict[int, list[Op]] = {}
        ranks: list[int] = []
        windows, usual = list(self.windows()), self.trials.context.target.update_engine
        for engine in (Engine.COMPUTE, Engine.HOST):
            mine = [window for window in windows if engine_of_update(window.update, usual) is engine]
            free, position = self.is_free(engine)
            for window in self.in_order(mine, free):
                position = min(max(position, window.first), window.last)
                placed.setdefault(position, []).append(window.update)
                ranks.append(self.rank[window.update.block])
        self.stage.ops = []
        for at, op in enumerate(self.rest):
            self.stage.ops += [*placed.pop(at, ()), op]
        self.stage.ops += placed.get(len(self.rest), ())
        lowest_from = list(accumulate(reversed(ranks), min))[::-1]
        return sum(lowest < rank for lowest, rank in zip(lowest_from, ranks, strict=True))

    def is_free(self, engine: Engine) -> tuple[float, int]:
        """Return the seconds and the position in `rest` from which an engine is free for updates."""
        if engine is Engine.HOST:
            return 0.0, 0
        compute = [at for at, op in enumerate(self.rest) if op.engine is Engine.COMPUTE]
        return (float(self.times.ends[compute[-1]]), compute[-1] + 1) if compute else (0.0, 0)

    def in_order(self, given: list[_Window], now: float) -> list[_Window]:
        """Return windows in the order in which an engine that is free from `now` on takes their updates."""
        coming = sorted(given, key=lambda window: window.final_seconds, reverse=True)
        ready: list[tuple[int, int]] = []
        """blocks by rank, and their places among the windows"""
        windows = list(coming)
        order = []
        while coming or ready:
            if not ready:
                now = max(now, coming[-1].final_seconds)
            # `coming` is sorted latest first, so a popped window keeps its index in `windows`.
            while coming and coming[-1].final_seconds <= now:
                window = coming.pop()
                heapq.heappush(ready, (self.rank[window.update.block], len(coming)))
            window = windows[heapq.heappop(ready)[1]]
            order.append(window)
            update = self.trials.legalised(self.stage, window.update)
            now += self.trials.op_seconds(self.stage, update)
        return order

    def windows(self) -> list[_Window]:
        """Return the window of each update.

        It ends at the nearest accesses before and after the update whose order with it counts: a write, or any access
        of a tensor that the update changes.
        """
        wanted = {t for op in self.stage.ops if type(op) is Update for t in op.operands}
        accesses: dict[Tensor, list[tuple[int, bool]]] = {tensor: [] for tensor in wanted}
        updates: list[tuple[Update, int]] = []
        position = 0
        for op in self.stage.ops:
            if type(op) is Update:
                updates.append((op, position))
                continue
            for tensor in op.operands:
                if tensor in wanted:
                    accesses[tensor].append((position, tensor in op.writes or tensor in op.updates))
            position += 1
        windows = []
        for update, stood in updates:
            changed = {*update.writes, *update.updates}
            apart = [at for t in update.operands for at, writes in accesses[t] if writes or t in changed]
            made = [at for t in update.reads for at, writes in accesses[t] if writes and at < stood]
            first = max((at + 1 for at in apart if at < stood), default=0)
            last = min((at for at in apart if at >= stood), default=len(self.rest))
            final_seconds = max((float(self.times.ends[at]) for at in made), default=0.0)
            windows.append(_Window(update, first, last, final_seconds))
        return windows

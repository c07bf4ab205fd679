"""Guests written into the list of a stage that lends bytes: it takes in what another stage evicts, and gives it back in time.

    evict attention.0 m0 @3 (%x.attention.0.m0, %s.attention.0.m0.*)                        on stage @0
    %guest.x.attention.0.m0, %guest.s.attention.0.m0.* = accept attention.0 m0 @0           on stage @3
    ...
    give_back attention.0 m0 @0 (%guest.x.attention.0.m0, %guest.s.attention.0.m0.*)        on stage @3
    %back.x.attention.0.m0, %back.s.attention.0.m0.* = take_back attention.0 m0 @3          on stage @0

Where these stand in the lender's list decides when its bytes are taken, and what waits for them. Both lists are laid beside each other in the
run of the module's order in which a forward, and each half of a backward, takes one unit of time: what waits for what in it goes one way
in time, and so a wait between two stages that a reuse of bytes adds closes no circle. So that neither stage waits for the other where their real
times differ from that, guests have their bytes some units longer, before and after.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

from attrs import define, field

from ratrain.passes.placement.unit_run import computations
from ratrain.ratrain_ir.analysis.chunk_actions import chunk_actions
from ratrain.ratrain_ir.module import Module
from ratrain.ratrain_ir.ops import (
    Accept,
    Engine,
    Evict,
    GiveBack,
    Op,
    TakeBack,
    Tensor,
    Tensors,
    piece_fields,
    piece_of,
)
from ratrain.ratrain_ir.schedules.action import Action
from ratrain.ratrain_ir.types import StateKind

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Stage

_SLACK = 1.0
"""Units of time that guests have their bytes before they come, and after they have gone."""


@define(eq=False)
class UnitTimes:
    """When the ops of each stage come in the unit run of a module's order.

    Raises ValueError where that order hangs.
    """

    module: Module
    spans: list[dict[Action, tuple[int, int]]] = field(init=False)
    """by stage: from when to when each of its actions takes"""

    @spans.default
    def _spans_of_all(self) -> list[dict[Action, tuple[int, int]]]:
        orders = [[action for _, action in chunk_actions(self.module, stage)] for stage in self.module.stages]
        return computations(orders, self.module.topology.chunk_stages)

    def of(self, stage: Stage) -> list[float]:
        """When each op of a list of a stage begins, ascending: the compute ops of an action share its time evenly."""
        ends = {id(op): action for op, action in chunk_actions(self.module, stage)}
        times: list[float] = []
        waiting: list[int] = []
        now = 0.0
        for position, op in enumerate(stage.ops):
            times.append(now)
            waiting.append(position)
            action = ends.get(id(op))
            if action is not None:
                start, stop = self.spans[stage.index][action]
                now = self._shared(stage, waiting, times, max(now, float(start)), float(stop))
                waiting = []
        return times

    @staticmethod
    def _shared(stage: Stage, positions: list[int], times: list[float], start: float, stop: float) -> float:
        """Give the ops of an action their times; the one at which the next may begin."""
        computing = sum(stage.ops[position].engine is Engine.COMPUTE for position in positions)
        done = 0
        for position in positions:
            if done:
                times[position] = start + (stop - start) * (done - 1) / computing
            if stage.ops[position].engine is Engine.COMPUTE:
                times[position] = start + (stop - start) * done / computing
                done += 1
        return max(start, stop)


def take_in(lender: Stage, borrower: Stage, times: UnitTimes) -> int:
    """Write into a lender's list what it does for another stage, whose list has evictions to it; how many guests' blocks there are.

    The ops and tensors that the lender's list has stay as they are.
    """
    theirs, mine = times.of(borrower), times.of(lender)
    before: dict[int, list[Op]] = {}
    guests: dict[object, Tensors] = {}
    for position, op in enumerate(borrower.ops):
        if isinstance(op, Evict) and op.peer == lender.index:
            came = tuple(_guest(lender, tensor) for tensor in op.reads)
            guests[op.block, piece_of(op)] = came
            fields = {"block": op.block, **piece_fields(piece_of(op)), "peer": borrower.index}
            place = bisect_left(mine, theirs[position] - _SLACK)
            before.setdefault(place, []).append(Accept(**fields, writes=came))
        elif isinstance(op, TakeBack) and op.peer == lender.index:
            gone = guests[op.block, piece_of(op)]
            fields = {"block": op.block, **piece_fields(piece_of(op)), "peer": borrower.index}
            place = bisect_right(mine, theirs[position] + _SLACK)
            before.setdefault(place, []).append(GiveBack(**fields, reads=gone))
    ops: list[Op] = []
    for position, op in enumerate(lender.ops):
        ops += before.get(position, ())
        ops.append(op)
    lender.ops = ops + before.get(len(lender.ops), [])
    return len(guests)


def _guest(lender: Stage, tensor: Tensor) -> Tensor:
    name = lender.free_name(f"guest.{tensor.name}")
    return lender.add(Tensor(name, StateKind.GUEST, tensor.type))

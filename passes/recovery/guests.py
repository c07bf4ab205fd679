"""Guests written into the list of a stage that lends bytes: it takes in what another stage evicts, and gives it back in time.

    evict attention.0 m0 @3 (%x.attention.0.m0, %s.attention.0.m0.*)                        on stage @0
    %guest.x.attention.0.m0, %guest.s.attention.0.m0.* = accept attention.0 m0 @0           on stage @3
    ...
    give_back attention.0 m0 @0 (%guest.x.attention.0.m0, %guest.s.attention.0.m0.*)        on stage @3
    %back.x.attention.0.m0, %back.s.attention.0.m0.* = take_back attention.0 m0 @3          on stage @0

Where these stand in the lender's list decides when its bytes are taken, and what waits for them. All lists are laid beside each other in the
run of the module's order in which a forward, and each half of a backward, takes one unit of time: what waits for what in it goes one way
in time, and so a wait between two stages that a reuse of bytes adds closes no circle. What stands between two computations of a lender comes when
the second one does: where there is time between them, that is what it waits for. So that neither stage waits for the other where their real times
differ from that, guests have their bytes some units longer, before and after.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from math import inf
from typing import TYPE_CHECKING

from attrs import define, field, frozen

from ratrain.ratrain_ir.analysis.chunk_actions import chunk_actions
from ratrain.ratrain_ir.analysis.unit_run import computations
from ratrain.ratrain_ir.config.types import StateKind
from ratrain.ratrain_ir.module import Module
from ratrain.ratrain_ir.ops.base import Engine, Op, piece_fields
from ratrain.ratrain_ir.ops.kinds import piece_of
from ratrain.ratrain_ir.ops.messages import Accept, Evict, GiveBack, TakeBack
from ratrain.ratrain_ir.ops.tensor import Tensor, Tensors
from ratrain.ratrain_ir.schedules.action import Action

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

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

    def of(self, stage: Stage) -> Spans:
        """When each op of a list of a stage comes: the compute ops of an action share its time evenly."""
        ends = {id(op): action for op, action in chunk_actions(self.module, stage)}
        spans = Spans()
        waiting: list[Op] = []
        for op in stage.ops:
            waiting.append(op)
            action = ends.get(id(op))
            if action is not None:
                start, stop = self.spans[stage.index][action]
                spans.add(waiting, float(start), float(stop))
                waiting = []
        spans.add(waiting, inf, inf)
        return spans


@define(eq=False)
class Spans:
    """From when to when each op of a list may come; both ascend."""

    earliest: list[float] = field(factory=list)
    latest: list[float] = field(factory=list)
    now: float = 0.0
    """when the last action ends"""

    def add(self, ops: Sequence[Op], start: float, stop: float) -> None:
        """The ops of an action from one time to another, and what stands before its first computation since the action before."""
        computing = sum(op.engine is Engine.COMPUTE for op in ops)
        done = 0
        for op in ops:
            if op.engine is Engine.COMPUTE:
                self.now = start + (stop - start) * done / computing
                done += 1
            self.earliest.append(self.now)
            self.latest.append(self.now if done else start)
        self.now = max(self.now, stop if computing else start)


@frozen
class _Event:
    """Something of another stage that its lender takes part in."""

    time: float
    """when its op comes in the unit run: what is evicted as soon as it may, what is taken back as late"""
    borrower: int
    position: int
    """of its op in the list of the stage that borrows"""
    op: Evict | TakeBack

    @property
    def order(self) -> tuple[float, int, int]:
        """By time; by stage and place in its list of equal ones: the same order in the lists of all lenders, so that no two wait for each other."""
        return self.time, self.borrower, self.position


def take_in(lender: Stage, borrowers: Iterable[Stage], times: UnitTimes) -> int:
    """Write into a lender's list what it does for other stages, whose lists have evictions to it; how many guests' blocks there are.

    The ops and tensors that the lender's list has stay as they are.
    """
    events = [event for borrower in borrowers for event in _events(borrower, lender.index, times)]
    if not events:
        return 0
    mine = times.of(lender).latest
    before: dict[int, list[Op]] = {}
    guests: dict[object, Tensors] = {}
    for event in sorted(events, key=lambda event: event.order):
        op = event.op
        fields = {"block": op.block, **piece_fields(piece_of(op)), "peer": event.borrower}
        key = op.block, piece_of(op)
        if isinstance(op, Evict):
            guests[key] = tuple(_guest(lender, tensor) for tensor in op.reads)
            place = bisect_left(mine, event.time - _SLACK)
            before.setdefault(place, []).append(Accept(**fields, writes=guests[key]))
        else:
            place = bisect_right(mine, event.time + _SLACK)
            before.setdefault(place, []).append(GiveBack(**fields, reads=guests[key]))
    ops: list[Op] = []
    for position, own in enumerate(lender.ops):
        ops += before.get(position, ())
        ops.append(own)
    lender.ops = ops + before.get(len(lender.ops), [])
    return len(guests)


def _events(borrower: Stage, lender: int, times: UnitTimes) -> Iterator[_Event]:
    spans = None
    for position, op in enumerate(borrower.ops):
        if isinstance(op, Evict | TakeBack) and op.peer == lender:
            spans = times.of(borrower) if spans is None else spans
            time = (spans.earliest if isinstance(op, Evict) else spans.latest)[position]
            yield _Event(time, borrower.index, position, op)


def _guest(lender: Stage, tensor: Tensor) -> Tensor:
    name = lender.free_name(f"guest.{tensor.name}")
    return lender.add(Tensor(name, StateKind.GUEST, tensor.type))

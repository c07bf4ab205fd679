"""Peer offload on the donor's side: remote buffers written into the list of a stage that lends memory to others.

    peer_offload attention.0 m0 @3 (%x.attention.0.m0, %s.attention.0.m0.*)                       on stage @0
    %remote.x.attention.0.m0, %remote.s.attention.0.m0.* = donor_accept attention.0 m0 @0          on stage @3
    ...
    donor_return attention.0 m0 @0 (%remote.x.attention.0.m0, %remote.s.attention.0.m0.*)         on stage @3
    %back.x.attention.0.m0, %back.s.attention.0.m0.* = peer_reload attention.0 m0 @3               on stage @0

The positions of `donor_accept` and `donor_return` in the donor's list decide when its bytes are taken and what waits
for them.
To find them, all lists are compared on one clock: the run of the module's order in which a forward, and each half of a
backward, takes one unit of time. In that run every wait goes forward in time. A reuse of bytes that adds a wait between
two stages therefore closes no cycle. An op between two computations of a donor counts at the time of the second one,
which it delays if there is a gap between them. Real times differ from units. So remote buffers keep their bytes one
unit longer, before and after, and neither stage waits for the other. Cost: linear in the ops of the stages involved.
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
from ratrain.ratrain_ir.ops.messages import DonorAccept, DonorReturn, PeerOffload, PeerReload
from ratrain.ratrain_ir.ops.tensor import Tensor, Tensors
from ratrain.ratrain_ir.schedules.action import Action

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ratrain.ratrain_ir.module import Stage

_SLACK = 1.0
"""Units of time for which remote buffers hold their bytes before they arrive and after they leave."""


@define(eq=False)
class UnitTimes:
    """Times of the ops of each stage in the unit run of a module's order.

    Raises ValueError where that order hangs.
    """

    module: Module
    spans: list[dict[Action, tuple[int, int]]] = field(init=False)
    """By stage: start and end of each of its actions, in units."""

    @spans.default
    def _spans_of_all(self) -> list[dict[Action, tuple[int, int]]]:
        orders = [[action for _, action in chunk_actions(self.module, stage)] for stage in self.module.stages]
        return computations(orders, self.module.topology.chunk_stages)

    def of(self, stage: Stage) -> Spans:
        """Return the times of the ops of a stage's list; the compute ops of an action share its time evenly."""
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
        # Ops behind the last action may come as late as they like, and no earlier than the last action's end.
        spans.add(waiting, inf, inf)
        return spans


@define(eq=False)
class Spans:
    """Earliest and latest unit time of each op of a list; both ascend."""

    earliest: list[float] = field(factory=list)
    latest: list[float] = field(factory=list)
    now: float = 0.0
    """End of the last action."""

    def add(self, ops: Sequence[Op], start: float, stop: float) -> None:
        """Append the ops of an action that runs from `start` to `stop`.

        Ops before its first computation may come from the end of the action before (`now`) until `start`.
        """
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
    """Offload or reload of another stage that its donor takes part in."""

    time: float
    """Unit time of its op: the earliest for a `peer_offload`, the latest for a `peer_reload`."""
    borrower: int
    position: int
    """Position of its op in the list of the borrowing stage."""
    op: PeerOffload | PeerReload

    @property
    def order(self) -> tuple[float, int, int]:
        """Sort key: time, then borrowing stage, then position.

        One order for all donors, so no two wait for each other.
        """
        return self.time, self.borrower, self.position


def add_remote_buffers(donor: Stage, borrowers: Iterable[Stage], times: UnitTimes) -> int:
    """Write `donor_accept` and `donor_return` ops into a donor's list; return the number of remote blocks it holds.

    `borrowers`: stages whose lists may have `peer_offload` ops to it. The ops and tensors that the donor has stay
    unchanged.
    """
    events = [event for borrower in borrowers for event in _events(borrower, donor.index, times)]
    if not events:
        return 0
    mine = times.of(donor).latest
    before: dict[int, list[Op]] = {}
    remote: dict[object, Tensors] = {}
    for event in sorted(events, key=lambda event: event.order):
        op = event.op
        fields = {"block": op.block, **piece_fields(piece_of(op)), "peer": event.borrower}
        key = op.block, piece_of(op)
        if isinstance(op, PeerOffload):
            remote[key] = tuple(_remote(donor, tensor) for tensor in op.reads)
            # Accept a slack before the offload comes, so that it finds its bytes free.
            place = bisect_left(mine, event.time - _SLACK)
            before.setdefault(place, []).append(DonorAccept(**fields, writes=remote[key]))
        else:
            # Give back after all ops within a slack of the reload: no op there reuses the bytes and waits for it.
            place = bisect_right(mine, event.time + _SLACK)
            before.setdefault(place, []).append(DonorReturn(**fields, reads=remote[key]))
    ops: list[Op] = []
    for position, own in enumerate(donor.ops):
        ops += before.get(position, ())
        ops.append(own)
    donor.ops = ops + before.get(len(donor.ops), [])
    return len(remote)


def _events(borrower: Stage, donor: int, times: UnitTimes) -> Iterator[_Event]:
    spans = None
    for position, op in enumerate(borrower.ops):
        if isinstance(op, PeerOffload | PeerReload) and op.peer == donor:
            spans = times.of(borrower) if spans is None else spans
            time = (spans.earliest if isinstance(op, PeerOffload) else spans.latest)[position]
            yield _Event(time, borrower.index, position, op)


def _remote(donor: Stage, tensor: Tensor) -> Tensor:
    name = donor.free_name(f"remote.{tensor.name}")
    return donor.add(Tensor(name, StateKind.REMOTE, tensor.type))

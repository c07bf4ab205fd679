"""Puts a module into given orders: any schedule, as long as its orders do not wait for each other in a circle.

Messages stand where they pass in a run in which every forward, and every half of a backward, takes one unit of time
(`passes/placement/unit_run.py`). That run is one order of the whole program with which the lists of all stages agree, message by message;
so whatever waits for something earlier in its list (for its bytes, say) cannot hang, even if a send ends only with its receive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attrs import define, field

from ratrain.passes.placement.unit_run import Computation, Message, unit_run
from ratrain.passes.placement.work_groups import WorkGroups, split_into_groups
from ratrain.ratrain_ir.module import Level, Stage
from ratrain.ratrain_ir.ops import Op, Payload, Recv, Send
from ratrain.ratrain_ir.topology import Topology

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module
    from ratrain.ratrain_ir.schedules.action import Order


def place_orders(module: Module, orders: Sequence[Order]) -> None:
    """Reorder whole groups of ops by one order a stage; what belongs to the step's end stays there.

    Backwards whose halves an order has apart must have been split before. Raises ValueError where the orders wait for each other in a
    circle.
    """
    topology = module.topology
    placements = [_Placement(stage, topology) for stage in module.stages]
    for event in unit_run(orders, topology.chunk_stages):
        if isinstance(event, Computation):
            ops = placements[event.stage].groups.of(event.action)
            placements[event.stage].ops += [op for op in ops if not isinstance(op, Send | Recv)]
        else:
            placements[event.source].send(event)
            placements[event.destination].receive(event)
    for placement in placements:
        placement.stage.ops = placement.ops + placement.groups.step_end
    module.level = Level.PLACED


_Key = tuple[Payload, int | None, int, int]
"""A message: payload, the chunk that it goes into as it says it, micro-batch, slice."""


@define
class _Placement:
    """Builds the new list of one stage."""

    stage: Stage
    topology: Topology
    groups: WorkGroups = field(init=False)
    sends: dict[_Key, Send] = field(factory=dict)
    recvs: dict[_Key, Recv] = field(factory=dict)
    ops: list[Op] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.groups = split_into_groups(self.stage, self.topology)
        for op in self.stage.ops:
            if isinstance(op, Send):
                self.sends[op.payload, op.chunk, op.micro_batch, op.slice or 0] = op
            elif isinstance(op, Recv):
                self.recvs[op.payload, op.chunk, op.micro_batch, op.slice or 0] = op

    def key(self, message: Message) -> _Key:
        into = message.into if self.topology.has_several_chunks else None
        return message.payload, into, message.micro_batch, message.slice

    def send(self, message: Message) -> None:
        self.ops.append(self.sends[self.key(message)])

    def receive(self, message: Message) -> None:
        self.ops.append(self.recvs[self.key(message)])

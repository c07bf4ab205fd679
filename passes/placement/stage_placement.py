"""Builds the new list of a stage, action by action."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define, field

from ratrain.passes.placement.work_groups import WorkGroups, split_into_groups
from ratrain.ratrain_ir.module import Stage
from ratrain.ratrain_ir.ops.base import Op, Payload
from ratrain.ratrain_ir.ops.messages import Recv, Send
from ratrain.ratrain_ir.topology import Topology

if TYPE_CHECKING:
    from ratrain.ratrain_ir.analysis.unit_run import Message
    from ratrain.ratrain_ir.schedules.action import Action

_Key = tuple[Payload, int | None, int, int]
"""A message: payload, the chunk that it goes into as it says it, micro-batch, slice."""


@define
class StagePlacement:
    """The ops of a stage, taken group by group and message by message; the list is the stage's when it is finished."""

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

    def compute(self, action: Action) -> None:
        """Put the ops that serve an action, but for its messages."""
        self.ops += [op for op in self.groups.of(action) if not isinstance(op, Send | Recv)]

    def send(self, message: Message) -> None:
        """Put the send of a message."""
        self.ops.append(self.sends[self._key(message)])

    def receive(self, message: Message) -> None:
        """Put the receive of a message."""
        self.ops.append(self.recvs[self._key(message)])

    def finish(self) -> None:
        """Give the stage its list; what belongs to the step's end stays there."""
        self.stage.ops = self.ops + self.groups.step_end

    def _key(self, message: Message) -> _Key:
        into = message.into if self.topology.has_several_chunks else None
        return message.payload, into, message.micro_batch, message.slice

"""Builder of a stage's new list, action by action and message by message."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define, field

from ratrain.passes.placement.work_groups import WorkGroups, split_into_groups
from ratrain.ratrain_ir.module import Stage
from ratrain.ratrain_ir.ops.base import Op, Payload
from ratrain.ratrain_ir.ops.messages import Recv, Send
from ratrain.ratrain_ir.topology import Topology

if TYPE_CHECKING:
    from ratrain.ratrain_ir.analysis.unit_run import UnitMessage
    from ratrain.ratrain_ir.schedules.action import Action

_Key = tuple[Payload, int | None, int, int]
"""Key of a message: payload, target chunk (None where stages have one chunk), micro-batch, slice."""


@define
class StagePlacement:
    """Builder of a stage's list from its groups of ops and its messages; `finish` gives the stage the list."""

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
        """Append the ops that serve an action, without its messages."""
        self.ops += [op for op in self.groups.of(action) if not isinstance(op, Send | Recv)]

    def send(self, message: UnitMessage) -> None:
        """Append the send of a message."""
        self.ops.append(self.sends[self._key(message)])

    def receive(self, message: UnitMessage) -> None:
        """Append the receive of a message."""
        self.ops.append(self.recvs[self._key(message)])

    def finish(self) -> None:
        """Give the stage its list, followed by the ops of the step's end."""
        self.stage.ops = self.ops + self.groups.step_end

    def _key(self, message: UnitMessage) -> _Key:
        # Sends and receives name a chunk only where a stage has several: the key must name what they name.
        into = message.into if self.topology.has_several_chunks else None
        return message.payload, into, message.micro_batch, message.slice

"""`place-1f1b`: one-forward-one-backward order of each stage's work.

    F0 F1 F2 B0 B1 B2             becomes, on stage 0 of 2,        F0 F1 B0 F2 B1 B2
    (dataflow: forwards, then backwards)

Stage s of P runs min(P - s - 1, M) warm-up forwards, then alternates one forward and one backward, then runs the
remaining backwards. So at most min(P - s, M) micro-batches are in flight. Any P, M and cuts are allowed. Micro-batches
ascend in both directions, as the order of gradient accumulation demands.

Where a forward is followed by a backward, the gradient is received before the activation is sent, because the next
stage sends the gradient before it receives the activation. So one total order of the whole program agrees with the
lists of all stages, message by message. An op that waits for something earlier in its list (for its bytes, say)
therefore cannot hang, even if a send ends only with its receive.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

from attrs import frozen

from ratrain.passes.pass_base import Decision, Fact, Pass, PassContext
from ratrain.passes.placement.placed_schedule import begin_placing
from ratrain.passes.placement.work_groups import WorkGroups, split_into_groups
from ratrain.ratrain_ir.module import Level, Module
from ratrain.ratrain_ir.ops.messages import Recv, Send
from ratrain.ratrain_ir.schedules.action import ActionKind, Order
from ratrain.ratrain_ir.schedules.named import SCHEDULES

if TYPE_CHECKING:
    from ratrain.ratrain_ir.ops.base import Op


@frozen
class Place1F1BPass(Pass):
    """Put every stage's forwards and backwards into 1F1B order."""

    name: ClassVar[str] = "place-1f1b"
    requires: ClassVar[frozenset[Fact]] = frozenset()
    decides: ClassVar[frozenset[Decision]] = frozenset({Decision.ORDER})

    @property
    def schedule(self) -> str | None:
        """Name of the schedule that this pass places."""
        return "1f1b"

    def run(self, module: Module, context: PassContext) -> None:
        """Reorder whole forward and backward groups of micro-batches; ops of the step's end stay last."""
        begin_placing(module, "1f1b")
        plan = module.plan
        for stage in module.stages:
            groups = split_into_groups(stage, module.topology)
            actions = SCHEDULES["1f1b"].order(module.topology.shape, stage.index)
            stage.ops = _ordered(groups, actions, plan.pp - stage.index - 1)
        module.level = Level.PLACED
        context.statistics["stages"] = plan.pp


def _ordered(groups: WorkGroups, actions: Order, ahead: int) -> list[Op]:
    """Return the groups in the order of the actions; messages that meet between a forward and a backward change places.

    `ahead`: number of micro-batches by which forwards lead backwards in the alternating phase.
    """
    ops: list[Op] = []
    for before, action in pairwise([None, *actions]):
        assert action is not None
        m = action.micro_batch
        group = groups.of(action)
        alternates = (
            before is not None
            and (before.kind, action.kind) == (ActionKind.FORWARD, ActionKind.BACKWARD)
            and before.micro_batch - m == ahead
        )
        # Receive the gradient before sending the activation: the next stage does the reverse (see the module
        # docstring).
        if alternates and type(ops[-1]) is Send and type(group[0]) is Recv:
            ops[-1:] = [group[0], ops[-1]]
            group = group[1:]
        ops.extend(group)
    ops.extend(groups.step_end)
    return ops

"""`place-zb-h1{delay=...}`: 1F1B with split backwards, whose weight halves fill the pipeline's idle time (ZB-H1).

The stage before waits only for the gradient of a stage's input, never for those of its weights. So on every stage but the first, where
nobody waits, the backward of each attention and mlp block becomes two ops:

    %dx, %g +=          = backward        attention.1 m0 (%dy, %x, %saved..., %w)          becomes
    %dx, %pending...    = backward_input  attention.1 m0 (%dy, %x, %saved..., %w)
    %g +=                 backward_weight attention.1 m0 (%dy, %saved..., %pending...)

Input halves take the places that 1F1B has for backwards, so at most min(P - s, M) micro-batches are in flight. Weight halves follow
`delay` micro-batches later, but at most s of them on stage s: at most P micro-batches wait for one half or the other, as many as the
first stage of 1F1B holds. With a forward and two halves of T_F, T_B, T_W seconds, all alike, a step of M >= P micro-batches then loses
(P - 1)(T_F + T_B - T_W) seconds, where 1F1B loses (P - 1)(T_F + T_B + T_W) (Qi et al., "Zero Bubble Pipeline Parallelism", 2023); with
`delay=0` it loses (P - 1)(T_F + T_B).

What a weight half reads lives until then. Where no `delay` is given a stage has the largest that fits with every activation kept,
because recovering activations in every micro-batch costs more than a longer delay saves once. Where not even `delay=0` does, it is taken if it fits
with every activation recovered: gradients still reach the preceding stage sooner. That can lose where micro-batches are many for the number
of stages, each recovering more than before; compare the strategies. Where it does not fit either, backwards stay whole.

Micro-batches ascend in every kind of work, and the halves run the very steps of the whole, so gradients are the same bit for bit.

Messages stand where they pass in a run in which all of these take one unit of time (`passes/placement/unit_run.py`). That run is one order of
the whole program with which the lists of all stages agree, message by message; so whatever waits for something earlier in its list
(for its bytes, say) cannot hang, even if a send ends only with its receive.
"""

from __future__ import annotations

from math import inf
from typing import ClassVar

from attrs import define, field, frozen

from ratrain.passes.memory.trial import Trials
from ratrain.passes.pass_base import Fact, Pass, PassContext
from ratrain.passes.placement.placed_schedule import begin_placing
from ratrain.passes.placement.split_backward import split_backwards
from ratrain.passes.placement.unit_run import Computation, Message, unit_run
from ratrain.passes.placement.work_groups import WorkGroups, split_into_groups
from ratrain.passes.recovery.rewriting import NOTHING, rewritten, same_for_all
from ratrain.ratrain_ir.module import Level, Module, Stage
from ratrain.ratrain_ir.ops import Op, Payload, Recv, Send
from ratrain.ratrain_ir.schedules import Action, ActionKind, schedule_1f1b, schedule_zb_h1


@frozen
class PlaceZbH1Pass(Pass):
    """Put every stage's work into ZB-H1 order, with split backwards."""

    name: ClassVar[str] = "place-zb-h1"
    requires: ClassVar[frozenset[Fact]] = frozenset()
    delay: int | None = field(default=None, metadata={"unit": "micro-batches", "default": "what fits"})
    """Most micro-batches by which the weight halves of a stage follow its input halves; None: as many as fit."""

    def run(self, module: Module, context: PassContext) -> None:
        """Split backwards and reorder whole groups of micro-batches; what belongs to the step's end stays there."""
        begin_placing(module, "zb-h1")
        orders = [self.order(module, stage, context) for stage in module.stages]
        placements = [_Placement(stage) for stage in module.stages]
        for event in unit_run(orders):
            if isinstance(event, Computation):
                placements[event.stage].compute(event.action)
            else:
                placements[event.source].send(event)
                placements[event.destination].receive(event)
        for placement in placements:
            placement.finish()
        module.level = Level.PLACED

    def order(self, module: Module, stage: Stage, context: PassContext) -> list[Action]:
        """The order of a stage, whose backwards are split if it delays weight halves."""
        shape = (module.plan.pp, module.plan.micro_batches, stage.index)
        if stage.index == 0:
            return schedule_zb_h1(*shape)
        split = stage.draft()
        split_backwards(module, split)
        delay = self.delay if self.delay is not None else _largest_delay(split, Trials(module, context))
        if delay is None:
            context.statistics[f"stage {stage.index}"] = "backwards whole: two halves do not fit"
            return schedule_1f1b(*shape)
        stage.tensors, stage.ops = split.tensors, split.ops
        context.statistics[f"stage {stage.index}"] = f"weight halves {min(delay, stage.index)} micro-batches later"
        return schedule_zb_h1(*shape, delay)


def _largest_delay(split: Stage, trials: Trials) -> int | None:
    """The largest delay, up to the stage's index, that fits with every activation kept; else 0 if it fits at all, else None."""
    if not _fits(split, trials, 0, lag=inf):
        full = rewritten(split, same_for_all(NOTHING))
        return 0 if _fits(full, trials, 0, lag=0) else None
    low, high = 0, split.index
    while low < high:
        middle = (low + high + 1) // 2
        if _fits(split, trials, middle, lag=inf):
            low = middle
        else:
            high = middle - 1
    return low


def _fits(split: Stage, trials: Trials, delay: int, *, lag: float) -> bool:
    """Whether a stage fits with a delay, and room for other engines to lag behind.

    Messages stand beside the work they serve, which makes hardly a difference.
    """
    groups = split_into_groups(split)
    plan = trials.module.plan
    actions = schedule_zb_h1(plan.pp, plan.micro_batches, split.index, delay)
    ops = [op for action in actions for op in _work(groups, action)]
    capacity = trials.context.target.capacity(trials.module).left
    return not trials.excess_bytes(split.draft(ops + groups.step_end), lag, capacity)


def _work(groups: WorkGroups, action: Action) -> list[Op]:
    """The ops that serve an action."""
    m = action.micro_batch
    if action.kind is ActionKind.FORWARD:
        return groups.forward[m]
    if action.kind is ActionKind.BACKWARD:
        return groups.whole_backward(m)
    return groups.backward[m] if action.kind is ActionKind.BACKWARD_INPUT else groups.weight.get(m, [])


@define
class _Placement:
    """Builds the new list of one stage."""

    stage: Stage
    groups: WorkGroups = field(init=False)
    sends: dict[tuple[Payload, int], Send] = field(factory=dict)
    recvs: dict[tuple[Payload, int], Recv] = field(factory=dict)
    ops: list[Op] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.groups = split_into_groups(self.stage)
        for op in self.stage.ops:
            if isinstance(op, Send):
                self.sends[op.payload, op.micro_batch] = op
            elif isinstance(op, Recv):
                self.recvs[op.payload, op.micro_batch] = op

    def compute(self, action: Action) -> None:
        """Everything that serves an action, but the messages."""
        self.ops += [op for op in _work(self.groups, action) if not isinstance(op, Send | Recv)]

    def send(self, message: Message) -> None:
        self.ops.append(self.sends[message.payload, message.micro_batch])

    def receive(self, message: Message) -> None:
        self.ops.append(self.recvs[message.payload, message.micro_batch])

    def finish(self) -> None:
        self.stage.ops = self.ops + self.groups.step_end

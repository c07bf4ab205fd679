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
`delay=0` it loses (P - 1)(T_F + T_B). A larger `delay` than min(P, M) - 1 is refused.

What a weight half reads lives until then. Where no `delay` is given a stage has the largest that fits with every activation kept,
because recovering activations in every micro-batch costs more than a longer delay saves once. Where not even `delay=0` does, it is taken if it fits
with every activation recovered: gradients still reach the preceding stage sooner. That can lose where micro-batches are many for the number
of stages, each recovering more than before; compare the strategies. Where it does not fit either, backwards stay whole.

Micro-batches ascend in every kind of work, and the halves run the very steps of the whole, so gradients are the same bit for bit.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, ClassVar

from attrs import field, frozen

from ratrain.passes.memory.trial import Trials
from ratrain.passes.pass_base import Decision, Fact, Idle, Pass, PassContext
from ratrain.passes.placement.place_orders import place_orders
from ratrain.passes.placement.placed_schedule import begin_placing
from ratrain.passes.placement.split_backward import split_backwards
from ratrain.passes.placement.work_groups import split_into_groups
from ratrain.passes.recovery.rewriting import NOTHING, rewritten, same_for_all
from ratrain.ratrain_ir.schedules.one_chunk import schedule_1f1b, schedule_zb_h1

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.ratrain_ir.module import Module, Stage
    from ratrain.ratrain_ir.schedules.action import Action


@frozen
class PlaceZbH1Pass(Pass):
    """Put every stage's work into ZB-H1 order, with split backwards."""

    name: ClassVar[str] = "place-zb-h1"
    requires: ClassVar[frozenset[Fact]] = frozenset()
    decides: ClassVar[frozenset[Decision]] = frozenset({Decision.ORDER})
    delay: int | None = field(default=None, metadata={"unit": "micro-batches", "default": "what fits"})
    """Most micro-batches by which the weight halves of a stage follow its input halves; None: as many as fit."""

    @property
    def schedule(self) -> str | None:
        """Name of the schedule that this pass places."""
        return "zb-h1"

    def idle(self, plan: Plan, model: ModelConfig) -> Iterator[Idle]:
        """A delay of more micro-batches than any stage's weight halves can follow by."""
        del model
        most = min(plan.pp, plan.micro_batches) - 1
        if plan.pp == 1:
            yield Idle("delay", "the backwards of the first stage stay whole, and it is the only one", "leave it out")
        elif self.delay is not None and self.delay > most:
            why = f"with pp = {plan.pp} and {plan.micro_batches} micro-batches, weight halves follow by at most {most}"
            yield Idle("delay", f"{self.delay} is as {most}: {why}", f"write delay={most}, or leave it out")

    def run(self, module: Module, context: PassContext) -> None:
        """Split backwards and reorder whole groups of micro-batches; what belongs to the step's end stays there."""
        begin_placing(module, "zb-h1")
        orders = [self.order(module, stage, context) for stage in module.stages]
        place_orders(module, orders)

    def order(self, module: Module, stage: Stage, context: PassContext) -> list[Action]:
        """The order of a stage, whose backwards are split if it delays weight halves."""
        shape = module.plan.shape
        if stage.index == 0:
            return schedule_zb_h1(shape, stage.index)
        split = stage.draft()
        split_backwards(module, split)
        delay = self.delay if self.delay is not None else _largest_delay(split, Trials(module, context))
        if delay is None:
            context.statistics[f"stage {stage.index}"] = "backwards whole: two halves do not fit"
            return schedule_1f1b(shape, stage.index)
        stage.tensors, stage.ops = split.tensors, split.ops
        context.statistics[f"stage {stage.index}"] = f"weight halves {min(delay, stage.index)} micro-batches later"
        return schedule_zb_h1(shape, stage.index, delay)


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
    groups = split_into_groups(split, trials.module.topology)
    actions = schedule_zb_h1(trials.module.plan.shape, split.index, delay)
    ops = [op for action in actions for op in groups.of(action)]
    capacity = trials.context.target.capacity(trials.module).left
    return trials.fits(split.draft(ops + groups.step_end), lag, capacity)

"""`place-zb-h1{delay=...}`: 1F1B with split backwards, whose weight halves fill the pipeline's idle time (ZB-H1).

    %dx, %g +=          = backward        attention.1 m0 (%dy, %x, %saved..., %w)          becomes
    %dx, %pending...    = backward_input  attention.1 m0 (%dy, %x, %saved..., %w)
    %g +=                 backward_weight attention.1 m0 (%dy, %saved..., %pending...)

The preceding stage waits only for the gradient of a stage's input, never for gradients of its weights. So the backward
of each attention and mlp block becomes two ops, on every stage but the first, which nobody waits for.

Input halves take the places that 1F1B has for backwards, so at most min(P - s, M) micro-batches are in flight. Weight
halves follow `delay` micro-batches later, but at most s of them on stage s. So at most P micro-batches wait for one
half or the other, as many as the first stage of 1F1B holds. With a forward and two halves of T_F, T_B, T_W seconds,
equal on all stages, a step of M >= P micro-batches loses (P - 1)(T_F + T_B - T_W) seconds, where 1F1B loses (P - 1)(T_F
+ T_B + T_W) (Qi et al., "Zero Bubble Pipeline Parallelism", 2023). With `delay=0` it loses (P - 1)(T_F + T_B). A
`delay` larger than min(P, M) - 1 is refused.

The operands of a weight half live until it runs. Without a given `delay`, each stage takes the largest one that fits
with every activation kept: recomputing activations in every micro-batch costs more than a longer delay saves once. If
not even `delay=0` fits so, it is taken if it fits with every activation recomputed, because gradients still reach the
preceding stage sooner. That can lose where each of many micro-batches recomputes more than before; compare the
strategies. If it does not fit either, backwards stay whole.

Micro-batches ascend in every kind of work, and the two halves do the same arithmetic as the whole, so gradients have
the same bits.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, ClassVar

from attrs import field, frozen

from ratrain.passes.pass_base import Decision, Fact, Idle, Pass, PassContext
from ratrain.passes.placement.place_orders import place_orders
from ratrain.passes.placement.placed_schedule import begin_placing
from ratrain.passes.placement.split_backward import split_backwards
from ratrain.passes.placement.work_groups import split_into_groups
from ratrain.passes.recovery.layer_choice import NOTHING, same_for_all
from ratrain.passes.recovery.rewriting import rewritten
from ratrain.passes.trial.trial import Trials
from ratrain.ratrain_ir.schedules.one_chunk import schedule_1f1b, schedule_zb_h1
from ratrain.ratrain_ir.support.quantities import number_of

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
        """Yield `delay` where it is larger than any stage can use, or where there is one stage."""
        del model
        most = min(plan.pp, plan.micro_batches) - 1
        if plan.pp == 1:
            yield Idle("delay", "the backwards of the first stage stay whole, and it is the only one", "leave it out")
        elif self.delay is not None and self.delay > most:
            why = f"with pp = {plan.pp} and {plan.micro_batches} micro-batches, weight halves follow by at most {most}"
            yield Idle("delay", f"{self.delay} is as {most}: {why}", f"write delay={most}, or leave it out")

    def run(self, module: Module, context: PassContext) -> None:
        """Split backwards and reorder whole groups of micro-batches; ops of the step's end stay last."""
        begin_placing(module, "zb-h1")
        orders = [self.order(module, stage, context) for stage in module.stages]
        place_orders(module, orders)

    def order(self, module: Module, stage: Stage, context: PassContext) -> list[Action]:
        """Return the order of a stage, and split its backwards in place.

        Backwards stay whole on the first stage, and where the halves do not fit.
        """
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
        context.statistics[f"stage {stage.index}"] = (
            f"weight halves {number_of(min(delay, stage.index), 'micro-batch')} later"
        )
        return schedule_zb_h1(shape, stage.index, delay)


def _largest_delay(split: Stage, trials: Trials) -> int | None:
    """Return the largest delay, up to the stage's index, that fits with every activation kept.

    If none does, return 0 if that fits with everything recomputed, else None.
    """
    if not _fits(split, trials, 0, lag=inf):
        full = rewritten(split, same_for_all(NOTHING))
        return 0 if _fits(full, trials, 0, lag=0) else None
    # A longer delay never takes less memory, so bisect. The invariant: `low` fits.
    low, high = 0, split.index
    while low < high:
        middle = (low + high + 1) // 2
        if _fits(split, trials, middle, lag=inf):
            low = middle
        else:
            high = middle - 1
    return low


def _fits(split: Stage, trials: Trials, delay: int, *, lag: float) -> bool:
    """Tell whether a stage fits the capacity with a delay, and with room for a lag of `lag` seconds.

    Messages stand next to the work that they serve; their final places make hardly a difference.
    """
    groups = split_into_groups(split, trials.module.topology)
    actions = schedule_zb_h1(trials.module.plan.shape, split.index, delay)
    ops = [op for action in actions for op in groups.of(action)]
    capacity = trials.context.target.capacity(trials.module).left
    return trials.fits(split.draft(ops + groups.step_end), lag, capacity)

"""Pipelines that are tried for one plan: the strategy's own, and the same with other options of its passes.

Buckets, the order of updates, how far ahead views are gathered and what is recovered are chosen by `joint-order` itself. What tensor peers
exchange is hidden by `overlap-tensor`, which a strategy that decides with `joint-order` has for plans of several. A pipeline without
`joint-order`, as a baseline has it, is what it is: only its plan is tuned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from ratrain.passes.pipeline_text import parse_pipeline, pipeline_text
from ratrain.passes.placement.overlap_tensor import OverlapTensorPass
from ratrain.passes.recovery.recompute import NOWHERE, RecomputePass
from ratrain.passes.state.joint_order import JointOrderPass
from ratrain.passes.state.offload_state import OffloadStatePass
from ratrain.ratrain_ir.model.blocks import gathers_layers_within_step, shares_rows
from ratrain.ratrainc.choices.strategies import hiding_exchanges

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ratrain.passes.pass_base import Pass
    from ratrain.ratrain_ir.config.plan import Plan


def recompute_policy(pipeline: str) -> str:
    """What recovers in a pipeline; `none` where nothing does."""
    policies = [p.policy for p in parse_pipeline(pipeline) if isinstance(p, RecomputePass | JointOrderPass)]
    return policies[0] if policies else "none"


def may_keep_gathered(pipeline: str) -> bool:
    """Whether a pipeline may keep what tensor peers gathered for a forward for its backward."""
    recovering = (p for p in parse_pipeline(pipeline) if isinstance(p, RecomputePass | JointOrderPass))
    return any(p.policy == "auto" and p.gathered == "auto" for p in recovering)


def pipeline_for(strategy_passes: str, plan: Plan, *, least_bytes: bool = False) -> str:
    """A strategy's pipeline for a plan: with `overlap-tensor` before `joint-order` where there are tensor peers.

    With `least_bytes` what recovers as much as is needed recovers all it can, and what moves as much state as pays moves all.
    """
    if least_bytes:
        strategy_passes = pipeline_text([p for item in parse_pipeline(strategy_passes) for p in _of_least_bytes(item)])
    return hiding_exchanges(strategy_passes, plan.tp)


def _of_least_bytes(item: Pass) -> Iterator[Pass]:
    """A pass that chooses what to recover, made to recover everything, right where it is needed; behind one that moves all state it might move."""
    if not isinstance(item, RecomputePass | JointOrderPass) or item.policy != "auto":
        yield item
        return
    item = attrs.evolve(item, policy="full", placement="inline", store=NOWHERE)
    if isinstance(item, JointOrderPass) and item.offload != NOWHERE:
        yield OffloadStatePass(item.offload)
        item = attrs.evolve(item, offload=NOWHERE)
    yield item


def variants(strategy_passes: str, plan: Plan) -> list[str]:
    """Other settings than that of `pipeline_for`: storing too, the strategy's own, and with recovery inline where it may stand forward-side.

    Only those that make a difference.
    """
    first = pipeline_for(strategy_passes, plan)
    own = dict.fromkeys((first, strategy_passes))
    others = (pipeline for each in own for pipeline in (each, *_inline(each, plan)) if pipeline != first)
    return [*storing(first), *others]


def storing(pipeline: str) -> list[str]:
    """A pipeline that may offload state, made one that may store activations in the same memory too; nothing where there is no such."""
    passes = parse_pipeline(pipeline)
    if not any(isinstance(p, JointOrderPass) and p.offload != NOWHERE and p.policy == "auto" for p in passes):
        return []
    stored = [attrs.evolve(p, store=p.offload) if isinstance(p, JointOrderPass) else p for p in passes]
    return [pipeline_text(stored)]


def trials_of(pipeline: str) -> float:
    """About how many times as long as without these a pipeline takes for what it tries of exchanges and in another memory."""
    factor = 1.0
    for item in parse_pipeline(pipeline):
        if isinstance(item, OverlapTensorPass):
            factor *= _OVERLAPPING
        if isinstance(item, JointOrderPass):
            factor *= (_OFFLOADING if item.offload != NOWHERE else 1.0) * (_STORING if item.store != NOWHERE else 1.0)
    return factor


_OVERLAPPING, _OFFLOADING, _STORING = 1.7, 4.0, 5.0
"""Measured on pipelines of 3 or 4 stages: `overlap-tensor` before `joint-order`, that with `offload`, and with `store` beside it."""


def _inline(pipeline: str, plan: Plan) -> Iterator[str]:
    """The pipeline with recovery inline, where that is another order."""
    # gathered within the step, the view that a recovery reads comes only for its backward, and so does the input of which peers have rows
    waits = plan.pp > 1 and not gathers_layers_within_step(plan) and not shares_rows(plan)
    passes = parse_pipeline(pipeline)
    if waits and any(isinstance(p, JointOrderPass) and p.placement == "forward-side" for p in passes):
        inline = [attrs.evolve(p, placement="inline") if isinstance(p, JointOrderPass) else p for p in passes]
        yield pipeline_text(inline)

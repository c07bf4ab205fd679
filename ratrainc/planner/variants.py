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
from ratrain.passes.recovery.recompute import RecomputePass
from ratrain.passes.state.joint_order import JointOrderPass
from ratrain.ratrain_ir.blocks import gathers_layers_within_step, shares_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ratrain.passes.pass_base import Pass
    from ratrain.ratrain_ir.frontend.plan import Plan


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

    With `least_bytes` what recovers as much as is needed recovers all it can.
    """
    if least_bytes:
        strategy_passes = pipeline_text([_recovering_all(item) for item in parse_pipeline(strategy_passes)])
    passes = parse_pipeline(strategy_passes)
    at = next((at for at, p in enumerate(passes) if isinstance(p, JointOrderPass)), None)
    if plan.tp == 1 or at is None or any(isinstance(p, OverlapTensorPass) for p in passes):
        return strategy_passes
    return pipeline_text([*passes[:at], OverlapTensorPass(), *passes[at:]])


def _recovering_all(item: Pass) -> Pass:
    """A pass that chooses what to recover, made to recover everything, right where it is needed."""
    if not isinstance(item, RecomputePass | JointOrderPass) or item.policy != "auto":
        return item
    return attrs.evolve(item, policy="full", placement="inline")


def variants(strategy_passes: str, plan: Plan) -> list[str]:
    """Other settings than that of `pipeline_for`: the strategy's own, and with recovery inline where it may stand forward-side.

    Only those that make a difference.
    """
    first = pipeline_for(strategy_passes, plan)
    own = dict.fromkeys((first, strategy_passes))
    return [pipeline for each in own for pipeline in (each, *_inline(each, plan)) if pipeline != first]


def _inline(pipeline: str, plan: Plan) -> Iterator[str]:
    """The pipeline with recovery inline, where that is another order."""
    # gathered within the step, the view that a recovery reads comes only for its backward, and so does the input of which peers have rows
    waits = plan.pp > 1 and not gathers_layers_within_step(plan) and not shares_rows(plan)
    passes = parse_pipeline(pipeline)
    if waits and any(isinstance(p, JointOrderPass) and p.placement == "forward-side" for p in passes):
        inline = [attrs.evolve(p, placement="inline") if isinstance(p, JointOrderPass) else p for p in passes]
        yield pipeline_text(inline)

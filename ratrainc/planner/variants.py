"""Pipelines that are tried for one plan: the strategy's own, and the same with other options of its passes.

Buckets, the order of updates, how far ahead views are gathered and what is recovered are chosen by `joint-order` itself.
"""

from __future__ import annotations

import attrs

from ratrain.passes.pipeline_text import parse_pipeline, pipeline_text
from ratrain.passes.recovery.recompute import RecomputePass
from ratrain.passes.state.joint_order import JointOrderPass


def recompute_policy(pipeline: str) -> str:
    """What recovers in a pipeline; `none` where nothing does."""
    policies = [p.policy for p in parse_pipeline(pipeline) if isinstance(p, RecomputePass | JointOrderPass)]
    return policies[0] if policies else "none"


def variants(pipeline: str, zero: int, pp: int) -> list[str]:
    """Other settings of a pipeline: recovery inline where it may stand forward-side, and where that makes a difference.

    A pipeline without `joint-order`, as a baseline has it, is what it is: only its plan is tuned.
    """
    passes = parse_pipeline(pipeline)
    waits = pp > 1 and zero != 3  # with ZeRO 3 the view a recovery reads is gathered only for its backward
    if not waits or not any(isinstance(p, JointOrderPass) and p.placement == "forward-side" for p in passes):
        return []
    inline = [attrs.evolve(p, placement="inline") if isinstance(p, JointOrderPass) else p for p in passes]
    return [pipeline_text(inline)]

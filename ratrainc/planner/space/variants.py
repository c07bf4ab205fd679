"""Pipelines that are tried for one plan: the strategy's own, and the same with other options of its passes.

`joint-order` itself chooses buckets, the order of updates, the prefetch distance of views and what to recover.
`overlap-tensor` hides the exchanges of tensor-parallel and expert ranks; a strategy that decides with `joint-order`
gets it for plans with such ranks. A pipeline without `joint-order`, as baselines have it, has no variants: only its
plan is tuned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from ratrain.passes.pipeline_text import parse_pipeline, pipeline_text
from ratrain.passes.placement.overlap_tensor import OverlapTensorPass
from ratrain.passes.recovery.recompute import NOWHERE, RecomputePass
from ratrain.passes.recovery.recompute_placement import why_inline
from ratrain.passes.state.joint_order import JointOrderPass
from ratrain.passes.state.offload_state import OffloadStatePass
from ratrain.ratrainc.choices.strategies import hiding_exchanges

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ratrain.passes.pass_base import Pass
    from ratrain.ratrain_ir.config.plan import Plan


def least_bytes_passes(strategy_passes: str) -> str:
    """Return a pipeline that recovers all it can, not only what is needed, and moves all state, not what pays."""
    return pipeline_text([p for item in parse_pipeline(strategy_passes) for p in _of_least_bytes(item)])


def _of_least_bytes(item: Pass) -> Iterator[Pass]:
    """Make a pass recover everything, in place, if it chooses; a pass that moves all state goes before it."""
    if not isinstance(item, RecomputePass | JointOrderPass) or item.policy != "auto":
        yield item
        return
    item = attrs.evolve(item, policy="full", placement="inline", store=NOWHERE)
    if isinstance(item, JointOrderPass) and item.offload != NOWHERE:
        yield OffloadStatePass(item.offload)
        item = attrs.evolve(item, offload=NOWHERE)
    yield item


def leanest(pipeline: str) -> str:
    """Return the pipeline that needs the fewest bytes, and takes little time to compile.

    Everything is recovered in place and nothing is moved ahead of its use; exchanges are not hidden. A pipeline that
    leaves `joint-order` no choice is returned as it is.
    """
    passes = parse_pipeline(pipeline)
    if not any(isinstance(item, JointOrderPass) and item.policy == "auto" for item in passes):
        return pipeline
    made: list[Pass] = []
    for item in passes:
        if isinstance(item, JointOrderPass):
            made += [OffloadStatePass(item.offload)] if item.offload != NOWHERE else []
            made.append(RecomputePass(policy="full", placement="inline"))
        elif not isinstance(item, OverlapTensorPass):
            made.append(item)
    return pipeline_text(made)


def variants(strategy_passes: str, plan: Plan) -> list[str]:
    """Return other pipelines worth trying: storing activations, the strategy's own, and with recovery inline.

    Those that are the same as the usual pipeline of the plan, or that cannot differ from another, are left out.
    """
    first = hiding_exchanges(strategy_passes, plan)
    own = dict.fromkeys((first, strategy_passes))
    others = (pipeline for each in own for pipeline in (each, *_inline(each, plan)) if pipeline != first)
    return [*storing(first), *others]


def storing(pipeline: str) -> list[str]:
    """Return the pipeline that may store activations where it may offload state; empty if it offloads none."""
    passes = parse_pipeline(pipeline)
    if not any(isinstance(p, JointOrderPass) and p.offload != NOWHERE and p.policy == "auto" for p in passes):
        return []
    stored = [attrs.evolve(p, store=p.offload) if isinstance(p, JointOrderPass) else p for p in passes]
    return [pipeline_text(stored)]


def trials_of(pipeline: str) -> float:
    """Estimate the factor by which a pipeline compiles longer because it tries exchanges and another memory."""
    factor = 1.0
    for item in parse_pipeline(pipeline):
        if isinstance(item, OverlapTensorPass):
            factor *= _OVERLAPPING
        if isinstance(item, JointOrderPass):
            factor *= (_OFFLOADING if item.offload != NOWHERE else 1.0) * (_STORING if item.store != NOWHERE else 1.0)
    return factor


_OVERLAPPING, _OFFLOADING, _STORING = 1.7, 4.0, 5.0
"""Measured on pipelines of 3 or 4 stages: `overlap-tensor` before `joint-order`, that with `offload`, and with `store`
too."""


def _inline(pipeline: str, plan: Plan) -> Iterator[str]:
    """Yield the pipeline with recovery inline, if that is another order."""
    passes = parse_pipeline(pipeline)
    if not why_inline(plan) and any(isinstance(p, JointOrderPass) and p.placement == "forward-side" for p in passes):
        inline = [attrs.evolve(p, placement="inline") if isinstance(p, JointOrderPass) else p for p in passes]
        yield pipeline_text(inline)

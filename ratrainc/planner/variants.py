"""Pipelines that are tried for one plan: the strategy's own, and the same with other options of its passes."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, product
from typing import TYPE_CHECKING

import attrs

from passes.bucket_grad_sync import BucketGradSyncPass
from passes.insert_prefetch import InsertPrefetchPass
from passes.joint_order import JointOrderPass
from passes.pipeline_text import parse_pipeline, pipeline_text
from passes.recompute import RecomputePass
from passes.schedule_update import ScheduleUpdatePass

if TYPE_CHECKING:
    from passes.pass_base import Pass

MIB = 1 << 20
_BUCKETS = (16 * MIB, 64 * MIB, 256 * MIB)
_DEPTHS = (1, 2, 4)


def recompute_policy(pipeline: str) -> str:
    """What recovers in a pipeline; `none` where nothing does."""
    policies = [p.policy for p in parse_pipeline(pipeline) if isinstance(p, RecomputePass | JointOrderPass)]
    return policies[0] if policies else "none"


def schedule_of(pipeline: str) -> str:
    """The schedule a pipeline places."""
    return next(
        (p.name.removeprefix("place-") for p in parse_pipeline(pipeline) if p.name.startswith("place-")), "1f1b"
    )


def is_tunable(pipeline: str) -> bool:
    """Whether a strategy leaves options of its passes to be chosen; a baseline is what it is, and only its plan is tuned."""
    return any(isinstance(item, JointOrderPass) for item in parse_pipeline(pipeline))


def variants(pipeline: str, zero: int, pp: int, *, every: bool = False) -> list[str]:
    """Other settings of a pipeline's options: one changed, or `every` combination; those that change nothing are left out."""
    passes = parse_pipeline(pipeline)
    choices = [[[item], *_others(item, zero, pp)] for item in passes]
    if every:
        found: Iterable[Iterable[list[Pass]]] = product(*choices)
    else:
        plain = [[item] for item in passes]
        found = ((*plain[:at], other, *plain[at + 1 :]) for at, others in enumerate(choices) for other in others[1:])
    own = pipeline_text(passes)
    return [text for text in dict.fromkeys(pipeline_text([*chain(*chosen)]) for chosen in found) if text != own]


def _others(item: Pass, zero: int, pp: int) -> list[list[Pass]]:
    """What else may stand in a pass's place: one recovers forward-side only where stages wait, and prefetches more than one view only with ZeRO 3."""
    found: list[list[Pass]] = []
    if isinstance(item, BucketGradSyncPass) and item.unit != "stage":
        found += [[attrs.evolve(item, bytes=value)] for value in _BUCKETS if value != item.bytes]
    if isinstance(item, InsertPrefetchPass) and zero == 3:
        found += [[attrs.evolve(item, depth_blocks=value)] for value in _DEPTHS if value != item.depth_blocks]
    if isinstance(item, RecomputePass | JointOrderPass) and pp > 1 and item.placement == "forward-side":
        found.append([attrs.evolve(item, placement="inline")])
    if isinstance(item, JointOrderPass) and zero == 3 and (item.reduction, item.state) == ("buckets", "ordered"):
        recovery = RecomputePass(item.policy, item.budget, item.placement)
        found += [
            [BucketGradSyncPass(), ScheduleUpdatePass(), InsertPrefetchPass(depth_blocks=depth), recovery]
            for depth in _DEPTHS
            if depth > 1
        ]
    return found

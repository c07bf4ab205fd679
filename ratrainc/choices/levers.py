"""Levers: single changes of a plan or pipeline that free bytes, each tried by compiling, placing and simulating it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import chain, combinations, pairwise
from typing import TYPE_CHECKING

import attrs
from attrs import frozen

from ratrain.passes.pipeline_text import parse_pipeline, pipeline_text
from ratrain.passes.placement.overlap_tensor import OverlapTensorPass
from ratrain.passes.recovery.keep_gathered import may_keep
from ratrain.passes.recovery.recompute import RecomputePass
from ratrain.passes.state.bucket_grad_sync import BucketGradSyncPass
from ratrain.passes.state.joint_order import JointOrderPass
from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrain_ir.config.plan_keys import OF_KEYS
from ratrain.ratrain_ir.config.plan_text import check_plan
from ratrain.ratrain_ir.model.layer_cuts import balance_cuts
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.support.time_limit import OutOfTime, time_limit
from ratrain.ratrainc.choices.timed_plan import RefusedPlan, time_plan
from ratrain.targets.machine.machine import Machine

if TYPE_CHECKING:
    from ratrain.passes.pass_base import Pass


@frozen
class CompileSetting:
    """The inputs of a compilation."""

    model: ModelConfig
    plan: Plan
    pipeline: str
    machine: Machine


@frozen
class Lever:
    """One change, with its name and its function."""

    name: str
    apply: Callable[[CompileSetting], CompileSetting | None]
    """returns the changed setting, or None if the change does not apply"""


@frozen
class LeverOutcome:
    """The result of a setting. `step_seconds` is None if it does not fit."""

    name: str
    setting: CompileSetting
    peak_bytes: tuple[int, ...]
    step_seconds: float | None
    exposed_tail_seconds: float | None = None
    """longest exposed tail of any stage"""

    @property
    def fits(self) -> bool:
        """True if every stage is placed under the capacity."""
        return self.step_seconds is not None


def try_setting(setting: CompileSetting, name: str) -> LeverOutcome | None:
    """Compile, place and simulate a setting.

    Return None if the plan is not allowed, or a pass refuses it for another reason than bytes.
    """
    try:
        check_plan(setting.plan, setting.model)
    except DiagnosticError:
        return None
    timed = time_plan(setting.model, setting.plan, setting.pipeline, setting.machine)
    if isinstance(timed, RefusedPlan):
        if not timed.is_for_bytes:
            return None
        return LeverOutcome(name, setting, timed.peak_bytes, None)
    return LeverOutcome(name, setting, timed.peak_bytes, timed.figures.step_seconds, timed.exposed_tail_seconds)


def levers_of(heaviest: int) -> list[Lever]:
    """Return the changes worth trying if the stage `heaviest` has the highest peak."""
    return [
        Lever("recompute{policy=auto}", lambda s: _with_policy(s, "auto")),
        Lever("recompute{policy=full}", lambda s: _with_policy(s, "full")),
        Lever("recompute{gathered=again}", _exchanging_again),
        Lever("without overlap-tensor", _without_overlap),
        Lever("one layer from the heaviest stage to the next", lambda s: _move_layer(s, heaviest, 1)),
        Lever("one layer from the heaviest stage to the one before", lambda s: _move_layer(s, heaviest, -1)),
        Lever("half the micro_batch_size, twice the micro_batches", _smaller_micro_batch),
        Lever("half the head_chunk", _smaller_head_chunk),
        Lever("half the mlp_chunk", _smaller_mlp_chunk),
        Lever('attention = "scores-recomputed"', lambda s: _with_attention(s, "scores-recomputed", "scores-kept")),
        Lever('attention = "fused"', lambda s: _with_attention(s, "fused", "scores-kept", "scores-recomputed")),
        Lever('logits = "chunked"', _with_chunked_logits),
        Lever('context_exchange = "keys"', _with_keys),
        Lever("twice the context_groups", _more_groups),
        Lever("twice the ep", _more_expert_ranks),
        Lever("zero = 1", lambda s: _with_zero(s, 1, "last")),
        Lever('zero = 2, reduce = "each-micro-batch"', lambda s: _with_zero(s, 2, "each-micro-batch")),
        Lever("a quarter of the bucket bytes", _smaller_buckets),
        Lever("twice the stages, half the replicas", _more_stages),
    ]


def outcomes(
    setting: CompileSetting,
    heaviest: int,
    seconds: float,
    *,
    tick: Callable[[str], None] = lambda _name: None,
) -> Iterator[LeverOutcome]:
    """Try every lever alone, then every two together, until `seconds` have passed.

    Yield the outcome of each setting that is allowed, whether it fits or not; `tick` hears of each before.
    """
    deadline = time.monotonic() + seconds
    for name, changed in changes(setting, heaviest, together=2):
        left = deadline - time.monotonic()
        if left <= 0:
            return
        tick(name)
        try:
            with time_limit(left):
                outcome = try_setting(changed, name)
        except OutOfTime:
            return
        if outcome is not None:
            yield outcome


def changes(setting: CompileSetting, heaviest: int, *, together: int = 1) -> Iterator[tuple[str, CompileSetting]]:
    """Yield (names, setting) for every distinct change by up to `together` levers; single levers come first."""
    made = {(setting.plan, setting.pipeline)}
    levers = levers_of(heaviest)
    for chosen in chain.from_iterable(combinations(levers, count) for count in range(1, together + 1)):
        changed: CompileSetting | None = setting
        for lever in chosen:
            changed = lever.apply(changed) if changed is not None else None
        if changed is not None and (changed.plan, changed.pipeline) not in made:
            made.add((changed.plan, changed.pipeline))
            yield " and ".join(lever.name for lever in chosen), changed


def _replace_pass(
    setting: CompileSetting, names: tuple[str, ...], change: Callable[[Pass], Pass]
) -> CompileSetting | None:
    passes = parse_pipeline(setting.pipeline)
    changed = [change(item) if item.name in names else item for item in passes]
    text = pipeline_text(changed)
    return None if text == setting.pipeline else attrs.evolve(setting, pipeline=text)


def _with_policy(setting: CompileSetting, policy: str) -> CompileSetting | None:
    def with_policy(item: Pass) -> Pass:
        assert isinstance(item, JointOrderPass | RecomputePass)
        gathered = item.gathered if policy == "auto" else "auto"  # the other policies have no use for a choice
        return attrs.evolve(item, policy=policy, gathered=gathered)

    return _replace_pass(setting, ("recompute", "joint-order"), with_policy)


def _exchanging_again(setting: CompileSetting) -> CompileSetting | None:
    """Keep nothing that ranks exchange for backwards."""

    def again(item: Pass) -> Pass:
        assert isinstance(item, JointOrderPass | RecomputePass)
        return attrs.evolve(item, gathered="again") if item.policy == "auto" else item

    return _replace_pass(setting, ("recompute", "joint-order"), again) if may_keep(setting.plan) else None


def _without_overlap(setting: CompileSetting) -> CompileSetting | None:
    passes = [item for item in parse_pipeline(setting.pipeline) if not isinstance(item, OverlapTensorPass)]
    text = pipeline_text(passes)
    return None if text == setting.pipeline else attrs.evolve(setting, pipeline=text)


def _smaller_buckets(setting: CompileSetting) -> CompileSetting | None:
    default = BucketGradSyncPass().bytes
    assert isinstance(default, int)

    def quarter(item: Pass) -> Pass:
        if isinstance(item, JointOrderPass):
            if item.reduction != "buckets":
                return item
            return attrs.evolve(item, bucket_bytes=max(1, min(default, item.bucket_bytes) // 4))
        assert isinstance(item, BucketGradSyncPass)
        if item.unit == "stage":
            return item
        return attrs.evolve(item, bytes=max(1, (item.bytes if isinstance(item.bytes, int) else default) // 4))

    return _replace_pass(setting, ("bucket-grad-sync", "joint-order"), quarter)


def _with_keys(setting: CompileSetting) -> CompileSetting | None:
    """Let context ranks exchange keys: of heads they keep what these took and made, whatever is recomputed."""
    if not setting.plan.exchanges_heads:
        return None
    return attrs.evolve(setting, plan=attrs.evolve(setting.plan, context_exchange=OF_KEYS))


def _more_groups(setting: CompileSetting) -> CompileSetting | None:
    """Let context ranks gather the keys of half as many heads at a time; the heads' output is then always kept."""
    if not setting.plan.exchanges_keys:
        return None
    return attrs.evolve(setting, plan=attrs.evolve(setting.plan, context_groups=2 * setting.plan.context_groups))


def _more_expert_ranks(setting: CompileSetting) -> CompileSetting | None:
    """Let twice as many replicas share out the experts of a layer."""
    if setting.model.experts is None:
        return None
    return attrs.evolve(setting, plan=attrs.evolve(setting.plan, ep=2 * setting.plan.ep))


def _move_layer(setting: CompileSetting, stage: int, step: int) -> CompileSetting | None:
    """Move a layer of the stage's longest chunk to the next (`step` 1) or previous (-1) chunk.

    Return None if there is no such chunk, or the same stage has it.
    """
    plan, chunk_stages = setting.plan, setting.plan.shape.chunk_stages
    source = max(plan.shape.chunks_of(stage), key=lambda chunk: len(plan.chunk_layers(chunk, setting.model)))
    target = source + step
    if not 0 <= target < len(chunk_stages) or chunk_stages[target] == stage:
        return None
    cuts = list(plan.cuts)
    for number, neighbours in enumerate(pairwise(plan.shape.chunk_stages)):
        if neighbours in ((source, target), (target, source)):
            cuts[number] += -1 if neighbours[0] == source else 1
            return attrs.evolve(setting, plan=attrs.evolve(plan, cuts=tuple(cuts)))
    return None


def _smaller_micro_batch(setting: CompileSetting) -> CompileSetting | None:
    plan = setting.plan
    if plan.micro_batch_size % 2:
        return None
    changed = attrs.evolve(plan, micro_batch_size=plan.micro_batch_size // 2, micro_batches=plan.micro_batches * 2)
    return attrs.evolve(setting, plan=changed)


def _with_attention(setting: CompileSetting, attention: str, *instead_of: str) -> CompileSetting | None:
    if setting.plan.attention not in instead_of:
        return None
    return attrs.evolve(setting, plan=attrs.evolve(setting.plan, attention=attention))


def _with_chunked_logits(setting: CompileSetting) -> CompileSetting | None:
    plan = setting.plan
    return attrs.evolve(setting, plan=attrs.evolve(plan, logits="chunked")) if plan.holds_logits else None


def _smaller_head_chunk(setting: CompileSetting) -> CompileSetting | None:
    if setting.plan.holds_logits:
        return None
    rows = min(setting.plan.head_chunk, setting.plan.most_rows)
    return attrs.evolve(setting, plan=attrs.evolve(setting.plan, head_chunk=rows // 2)) if rows > 1 else None


def _smaller_mlp_chunk(setting: CompileSetting) -> CompileSetting | None:
    rows = setting.plan.most_rows
    chunk = min(setting.plan.mlp_chunk or rows, rows)
    return attrs.evolve(setting, plan=attrs.evolve(setting.plan, mlp_chunk=-(-chunk // 2))) if chunk > 1 else None


def _with_zero(setting: CompileSetting, zero: int, reduce: str) -> CompileSetting | None:
    plan = setting.plan
    if plan.dp == 1 or (plan.zero, plan.reduce) >= (zero, reduce) or plan.reduce == "each-micro-batch":
        return None
    return attrs.evolve(setting, plan=attrs.evolve(plan, zero=zero, reduce=reduce))


def _more_stages(setting: CompileSetting) -> CompileSetting | None:
    plan = setting.plan
    count = plan.pp * 2 * plan.chunks
    if plan.dp % 2 or count > setting.model.layers:
        return None
    cuts = balance_cuts(setting.model, count, plan.seq_len, plan.training)
    halved = plan.reshaped(dp=plan.dp // 2, micro_batches=plan.micro_batches * 2)
    more = attrs.evolve(
        halved, pp=plan.pp * 2, cuts=cuts, mapping=None
    )  # tiles of the old shape may not make up the new one
    return attrs.evolve(setting, plan=more)

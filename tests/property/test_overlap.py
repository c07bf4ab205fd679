"""Bytes that other engines still work on: lengthened intervals keep every op from waiting for them, within a capacity."""

from __future__ import annotations

from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain.passes.manager import PassManager
from ratrain.passes.pass_base import PassContext
from ratrain.passes.trial.list_times import ListTimes, OpSeconds, TimedRows
from ratrain.passes.trial.overlap import Occupancy, occupancy
from ratrain.passes.trial.trial import Trials
from ratrain.ratrain_ir.analysis import op_rows
from ratrain.ratrain_ir.analysis.lifetime import lifetimes
from ratrain.ratrain_ir.config.types import StateKind
from ratrain.ratrain_ir.lowering import lower
from ratrain.ratrain_ir.ops.base import Engine
from ratrain.ratrain_ir.ops.compute import Release, Update
from ratrain.ratrain_ir.support.loops import Allowance
from ratrain.ratrain_ir.testing.fake_target import FakeTarget
from ratrain.ratrain_ir.testing.strategies import Case, cases, for_plan
from tests.passes.test_pipeline import MODEL, PLAN

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Stage

PIPELINES = (
    "place-1f1b",
    "place-zb-h1",
    "recompute,bucket-grad-sync{bytes=1KiB},schedule-update,insert-prefetch",
    "bucket-grad-sync{bytes=1KiB blocking=true},insert-prefetch{blocking=true}",
)


def stages_with_workspace(case: Case, pipeline: str, target: FakeTarget) -> tuple[list[Stage], OpSeconds]:
    module = case.module()
    PassManager(target).run(module, for_plan(pipeline, case.plan))
    trials = Trials(module, PassContext(target))
    return [trials.with_workspace(stage) for stage in module.stages], trials.op_seconds


def times_of(stage: Stage, op_seconds: OpSeconds) -> ListTimes:
    timed = TimedRows()
    return timed.times(timed.of(stage, op_seconds), 1, arrays=False)[0]


@settings(max_examples=40)
@given(cases(max_layers=4, max_micro_batches=3), st.sampled_from(PIPELINES))
def test_nothing_waits_for_bytes_under_an_endless_lag(case: Case, pipeline: str) -> None:
    """An interval ends only where every op from there on starts after the last accessor has completed."""
    stages, op_seconds = stages_with_workspace(case, pipeline, FakeTarget())
    for stage in stages:
        times = times_of(stage, op_seconds)
        for tensor, spans in occupancy(stage, op_seconds).within(inf).intervals.items():
            accesses = [at for at, op in enumerate(stage.ops) if tensor in op.operands and type(op) is not Release]
            if tensor.carried or len(spans) != 1 or not accesses:
                continue
            (_, stop) = spans[0]
            assert stop > accesses[-1]
            assert times.starts[stop:].min(initial=inf) >= times.ends[accesses].max()


@settings(max_examples=40)
@given(cases(max_layers=4, max_micro_batches=3), st.sampled_from(PIPELINES), st.integers(0, 100))
def test_a_lag_only_lengthens_and_stays_within_the_capacity(case: Case, pipeline: str, percent: int) -> None:
    stages, op_seconds = stages_with_workspace(case, pipeline, FakeTarget())
    for stage in stages:
        found: Occupancy = occupancy(stage, op_seconds)
        assert found.within(0.0).intervals == lifetimes(stage).intervals
        peaks = [found.peak_bytes(lag) for lag in (0.0, 1e-6, 1e-4, inf)]
        assert all(one <= other for one, other in pairwise(peaks))
        assert peaks[0] == found.lives.peak_bytes
        capacity = peaks[0] + (peaks[-1] - peaks[0]) * percent // 100
        assert found.peak_bytes(found.lag_within(capacity)) <= capacity
        for tensor, spans in found.within(inf).intervals.items():
            plain = found.lives.intervals[tensor]
            assert all(
                s == t or (s == 0 and tensor.kind is StateKind.SCALAR)
                for (s, _), (t, _) in zip(spans, plain, strict=True)
            )
            assert all(stop >= end for (_, stop), (_, end) in zip(spans, plain, strict=True))
            assert all(stop <= start for (_, stop), (start, _) in pairwise(spans))


@settings(max_examples=40)
@given(cases(max_layers=4), st.sampled_from((Engine.COMPUTE, Engine.HOST)))
def test_updates_move_and_nothing_else_does(case: Case, engine: Engine) -> None:
    target = FakeTarget(update_engine=engine)
    module, plain = case.module(), case.module()
    PassManager(target).run(plain, "bucket-grad-sync{bytes=1KiB}")
    PassManager(target, verify_each=True).run(module, "bucket-grad-sync{bytes=1KiB},schedule-update")
    for stage, before in zip(module.stages, plain.stages, strict=True):
        rest = [repr(op) for op in stage.ops if type(op) is not Update]
        assert rest == [repr(op) for op in before.ops if type(op) is not Update]
        updates = [sorted(repr(op) for op in item.ops if type(op) is Update) for item in (stage, before)]
        assert updates[0] == updates[1]


def test_on_a_host_an_update_follows_the_reduction_of_its_gradient() -> None:
    """A host has nothing else to do; the compute engine updates only where it would not wait."""
    module = lower(MODEL, PLAN)
    PassManager(FakeTarget(update_engine=Engine.HOST)).run(module, "bucket-grad-sync{bytes=1},schedule-update")
    for stage in module.stages:
        for before, op in pairwise(stage.ops):
            if type(op) is Update:
                assert type(before) is Update or set(op.reads) & set(before.writes)


@settings(max_examples=25)
@given(cases(max_layers=4, max_micro_batches=3), st.sampled_from(PIPELINES))
def test_compiled_sweeps_find_what_plain_ones_find(case: Case, pipeline: str) -> None:
    stages, op_seconds = stages_with_workspace(case, pipeline, FakeTarget())
    for stage in stages:
        found = []
        for ops in (0, 1 << 40):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(op_rows, "ALLOWANCE", Allowance(ops))
                occupied = occupancy(stage, op_seconds)
                arrays = (occupied.lives.starts, occupied.lives.stops, occupied.completed, occupied.issued)
                found.append([array.tolist() for array in (*arrays, occupied.earliest, lifetimes(stage).stops)])
        assert found[0] == found[1]


@settings(max_examples=25)
@given(cases(max_layers=4, max_micro_batches=3), st.sampled_from(PIPELINES))
def test_a_tensor_lives_from_where_it_is_made_to_its_last_access(case: Case, pipeline: str) -> None:
    """Interval by interval, and when the last accessor has completed, tensor by tensor."""
    stages, op_seconds = stages_with_workspace(case, pipeline, FakeTarget())
    for stage in stages:
        found, ends = occupancy(stage, op_seconds), times_of(stage, op_seconds).ends
        completed = iter(found.completed.tolist())
        for tensor, spans in found.lives.intervals.items():
            touching = [
                (at, op) for at, op in enumerate(stage.ops) if type(op) is not Release and tensor in op.operands
            ]
            made = [at for at, op in touching if tensor in op.writes or tensor in op.scratch]
            lives = [[at for at, _ in touching if at < (made[0] if made else len(stage.ops))]]
            for first, after in pairwise([*made, len(stage.ops)]):
                lives.append([at for at, _ in touching if first <= at < after])
            wanted = [(life[0], life[-1] + 1, ends[life].max()) for life in lives if life]
            if tensor.carried:  # it goes over the step's end
                if lives[0] or not touching:
                    wanted[:1] = [(0, *(wanted[0][1:] if wanted else (0, 0.0)))]
                wanted[-1] = (wanted[-1][0], len(stage.ops), 0.0)
            assert [(*span, next(completed)) for span in spans] == wanted


@settings(max_examples=40)
@given(
    cases(max_layers=3, max_micro_batches=3), st.lists(st.sampled_from(PIPELINES), min_size=2, max_size=3), st.data()
)
def test_an_arena_that_a_pipeline_has_placed_before_is_the_one_it_would_place_anew(
    case: Case, pipelines: list[str], data: st.DataObject
) -> None:
    """However many lives, lags and capacities came between."""
    target = FakeTarget()
    kept = PassContext(target)
    for pipeline in (*pipelines, pipelines[0]):
        module = case.module()
        PassManager(target).run(module, for_plan(pipeline, case.plan))
        stage = data.draw(st.sampled_from(module.stages))
        occupied = Trials(module, kept).occupancy(stage)
        lag = data.draw(st.sampled_from([0.0, 1e-3, inf]))
        capacity = int(occupied.peak_bytes(lag) * data.draw(st.sampled_from([0.5, 0.99, 1.0, 2.0])))
        found = Trials(module, kept).excess_bytes(occupied, lag, capacity)
        assert found == Trials(module, PassContext(target)).excess_bytes(occupied, lag, capacity)

"""The planner: its choice against brute force, its certificate, and the commands around it."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from attrs import evolve

from ratrain.passes.pipeline_text import parse_pipeline, pipeline_text
from ratrain.passes.placed_by import placed_by
from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.config.plan_text import check_plan, parse_plan
from ratrain.ratrain_ir.schedules.action import ActionKind, most_in_flight
from ratrain.ratrain_ir.schedules.named import SCHEDULES, most_held
from ratrain.ratrain_ir.schedules.shape import PipelineShape
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.support.time_limit import is_ended
from ratrain.ratrainc.choices.machine_changes import parse_changes, with_constants
from ratrain.ratrainc.choices.machine_choice import MachineChoice
from ratrain.ratrainc.choices.strategies import hiding_exchanges, strategy
from ratrain.ratrainc.cli import main
from ratrain.ratrainc.console.parts import TextTable
from ratrain.ratrainc.console.progress import Steps
from ratrain.ratrainc.facts.slices_note import slices_note
from ratrain.ratrainc.planner.answer import fewest_clusters as fewest
from ratrain.ratrainc.planner.answer.crossings import crossings
from ratrain.ratrainc.planner.answer.plan_files import plan_file
from ratrain.ratrainc.planner.answer.planned import Planned
from ratrain.ratrainc.planner.bounds.bounds import plan_bounds
from ratrain.ratrainc.planner.bounds.cuts import best_cuts, cuts_of, partitions
from ratrain.ratrainc.planner.bounds.estimates import cuts_estimate
from ratrain.ratrainc.planner.bounds.held_passes import held_passes
from ratrain.ratrainc.planner.bounds.profiles import Profiles
from ratrain.ratrainc.planner.bounds.shape_columns import Columns
from ratrain.ratrainc.planner.search import quick
from ratrain.ratrainc.planner.search.family_spaces import family_spaces
from ratrain.ratrainc.planner.search.plan_evaluation import (
    PlanEvaluation,
    Task,
    compiled_units,
    evaluate,
    folded_micro_batches,
)
from ratrain.ratrainc.planner.search.plan_request import PlanRequest
from ratrain.ratrainc.planner.search.plan_search import Search
from ratrain.ratrainc.planner.search.quick import estimated, quick_answer, tried
from ratrain.ratrainc.planner.search.workers import WorkerPool
from ratrain.ratrainc.planner.space.objective import OBJECTIVES
from ratrain.ratrainc.planner.space.plan_families import USUAL, families
from ratrain.ratrainc.planner.space.space import Shape, divisions, shapes
from ratrain.ratrainc.planner.space.variants import leanest, least_bytes_passes, variants
from ratrain.targets.machine.machine import load_machine
from tests.end_to_end.tiny_runs import MODEL as RUN
from tests.end_to_end.tiny_runs import make_plan
from tests.end_to_end.toys import UNEVEN
from tests.targets.machine.test_links import group
from tests.targets.machine.test_links import machine as grouped_machine

if TYPE_CHECKING:
    from ratrain.ratrainc.planner.search.answer import Answer

MODEL = evolve(UNEVEN, name="small", vocab_size=1000, hidden_size=64, head_dim=16, ffn_size=160)
# As on the real machine a layer takes longer than its launches, and the link matters.
F = ActionKind.FORWARD
SLOW = {"fp16_peak": 1e10, "ddr_bandwidth": 1e9, "link_bandwidth": 1e8, "collective_chunk": 4096.0}


def small_request(*, capacity: float = 8e6, clusters: int = 3, batch: int = 4, name: str = "ratrain") -> PlanRequest:
    machine = with_constants(load_machine(None), {**SLOW, "ddr_capacity": capacity})
    several = any(chunks > 1 for chunks, _, _ in divisions(strategy(name).schedule or "1f1b"))
    return PlanRequest(
        evolve(MODEL, layers=5) if several else MODEL,
        machine,
        clusters,
        batch,
        32,
        strategy(name),
        seconds=math.inf,
        exhaustive=True,
    )


def every_candidate(request: PlanRequest):
    """All plans of a space under all pipelines."""
    of_bytes = request.objective.of_bytes
    for space in family_spaces(request, Profiles(request.setting)):
        own = space.family.strategy.passes
        for shape in space.shapes:
            for layers in partitions(request.model.layers, shape.pp, shape.chunks):
                plan = shape.plan(request.setting, cuts_of(layers, shape))
                others = () if of_bytes else variants(own, plan)
                usual = hiding_exchanges(least_bytes_passes(own) if of_bytes else own, plan.tp)
                for pipeline in (usual, *others):
                    yield Task(request.model, plan, pipeline, request.machine)


@pytest.mark.parametrize(
    ("name", "clusters", "batch", "capacity"),
    [
        pytest.param("ratrain", 2, 4, 8e6, marks=pytest.mark.full),
        ("ratrain", 2, 2, 2.6e6),
        ("baseline-1f1b", 3, 4, 8e6),
        pytest.param("baseline-1f1b", 3, 6, 2.6e6, marks=pytest.mark.full),
        ("seq1f1b", 2, 1, 8e6),
        pytest.param("seq1f1b", 2, 2, 8e6, marks=pytest.mark.full),
        pytest.param("interleaved", 2, 2, 8e6, marks=pytest.mark.full),
        ("zb-v", 2, 2, 8e6),
        pytest.param("v-half", 2, 4, 8e6, marks=pytest.mark.full),
    ],
)
@pytest.mark.sampled(3)
def test_the_choice_is_that_of_brute_force(name, clusters, batch, capacity):
    request = small_request(name=name, clusters=clusters, batch=batch, capacity=capacity)
    # several chunks have two stages, which take both clusters; slices of one sequence have odd numbers of rows, which two peers do not share out
    shared = all(shape.chunks == 1 for shape in request.shapes()) and (name, batch) != ("seq1f1b", 1)
    assert any(shape.tp > 1 for shape in request.shapes()) == (shared and clusters == 2)
    answer = Search(request).run()
    every = [evaluate(task).step_seconds for task in every_candidate(request)]
    times = [seconds for seconds in every if seconds is not None]
    assert answer.best is not None
    assert answer.best.seconds == min(times)
    assert answer.proven
    assert answer.bound_seconds == answer.best.seconds
    assert 0 < answer.relaxed_bound_seconds <= answer.best.seconds
    assert answer.evaluations <= len(every)
    assert (None in every) == (capacity < 8e6)


def costs_of_every_plan(request: PlanRequest) -> dict[Any, Any]:
    """What each plan of a space that fits costs under its best pipeline, by brute force."""
    costs: dict[Any, Any] = {}
    for task in every_candidate(request):
        found = evaluate(task)
        if found.step_seconds is not None:
            cost = request.objective.cost(found.step_seconds, max(found.peak_bytes), task.plan.clusters)
            key = task.plan, placed_by(task.pipeline)
            costs[key] = min(cost, costs.get(key, cost))
    return costs


@pytest.mark.parametrize("name", ["clusters", "tokens-per-cluster-hour", "memory"])
def test_each_objective_finds_what_brute_force_does(name):
    request = evolve(small_request(name="baseline-1f1b", clusters=2, batch=2), objective=OBJECTIVES[name])
    answer = Search(request).run()
    assert answer.best is not None
    assert answer.best.cost(request.objective) == min(costs_of_every_plan(request).values())
    assert answer.bound == answer.best.cost(request.objective)
    assert answer.proven
    assert quick_answer(request).bound <= answer.bound


@pytest.mark.parametrize("capacity", [1.2e6, 1.8e6, 3.7e6])
def test_fewer_clusters_are_asked_for_before_they_are_called_possible(capacity: float) -> None:
    """A quick bound on clusters is the fewest that bounds on bytes do not rule out when they are asked for alone."""
    request = evolve(small_request(name="baseline-1f1b", capacity=capacity, clusters=6, batch=12), exhaustive=False)
    request = evolve(request, objective=OBJECTIVES["clusters"], peers=(1,))
    alone = [estimated(evolve(request, clusters=clusters)) for clusters in range(1, 7)]
    possible = [each.request.clusters for each in alone if not each.proven_empty]
    assert estimated(request).bound[0] == possible[0] > 1
    answer = Search(evolve(request, seconds=0.0)).run()
    assert answer.bound[0] >= possible[0]
    if answer.best is not None and answer.best.plan.clusters == answer.bound[0]:
        said = " ".join(Planned(answer, False, None, "small", MachineChoice()).certificate())
        assert f"fits fewer than {answer.bound[0]:.0f} clusters: gap 0.0 %, proven" in said


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "schedules",
    [
        pytest.param(("interleaved", "seq1f1b"), marks=pytest.mark.full),
        pytest.param(("1f1b", "zb-v"), marks=pytest.mark.full),
        pytest.param(USUAL, marks=pytest.mark.full),
    ],
)
def test_families_are_searched_together(schedules):
    """The best of all, and as many more as are wanted; what the answer says of each family is so."""
    request = evolve(small_request(name="interleaved", clusters=2, batch=1), strategy=strategy("ratrain"))
    request = evolve(request, families=families(request.strategy, schedules), keep=3)
    answer = Search(request).run()
    every = sorted(costs_of_every_plan(request).values())
    assert [candidate.seconds for candidate in answer.best_plans[:3]] == [seconds for seconds, _ in every[:3]]
    assert answer.bound_seconds == answer.best.seconds
    assert {each.text for each in answer.rejected_plans} >= {*schedules} - {answer.best.family}
    single = [Search(evolve(request, families=families(request.strategy, (each,)), keep=1)).run() for each in schedules]
    assert answer.best.seconds == min(each.best.seconds for each in single)


def grouped_request(*, capacity: float, batch: int = 16) -> PlanRequest:
    """Of one layer and ZeRO 3, on four clusters of which two are near each other."""
    links = group("chip", 2, 3e9, 1e-5), group("system", None, 5e6, 1e-4)
    machine = with_constants(
        grouped_machine(*links), {key: value for key, value in SLOW.items() if key != "link_bandwidth"}
    )
    request = evolve(small_request(clusters=4, batch=batch), model=evolve(MODEL, layers=1), peers=(1,))
    searched = families(request.strategy, ("1f1b",))
    machine = with_constants(machine, {"ddr_capacity": capacity})
    return evolve(request, machine=machine, families=searched, wide=True, zero_levels=(3,))


def test_views_stay_in_near_groups_where_that_is_best():
    """As brute force has it, and never where links are alike; the row of the others says which they are."""
    request = grouped_request(capacity=1.35e6)
    assert {shape.view_group for shape in request.shapes()} == {None, 2}
    uniform = evolve(request, machine=with_constants(load_machine(None), SLOW))
    assert {shape.view_group for shape in uniform.shapes()} == {None}
    answer = Search(request).run()
    assert answer.best.seconds == min(costs_of_every_plan(request).values())[1]
    assert answer.best.shape.view_group == answer.best.plan.view_group == 2
    assert answer.proven
    text = plan_file(answer, answer.best, "small.json")
    plan = parse_plan(text, file="P.toml", model=request.model)
    found = evaluate(Task(request.model, plan, answer.best.pipeline, request.machine, checked_below=math.inf))
    assert found.step_seconds == answer.best.seconds
    roomier = Search(grouped_request(capacity=1.15e6)).run()
    assert any("views of 2" in each.text for each in roomier.rejected_plans)


def test_a_search_without_time_tries_a_plan_of_one_peer_too():
    """Peers with bounds below it come first; where links make them slower than that, the answer is none the worse for them."""
    request = evolve(small_request(capacity=2.6e6, clusters=4, batch=4), seconds=0.0, exhaustive=False)
    assert {shape.tp for shape in request.shapes()} == {1, 2, 4}
    alone, both = (Search(evolve(request, peers=peers)).run() for peers in ((1,), None))
    assert both.best.seconds <= alone.best.seconds
    tried = {candidate.shape.tp for candidate in both.candidates + both.refused}
    assert 1 in tried or both.bound_seconds >= both.best.seconds
    assert alone.best.shape.tp == 1


def test_bounds_leave_most_of_a_space_untried():
    request = small_request(name="baseline-1f1b", clusters=4, batch=8)
    answer = Search(request).run()
    assert answer.proven
    assert answer.evaluations < 0.5 * sum(1 for _ in every_candidate(request))


@pytest.mark.parametrize(
    "shape", [Shape(2, 2, 1, 4, 1, "last"), Shape(3, 1, 2, 6, 0, "last"), Shape(2, 4, 1, 1, 3, "each-micro-batch")]
)
def test_cuts_found_by_dynamic_programming_are_the_best_of_all(shape):
    request = small_request()
    model = evolve(MODEL, layers=9)
    columns = Columns.of(Profiles(evolve(request.setting, model=model)), [shape])
    every = list(partitions(model.layers, shape.pp))
    bounds = plan_bounds(columns.rows(np.zeros(len(every), int)), np.array(every, float)).seconds
    best = best_cuts(columns)
    assert best.seconds == pytest.approx(bounds.min(), rel=1e-12)
    assert bounds[every.index(best.layers)] == pytest.approx(bounds.min(), rel=1e-9)


def test_plans_bounded_together_are_bounded_as_alone(monkeypatch):
    """Of several sizes, states, hulls and numbers of micro-batches, in blocks that end among them."""
    profiles = Profiles(evolve(small_request(capacity=2e6).setting, model=evolve(MODEL, layers=9)))
    chosen = [
        Shape(3, dp, size, m, *state)
        for dp, state in ((1, (0, "last")), (2, (1, "last")), (4, (3, "each-micro-batch")))
        for size, m in ((2, 1), (1, 2), (1, 3), (4, 4), (1, 7))
    ]
    cuts = np.array(list(partitions(9, 3))[: len(chosen)], float)
    monkeypatch.setattr("ratrain.ratrainc.planner.bounds.bounds._BLOCK", 12)
    together = plan_bounds(Columns.of(profiles, chosen), cuts)
    assert np.isfinite(together.seconds).any()
    for at, shape in enumerate(chosen):
        alone = plan_bounds(Columns.of(profiles, [shape]), cuts[[at]])
        assert together.seconds[at] == pytest.approx(alone.seconds[0], rel=1e-12)
        assert (together.peak_bytes[at] == alone.peak_bytes[0]).all()


def test_cuts_that_cannot_fit_name_the_stage_that_lacks_least():
    request = small_request(capacity=1e6)
    shape = Shape(3, 1, 1, 4, 0, "last")
    columns = Columns.of(Profiles(request.setting), [shape])
    best = best_cuts(columns)
    peaks = plan_bounds(columns, np.array([best.layers], float)).peak_bytes[0]
    assert best.seconds == math.inf
    assert best.short_bytes == pytest.approx(peaks.max() - 1e6)
    assert best.stage == int(peaks.argmax())


def test_bound_of_equal_stages_is_the_closed_form():
    """Without links, updates and heads of any size, a step takes (M + P - 1) times a stage's forward and backward."""
    free = {"link_bandwidth": 1e30, "link_latency": 0.0, "launch": 0.0, "fp16_peak": 1e10, "ddr_bandwidth": 1e20}
    machine = with_constants(load_machine(None), free)
    model = evolve(MODEL, layers=8, vocab_size=8)
    request = evolve(small_request(), model=model, machine=machine)
    profiles = Profiles(request.setting)
    work = profiles.work(1)
    bounds = plan_bounds(Columns.of(profiles, [Shape(4, 1, 1, 10, 0, "last")]), np.full((1, 4), 2.0))
    stage = 2 * (work.forward[1] + work.backward[1])
    assert bounds.seconds[0] == pytest.approx((10 + 3) * stage, rel=0.01)


def test_shapes_share_out_the_batch_and_stay_within_the_clusters():
    found = shapes(MODEL, 6, 12)
    assert len(found) == len(set(found))
    assert all(
        s.clusters <= 6 and s.dp * s.micro_batch_size * s.micro_batches == 12 and s.pp <= MODEL.layers for s in found
    )
    assert {(s.pp, s.dp) for s in found} == {(p, d) for p in (1, 2, 3) for d in (1, 2, 3, 4, 6) if p * d <= 6}
    assert {s.zero for s in found if s.dp == 1} == {0}


@pytest.mark.parametrize("micro_batches", [10, 13])
@pytest.mark.parametrize("name", ["ratrain", "baseline-1f1b", "seq1f1b"])
@pytest.mark.sampled(2)
def test_a_folded_step_says_what_the_whole_one_does(name, micro_batches):
    request = small_request(name=name)
    slices = 4 if name == "seq1f1b" else 1
    plan = Shape(2, 2, 1, micro_batches, 1, "last", slices=slices).plan(request.setting, (1,))
    assert folded_micro_batches(plan) < micro_batches
    folded, whole = (
        evaluate(Task(MODEL, plan, request.strategy.passes, request.machine, fold)) for fold in (True, False)
    )
    assert folded.estimated
    assert not whole.estimated
    assert folded.step_seconds == pytest.approx(whole.step_seconds, rel=0.005)
    assert folded.peak_bytes == whole.peak_bytes


@pytest.mark.parametrize("micro_batches", [18, 40])
@pytest.mark.parametrize(
    ("name", "layout"), [("interleaved", "loop"), ("zb-v", "vee"), ("v-half", "vee"), ("v-min", "vee")]
)
def test_a_folded_step_of_chunks_says_what_the_whole_one_does(name, layout, micro_batches):
    request = small_request(name="interleaved")
    shape = Shape(2, 1, 1, micro_batches, 0, "last", chunks=2, layout=layout)
    plan = shape.plan(request.setting, (1, 2, 3))
    assert folded_micro_batches(plan) == 8
    pipeline = f"place-schedule{{kind={name}}},joint-order,allocate-ddr"
    folded, whole = (evaluate(Task(request.model, plan, pipeline, request.machine, fold)) for fold in (True, False))
    assert folded.estimated
    assert not whole.estimated
    assert folded.step_seconds == pytest.approx(whole.step_seconds, rel=0.005)
    assert folded.peak_bytes == whole.peak_bytes


def test_steps_of_chunks_are_folded_where_that_saves_work():
    """Two steps are simulated in place of one: of 4 and of 2 turns of the pipeline."""
    request = small_request(name="interleaved")

    def of(micro_batches):
        shape = Shape(2, 1, 1, micro_batches, 0, "last", chunks=2)
        return shape.plan(request.setting, cuts_of((2, 3), shape))

    assert [folded_micro_batches(of(m)) for m in (8, 14, 16, 18, 40)] == [8, 14, 16, 8, 8]
    units = [compiled_units(of(40), 4, folded=fold, in_halves=False) for fold in (True, False)]
    assert units == [4 * (8 + 4), 4 * 40]


def test_shapes_have_the_chunks_and_slices_of_the_schedule():
    model = evolve(MODEL, layers=9)

    def found(schedule, seq_len=32):
        return shapes(model, 4, 4, schedule=schedule, seq_len=seq_len)

    assert {(s.chunks, s.layout, s.slices) for s in found("1f1b")} == {(1, "loop", 1)}
    assert {(s.pp, s.chunks) for s in found("interleaved")} == {(2, 2), (3, 2), (4, 2), (2, 4)}
    assert {(s.chunks, s.layout, s.slices) for s in found("zb-v")} == {(2, "vee", 1)}
    assert {s.slices for s in found("seq1f1b")} == {2, 4, 8}
    assert {s.slices for s in found("seq1f1b", seq_len=3)} == {2}
    with pytest.raises(DiagnosticError, match=r"RT064.*no plan of small"):
        shapes(model, 1, 4, schedule="zb-v")


@pytest.mark.parametrize(
    ("shape", "layers", "sizes"),
    [
        (Shape(2, 1, 1, 1, 0, "last", chunks=2), (4, 4), (2, 2, 2, 2)),
        (Shape(2, 1, 1, 1, 0, "last", chunks=2), (5, 5), (2, 3, 3, 2)),
        (Shape(2, 1, 1, 1, 0, "last", chunks=2, layout="vee"), (5, 5), (3, 2, 3, 2)),
        (Shape(2, 1, 1, 1, 0, "last", chunks=4), (5, 6), (1, 1, 1, 2, 1, 2, 2, 1)),
    ],
)
def test_a_stages_layers_are_shared_evenly_by_its_chunks(shape, layers, sizes):
    """What is left over goes to later chunks, but last to that of the head."""
    cuts = cuts_of(layers, shape)
    assert tuple(np.diff([0, *cuts, sum(layers)])) == sizes


@pytest.mark.parametrize("answer_to", [quick_answer, lambda request: Search(request).run()])
def test_the_parts_of_each_rejected_plan_sum_to_what_is_said_of_it(answer_to: Callable[[PlanRequest], Answer]) -> None:
    """Whether it was simulated or has a bound alone; as numbers, and as rounded in the text."""
    request = evolve(small_request(clusters=3, batch=4), exhaustive=False, explain=True)
    request = evolve(request, families=families(request.strategy, ("1f1b", "zb-h1")))
    answer = answer_to(request)
    explained = [row for row in answer.rejected_plans if row.mechanisms]
    assert any("at least" in row.reason for row in explained)
    for row in explained:
        assert row.more_seconds is not None
        assert sum(row.mechanisms.values()) == pytest.approx(row.more_seconds, abs=1e-12)
        stated = re.search(r"(?:at least |: )([\d.]+ \w+)", row.reason)
        assert stated is not None
        assert seconds_of(stated[1]) == pytest.approx(answer.best.seconds + row.more_seconds, abs=1e-5)
        _, _, parts = row.reason.partition("; ")
        if parts == "no mechanism makes a difference":
            assert abs(row.more_seconds) < 1e-3 * answer.best.seconds
            continue
        total, *shown = re.findall(r"[-+][\d.]+ \w+", parts)
        assert seconds_of(total) == pytest.approx(row.more_seconds, abs=1e-5)
        assert sum(map(seconds_of, shown)) == pytest.approx(seconds_of(total), abs=1e-5 * (1 + len(shown)))


def seconds_of(text: str) -> float:
    """Seconds of a text like `+5.20 ms`."""
    number, unit = text.split()
    return float(number) * {"s": 1.0, "ms": 1e-3, "us": 1e-6}[unit]


def test_what_comes_nearest_lacks_least_of_all_shapes() -> None:
    """Also of those whose state alone is too large, which no search looks at."""
    for capacity in (0.2e6, 0.5e6, 0.8e6):
        request = evolve(small_request(capacity=capacity, clusters=4), exhaustive=False, peers=(1,))
        found = quick_answer(request).nearest
        (space,) = family_spaces(request, Profiles(request.setting))
        lacking = [space.best_cuts(shape).short_bytes for shape in space.shapes]
        assert found is not None
        assert found.short_bytes == min(lacking)


def test_a_refusal_names_the_tensor_parallel_ranks_that_were_not_looked_at(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    asked = (
        "plan",
        *TINY,
        "--clusters",
        "3",
        "--global-batch",
        "4",
        "--seq-len",
        "64",
        "--capacity",
        "1MiB",
        "--quick",
    )
    assert main([*asked]) == 1
    said = " ".join(capsys.readouterr().err.split())
    advice = re.search(r"do not divide 3 clusters were not looked at: '(--tp \S+)' looks at them", said)
    assert advice is not None
    assert main([*asked, *advice[1].split()]) == 1, "they are asked for, and do not fit either"
    assert "were not looked at" not in capsys.readouterr().err


@pytest.mark.parametrize("schedule", ["interleaved", "zb-v", "v-half", "seq1f1b", "gpipe"])
@pytest.mark.parametrize("micro_batches", [1, 2, 5, 12])
def test_what_bounds_read_of_an_order_is_so(schedule, micro_batches):
    """Counted anew from the order: how many passes are held, before any gradient is final and with gradients in all chunks."""
    for chunks, layout, slices in divisions(schedule):
        shape = PipelineShape(3, micro_batches, chunks, layout, slices)
        for stage, found in enumerate(held_passes(schedule, shape)):
            order = SCHEDULES[schedule].actions(shape, stage)
            assert 1 <= found.early <= most_held(schedule, shape, stage)
            assert found.late <= found.early
            assert found.windows * found.late <= chunks * slices * micro_batches
            assert (found.windows > 0) == (found.late > 0)
            if micro_batches >= 5 and schedule != "gpipe":
                assert found.early == most_held(schedule, shape, stage)
            final = next(i for i, a in enumerate(order) if a.kind is not F and a.micro_batch == micro_batches - 1)
            before = [most_in_flight((a.kind, a.chunk) for a in order[: i + 1]) for i in range(final)]
            assert found.early == max(before, default=0)


def test_1f1b_has_the_windows_of_its_closed_form():
    for stages, micro_batches in ((4, 1), (4, 3), (4, 4), (4, 9), (2, 7)):
        found = held_passes("1f1b", PipelineShape(stages, micro_batches))
        for stage, placement in enumerate(found):
            flight = min(stages - stage, micro_batches)
            late = min(stages - stage, micro_batches - 1) if micro_batches > 2 else 0
            assert placement.early == flight
            assert placement.late <= late
            assert placement.windows <= max(1, (micro_batches - 1) // flight)


@pytest.mark.parametrize("keys", ["chunks = 2", "slices = 4"])
@pytest.mark.parametrize("name", ["ratrain", "interleaved", "seq1f1b"])
def test_the_shape_of_the_plan_to_be_like_agrees_with_the_strategy(name, keys, tmp_path, capsys):
    path = tmp_path / "P.toml"
    section = "[parallel]" if "chunks" in keys else "[batch]"
    path.write_text(Path(TINY_PLAN).read_text().replace(section, f"{section}\n{keys}"))
    code = main(["plan", *QUICK, "--quick", "--like", str(path), "--strategy", name, "--json"])
    shown = capsys.readouterr()
    agrees = (name, keys) in (("interleaved", "chunks = 2"), ("seq1f1b", "slices = 4"))
    assert code == (0 if agrees else 1), shown.err
    if agrees:
        first = json.loads(shown.out)["plans"][0]
        assert (first["chunks"] > 1, bool(first["slices"])) == (name == "interleaved", name == "seq1f1b")
    else:
        assert f"P.toml:{'5' if 'chunks' in keys else '10'}:1" in shown.err
        assert f"'{name}'" in shown.err


@pytest.mark.parametrize("key", ['[state]\nzero_blocks = "embed 3"', '[numerics]\ngather_quantised = "int8-block"'])
def test_a_plan_to_be_like_says_nothing_that_no_search_has(key, tmp_path, capsys):
    path = tmp_path / "P.toml"
    path.write_text(
        Path(TINY_PLAN).read_text().replace("[state]", key)
        if "[state]" in key
        else f"{Path(TINY_PLAN).read_text()}\n{key}\n"
    )
    assert main(["plan", *QUICK, "--quick", "--like", str(path)]) == 1
    assert f"it cannot keep {key.split()[1]} of this plan" in capsys.readouterr().err


def test_slices_that_are_bound_by_ddr_are_noted(tmp_path, capsys):
    """189 rows of f16 on an MT-3000; a slice of two sequences has twice its tokens."""
    machine = load_machine(None)
    plan = parse_plan(Path(TINY_PLAN).read_text(), file="P.toml", model=load_model(TINY[1]))
    assert "4 of 4 slices" in slices_note(evolve(plan, slices=(32,) * 4), machine)
    long = evolve(plan, seq_len=200, slices=(106, 94))
    assert "1 of 2 slices are bound by DDR" in slices_note(long, machine)
    assert "below 189 rows on mt3000; the shortest has 188" in slices_note(long, machine)
    assert slices_note(evolve(long, slices=(104, 96)), machine) == slices_note(plan, machine) == ""
    path, out = tmp_path / "P.toml", tmp_path / "x.rtir"
    path.write_text(Path(TINY_PLAN).read_text().replace("[batch]", "[batch]\nslices = 4"))
    assert main(["compile", *TINY, "--plan", str(path), "-o", str(out)]) == 0
    assert main(["explain", str(out), "--no-levers"]) == 0
    assert "4 of 4 slices are bound by DDR" in " ".join(capsys.readouterr().out.split())
    one = ("--clusters", "1", "--global-batch", "1", "--seq-len", "64")
    assert main(["plan", *TINY, *one, "--quick", "--strategy", "seq1f1b", "--json"]) == 0
    assert "bound by DDR" in json.loads(capsys.readouterr().out)["notes"][0]


def test_a_comparison_of_planned_strategies_leaves_out_those_without_a_shape(capsys):
    """On one cluster there are no two stages to have chunks."""
    words = ["compare", *TINY, "--plan", "auto", "--clusters", "1", "--global-batch", "1", "--seq-len", "64"]
    words += ["--seconds", "0", "--jobs", "1", "--json"]
    assert main(words) == 0
    shown = capsys.readouterr()
    names = {row["name"] for row in json.loads(shown.out)["strategies"]}
    assert {"ratrain", "seq1f1b", "zb-h1"} <= names
    assert not names & {"interleaved", "zb-v", "v-half"}
    assert "left out: zb-v" in shown.err
    assert main([*words, "--strategies", "ratrain,zb-v"]) == 1
    assert "RT064" in capsys.readouterr().err


def test_slices_are_not_planned_for_whole_scores(capsys):
    assert main(["plan", *QUICK, "--quick", "--strategy", "seq1f1b", "--attention", "scores-kept"]) == 1
    assert "--attention fused" in capsys.readouterr().err


def test_the_quick_answer_takes_the_time_it_needs_for_one_plan(monkeypatch):
    monkeypatch.setattr(quick, "SECONDS", 0.0)
    answer = quick_answer(evolve(small_request(capacity=2.6e6), exhaustive=False))
    assert answer.best is not None
    assert answer.bound_seconds <= answer.best.seconds


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_an_estimate_hides_traffic_behind_the_compute_of_its_stage(zero: int) -> None:
    """One stage has no bubble: its step is little longer than its compute, or than its traffic if that is longer."""
    machine = with_constants(load_machine(None), SLOW | {"ddr_capacity": 16e6})
    for bandwidth in (1e7, 3e7, 1e9):
        request = evolve(small_request(), machine=with_constants(machine, {"link_bandwidth": bandwidth}))
        shape = Shape(1, 4, 4, 4, zero, "each-micro-batch" if zero == 2 else "last")
        columns = Columns.of(Profiles(request.setting), [shape])
        layers = (request.model.layers,)
        plan = shape.plan(request.setting, ())
        simulated = evaluate(Task(request.model, plan, request.strategy.passes, request.machine)).step_seconds
        assert simulated is not None
        assert cuts_estimate(columns, layers) == pytest.approx(simulated, rel=0.25)


def test_the_quick_answer_brackets_the_full_one():
    request = small_request(clusters=2, batch=2)
    short, full = quick_answer(request), Search(request).run()
    assert short.best is not None
    assert full.best is not None
    assert short.bound_seconds <= full.best.seconds
    assert short.gap >= 0
    assert full.best.seconds <= short.best.seconds <= 1.5 * full.best.seconds


@pytest.mark.parametrize("objective", ["time", "memory"])
@pytest.mark.parametrize("capacity", [8e6, 2.6e6])
def test_the_quick_answer_is_the_best_of_the_plans_that_it_simulates(monkeypatch, objective, capacity):
    """No estimate comes before a simulated plan, however little time there is; what is refused is passed over."""
    request = evolve(small_request(capacity=capacity), exhaustive=False, objective=OBJECTIVES[objective])
    for units in (1e9, 0.0):
        monkeypatch.setattr(quick, "TRIAL_UNITS", units)
        heard = []
        answer = quick_answer(request, Steps(heard.append))
        tried = answer.evaluated
        assert answer.candidates[: len(tried)] == tried
        assert len(tried) == 1 if units == 0 else 1 <= len(tried) <= 5
        assert answer.evaluations == heard[-1].done == len(tried) + len(answer.refused)
        assert answer.best.cost(request.objective) == min(each.cost(request.objective) for each in tried)
        again = evaluate(request.task(answer.best.plan, answer.best.pipeline))
        assert again.step_seconds == answer.best.seconds
        assert answer.bound <= answer.best.cost(request.objective)


def given_times(
    monkeypatch: pytest.MonkeyPatch, units: Sequence[float], pace: float
) -> tuple[Answer, list[PlanEvaluation]]:
    """Answer quickly where plans have these units of work, each of which takes `pace` seconds of computing."""
    answer = estimated(evolve(small_request(), exhaustive=False))
    answer.candidates = [evolve(each, bound_seconds=0.0) for each in answer.best_plans[: len(units)]]
    plans = [each.plan for each in answer.candidates]
    assert len(plans) == len(units)
    work = dict(zip(plans, units, strict=True))
    began: list[PlanEvaluation] = []

    def timed(task: Task) -> PlanEvaluation:
        assert task.seconds is not None
        taken = work[task.plan] * pace
        stopped = taken > task.seconds
        found = PlanEvaluation(None if stopped else 1.0, (1,), stopped=stopped, taken=min(taken, task.seconds))
        began.append(found)
        return found

    monkeypatch.setattr(quick, "evaluate", timed)
    monkeypatch.setattr(quick, "compiled_units", lambda plan, *_words, **_more: work[plan])
    tried(answer, Steps())
    return answer, began


def test_a_plan_that_takes_too_long_leaves_the_cheaper_ones_after_it_to_be_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer, began = given_times(monkeypatch, (1000.0, 1000.0, 300.0, 200.0, 100.0), 0.03)
    assert [each.stopped for each in began] == [True, False]
    assert len(answer.evaluated) == answer.evaluations == 1
    reasons = [each.why_estimated for each in answer.candidates]
    assert reasons[:2] == ["", quick.GIVEN_UP], "what was simulated comes first"
    assert all(reasons[1:])
    said = " ".join(
        part for part in Planned(answer, True, None, "small", MachineChoice()).parts() if isinstance(part, str)
    )
    assert "4 of the plans shown are estimates, not simulated: tried and given up" in said
    assert "the search without --quick settles" in said.lower()


@pytest.mark.parametrize("units", [(100.0,) * 9, tuple(900.0 - 100 * n for n in range(9)), (5000.0,) * 9])
def test_what_plans_that_are_given_up_take_is_bounded(monkeypatch: pytest.MonkeyPatch, units: Sequence[float]) -> None:
    """However far the pace is from what was guessed, and in whatever order plans come."""
    answer, began = given_times(monkeypatch, units, 10.0)
    assert sum(each.taken for each in began) <= 1.5 * quick.LIMIT_SECONDS
    assert began == [] if min(units) == 5000 else began
    assert all(each.why_estimated for each in answer.candidates)
    titles = [
        part.title
        for part in Planned(answer, True, None, "small", MachineChoice()).parts()
        if isinstance(part, TextTable)
    ]
    assert "(all times estimates)" in titles[0]


@pytest.mark.parametrize(
    "keys",
    [
        {"chunks": 2, "cuts": (1, 2, 3), "schedule": "interleaved"},
        {"chunks": 2, "cuts": (1, 2, 3), "layout": "vee", "schedule": "zb-v"},
        {"slices": (6, 4), "schedule": "seq1f1b"},
    ],
    ids=lambda keys: keys["schedule"],
)
def test_what_a_plan_sends_where_is_told_of_every_schedule(keys: dict[str, Any]) -> None:
    """What replicas exchange of one mlp is the same whatever the order and the chunks of stages."""
    machine = load_machine("h100-node")
    model = evolve(RUN, layers=4)
    usual = crossings(make_plan(model, dp=8, zero=1), model, machine)
    told = crossings(make_plan(model, dp=8, zero=1, **keys), model, machine)
    exchanged = [each for each in told if " of an mlp" in each.what]
    assert exchanged == [each for each in usual if " of an mlp" in each.what]
    assert {each.what.split()[0] for each in exchanged} >= {"all_gather", "reduce_scatter"}


def test_a_plan_file_is_read_back():
    request = small_request(name="baseline-1f1b")
    answer = Search(request).run()
    text = plan_file(answer, answer.best, "small.json")
    plan = parse_plan(text, file="P.toml", model=MODEL)
    check_plan(plan, MODEL)
    assert plan == evolve(answer.best.plan, schedule="1f1b"), "as the strategy, by its name, places"
    assert text.startswith("# Planned for small on 3 x mt3000: 4 sequences of 32 tokens a step.")


@pytest.mark.full
def test_searching_in_processes_finds_the_same():
    request = small_request(name="baseline-1f1b")
    alone, together = Search(request).run(), Search(evolve(request, jobs=2)).run()
    assert together.best.seconds == alone.best.seconds


def test_changes_of_a_machine():
    machine = load_machine(None)
    found = parse_changes("ddr=16GiB, link=7.4GB/s,latency=5us,peak=11.06Tflop/s", machine)
    expected = {"ddr_capacity": 16 * 2.0**30, "link_bandwidth": 7.4e9, "link_latency": 5e-6, "fp16_peak": 11.06e12}
    assert found == pytest.approx(expected)
    assert with_constants(machine, found)["link_bandwidth"] == pytest.approx(7.4e9)


@pytest.mark.parametrize("words", [("--capacity", "16"), ("--what-if", "ddr=16")])
def test_bytes_without_a_unit_that_no_memory_has_are_refused(
    words: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *QUICK, "--quick", *words]) in (1, 2)
    said = " ".join(capsys.readouterr().err.split())
    assert re.search(r"16 ?GB or 16 ?GiB", said)


@pytest.mark.parametrize(
    "text", ["ddr", "ddr=", "lnik=1GB/s", "link=-3GB/s", "link=7parsec", "link=7e999GB/s", "ddr=0", "host_store=2GB/s"]
)
def test_wrong_changes_are_refused(text):
    with pytest.raises(DiagnosticError) as caught:
        parse_changes(text, load_machine(None))
    assert [d.code for d in caught.value.diagnostics] == ["RT065"]


ROOT = Path(__file__).resolve().parents[3]
TINY = ("--model", str(ROOT / "examples/tiny.json"))
TINY_PLAN = str(ROOT / "examples/tiny.toml")
QUICK = (*TINY, "--clusters", "4", "--global-batch", "16", "--seq-len", "64")
SMALL = (*QUICK, "--jobs", "1", "--seconds", "1")


def test_plan_says_what_scripts_rely_on(capsys, tmp_path):
    out = tmp_path / "P.toml"
    words = ("plan", *SMALL, "--tokens", "1e9", "--robust", "--what-if", "link=37GB/s", "-o", str(out), "--json")
    assert main(list(words)) == 0
    found = json.loads(capsys.readouterr().out)
    first = found["plans"][0]
    assert {"pp", "dp", "micro_batch_size", "micro_batches", "zero", "cuts"} <= first.keys()
    assert first["predicted_step_seconds"] >= found["bound_step_seconds"] >= found["relaxed_bound_step_seconds"] > 0
    assert found["relaxed_gap"] >= found["gap"] >= 0
    assert first["tokens_per_second"] == pytest.approx(16 * 64 / first["predicted_step_seconds"])
    assert first["days"] == pytest.approx(1e9 / first["tokens_per_second"] / 86400)
    assert first["cluster_hours"] == pytest.approx(first["days"] * 24 * 4)
    assert first["slow_stage_seconds"] > first["predicted_step_seconds"]
    # compiled anew, in an order of its own: by no more than chance slower than a step that waits for no link
    assert found["what_if"][0]["step_seconds_with_the_same_plan"] <= first["predicted_step_seconds"] * 1.01
    model = load_model(str(ROOT / "examples/tiny.json"))
    plan = parse_plan(out.read_text(), file="P.toml", model=model)
    assert (plan.pp, plan.dp, list(plan.cuts)) == (first["pp"], first["dp"], first["cuts"])


def test_plan_shows_tables(capsys):
    assert main(["plan", *SMALL]) == 0
    shown = capsys.readouterr().out
    assert "lower bound of every plan considered" in shown
    assert "why not" in shown


def test_quick_ends_within_its_time(capsys):
    start = time.process_time()
    assert (
        main(["plan", "--model", "llama-2-7b", "--clusters", "32", "--global-batch", "256", "--quick", "--json"]) == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["considered"]["evaluations"] >= 1
    assert found["plans"][0]["how"] in {"folded", "simulated"}
    assert found["gap"] < 0.3
    # seconds of computing, whatever else the machine does; the limit only guards against a search that runs away
    assert time.process_time() - start < 60


def test_plan_refuses_what_cannot_fit(capsys):
    assert (
        main(
            [
                "plan",
                "--model",
                "llama-2-70b",
                "--clusters",
                "8",
                "--global-batch",
                "8",
                "--seconds",
                "1",
                "--jobs",
                "1",
            ]
        )
        == 1
    )
    shown = capsys.readouterr().err
    assert "RT053" in shown
    assert "lacks at least" in shown


def test_compare_gives_each_strategy_its_best(capsys):
    words = ("compare", *SMALL, "--plan", "auto", "--strategies", "tuned-1f1b,baseline-1f1b,ratrain", "--json")
    assert main(list(words)) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["strategies"]}
    assert rows["tuned-1f1b"]["step_seconds"] == rows["baseline-1f1b"]["step_seconds"]
    assert rows["tuned-1f1b"]["speedup"] == 1.0
    assert rows["ratrain"]["speedup"] >= 1.0
    assert rows["ratrain"]["plan"]["pp"] >= 1


def test_compare_has_all_on_one_plan_first(capsys):
    """Each as it is on a plan file of the same plan, with the speed-ups of the strategies alone."""
    words = ("compare", *SMALL, "--plan", "auto", "--strategies", "baseline-1f1b,zero3")
    assert main([*words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    common = facts["on_one_plan"]
    assert common["best_for"] == "ratrain"
    assert [row["name"] for row in common["strategies"]] == ["baseline-1f1b", "zero3"]
    assert all("plan" not in row for row in common["strategies"])
    assert common["strategies"][0]["speedup"] == 1.0
    one, own = (rows[0]["step_seconds"] for rows in (common["strategies"], facts["strategies"]))
    assert own <= one * (1 + 1e-9), "its own best plan is no worse for it than another's"
    assert common["plan"]["pp"] >= 1
    assert main([*words]) == 0
    shown = capsys.readouterr().out
    assert shown.index("all on the best plan of ratrain, P") < shown.index("each on its best plan")


def test_compare_says_what_a_strategy_lacks(capsys):
    words = (
        "compare",
        "--model",
        "llama-2-70b",
        "--plan",
        "auto",
        "--clusters",
        "8",
        "--global-batch",
        "8",
        "--seconds",
        "1",
    )
    assert main([*words, "--jobs", "1", "--strategies", "ratrain", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["on_one_plan"] is None
    row = found["strategies"][0]
    assert not row["fits"]
    assert row["speedup"] is None
    assert row["peak_bytes"] > found["capacity_bytes"]


def test_tuned_is_the_baseline_on_a_given_plan(capsys):
    words = ("compare", *TINY, "--plan", TINY_PLAN, "--strategies", "baseline-1f1b,tuned-1f1b")
    assert main(list(words)) == 0
    assert "on a given plan tuned-1f1b is baseline-1f1b" in capsys.readouterr().out


@pytest.mark.parametrize("fixed", [False, True])
def test_scale(capsys, fixed):
    words = [
        "scale",
        *TINY,
        "--clusters",
        "2,4",
        "--sequences-per-cluster",
        "4",
        "--json",
    ]
    searched = ["--seq-len", "128", "--seconds", "1", "--jobs", "1"]
    assert main([*words, *(["--plan", TINY_PLAN] if fixed else searched)]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert [p["clusters"] for p in points] == [2, 4]
    assert points[0]["efficiency"] == 1.0
    assert all(p["tokens_per_second"] == pytest.approx(4 * p["clusters"] * 128 / p["step_seconds"]) for p in points)
    assert points[1]["efficiency"] == pytest.approx(points[1]["tokens_per_second"] / 2 / points[0]["tokens_per_second"])


@pytest.mark.parametrize(("strategy", "level"), [("ratrain", 2), ("zero3", 3)])
def test_scale_keeps_the_plan_but_for_what_the_strategy_sets(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, strategy: str, level: int
) -> None:
    """Its ZeRO level, where there is more than one replica; one alone shards nothing, and has nobody to reduce with."""
    plan = tmp_path / "p.toml"
    text = Path(TINY_PLAN).read_text("utf-8")
    plan.write_text(
        text.replace("zero = 1", "zero = 2").replace('reduce = "last"', 'reduce = "each-micro-batch"'), "utf-8"
    )
    words = ("scale", *TINY, "--clusters", "2,4", "--sequences-per-cluster", "4", "--plan", str(plan))
    assert main([*words, "--strategy", strategy, "--json"]) == 0
    plans = [point["plan"] for point in json.loads(capsys.readouterr().out)["points"]]
    assert [each["dp"] for each in plans] == [1, 2]
    assert [each["zero"] for each in plans] == [0, level]
    assert [each["reduce"] for each in plans] == ["last", "each-micro-batch"]


def scaled(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    usual = ("scale", *TINY, "--clusters", "2,4", "--sequences-per-cluster", "2", "--seq-len", "64", "--jobs", "1")
    assert main([*usual, *words, "--json"]) == 0
    points: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["points"]
    return points


@pytest.mark.parametrize("levels", [{0}, {3}, {1, 2}])
def test_scale_searches_among_the_zero_levels_it_is_given(capsys: pytest.CaptureFixture[str], levels: set[int]) -> None:
    points = scaled(capsys, "--seconds", "0", "--zero", ",".join(map(str, levels)))
    for point in points:
        plan = point["plan"]
        assert plan["zero"] in (levels if plan["dp"] > 1 else {0, *levels})
    assert any(point["plan"]["dp"] > 1 for point in points)


def test_scale_goes_on_until_nothing_is_left_to_gain_if_it_is_told_to(capsys: pytest.CaptureFixture[str]) -> None:
    for point in scaled(capsys, "--exhaustive", "--zero", "1"):
        assert point["bound_step_seconds"] == pytest.approx(point["step_seconds"])


def test_scale_takes_the_dtypes_of_a_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    wide = tmp_path / "wide.toml"
    state = '[state]\nview_dtype = "f32"\nloss_scale = 1.0\n'
    wide.write_text(
        f"[parallel]\npp = 1\ndp = 2\n[batch]\nmicro_batch_size = 1\nmicro_batches = 2\nseq_len = 64\n{state}"
    )
    words = ("--seconds", "0", "--zero", "1")
    usual, like = scaled(capsys, *words), scaled(capsys, *words, "--like", str(wide))
    assert all(b["step_seconds"] > a["step_seconds"] for a, b in zip(usual, like, strict=True))


def test_scale_gives_each_cluster_as_much_as_the_plan_does(capsys: pytest.CaptureFixture[str]) -> None:
    plan = parse_plan(Path(TINY_PLAN).read_text(), file="P.toml", model=load_model(TINY[1]))
    own = plan.global_batch / plan.clusters
    words = ("scale", *TINY, "--clusters", f"{plan.clusters},{2 * plan.clusters}", "--plan", TINY_PLAN)
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sequences_per_cluster"] == own
    assert [point["global_batch"] for point in found["points"]] == [plan.global_batch, 2 * plan.global_batch]
    assert main([*words]) == 0
    assert f"weak scaling, {own:g} sequences a cluster" in capsys.readouterr().out


def test_scale_counts_tensor_parallel_ranks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plan = tmp_path / "P.toml"
    plan.write_text(Path(TINY_PLAN).read_text().replace("[parallel]", "[parallel]\ntp = 2"), "utf-8")
    assert main(["scale", *TINY, "--clusters", "8", "--plan", str(plan), "--json"]) == 0
    (point,) = json.loads(capsys.readouterr().out)["points"]
    assert point["plan"]["pp"] * point["plan"]["dp"] * point["plan"]["tp"] == 8
    assert main(["scale", *TINY, "--clusters", "2", "--plan", str(plan)]) == 1
    assert "a multiple of 4 clusters" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_scale_draws(tmp_path, kind):
    out = tmp_path / f"curve.{kind}"
    words = ["scale", *TINY, "--clusters", "2,4", "--plan", TINY_PLAN, "--plot", str(out)]
    assert main(words) == 0
    assert out.read_bytes()[:5] in (b"<?xml", b"\x89PNG\r")


def test_scale_refuses_stages_that_do_not_go_round(capsys):
    assert main(["scale", *TINY, "--clusters", "3", "--plan", TINY_PLAN]) == 1
    assert "do not divide evenly" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ("plan", *TINY, "--clusters", "4"),
        ("plan", *TINY, "--clusters", "0", "--global-batch", "4"),
        ("plan", *TINY, "--clusters", "4", "--global-batch", "4", "--quick", "--exhaustive"),
        ("plan", *TINY, "--clusters", "4", "--global-batch", "4", "--zero", "4"),
        ("compare", *TINY, "--plan", "auto"),
        ("compare", *TINY, "--plan", TINY_PLAN, "--clusters", "4"),
        ("scale", *TINY, "--clusters", "4,x"),
        ("scale", *TINY, "--clusters", "0"),
        ("scale", *TINY, "--clusters", "4", "--zero", "4"),
        ("scale", *TINY, "--clusters", "4", "--zero", "1", "--strategy", "zero3"),
        ("scale", *TINY, "--clusters", "4", "--zero", "1", "--plan", TINY_PLAN),
        ("scale", *TINY, "--clusters", "4", "--exhaustive", "--seconds", "1"),
    ],
    ids=" ".join,
)
def test_usage_errors(words, capsys):
    assert main([*words]) == 2
    assert capsys.readouterr().err


def test_fewest_clusters(capsys, tmp_path):
    machine = tmp_path / "small.toml"
    text = (ROOT / "targets/mt3000/machines/mt3000.toml").read_text()
    machine.write_text(text.replace("20000000000", "12000000"))
    out = tmp_path / "P.toml"
    words = (
        "plan",
        *TINY,
        "--clusters",
        "8",
        "--seq-len",
        "64",
        "--smallest",
        "--machine",
        str(machine),
        "-o",
        str(out),
        "--json",
    )
    assert main([*words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 1 < found["clusters"] <= 8
    assert found["plan"]["peak_bytes"] <= 12000000
    assert (
        parse_plan(out.read_text(), file="P.toml", model=load_model(str(ROOT / "examples/tiny.json"))).clusters
        == found["clusters"]
    )
    fewer = [*words]
    fewer[words.index("8")] = str(found["clusters"] - 1)
    assert main(fewer) == 1
    assert "RT053" in capsys.readouterr().err


def test_the_leanest_pipeline_recovers_everything_in_place():
    for given, lean in {
        "joint-order,allocate-ddr": "recompute,allocate-ddr",
        "place-zb-h1,overlap-tensor,joint-order{placement=inline},allocate-ddr": "place-zb-h1,recompute,allocate-ddr",
        "joint-order{offload=host},allocate-ddr": "offload-state{home=host},recompute,allocate-ddr",
        "joint-order{policy=none},allocate-ddr": "joint-order{policy=none},allocate-ddr",
        "recompute,allocate-ddr": "recompute,allocate-ddr",
    }.items():
        assert leanest(given) == pipeline_text(parse_pipeline(lean))


def test_a_plan_that_fits_only_with_everything_recovered_is_an_answer(capsys, tmp_path, monkeypatch):
    """And the pipeline that it names compiles it; a shape that does not fit so is not compiled otherwise."""
    seen = []

    def evaluated(task):
        seen.append(task.pipeline)
        refused = task.pipeline != leanest(task.pipeline) or len(seen) == 1
        return PlanEvaluation(None, (), refusal="does not fit") if refused else evaluate(task)

    monkeypatch.setattr(fewest, "evaluate", evaluated)
    out = tmp_path / "P.toml"
    words = ("plan", *TINY, "--clusters", "8", "--seq-len", "64", "--smallest", "--capacity", "12MB", "-o", str(out))
    assert main([*words]) == 0
    advice = re.search(r"--passes '(.*?)'", capsys.readouterr().out)
    assert advice is not None
    assert advice[1] == leanest(advice[1])
    assert seen[0] == seen[1] == advice[1] != seen[-1]
    compiled = (*TINY, "--plan", str(out), "--capacity", "12MB", "--passes", advice[1], "-o", str(tmp_path / "p.rtx"))
    assert main(["compile", *compiled]) == 0
    capsys.readouterr()


@pytest.mark.parametrize("name", ["ratrain", "baseline-1f1b"])
def test_passes_are_named_only_where_the_strategy_would_have_chosen_others(name, capsys):
    words = ("plan", *TINY, "--clusters", "8", "--seq-len", "64", "--smallest", "--strategy", name)
    assert main([*words]) == 0
    assert "--passes" not in capsys.readouterr().out


def test_the_advice_of_a_plan_that_does_not_fit_finds_the_fewest_clusters(capsys, tmp_path):
    machine = tmp_path / "small.toml"
    text = (ROOT / "targets/mt3000/machines/mt3000.toml").read_text()
    machine.write_text(text.replace("20000000000", "12000000"))
    of = ("--seq-len", "64", "--machine", str(machine))
    assert main(["plan", *TINY, "--clusters", "1", "--global-batch", "8", *of, "--quick"]) == 1
    advice = re.search(r"'(--clusters \d+ --smallest)'", " ".join(capsys.readouterr().err.split()))
    assert advice is not None
    assert main(["plan", *TINY, *advice[1].split(), *of]) == 0
    assert "clusters" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["curve.pdf", "curve"])
def test_a_plot_that_cannot_be_drawn_is_refused_before_the_search(name, capsys):
    assert main(["scale", "--model", "missing", "--clusters", "2,4", "--plot", name]) == 1
    assert ".png or .svg" in capsys.readouterr().err


def test_workers_start_with_interruptions_held_back():
    """Ctrl-C while they import would end them with tracebacks."""
    masks = []

    class Executor:
        def submit(self, *_words):
            masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, []))

    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    WorkerPool(Executor(), 2).submit(None)
    assert signal.SIGINT in masks[0]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


# -- Ctrl-C ends a search with what it has found --------------------------------------------------------------------------


def interrupting(monkeypatch: pytest.MonkeyPatch, modules: Sequence[str], *, after: int, times: int = 1) -> list[Task]:
    """Send as many interruptions as asked when so many plans have been found to fit; return what is begun from then."""
    begun: list[Task] = []
    fitting: list[PlanEvaluation] = []

    def evaluated(task: Task) -> PlanEvaluation:
        if len(fitting) == after:
            begun.append(task)
        if len(begun) == 1:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)
        found = evaluate(task)
        if found.step_seconds is not None:
            fitting.append(found)
        return found

    for module in modules:
        monkeypatch.setattr(f"ratrain.ratrainc.planner.{module}.evaluate", evaluated)
    return begun


FEW = (*QUICK, "--schedules", "1f1b", "--tp", "1")
INTERRUPTED_COMMANDS = {
    "plan": (("plan", *FEW, "--jobs", "1"), "search.workers", 1),
    "quick": (("plan", *FEW, "--quick"), "search.quick", 1),
    "clusters": (("plan", *FEW, "--pareto", "clusters"), "search.quick", 4),
    "memory": (("plan", *FEW, "--pareto", "memory"), "answer.pareto_front", 4),
    "what-if": (("plan", *FEW, "--jobs", "1", "--what-if", "link=37GB/s"), "search.workers", 2),
    "compare": (("compare", *TINY, "--plan", TINY_PLAN), "answer.strategy_comparison", 2),
    "compare auto": (("compare", *SMALL, "--plan", "auto"), "search.workers", 1),
}


@pytest.mark.parametrize("name", INTERRUPTED_COMMANDS)
def test_the_first_ctrl_c_shows_the_best_so_far(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words, module, after = INTERRUPTED_COMMANDS[name]
    begun = interrupting(monkeypatch, (module,), after=after)
    out = ("-o", str(tmp_path / "P.toml")) if words[0] == "plan" and name != "what-if" else ()
    before = signal.getsignal(signal.SIGINT)
    assert main([*words, *out]) == 130
    assert signal.getsignal(signal.SIGINT) is before
    shown = capsys.readouterr()
    assert "interrupted" in shown.out + shown.err
    assert "Traceback" not in shown.err
    assert re.search(r"step|speed-up", shown.out), "what was found is shown"
    assert len(begun) == 1, "nothing new is begun"
    assert bool(list(tmp_path.glob("P*.toml"))) == bool(out)
    assert not is_ended(), "the next command of this process searches as ever"


@pytest.mark.parametrize("name", ["plan", "quick", "compare"])
def test_the_second_ctrl_c_stops_at_once(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words, module, after = INTERRUPTED_COMMANDS[name]
    interrupting(monkeypatch, (module,), after=after, times=2)
    assert main([*words]) == 130
    shown = capsys.readouterr()
    assert not shown.out
    assert "interrupted" in shown.err


def test_an_interruption_before_anything_is_found_writes_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for words, module in (
        ((*FEW, "--jobs", "1"), "search.workers"),
        ((*TINY, "--clusters", "8", "--smallest", "--capacity", "9MB"), "answer.fewest_clusters"),
    ):
        with monkeypatch.context() as patch:
            interrupting(patch, (module,), after=0)
            assert main(["plan", *words, "-o", str(tmp_path / "P.toml")]) == 130
        shown = capsys.readouterr()
        assert not shown.out
        assert "interrupted: " in shown.err
        assert not list(tmp_path.iterdir())


def test_a_search_keeps_to_its_time_once_a_plan_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """No evaluation begins after it, but the last; and none may take much longer than what is left."""
    seconds, now, taken = 10.0, [0.0], 3.0
    tasks: list[tuple[float, Task]] = []

    def evaluated(task: Task) -> PlanEvaluation:
        tasks.append((now[0], task))
        now[0] += taken
        return evolve(evaluate(evolve(task, seconds=None)), taken=taken)

    monkeypatch.setattr("ratrain.ratrainc.planner.search.workers.evaluate", evaluated)
    monkeypatch.setattr("ratrain.ratrainc.planner.search.time_budget.time.monotonic", lambda: now[0])
    request = evolve(small_request(clusters=3, batch=60), exhaustive=False, seconds=seconds)
    answer = Search(request).run()
    assert answer.best is not None
    late = [begin for begin, _ in tasks if begin > seconds]
    assert len(late) <= 1
    for begin, task in tasks[2:]:
        assert task.seconds is not None
        assert task.seconds <= max(seconds - begin, 20.0)


# -- what -o and --json write is what is asked ---------------------------------------------------------------------------


def planned(capsys, *words: str) -> dict[str, object]:
    capsys.readouterr()
    assert main(["plan", *words, "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("level", [(), ("--quick",)])
@pytest.mark.parametrize("change", [None, "ddr=9MB", "link=37GB/s,latency=1us"])
@pytest.mark.sampled(2)
def test_the_plan_that_is_written_is_that_of_the_machine_asked_about(capsys, tmp_path, monkeypatch, level, change):
    """It has the shape and the peak that `--json` tells, and compiles for the machine beside it as its comments say."""
    monkeypatch.chdir(tmp_path)
    asked = ("--what-if", change) if change else ()
    found = planned(capsys, *(QUICK if level else SMALL), *level, *asked, "--tokens", "1e9", "-o", "P.toml")
    told = found["what_if"][0]["plan"] if change else found["plans"][0]
    text = Path("P.toml").read_text()
    plan = parse_plan(text, file="P.toml", model=load_model(TINY[1]))
    keys = ("pp", "dp", "micro_batch_size", "micro_batches", "zero", "reduce")
    assert {key: getattr(plan, key) for key in keys} == {key: told[key] for key in keys}
    assert list(plan.cuts) == told["cuts"]
    assert told["days"] > 0
    assert found["output"] == "P.toml"
    beside = Path("P.machine.toml")
    assert beside.exists() == bool(change) == ("machine_output" in found)
    assert ('machine = "P.machine.toml"' in text) == bool(change)
    # a plan that was placed has a peak; one that was only estimated has a bound of it
    assert ("highest peak at least " in text) == (told["how"] == "estimate")
    assert f"({told['how']}), highest peak" in text
    if change:
        machine = load_machine(str(beside))
        given = load_machine(None)
        assert machine.name == "mt3000-what-if"
        changed = parse_changes(change, given)
        assert {key: c.value for key, c in machine.constants.items()} == {
            key: changed.get(key, c.value) for key, c in given.constants.items()
        }
    if not level:
        words = ["compile", *TINY, "--plan", "P.toml", "--passes", told["passes"], "-o", "best.rtx", "--json"]
        assert main(words) == 0, "the plan's file names its machine"
        stages = json.loads(capsys.readouterr().out)["stages"]
        assert max(stage["peak_live_bytes"] for stage in stages) == told["peak_bytes"]


@pytest.mark.parametrize(
    "words",
    [
        (*SMALL, "--what-if", "ddr=9MB", "--what-if", "ddr=8MB", "-o", "P.toml"),
        (*SMALL, "--quick", "--robust"),
        (*TINY, "--clusters", "4", "--smallest", "--global-batch", "16"),
        (*TINY, "--clusters", "4", "--smallest", "--tokens", "1e9"),
        (*TINY, "--clusters", "4", "--smallest", "--robust"),
        (*TINY, "--clusters", "4", "--smallest", "--what-if", "ddr=9MB"),
    ],
)
def test_questions_that_have_no_one_answer_are_refused(capsys, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *words]) == 2
    shown = capsys.readouterr()
    assert "Error:" in shown.err
    assert not shown.out
    assert not list(tmp_path.iterdir())


def test_a_changed_machine_for_which_nothing_fits_writes_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *SMALL, "--what-if", "ddr=1MB", "-o", "P.toml"]) == 1
    assert "RT053" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_plans_are_kept_and_fronts_are_written(capsys, tmp_path):
    out, picture = tmp_path / "P.toml", tmp_path / "front.svg"
    assert main(["plan", *QUICK, "--quick", "--keep", "3", "--explain-rejected", "-o", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    names = [str(tmp_path / f"P-{number}.toml") for number in (1, 2, 3)]
    assert found["outputs"] == names
    assert not out.exists()
    model = load_model(str(ROOT / "examples/tiny.json"))
    plans = [parse_plan(Path(name).read_text(), file=name, model=model) for name in names]
    assert len(set(plans)) == 3
    assert any("bubble" in loser["seconds"] for loser in found["rejected"])
    words = ("--pareto", "clusters", "--quick", "--plot", str(picture), "-o", str(out), "--json")
    assert main(["plan", *QUICK, *words]) == 0
    front = json.loads(capsys.readouterr().out)
    points = front["points"]
    assert [p["limit"] for p in points] == [p["clusters"] for p in points]
    assert all(a["limit"] < b["limit"] for a, b in pairwise(points))
    assert all(a["predicted_step_seconds"] > b["predicted_step_seconds"] for a, b in pairwise(points))
    assert all(p["bound_step_seconds"] <= p["predicted_step_seconds"] for p in points)
    assert picture.read_text().startswith("<?xml")


def test_a_front_of_bytes_stays_within_them(capsys):
    words = ("--pareto", "memory", "--schedules", "1f1b", "--tp", "1", "--zero", "1", "--seconds", "0")
    assert main(["plan", *QUICK, *words, "--json"]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert points
    assert all(p["peak_bytes"] <= p["limit"] for p in points if p["how"] != "estimate")
    assert all(p["bound_step_seconds"] <= p["predicted_step_seconds"] for p in points)


def test_a_front_lists_a_plan_again_only_where_more_bytes_make_it_faster(capsys):
    words = ("--pareto", "memory", "--schedules", "1f1b", "--tp", "1", "--quick")
    asked = ("plan", "--model", "gpt2", "--clusters", "4", "--global-batch", "16", "--seq-len", "1024", *words)
    assert main([*asked, "--json"]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    plans = [(p["summary"], p["family"]) for p in points]
    again = [at for at, (a, b) in enumerate(pairwise(plans)) if a == b]
    assert again, "the case shows what is tested"
    for at in again:
        assert points[at + 1]["predicted_step_seconds"] < 0.99 * points[at]["predicted_step_seconds"]
    assert main([*asked]) == 0
    text = capsys.readouterr().out
    assert text.count(", more kept") == len(again)
    assert "all times estimates" in text


@pytest.mark.parametrize(
    "words",
    [
        ("--plot", "x.svg"),
        ("--pareto", "clusters", "--keep", "2"),
        ("--pareto", "clusters", "--objective", "memory"),
        ("--objective", "memory", "--robust-links"),
        ("--keep", "2", "--what-if", "ddr=16GiB"),
        ("--schedules", "zb-w"),
        ("--smallest", "--keep", "2"),
    ],
)
def test_questions_that_contradict_each_other_are_refused(words):
    assert main(["plan", *QUICK, *words]) == 2


def test_a_strategy_that_places_goes_with_no_schedules(capsys):
    assert main(["plan", *QUICK, "--quick", "--strategy", "zb-v", "--schedules", "1f1b"]) == 1
    assert "places zb-v" in capsys.readouterr().err


def test_plans_are_priced_by_their_sums() -> None:
    """By bounds and by simulation: with two peaks, f16 sums are faster, and a certificate holds for them as for f32."""
    two = with_constants(load_machine("mt3000-two-peaks"), {"fp32_sum_peak": SLOW["fp16_peak"] / 2, **SLOW})
    request = evolve(small_request(clusters=4, batch=16), machine=two, peers=(1,))
    template = evolve(request.setting.template, accumulate="f16-runs")
    plain, runs = (Search(each).run() for each in (request, evolve(request, plan_template=template)))
    assert (plain.best.plan.accumulate, runs.best.plan.accumulate) == ("f32", "f16-runs")
    assert runs.best.seconds < plain.best.seconds
    for answer in (plain, runs):
        assert answer.proven
        assert answer.best.bound_seconds <= answer.best.seconds
    text = plan_file(runs, runs.best, "small.json")
    assert 'accumulate = "f16-runs"' in text
    assert parse_plan(text, file="P.toml", model=request.model) == runs.best.plan

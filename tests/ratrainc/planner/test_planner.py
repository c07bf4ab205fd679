"""The planner: its choice against brute force, its certificate, and the bounds and shapes that it searches by."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from attrs import evolve

from ratrain.ratrain_ir.config.plan_text import check_plan
from ratrain.ratrain_ir.schedules.action import ActionKind, most_in_flight
from ratrain.ratrain_ir.schedules.named import SCHEDULES, most_held
from ratrain.ratrain_ir.schedules.shape import PipelineShape
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.text.plan_file import parse_plan
from ratrain.ratrainc.choices.machine_changes import with_constants
from ratrain.ratrainc.choices.machine_choice import MachineChoice
from ratrain.ratrainc.choices.strategies import strategy
from ratrain.ratrainc.planner.answer.crossings import crossings
from ratrain.ratrainc.planner.answer.plan_files import plan_file
from ratrain.ratrainc.planner.answer.planned import Planned
from ratrain.ratrainc.planner.bounds.bounds import plan_bounds
from ratrain.ratrainc.planner.bounds.cuts import best_cuts, cuts_of, partitions, with_order
from ratrain.ratrainc.planner.bounds.held_passes import held_passes
from ratrain.ratrainc.planner.bounds.pass_order import MERGINGS, grouped, pass_order, passes_of
from ratrain.ratrainc.planner.bounds.profiles import Profiles
from ratrain.ratrainc.planner.bounds.shape_columns import Columns
from ratrain.ratrainc.planner.search.plan_evaluation import Task, compiled_units, evaluate, folded_micro_batches
from ratrain.ratrainc.planner.search.plan_search import Search
from ratrain.ratrainc.planner.search.quick import estimated, quick_answer
from ratrain.ratrainc.planner.space.objective import OBJECTIVES
from ratrain.ratrainc.planner.space.plan_families import AHEAD, USUAL, families
from ratrain.ratrainc.planner.space.space import Shape, divisions, shapes
from ratrain.targets.machine.machine import load_machine
from tests.end_to_end.tiny_runs import MODEL as RUN
from tests.end_to_end.tiny_runs import make_plan
from tests.ratrainc.planner.small_requests import MODEL, SLOW, costs_of_every_plan, every_candidate, small_request
from tests.targets.machine.test_links import group
from tests.targets.machine.test_links import machine as grouped_machine

if TYPE_CHECKING:
    from ratrain.ratrainc.planner.search.plan_request import PlanRequest

F = ActionKind.FORWARD


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
        pytest.param(tuple(name for name in USUAL if name != AHEAD), marks=pytest.mark.full),
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
    bounds = with_order(columns, np.array(every, float)).seconds
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


@pytest.mark.parametrize("schedule", sorted(USUAL))
@pytest.mark.parametrize("merging", MERGINGS)
def test_states_that_share_no_pass_are_as_many_as_bounds_say(schedule, merging):
    """Counted anew, from what merged passes surely hold: a backward beside a forward is without that one."""
    for chunks, layout, slices in divisions(schedule):
        shape = PipelineShape(3, 9, chunks, layout, slices)
        for stage, found in enumerate(held_passes(schedule, shape, merging)):
            held: list[Any] = []
            at_backward: dict[bool, list[set[Any]]] = {False: [], True: []}
            for several in grouped(passes_of(schedule, shape, stage), merging):
                actions = [action for each in several for action in each.actions]
                for place, action in enumerate(actions):
                    if action.kind is F:
                        held.append(action.work)
                    elif action.work in held:
                        sure = set(held) - {each.work for each in actions[:place] if each.kind is F}
                        at_backward[action.chunk == chunks * 3 - 1].append(sure)
                        held.remove(action.work)
            of_head, others = at_backward[True], at_backward[False]
            for count, most, states in (
                (found.windows, found.late, of_head + others),
                (found.head_windows, found.headed, of_head),
            ):
                if most:
                    assert most_apart([state for state in states if len(state) >= most]) >= count > 0
                else:
                    assert not count


def most_apart(states):
    """A number of sets no two of which have a common element, the ones with the earliest last element first."""
    count, used = 0, set()
    for state in sorted(states, key=lambda state: max((micro_batch, piece) for _, micro_batch, piece in state)):
        if used.isdisjoint(state):
            count, used = count + 1, used | state
    return count


def test_with_one_pass_ahead_each_merged_backward_holds_its_own_micro_batch():
    """F0 | F1 B0 | F2 B1 | ...: all but the first backward, which has no gradients before it, and the last."""
    (found,) = held_passes(AHEAD, PipelineShape(1, 12), "all")
    assert (found.late, found.windows) == (found.headed, found.head_windows) == (1, 10)
    (found,) = held_passes(AHEAD, PipelineShape(1, 12), "none")
    assert (found.late, found.windows) == (2, 5)


def test_a_forward_alone_is_one_that_no_pass_is_merged_with():
    """In the turns of ZB-V the second forward of the first stage comes before its own backward."""
    order = pass_order("zb-v", PipelineShape(2, 8, 2, "vee"), "all")
    assert set(order.chunk[(order.stage == 0) & (order.alone == 1)].tolist()) == {3}
    assert not pass_order(AHEAD, PipelineShape(1, 8), "all").alone[1:].any()
    assert pass_order("1f1b", PipelineShape(1, 8), "none").alone.sum() == 8


def test_1f1b_has_the_windows_of_its_closed_form():
    for stages, micro_batches in ((4, 1), (4, 3), (4, 4), (4, 9), (2, 7)):
        found = held_passes("1f1b", PipelineShape(stages, micro_batches))
        for stage, placement in enumerate(found):
            flight = min(stages - stage, micro_batches)
            late = min(stages - stage, micro_batches - 1) if micro_batches > 2 else 0
            assert placement.early == flight
            assert placement.late <= late
            assert placement.windows <= max(1, (micro_batches - 1) // flight)


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


@pytest.mark.parametrize("seconds", [0.0, 1e4])
def test_a_search_that_ends_by_itself_with_a_gap_says_what_closes_it(seconds: float) -> None:
    """More time changes nothing then: the answer names --exhaustive, as it does not where time ran out."""
    request = evolve(small_request(capacity=2.6e6, clusters=4, batch=8), exhaustive=False, seconds=seconds)
    answer = Search(request).run()
    assert answer.settled == (seconds > 0)
    told = " ".join(map(str, Planned(answer, False, None, "small", MachineChoice()).parts()))
    assert ("--exhaustive tries it" in told) == (answer.settled and not answer.proven)
    if answer.settled:
        assert answer.evaluations == Search(evolve(request, seconds=2 * seconds)).run().evaluations
        assert not answer.proven
        proved = Search(evolve(request, exhaustive=True)).run()
        assert proved.proven
        assert proved.bound >= answer.bound

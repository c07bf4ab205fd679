"""The quick answer of the planner: its bounds, its estimates and its time; what is said of rejected plans."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import pytest
from attrs import evolve

from ratrain.ratrainc.choices.machine_changes import with_constants
from ratrain.ratrainc.choices.machine_choice import MachineChoice
from ratrain.ratrainc.cli import main
from ratrain.ratrainc.console.parts import TextTable
from ratrain.ratrainc.console.progress import Steps
from ratrain.ratrainc.planner.answer.planned import Planned
from ratrain.ratrainc.planner.bounds import order_bounds
from ratrain.ratrainc.planner.bounds.estimates import cuts_estimate
from ratrain.ratrainc.planner.bounds.profiles import Profiles
from ratrain.ratrainc.planner.bounds.shape_columns import Columns
from ratrain.ratrainc.planner.search import quick
from ratrain.ratrainc.planner.search.family_spaces import family_spaces
from ratrain.ratrainc.planner.search.plan_evaluation import PlanEvaluation, Task, evaluate
from ratrain.ratrainc.planner.search.plan_search import Search
from ratrain.ratrainc.planner.search.quick import by_promise, estimated, quick_answer, tried
from ratrain.ratrainc.planner.space.objective import OBJECTIVES
from ratrain.ratrainc.planner.space.plan_families import families
from ratrain.ratrainc.planner.space.space import Shape
from ratrain.targets.machine.machine import load_machine
from tests.ratrainc.planner.small_requests import SLOW, small_request

if TYPE_CHECKING:
    from ratrain.ratrainc.planner.search.answer import Answer
    from ratrain.ratrainc.planner.search.plan_request import PlanRequest


@pytest.mark.parametrize("answer_to", [quick_answer, lambda request: Search(request).run()])
def test_the_parts_of_each_rejected_plan_sum_to_what_is_said_of_it(answer_to: Callable[[PlanRequest], Answer]) -> None:
    """Whether it was simulated or has a bound alone; as numbers, and as rounded in the text."""
    request = evolve(small_request(clusters=3, batch=4), exhaustive=False, explain=True)
    request = evolve(request, families=families(request.strategy, ("1f1b", "zb-h1")))
    answer = answer_to(request)
    named = {candidate.plan.summary for candidate in answer.evaluated}
    for row in answer.rejected_plans:
        simulated = re.search(r" simulated(?:, folded)? \((.+?)\)(?:;|$)", row.reason)
        assert simulated is None or simulated[1] in named, "by the name that the table has"
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
@pytest.mark.parametrize("jobs", [1, 2])
def test_the_quick_answer_is_the_best_of_the_plans_that_it_simulates(monkeypatch, objective, capacity, jobs):
    """No estimate comes before a simulated plan, however little time there is; what is refused is passed over.

    So it is with a process for each of two plans.
    """
    request = evolve(small_request(capacity=capacity), exhaustive=False, objective=OBJECTIVES[objective], jobs=jobs)
    monkeypatch.setattr(quick, "_WORTH_A_PROCESS", 0)
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


def test_plans_are_tried_by_the_middle_of_bound_and_estimate() -> None:
    """Estimates alone put a plan that takes what its estimate says before one that takes what its bound says."""
    answer = estimated(evolve(small_request(), exhaustive=False))
    first, second, third, *_ = answer.best_plans
    timed = [(first, 6.1, 6.0), (second, 6.6, 3.0), (third, 9.0, 8.9)]
    answer.candidates = [evolve(each, estimated_seconds=now, bound_seconds=least) for each, now, least in timed]
    assert [each.shape for each in by_promise(answer)] == [second.shape, first.shape, third.shape]


def given_times(
    monkeypatch: pytest.MonkeyPatch, units: Sequence[float], pace: float
) -> tuple[Answer, list[PlanEvaluation]]:
    """Answer quickly where plans have these units of work, each of which takes `pace` seconds of computing."""
    answer = estimated(evolve(small_request(), exhaustive=False))
    # far enough apart that their work does not change their order
    answer.candidates = [
        evolve(each, bound_seconds=0.0, estimated_seconds=2.0**at)
        for at, each in enumerate(answer.best_plans[: len(units)])
    ]
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


def test_a_loop_that_must_be_compiled_leaves_no_shape_without_cuts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes computing time, once: more than all that a quick answer has for cuts."""
    request = small_request(clusters=4, batch=4)
    usual = estimated(request)
    loop, calls = order_bounds._step, []

    def compiled_first(*arguments: object) -> float:
        until = time.process_time() + (0.0 if calls else 1.5 * quick.SECONDS)
        while time.process_time() < until:
            pass
        calls.append(arguments)
        return loop(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(order_bounds, "_step", compiled_first)
    found = estimated(request)
    assert len(calls) > 1
    assert [each.plan for each in found.candidates] == [each.plan for each in usual.candidates]

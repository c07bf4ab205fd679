"""Levels of single blocks of the best plan: taken where they make it shorter, under bounds that hold for all of them."""

from __future__ import annotations

from itertools import chain, combinations
from typing import TYPE_CHECKING

import numpy as np
import pytest
from attrs import evolve

from ratrain.ratrain_ir.config.zero_levels import ZeroLevels
from ratrain.ratrain_ir.model.blocks import block_chain
from ratrain.ratrain_ir.text.plan_file import parse_plan
from ratrain.ratrainc.choices.machine_changes import with_constants
from ratrain.ratrainc.planner.answer.plan_files import plan_file
from ratrain.ratrainc.planner.bounds.cuts import cuts_of
from ratrain.ratrainc.planner.bounds.profiles import Profiles
from ratrain.ratrainc.planner.search.family_spaces import family_spaces
from ratrain.ratrainc.planner.search.levels import all_gathered, bounds_of_any_levels
from ratrain.ratrainc.planner.search.plan_evaluation import Task, evaluate
from ratrain.ratrainc.planner.search.plan_search import Search
from ratrain.ratrainc.planner.space.plan_families import families
from ratrain.ratrainc.planner.space.space import Shape
from tests.ratrainc.planner.small_requests import MODEL, small_request

if TYPE_CHECKING:
    from ratrain.ratrainc.planner.search.plan_request import PlanRequest


def wide_request(clusters: int, capacity: float, layers: int, *names: str) -> PlanRequest:
    request = small_request(capacity=capacity, clusters=clusters, batch=4 * clusters)
    stores = {"host_capacity": 1e9, "host_store": 1e8, "host_fetch": 1e8}
    request = evolve(request, machine=with_constants(request.machine, stores))
    request = evolve(request, model=evolve(MODEL, layers=layers, vocab_size=200), zero_levels=(1, 2, 3), peers=(1,))
    return evolve(request, families=families(request.strategy, names or ("1f1b",)), wide=True)


@pytest.mark.parametrize(
    ("name", "shape", "layers"),
    [
        ("1f1b", Shape(1, 4, 2, 2, 3, "each-micro-batch"), (2,)),
        ("1f1b", Shape(2, 2, 1, 8, 3, "last"), (1, 1)),
        pytest.param("zb-h1", Shape(2, 2, 1, 8, 3, "each-micro-batch"), (1, 1), marks=pytest.mark.full),
        pytest.param("1f1b+host", Shape(1, 4, 1, 4, 3, "each-micro-batch"), (2,), marks=pytest.mark.full),
    ],
)
def test_bounds_hold_for_any_levels(name, shape, layers):
    """All that a plan of two layers may have: each block gathers its view for each use, or keeps it."""
    request = wide_request(4, 2e6, 2, name)
    (space,) = family_spaces(request, Profiles(request.setting))
    plan = shape.plan(request.setting, cuts_of(layers))
    bounds = bounds_of_any_levels(space, shape, plan)
    names = [f"{each} 2" for each in block_chain(request.model)]
    subsets = list(chain.from_iterable(combinations(names, count) for count in range(len(names) + 1)))
    assert len(subsets) == 64
    for each in subsets[:: 3 if shape.pp > 1 else 2]:
        leveled = evolve(plan, zero_blocks=ZeroLevels.parse(", ".join(each)) if each else None)
        found = evaluate(Task(request.model, leveled, space.request.strategy.passes, request.machine))
        assert (bounds.peak_bytes[0] <= np.array(found.peak_bytes)).all()
        assert found.step_seconds is None or bounds.seconds[0] <= found.step_seconds * (1 + 1e-9)


def test_the_best_plan_has_levels_of_its_own_where_these_are_shorter():
    request = wide_request(4, 1.45e6, 4)
    request = evolve(request, zero_levels=(2, 3), exhaustive=False)
    answer = Search(request).run()
    alone = Search(evolve(request, wide=False)).run()
    best = answer.best
    assert best.plan.zero_blocks is not None
    assert best.seconds < alone.best.seconds
    assert answer.relaxed_bound_seconds <= answer.bound_seconds <= best.bound_seconds < best.seconds
    assert not answer.proven, "other levels were not tried"
    assert best.to_json(4)["zero_blocks"] == str(best.plan.zero_blocks)
    text = plan_file(answer, best, "small.json")
    plan = parse_plan(text, file="P.toml", model=request.model)
    assert plan.zero_blocks == best.plan.zero_blocks
    found = evaluate(Task(request.model, plan, best.pipeline, request.machine, checked_below=1.0))
    assert found.step_seconds == best.seconds
    assert found.verified


def test_levels_are_chosen_where_the_search_has_both():
    request = wide_request(4, 2e6, 2)
    (space,) = family_spaces(request, Profiles(request.setting))
    shape = Shape(1, 4, 2, 2, 2, "each-micro-batch", ends=3)
    assert all_gathered(space, shape) == Shape(1, 4, 2, 2, 3, "each-micro-batch")
    assert all_gathered(space, Shape(2, 1, 1, 16, 0, "last")) is None
    for other in (evolve(request, zero_levels=(1, 2)), evolve(request, wide=False)):
        (space,) = family_spaces(other, Profiles(other.setting))
        assert all_gathered(space, shape) is None

"""The allocator's sweep of groups: what is born together placed together, with deferred tensors in the bytes that it frees bit by bit."""

from __future__ import annotations

import random
import re
from time import perf_counter

import numpy as np
import pytest

from ratrain import api
from ratrain.passes.memory.allocation import AllocationProblem, Effort, check_allocation, groups
from ratrain.passes.memory.allocation.attempt import Attempt
from ratrain.passes.memory.allocation.groups import groups_in_order
from ratrain.passes.memory.allocation.problem import instance_of
from ratrain.ratrain_ir.frontend.model_files import load_model
from ratrain.ratrain_ir.frontend.plan_text import parse_plan

MLP, ATTENTION, WEIGHTS = [43, 43, 16], [16] * 4, [43, 43] + [16] * 7


def split_backward(micro_batches: int, in_flight: int, layers: int) -> AllocationProblem:
    """A stage whose backward frees two layers' saved tensors by turns, and takes bytes of the other's shape for gradients of weights.

    It begins with one forward after another; a workspace of each kind of op has holes in its life.
    """
    ops, sizes, intervals = 2 * layers, [], []
    period = ops + 2
    spaces: list[list[tuple[int, int]]] = [[], []]

    def born(group: list[int], start: int, stop: int) -> None:
        sizes.extend(group)
        intervals.extend([((start, stop),)] * len(group))

    for micro_batch in range(micro_batches):
        backward = in_flight + micro_batch * period
        start = backward - in_flight * period - 1 if micro_batch >= in_flight else micro_batch
        gone = backward + ops
        born([16], max(start - 1, 0), gone)
        born(WEIGHTS, start, gone)
        for op in range(ops):
            saved, deferred = (MLP, ATTENTION) if op % 2 == 0 else (ATTENTION, MLP)
            born(saved, start, backward + op)
            born(deferred, backward + op - 1, gone)
            spaces[op % 2].append((backward + op - 1, backward + op))
    sizes += [43, 16]
    intervals += map(tuple, spaces)
    return AllocationProblem(sizes, intervals, in_flight + (micro_batches + 1) * period)


def attempt_at(problem: AllocationProblem, gap: float) -> tuple[Attempt, list[int]]:
    instance, kept = instance_of(problem)
    return Attempt.of(instance, 0, None, Effort(gap=gap), perf_counter() + 60), kept.tolist()


def assert_placed(problem: AllocationProblem, attempt: Attempt, kept: list[int]) -> None:
    offsets = [0] * len(problem.sizes)
    for buffer, offset in zip(kept, attempt.offsets.tolist(), strict=True):
        offsets[buffer] = offset
    assert check_allocation(problem, offsets) == []
    assert attempt.height == int((attempt.offsets + attempt.instance.sizes).max()) >= attempt.instance.bound()


@pytest.mark.parametrize(("in_flight", "layers"), [(3, 2), (5, 4), (8, 3)])
def test_what_a_split_backward_takes_fits_what_it_frees(in_flight, layers):
    """At each op bytes of one shape are free, and those of the other are needed; the bytes that live at once are enough all the same."""
    problem = split_backward(40, in_flight, layers)
    attempt, kept = attempt_at(problem, 0.0)
    groups_in_order(attempt)
    assert attempt.method == "groups in order"
    assert attempt.height == attempt.bound
    assert_placed(problem, attempt, kept)


def test_a_v_schedule_with_split_backwards_is_placed_within_a_thousandth():
    """Every stage of LLaMA-2-7B on 8, two chunks each; stacks of slots and first fit come a quarter of a percent above on some."""
    model = load_model("llama-2-7b")
    plan = """[parallel]
pp = 8
dp = 2
chunks = 2
layout = "vee"
[batch]
micro_batch_size = 1
micro_batches = 24
seq_len = 2048
[state]
zero = 1
"""
    module = api.lowered(model, parse_plan(plan, file="v-min", model=model))
    last = api.run_passes(module, "place-schedule{kind=v-min},joint-order,allocate-ddr", machine="h100-node")[-1]
    stages = [last.statistics[f"stage {stage.index}"] for stage in module.stages]
    assert all(float(re.search("ratio ([0-9.]+)", text)[1]) <= 1.001 for text in stages)
    assert sum("groups in order" in text for text in stages) >= 2


def holed(chance: random.Random, count: int) -> AllocationProblem:
    """Short lives and long ones, born a few at a time; of some the life has holes, of a few it is nearly all the time."""
    intervals, sizes = [], []
    for _ in range(count):
        start = chance.randrange(0, 200)
        length = chance.choice((1, 3, 20, 60))
        spans = [(start, start + length)]
        kind = chance.random()
        if kind < 0.02:
            spans = [(chance.randrange(0, 30), chance.randrange(200, 260))]
        elif kind < 0.1:
            spans = [(at, at + chance.randint(1, 8)) for at in range(start % 20, 260, 20)]
        intervals.append(tuple(spans))
        sizes.append(chance.choice((1, 4, 7, 16, 43)))
    return AllocationProblem(sizes, intervals, 320)


@pytest.mark.parametrize("depth", [8, 512])
def test_what_is_found_is_sound(depth, monkeypatch):
    """Whatever lives have holes, and however much is left: the nearer the bound, the more the sweep has to go back, as far as it can."""
    monkeypatch.setattr(groups, "_DEPTH", depth)
    monkeypatch.setattr(groups, "_LOOKED", 10_000_000)
    methods = []
    for seed in range(40):
        chance = random.Random(seed)
        problem = holed(chance, chance.randint(20, 400))
        attempt, kept = attempt_at(problem, chance.choice((0.02, 0.1, 0.3)))
        groups_in_order(attempt)
        methods.append(attempt.method)
        assert_placed(problem, attempt, kept)
    assert methods.count("groups in order") >= 15
    assert "stacked" in methods


def test_the_same_problem_gets_the_same_placement():
    problem = holed(random.Random(5), 300)
    first, second = (attempt_at(problem, 0.1)[0] for _ in range(2))
    groups_in_order(first)
    groups_in_order(second)
    assert first.method == "groups in order"
    assert np.array_equal(first.offsets, second.offsets)


@pytest.mark.parametrize("sides", [None, [1, -1, 0, 0]])
def test_where_there_is_nothing_to_sweep_nothing_is_offered(sides):
    """All live for most of the time; or buffers keep to sides, which the sweep knows nothing of."""
    attempt, _ = attempt_at(
        AllocationProblem([3, 5, 2, 4], [((0, 9),), ((1, 9),), ((0, 8),), ((2, 9),)], 9, sides), 0.0
    )
    groups_in_order(attempt)
    assert attempt.height >= attempt.bound
    assert sides is None or attempt.method == "stacked"

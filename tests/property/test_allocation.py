"""The allocator against brute force: every placement is valid, no higher than it may be, and the same every time."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain.passes.manager import PassManager
from ratrain.passes.memory.allocation import Allocation, AllocationProblem, allocate
from ratrain.ratrain_ir.analysis.lifetime import lifetimes
from ratrain.ratrain_ir.config.types import ALIGNMENT_BYTES
from ratrain.ratrain_ir.testing.fake_target import FakeTarget
from ratrain.ratrain_ir.testing.strategies import allocation_problems, cases

PROBLEMS = allocation_problems().map(lambda fields: AllocationProblem(**fields))


@st.composite
def problems_with_sides(draw) -> AllocationProblem:
    fields = draw(allocation_problems(max_buffers=12))
    sides = draw(st.lists(st.sampled_from((-1, 0, 1)), min_size=len(fields["sizes"]), max_size=len(fields["sizes"])))
    return AllocationProblem(**fields, sides=sides)


def live_at(problem: AllocationProblem, position: int) -> list[int]:
    return [i for i, spans in enumerate(problem.intervals) if any(a <= position < b for a, b in spans)]


def lower_bound(problem: AllocationProblem) -> int:
    """Return the most bytes that are live at one position: no placement is lower."""
    return max((sum(problem.sizes[i] for i in live_at(problem, p)) for p in range(problem.positions)), default=0)


def overlap(problem: AllocationProblem, found: Allocation, one: int, other: int) -> bool:
    """Whether two buffers have a byte in common, live or not."""
    (a, b), (size_a, size_b) = (found.offsets[i] for i in (one, other)), (problem.sizes[i] for i in (one, other))
    return a < b + size_b and b < a + size_a


def assert_valid(problem: AllocationProblem, found: Allocation) -> None:
    assert len(found.offsets) == len(problem.sizes)
    assert all(offset >= 0 and offset % ALIGNMENT_BYTES == 0 for offset in found.offsets)
    for position in range(problem.positions):
        for one, other in combinations(live_at(problem, position), 2):
            assert not overlap(problem, found, one, other), f"buffers {one} and {other} share bytes at {position}"
    ends = [o + s for o, s, spans in zip(found.offsets, problem.sizes, problem.intervals, strict=True) if spans]
    assert found.arena_bytes == max(ends, default=0)


@settings(max_examples=150)
@given(PROBLEMS)
def test_placements_are_valid_and_between_the_bounds(problem):
    found = allocate(problem)
    assert_valid(problem, found)
    assert lower_bound(problem) <= found.arena_bytes <= sum(problem.sizes)


@settings(max_examples=80)
@given(problems_with_sides())
def test_sides_never_meet(problem):
    """What is received shares no byte with what is sent, whenever either lives."""
    found = allocate(problem)
    assert_valid(problem, found)
    placed = [i for i in range(len(problem.sizes)) if problem.intervals[i] and problem.sizes[i]]
    for one, other in combinations(placed, 2):
        if problem.sides[one] * problem.sides[other] == -1:
            assert not overlap(problem, found, one, other)


@settings(max_examples=40)
@given(PROBLEMS, st.sampled_from((2, 3, 1 << 20)))
def test_bytes_may_be_counted_in_any_unit(problem, factor):
    scaled = AllocationProblem([size * factor for size in problem.sizes], problem.intervals, problem.positions)
    assert allocate(scaled).offsets == [offset * factor for offset in allocate(problem).offsets]


@settings(max_examples=40)
@given(PROBLEMS, st.integers(2, 5))
def test_time_may_be_counted_in_any_unit(problem, factor):
    stretched = [tuple((a * factor, b * factor) for a, b in spans) for spans in problem.intervals]
    same = AllocationProblem(problem.sizes, stretched, problem.positions * factor)
    assert allocate(same).arena_bytes == allocate(problem).arena_bytes


@settings(max_examples=40)
@given(PROBLEMS)
def test_the_same_problem_has_the_same_answer(problem):
    copied = AllocationProblem(list(problem.sizes), list(problem.intervals), problem.positions)
    assert allocate(problem).offsets == allocate(copied).offsets


@settings(max_examples=80)
@given(PROBLEMS)
def test_equal_sizes_reach_the_bound(problem):
    """Buffers of one size and one interval each: colouring an interval graph, which greedy does optimally."""
    single = [((spans[0][0], spans[-1][1]),) for spans in problem.intervals]
    equal = AllocationProblem([ALIGNMENT_BYTES] * len(single), single, problem.positions)
    found = allocate(equal)
    assert_valid(equal, found)
    assert found.arena_bytes == lower_bound(equal)


@settings(max_examples=80)
@given(PROBLEMS)
def test_nested_lives_reach_the_bound(problem):
    """Buffers that all live until the end are a stack."""
    nested = [((min(spans[0][0], problem.positions - 1), problem.positions),) for spans in problem.intervals]
    stack = AllocationProblem(problem.sizes, nested, problem.positions)
    assert allocate(stack).arena_bytes == lower_bound(stack) == sum(problem.sizes)


def test_nothing_needs_nothing():
    assert allocate(AllocationProblem([], [], 5)).arena_bytes == 0
    assert allocate(AllocationProblem([64], [()], 5)).arena_bytes == 0


@pytest.mark.parametrize(
    ("sizes", "intervals", "arena"),
    [
        ([64, 64], [((0, 2),), ((2, 4),)], 64),  # half-open: one after the other in the same bytes
        ([64, 64], [((0, 3),), ((2, 4),)], 128),
        ([64, 64], [((0, 1), (3, 4)), ((1, 3),)], 64),  # a hole in a life is free
        ([64, 64], [((0, 1), (2, 4)), ((1, 3),)], 128),
        ([128, 64, 64], [((0, 4),), ((0, 2),), ((2, 4),)], 192),
        ([256, 64, 128, 64], [((0, 2),), ((0, 4),), ((2, 4),), ((2, 4),)], 320),
    ],
)
def test_by_hand(sizes, intervals, arena):
    problem = AllocationProblem(sizes, intervals, 4)
    found = allocate(problem)
    assert_valid(problem, found)
    assert found.arena_bytes == arena


@settings(max_examples=20)
@given(cases(max_layers=4))
def test_training_schedules_lie_between_the_bounds(case):
    """No placement is valid below the peak of live bytes, and none of these needs more than everything side by side."""
    module = PassManager(FakeTarget()).run(case.module(), "recompute,allocate-ddr")
    for stage in module.stages:
        everything = sum(-(-t.type.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for t in stage.tensors.values())
        assert lifetimes(stage).peak_bytes <= stage.arena_bytes < everything

"""Laws of the allocator: against brute force, under maps of time and size, and against faults put in on purpose."""

from __future__ import annotations

from itertools import combinations, permutations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ratrain.passes.memory.allocation import AllocationProblem, Effort, allocate, check_allocation, lower_bound
from ratrain.passes.memory.allocation.cliques import heaviest_clique
from ratrain.passes.memory.allocation.problem import instance_of
from ratrain.ratrain_ir.testing.strategies import allocation_problems

pytestmark = pytest.mark.xdist_group("allocator")  # one process compiles the search where no cache has it

PROBLEMS = allocation_problems(max_buffers=40).map(lambda fields: AllocationProblem(**fields))
EXACT = Effort(gap=0)


@st.composite
def single_interval_problems(draw, *, most: int) -> AllocationProblem:
    positions = 12
    intervals = []
    for _ in range(draw(st.integers(1, most))):
        start = draw(st.integers(0, positions - 1))
        intervals.append(((start, draw(st.integers(start + 1, positions))),))
    sizes = draw(st.lists(st.integers(1, 6), min_size=len(intervals), max_size=len(intervals)))
    return AllocationProblem(sizes, intervals, positions)


def optimum(problem: AllocationProblem) -> int:
    """Return the lowest height of first fit over every order: some order gives the best placement there is."""
    meet = {
        (i, j)
        for i, j in permutations(range(len(problem.sizes)), 2)
        if any(a < d and c < b for a, b in problem.intervals[i] for c, d in problem.intervals[j])
    }
    heights = []
    for order in permutations(range(len(problem.sizes))):
        offsets: dict[int, int] = {}
        for i in order:
            offset = 0
            for low, j in sorted((offsets[j], j) for j in offsets if (i, j) in meet):
                if low - offset >= problem.sizes[i]:
                    break
                offset = max(offset, low + problem.sizes[j])
            offsets[i] = offset
        heights.append(max(offsets[i] + problem.sizes[i] for i in offsets))
    return min(heights)


@settings(max_examples=40)
@given(single_interval_problems(most=6))
def test_search_agrees_with_brute_force(problem):
    best = optimum(problem)
    found = allocate(problem, effort=EXACT)
    assert check_allocation(problem, found.offsets) == []
    assert found.arena_bytes == found.proved_bytes == best
    assert allocate(problem).arena_bytes >= best


@settings(max_examples=20)
@given(allocation_problems(max_buffers=5, unit=1).map(lambda fields: AllocationProblem(**fields)))
def test_search_agrees_with_brute_force_on_lives_with_holes(problem):
    assume(problem.sizes and all(problem.sizes))
    found = allocate(problem, effort=EXACT)
    assert check_allocation(problem, found.offsets) == []
    assert found.arena_bytes == found.proved_bytes == optimum(problem)


def clique(problem: AllocationProblem) -> int:
    """Return the most bytes of buffers each of which meets each other, from all sets."""
    count = len(problem.sizes)
    meet = [
        {
            j
            for j in range(count)
            if any(a < d and c < b for a, b in problem.intervals[i] for c, d in problem.intervals[j])
        }
        for i in range(count)
    ]
    sets = (chosen for size in range(count + 1) for chosen in combinations(range(count), size))
    return max(sum(problem.sizes[i] for i in chosen) for chosen in sets if all(set(chosen) <= meet[i] for i in chosen))


@settings(max_examples=100)
@given(allocation_problems(max_buffers=9, unit=1).map(lambda fields: AllocationProblem(**fields)))
def test_what_holes_add_is_what_buffers_that_meet_each_other_need(problem):
    assume(problem.sizes and all(problem.sizes) and all(problem.intervals))
    found = heaviest_clique(instance_of(problem)[0])
    assert lower_bound(problem).nbytes <= found <= clique(problem)
    assert found <= allocate(problem, effort=EXACT).arena_bytes


@settings(max_examples=40)
@given(single_interval_problems(most=9))
def test_without_holes_all_that_meet_each_other_live_at_one_time(problem):
    assert heaviest_clique(instance_of(problem)[0]) == lower_bound(problem).nbytes == clique(problem)


def test_a_view_that_is_gathered_anew_keeps_its_bytes():
    """What lives on from the hole of a view into its second life cannot take its bytes, what ends before can."""
    view, before, after, passing = ((0, 2), (6, 8)), ((1, 5),), ((4, 7),), ((3, 4),)
    problem = AllocationProblem([5, 4, 3, 2], [view, before, after, passing], 8)
    assert lower_bound(problem).nbytes == 9
    found = allocate(problem)
    assert found.arena_bytes == found.proved_bytes == 12
    assert found.lower_bound_bytes == 9


@settings(max_examples=30)
@given(single_interval_problems(most=6))
def test_time_reversed_needs_as_much(problem):
    mirrored = [tuple((problem.positions - b, problem.positions - a) for a, b in spans) for spans in problem.intervals]
    back = AllocationProblem(problem.sizes, mirrored, problem.positions)
    assert lower_bound(back).nbytes == lower_bound(problem).nbytes
    assert allocate(back, effort=EXACT).arena_bytes == allocate(problem, effort=EXACT).arena_bytes


@settings(max_examples=40)
@given(single_interval_problems(most=6), st.data())
def test_fewer_buffers_need_no_more(problem, data):
    gone = data.draw(st.integers(0, len(problem.sizes) - 1))
    less = AllocationProblem(
        [size for i, size in enumerate(problem.sizes) if i != gone],
        [spans for i, spans in enumerate(problem.intervals) if i != gone],
        problem.positions,
    )
    assert lower_bound(less).nbytes <= lower_bound(problem).nbytes
    assert allocate(less, effort=EXACT).arena_bytes <= allocate(problem, effort=EXACT).arena_bytes


@given(PROBLEMS, st.data())
def test_only_the_order_of_times_matters(problem, data):
    steps = data.draw(st.lists(st.integers(1, 9), min_size=problem.positions + 1, max_size=problem.positions + 1))
    times = [sum(steps[:k]) for k in range(problem.positions + 1)]
    mapped = [tuple((times[a], times[b]) for a, b in spans) for spans in problem.intervals]
    assert allocate(AllocationProblem(problem.sizes, mapped, times[-1])).offsets == allocate(problem).offsets


@given(single_interval_problems(most=30), st.integers(2, 1000))
def test_scaled_sizes_scale_the_placement(problem, factor):
    scaled = AllocationProblem([size * factor for size in problem.sizes], problem.intervals, problem.positions)
    small, large = allocate(problem, effort=Effort(nodes=500)), allocate(scaled, effort=Effort(nodes=500))
    assert large.offsets == [offset * factor for offset in small.offsets]
    assert large.arena_bytes == small.arena_bytes * factor
    assert large.gap == pytest.approx(small.gap, rel=1e-12)


@given(PROBLEMS)
def test_the_bound_names_its_witness(problem):
    bound = lower_bound(problem)
    live = [
        i
        for i, spans in enumerate(problem.intervals)
        if problem.sizes[i] and any(a <= bound.position < b for a, b in spans)
    ]
    assert list(bound.live) == live
    assert sum(problem.sizes[i] for i in live) == bound.nbytes
    assert allocate(problem).lower_bound_bytes == bound.nbytes


@settings(max_examples=10)
@given(single_interval_problems(most=20))
def test_a_capacity_that_was_reached_is_reached_again(problem):
    reached = allocate(problem, effort=EXACT).arena_bytes
    for capacity in (reached, reached + 1):
        assert allocate(problem, capacity=capacity).arena_bytes <= capacity


@given(allocation_problems(max_buffers=16), st.data())
def test_the_checker_agrees_with_every_pair_at_every_time(fields, data):
    """Random offsets, most of them wrong: a fault is found if and only if there is one, and what is reported is true."""
    count = len(fields["sizes"])
    sides = data.draw(st.lists(st.sampled_from((0, 0, 1, -1)), min_size=count, max_size=count))
    problem = AllocationProblem(**fields, sides=sides)
    offsets = [64 * data.draw(st.integers(0, 40)) for _ in range(count)]

    def shares(i: int, j: int) -> bool:
        return offsets[i] < offsets[j] + problem.sizes[j] and offsets[j] < offsets[i] + problem.sizes[i]

    def live(i: int, position: int) -> bool:
        return any(a <= position < b for a, b in problem.intervals[i])

    wrong = {
        (i, j)
        for i, j in combinations(range(count), 2)
        if shares(i, j)
        and (sides[i] * sides[j] < 0 or any(live(i, p) and live(j, p) for p in range(problem.positions)))
    }
    found = check_allocation(problem, offsets)
    assert bool(found) == bool(wrong)
    in_time = {(i, j) for i, j in wrong if any(live(i, p) and live(j, p) for p in range(problem.positions))}
    assert in_time <= {tuple(sorted((v.first, v.second))) for v in found}
    for violation in found:
        pair = (violation.first, violation.second)
        assert tuple(sorted(pair)) in wrong
        both = all(live(i, violation.position) for i in pair)
        assert both or sides[pair[0]] * sides[pair[1]] < 0


@given(PROBLEMS, st.data())
def test_the_checker_sees_what_is_moved_onto_another(problem, data):
    found = allocate(problem)
    pairs = [
        (i, j)
        for i, j in permutations(range(len(problem.sizes)), 2)
        if any(a < d and c < b for a, b in problem.intervals[i] for c, d in problem.intervals[j])
    ]
    assume(pairs)
    moved, onto = data.draw(st.sampled_from(pairs))
    offsets = list(found.offsets)
    offsets[moved] = offsets[onto]
    reported = check_allocation(problem, offsets)
    assert any({moved, onto} == {v.first, v.second} for v in reported)
    assert all(moved in (v.first, v.second) for v in reported)

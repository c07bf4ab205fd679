"""The allocator: hard published instances, known optima, large problems, refusals, and the command line."""

from __future__ import annotations

import csv
import json
import random
import subprocess
import sys
from itertools import pairwise, permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratrain.passes.memory.allocation import AllocationProblem, Effort, Violation, allocate, check_allocation
from ratrain.passes.memory.allocation.problem import Instance, instance_of
from ratrain.passes.memory.allocation.small import greedy, neighbours
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrainc.cli import main
from ratrain.ratrainc.memory.allocation_csv import _diagnosed, _sound, read_problem
from tests.passes.allocation_problems import assert_sound, random_problem

DATA = Path(__file__).resolve().parents[1] / "data" / "minimalloc"
GAPPED = "b0,0,3,4\nb1,7,9,5\nb2,4,6,3\nb3,3,4,5\nb4,5,7,2\nb5,2,5,3\nb6,3,4,1\nb7,4,7,3\nb8,6,8,5\n"
GAPPED_BOUND = 10
"""Nine buffers of which 10 bytes live at once, but which need 11 (tried in every order)."""
HARD = [f"{letter}.1048576" for letter in "ABCDEFGHIJK"]

pytestmark = pytest.mark.xdist_group("allocator")  # one process compiles the loops where no cache has them


def guillotine(seed: int, cuts: int, *, height: int = 1 << 16, width: int = 1 << 12) -> AllocationProblem:
    """A full rectangle of bytes and time, cut again and again across one of its pieces: its height is the optimum."""
    chance = random.Random(seed)
    pieces = [(0, height, 0, width)]
    while len(pieces) < cuts:
        low, high, start, stop = pieces.pop(chance.randrange(len(pieces)))
        if chance.random() < 0.5 and high - low > 1:
            middle = chance.randrange(low + 1, high)
            pieces += [(low, middle, start, stop), (middle, high, start, stop)]
        elif stop - start > 1:
            middle = chance.randrange(start + 1, stop)
            pieces += [(low, high, start, middle), (low, high, middle, stop)]
        else:
            pieces.append((low, high, start, stop))
    chance.shuffle(pieces)
    return AllocationProblem([h - l for l, h, _, _ in pieces], [((a, b),) for _, _, a, b in pieces], width)  # noqa: E741


def pipeline(micro_batches: int, depth: int = 4, layers: int = 6) -> AllocationProblem:
    """1F1B in little: every layer saves two tensors for its backward, and has temporaries."""
    sizes, intervals, open_, now = [], [], {}, 0
    order = [("F", j) for j in range(depth)]
    for j in range(micro_batches - depth):
        order += [("B", j), ("F", j + depth)]
    order += [("B", j) for j in range(micro_batches - depth, micro_batches)]
    for op, j in order:
        for layer in range(layers) if op == "F" else reversed(range(layers)):
            for size, life in ((30, 1), (50, 2)):
                sizes.append(size * 64)
                intervals.append(((now, now + life),))
            for part, size in enumerate((40, 11)):
                if op == "F":
                    open_[j, layer, part] = (now, size * 64)
                else:
                    start, nbytes = open_.pop((j, layer, part))
                    sizes.append(nbytes)
                    intervals.append(((start, now + 1 + part),))
            now += 1
    return AllocationProblem(sizes, intervals, now + 2)


def written_otherwise(problem: AllocationProblem, seed: int, *, backwards: bool) -> tuple[AllocationProblem, list[int]]:
    """The same problem with its buffers in another order, or its time from the end to the beginning; and where each buffer was."""
    order = list(range(len(problem.sizes)))
    random.Random(seed).shuffle(order)
    end = problem.positions
    lives = [
        tuple((end - b, end - a) for a, b in problem.intervals[i][::-1]) if backwards else problem.intervals[i]
        for i in order
    ]
    return AllocationProblem([problem.sizes[i] for i in order], lives, end), order


@pytest.mark.sampled(4, first=1)
@pytest.mark.parametrize("name", HARD)
def test_hard_instances_fit_their_capacity(name):
    problem = read_problem(str(DATA / f"{name}.csv")).problem
    found = allocate(problem, capacity=1048576)
    assert_sound(problem, found)
    assert found.arena_bytes <= 1048576
    assert found.method == "exact search"
    assert allocate(problem, capacity=1048576).offsets == found.offsets


@pytest.mark.sampled(8, first=3)
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("name", HARD)
def test_hard_instances_fit_however_they_are_written(name, backwards):
    problem = read_problem(str(DATA / f"{name}.csv")).problem
    other, _ = written_otherwise(problem, 3, backwards=backwards)
    found = allocate(other, capacity=1048576)
    assert_sound(other, found)
    assert found.arena_bytes == allocate(problem, capacity=1048576).arena_bytes <= 1048576


@pytest.mark.sampled(6, first=1)
@pytest.mark.parametrize(("one", "other"), list(pairwise(HARD)))
def test_two_hard_instances_one_after_the_other(one, other):
    before, after = (read_problem(str(DATA / f"{name}.csv")).problem for name in (one, other))
    later = [tuple((a + before.positions, b + before.positions) for a, b in spans) for spans in after.intervals]
    both = AllocationProblem(
        [*before.sizes, *after.sizes], [*before.intervals, *later], before.positions + after.positions
    )
    found = allocate(both, capacity=1048576)
    assert_sound(both, found)
    assert found.arena_bytes <= 1048576


def lowest_in_any_order(instance: Instance) -> int:
    """Lowest height by first fit in every order; an optimum is among them, placed in the order of its offsets."""
    meets, sizes = neighbours(instance), instance.sizes.tolist()
    return min(
        max(map(sum, zip(greedy(list(order), sizes, meets, best=False), sizes, strict=True)))
        for order in permutations(range(instance.count))
    )


@pytest.mark.parametrize("several", [False, True])
def test_the_search_proves_what_brute_force_finds(several):
    """Every height under the optimum is proved impossible, and at the optimum a sound placement is found."""
    from ratrain.passes.memory.allocation.valleys import EXHAUSTED, FOUND, search_valleys

    rows = [tuple(map(int, row.split(",")[1:])) for row in GAPPED.split()]
    gapped = AllocationProblem([size for _, _, size in rows], [((low, high),) for low, high, _ in rows], 9)
    problems = [random_problem(seed, 3 + seed % 4, several=several) for seed in range(80)]
    impossible = 0
    for seed, problem in enumerate([gapped, *problems]):
        instance, kept = instance_of(problem)
        lowest = GAPPED_BOUND + 1 if problem is gapped else lowest_in_any_order(instance)
        for height in range(instance.bound(), lowest):
            impossible += 1
            offsets = np.zeros(instance.count, np.int64)
            assert search_valleys(instance, height, 20_000, seed, offsets)[0] == EXHAUSTED
        offsets = np.zeros(instance.count, np.int64)
        assert search_valleys(instance, lowest, 20_000, seed, offsets)[0] == FOUND
        whole = np.zeros(len(problem.sizes), np.int64)
        whole[kept] = offsets
        assert check_allocation(problem, whole.tolist()) == []
        assert int((offsets + instance.sizes).max()) <= lowest
    assert impossible > 0  # that of the gapped problem, if none by chance


@pytest.mark.parametrize("seed", range(12))
def test_the_optimum_is_that_of_brute_force(seed):
    """First fit in every order finds the optimum of a problem of one interval a buffer."""
    problem = random_problem(seed, 6)
    lowest = lowest_in_any_order(instance_of(problem)[0])
    found = allocate(problem, effort=Effort(gap=0))
    assert_sound(problem, found)
    assert found.arena_bytes == lowest


def test_a_little_more_capacity_is_still_enough():
    table = read_problem(str(DATA / "B.1048576.csv"))
    assert allocate(table.problem, capacity=1048577).arena_bytes <= 1048577


def test_the_published_example():
    found = allocate(read_problem(str(DATA / "input.12.csv")).problem, capacity=12)
    assert found.arena_bytes == found.lower_bound_bytes == 12


@pytest.mark.parametrize("seed", range(6))
def test_search_reaches_a_known_optimum(seed):
    problem = guillotine(seed, 24)
    found = allocate(problem, effort=Effort(gap=0))
    assert_sound(problem, found)
    assert found.arena_bytes == 1 << 16


@pytest.mark.parametrize("cuts", [12, 60, 300, pytest.param(1500, marks=pytest.mark.full)])
def test_the_portfolio_stays_near_a_known_optimum(cuts):
    for seed in range(3):
        problem = guillotine(seed, cuts)
        found = allocate(problem)
        assert_sound(problem, found)
        assert found.arena_bytes <= 2 << 16


@pytest.mark.parametrize("seed", range(4))
def test_all_or_nothing_fits_where_a_trial_does(seed):
    """Placed by the same methods, given up or not: the same answer at any capacity, and addresses where it fits."""
    problem = random_problem(seed, 1200, several=True)
    best = allocate(problem, effort=Effort(gap=0), search=False, trial=True).arena_bytes
    for capacity in (best - 300, best - 1, best, best + 1, best + 300):
        effort = Effort(gap=1)
        found = allocate(problem, capacity=capacity, effort=effort, search=False, trial=True, all_or_nothing=True)
        assert (found.arena_bytes <= capacity) == (best <= capacity)
        if found.arena_bytes <= capacity:
            assert_sound(problem, found)


@pytest.mark.parametrize(
    ("several", "sided"),
    [
        (True, True),
        *(pytest.param(*flags, marks=pytest.mark.full) for flags in ((False, False), (False, True), (True, False))),
    ],
)
def test_large_problems_are_sound(several, sided):
    problem = random_problem(3, 1500, several=several, sided=sided)
    found = allocate(problem, effort=Effort(work=4_000_000))
    assert_sound(problem, found)
    assert found.offsets == allocate(problem, effort=Effort(work=4_000_000)).offsets


def test_whole_step_buffers_are_the_bottom():
    problem = AllocationProblem([7, 64, 9, 5], [((0, 4),), ((4, 10),), ((0, 10),), ((0, 5), (5, 10))], 10)
    found = allocate(problem)
    assert [found.offsets[2], found.offsets[3]] == [0, 9]
    assert found.offsets[0] == found.offsets[1] == 14


def test_pipelines_come_within_a_thousandth():
    problem = pipeline(200)
    found = allocate(problem)
    assert_sound(problem, found)
    assert len(problem.sizes) > 5000
    assert found.gap <= 0.001


def test_what_stacks_trivially_takes_no_quadratic_time():
    count = 100_000
    problem = AllocationProblem([64] * count, [((i, i + 3),) for i in range(count)], count + 3)
    found = allocate(problem)
    assert found.arena_bytes == 192
    assert found.seconds < 10
    assert check_allocation(problem, found.offsets) == []


def test_more_effort_is_never_worse():
    table = read_problem(str(DATA / "C.1048576.csv"))
    little = allocate(table.problem)
    some = allocate(table.problem, effort=Effort(nodes=20_000))
    much = allocate(table.problem, effort=Effort(nodes=2_000_000))
    assert little.arena_bytes >= some.arena_bytes >= much.arena_bytes
    assert much.arena_bytes == much.lower_bound_bytes < little.arena_bytes


def test_the_outer_limit_is_kept():
    table = read_problem(str(DATA / "D.1048576.csv"))
    allocate(table.problem, capacity=1048576)  # compiled now, if it was not
    found = allocate(table.problem, capacity=986112, effort=Effort(nodes=1 << 60, seconds=1.0))
    assert found.seconds < 4
    assert_sound(table.problem, found)


def test_the_callers_random_numbers_are_left_alone():
    random.seed(5)
    np.random.seed(5)
    allocate(random_problem(1, 200), effort=Effort(nodes=1000))
    ours, numpys = random.random(), np.random.random()
    random.seed(5)
    np.random.seed(5)
    assert (ours, numpys) == (random.random(), np.random.random())


def test_small_problems_need_no_compiler():
    code = (
        "import sys\nfrom ratrain.passes.memory.allocation import AllocationProblem, allocate\n"
        "allocate(AllocationProblem([3, 5, 4, 2] * 12, [((i, i + 5),) for i in range(48)], 60))\n"
        "allocate(AllocationProblem([3, 5, 4, 2] * 100, [((i, i + 5),) for i in range(400)], 405), capacity=1000)\n"
        "assert 'numba' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("problem", "offsets", "expected"),
    [
        (AllocationProblem([4, 4], [((0, 3),), ((2, 5),)], 5), [0, 3], [Violation(0, 1, 2)]),
        (AllocationProblem([4, 4], [((0, 2),), ((2, 5),)], 5), [0, 3], []),
        (AllocationProblem([4, 4], [((0, 1), (4, 5)), ((2, 5),)], 5), [0, 3], [Violation(1, 0, 4)]),
        (AllocationProblem([4, 4], [((0, 2),), ((3, 5),)], 5, [1, -1]), [0, 3], [Violation(0, 1, 3)]),
        (AllocationProblem([4, 4], [((0, 2),), ((3, 5),)], 5, [1, 1]), [0, 3], []),
        (AllocationProblem([4, 4], [((0, 2),), ((3, 5),)], 5), [0, -64], [Violation(1, 1, 3)]),
        (AllocationProblem([4, 4], [((0, 2),), ((3, 5),)], 5), [0], [Violation(1, 1, 3)]),
        (AllocationProblem([9, 2], [((0, 9),), ((3, 5),)], 9), [0, 4], [Violation(0, 1, 3)]),
        (AllocationProblem([0, 4], [((0, 9),), ((3, 5),)], 9), [2, 0], []),
    ],
)
def test_the_checker_names_pair_and_time(problem, offsets, expected):
    assert check_allocation(problem, offsets) == expected


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    code = main(["alloc", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_command_writes_a_solution(tmp_path, capsys):
    problem = tmp_path / "problem.csv"
    problem.write_text('size,id,lower,upper\n4,"a,1",0,3\n4,b,3,9\n\n4,c,0,9\n')
    solution = tmp_path / "solution.csv"
    code, out, _ = run(capsys, problem, "--capacity", "8B", "-o", solution, "--json")
    assert code == 0
    data = json.loads(out)
    assert data["arena_bytes"] == data["lower_bound_bytes"] == 8
    assert data["fits"] is True
    assert data["gap"] == 0
    assert data["buffers"] == 3
    assert data["seconds"] >= 0
    with solution.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [row["id"] for row in rows] == ["a,1", "b", "c"]
    assert [row["offset"] for row in rows] == ["4", "4", "0"]
    again = tmp_path / "again.csv"
    assert run(capsys, solution, "--capacity", 8, "-o", again)[0] == 0
    assert again.read_bytes() == solution.read_bytes()


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b ", "c", "d"]), *[st.sampled_from(["0", " 1", "2", "-3", "x", "9" * 19])] * 3
        ),
        min_size=1,
        max_size=4,
    )
)
def test_a_table_is_read_by_columns_only_where_rows_alone_would_give_the_same(rows):
    header, table = ["id", "lower", "upper", "size"], [list(row) for row in rows]
    try:
        by_rows = _diagnosed("x.csv", header, list(enumerate(table, 2)))
    except DiagnosticError:
        by_rows = None
    assert _sound(header, table) == by_rows


def test_command_refuses_with_the_live_set(tmp_path, capsys):
    solution = tmp_path / "solution.csv"
    code, out, err = run(capsys, DATA / "input.12.csv", "--capacity", 11, "-o", solution, "--json")
    assert code == 1
    data = json.loads(out)
    assert data["fits"] is False
    assert data["lower_bound_bytes"] == 12
    table = read_problem(str(DATA / "input.12.csv"))
    sizes = dict(zip(table.ids, table.problem.sizes, strict=True))
    assert sum(sizes[name] for name in data["live"]) == 12
    assert "RT053" in err
    assert f"time {data['position']}" in err
    assert not solution.exists()


def test_command_does_not_call_a_timeout_infeasible(tmp_path, capsys):
    code, out, err = run(capsys, DATA / "D.1048576.csv", "--capacity", 986112, "--seconds", 0.5, "--json")
    assert code == 1
    assert json.loads(out)["diagnostics"][0]["code"] == "RT052"
    assert "no placement that fits was found in" in err
    assert "none fits" not in err


def test_command_says_when_none_fits(tmp_path, capsys):
    problem = tmp_path / "problem.csv"
    problem.write_text("id,lower,upper,size\n" + GAPPED)
    code, out, err = run(capsys, problem, "--capacity", GAPPED_BOUND, "--json")
    assert code == 1
    assert json.loads(out)["lower_bound_bytes"] == GAPPED_BOUND
    assert "it is proved that none fits" in err
    assert run(capsys, problem, "--capacity", GAPPED_BOUND + 1)[0] == 0


@pytest.mark.parametrize(
    ("text", "code", "line"),
    [
        ("", "RT002", 1),
        ("id,lower,upper\na,0,1\n", "RT002", 1),
        ("id,lower,upper,size,alignment\na,0,1,2,3\n", "RT005", 2),
        ("id,lower,upper,size,size\na,0,1,2,3\n", "RT006", 1),
        ("id,lower,upper,size\na,0,1\n", "RT002", 2),
        ("id,lower,upper,size\na,0,1,2.5\n", "RT005", 2),
        ("id,lower,upper,size\na,0,1,2\nb,0,1,-2\n", "RT005", 3),
        ("id,lower,upper,size\na,0,1,2\nb,1,1,2\n", "RT005", 3),
        ("id,lower,upper,size\na,0,1,2\na,1,2,2\n", "RT006", 3),
        (f"id,lower,upper,size\na,0,1,{1 << 59}\nb,0,1,{1 << 59}\n", "RT005", 1),
        (f"id,lower,upper,size\na,0,{10**40},1\n", "RT005", 2),
        ('id,lower,upper,size\n"a,0,1,2\n', "RT002", 2),
    ],
)
def test_command_points_at_what_is_broken(tmp_path, capsys, text, code, line):
    problem = tmp_path / "problem.csv"
    problem.write_text(text)
    exit_code, out, err = run(capsys, problem, "--capacity", "1GiB", "--json")
    assert exit_code == 1
    (found,) = json.loads(out)["diagnostics"]
    assert (found["code"], found["line"]) == (code, line)
    assert f"problem.csv:{line}:" in err


def test_command_usage(capsys):
    assert run(capsys, DATA / "input.12.csv")[0] == 2
    assert run(capsys, DATA / "input.12.csv", "--capacity", "much")[0] == 2
    assert run(capsys, DATA / "nowhere.csv", "--capacity", "1")[0] == 1

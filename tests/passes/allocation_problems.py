"""Problems of the allocator, drawn by chance from a seed, and the check that an answer is sound."""

from __future__ import annotations

import random

from ratrain.passes.memory.allocation import AllocationProblem, check_allocation, lower_bound


def random_problem(seed: int, count: int, *, several: bool = False, sided: bool = False) -> AllocationProblem:
    chance = random.Random(seed)
    positions = 2 * count
    intervals = []
    for _ in range(count):
        times = sorted(chance.sample(range(positions), 2 * (chance.randint(1, 3) if several else 1)))
        longest = chance.choice((3, 10, positions))
        intervals.append(tuple((a, min(b, a + longest)) for a, b in zip(times[::2], times[1::2], strict=True)))
    sizes = [chance.randint(1, 40) for _ in range(count)]
    sides = [chance.choice((0, 0, 0, 1, -1)) for _ in range(count)] if sided else None
    return AllocationProblem(sizes, intervals, positions, sides)


def assert_sound(problem, found):
    assert check_allocation(problem, found.offsets) == []
    placed = [i for i, spans in enumerate(problem.intervals) if spans]
    assert found.arena_bytes == max(found.offsets[i] + problem.sizes[i] for i in placed)
    assert lower_bound(problem).nbytes == found.lower_bound_bytes <= found.proved_bytes <= found.arena_bytes

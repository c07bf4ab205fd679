"""An attempt at a problem of the allocator, and the check that it placed every buffer and is as high as it says."""

from __future__ import annotations

from time import perf_counter

from ratrain.passes.memory.allocation import AllocationProblem, Effort, check_allocation
from ratrain.passes.memory.allocation.attempt import Attempt
from ratrain.passes.memory.allocation.problem import instance_of


def attempt_at(problem: AllocationProblem, gap: float = 0.001) -> tuple[Attempt, list[int]]:
    instance, kept = instance_of(problem)
    return Attempt.of(instance, 0, None, Effort(gap=gap), perf_counter() + 60), kept.tolist()


def assert_placed(problem: AllocationProblem, attempt: Attempt, kept: list[int]) -> None:
    offsets = [0] * len(problem.sizes)
    for buffer, offset in zip(kept, attempt.offsets.tolist(), strict=True):
        offsets[buffer] = offset
    assert check_allocation(problem, offsets) == []
    assert attempt.height == int((attempt.offsets + attempt.instance.sizes).max()) >= attempt.instance.bound()

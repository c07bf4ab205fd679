"""Where a stage waits for gradients under 1F1B: the windows that forward-side recovery fills."""

from __future__ import annotations

from itertools import pairwise

import pytest

from ratrain.ratrain_ir.schedules.action import ActionKind
from ratrain.ratrain_ir.schedules.one_chunk import gradient_waits_1f1b, schedule_1f1b
from ratrain.ratrain_ir.schedules.shape import PipelineShape


@pytest.mark.parametrize(
    ("stages", "micro_batches", "stage", "waits"),
    [
        (1, 4, 0, []),
        (4, 8, 3, []),  # the last stage makes its gradients itself
        (4, 8, 2, [0, 7]),
        (4, 8, 0, [0, 5, 6, 7]),
        (4, 4, 0, [0, 1, 2, 3]),
        (4, 2, 0, [0, 1]),  # fewer than the warm-up would have
        (4, 1, 0, [0]),
    ],
)
def test_the_waits_are_the_warm_up_and_the_cool_down(stages, micro_batches, stage, waits):
    assert gradient_waits_1f1b(PipelineShape(stages, micro_batches), stage) == waits


@pytest.mark.parametrize("stages", range(2, 6))
@pytest.mark.parametrize("micro_batches", range(1, 9))
def test_but_for_the_first_they_are_the_backwards_that_follow_a_backward(stages, micro_batches):
    """Elsewhere a forward stands before the backward, and fills the wait."""
    for stage in range(stages - 1):
        actions = schedule_1f1b(PipelineShape(stages, micro_batches), stage)
        backwards = [
            now.micro_batch for before, now in pairwise(actions) if before.kind is now.kind is ActionKind.BACKWARD
        ]
        assert gradient_waits_1f1b(PipelineShape(stages, micro_batches), stage) == [0, *backwards]

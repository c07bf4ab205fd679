"""Where a stage waits for gradients, by its order alone: the windows that forward-side recovery fills."""

from __future__ import annotations

from itertools import pairwise

import pytest

from ratrain.ratrain_ir.analysis.unit_run import gradient_waits
from ratrain.ratrain_ir.schedules.action import ActionKind
from ratrain.ratrain_ir.schedules.named import SCHEDULES
from ratrain.ratrain_ir.schedules.one_chunk import schedule_1f1b
from ratrain.ratrain_ir.schedules.shape import PipelineShape


def waits_of(schedule: str, shape: PipelineShape) -> list[list[tuple[int, int, int]]]:
    """Of each stage: chunk, micro-batch and slice."""
    orders = [SCHEDULES[schedule].actions(shape, stage) for stage in range(shape.stages)]
    return gradient_waits(orders, shape.chunk_stages)


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
def test_under_1f1b_they_are_the_warm_up_and_the_cool_down(stages, micro_batches, stage, waits):
    found = waits_of("1f1b", PipelineShape(stages, micro_batches))[stage]
    assert found == [(stage, m, 0) for m in waits]


@pytest.mark.parametrize("stages", range(2, 10))
def test_under_1f1b_all_but_the_first_are_the_backwards_that_follow_a_backward(stages):
    """KeptHome a forward stands before the backward, and fills the wait."""
    for micro_batches in range(1, 3 * stages + 2):
        shape = PipelineShape(stages, micro_batches)
        for stage, found in enumerate(waits_of("1f1b", shape)[:-1]):
            actions = schedule_1f1b(shape, stage)
            backwards = [
                now.micro_batch for before, now in pairwise(actions) if before.kind is now.kind is ActionKind.BACKWARD
            ]
            assert [m for _, m, _ in found] == [0, *backwards]


def test_under_gpipe_gradients_come_as_fast_as_they_are_used():
    assert waits_of("gpipe", PipelineShape(4, 8)) == [[(s, 0, 0)] for s in range(3)] + [[]]


def test_windows_say_their_chunk_and_slice():
    """A sliced micro-batch's gradient comes from its last slice on; the first one that a stage of two chunks takes is of its second."""
    sliced = waits_of("seq1f1b", PipelineShape(3, 4, slices=2))
    assert sliced == [[(0, 0, 1), (0, 2, 0), (0, 3, 1)], [(1, 0, 1), (1, 3, 1)], []]
    assert waits_of("interleaved", PipelineShape(2, 4, chunks=2)) == [[(2, 0, 0), (2, 2, 0), (2, 3, 0)], []]


def test_weight_halves_fill_the_cool_down():
    assert waits_of("zb-h1", PipelineShape(4, 8)) == [[(s, 0, 0)] for s in range(3)] + [[]]


def test_a_vee_without_bubble_waits_for_no_gradient_but_in_the_end():
    """ZB-V with enough micro-batches works from its first forward on without a pause."""
    assert waits_of("zb-v", PipelineShape(3, 12, chunks=2, layout="vee")) == [[], [], []]


def test_orders_in_a_circle_are_refused():
    shape = PipelineShape(2, 2)
    orders = [schedule_1f1b(shape, 0)[::-1], schedule_1f1b(shape, 1)]
    with pytest.raises(ValueError, match="in a circle"):
        gradient_waits(orders, shape.chunk_stages)

"""Time left and utilisation of a run: what the first step takes to load kernels says nothing about the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve

from ratrain.ratrainc.remaining_time import RemainingTime
from ratrain.ratrainc.training import RunResult, show_run
from tests.end_to_end.tiny_runs import make_program, train

if TYPE_CHECKING:
    import pytest


def test_the_first_step_does_not_count_for_the_time_that_is_left() -> None:
    ends = iter([112.0, 114.0, 116.0, 120.0])
    remaining = RemainingTime(10, clock=lambda: next(ends))
    left = []
    for _ in range(4):
        remaining.step_done()
        left.append(remaining.seconds)
    assert left == [None, 16.0, 14.0, 16.0]


def test_at_the_end_nothing_is_left() -> None:
    remaining = RemainingTime(3)
    for _ in range(3):
        remaining.step_done()
    assert remaining.seconds == 0


def test_utilisation_of_a_run_is_that_of_its_steps_together(capsys: pytest.CaptureFixture[str]) -> None:
    """A step at 10 % takes three times as long as one at 30 %: both together are at 15 %, not at 20 %."""
    steps = train(make_program(), 3).done
    shown = [evolve(step, mfu=mfu) for step, mfu in zip(steps, (0.01, 0.10, 0.30), strict=True)]
    show_run(RunResult(tuple(shown), 1.0, 0, 0, 0, None, "text", None, None, 0))
    assert "utilisation 15 %" in capsys.readouterr().out

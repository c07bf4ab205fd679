"""Time left and utilisation of a run: what the first step takes to load kernels says nothing about the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve

from ratrain.ratrainc.console.console import progress, unseen_progress
from ratrain.ratrainc.running import run_result
from ratrain.ratrainc.running.run_result import RunResult, show_run
from ratrain.targets.runtime.arena.process_memory import MemoryUse
from ratrain.targets.runtime.engine.first_use import BY_COMPILER, COMPILING
from tests.end_to_end.tiny_runs import make_program, train

if TYPE_CHECKING:
    import pytest


class Clock:
    """Seconds, set by hand."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def time_left(total: int, ends: list[float]) -> list[float | None]:
    """What is left after each step, by when it ended."""
    clock = Clock()
    steps, left = unseen_progress(total, clock), []
    for clock.now in ends:
        steps.advance(steps.tasks[0].id)
        left.append(steps.tasks[0].time_remaining)
    return left


def test_the_first_step_does_not_count_for_the_time_that_is_left() -> None:
    assert time_left(10, [112.0, 114.0, 116.0, 120.0]) == [None, 16.0, 14.0, 16.0]


def test_steps_of_an_hour_have_a_time_that_is_left() -> None:
    assert time_left(4, [3600.0, 7200.0, 10800.0]) == [None, 7200.0, 3600.0]


def test_at_the_end_nothing_is_left() -> None:
    assert time_left(3, [100.0, 100.0, 100.0])[-1] == 0
    assert time_left(1, [100.0]) == [0]


def test_the_bar_shows_a_time_that_is_left_for_steps_of_a_minute() -> None:
    clock = Clock()
    with progress(3, "training") as (bar, task):
        bar.get_time = clock
        for clock.now in (160.0, 220.0):
            bar.update(task, advance=1)
        assert bar.tasks[0].time_remaining == 60


def test_utilisation_of_a_run_is_that_of_its_steps_together(capsys: pytest.CaptureFixture[str]) -> None:
    """A step at 10 % takes three times as long as one at 30 %: both together are at 15 %, not at 20 %."""
    steps = train(make_program(), 3).done
    shown = [evolve(step, mfu=mfu) for step, mfu in zip(steps, (0.01, 0.10, 0.30), strict=True)]
    show_run(RunResult(tuple(shown), 1.0, MemoryUse(0, 0, 0, None, None), None, "text", None, None, 0))
    assert "utilisation 15 %" in capsys.readouterr().out


def test_the_memory_of_a_run_that_compiled_kernels_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A peak is compared with a plan of the same: of a run that compiled loops with one that counts compiling them."""
    steps = tuple(train(make_program(), 1).done)
    plain = MemoryUse(100 << 20, 0, 0, 100 << 20, 300 << 20)
    expected = evolve(plain, first_use={BY_COMPILER: COMPILING})
    for anew in (0, 31):
        monkeypatch.setattr(run_result, "compiled_anew", lambda anew=anew: anew)
        lines = []
        for memory in (plain, expected):
            show_run(RunResult(steps, 1.0, memory, None, "text", None, None, 0))
            said = capsys.readouterr().out
            lines.append(next(line for line in said.splitlines() if line.startswith("memory: ")))
            assert ("both include the one-time compilation of 31 loops" in said) == bool(anew)
        assert "8.5 % below the" in lines[1]
        assert lines[0] == lines[1] if anew else "50.0 % above the" in lines[0]

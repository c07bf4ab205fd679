"""The live view: bytes and phases are those of the program, nothing is written where there is no terminal."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from attrs import evolve
from rich.console import Console

from ratrain.ratrain_ir.ops.base import ENGINES, Engine
from ratrain.ratrainc.cli import main
from ratrain.ratrainc.console import console
from ratrain.ratrainc.running import live_view
from ratrain.targets.program.rtx import write_program
from ratrain.targets.runtime.engine.live_progress import LocalProgress, StageWatch
from ratrain.targets.runtime.engine.memory_monitor import MemoryMonitor
from ratrain.targets.runtime.engine.rank import RankExecutor
from tests.end_to_end.tiny_runs import make_program, start

if TYPE_CHECKING:
    from ratrain.targets.program.program import Program


@pytest.mark.parametrize("name", ["ratrain", "baseline-1f1b", "zero3", "zb-h1"])
def test_live_bytes_are_what_the_memory_monitor_counts(name: str) -> None:
    program = make_program(name=name, zero=2, reduce="each-micro-batch")
    for index, stage in enumerate(program.stages):
        rank = RankExecutor(program, index, 0)
        monitor = MemoryMonitor(
            [[RankExecutor(program, number, 0)] for number in range(len(program.stages))], poison=False
        )
        found = stage.live_bytes()
        assert list(found) == stage.execution_order()
        for engine, position in found:
            monitor.before(rank, stage.streams[engine][position])
            counted = monitor.live[index, 0].live_bytes
            assert found[engine, position] == counted, stage.streams[engine][position].title
            monitor.after(rank, stage.streams[engine][position])
        assert max(found.values()) <= stage.arena_bytes


class Counts:
    """A source of made-up counts."""

    def __init__(self, program: Program, **counts: int) -> None:
        self.counts = {engine: counts.get(engine.value, 0) for engine in ENGINES}
        self.stages = len(program.stages)

    def completed(self):
        return dict.fromkeys(range(self.stages), self.counts)


def test_the_phase_is_the_next_instruction() -> None:
    program = make_program(pp=1, dp=1)
    watch = StageWatch(program)
    stream = program.stages[0].streams[Engine.COMPUTE]
    (at_start,) = watch.views(Counts(program))
    assert (at_start.phase, at_start.done) == (stream[0].title, 0)
    (later,) = watch.views(Counts(program, compute=len(stream) // 2))
    assert later.phase == stream[len(stream) // 2].title
    assert 0 < later.done < 1
    assert later.live_bytes == program.stages[0].live_bytes()[Engine.COMPUTE, len(stream) // 2]
    (finished,) = watch.views(Counts(program, compute=len(stream)))
    assert finished.phase not in {item.title for item in stream}


def test_between_steps_every_stage_is_at_the_start_of_the_next() -> None:
    run = start(make_program(), 2)
    watch, source = StageWatch(run.program), LocalProgress(run.engine)
    before = watch.views(source)
    list(run.steps())
    assert watch.views(source) == before
    assert [view.done for view in before] == [0, 0]


def test_stages_of_other_processes_are_left_out() -> None:
    run = start(make_program(), 1)
    run.engine.ranks[0] = []
    assert [view.stage for view in StageWatch(run.program).views(LocalProgress(run.engine))] == [1]


def test_counts_that_an_evaluation_takes_back_are_no_surprise() -> None:
    """The engine counts a pass that evaluates and then does not: a view that is made at that moment must be of one moment."""
    run = start(make_program(), 1)
    list(run.steps())
    counts = LocalProgress(run.engine).completed()
    before = StageWatch(run.program).views(LocalProgress(run.engine))
    for head in run.engine.heads:
        head.rank.completed[head.engine] -= len(head.stream)
    assert counts == {
        stage: {engine: len(found.streams[engine]) for engine in ENGINES}
        for stage, found in enumerate(run.program.stages)
    }
    assert [view.done for view in before] == [0, 0]


def test_watching_from_another_thread_changes_nothing() -> None:
    program = make_program()
    alone, watched = start(program, 4), start(program, 4)
    watch, source, stop, seen = StageWatch(program), LocalProgress(watched.engine), threading.Event(), set()

    def look() -> None:
        while not stop.is_set():
            seen.update(view.phase for view in watch.views(source))

    watcher = threading.Thread(target=look)
    watcher.start()
    watched_losses = [step.report.loss for step in watched.steps()]
    stop.set()
    watcher.join()
    assert watched_losses == [step.report.loss for step in alone.steps()]
    assert seen


def test_the_dashboard_shows_a_run() -> None:
    run = start(make_program(), 3)
    view = live_view.LiveView(run.program, LocalProgress(run.engine), 3)
    screen = Console(file=io.StringIO(), width=110, force_terminal=True, color_system=None)
    screen.print(view)
    for step in run.steps():
        view.step_done(evolve(step, mfu=0.5, eval_loss=3.25))
    screen.print(view)
    text = screen.file.getvalue()
    for words in (
        "step 0 of 3",
        "step 3 of 3",
        "@0",
        "@1",
        "tokens/s",
        "MFU 50 %",
        "held out 3.2500",
        "MiB",
        "ETA",
        "┤",
    ):
        assert words in text, words


def test_a_terminal_gets_the_dashboard(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Console(file=io.StringIO(), width=110, force_terminal=True)
    for module in (live_view, console):
        monkeypatch.setattr(module, "errors", lambda: screen)
    run = start(make_program(), 1)
    with live_view.live_view(run.program, LocalProgress(run.engine), 1) as show:
        for step in run.steps():
            show(step)
    assert "arena" in screen.file.getvalue()


def test_no_terminal_no_dashboard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "a.rtx"
    write_program(make_program(evolve_vocabulary()), str(program))
    console.errors.cache_clear()
    outputs = []
    for words in ([], ["--live"]):
        assert main(["run", str(program), "--steps", "2", *words]) == 0
        found = capsys.readouterr()
        assert not found.err
        assert "\x1b" not in found.out
        outputs.append([line.split()[:4] for line in found.out.splitlines() if line.startswith("step")])
    assert outputs[0] == outputs[1]


def evolve_vocabulary():
    """A model for byte tokens."""
    from tests.end_to_end.tiny_runs import MODEL

    return evolve(MODEL, vocab_size=256)

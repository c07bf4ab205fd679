"""Ctrl-C ends a search with what it has found, and time ends it as well."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from attrs import evolve

from ratrain.ratrain_ir.support.time_limit import is_ended
from ratrain.ratrainc.cli import main
from ratrain.ratrainc.planner.search.plan_evaluation import PlanEvaluation, Task, evaluate
from ratrain.ratrainc.planner.search.plan_search import Search
from ratrain.ratrainc.planner.search.time_budget import TimeBudget
from ratrain.ratrainc.planner.search.workers import WorkerPool, workers
from tests.ratrainc.planner.small_requests import QUICK, ROOT, SMALL, TINY, TINY_PLAN, small_request


def test_workers_start_with_interruptions_held_back():
    """Ctrl-C while they import would end them with tracebacks."""
    masks = []

    class Executor:
        def submit(self, *_words):
            masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, []))

    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    WorkerPool(Executor(), 2).submit(None)
    assert signal.SIGINT in masks[0]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


# -- Ctrl-C ends a search with what it has found --------------------------------------------------------------------------


def interrupting(monkeypatch: pytest.MonkeyPatch, modules: Sequence[str], *, after: int, times: int = 1) -> list[Task]:
    """Send as many interruptions as asked when so many plans have been found to fit; return what is begun from then."""
    begun: list[Task] = []
    fitting: list[PlanEvaluation] = []

    def evaluated(task: Task) -> PlanEvaluation:
        if len(fitting) == after:
            begun.append(task)
        if len(begun) == 1:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)
        found = evaluate(task)
        if found.step_seconds is not None:
            fitting.append(found)
        return found

    for module in modules:
        monkeypatch.setattr(f"ratrain.ratrainc.planner.{module}.evaluate", evaluated)
    return begun


FEW = (*QUICK, "--schedules", "1f1b", "--tp", "1")
INTERRUPTED_COMMANDS = {
    "plan": (("plan", *FEW, "--jobs", "1"), "search.workers", 1),
    "quick": (("plan", *FEW, "--quick", "--jobs", "1"), "search.quick", 1),
    "clusters": (("plan", *FEW, "--pareto", "clusters"), "search.quick", 4),
    "memory": (("plan", *FEW, "--pareto", "memory"), "answer.pareto_front", 4),
    "what-if": (("plan", *FEW, "--jobs", "1", "--what-if", "link=37GB/s"), "search.workers", 2),
    "compare": (("compare", *TINY, "--plan", TINY_PLAN), "search.workers", 2),
    "compare auto": (("compare", *SMALL, "--plan", "auto"), "search.workers", 1),
}


@pytest.mark.parametrize("name", INTERRUPTED_COMMANDS)
def test_the_first_ctrl_c_shows_the_best_so_far(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words, module, after = INTERRUPTED_COMMANDS[name]
    begun = interrupting(monkeypatch, (module,), after=after)
    out = ("-o", str(tmp_path / "P.toml")) if words[0] == "plan" and name != "what-if" else ()
    before = signal.getsignal(signal.SIGINT)
    assert main([*words, *out]) == 130
    assert signal.getsignal(signal.SIGINT) is before
    shown = capsys.readouterr()
    assert "interrupted" in shown.out + shown.err
    assert "Traceback" not in shown.err
    assert re.search(r"step|speed-up", shown.out), "what was found is shown"
    assert len(begun) == 1, "nothing new is begun"
    assert bool(list(tmp_path.glob("P*.toml"))) == bool(out)
    assert not is_ended(), "the next command of this process searches as ever"


def test_ctrl_c_shows_the_table_of_the_strategies_that_are_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words, module, after = INTERRUPTED_COMMANDS["compare"]
    interrupting(monkeypatch, (module,), after=after)
    assert main([*words, "--json"]) == 130
    shown = capsys.readouterr()
    names = [row["name"] for row in json.loads(shown.out)["strategies"]]
    told = [line.partition(":")[0] for line in shown.err.splitlines() if " a step, highest peak " in line]
    assert names
    assert told == names
    (left,) = re.findall("left out, as the comparison was interrupted: (.*)", shown.err)
    assert not {*left.split(", ")} & {*names}


@pytest.mark.parametrize("name", ["plan", "quick", "compare"])
def test_the_second_ctrl_c_stops_at_once(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words, module, after = INTERRUPTED_COMMANDS[name]
    interrupting(monkeypatch, (module,), after=after, times=2)
    assert main([*words]) == 130
    shown = capsys.readouterr()
    assert not shown.out
    assert "interrupted" in shown.err


def test_an_interruption_before_anything_is_found_writes_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for words, module in (
        ((*FEW, "--jobs", "1"), "search.workers"),
        ((*TINY, "--clusters", "8", "--smallest", "--capacity", "9MB"), "answer.fewest_clusters"),
    ):
        with monkeypatch.context() as patch:
            interrupting(patch, (module,), after=0)
            assert main(["plan", *words, "-o", str(tmp_path / "P.toml")]) == 130
        shown = capsys.readouterr()
        assert not shown.out
        assert "interrupted: " in shown.err
        assert not list(tmp_path.iterdir())


def test_a_search_keeps_to_its_time_once_a_plan_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """No evaluation begins after it, but the last; and none may take much longer than what is left."""
    seconds, now, taken = 10.0, [0.0], 3.0
    tasks: list[tuple[float, Task]] = []

    def evaluated(task: Task) -> PlanEvaluation:
        tasks.append((now[0], task))
        now[0] += taken
        return evolve(evaluate(evolve(task, seconds=None)), taken=taken)

    monkeypatch.setattr("ratrain.ratrainc.planner.search.workers.evaluate", evaluated)
    monkeypatch.setattr("ratrain.ratrainc.planner.search.time_budget.time.monotonic", lambda: now[0])
    request = evolve(small_request(clusters=3, batch=60), exhaustive=False, seconds=seconds)
    answer = Search(request).run()
    assert answer.best is not None
    late = [begin for begin, _ in tasks if begin > seconds]
    assert len(late) <= 1
    for begin, task in tasks[2:]:
        assert task.seconds is not None
        assert task.seconds <= max(seconds - begin, 20.0)


# -- Workers ----------------------------------------------------------------------------------------------------------


def test_time_is_kept_only_for_a_whole_step_that_will_be_simulated() -> None:
    """A step expected to take more than half of the time stays folded, so the search goes on instead."""
    budget = TimeBudget(60.0, begin=time.monotonic() - 40.0, taken=1.0, units=1.0)
    assert budget.is_over(left=25.0)
    assert not budget.is_over(left=35.0)


def test_no_shape_is_left_whose_bound_alone_keeps_the_certificate_low() -> None:
    """Their cuts are chosen, and thereby their bounds raised, though no plan of them is compiled."""
    search = Search(evolve(small_request(clusters=4, batch=8), seconds=60.0, exhaustive=False))
    answer = search.run()
    assert answer.best is not None
    assert not any(space.below(answer.best.seconds / 1.03) for space in search.spaces)


def test_searches_of_a_command_share_their_workers() -> None:
    """A pool within a pool of as many jobs is the same; another number gets its own, one job this process."""
    with workers(2) as pool:
        with workers(2) as again, workers(1) as alone, workers(3) as more:
            assert again is pool
            assert alone.executor is None
            assert more.executor is not pool.executor
        with workers(2) as after:
            assert after is pool, "a block within does not end it"
    with workers(2) as later:
        assert later is not pool


@pytest.mark.full
def test_workers_end_with_a_command_that_is_killed() -> None:
    """Neither they nor the server that they are forks of outlive it."""
    command = [sys.executable, "-m", "ratrain", "plan", *QUICK, "--jobs", "2", "--exhaustive"]
    started = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True, cwd=ROOT
    )
    _wait_for(lambda: len(_of_session(started.pid)) >= 5)  # the command, the server, its tracker and two workers
    os.kill(started.pid, signal.SIGKILL)
    started.wait()
    _wait_for(lambda: not _of_session(started.pid))


def _of_session(session: int) -> list[int]:
    """Return the processes of a session that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, _, own = path.read_text().rpartition(")")[2].split()[:4]
            if int(own) == session and state != "Z":
                found.append(int(path.parent.name))
    return found


def _wait_for(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 60.0
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.1)

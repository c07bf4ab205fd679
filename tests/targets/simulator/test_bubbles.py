"""Bubble accounting against closed forms; the critical path against the longest path of the graph."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain.ratrain_ir.ops.base import ENGINES, Engine
from ratrain.ratrain_ir.testing.strategies import Case, cases
from ratrain.ratrainc.cli import main
from ratrain.ratrainc.report import time_report
from ratrain.ratrainc.report.time_report import time_parts
from ratrain.targets.machine.machine import load_machine
from ratrain.targets.program.rtx import write_program
from ratrain.targets.simulator import bubbles
from ratrain.targets.simulator.bubbles import Bubbles, Cause
from ratrain.targets.simulator.figures import simulated
from ratrain.targets.simulator.timed_run import simulate
from tests.end_to_end.tiny_runs import make_program
from tests.targets.simulator.idle_pieces import idle_pieces
from tests.targets.simulator.test_simulator import SHAPES, compiled, layers_only, pipeline

if TYPE_CHECKING:
    from pathlib import Path

    from ratrain.targets.program.instruction import Instruction
    from ratrain.targets.simulator.timeline import Timeline

F, B = 1.0, 2.0


@pytest.mark.parametrize(("stages", "micro_batches"), SHAPES)
@pytest.mark.sampled(2)
def test_the_bubble_of_equal_stages(stages: int, micro_batches: int) -> None:
    """(p - 1) / (m + p - 1) of every stage's time: fill s F, drain s B, and the way to the last stage and back between."""
    found = simulate(pipeline(stages, micro_batches), layers_only(lambda _: F, lambda _: B))
    cold = Bubbles(found, cold=True)
    for stage in range(stages):
        idle = cold.idle_seconds(stage, Engine.COMPUTE)
        assert sum(idle.values()) / cold.window_seconds == pytest.approx(
            (stages - 1) / (micro_batches + stages - 1), rel=1e-9
        )
        waiting = {
            Cause.FILL: stage * F,
            Cause.DRAIN: stage * B,
            Cause.STAGE: (stages - 1 - stage) * (F + B),
        }
        assert idle == pytest.approx({cause: seconds for cause, seconds in waiting.items() if seconds}, rel=1e-9)


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_the_slow_stage_is_the_one_that_is_waited_for(slow: int) -> None:
    times = [(4.0, 7.0) if stage == slow else (1.0, 2.0) for stage in range(3)]
    found = simulate(pipeline(3, 6), layers_only(lambda s: times[s][0], lambda s: times[s][1]))
    for stage in {0, 1, 2} - {slow}:
        waited = Bubbles(found).waited_for(stage, Engine.COMPUTE)
        assert max(waited, key=waited.__getitem__) == slow
    on_path = {(op.stage, op.engine) for op in Bubbles(found).critical_path() if op.stage == slow}
    assert (slow, Engine.COMPUTE) in on_path


def linked(forward: list[float], backward: list[float], link: float):
    layers = layers_only(forward.__getitem__, backward.__getitem__)

    def seconds(stage: int, instruction: Instruction) -> float:
        return link if instruction.keyword == "send" else layers(stage, instruction)

    return seconds


@given(st.integers(1, 5), st.lists(st.floats(0.1, 9.0), min_size=11, max_size=11))
@settings(max_examples=20)
def test_one_micro_batch_takes_every_stage_and_every_link(stages: int, times: list[float]) -> None:
    forward, backward, link = times[:stages], times[5 : 5 + stages], times[10]
    found = simulate(pipeline(stages, 1), linked(forward, backward, link))
    assert found.makespan_seconds == pytest.approx(sum(forward + backward) + 2 * (stages - 1) * link, rel=1e-9)
    for stage in range(stages - 1):
        assert Bubbles(found, cold=True).idle_seconds(stage, Engine.COMPUTE)[Cause.LINK] == pytest.approx(
            2 * (stages - 1 - stage) * link, rel=1e-9
        )


@pytest.mark.parametrize("link", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 5, 8])
def test_two_stages_with_a_link(micro_batches: int, link: float) -> None:
    """(M + 1)(F + B), and c for each message that nothing hides: two for M < 3, M + 1 from there on.

    With a buffer for one message to the last stage, a micro-batch can only be sent when the one before is done there.
    """
    found = simulate(pipeline(2, micro_batches), linked([F, F], [B, B], link))
    exposed = 2 if micro_batches < 3 else micro_batches + 1
    assert found.makespan_seconds == pytest.approx((micro_batches + 1) * (F + B) + exposed * link, rel=1e-9)


def longest_path(found: Timeline) -> float:
    """Seconds of the longest chain of one cold step, over everything that orders two instructions."""
    graph = nx.DiGraph()
    program = found.program
    numbers = {}
    for stage, held in enumerate(program.stages):
        for engine in ENGINES:
            for position in range(len(held.streams[engine])):
                numbers[stage, engine, position] = len(numbers)
    channels: dict[tuple[int | str | None, ...], list[int]] = {}
    meetings: dict[tuple[str, int], list[int]] = {}
    for (stage, engine, position), number in numbers.items():
        item = program.stages[stage].streams[engine][position]
        graph.add_edge(("start", number), ("end", number), weight=float(found.works["seconds"][number]))
        before = [(stage, w.engine, w.count - 1) for w in item.waits if not w.previous_step]
        before += [(stage, engine, position - 1)] if position else []
        for other in before:
            graph.add_edge(("end", numbers[other]), ("start", number), weight=0.0)
        if item.keyword in ("send", "recv"):
            ends = (stage, item.peer) if item.keyword == "send" else (item.peer, stage)
            channels.setdefault((*ends, item.variant, item.chunk, item.keyword), []).append(number)
        if item.group in ("ends", "all"):
            seen = sum(i.group == item.group for i in program.stages[stage].streams[engine][:position])
            meetings.setdefault((item.group, seen), []).append(number)
    for (*channel, keyword), sends in channels.items():
        if keyword == "send":
            for send, recv in zip(sends, channels[(*channel, "recv")], strict=True):
                graph.add_edge(("start", send), ("start", recv), weight=0.0)
                graph.add_edge(("end", send), ("end", recv), weight=0.0)
    for key, members in meetings.items():
        for member in members:
            graph.add_edge(("start", member), ("met", key), weight=0.0)
            graph.add_edge(("met", key), ("end", member), weight=max(float(found.works["seconds"][m]) for m in members))
    return float(nx.dag_longest_path_length(graph)) if numbers else 0.0


@given(cases(max_layers=4))
@settings(max_examples=20)
def test_no_schedule_beats_its_longest_path(case: Case) -> None:
    program = compiled(case)
    _, alone = simulated(program, load_machine(None), sharing=False, steps=2)
    _, shared = simulated(program, load_machine(None), steps=2)
    least = longest_path(alone)
    assert alone.makespan_seconds >= least * (1 - 1e-9)
    assert shared.makespan_seconds >= least * (1 - 1e-9)
    joined = {op for stage in program.stages for s in stage.streams.values() for op in s if op.group in ("ends", "all")}
    if not joined:
        assert alone.makespan_seconds == pytest.approx(least, rel=1e-9)


@given(cases(max_layers=4), st.booleans())
@settings(max_examples=15)
def test_the_figures_agree_with_the_accounting(case: Case, rendezvous: bool) -> None:
    figures, found = simulated(compiled(case), load_machine(None), rendezvous=rendezvous)
    for index, stage in enumerate(figures.stages):
        idle = Bubbles(found).idle_seconds(index, Engine.COMPUTE)
        assert sum(idle.values()) == pytest.approx(stage.idle_seconds, rel=1e-9, abs=1e-12)
        assert 0 <= stage.exposed_tail_seconds <= stage.idle_seconds * (1 + 1e-9)
        assert Cause.COMPUTE not in idle


def test_what_finds_no_room_at_first_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    _, found = simulated(make_program(), load_machine(None))
    wanted = idle_pieces(Bubbles(found))
    assert len(wanted) > 8
    monkeypatch.setattr(bubbles, "PIECES", 0)
    assert idle_pieces(Bubbles(found)) == wanted


def test_explain_time_says_where_the_time_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "a.rtx")
    write_program(make_program(), file)
    for cold in ([], ["--cold"]):
        assert main(["explain", file, "--time", "--json", *cold]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert {row["stage"] for row in facts["engines"]} == {0, 1}
        for row in facts["engines"]:
            whole = row["busy_seconds"] + sum(row["idle_seconds"].values())
            assert whole == pytest.approx(facts["window_seconds"], rel=1e-9)
        assert np.isclose(sum(op["seconds"] for op in facts["critical_path"]), facts["window_seconds"])
        starts = [op["start_seconds"] for op in facts["critical_path"]]
        assert starts[0] == 0, "seconds count from the start of the step that is shown"
        assert max(starts) < facts["window_seconds"]
    assert main(["explain", file, "--time", "--stage", "0"]) == 0
    text = capsys.readouterr().out
    assert "simulated" in text
    assert "critical path" in text
    assert "@0 collective" in text


@pytest.mark.parametrize("words", [["--cold"], ["--time", "--stage", "2"]])
def test_explain_says_what_does_not_go_together(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "a.rtx")
    write_program(make_program(), file)
    assert main(["explain", file, *words]) == 2
    assert "Traceback" not in capsys.readouterr().err


@given(cases(max_layers=4))
@settings(max_examples=15)
def test_rounding_alone_is_no_cause_of_idle_time(case: Case) -> None:
    """Steps of a settled program differ by their rounding, which is not shown as a cause that takes 0.0 us."""
    _, found = simulated(compiled(case), load_machine(None))
    steady = Bubbles(found)
    for stage in range(len(found.program.stages)):
        for engine in ENGINES:
            idle = steady.idle_seconds(stage, engine)
            assert idle.get(Cause.SETTLING, steady.window_seconds) > 1e-9 * steady.window_seconds


def test_a_program_that_has_not_settled_says_what_that_column_is(monkeypatch: pytest.MonkeyPatch) -> None:
    _, found = simulated(make_program(), load_machine(None))
    said = " ".join(map(str, time_parts(found, stage=None, cold=False)))
    assert "settling" not in said
    monkeypatch.setattr(bubbles, "beyond_rounding", lambda _difference, _whole: 1.0)
    monkeypatch.setattr(time_report, "_SHOWN_CAUSES", len(Cause))
    said = " ".join(map(str, time_parts(found, stage=None, cold=False)))
    assert "settling: the program has not settled" in " ".join(said.split())

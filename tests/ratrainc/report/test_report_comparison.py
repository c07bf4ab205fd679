"""Two reports on one page: what is said to differ is what differs, both are there whole, and their axes are common."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from ratrain import api
from ratrain.ratrain_ir.analysis.module_diff import diff_modules
from ratrain.ratrainc.choices.strategies import strategy
from ratrain.ratrainc.cli import main
from ratrain.ratrainc.report.comparison_page import _change, in_words, write_comparison
from ratrain.ratrainc.report.program_differences import Differences, Pair, Side, _idle, differences_of, names_of
from ratrain.ratrainc.report.report_page import write_report
from ratrain.targets.machine.machine import load_machine
from ratrain.targets.program.rtx import write_program
from ratrain.targets.simulator.bubbles import Cause
from tests.end_to_end.tiny_runs import MODEL, make_plan, make_program
from tests.ratrainc.report.report_page import Page

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module
    from ratrain.targets.simulator.figures import StageFigures

NAMES = ("baseline-1f1b", "ratrain")
RECOMPUTED = "place-1f1b,recompute{policy=full},allocate-ddr"
KEPT = "place-1f1b,recompute{policy=none},allocate-ddr"


@cache
def module_of(passes: str, **keys: Any) -> Module:
    return api.compile(MODEL, make_plan(**keys), passes=passes)


@cache
def side(name: str, passes: str | None = None, **keys: Any) -> Side:
    program = api.emit(module_of(passes or strategy(name).passes, **keys))
    simulation = api.simulate(program)
    figures, timeline = simulation.figures, simulation.timeline
    return Side(name, timeline, figures, load_machine(None))


@pytest.fixture(scope="module")
def sides() -> tuple[Side, Side]:
    return side(NAMES[0]), side(NAMES[1])


@pytest.fixture(scope="module")
def page(sides: tuple[Side, Side], tmp_path_factory: pytest.TempPathFactory) -> tuple[Page, str]:
    path = tmp_path_factory.mktemp("comparison") / "both.html"
    assert write_comparison(*sides, differences_of(*sides), str(path)) == path.stat().st_size
    text = path.read_text("utf-8")
    return Page(text), text


def facts(page: Page, prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(page.texts[f"{prefix}facts"])
    return found


def test_figures_are_those_of_each_program(sides: tuple[Side, Side]) -> None:
    found = differences_of(*sides)
    for which, each in (("program", sides[0]), ("baseline", sides[1])):
        told = {key: getattr(pair, which) for key, pair in found.figures.items()}
        figures = each.figures
        assert told["step_seconds"] == figures.step_seconds
        assert told["peak_bytes"] == max(stage.peak_bytes for stage in figures.stages)
        assert told["arena_bytes"] == max(stage.arena_bytes for stage in each.program.stages)
        assert told["exposed_tail_seconds"] == sum(stage.exposed_tail_seconds for stage in figures.stages)
        assert sum(getattr(pair, which) for pair in found.causes.values()) == pytest.approx(told["idle_seconds"])
        for index, stage in enumerate(found.stages):
            idle = [getattr(pair, which) for key, pair in stage.items() if key.startswith("idle: ")]
            assert sum(idle) == pytest.approx(figures.stages[index].idle_seconds)
            assert getattr(stage["arena_bytes"], which) == figures.stages[index].arena_bytes
    assert set(found.causes) <= {cause.value for cause in Cause}
    assert found.cannot == ()
    assert list(found.settings) == ["passes"]


def test_a_change_is_the_program_minus_the_baseline_and_the_page_says_so(page: tuple[Page, str]) -> None:
    """The slower one of the two is the program here: it has more seconds than the baseline."""
    text = page[1]
    slow, fast = NAMES
    assert page[0].heading == f"{slow} compared with {fast} (baseline)"
    assert f"<title>{page[0].heading}</title>" in text
    assert f"{slow} is slower than {fast} (the baseline): its step takes " in text
    assert f"Every change is {slow} minus {fast}: more (+) means that {slow} has more of it" in text
    heads = re.findall("<thead><tr>(.*?)</tr></thead>", text)
    columns = (
        f'<th scope="col">{slow}</th><th scope="col">{fast} (baseline)</th><th scope="col">{slow} minus baseline</th>'
    )
    assert sum(columns in head for head in heads) == 3, "figures, idle seconds, stages"
    (step,) = re.findall('<tr><th scope="row">step</th>(.*?)</tr>', text)
    cells = re.findall('<td data-label="(.*?)">(.*?)</td>', step)
    assert [label for label, _ in cells] == [slow, f"{fast} (baseline)", f"{slow} minus baseline"]
    assert re.fullmatch(r"[\d.]+ ms more \(\+[\d.]+ %\)", cells[2][1])


def test_which_one_is_faster_is_said_by_what_can_be_compared(sides: tuple[Side, Side]) -> None:
    slow, fast = sides
    share = 1 - fast.figures.step_seconds / slow.figures.step_seconds
    verdict = differences_of(fast, slow).verdict
    assert verdict.startswith("ratrain is faster than baseline-1f1b (the baseline): its step takes ")
    assert f"{100 * share:.1f} % less time" in verdict
    assert differences_of(slow, slow).verdict.startswith("baseline-1f1b is as fast as baseline-1f1b (the baseline)")
    longer = side("longer", KEPT, micro_batches=8)
    assert "% more tokens/s" in differences_of(longer, side("shorter", KEPT)).verdict


def test_ops_and_tensors_that_differ_are_those_of_the_schedules(sides: tuple[Side, Side]) -> None:
    found = differences_of(*sides)
    expected = diff_modules(*(module_of(strategy(name).passes) for name in reversed(NAMES)))
    for told, wanted in zip(found.ops, expected, strict=True):
        assert sorted(told.added) == sorted(wanted.added) != []
        assert sorted(told.dropped) == sorted(wanted.dropped) != []
        assert sorted(told.new_tensors) == sorted(wanted.new_tensors) != []
        assert told.readdressed == wanted.readdressed > 0


def test_a_pass_alone_shows_as_what_it_did() -> None:
    found = differences_of(side("recomputed", RECOMPUTED), side("kept", KEPT))
    assert {op.split()[0] for stage in found.ops for op in stage.added} == {"recompute"}
    assert not any(stage.dropped for stage in found.ops)
    assert found.figures["busy_seconds"].change > 0
    assert found.figures["ops"].change == sum(len(stage.added) for stage in found.ops)
    assert any(line.startswith("passes: ") for line in in_words(found))


def negated(found: Differences) -> dict[str, Any]:
    return {key: pair.change for key, pair in found.figures.items()} | {
        f"{index} {key}": pair.change for index, stage in enumerate(found.stages) for key, pair in stage.items()
    }


def test_the_other_way_round_all_changes_are_negated(sides: tuple[Side, Side]) -> None:
    there, back = differences_of(*sides), differences_of(*sides[::-1])
    assert negated(back) == {key: -change for key, change in negated(there).items()}
    for one, other in zip(there.ops, back.ops, strict=True):
        assert (one.added, one.dropped) == (other.dropped, other.added)
        assert [(item.tensor, item.before, item.after) for item in one.resized] == [
            (item.tensor, item.after, item.before) for item in other.resized
        ]


def test_of_one_program_nothing_differs(sides: tuple[Side, Side], tmp_path: Path) -> None:
    found = differences_of(sides[0], sides[0])
    assert all(pair.change == 0 for pair in (*found.figures.values(), *found.causes.values()))
    assert all(stage.is_empty for stage in found.ops)
    assert list(in_words(found))[2:] == ["nothing differs"]
    write_comparison(sides[0], sides[0], found, str(tmp_path / "p.html"))
    text = (tmp_path / "p.html").read_text("utf-8")
    assert "Ops, their order, tensors and addresses are the same." in text
    assert "All figures of all stages are the same." in text


@given(st.floats(0, 1e9), st.floats(0, 1e9) | st.floats(0, 1e-15))
def test_nothing_is_said_as_a_share_of_next_to_nothing(program: float, baseline: float) -> None:
    pair = Pair(program, baseline)
    assert pair.share is None or (abs(pair.share) <= 1000 and pair.change)
    assert "%" not in _change(pair, str) or pair.share is not None


def test_the_rounding_of_sums_is_no_idle_time() -> None:
    """A stage alone that always works has no idle seconds, rather than 1e-18 of them."""
    busy = side("alone", KEPT, pp=1, dp=1, cuts=())
    for each in (busy, side("two", KEPT)):
        seconds = each.figures.step_seconds
        told = [value for stage in each.figures.stages for value in stage_seconds(stage).values()]
        told += [value for index in range(len(each.figures.stages)) for value in _idle(each, index).values()]
        assert [value for value in told if value and value < 1e-11 * seconds] == []
    found = differences_of(side("two", KEPT), busy)
    shares = [float(share) for line in in_words(found) for share in re.findall(r"([-+][\d.]+) %", line)]
    assert all(abs(share) <= 1e5 for share in shares)


def stage_seconds(stage: StageFigures) -> dict[str, float]:
    return {key: getattr(stage, key) for key in ("busy_seconds", "idle_seconds", "exposed_tail_seconds")}


def test_what_cannot_be_compared_is_said_and_the_rest_is_compared(tmp_path: Path) -> None:
    one = side("two", KEPT)
    wider = make_program(evolve(MODEL, vocab_size=2 * MODEL.vocab_size))
    simulation = api.simulate(wider)
    figures, timeline = simulation.figures, simulation.timeline
    others = {
        "3 stages": (
            side("three", KEPT, pp=3, micro_batches=4),
            ["2 stages and three 3", "seconds of a step", "clusters"],
        ),
        "another model": (Side("wider", timeline, figures, load_machine(None)), ["different models"]),
    }
    assert "neither is called faster" in differences_of(one, others["another model"][0]).verdict
    for other, words in others.values():
        found = differences_of(one, other)
        assert found.ops == ()
        assert len(found.cannot) == len(words)
        assert all(part in told for part, told in zip(words, found.cannot, strict=True))
        of_steps = [found.figures[key] for key in ("step_seconds", "busy_seconds", "tokens_per_second", "ops")]
        assert all(pair.program and pair.baseline for pair in of_steps)
        assert all(pair.change is None for pair in (*of_steps, *found.causes.values()))
        assert all(pair.change is None for stage in found.stages for pair in stage.values())
        lines = list(in_words(found))
        assert "neither is called faster" in found.verdict
        assert not [line for line in lines if line.startswith("step")]
        compared = {line.split(":")[0] for line in lines if line.endswith("%)")}
        assert other.program.model == one.program.model or all("utilisation" in each for each in compared)
        assert len(found.stages) == max(len(each.program.stages) for each in (one, other))
        write_comparison(one, other, found, str(tmp_path / "p.html"))
        page = Page((tmp_path / "p.html").read_text("utf-8"))
        assert len(facts(page, "b-")["stages"]) == len(other.program.stages)
    assert differences_of(one, others["3 stages"][0]).stages[2]["peak_bytes"].program is None


def test_both_reports_are_there_whole(page: tuple[Page, str], sides: tuple[Side, Side], tmp_path: Path) -> None:
    for prefix, each in zip(("a-", "b-"), sides, strict=True):
        write_report(each.timeline, each.figures, each.machine, str(tmp_path / "one.html"))
        alone = Page((tmp_path / "one.html").read_text("utf-8"))
        names = [values["id"] for _, values in alone.tags if "data-columns" in values]
        assert len(names) > 10
        for name in names:
            assert page[0].texts[f"{prefix}{name}"] == alone.texts[name]
        assert facts(page[0], prefix)["views"] == alone.facts["views"]


def test_axes_are_common(page: tuple[Page, str], sides: tuple[Side, Side]) -> None:
    a, b = (facts(page[0], prefix) for prefix in ("a-", "b-"))
    assert a["seconds"] == b["seconds"]
    for view in ("steady", "cold"):
        spans = [of["views"][view]["end"] - of["views"][view]["start"] for of in (a, b)]
        assert a["seconds"][view] == max(spans)
    for index in range(2):
        one, other = (of["stages"][index]["memories"][0] for of in (a, b))
        assert (one["most"], one["top"]) == (other["most"], other["top"])
        assert one["most"] == max(one["arena"], other["arena"])
        assert one["top"] >= one["most"]
    assert a["seconds"]["cold"] == pytest.approx(max(each.timeline.makespan_seconds for each in sides))


def test_the_page_asks_for_nothing_and_has_no_id_twice(page: tuple[Page, str]) -> None:
    read, text = page
    ids = [values["id"] for _, values in read.tags if "id" in values]
    assert len(ids) == len(set(ids))
    assert {"a-timeline", "b-timeline", "a-search", "b-search", "stage", "whole"} <= set(ids)
    outside = text.replace("http://www.w3.org", "")
    assert not [word for word in ("http://", "https://") if word in outside]
    assert not [tag for tag, values in read.tags if "src" in values or tag in ("link", "img", "iframe")]
    for _, values in read.tags:
        assert values.get("aria-controls") is None or values["aria-controls"] in ids


def test_names_are_escaped_and_told_apart(sides: tuple[Side, Side], tmp_path: Path) -> None:
    nasty = Side("<b onclick='x'>", sides[0].timeline, sides[0].figures, sides[0].machine)
    write_comparison(nasty, sides[1], differences_of(nasty, sides[1]), str(tmp_path / "p.html"))
    page = Page((tmp_path / "p.html").read_text("utf-8"))
    assert page.heading == "<b onclick='x'> compared with ratrain (baseline)"
    assert not any("onclick" in values for _, values in page.tags)
    assert names_of("x/a.rtx", "y/b.rtx") == ("a.rtx", "b.rtx")
    assert names_of("x/a.rtx", "y/a.rtx") == ("x/a.rtx", "y/a.rtx")
    assert names_of("a.rtx", "a.rtx") == ("a.rtx (first)", "a.rtx (second)")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other, page = (str(tmp_path / name) for name in ("a.rtx", "b.rtx", "p.html"))
    write_program(api.emit(module_of(KEPT)), one)
    write_program(api.emit(module_of(RECOMPUTED)), other)
    assert main(["report", other, "--against", one, "-o", page, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["kind"], told["program"], told["baseline"]) == ("comparison", "b.rtx", "a.rtx")
    assert told["bytes"] == Path(page).stat().st_size
    assert told["figures"]["busy_seconds"]["change"] > 0
    assert told["ops"][0]["added"][0].startswith("recompute ")
    assert main(["report", other, "--against", one, "-o", page]) == 0
    said = capsys.readouterr().out
    assert said.startswith("b.rtx compared with a.rtx (baseline)")
    assert "changes are b.rtx minus a.rtx" in said
    assert "b.rtx is slower than a.rtx (the baseline): its step takes " in said
    assert "more time" in said
    assert any(line.startswith("step: ") and " more (+" in line for line in said.splitlines())
    assert "ops added" in said
    assert main(["report", "-h"]) == 0
    assert "the baseline" in capsys.readouterr().out
    assert main(["report", one, "--against", other, "-o", str(tmp_path / "p.svg")]) == 2
    assert main(["report", one, "--against", other, "-o", page, "--times", "1,1,1,0"]) == 2
    assert main(["report", one, "--against", str(tmp_path / "none.rtx"), "-o", page]) == 1

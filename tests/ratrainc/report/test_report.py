"""The report page holds the program and its timeline, and asks the network for nothing."""

from __future__ import annotations

import re
from functools import cache
from html import unescape
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from attrs import evolve, fields
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain import api
from ratrain.ratrain_ir.config.plan import Optimizer, Plan
from ratrain.ratrain_ir.config.plan_text import plan_to_toml, plan_words
from ratrain.ratrain_ir.config.rank_mapping import RankMapping
from ratrain.ratrain_ir.config.types import ALIGNMENT_BYTES, STORES, Home, aligned
from ratrain.ratrain_ir.ops.base import ENGINES
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.testing.strategies import plans
from ratrain.ratrain_ir.text.plan_file import parse_plan
from ratrain.ratrainc.cli import main
from ratrain.ratrainc.report import page_tables
from ratrain.ratrainc.report.page_columns import StepView
from ratrain.ratrainc.report.report_page import write_report
from ratrain.targets.machine.machine import load_machine
from ratrain.targets.program.rtx import write_program
from ratrain.targets.simulator.bubbles import Bubbles
from ratrain.targets.simulator.flat_program import STREAMS
from ratrain.targets.simulator.live_curve import live_curve, live_intervals
from tests.end_to_end.tiny_runs import MODEL, make_plan, make_program
from tests.mutation.subjects import WITH_STORES
from tests.ratrainc.report.report_page import Page

if TYPE_CHECKING:
    from ratrain.targets.program.program import Program
    from ratrain.targets.simulator.timeline import Timeline

ELSEWHERE = "state and activations elsewhere"
CASES = {
    "plain": {},
    "one stage": {"pp": 1},
    "three stages, sharded": {"pp": 3, "zero": 2, "reduce": "each-micro-batch", "micro_batches": 5},
    ELSEWHERE: {},
}


def elsewhere() -> Program:
    """What is kept for the backward waits in a host's memory, masters and moments stay in a file."""
    passes = "place-1f1b,offload-state{home=file},recompute{policy=none store=host},allocate-ddr"
    module = api.compile(MODEL, make_plan(), passes=passes, machine=WITH_STORES)
    return api.emit(module, machine=WITH_STORES)


def report_of(program, folder: Path) -> tuple[Timeline, str]:
    machine = WITH_STORES if program.stores else load_machine(None)
    simulation = api.simulate(program, machine=machine)
    figures, timeline = simulation.figures, simulation.timeline
    path = folder / "report.html"
    count = write_report(timeline, figures, machine, str(path))
    assert count == path.stat().st_size
    return timeline, path.read_text(encoding="utf-8")


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory) -> tuple[Timeline, Page, str]:
    program = elsewhere() if request.param == ELSEWHERE else make_program(**CASES[request.param])
    timeline, text = report_of(program, tmp_path_factory.mktemp("report"))
    return timeline, Page(text), text


def homes_of(timeline: Timeline) -> list[tuple[int, Home]]:
    """Each stage with each memory that it has tensors in."""
    stages = enumerate(timeline.program.stages)
    return [(index, home) for index, stage in stages for home in Home if home is Home.DDR or stage.bytes_in(home)]


def views(timeline: Timeline) -> list[StepView]:
    last = timeline.steps - 1
    return [
        StepView("steady", timeline, Bubbles(timeline), last),
        StepView("cold", timeline, Bubbles(timeline, cold=True), 0),
    ]


def test_ops_are_those_of_the_program(case) -> None:
    timeline, page, _ = case
    ops, titles, works, waits = page.columns("ops"), page.lines("titles"), page.columns("works"), page.columns("waits")
    assert len(ops["title"]) == timeline.ops == sum(stage.instructions for stage in timeline.program.stages)
    low = 0
    for op, item in enumerate(timeline.instructions):
        assert titles[ops["title"][op]] == evolve(item, micro_batch=None).title
        assert ops["microBatch"][op] == (-1 if item.micro_batch is None else item.micro_batch)
        assert page.facts["keywords"][ops["keyword"][op]] == item.keyword
        for name in ("seconds", "ddr_bytes", "link_bytes"):
            assert works[name][ops["work"][op]] == timeline.works[name][op]
        for wait, place in zip(item.waits, range(low, ops["waitStop"][op]), strict=True):
            stage = int(timeline.flat.ops["stream"][op]) // STREAMS
            assert waits["awaited"][place] == timeline.ops_of(stage, wait.engine)[0] + wait.count - 1
            assert waits["previous"][place] == wait.previous_step
        low = int(ops["waitStop"][op])
    assert low == len(waits["awaited"])


@pytest.mark.parametrize("name", ["steady", "cold"])
def test_events_are_those_of_the_timeline(case, name: str) -> None:
    timeline, page, _ = case
    (view,) = [each for each in views(timeline) if each.name == name]
    shown = page.columns(f"events-{name}")
    numbers = (shown["step"] + view.step).astype(int) * timeline.ops + shown["op"]
    assert (shown["start"] == timeline.starts[numbers]).all()
    assert (shown["end"] == timeline.ends[numbers]).all()
    assert sorted(shown["op"][shown["step"] == 0]) == list(range(timeline.ops)), "the whole step is there"
    assert page.facts["views"][name] == {"start": view.start, "end": view.end}
    assert shown["start"][shown["step"] == 0].min() == view.start
    assert shown["end"][shown["step"] == 0].max() == view.end
    for stream, (low, high) in enumerate(zip([0, *shown["streamStop"]], shown["streamStop"], strict=False)):
        assert (timeline.flat.ops["stream"][shown["op"][low:high]] == stream).all()
        assert (np.diff(numbers[low:high]) > 0).all()
        assert (shown["start"][low + 1 : high] >= shown["end"][low : high - 1] if high > low else np.True_).all()


@pytest.mark.parametrize("name", ["steady", "cold"])
def test_idle_time_and_critical_path_are_those_of_the_bubbles(case, name: str) -> None:
    timeline, page, _ = case
    (bubbles,) = [each.bubbles for each in views(timeline) if each.name == name]
    idle, causes = page.columns(f"idle-{name}"), page.facts["causes"]
    seconds = idle["end"] - idle["start"]
    for stream, (low, high) in enumerate(zip([0, *idle["streamStop"]], idle["streamStop"], strict=False)):
        expected = bubbles.idle_seconds(stream // STREAMS, ENGINES[stream % STREAMS])
        for number, cause in enumerate(causes):
            found = seconds[low:high][idle["cause"][low:high] == number].sum()
            wanted = sum(value for key, value in expected.items() if key.value == cause and cause != "settling")
            assert found == pytest.approx(wanted, rel=1e-9)
    path = page.columns(f"path-{name}")
    assert (path["end"] - path["start"]).sum() == pytest.approx(bubbles.window_seconds)


def test_tensors_are_those_of_the_program(case) -> None:
    timeline, page, _ = case
    for index, stage in enumerate(timeline.program.stages):
        held, types = page.columns(f"tensors-{index}"), page.lines(f"types-{index}")
        assert page.lines(f"names-{index}") == [tensor.name for tensor in stage.tensors]
        for number, tensor in enumerate(stage.tensors):
            assert held["offset"][number] * ALIGNMENT_BYTES == tensor.offset
            assert held["size"][number] * ALIGNMENT_BYTES == aligned(tensor.type.nbytes)
            assert page.facts["kinds"][held["kind"][number]] == tensor.kind.value
            assert held["carried"][number] == tensor.carried
            assert types[held["type"][number]] == str(tensor.type)
        ddr, *others = page.facts["stages"][index]["memories"]
        assert ddr == {"name": "ddr", "arena": stage.arena_bytes, "capacity": timeline.program.capacity_bytes}
        assert {each["name"]: (each["arena"], each["capacity"]) for each in others} == {
            home.value: (stage.bytes_in(home), timeline.program.info.capacity_of(home))
            for home in STORES
            if stage.bytes_in(home)
        }


@pytest.mark.parametrize("name", ["steady", "cold"])
def test_live_intervals_add_up_to_the_live_curve(case, name: str) -> None:
    timeline, page, _ = case
    start, end = (page.facts["views"][name][key] for key in ("start", "end"))
    events = page.columns(f"events-{name}")
    for index, home in homes_of(timeline):
        found, tensors = page.columns(f"intervals-{name}-{index}-{home.value}"), page.columns(f"tensors-{index}")
        since = np.where(found["first"] < 0, -np.inf, events["start"][found["first"]])
        until = np.where(found["last"] < 0, np.inf, events["end"][found["last"]])
        assert (since <= until).all()
        sizes = tensors["size"][found["tensor"]].astype(np.int64) * ALIGNMENT_BYTES
        times, live = live_curve(timeline, index, home)
        for time, expected in zip(times, live, strict=True):
            if start <= time < end:
                assert sizes[(since <= time) & (time < until)].sum() == expected


def test_intervals_of_a_tensor_do_not_meet_those_that_share_its_bytes(case) -> None:
    timeline, _, _ = case
    for index, home in homes_of(timeline):
        stage = timeline.program.stages[index]
        found = live_intervals(timeline, index, home)
        offsets = np.array([tensor.offset for tensor in stage.tensors])[found.tensors]
        ends = np.array([tensor.end for tensor in stage.tensors])[found.tensors]
        together = (found.starts[:, None] < found.ends) & (found.starts < found.ends[:, None])
        overlapping = (offsets[:, None] < ends) & (offsets < ends[:, None])
        assert not np.triu(together & overlapping, 1).any()


def test_the_page_needs_no_network_and_its_ids_are_unique(case) -> None:
    _, page, text = case
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert not any(key in attrs for _, attrs in page.tags for key in ("src", "href", "srcset", "action", "background"))
    outside_data = re.sub(r'(<script type="text/plain"[^>]*>)[^<]*', r"\1", text)
    for word in ("http:", "https:", "ws://", "url(", "@import", "fetch(", "XMLHttpRequest", "import(", "sendBeacon"):
        assert word not in outside_data, word
    policy = [attrs["content"] for tag, attrs in page.tags if tag == "meta" and "http-equiv" in attrs]
    assert policy == ["default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'"]
    assert "simulated" in outside_data


def test_tables_are_read_without_a_script(case) -> None:
    timeline, page, text = case
    assert sum(tag == "caption" for tag, _ in page.tags) == sum(tag == "table" for tag, _ in page.tags) == 8
    for stage in range(len(timeline.program.stages)):
        assert f'<th scope="row">@{stage} compute</th>' in text
    for name in (*plan_words(timeline.program.plan), "vocab_size", *load_machine(None).constants):
        assert f'<th scope="row">{name}</th>' in text


def test_names_are_escaped(tmp_path: Path) -> None:
    program = make_program()
    nasty = "</script><b onclick='x'>\"&amp;<!--"
    program.name = program.pipeline = nasty
    for stage in program.stages:
        stage.tensors[:] = [evolve(tensor, name=f"{nasty}{n}") for n, tensor in enumerate(stage.tensors)]
    _, text = report_of(program, tmp_path)
    page = Page(text)
    assert page.heading == f"{nasty} on {program.plan.clusters} x mt3000"
    assert not any("onclick" in attrs for _, attrs in page.tags)
    assert page.lines("names-0")[0] == f"{nasty}0"


def test_the_command(tmp_path: Path, capsys) -> None:
    write_program(make_program(), str(tmp_path / "p.rtx"))
    assert main(["report", str(tmp_path / "p.rtx"), "-o", str(tmp_path / "p.html")]) == 0
    assert "p.html" in capsys.readouterr().out
    assert Page((tmp_path / "p.html").read_text(encoding="utf-8")).heading == "toy on 4 x mt3000"
    assert main(["report", str(tmp_path / "p.rtx")]) == 2
    assert main(["report", str(tmp_path / "p.rtx"), "-o", str(tmp_path / "no" / "p.html")]) == 1
    assert "RT002" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.html", "p.rtx"]


def test_a_page_that_cannot_be_written(tmp_path: Path) -> None:
    simulation = api.simulate(make_program())
    figures, timeline = simulation.figures, simulation.timeline
    with pytest.raises(DiagnosticError, match="RT002"):
        write_report(timeline, figures, load_machine(None), str(tmp_path / "no" / "r.html"))


@cache
def shown_program() -> Program:
    return make_program()


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_the_plan_is_shown_in_the_words_of_a_plan_file(data: st.DataObject) -> None:
    """Every key, or that it is left out: what is shown, put under its sections, is the plan again."""
    program = shown_program()
    drawn = data.draw(plans(program.model))
    optimizer = Optimizer(
        lr=data.draw(st.sampled_from((3e-4, 1e-30, 1.0))),
        warmup_steps=data.draw(st.integers(0, 5)),
        total_steps=data.draw(st.none() | st.integers(5, 9)),
        clip=data.draw(st.sampled_from(("none", "global"))),
    )
    mapping = data.draw(st.sampled_from((None, RankMapping.parse("chip 1x1"))))
    program.plan = evolve(
        drawn,
        optimizer=optimizer,
        mapping=mapping,
        mlp_chunk=data.draw(st.none() | st.integers(1, drawn.most_rows)),
    )
    shown = page_tables.plan_tables(program).split("<caption>Model")[0]
    rows = dict(re.findall(r'<th scope="row">(\w+)</th><td>(.*?)</td>', shown))
    absent = re.findall(r"\w+", (re.search(r"Left out, as in a plan file: (.*?)\.</p>", shown) or [""] * 2)[1])
    keys = {attribute.name for attribute in (*fields(Plan), *fields(Optimizer))} - {"optimizer"}
    unsaid = keys - {*program.plan.to_fields()}  # a header has some only where they are not as usual
    assert {*rows, *absent} | unsaid == keys
    section_of: dict[str, str] = {}
    for block in plan_to_toml(program.plan).split("\n\n"):
        section, *entries = block.strip().split("\n")
        section_of |= {entry.split(" = ")[0]: section for entry in entries}
    text = ""
    for section in dict.fromkeys(section_of.values()):
        text += "\n".join([section, *(f"{k} = {unescape(v)}" for k, v in rows.items() if section_of[k] == section), ""])
    assert parse_plan(text, file="P.toml", model=program.model) == program.plan

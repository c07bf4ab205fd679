"""The report page under real wheel turns, keys and clicks: search, links, marks, saved pictures, and charts that stay where they are."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs
from xml.etree import ElementTree as ET

import pytest

from ratrain import api
from ratrain.ratrainc.report.report_page import write_report
from ratrain.ratrainc.running.examples import example_path
from ratrain.targets.machine.machine import load_machine
from tests.ratrainc.report.browser import NEEDS_BROWSER, Tab, tab

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ratrain.targets.program.program import Program, ProgramStage

pytestmark = [*NEEDS_BROWSER, pytest.mark.full]
CTRL, SHIFT = 2, 8
TOP = "document.getElementById('timeline').getBoundingClientRect().top + scrollY"


@pytest.fixture(scope="module")
def program() -> Program:
    return api.emit(api.compile(str(example_path("tiny.json")), str(example_path("tiny.toml"))))


@pytest.fixture(scope="module")
def address(program: Program, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("report") / "report.html"
    simulation = api.simulate(program)
    figures, timeline = simulation.figures, simulation.timeline
    write_report(timeline, figures, load_machine(None), str(path))
    return path.as_uri()


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Tab]:
    with tab(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def link(browser: Tab) -> dict[str, str]:
    return {key: values[0] for key, values in parse_qs(browser.tell("location.hash.slice(1)")).items()}


def search(browser: Tab, text: str) -> list[str]:
    browser.tell("document.getElementById('search').focus(); document.getElementById('search').value = ''")
    browser.call("Input.insertText", text=text)
    browser.until(f"found.text === {text!r}")
    return browser.tell("found.hits.map(hitText)")


def tensor_names(stage: ProgramStage) -> set[str]:
    return {tensor.name for tensor in stage.tensors}


def titles(program: Program, stage: int) -> list[str]:
    items = [item for stream in program.stages[stage].streams.values() for item in stream]
    return [
        item.title_without_micro_batch + ("" if item.micro_batch is None else f" m{item.micro_batch}") for item in items
    ]


@pytest.mark.parametrize("width", [384, 400, 650, 1145, 1300, 1350])
def test_the_first_zoom_leaves_the_charts_and_the_time_under_the_pointer(
    browser: Tab, address: str, width: int
) -> None:
    browser.open(address, width)
    left, top, wide = browser.tell(
        "(() => { const b = document.getElementById('timeline').getBoundingClientRect(); return [b.left, b.top, b.width]; })()"
    )
    place = left + 92 + 0.37 * (wide - 92)
    time = "state.from + 0.37 * (state.to - state.from)"
    before, span, shown = browser.tell(TOP), browser.tell("state.to - state.from"), browser.tell(time)
    browser.mouse("mouseWheel", place, top + 30, deltaX=0, deltaY=-100, modifiers=CTRL)
    browser.until(f"state.to - state.from < {span}")
    browser.settle()
    assert browser.tell(TOP) == before
    assert browser.tell(time) == pytest.approx(shown, abs=span / wide)


def test_a_search_finds_what_the_program_has(browser: Tab, address: str, program: Program) -> None:
    browser.open(address)
    wanted = [title for title in titles(program, 1) if "forward" in title and title.endswith(" m1")]
    ops = [text for text in search(browser, "forward m1 @1") if "%" not in text]
    assert sorted(ops) == sorted(f"@1 {title}" for title in wanted) != []
    names = [
        f"@{stage} %{tensor.name}"
        for stage in (0, 1)
        for tensor in program.stages[stage].tensors
        if "mlp" in tensor.name
    ]
    assert search(browser, "%mlp") == names != []
    shared = [each for each in search(browser, "mlp.0 m1") if "%" in each]
    assert shared
    assert all(".m1" in each for each in shared), "a moment m1.mlp.0 belongs to no micro-batch"
    assert search(browser, "no such thing") == []
    assert browser.tell("document.getElementById('count').textContent") == "no match"


def test_the_exact_name_is_first_then_those_that_begin_with_it_then_those_that_contain_it(
    browser: Tab, address: str, program: Program
) -> None:
    browser.open(address)
    for typed in ("embed", "w.mlp", "w.mlp.1", "%w.mlp.0", "forward", "FORWARD mlp.0", "mlp.1"):
        wanted = typed.lower().removeprefix("%")
        names = [hit.partition(" ")[2].removeprefix("%") for hit in search(browser, typed)]
        assert names
        kinds = [0 if name == wanted else 1 if name.startswith(wanted) else 2 for name in names]
        bare = [0 if name.rsplit(" m", 1)[0] == wanted else kind for name, kind in zip(names, kinds, strict=True)]
        assert bare == sorted(bare), typed
    exact = [f"@{number} %w.mlp.1" for number, held in enumerate(program.stages) if "w.mlp.1" in tensor_names(held)]
    assert search(browser, "w.mlp.1")[: len(exact)] == exact != []
    assert search(browser, "FORWARD mlp.0 m1")[0].endswith(" forward mlp.0 m1")
    assert all(re.search(r"[.%]mlp\.1($|[.])", hit) for hit in search(browser, "%mlp.1"))


def test_names_rank_by_how_well_they_fit(browser: Tab, address: str) -> None:
    """A name that has what was typed as whole words comes before one in which it is a part of a word."""
    browser.open(address)
    names = ["x.w.mlp.10", "w.mlp.10", "w.mlp.1.m0", "x.w.mlp.1", "w.mlp.1", "forward mlp.1+w.mlp.1 m3"]
    ranks = browser.tell(f"{names}.map((name) => rankOf(name, ['w.mlp.1']))")
    assert ranks == [4, 2, 1, 3, 0, 3]
    assert browser.tell("rankOf('forward attention.3+mlp.16', ['mlp.16', 'forward'])") == 3
    assert browser.tell("rankOf('forward mlp.16', ['forward', 'mlp.16'])") == 0


def test_keys_step_through_the_hits_and_centre_them(browser: Tab, address: str) -> None:
    browser.open(address)
    hits = search(browser, "forward m1 @1")
    for key, modifiers, at in (
        ("Enter", 0, 0),
        ("ArrowDown", 0, 1),
        ("Enter", SHIFT, 0),
        ("ArrowUp", 0, len(hits) - 1),
    ):
        browser.key(key, modifiers)
        browser.until(f"found.at === {at} && state.chosen === found.hits[{at}]")
        browser.settle()
        assert browser.tell("document.getElementById('count').textContent").startswith(f"{at + 1} of {len(hits)}")
    browser.key("ArrowDown")
    browser.settle()
    start, end, low, high = browser.tell("[...spanOf(state.chosen), state.from, state.to]")
    assert low <= start < end <= high
    chosen = link(browser)
    assert chosen["stage"] == "1"
    assert f"@1 {chosen['op']}" == hits[0]


@pytest.mark.parametrize("kind", ["op", "tensor"])
def test_a_link_shows_what_was_chosen_again(browser: Tab, address: str, kind: str) -> None:
    browser.open(address)
    search(browser, "%mlp @1" if kind == "tensor" else "backward m0 @1")
    browser.key("Enter")
    browser.until("state.chosen")
    browser.settle()
    left, chosen = link(browser), browser.tell("state.chosen")
    assert kind in left
    browser.open(browser.tell("location.href"))
    assert link(browser) == left
    assert browser.tell("[state.chosen.op, state.chosen.tensor]") == [chosen.get("op"), chosen.get("tensor")]


def test_moment_and_addresses_of_a_link_are_shown(browser: Tab, address: str) -> None:
    browser.open(address)
    span = browser.tell("FACTS.views.steady.end - FACTS.views.steady.start")
    browser.open(f"{address}#stage=1&memory=ddr&bytes=0x400-0x4000&time={span / 3}")
    shown: list[Any] = browser.tell("[state.low, state.high, state.stage, state.time - FACTS.views.steady.start]")
    assert shown == [0x400, 0x4000, 1, pytest.approx(span / 3)]
    red = browser.tell(
        "(() => { const c = document.getElementById('curve'), x = 92 + (c.clientWidth - 92) / 3;"
        "return [...c.getContext('2d').getImageData(x - 2, 8, 5, 212).data].some((v, i, d) => i % 4 === 0 && v > 150 && d[i + 1] < 100 && d[i + 3]); })()"
    )
    assert red, "a line stands at the moment"


def test_a_name_that_is_not_there_is_said(browser: Tab, address: str) -> None:
    browser.open(f"{address}#stage=1&tensor=nothing")
    assert browser.tell("document.getElementById('count').textContent") == "stage @1 has no tensor %nothing"


def test_a_click_chooses_an_op(browser: Tab, address: str) -> None:
    browser.open(address)
    x, y, op = browser.tell(
        "(() => { const box = document.getElementById('timeline').getBoundingClientRect(), lane = lanesOf(state).lanes[0], e = shown.events;"
        "const [low, high] = rangeOf(e.streamStop, lane.stream); let row = low;"
        "for (let i = low; i < high; i++) if (!e.step[i] && e.end[i] - e.start[i] > e.end[row] - e.start[row]) row = i;"
        "const time = (e.start[row] + e.end[row]) / 2, share = (time - state.from) / (state.to - state.from);"
        "return [box.left + 92 + share * (box.width - 92), box.top + lane.y + 8, e.op[row]]; })()"
    )
    browser.mouse("mousePressed", x, y, button="left", clickCount=1)
    browser.mouse("mouseReleased", x, y, button="left", clickCount=1)
    browser.settle()
    assert browser.tell("state.chosen.op") == op
    assert {"op", "time"} <= link(browser).keys()


def test_pictures_hold_what_is_seen(browser: Tab, address: str) -> None:
    browser.open(address)
    picture = ET.fromstring(browser.tell("pictureSvg()"))
    rectangles = sum(element.tag.endswith("rect") for element in picture.iter())
    texts = {element.text for element in picture.iter() if element.tag.endswith("text")}
    drawn = browser.tell("Number(at('map').dataset.drawn)")
    assert rectangles > drawn > 100
    assert {"@0", "@1", "compute", "arena"} <= texts
    size, kind = browser.tell("picturePng().then((blob) => [blob.size, blob.type])")
    assert kind == "image/png"
    assert size > 10_000


@pytest.mark.parametrize("width", [400, 1400])
def test_nothing_is_wider_than_the_window(browser: Tab, address: str, width: int) -> None:
    browser.open(address, width)
    search(browser, "mlp")
    browser.settle()
    assert browser.tell("document.documentElement.scrollWidth") <= width
    right = browser.tell("document.getElementById('matches').getBoundingClientRect().right")
    assert 0 < right <= width

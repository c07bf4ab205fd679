"""The page of two reports under real wheel turns, keys and clicks: what is done in one is done in the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import pytest

from ratrain import api
from ratrain.ratrainc.choices.strategies import strategy
from ratrain.ratrainc.report.comparison_page import write_comparison
from ratrain.ratrainc.report.program_differences import Side, differences_of
from ratrain.ratrainc.running.examples import example_path
from ratrain.targets.machine.machine import load_machine
from tests.end_to_end.tiny_runs import MODEL, make_plan
from tests.ratrainc.report.browser import NEEDS_BROWSER, Tab, tab

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [*NEEDS_BROWSER, pytest.mark.full]
CTRL = 2
SECONDS = "REPORTS.map(({ choiceInWords }) => [choiceInWords().from, choiceInWords().to])"
NAMED = "REPORTS.map(({ choiceInWords }) => choiceInWords().named)"


def side(name: str, model: Any, plan: Any, passes: str) -> Side:
    simulation = api.simulate(api.emit(api.compile(model, plan, passes=passes)))
    figures, timeline = simulation.figures, simulation.timeline
    return Side(name, timeline, figures, load_machine(None))


def written(path: Path, one: Side, other: Side) -> str:
    write_comparison(one, other, differences_of(one, other), str(path))
    return path.as_uri()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two strategies of the first example."""
    given = str(example_path("tiny.json")), str(example_path("tiny.toml"))
    one, other = (side(name, *given, strategy(name).passes) for name in ("baseline-1f1b", "ratrain"))
    return written(tmp_path_factory.mktemp("comparison") / "both.html", one, other)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with tab(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def link(browser: Tab) -> dict[str, str]:
    return {key: values[0] for key, values in parse_qs(browser.tell("location.hash.slice(1)")).items()}


def search(browser: Tab, prefix: str, text: str) -> list[list[str]]:
    """Type into the search of one report; what both have found."""
    browser.tell(f"document.getElementById('{prefix}search').focus()")
    browser.tell(f"document.getElementById('{prefix}search').value = ''")
    browser.call("Input.insertText", text=text)
    browser.settle()
    return browser.tell("REPORTS.map((report) => report.hits())")


def count(browser: Tab, prefix: str) -> str:
    return browser.tell(f"document.getElementById('{prefix}count').textContent")


@pytest.mark.parametrize("prefix", ["a-", "b-"])
def test_a_zoom_of_one_is_that_of_the_other(browser: Tab, address: str, prefix: str) -> None:
    browser.open(address)
    whole = browser.tell(SECONDS)
    assert whole[0] == pytest.approx(whole[1])
    name = f"document.getElementById('{prefix}timeline')"
    browser.tell(f"{name}.scrollIntoView({{ block: 'center' }})")
    x, y = browser.tell(
        f"(({{ left, top, width }}) => [left + 92 + 0.3 * (width - 92), top + 40])({name}.getBoundingClientRect())"
    )
    browser.mouse("mouseWheel", x, y, deltaX=0, deltaY=-100, modifiers=CTRL)
    browser.settle()
    one, other = browser.tell(SECONDS)
    assert one == pytest.approx(other)
    assert one[1] - one[0] == pytest.approx(0.8 * (whole[0][1] - whole[0][0]))
    assert float(link(browser)["to"]) == pytest.approx(one[1])
    browser.tell("document.getElementById('whole').click()")
    browser.settle()
    assert browser.tell(SECONDS) == [pytest.approx(span) for span in whole]


@pytest.mark.parametrize("prefix", ["a-", "b-"])
def test_a_search_and_a_choice_act_on_both(browser: Tab, address: str, prefix: str) -> None:
    browser.open(address)
    hits = search(browser, prefix, "forward mlp m1")
    assert hits[0] == hits[1] != []
    browser.key("Enter")
    browser.settle()
    one, other = browser.tell(NAMED)
    assert one == other
    assert f"@0 {one['op']}" == hits[0][0]
    assert count(browser, "a-") == count(browser, "b-") == f"1 of {len(hits[0])}"
    left = link(browser)
    assert left["op"] == one["op"]
    browser.open(browser.tell("location.href"))
    assert browser.tell(NAMED) == [one, one]
    assert link(browser) == left


def test_what_only_one_has_is_said_by_the_other(browser: Tab, address: str) -> None:
    browser.open(address)
    one, other = search(browser, "a-", "recompute m1 @1")
    assert one
    assert other == []
    browser.key("Enter")
    browser.settle()
    assert count(browser, "b-") == f"stage @1 has no op {one[0].removeprefix('@1 ')}"
    assert browser.tell(NAMED)[1] is None


def test_a_stage_and_a_view_are_chosen_in_both(browser: Tab, address: str) -> None:
    browser.open(address)
    for name, value in (("stage", "1"), ("view", "cold"), ("lanes", "compute")):
        browser.tell(
            f"((e) => {{ e.value = '{value}'; e.dispatchEvent(new Event('change')); }})(document.getElementById('{name}'))"
        )
        browser.settle()
    choices = browser.tell("REPORTS.map(({ choiceInWords }) => choiceInWords())")
    assert [(each["stage"], each["view"], each["lanes"]) for each in choices] == [(1, "cold", "compute")] * 2
    assert browser.tell("[...document.querySelectorAll('.stage-name')].map((e) => e.textContent)") == ["@1"] * 4


def test_stages_that_only_one_has(browser: Tab, tmp_path: Path) -> None:
    passes = "place-1f1b,recompute{policy=none},allocate-ddr"
    two, three = (side(str(pp), MODEL, make_plan(pp=pp), passes) for pp in (2, 3))
    browser.open(written(tmp_path / "both.html", two, three))
    browser.tell("((e) => { e.value = '2'; e.dispatchEvent(new Event('change')); })(document.getElementById('stage'))")
    browser.settle()
    assert [each["stage"] for each in browser.tell("REPORTS.map(({ choiceInWords }) => choiceInWords())")] == [1, 2]
    assert browser.tell("document.getElementById('stage').value") == "2"
    assert count(browser, "a-") == "no stage @2 here: @1 is shown"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
def test_nothing_is_wider_than_the_window_and_both_are_painted(
    browser: Tab, address: str, width: int, scheme: str
) -> None:
    browser.open(address, width, scheme=scheme)
    assert browser.tell("document.documentElement.scrollWidth") <= width
    drawn = browser.tell("['a-', 'b-'].map((p) => Number(document.getElementById(p + 'map').dataset.drawn))")
    assert min(drawn) > 100
    assert browser.tell("['a-', 'b-'].map((p) => document.getElementById(p + 'problem').hidden)") == [True, True]


def test_in_a_narrow_window_each_value_of_a_comparison_has_its_name_and_nothing_is_scrolled_sideways(
    browser: Tab, address: str
) -> None:
    browser.open(address, 400)
    browser.tell("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    boxes = browser.tell("[...document.querySelectorAll('.stacks')].map((b) => [b.scrollWidth, b.clientWidth])")
    assert len(boxes) >= 5
    assert all(wide <= shown <= 400 for wide, shown in boxes)
    cells = browser.tell(
        "[...document.querySelectorAll('.stacks td')].map((cell) => [getComputedStyle(cell, '::before').content,"
        "cell.dataset.label, cell.getBoundingClientRect().right])"
    )
    assert all(shown == f'"{label}"' and right <= 400 for shown, label, right in cells)
    assert browser.tell("getComputedStyle(document.querySelector('.stacks thead')).display") == "none"
    browser.open(address, 1400)
    assert browser.tell("getComputedStyle(document.querySelector('.stacks td'), '::before').content") == "none"

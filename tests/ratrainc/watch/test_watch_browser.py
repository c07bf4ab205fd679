"""The page of a run under real drags, clicks and keys."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import pytest

from ratrain.ratrainc.cli import main
from tests.ratrainc.report.browser import NEEDS_BROWSER, Tab, tab

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [*NEEDS_BROWSER, pytest.mark.full]
STEPS = 600
RANGE = "[range.from, range.to]"
BOX = "(({ left, top, width }) => [left, top, width])(document.querySelector('#loss .chart').getBoundingClientRect())"


def line(step: int) -> str:
    loss = 2 + 3.5 * math.exp(-step / 120)
    told: dict[str, Any] = {"step": step, "loss": loss, "eval_loss": loss + 0.1 if step % 50 == 49 else None}
    told |= {"tokens_per_second": 7000.0 + step % 7, "gradient_norm": 1.0 + step % 3, "loss_scale": 65536.0}
    told |= {"learning_rate": 1e-3, "resident_bytes": 240 << 20, "planned_bytes": 237 << 20}
    stage = {"least": 1.0, "median": 1.0, "most": 1.5, "slowest": "stage @0 replica 1"}
    return json.dumps({**told, "compute_seconds": [stage]}) + "\n"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("watch")
    (folder / "l.jsonl").write_text("".join(map(line, range(STEPS))))
    assert main(["watch", str(folder / "l.jsonl"), "--once"]) == 0
    return (folder / "l.html").as_uri()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with tab(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def opened(browser: Tab, address: str, width: int = 1300, scheme: str = "light") -> None:
    browser.open(address, width, scheme=scheme, mark="drawn")


def link(browser: Tab) -> dict[str, str]:
    return {key: values[0] for key, values in parse_qs(browser.tell("location.hash.slice(1)")).items()}


def drag(browser: Tab, begin: float, end: float) -> None:
    """Drag over the chart of the loss, between two shares of its axis."""
    left, top, width = browser.tell(BOX)
    places = [left + 64 + share * (width - 72) for share in (begin, end)]
    browser.mouse("mousePressed", places[0], top + 60, button="left", clickCount=1)
    browser.mouse("mouseMoved", places[1], top + 60, button="left", buttons=1)
    browser.mouse("mouseReleased", places[1], top + 60, button="left", clickCount=1)
    browser.settle()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1300])
def test_all_charts_are_drawn_whole_on_one_axis_of_steps(browser: Tab, address: str, width: int, scheme: str) -> None:
    """Also where a scroll bar came as they were drawn."""
    opened(browser, address, width, scheme)
    assert browser.tell("document.documentElement.scrollWidth") <= width
    ends = browser.tell(
        "[...document.querySelectorAll('.chart svg')].map((svg) => [Number(svg.querySelector('polyline').getAttribute('points')"
        ".split(' ').at(-1).split(',')[0]), svg.clientWidth])"
    )
    assert len(ends) == 7
    assert {wide for _, wide in ends} == {ends[0][1]}
    assert [end for end, _ in ends] == [pytest.approx(wide - 8, abs=1) for _, wide in ends]


def test_a_drag_zooms_all_charts_and_the_address_keeps_it(browser: Tab, address: str) -> None:
    opened(browser, address)
    drag(browser, 0.25, 0.5)
    low, high = browser.tell(RANGE)
    assert [low, high] == [pytest.approx(0.25 * (STEPS - 1), abs=2), pytest.approx(0.5 * (STEPS - 1), abs=2)]
    assert [int(link(browser)[key]) for key in ("from", "to")] == [round(low), round(high)]
    labels = browser.tell(
        "[...document.querySelectorAll('.chart svg')].map((svg) => [...svg.querySelectorAll('text')].map((t) => t.textContent).filter((t) => t === '200').length)"
    )
    assert labels == [1] * 7
    opened(browser, browser.tell("location.href"))
    assert browser.tell(RANGE) == [round(low), round(high)]
    browser.tell("document.querySelector('#loss .chart').focus()")
    browser.key("0")
    browser.settle()
    assert browser.tell(RANGE) == [0, STEPS - 1]
    assert link(browser) == {}


def test_keys_zoom_and_a_double_click_shows_all(browser: Tab, address: str) -> None:
    opened(browser, address)
    browser.tell("document.querySelector('#norm .chart').focus()")
    browser.key("+")
    browser.settle()
    low, high = browser.tell(RANGE)
    assert high - low == pytest.approx((STEPS - 1) / 2)
    left, top, width = browser.tell(BOX)
    for clicks in (1, 2):
        for kind in ("mousePressed", "mouseReleased"):
            browser.mouse(kind, left + width / 2, top + 60, button="left", clickCount=clicks)
    browser.settle()
    assert browser.tell(RANGE) == [0, STEPS - 1]


def test_the_pointer_tells_the_values_of_a_step(browser: Tab, address: str) -> None:
    opened(browser, address)
    left, top, width = browser.tell(BOX)
    browser.mouse("mouseMoved", left + 64 + 0.5 * (width - 72), top + 60)
    browser.settle()
    assert not browser.tell("document.getElementById('tip').hidden")
    told = browser.tell("document.getElementById('tip').textContent")
    assert "loss 2." in told
    assert "held-out loss" in told
    assert any(f"at step {step}" in told for step in (299, 300))

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


LINES = "[...document.querySelectorAll('#{} polyline')].map((p) => [p.getAttribute('class'), Number(p.getAttribute('stroke-opacity') ?? 1)])"
TICKS = "[...document.querySelectorAll('#{} svg text[text-anchor=end]')].map((t) => t.textContent)"
NOTES = "Object.fromEntries([...document.querySelectorAll('figure')].map((f) => [f.id, f.querySelector('.axis').textContent]))"


def press(browser: Tab, name: str, key: str, times: int = 1) -> None:
    browser.tell(f"document.getElementById('{name}').focus()")
    for _ in range(times):
        # a key that the browser itself acts on needs its code; a space is also a text
        code = {"ArrowRight": 39, "End": 35, "Home": 36, " ": 32}[key]
        text = {"text": " "} if key == " " else {}
        browser.call("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **text)
        browser.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)
    browser.settle()


def test_keys_smooth_the_lines_and_the_raw_ones_stay_faint_behind(browser: Tab, address: str) -> None:
    opened(browser, address)
    assert browser.tell(LINES.format("norm")) == [[None, 1]]
    press(browser, "smooth", "ArrowRight", 5)
    assert browser.tell("look.smooth") == pytest.approx(0.05)
    assert link(browser) == {"smooth": "0.05"}
    press(browser, "smooth", "End")
    assert browser.tell("look.smooth") == 0.99
    assert browser.tell(LINES.format("norm")) == [["raw", 0.3], ["smooth", 1]]
    assert browser.tell(LINES.format("scale")) == [[None, 1]], "powers of two are not averaged"
    assert browser.tell("document.querySelector('#norm .chart').getAttribute('aria-label')").endswith(", smoothed")
    press(browser, "smooth", "Home")
    assert browser.tell(LINES.format("norm")) == [[None, 1]]
    assert link(browser) == {}


def test_the_smooth_line_is_the_average_of_weights_that_fall_by_steps(browser: Tab, address: str) -> None:
    """Losses against the sum that defines the average; evaluations, 50 steps apart, stay what they are."""
    opened(browser, f"{address}#smooth=0.9")
    raw, even = browser.tell(
        "(() => { const points = smoothed(FACTS.runs[0].series.loss, STRIDES[0]); return [points.map((p) => p[1]), points.map((p) => p[4])]; })()"
    )
    assert len(raw) == STEPS
    for place in (0, 1, 7, STEPS - 1):
        weights = [0.9 ** (place - each) for each in range(place + 1)]
        mean = sum(w * v for w, v in zip(weights, raw, strict=False)) / sum(weights)
        assert even[place] == pytest.approx(mean, rel=1e-9)
    pairs = browser.tell("smoothed(FACTS.runs[0].series.eval_loss, STRIDES[0]).map((p) => [p[1], p[4]])")
    assert all(now == pytest.approx(before, rel=0.01) for before, now in pairs)
    zoomed = browser.tell("(show(300, 400), linesOf(FACTS.charts[0])[0].points.find((p) => p[0] === 350)[4])")
    assert zoomed == pytest.approx(even[350])


def test_a_key_switches_to_a_log_axis_where_values_allow_it(browser: Tab, address: str) -> None:
    opened(browser, address)
    before = browser.tell(TICKS.format("scale"))
    assert set(browser.tell(NOTES).values()) == {""}
    press(browser, "log", " ")
    assert browser.tell("[look.log, document.getElementById('log').checked]") == [True, True]
    assert link(browser) == {"log": "1"}
    notes = browser.tell(NOTES)
    assert notes["loss"] == notes["norm"] == "(log axis)"
    assert notes["memory"] == "(no log axis: bytes start at zero)"
    assert notes["scale"] == "", "it always has one"
    assert browser.tell(TICKS.format("scale")) == before
    assert browser.tell("document.querySelector('#loss .chart').getAttribute('aria-label')").endswith(", log axis")
    assert browser.tell("logTicks(0.09, 5)") == [pytest.approx(t) for t in (0.1, 0.2, 0.5, 1, 2, 5)]
    assert browser.tell("logTicks(1e-9, 1e3)") == [pytest.approx(10.0**power) for power in range(-9, 4, 3)]
    assert browser.tell("logTicks(7000, 8000)") == [7000, 7200, 7400, 7600, 7800, 8000]
    places = browser.tell(
        "(() => { const { y } = axisOf(FACTS.charts[0], linesOf(FACTS.charts[0])); return [y(2), y(4), y(8)]; })()"
    )
    assert places[0] - places[1] == pytest.approx(places[1] - places[2])
    press(browser, "log", " ")
    assert link(browser) == {}


def test_a_reload_keeps_smoothing_axis_zoom_and_focus(browser: Tab, address: str) -> None:
    opened(browser, f"{address}#from=100&to=300&smooth=0.6&log=1")
    kept = {"from": "100", "to": "300", "smooth": "0.6", "log": "1"}
    assert link(browser) == kept
    assert browser.tell("document.getElementById('smooth').value") == "0.6"
    for name, selector in (("smooth", "#smooth"), ("log", "#log"), (None, "#norm .chart")):
        browser.tell(f"document.querySelector('{selector}').focus()")
        assert browser.tell("focused()") == (f"#{name}" if name else selector)
        browser.tell("history.replaceState({ focus: focused() }, '')")
        browser.call("Page.reload")
        browser.settle()
        browser.until("document.documentElement.dataset.drawn")
        browser.settle()
        assert link(browser) == kept
        assert browser.tell("[look.smooth, look.log, range.from, range.to]") == [0.6, True, 100, 300]
        assert browser.tell(f"document.activeElement === document.querySelector('{selector}')"), selector


def test_the_controls_have_names_and_tell_their_values(browser: Tab, address: str) -> None:
    opened(browser, f"{address}#smooth=0.9&log=1", width=400)
    assert browser.tell("document.documentElement.scrollWidth") <= 400
    nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    told = {}
    for node in nodes:
        if node.get("role", {}).get("value") in ("slider", "switch"):
            properties = {each["name"]: each["value"].get("value") for each in node["properties"]}
            told[node["name"]["value"]] = (
                node["role"]["value"],
                properties,
                node.get("description", {}).get("value", ""),
            )
    assert told.keys() == {"smoothing", "log axis"}
    assert told["smoothing"][0] == "slider"
    assert told["smoothing"][1]["valuetext"] == "0.90, about 10 steps"
    assert told["log axis"][0] == "switch"
    assert told["log axis"][1]["checked"] == "true"
    assert "A log axis is for charts" in told["log axis"][2]
    right = browser.tell("[...document.querySelectorAll('#look *')].map((e) => e.getBoundingClientRect().right)")
    assert max(right) <= 400

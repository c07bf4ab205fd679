"""The report page in a real browser: what it paints, and what it says under the pointer."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ratrain import api
from ratrain.ratrain_ir.ops.base import ENGINES
from ratrain.ratrainc.report.report_page import write_report
from ratrain.ratrainc.running.examples import example_path
from ratrain.targets.machine.machine import load_machine
from ratrain.targets.simulator.bubbles import Cause
from ratrain.targets.simulator.flat_program import STREAMS
from ratrain.targets.simulator.live_curve import live_curve
from tests.ratrainc.report.browser import BROWSER, NEEDS_BROWSER, OPTIONS
from tests.ratrainc.report.report_page import Page

if TYPE_CHECKING:
    from ratrain.targets.simulator.timeline import Timeline

pytestmark = NEEDS_BROWSER
_DUMPING = ("--run-all-compositor-stages-before-draw", "--window-size=1400,1600", "--virtual-time-budget=20000")
READER = """<pre id="told"></pre><script>
(async () => {
  const told = { errors: [] };
  window.requestAnimationFrame = (action) => setTimeout(action, 16); // virtual time shows no frames
  window.cancelAnimationFrame = clearTimeout;
  window.addEventListener("error", (event) => told.errors.push(event.message));
  window.addEventListener("unhandledrejection", (event) => told.errors.push(String(event.reason)));
  const root = document.documentElement.dataset, pause = () => new Promise((done) => setTimeout(done, 20));
  const tell = () => { document.getElementById("told").textContent = JSON.stringify(told); };
  const until = async (holds) => { for (let i = 0; i < 200 && !holds(); i++) await pause(); };
  const tipAt = (canvas, x, y) => {
    const box = canvas.getBoundingClientRect();
    canvas.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + x, clientY: box.top + y, bubbles: true }));
    const tip = document.getElementById("tip");
    return tip.hidden ? null : [tip.firstChild.textContent, ...tip.lastChild.textContent.split("\\n")];
  };
  const painted = (canvas, x, y) => {
    const ratio = window.devicePixelRatio, [r, g, b] = canvas.getContext("2d").getImageData(x * ratio, y * ratio, 1, 1).data;
    return "#" + [r, g, b].map((part) => part.toString(16).padStart(2, "0")).join("");
  };
  const xAt = (canvas, time) => GUTTER + (time - state.from) / (state.to - state.from) * (canvas.clientWidth - GUTTER);
  await until(() => root.paintedMs);
  const timeline = document.getElementById("timeline"), map = document.getElementById("map"), events = shown.events;
  told.first = { ...root, drawn: timeline.dataset.drawn, height: timeline.clientHeight };
  told.ops = [];
  for (const lane of lanesOf(state).lanes) {
    const [low, high] = rangeOf(events.streamStop, lane.stream);
    for (let row = low; row < high; row++) {
      const x = xAt(timeline, (events.start[row] + events.end[row]) / 2);
      const wide = (events.end[row] - events.start[row]) / (state.to - state.from) * timeline.clientWidth > 4;
      if (!wide) continue;
      const y = lane.y + 1.5;
      told.ops.push({ op: events.op[row], step: events.step[row], stream: lane.stream, tip: tipAt(timeline, x, y),
        pixel: painted(timeline, x, y), colour: opColours()[shown.ops.keyword[events.op[row]]] });
    }
  }
  const gap = lanesOf(state).lanes.find((lane) => lane.stream === STREAMS), idle = shown.idle;
  const pieces = Array.from(idle.start.keys()).slice(...rangeOf(idle.streamStop, gap.stream)).filter((i) => idle.start[i] >= state.from);
  const piece = pieces.sort((a, b) => idle.end[b] - idle.start[b] - idle.end[a] + idle.start[a])[0];
  told.idle = tipAt(timeline, xAt(timeline, (idle.start[piece] + idle.end[piece]) / 2), gap.y + 1);
  told.tensors = [];
  const { tensors, intervals, starts, ends } = shown.held, y = mapY(state, map.clientHeight);
  for (let i = 0; i < starts.length; i++) {
    const tensor = intervals.tensor[i], bottom = tensors.offset[tensor] * UNIT, size = tensors.size[tensor] * UNIT;
    const x = xAt(map, (starts[i] + ends[i]) / 2), middle = y(bottom + size / 2);
    if (y(bottom) - y(bottom + size) < 4 || xAt(map, ends[i]) - xAt(map, starts[i]) < 4) continue;
    told.tensors.push({ tensor, tip: tipAt(map, x, middle) });
  }
  document.getElementById("stage").value = 1;
  document.getElementById("stage").dispatchEvent(new Event("change"));
  await until(() => document.querySelector(".stage-name").textContent === "@1");
  told.second = { ...root };
  timeline.dispatchEvent(new KeyboardEvent("keydown", { key: "+" }));
  await until(() => location.hash.includes("from"));
  told.hash = location.hash;
  told.range = [state.from, state.to];
  const pointer = (name, x, y, more = {}) => {
    const box = timeline.getBoundingClientRect();
    timeline.dispatchEvent(new PointerEvent(name, { clientX: box.left + x, clientY: box.top + y, bubbles: true, ...more }));
  };
  const whole = () => [state.from, state.to];
  timeline.dispatchEvent(new MouseEvent("dblclick"));
  told.doubleClick = whole();
  const width = timeline.clientWidth - GUTTER;
  timeline.setPointerCapture = () => {}; // these pointers are made up, and cannot be captured
  pointer("pointerdown", GUTTER + 0.5 * width, 30);
  pointer("pointermove", GUTTER + 0.6 * width, 30);
  pointer("pointerup", GUTTER + 0.75 * width, 30);
  told.dragged = whole();
  timeline.dispatchEvent(new WheelEvent("wheel", { deltaY: 100, shiftKey: true }));
  told.wheeled = whole();
  document.getElementById("whole").click();
  const lane = lanesOf(state).lanes.find((each) => each.stage === 0);
  pointer("pointerdown", 5, lane.y + 2);
  pointer("pointerup", 5, lane.y + 2);
  await until(() => document.querySelector(".stage-name").textContent === "@0");
  told.clicked = document.querySelector(".stage-name").textContent;
  document.getElementById("view").value = "cold";
  document.getElementById("view").dispatchEvent(new Event("change"));
  await until(() => location.hash.includes("cold"));
  told.cold = { ...root };
  told.problem = document.getElementById("problem").textContent;
  tell();
})();
</script></body>"""


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    module = api.compile(str(example_path("tiny.json")), str(example_path("tiny.toml")))
    return api.simulate(api.emit(module)).timeline


@pytest.fixture(scope="module")
def told(timeline: Timeline, tmp_path_factory) -> dict[str, Any]:
    """What the page did in the browser."""
    folder = tmp_path_factory.mktemp("browser")
    path = folder / "report.html"
    figures = api.simulate(timeline.program)
    write_report(timeline, figures, load_machine(None), str(path))
    path.write_text(path.read_text(encoding="utf-8").replace("</body>", READER), encoding="utf-8")
    found = dumped(path, folder)
    assert found.texts.get("told"), "the page's script did not come to its end"
    answer: dict[str, Any] = json.loads(found.texts["told"])
    assert answer["errors"] == []
    assert answer["problem"] == ""
    return answer


def dumped(path: Path, folder: Path) -> Page:
    assert BROWSER is not None
    command = [BROWSER, *OPTIONS, *_DUMPING, f"--user-data-dir={folder / 'profile'}", "--dump-dom", path.as_uri()]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL, cwd=folder
    )
    assert ended.returncode == 0, ended.stderr
    return Page(ended.stdout)


def test_everything_is_painted(told, timeline: Timeline) -> None:
    assert int(told["first"]["events"]) >= timeline.ops
    assert int(told["first"]["drawn"]) >= timeline.ops, "all lanes of a program of two stages are shown"
    assert int(told["first"]["height"]) > 100


def test_ops_have_their_colour_and_say_what_they_are(told, timeline: Timeline) -> None:
    assert len(told["ops"]) > 20
    for entry in told["ops"]:
        item = timeline.instructions[entry["op"]]
        stage, engine = divmod(entry["stream"], STREAMS)
        assert entry["pixel"] == entry["colour"].lower() or entry["step"], entry
        tip = entry["tip"]
        shown_title = item.title_without_micro_batch + (f" m{item.micro_batch}" if item.micro_batch is not None else "")
        assert tip[0].startswith(shown_title)
        batch = "" if item.micro_batch is None else f", micro-batch {item.micro_batch}"
        assert tip[1] == f"stage @{stage}, {ENGINES[engine].value} engine{batch}"
        assert "alone" in tip[2]
        assert tip[3].startswith("DDR ")
        assert len(tip) == 4 + max(1, len(item.waits))
        assert all(line.startswith("waits for ") for line in tip[4:])
        for wait, line in zip(item.waits, tip[4:], strict=False):
            awaited = timeline.program.stages[stage].streams[wait.engine][wait.count - 1]
            assert line.startswith(f"waits for {awaited.title_without_micro_batch}")


def test_idle_time_says_its_cause(told) -> None:
    assert told["idle"][0] in {f"idle: {cause.value}" for cause in Cause}
    assert told["idle"][1].startswith("stage @1, compute engine")


def test_tensors_say_what_they_are(told, timeline: Timeline) -> None:
    assert len(told["tensors"]) > 10
    for entry in told["tensors"]:
        tensor = timeline.program.stages[0].tensors[entry["tensor"]]
        assert entry["tip"][0] == f"%{tensor.name}"
        assert entry["tip"][1].startswith(tensor.kind.value)
        assert entry["tip"][1].endswith(f" at {tensor.offset:#x}")


@pytest.mark.parametrize(("when", "stage"), [("first", 0), ("second", 1)])
def test_the_peak_is_that_of_the_live_curve(told, timeline: Timeline, when: str, stage: int) -> None:
    times, live = live_curve(timeline, stage)
    since = timeline.starts[-timeline.ops :].min()
    before = max(0, int((times <= since).sum()) - 1)
    assert int(told[when]["peak"]) == live[before:].max()


def test_the_choice_stays_in_the_address(told) -> None:
    assert "stage=1" in told["hash"]
    assert "from=" in told["hash"]


def test_a_key_zooms_to_the_middle(told, timeline: Timeline) -> None:
    start, end = timeline.starts[-timeline.ops :].min(), timeline.ends.max()
    assert told["range"] == pytest.approx([start + (end - start) / 4, end - (end - start) / 4])


def test_the_pointer_zooms_moves_and_chooses(told, timeline: Timeline) -> None:
    start, end = timeline.starts[-timeline.ops :].min(), timeline.ends.max()
    span = end - start
    assert told["doubleClick"] == pytest.approx([start, end])
    assert told["dragged"] == pytest.approx([start + span / 2, start + span * 0.75])
    assert told["wheeled"] == pytest.approx([start + span * 0.525, start + span * 0.775])
    assert told["clicked"] == "@0"


def test_the_first_step_can_be_chosen(told, timeline: Timeline) -> None:
    until = timeline.makespan_seconds
    assert int(told["cold"]["events"]) == int((timeline.starts <= until).sum())

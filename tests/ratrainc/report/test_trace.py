"""The trace as Perfetto's reader takes it: categories, tracks, whole nanoseconds, arrows, arguments, and a query over it."""

from __future__ import annotations

import json
import re
import sqlite3
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ratrain import api
from ratrain.ratrain_ir.ops.base import ENGINES
from ratrain.ratrain_ir.ops.compute import Release
from ratrain.ratrain_ir.ops.kinds import OP_CLASSES
from ratrain.ratrainc.choices.strategies import strategy
from ratrain.ratrainc.report.trace import CATEGORIES
from ratrain.targets.machine.cost import kernel_flops
from tests.end_to_end.test_peer_offload import DEEP
from tests.end_to_end.tiny_runs import MODEL, make_plan
from tests.mutation.subjects import WITH_STORES

JOINT = strategy("ratrain").passes
BASELINE = strategy("baseline-1f1b").passes
LENT = "place-1f1b,recompute{policy=none store=peer},allocate-ddr"
STORED = "place-1f1b,offload-state{home=file},recompute{policy=none store=host},allocate-ddr"
CASES: dict[str, tuple[Any, ...]] = {
    "joint": (MODEL, make_plan(), JOINT, None),
    "recovered": (MODEL, make_plan(zero=2), BASELINE, None),
    "three stages of two ranks": (MODEL, make_plan(pp=3, tp=2, dp=1), JOINT, None),
    "lent": (DEEP, make_plan(DEEP, pp=3, dp=1, micro_batches=5), LENT, None),
    "stored": (MODEL, make_plan(), STORED, WITH_STORES),
}
PAGE = Path(__file__).parents[3] / "docs" / "simulation.md"


class Trace:
    """A trace, with the simulation that it is of."""

    def __init__(self, case: str, folder: Path) -> None:
        model, plan, passes, machine = CASES[case]
        module = api.compile(model, plan, passes=passes, machine=machine)
        self.simulation = api.simulate(api.emit(module, machine=machine), machine=machine)
        self.timeline = self.simulation.timeline
        api.write_trace(self.simulation, str(folder / "t.json"))
        self.file = json.loads((folder / "t.json").read_text("utf-8"))
        self.events: list[dict[str, Any]] = self.file["traceEvents"]
        self.spans = [event for event in self.events if event["ph"] == "X"]
        self.tracks: dict[tuple[int, int], list[tuple[int, int]]] = {}
        """start and end of spans by track, in nanoseconds as Perfetto cuts them"""
        for span in self.spans:
            start = nanoseconds(span["ts"])
            place = span["pid"], span["tid"]
            self.tracks.setdefault(place, []).append((start, start + nanoseconds(span["dur"])))


def nanoseconds(microseconds: float) -> int:
    return int(microseconds * 1000.0)


@pytest.fixture(scope="module", params=CASES)
def trace(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return Trace(request.param, tmp_path_factory.mktemp("trace"))


def test_events_have_what_the_format_asks_of_their_phase(trace: Trace) -> None:
    """Chrome's Trace Event Format: what each phase needs, with times in microseconds."""
    needed = {
        "M": {"name", "pid", "tid", "args"},
        "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
        "s": {"name", "cat", "id", "pid", "tid", "ts"},
        "f": {"name", "cat", "id", "pid", "tid", "ts", "bp"},
        "C": {"name", "pid", "tid", "ts", "args"},
    }
    for event in trace.events:
        assert event.keys() == {"ph", *needed[event["ph"]]}
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 0) >= 0
    assert trace.file["displayTimeUnit"] == "ms"
    assert trace.file["otherData"] == {"program": trace.timeline.program.name, "times": "simulated"}


def test_every_kind_of_op_has_one_category() -> None:
    kinds = {"compute", "recompute", "update", "input", "send", "recv", "collective", "prefetch", "offload", "reload"}
    found = {keyword: CATEGORIES[keyword] for keyword in OP_CLASSES if keyword != Release.keyword}
    assert set(found.values()) == kinds
    assert found["all_gather"] == "prefetch"
    assert found["peer_offload"] == found["donor_accept"] == found["store"] == "offload"
    told = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", PAGE.read_text("utf-8"), re.MULTILINE)
    assert kinds | {"message"} <= {name for row in told for name in re.findall(r"`(\w+)`", row)}


def test_spans_have_the_category_of_their_op(trace: Trace, request: pytest.FixtureRequest) -> None:
    assert all(span["cat"] == CATEGORIES[span["args"]["keyword"]] for span in trace.spans)
    assert all(span["name"].startswith(span["args"]["keyword"]) for span in trace.spans)
    met = {span["cat"] for span in trace.spans}
    case = request.node.callspec.params["trace"]
    expected = {"recovered": {"recompute", "prefetch"}, "lent": {"offload", "reload"}, "stored": {"offload", "reload"}}
    assert {"compute", "update", "send", "recv", "collective", *expected.get(case, ())} <= met


def test_processes_and_tracks_have_names_and_an_order(trace: Trace) -> None:
    told: dict[str, dict[Any, Any]] = {}
    for event in trace.events:
        if event["ph"] == "M":
            place = event["pid"] if event["name"].startswith("process") else (event["pid"], event["tid"])
            assert place not in told.setdefault(event["name"], {})
            told[event["name"]][place] = event["args"].get("name", event["args"].get("sort_index"))
    stages = range(len(trace.timeline.program.stages))
    assert told["process_name"] == {stage: f"stage @{stage} (simulated)" for stage in stages}
    assert told["process_sort_index"] == {stage: stage for stage in stages}
    engines = [engine.value for engine in ENGINES]
    assert told["thread_sort_index"] == {place: engines.index(name) for place, name in told["thread_name"].items()}
    assert set(trace.tracks) <= set(told["thread_name"])


def test_tracks_have_numbers_of_their_own(trace: Trace) -> None:
    """Perfetto names threads by number alone, and calls one main that has the number of its process."""
    places = {(event["pid"], event["tid"]) for event in trace.events}
    assert len({thread for _, thread in places}) == len(places)
    assert not {thread for _, thread in places} & {process for process, _ in places}


def test_no_span_reaches_over_the_next_in_whole_nanoseconds(trace: Trace) -> None:
    """Perfetto drops a span that does; of what is simulated nothing is lost by more than a nanosecond."""
    for spans in trace.tracks.values():
        assert spans == sorted(spans)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    busy = sum(end - start for spans in trace.tracks.values() for start, end in spans) / 1e9
    expected = float((trace.timeline.ends - trace.timeline.starts).sum())
    assert busy == pytest.approx(expected, abs=2e-9 * len(trace.spans))
    assert len(trace.spans) == trace.timeline.ops * trace.timeline.steps


def test_arrows_begin_in_their_send_and_end_in_their_receive(trace: Trace) -> None:
    arrows: dict[int, dict[str, dict[str, Any]]] = {}
    for event in trace.events:
        if event["ph"] in "sf":
            arrows.setdefault(event["id"], {})[event["ph"]] = event
    assert arrows
    names: dict[tuple[int, int], list[str]] = {}
    for span in trace.spans:
        names.setdefault((span["pid"], span["tid"]), []).append(span["cat"])
    for number, arrow in arrows.items():
        assert arrow.keys() == {"s", "f"}, number
        assert {event["cat"] for event in arrow.values()} == {"message"}
        for event, kinds in ((arrow["s"], {"send", "offload", "reload"}), (arrow["f"], {"recv", "offload", "reload"})):
            place, time = (event["pid"], event["tid"]), nanoseconds(event["ts"])
            held = [
                kind
                for (start, end), kind in zip(trace.tracks[place], names[place], strict=True)
                if start <= time < max(end, start + 1)
            ]
            assert len(held) == 1, event
            assert held[0] in kinds


def test_arguments_say_what_an_op_moves_and_computes(trace: Trace) -> None:
    """Bytes of a message are equal at both ends; operations are those of the routine that the op calls."""
    program = trace.timeline.program
    for number, (span, item) in enumerate(
        (span, op)
        for stage, engines in enumerate(trace.timeline.spans)
        for engine, spans in engines.items()
        for span, op in zip(
            [each for each in trace.spans if each["pid"] == stage and each["tid"] % 100 == ENGINES.index(engine)],
            [each.instruction for each in spans],
            strict=True,
        )
    ):
        args = span["args"]
        routine = None if item.routine is None else program.routines[item.routine]
        flops = 0 if routine is None else round(sum(kernel_flops(routine, step) for step in routine.steps))
        assert args.get("flops", 0) == flops, number
        assert args["micro_batch"] == item.micro_batch
        assert args["step"] in range(trace.timeline.steps)
        assert 0 not in (args.get("bytes"), args.get("flops"), args.get("ddr_bytes"), args.get("link_bytes"))
        assert args["tensors"].startswith("%") or not args.get("bytes")
    sides = {
        kind: sum(span["args"]["bytes"] for span in trace.spans if span["cat"] == kind) for kind in ("send", "recv")
    }
    assert sides["send"] == sides["recv"] > 0
    assert any(span["args"].get("flops") for span in trace.spans if span["cat"] == "compute")
    works = trace.timeline.works["link_bytes"].sum() * trace.timeline.steps
    assert sum(span["args"].get("link_bytes", 0) for span in trace.spans) == pytest.approx(works, abs=len(trace.spans))


def database(trace: Trace) -> sqlite3.Connection:
    """A database of the tables that Perfetto makes of a trace, as far as the query of the page needs them."""
    held = sqlite3.connect(":memory:")
    held.executescript(
        "CREATE TABLE process (upid, pid, name); CREATE TABLE thread (utid, tid, upid, name);"
        "CREATE TABLE thread_track (id, utid); CREATE TABLE slice (ts, dur, track_id, category, name, arg_set_id);"
    )
    arguments = [span["args"] for span in trace.spans]
    held.create_function("EXTRACT_ARG", 2, lambda number, key: arguments[number].get(key.removeprefix("args.")))
    for event in trace.events:
        if event["name"] == "process_name":
            held.execute(
                "INSERT INTO process VALUES (?, ?, ?)", (event["pid"] + 1, event["pid"], event["args"]["name"])
            )
        elif event["name"] == "thread_name":
            row = event["tid"], event["tid"], event["pid"] + 1, event["args"]["name"]
            held.execute("INSERT INTO thread VALUES (?, ?, ?, ?)", row)
            held.execute("INSERT INTO thread_track VALUES (?, ?)", (event["tid"] + 7, event["tid"]))
    for number, span in enumerate(trace.spans):
        row = nanoseconds(span["ts"]), nanoseconds(span["dur"]), span["tid"] + 7, span["cat"], span["name"], number
        held.execute("INSERT INTO slice VALUES (?, ?, ?, ?, ?, ?)", row)
    return held


def test_the_query_of_the_page_adds_up_the_steady_step(trace: Trace) -> None:
    (query,) = re.findall(r"```sql\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    rows = database(trace).execute(query).fetchall()
    steady = [span for span in trace.spans if span["args"]["step"] == trace.timeline.steps - 1]
    assert trace.timeline.steps == 3
    expected: dict[tuple[str, str], list[float]] = {}
    for span in steady:
        sums = expected.setdefault((f"stage @{span['pid']} (simulated)", span["cat"]), [0, 0.0, 0, 0])
        row = 1, nanoseconds(span["dur"]) / 1e6, span["args"].get("bytes", 0), span["args"].get("flops", 0)
        sums[:] = [a + b for a, b in zip(sums, row, strict=True)]
    found = {(stage, kind): [ops, ms, size or 0, flops or 0] for stage, kind, ops, ms, size, flops in rows}
    assert found.keys() == expected.keys()
    for key, sums in expected.items():
        assert found[key] == pytest.approx(sums)
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)

"""Pictures of tables: every forward and backward is a box, as wide and at the place that a run of unit times has."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratrain import api
from ratrain.ratrain_ir.analysis.actions import actions_of_orders
from ratrain.ratrain_ir.analysis.schedule_worth import UNIT_TIMES, PassTimes, step_spans, step_time
from ratrain.ratrain_ir.analysis.unit_run import computations
from ratrain.ratrain_ir.schedules.named import SCHEDULES
from ratrain.ratrain_ir.schedules.shape import PipelineShape
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrainc.cli import main

SHAPES = {
    "1f1b": PipelineShape(3, 5),
    "zb-h1": PipelineShape(3, 5),
    "interleaved": PipelineShape(3, 6, 2),
    "zb-v": PipelineShape(3, 5, 2, "vee"),
    "v-min": PipelineShape(4, 7, 2, "vee"),
    "seq1f1b": PipelineShape(3, 4, slices=3),
}


@pytest.mark.parametrize("kind", SHAPES)
def test_spans_are_those_of_a_run_of_unit_times(kind: str) -> None:
    shape = SHAPES[kind]
    orders = [SCHEDULES[kind].actions(shape, stage) for stage in range(shape.stages)]
    table = actions_of_orders(orders)
    expected = computations(orders, shape.chunk_stages)
    for spans, stage in zip(step_spans(table, UNIT_TIMES), expected, strict=True):
        found = {(a.kind, a.micro_batch, a.stage, a.slice or 0): (start, end) for a, start, end in spans}
        assert found == {(a.kind, a.micro_batch, a.chunk, a.slice): times for a, times in stage.items()}


@given(st.floats(0.1, 10), st.floats(0.2, 10), st.floats(0.1, 0.9))
def test_spans_of_a_rank_follow_one_another_and_end_with_the_step(forward: float, backward: float, half: float) -> None:
    shape = SHAPES["zb-v"]
    table = actions_of_orders([SCHEDULES["zb-v"].actions(shape, stage) for stage in range(shape.stages)])
    times = PassTimes(forward, backward, half * backward)
    ranks = step_spans(table, times)
    for spans in ranks:
        assert all(end <= start + 1e-9 for (_, _, end), (_, start, _) in itertools.pairwise(spans))
    assert max(end for spans in ranks for *_, end in spans) == pytest.approx(step_time(table, times).seconds)


def boxes_of(svg: str) -> tuple[int, list[str], str]:
    """The number of boxes on the lanes, their labels, and the title."""
    root = ET.fromstring(svg)
    tag = "{http://www.w3.org/2000/svg}"
    rects = [each for each in root.iter(f"{tag}rect") if each.get("stroke") == "#ffffff"]
    texts = [each.text or "" for each in root.iter(f"{tag}text")]
    return len(rects), [text for text in texts if re.fullmatch(r"\d+(\.\d+)?", text)], texts[0]


@pytest.mark.parametrize("kind", SHAPES)
def test_schedule_draws_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    shape = SHAPES[kind]
    words = ["--kind", kind, "--stages", str(shape.stages), "--micro-batches", str(shape.micro_batches)]
    words += ["--slices", str(shape.slices)] if shape.slices > 1 else []
    assert main(["schedule", *words, "-o", "s.csv", "--draw", "s.svg"]) == 0
    table = api.lint("s.csv").table
    count, labels, title = boxes_of(Path("s.svg").read_text("utf-8"))
    assert count == sum(map(len, table.rows))
    assert set(labels) == {
        f"{a.micro_batch}" if a.slice is None else f"{a.micro_batch}.{a.slice}" for a in table.actions
    }
    assert title.startswith(f"{kind}: {shape.stages} stages, {shape.micro_batches} micro-batches; a step of ")
    capsys.readouterr()
    assert main(["lint", "s.csv", "--draw", "t.svg", "--forward", "1", "--backward", "3"]) == 0
    assert "wrote t.svg" in capsys.readouterr().out
    count, _, title = boxes_of(Path("t.svg").read_text("utf-8"))
    assert count == sum(map(len, table.rows))
    assert title.startswith("s.csv: ")
    assert "bubble" in title


def test_what_cannot_be_seen_is_not_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DiagnosticError, match="draw fewer micro-batches"):
        api.schedule("1f1b", 8, 10_000).picture()
    out = tmp_path / "s.svg"
    assert main(["schedule", "--kind", "1f1b", "--stages", "8", "--micro-batches", "9000", "--draw", str(out)]) == 2
    assert "at most 20,000 can be told apart" in capsys.readouterr().err
    assert not out.exists()


def test_an_unsound_table_is_not_drawn(tmp_path: Path) -> None:
    table, out = tmp_path / "bad.csv", tmp_path / "bad.svg"
    table.write_text("0B0,0F0\n1F0,1B0\n", "utf-8")
    assert main(["lint", str(table), "--draw", str(out)]) == 1
    assert not out.exists()

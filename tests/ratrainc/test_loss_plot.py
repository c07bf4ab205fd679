"""Pictures of the losses: what is drawn lies where the numbers say."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratrain.ratrain_ir.diagnostics import DiagnosticError
from ratrain.ratrainc import pictures
from ratrain.ratrainc.cli import main
from ratrain.ratrainc.loss_plot import Curves, chart_lines, write_losses

SVG = "{http://www.w3.org/2000/svg}"
LOSSES = st.lists(st.floats(0, 1e6) | st.just(math.nan), max_size=200)


def curves_of(losses: list[float]) -> Curves:
    return Curves.of((step, loss, loss / 2 if step % 3 == 0 else None) for step, loss in enumerate(losses))


def test_a_falling_loss_falls():
    lines = chart_lines(curves_of([10.0 - 0.1 * step for step in range(64)]))
    assert lines[0].startswith(" 10.0000 ┤█")
    assert lines[7].startswith("  3.7000 ┤████")
    assert all(len(above) <= len(below) for above, below in pairwise(lines[:8]))
    assert lines[8].strip() == "└ steps 0 to 63"


@given(LOSSES)
def test_any_losses_give_a_chart(losses):
    lines = chart_lines(curves_of(losses))
    finite = sum(map(math.isfinite, losses))
    assert len(lines) == (9 if finite > 1 else 0)
    if lines:
        assert any("█" in line or "▁" in line for line in lines[7:8])


@given(LOSSES)
def test_any_losses_give_a_picture(losses):
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "loss.svg"
        write_losses(str(path), curves_of(losses), "<a & b>")
        root = ET.parse(path).getroot()
    assert root.find(f"{SVG}text").text == "<a & b>"
    finite = [(step, loss) for step, loss in enumerate(losses) if math.isfinite(loss)]
    lines = [line.get("points").split() for line in root.findall(f"{SVG}polyline")]
    assert len(lines[0]) == len(finite)
    points = [tuple(map(float, place.split(","))) for line in lines for place in line]
    assert all(64 <= x <= 704 and 48 <= y <= 372 for x, y in points)
    heights = [y for _, y in points[: len(finite)]]
    for (_, one), (_, other), y, next_y in zip(finite, finite[1:], heights, heights[1:], strict=False):
        assert (next_y <= y + 0.1) if other > one else (next_y >= y - 0.1)


def test_a_place_that_cannot_be_written(tmp_path):
    with pytest.raises(DiagnosticError, match="RT002"):
        write_losses(str(tmp_path / "no" / "loss.svg"), curves_of([1.0, 2.0]), "t")


PROGRAM = ("run", "missing.rtx", "--plot")
SEARCH = ("scale", "--model", "missing", "--clusters", "2", "--plot")


@pytest.mark.parametrize("words", [PROGRAM, SEARCH], ids=["run", "scale"])
@pytest.mark.parametrize("name", ["x.pdf", "x", "x.svg.gz", ".png", "x.sv"])
def test_endings_that_are_no_picture_are_refused_before_the_work(words, name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*words, name]) == 1
    shown = capsys.readouterr().err
    assert f"a plot is written as .png or .svg, not '{name}'" in shown
    assert "missing" not in shown
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [PROGRAM, SEARCH], ids=["run", "scale"])
@pytest.mark.parametrize("name", ["x.png", "X.PNG", "x.svg"])
def test_without_matplotlib_only_what_needs_none_is_drawn(words, name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pictures, "find_spec", lambda _: None)
    assert main([*words, name]) == 1
    shown = capsys.readouterr().err
    own = words is PROGRAM and name.endswith("svg")
    assert ("needs matplotlib" in shown) is not own
    assert ("missing" in shown) is own
    assert ("ends in .svg" in shown) is (words is PROGRAM and not own)


@pytest.mark.parametrize("ending", sorted(pictures.PICTURES))
def test_a_picture_is_what_its_ending_says(ending, tmp_path):
    if ending != ".svg":
        pytest.importorskip("matplotlib")
    path = tmp_path / f"loss{ending}"
    write_losses(str(path), curves_of([3.0, 2.0, 1.0]), "$a <b>")
    assert path.read_bytes().startswith({".svg": b"<svg", ".png": b"\x89PNG\r\n"}[ending])


def test_every_plot_option_takes_the_same_endings(capsys):
    for name in ("run", "scale"):
        assert main([name, "--help"]) == 0
        shown = capsys.readouterr().out
        assert all(ending in shown for ending in pictures.PICTURES)

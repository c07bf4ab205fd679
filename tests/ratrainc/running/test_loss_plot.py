"""Pictures of the losses: what is drawn lies where the numbers say."""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain import api
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrainc.cli import main
from ratrain.ratrainc.console import extras, pictures
from ratrain.ratrainc.running.loss_plot import Curves, chart_lines, write_losses

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


def drawn(root: ET.Element, name: str) -> list[tuple[float, float]]:
    """The points of a line, from the left; heights grow downwards."""
    path = root.find(f".//{SVG}g[@id='{name}']/{SVG}path")
    numbers = [float(word) for word in path.get("d").split() if word not in "ML"]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


@settings(max_examples=15)  # each takes a tenth of a second
@given(st.lists(st.floats(0, 1e6) | st.just(math.nan), max_size=100))  # a line of 128 points and more is simplified
@pytest.mark.full
def test_any_losses_give_a_picture(losses):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "loss.svg"
        write_losses(str(path), curves_of(losses), "<a & b>")
        root = ET.parse(path).getroot()
    assert "<a & b>" in [text.text for text in root.iter(f"{SVG}text")]
    curves = curves_of(losses)
    for name, values in (("training", curves.training), ("held-out", curves.held_out)):
        if not values:
            continue
        points = drawn(root, name)
        assert len(points) == len(values)
        assert all(one < other for (one, _), (other, _) in pairwise(points))
        for (one, other), (y, next_y) in zip(pairwise(values), pairwise(points), strict=True):
            assert (next_y[1] <= y[1]) if other[1] > one[1] else (next_y[1] >= y[1])


@pytest.mark.parametrize("title", ["$a", "\\frac{", "a\x01b\nc", "\u6f22\u5b57", "\ud800"])
@pytest.mark.parametrize("ending", sorted(pictures.PICTURES))
def test_any_title_can_be_written(title, ending, tmp_path):
    path = tmp_path / f"loss{ending}"
    write_losses(str(path), curves_of([3.0, 2.0, 1.0]), title)
    if ending == ".svg":
        ET.parse(path)


@pytest.mark.parametrize("ending", sorted(pictures.PICTURES))
@pytest.mark.sampled(2)
def test_the_same_losses_give_the_same_bytes(ending, tmp_path):
    program = (
        "import sys; from ratrain.ratrainc.running.loss_plot import Curves, write_losses;"
        "write_losses(sys.argv[1], Curves.of([(0, 3.0, None), (1, 2.0, 2.5)]), 'a title')"
    )
    paths = [tmp_path / f"{number}{ending}" for number in range(2)]
    for path in paths:
        subprocess.run([sys.executable, "-c", program, path], check=True)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert b"<dc:date>" not in paths[0].read_bytes()


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


DRAWING = [
    ("schedule", "--kind", "gpipe", "--stages", "2", "--micro-batches", "4", "--draw"),
    ("lint", "missing.csv", "--draw"),
]


@pytest.mark.parametrize("words", DRAWING, ids=["schedule", "lint"])
@pytest.mark.parametrize("name", ["x.png", "x.pdf", "x", "x.svg.gz"])
def test_what_is_drawn_as_svg_alone_is_refused_under_other_endings(words, name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "missing.csv").write_text("0F0,0B0\n")
    assert main([*words, name]) == 1
    assert f"a picture is written as .svg, not '{name}'" in capsys.readouterr().err
    assert not (tmp_path / name).exists()
    with pytest.raises(DiagnosticError, match="RT002"):
        api.schedule("gpipe", 2, 4).picture().save(str(tmp_path / name))


@pytest.mark.parametrize("words", [PROGRAM, SEARCH], ids=["run", "scale"])
@pytest.mark.parametrize("name", ["x.png", "X.PNG", "x.svg"])
def test_without_matplotlib_a_plot_is_refused_before_the_work(words, name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(extras, "find_spec", lambda _: None)
    assert main([*words, name]) == 1
    shown = capsys.readouterr().err
    assert f"drawing '{name}' needs matplotlib" in shown
    assert "pip install 'ratrain[plot]'" in shown
    assert "missing" not in shown
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("has_matplotlib", [True, False])
@pytest.mark.sampled(2)
def test_the_quickstart_draws_only_where_it_can(has_matplotlib, tmp_path, monkeypatch):
    if not has_matplotlib:
        monkeypatch.setattr(extras, "find_spec", lambda _: None)
        monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["quickstart", "--steps", "2", "--keep", str(tmp_path / "kept")]) == 0
    kept = {path.name for path in (tmp_path / "kept").iterdir()}
    assert kept == {"tiny.rtir", "tiny.rtx", "losses.jsonl", *(["loss.svg"] if has_matplotlib else [])}


@pytest.mark.full
def test_a_quickstart_that_keeps_nothing_imports_no_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["quickstart", "--steps", "2"]) == 0


@pytest.mark.parametrize("ending", sorted(pictures.PICTURES))
def test_a_picture_is_what_its_ending_says(ending, tmp_path):
    path = tmp_path / f"loss{ending}"
    write_losses(str(path), curves_of([3.0, 2.0, 1.0]), "a title")
    assert path.read_bytes().startswith({".svg": b"<?xml", ".png": b"\x89PNG\r\n"}[ending])


def test_every_plot_option_takes_the_same_endings(capsys):
    for name in ("run", "scale"):
        assert main([name, "--help"]) == 0
        shown = capsys.readouterr().out
        assert all(ending in shown for ending in pictures.PICTURES)

"""Pictures of the losses: what is drawn lies where the numbers say."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratrain_ir.diagnostics import DiagnosticError
from ratrainc.loss_plot import Curves, chart_lines, write_svg

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
        write_svg(str(path), curves_of(losses), "<a & b>")
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
        write_svg(str(tmp_path / "no" / "loss.svg"), curves_of([1.0, 2.0]), "t")

"""Every kind of tensor has a colour of its own on the page and in the picture of addresses; grey is nobody's."""

from __future__ import annotations

import json
import re
from itertools import combinations
from typing import TYPE_CHECKING

import pytest

from ratrain import api
from ratrain.ratrain_ir.config.types import Home, StateKind
from ratrain.ratrainc.choices.strategies import strategy
from ratrain.ratrainc.report.colours import KIND_COLOURS, kind_styles
from ratrain.ratrainc.report.report_page import page_file, write_report
from ratrain.ratrainc.running.examples import example_path
from ratrain.targets.machine.machine import load_machine
from tests.end_to_end.test_peer_offload import DEEP
from tests.end_to_end.tiny_runs import MODEL, make_plan
from tests.published import LONGROPE, NAMES, tiny
from tests.ratrainc.report.report_page import Page

if TYPE_CHECKING:
    from pathlib import Path

    from ratrain.ratrain_ir.module import Module

JOINT = strategy("ratrain").passes
LENT = "place-1f1b,recompute{policy=none store=peer},allocate-ddr"
MADE = {
    "the first example": lambda: api.compile(str(example_path("tiny.json")), str(example_path("tiny.toml"))),
    "view groups": lambda: api.compile(MODEL, make_plan(zero=3, dp=4, view_group=2), passes=JOINT),
    "tensor ranks": lambda: api.compile(MODEL, make_plan(tp=2, dp=1), passes=JOINT),
    "kept by a donor": lambda: api.compile(DEEP, make_plan(DEEP, pp=3, dp=1, micro_batches=5), passes=LENT),
}

OTHER = "#8b939e"
"""Grey, which no kind has."""
APART = 20.0
"""Least distance of two colours in CIELAB; 2.3 is the least that is seen side by side."""


def lightness_and_hue(colour: str) -> tuple[float, float, float]:
    """A colour in CIELAB under D65 (IEC 61966-2-1 for sRGB), in which equal distances look about equally different."""
    shares = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in shares)
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.95047
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.08883
    a, b, c = (t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116 for t in (x, y, z))
    return 116 * b - 16, 500 * (a - b), 200 * (b - c)


def distance(one: str, other: str) -> float:
    pairs = zip(lightness_and_hue(one), lightness_and_hue(other), strict=True)
    return float(sum((a - b) ** 2 for a, b in pairs) ** 0.5)


def test_every_kind_of_tensor_has_a_colour_that_is_not_grey_nor_that_of_another() -> None:
    assert set(KIND_COLOURS) == set(StateKind)
    for one, other in combinations([*KIND_COLOURS.values(), OTHER], 2):
        assert distance(one, other) >= APART, (one, other)
    light, dark = re.findall(r"--page: (#\w+);", page_file("report.css"))
    assert f"--grey: {OTHER};" in page_file("report.css")
    for colour in KIND_COLOURS.values():
        assert min(distance(colour, page) for page in (light, dark)) > APART


def test_the_distance_of_colours_is_that_of_the_standard() -> None:
    assert distance("#ffffff", "#000000") == pytest.approx(100, abs=0.1)
    assert lightness_and_hue("#ff0000") == pytest.approx((53.24, 80.09, 67.20), abs=0.1)


def page_of(module: Module, folder: Path) -> tuple[Page, str]:
    machine = load_machine(None)
    simulation = api.simulate(api.emit(module, machine=machine), machine=machine)
    path = folder / "report.html"
    write_report(simulation.timeline, simulation.figures, machine, str(path))
    text = path.read_text("utf-8")
    return Page(text), text


def check_colours(module: Module, folder: Path) -> set[StateKind]:
    """Check that what the tensors of a module are is what legends name, each in its colour; return those kinds."""
    held = {tensor.kind for stage in module.stages for tensor in stage.tensors.values()}
    page, text = page_of(module, folder)
    assert set(page.facts["held"]) == {kind.value for kind in held}
    for kind in held:
        assert f"--kind-{kind.value}: {KIND_COLOURS[kind]};" in text
    for index, stage in enumerate(module.stages):
        svg = api.address_map(module, index).svg
        placed = {tensor.kind for tensor in stage.tensors.values() if tensor.home is Home.DDR}
        drawn = re.findall(r'fill="(#\w+)" stroke="#ffffff" stroke-width="0.3"><title>%[^,]+, (\w+),', svg)
        assert {(colour, kind) for colour, kind in drawn} <= {(KIND_COLOURS[kind], kind.value) for kind in placed}
        legend = re.findall(r'width="11" height="11" fill="(#\w+)"/>\n<text [^>]*>(\w+)</text>', svg)
        assert {kind for _, kind in legend} == {kind for _, kind in drawn}
        assert all(KIND_COLOURS[StateKind(kind)] == colour for colour, kind in legend)
        assert max(float(x) for x in re.findall(r'<text x="(\d+)"', svg)) < 1100
    return held


@pytest.mark.parametrize("name", MADE)
def test_no_tensor_of_a_plan_is_drawn_as_the_rest(name: str, tmp_path: Path) -> None:
    held = check_colours(MADE[name](), tmp_path)
    expected = {"view groups": StateKind.VIEW_SHARD, "tensor ranks": StateKind.PARTIAL}
    expected["kept by a donor"] = StateKind.REMOTE
    assert {StateKind.MASTER, StateKind.MOMENT, expected.get(name, StateKind.VIEW)} <= held


@pytest.mark.parametrize("name", [name for name in NAMES if name != LONGROPE])
@pytest.mark.sampled(4)
def test_no_tensor_of_a_published_model_is_drawn_as_the_rest(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny(name, {})), "utf-8")
    check_colours(api.compile(str(tmp_path / "config.json"), make_plan(), passes=JOINT), tmp_path)


def test_the_page_draws_kinds_in_these_colours_alone() -> None:
    assert kind_styles().count("--kind-") == len(StateKind)
    drawing = page_file("drawing.js")
    assert "const kindColour = (kind) => `kind-${kind}`;" in drawing
    assert not re.search(r"\bmaster:|\bmoment:", drawing), "a second table of colours"

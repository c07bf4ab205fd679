"""The planner on machines whose links differ: which mappings it considers, which it takes, and what it says of them."""

from __future__ import annotations

import json
import math
from itertools import product
from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from ratrain.ratrain_ir.config.rank_mapping import RankMapping, Tile
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.text.plan_file import parse_plan
from ratrain.ratrainc.choices.machine_changes import parse_changes, with_constants
from ratrain.ratrainc.choices.strategies import strategy
from ratrain.ratrainc.cli import main
from ratrain.ratrainc.planner.answer.crossings import crossings
from ratrain.ratrainc.planner.answer.plan_files import plan_file
from ratrain.ratrainc.planner.bounds.cuts import cuts_of, partitions
from ratrain.ratrainc.planner.search.plan_evaluation import Task, evaluate
from ratrain.ratrainc.planner.search.plan_request import PlanRequest
from ratrain.ratrainc.planner.search.plan_search import Search
from ratrain.ratrainc.planner.space.space import Shape, shapes
from ratrain.ratrainc.planner.space.tilings import tilings
from ratrain.targets.machine.link_groups import Link, LinkGroup
from ratrain.targets.machine.machine import Machine, load_machine
from ratrain.targets.machine.placement import overfull
from tests.ratrainc.planner.small_requests import MODEL, SLOW
from tests.targets.machine.test_links import NODES, group, machine

LINKS = (
    LinkGroup("chip", 2, Link(4.0, 0.0)),
    LinkGroup("node", 4, Link(2.0, 0.0)),
    LinkGroup("system", None, Link(1.0, 0.0)),
)


def every_tiling(pp: int, dp: int, clusters: int) -> set[tuple[Tile, ...]]:
    """All tiles of chip and node that make up the plan and fit the groups there are, but for parts of larger ones."""
    sizes = list(product(range(1, pp + 1), range(1, dp + 1)))

    def fits(tiles: tuple[Tile, ...]) -> bool:
        if RankMapping(tiles).error(pp, dp) or overfull(LINKS, tiles):
            return False
        there = [max(1, clusters // (g.clusters or 1)) for g in LINKS]
        return all(pp * dp // tile.clusters <= count for tile, count in zip(tiles, there, strict=False))

    def largest(name: str, inner: tuple[Tile, ...]) -> list[tuple[Tile, ...]]:
        fitting = [(s, r) for s, r in sizes if fits((*inner, Tile(name, s, r)))]
        return [
            (*inner, Tile(name, s, r))
            for s, r in fitting
            if not any((a, b) != (s, r) and a % s == 0 and b % r == 0 for a, b in fitting)
        ]

    return {both for tiles in largest("chip", ()) for both in largest("node", tiles)}


@given(st.integers(1, 6), st.integers(1, 8), st.integers(0, 9))
def test_tilings_are_all_largest_tiles_that_fit(pp: int, dp: int, idle: int) -> None:
    """Chips are filled first; where no tiles fit the groups there are, there is no mapping."""
    found = tilings(pp, dp, pp * dp + idle, LINKS)
    assert len(found) == len(set(found))
    assert {*found} == (every_tiling(pp, dp, pp * dp + idle) or {()})


@given(st.integers(1, 4), st.integers(1, 6), st.sampled_from([2, 3, 4, 8]), st.integers(0, 9))
def test_tensor_peers_sit_together_first(pp: int, dp: int, tp: int, idle: int) -> None:
    """As many of them as fit a group; what is left of it has the largest tiles of stages and replicas."""
    clusters = pp * dp * tp + idle
    for tiles in tilings(pp, dp, clusters, LINKS, tp):
        if not tiles:
            continue
        assert RankMapping(tiles).error(pp, dp, tp) is None
        assert overfull(LINKS, tiles) is None
        assert tiles[0].peers == max(peers for peers in (1, 2) if tp % peers == 0)
        there = [max(1, clusters // (each.clusters or 1)) for each in LINKS]
        assert all(pp * dp * tp <= tile.clusters * count for tile, count in zip(tiles, there, strict=False))
        for peers in (2, 4):
            if tp % peers == 0 and tiles[0].peers in (1, peers // 2, peers):
                assert tiles[1].peers >= min(peers, tp)
    assert tilings(pp, dp, clusters, LINKS, 1) == tilings(pp, dp, clusters, LINKS)


@pytest.mark.full
def test_the_mapping_of_tensor_peers_is_that_of_brute_force() -> None:
    asked = evolve(request(slow_machine(), clusters=4, batch=2), peers=(2,))
    answer = Search(asked).run()
    tasks = [
        Task(MODEL, shape.plan(asked.setting, cuts_of(layers)), asked.strategy.passes, asked.machine)
        for shape in asked.shapes()
        for layers in partitions(MODEL.layers, shape.pp)
    ]
    times = {str(task.plan): evaluate(task).step_seconds for task in tasks}
    assert answer.best is not None
    assert answer.best.seconds == min(seconds for seconds in times.values() if seconds is not None)
    assert answer.best.plan.mapping is not None
    assert answer.best.plan.mapping.tiles[0].peers == 2
    apart = evolve(answer.best.plan, mapping=None)
    far = evaluate(Task(MODEL, apart, asked.strategy.passes, asked.machine)).step_seconds
    assert far is not None
    assert answer.best.seconds <= far
    found = crossings(answer.best.plan, MODEL, asked.machine)
    near = {c.group for c in found if "tensor-parallel ranks" in c.what}
    assert near == {"chip"}


def test_uniform_links_are_one_mapping() -> None:
    uniform = load_machine(None)
    assert tilings(4, 8, 32, uniform.link_groups) == [()]
    assert shapes(MODEL, 6, 12) == shapes(MODEL, 6, 12, groups=uniform.link_groups)
    assert {shape.tiles for shape in shapes(MODEL, 6, 12)} == {()}


SLOW_LINKS = {"fp16_peak": SLOW["fp16_peak"], "ddr_bandwidth": SLOW["ddr_bandwidth"], "collective_chunk": 4096.0}


def slow_machine(*, uplink: float | None = None) -> Machine:
    """Links that a toy model feels: the next chip is ten times as far."""
    groups = (group("chip", 2, 1e8, 1e-6, uplink), group("node", 4, 2e7, 1e-5), group("system", None, 1e7, 1e-5))
    return with_constants(machine(*groups), {**SLOW_LINKS, "ddr_capacity": 8e6})


def request(on: Machine, *, clusters: int = 4, batch: int = 4) -> PlanRequest:
    return PlanRequest(MODEL, on, clusters, batch, 32, strategy("baseline-1f1b"), seconds=math.inf, exhaustive=True)


@pytest.mark.parametrize("uplink", [None, 4e7])
def test_the_mapping_is_that_of_brute_force(uplink: float | None) -> None:
    asked = evolve(request(slow_machine(uplink=uplink), batch=2), peers=(1,))
    answer = Search(asked).run()
    times: dict[str, float] = {}
    for plain in shapes(asked.model, asked.clusters, asked.global_batch, asked.modes):
        for tiles in every_tiling(plain.pp, plain.dp, asked.clusters) or {()}:
            for layers in partitions(MODEL.layers, plain.pp):
                plan = evolve(plain, tiles=tiles).plan(asked.setting, cuts_of(layers))
                seconds = evaluate(Task(MODEL, plan, asked.strategy.passes, asked.machine)).step_seconds
                if seconds is not None:
                    times[str(plan)] = seconds
    assert answer.best is not None
    assert answer.best.seconds == min(times.values())
    assert times[str(answer.best.plan)] == min(times.values())
    assert answer.proven


def test_the_plan_file_says_what_is_near_and_why() -> None:
    asked = request(slow_machine(), batch=4)
    shape = Shape(2, 2, 1, 2, 1, "last", tilings(2, 2, 4, asked.machine.link_groups)[0])
    answer = Search(asked).run()
    mapped = [
        c
        for c in answer.candidates
        if c.plan.mapping is not None and evolve(c.shape, tiles=()) == evolve(shape, tiles=())
    ]
    assert mapped
    text = plan_file(answer, mapped[0], "small.json")
    plan = parse_plan(text, file="P.toml", model=MODEL)
    assert plan == evolve(mapped[0].plan, schedule=plan.schedule)
    assert "# Mapped to the groups of test:" in text
    assert any(line.startswith("mapping = ") and "--rank-order mapping" in line for line in text.splitlines())
    found = crossings(plan, MODEL, asked.machine)
    assert [c.what for c in found if c.what.startswith("messages")] == ["messages @0-@1"]
    near = plan.mapping is not None and plan.mapping.tiles[0].stages == 2
    assert found[0].group == ("chip" if near else "node")
    assert {c.what.split()[0] for c in found[1:]} == {"reduce_scatter", "all_gather"}
    assert all(c.group == ("node" if near else "chip") for c in found[1:])
    for crossing in found:
        assert str(crossing) in text


def test_a_machine_has_no_more_clusters_than_its_file_says() -> None:
    small = machine(group("chip", 4, 1e9, 0), group("board", 8, 1e9, 0))
    with pytest.raises(DiagnosticError, match="the machine has 8 clusters, 9 are asked for"):
        Search(request(small, clusters=9)).run()


def test_changes_name_a_constant_of_a_group() -> None:
    nodes = load_machine(NODES)
    changed = with_constants(nodes, parse_changes("node.bandwidth=14GB/s,node.uplink=1GB/s", nodes))
    assert changed.link_groups[1].link.bandwidth == 14e9
    assert changed.link_groups[1].uplink == 1e9


def test_changes_may_name_constants_that_the_file_leaves_out() -> None:
    given = load_machine(None)
    for text in ("message_cost=10us", "round_skew=1us", "rank_jitter=0.01", "chip_uplink=3.7GB/s"):
        (constant,) = parse_changes(text, given)
        assert constant not in given.constants
        changed = with_constants(given, parse_changes(text, given))
        assert changed.constants[constant].certainty == "assumed"
        assert evaluated(changed) > evaluated(given), text
    nodes = load_machine(NODES)
    assert with_constants(nodes, parse_changes("chip.uplink=4GB/s", nodes)).link_groups[0].uplink == 4e9


def evaluated(on: Machine) -> float:
    """Seconds of a step of a toy plan with eight replicas, which meet at links."""
    small = with_constants(on, {"collective_chunk": 4096.0})
    shape = Shape(1, 8, 1, 2, 3, "each-micro-batch")
    setting = request(small, clusters=8, batch=16).setting
    found = evaluate(Task(MODEL, shape.plan(setting, ()), strategy("ratrain").passes, small)).step_seconds
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("change", "on", "reason"),
    [
        ("chip_uplink=3.7GB/s,clusters_per_chip=1", None, "no clusters share a chip"),
        ("chip_uplink=3.7GB/s", NODES, r"they say what \[chip_uplink\] would"),
        ("system.uplink=3.7GB/s", NODES, "nothing leaves the outermost"),
        ("rank_jitter=2", None, "is a fraction"),
        ("engine_gap=1us", None, "not a constant of a machine"),
        ("node.uplink=1GB/s", None, "not a constant of a machine"),
    ],
)
def test_changes_that_would_change_nothing_are_refused(change: str, on: str | None, reason: str) -> None:
    with pytest.raises(DiagnosticError, match=reason) as caught:
        parse_changes(change, load_machine(on))
    (found,) = caught.value.diagnostics
    assert found.code == "RT065"


def test_plan_prints_the_mapping_and_what_it_crosses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Path(__file__).resolve().parents[3] / "examples" / "tiny.json"
    words = ["plan", "--model", str(model), "--clusters", "8", "--global-batch", "8", "--seq-len", "64", "--jobs", "1"]
    words += [
        "--machine",
        NODES,
        "--seconds",
        "1",
        "--strategy",
        "baseline-1f1b",
        "-o",
        str(tmp_path / "P.toml"),
        "--json",
    ]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["plans"][0]["mapping"].startswith("chip ")
    assert {crossing["group"] for crossing in found["crossings"]} <= {"chip", "node", "system"}
    assert found["crossings"]
    compiling = ["compile", "--model", str(model), "--plan", str(tmp_path / "P.toml")]
    assert main(compiling) == 0, "the plan names its machine"
    assert main([*compiling, "--machine", "mt3000"]) == 1, "the mt3000 has no nodes"

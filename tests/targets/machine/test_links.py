"""Groups of clusters with links of their own, and the mapping of stages and replicas to them."""

from __future__ import annotations

from itertools import pairwise, product
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from ratrain import api
from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrain_ir.config.plan_text import check_plan, plan_to_toml
from ratrain.ratrain_ir.config.rank_mapping import RankMapping, Tile
from ratrain.ratrain_ir.ops.base import Engine
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.text.parser import parse_module
from ratrain.ratrain_ir.text.plan_file import parse_plan
from ratrain.ratrain_ir.text.printer import print_module
from ratrain.ratrain_ir.topology import grid
from ratrain.ratrainc.choices.strategies import strategy
from ratrain.targets.machine.collective_cost import all_gathers, all_reduces, reduce_scatters
from ratrain.targets.machine.link_groups import Link, LinkGroup, are_uniform
from ratrain.targets.machine.machine import Machine, load_machine, parse_machine
from ratrain.targets.machine.placement import Placement, placement_of
from ratrain.targets.machine.timing import op_work
from ratrain.targets.machine.writer import machine_lines
from ratrain.targets.simulator.figures import simulated
from ratrain.targets.simulator.op_works import timed_instruction
from tests.end_to_end.tiny_runs import MODEL, make_plan

if TYPE_CHECKING:
    from ratrain.targets.program.program import Program
    from ratrain.targets.simulator.timeline import Timeline

NODES = str(Path(__file__).resolve().parents[3] / "examples" / "mt3000-nodes.toml")
UNIFORM = load_machine(None)


def group(name: str, clusters: int | None, bandwidth: float, latency: float, uplink: float | None = None) -> str:
    """A [[link_group]] of a machine file."""
    values = {"clusters": clusters, "bandwidth": bandwidth, "latency": latency, "uplink": uplink}
    units = {"clusters": "clusters", "bandwidth": "bytes/s", "latency": "s", "uplink": "bytes/s"}
    tables = [
        f'[link_group.{key}]\nvalue = {value!r}\nunit = "{units[key]}"\ncertainty = "assumed"\nsource = "a test"\n'
        for key, value in values.items()
        if value is not None
    ]
    return f'[[link_group]]\nname = "{name}"\n' + "".join(tables)


def machine(*groups: str) -> Machine:
    return parse_machine("\n".join(['base = "mt3000"', 'name = "test"', *groups]), file="m.toml")


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """Tiles of two or three levels, full groups, and links of any kind."""
    factors = draw(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=2, max_size=3))
    tiles: list[Tile] = []
    stages = replicas = 1
    for level, (more_stages, more_replicas) in enumerate(factors):
        stages, replicas = stages * more_stages, replicas * more_replicas
        tiles.append(Tile(f"g{level}", stages, replicas))
    links = [Link(draw(st.sampled_from([1e9, 4e9])), draw(st.sampled_from([0.0, 1e-5]))) for _ in tiles]
    inner = [LinkGroup(t.group, t.clusters, link) for t, link in zip(tiles[:-1], links, strict=False)]
    return Placement((*inner, LinkGroup("all", None, links[-1])), grid(stages, replicas), tuple(tiles[:-1]))


def mapping_of(placement: Placement) -> RankMapping:
    assert placement.tiles is not None
    return RankMapping(placement.tiles)


def innermost(placement: Placement, one: int, other: int) -> int:
    """The innermost level whose groups hold two positions, when every group is full."""
    sizes = [tile.clusters for tile in placement.tiles or ()]
    return next((level for level, size in enumerate(sizes) if one // size == other // size), len(sizes))


@given(placements())
def test_a_mapping_is_an_order_of_all_ranks(placement: Placement) -> None:
    """Every rank has one position, positions have ranks, and messages cross what lies between positions."""
    mapping, pp, dp = mapping_of(placement), placement.mesh.stages, placement.mesh.replicas
    whole = Tile("plan", pp, dp)
    position = {(s, r): mapping.position(s, r, 0, whole) for s, r in product(range(pp), range(dp))}
    assert sorted(position.values()) == list(range(pp * dp))
    assert all(mapping.place(at, whole) == (*rank, 0) for rank, at in position.items())
    assert RankMapping.parse(str(mapping)) == mapping
    for stage, other in pairwise(range(pp)):
        levels = {innermost(placement, position[stage, r], position[other, r]) for r in range(dp)}
        assert levels == {placement.level_between(stage, other)}


@given(st.lists(st.tuples(*[st.integers(1, 3)] * 3), min_size=2, max_size=3))
def test_a_mapping_with_tensor_peers_is_an_order_of_all_ranks(factors: list[tuple[int, int, int]]) -> None:
    """Every rank has one position, and whoever shares a group of a level has its tile."""
    tiles = [Tile("", 1, 1)]
    for level, (stages, replicas, peers) in enumerate(factors):
        below = tiles[-1]
        tiles.append(Tile(f"g{level}", below.stages * stages, below.replicas * replicas, below.peers * peers))
    *inner, whole = tiles[1:]
    mapping = RankMapping(tuple(inner))
    ranks = list(product(range(whole.stages), range(whole.replicas), range(whole.peers)))
    position = {rank: mapping.position(*rank, whole) for rank in ranks}
    assert sorted(position.values()) == list(range(whole.clusters))
    assert all(mapping.place(at, whole) == rank for rank, at in position.items())
    assert RankMapping.parse(str(mapping)) == mapping
    for tile in inner:
        for (s, r, p), at in position.items():
            first = s // tile.stages * tile.stages, r // tile.replicas * tile.replicas, p // tile.peers * tile.peers
            assert at // tile.clusters == position[first] // tile.clusters


def crossings(placement: Placement, stage: int) -> list[float]:
    """Bytes that the members of a stage's ring, group by group and level by level, send over each level's links: of one byte each."""
    mapping, pp, dp = mapping_of(placement), placement.mesh.stages, placement.mesh.replicas
    at = [mapping.position(stage, r, 0, Tile("plan", pp, dp)) for r in range(dp)]
    found = [0.0] * len(placement.groups)
    for level in range(len(placement.groups)):
        below = 1 if level == 0 else (placement.tiles or ())[level - 1].clusters
        for mine in at:
            partners = [
                other
                for other in at
                if other != mine
                and innermost(placement, mine, other) == level
                # one member of each other group of the level below: who has the same place in its own
                and other % below == mine % below
            ]
            found[level] += len(partners)
    return found


@given(placements(), st.integers(1, 10**6))
def test_the_hierarchy_sends_what_a_count_of_messages_says(placement: Placement, elements: int) -> None:
    """Each member of a group exchanges its part with its peers of the same level, and with nobody else."""
    members, dp = placement.members("replicas"), placement.mesh.replicas
    within = (1, *members.within)
    messages = crossings(placement, placement.mesh.stages - 1)
    on = evolve(UNIFORM, collectives=("pairwise", "hierarchical"))
    scatters, gathers = reduce_scatters(elements, 2, members, on), all_gathers(2 * elements, members, on)
    for ways, width in ((scatters, 4), (gathers, 2)):
        chosen = [way for way in ways if way.name.startswith("hierarchical")]
        assert bool(chosen) == (len(members.steps()) > 1)
        for way in chosen:
            for level, meeting in members.steps():
                first = level == members.steps()[0][0]
                part = elements * (2 if first else width) / within[level] / meeting
                assert way.bytes_at(level) * dp == pytest.approx(messages[level] * part)
    (both,) = all_reduces(elements, 2, members, on)
    down, up = (min(ways, key=lambda way: way.seconds(on)) for ways in (scatters, gathers))
    assert both.rounds == (*down.rounds, *up.rounds)


@given(st.integers(1, 4), st.integers(1, 12), st.sampled_from([1e8, 3.7e9]), st.sampled_from([0.0, 1e-5]))
def test_one_group_is_the_uniform_machine(pp: int, dp: int, bandwidth: float, latency: float) -> None:
    """Whether a file says link_bandwidth or one [[link_group]] makes no difference."""
    named = machine(group("system", None, bandwidth, latency))
    constants = {k: v for k, v in UNIFORM.constants.items() if k != "clusters_per_chip"}
    constants["link_bandwidth"] = evolve(constants["link_bandwidth"], value=bandwidth)
    constants["link_latency"] = evolve(constants["link_latency"], value=latency)
    plain = evolve(UNIFORM, constants=constants)
    assert named.link_groups == plain.link_groups == (LinkGroup("system", None, Link(bandwidth, latency)),)
    assert are_uniform(named.link_groups)
    plan = Plan(pp, dp, tuple(range(1, pp)), 1, 1, 8)
    placed = placement_of(plan, named)
    assert {placed.level_between(0, stage) for stage in range(pp)} == {0}
    assert placed.members("replicas").steps() == ([(0, dp)] if dp > 1 else [])
    assert [level.bandwidth for level in placed.link_levels()] == [bandwidth]


def program_of(plan: Plan, on: Machine) -> Program:
    return api.emit(api.compile(MODEL, plan, machine=on, passes=strategy("ratrain").passes), machine=on)


def link_bytes(found: Timeline) -> float:
    return float(found.works["link_bytes"].sum())


def timed(mapping: str | None, on: Machine, **keys: int) -> tuple[float, Timeline]:
    """Step seconds and timeline of a plan whose program is compiled once, for uniform links, so that only times differ."""
    plan = make_plan(**{"pp": 2, "dp": 4, **keys})
    program = program_of(plan, UNIFORM)
    mapped = evolve(program, plan=evolve(plan, mapping=RankMapping.parse(mapping) if mapping else None))
    figures, timeline = simulated(mapped, on)
    return figures.step_seconds, timeline


CHIPS = machine(group("chip", 4, 1e6, 0.0), group("system", None, 1e5, 0.0))
"""Links so slow that a step of a toy model is all messages."""


def test_a_mapping_changes_who_is_near_and_moves_the_same_messages() -> None:
    """Which links messages take, and so how long a step is; the bytes of messages are the same."""
    rows = {text: timed(text, CHIPS)[1] for text in ("chip 1x4", "chip 2x2", "chip 1x1", None)}
    sends = {
        text: sorted(
            (item.peer, flow.nbytes, flow.link)
            for stage, held in enumerate(found.program.stages)
            for item in held.streams[Engine.SEND]
            for flow in op_work(
                timed_instruction(found.program, stage, Engine.SEND, item), found.program.plan, CHIPS
            ).flows
        )
        for text, found in rows.items()
    }
    assert [[(peer, size) for peer, size, _ in each] for each in sends.values()].count(
        [(peer, size) for peer, size, _ in sends[None]]
    ) == len(sends)
    assert {text: {level for _, _, level in each} for text, each in sends.items()} == {
        "chip 1x4": {1},
        "chip 2x2": {0},
        "chip 1x1": {1},
        None: {1},
    }
    assert rows["chip 1x4"].step_seconds == pytest.approx(rows[None].step_seconds), (
        "replicas are neighbours unless said"
    )
    assert rows["chip 1x1"].step_seconds > rows["chip 1x4"].step_seconds


def test_equal_links_make_mappings_equal() -> None:
    equal = machine(group("chip", 4, 3.7e9, 1e-5), group("system", None, 3.7e9, 1e-5))
    ways = {timed(text, equal, dp=2)[0] for text in ("chip 2x2", "chip 2x1", "chip 1x2")}
    assert max(ways) == pytest.approx(min(ways), rel=1e-3), "only what shares a link differs"


def test_an_uplink_is_shared_by_all_who_leave_a_group() -> None:
    """A message takes no less than its share of the uplink among the replicas beside it, and collectives likewise."""
    groups = (LinkGroup("node", 8, Link(4.0, 0.0), uplink=6.0), LinkGroup("system", None, Link(2.0, 0.0)))
    placed = Placement(groups, grid(2, 32), (Tile("node", 1, 8),))
    assert placed.message_link(1) == Link(6.0 / 8, 0.0)
    assert placed.members("replicas").links == (Link(4.0, 0.0), Link(2.0, 0.0))
    assert placed.members("replicas").uplinks == (6.0,), "for those that leave in a round, how many these are"
    two = Placement(groups, grid(8, 32), (Tile("node", 4, 2),))
    assert (two.message_link(0), two.message_link(1)) == (Link(4.0, 0.0), Link(2.0, 0.0))
    assert two.members("all").uplinks == two.members("replicas").uplinks == (6.0,)
    assert two.members("ends").uplinks == (6.0 / 2,), "both replicas of a node exchange with their other ends"
    assert two.link_levels()[0].uplink == 6.0 / 2, "of one of two replicas, for four stages"
    unmapped = Placement(groups, grid(8, 32), None)
    assert unmapped.message_link(1) == Link(6.0 / 8, 0.0), "its node has eight replicas of a stage"
    assert unmapped.members("replicas").uplinks == (6.0,)
    narrow = Placement(groups, grid(8, 2), None)
    assert narrow.message_link(1) == Link(2.0, 0.0)
    assert (narrow.link_levels()[0].uplink, narrow.link_levels()[0].stages) == (6.0 / 2, 4)
    uneven = Placement(groups, grid(8, 3), None)
    assert uneven.members("replicas").uplinks == (6.0 / 8,), "each as if all clusters of its node were sending"
    assert (uneven.link_levels()[0].uplink, uneven.link_levels()[0].stages) == (6.0 / 8, 1)


def test_stages_of_one_node_share_its_uplink_in_the_simulator() -> None:
    """With two stages to a node and nothing else to wait for, their gathers overlap and take the longer for it."""
    wide, narrow = (
        machine(group("node", 2, 1e9, 0.0, uplink), group("system", None, 1e5, 0.0)) for uplink in (None, 1e5)
    )
    slow, fast = (timed("node 2x1", on, dp=2)[0] for on in (narrow, wide))
    assert slow > 1.1 * fast
    apart = [timed("node 1x1", on, dp=2)[0] for on in (narrow, wide)]
    assert apart[0] == pytest.approx(apart[1]), "alone on its node a stage has all of the uplink"


def test_the_example_has_three_groups_and_is_written_back() -> None:
    nodes = load_machine(NODES)
    assert [(g.name, g.clusters) for g in nodes.link_groups] == [("chip", 4), ("node", 16), ("system", None)]
    assert not are_uniform(nodes.link_groups)
    assert parse_machine("\n".join(machine_lines(nodes)), file="m.toml") == nodes
    assert nodes.link_groups[2].link == UNIFORM.link_groups[1].link


@pytest.mark.parametrize(
    ("groups", "reason", "line"),
    [
        ([group("chip", 4, 1e9, 0), group("node", 6, 1e9, 0), group("all", None, 1e9, 0)], "6 clusters of 'node'", 23),
        ([group("node", 8, 1e9, 0), group("chip", 4, 1e9, 0)], "from the inside out", 23),
        ([group("chip", None, 1e9, 0), group("all", None, 1e9, 0)], "'chip' needs clusters", 4),
        ([group("chip", 1, 1e9, 0), group("all", None, 1e9, 0)], "one cluster", 5),
        ([group("chip", 4, 1e9, 0), group("chip", None, 1e9, 0)], "a name of its own", 3),
        ([group("all", None, 1e9, 0, 1e9)], "nothing leaves the outermost", 4),
        ([group("chip", 4, -1e9, 0), group("all", None, 1e9, 0)], r"\[chip.bandwidth\] must be a number", 10),
        ([group("chip", 4, 1e9, 0).replace("bytes/s", "GB/s"), group("all", None, 1e9, 0)], "is 'bytes/s'", 10),
        (["[[link_group]]\nname = 'all'\nlatncy = 3\n"], "'latncy' is not a key", 5),
        (["[[link_group]]\nname = 'all'\n"], r"needs \[all.bandwidth\]", 4),
        (["link_group = 3"], "are written as", 3),
        (["link_group = []"], "are written as", 3),
        (["link_group = [3]"], "a name of its own", 3),
        (
            [
                '[link_latency]\nvalue = 0\nunit = "s"\ncertainty = "assumed"\nsource = "a test"',
                group("all", None, 1e9, 1),
            ],
            r"say what \[link_latency\] would",
            3,
        ),
    ],
)
def test_groups_that_do_not_fit_are_refused(groups: list[str], reason: str, line: int) -> None:
    with pytest.raises(DiagnosticError, match=reason) as caught:
        machine(*groups)
    found = caught.value.diagnostics[0]
    assert found.code == "RT065"
    assert found.location is not None
    assert found.location.line == line


@pytest.mark.parametrize(
    ("mapping", "reason"),
    [
        ("chip 3x1, node 3x2", "'node 3x2' do not make up 'plan 2x4'"),
        ("chip 1x2, node 2x3", "'chip 1x2' do not make up 'node 2x3'"),
        ("chip 1x2, chip 2x2", "a group has one tile"),
        ("chip 1x2; node 2x2", "stages x replicas"),
        ("chip 0x2", "stages x replicas"),
    ],
)
def test_tiles_must_make_up_the_plan(mapping: str, reason: str) -> None:
    text = plan_to_toml(make_plan(pp=2, dp=4)).replace("[batch]", f'mapping = "{mapping}"\n[batch]')
    with pytest.raises(DiagnosticError, match=reason):
        parse_plan(text, file="p.toml", model=MODEL)


@pytest.mark.parametrize(
    ("mapping", "reason"),
    [
        ("chip 1x2", "maps its ranks to chip, but the groups of the machine mt3000-nodes are chip, node, system"),
        ("chip 2x4, node 2x4", "takes 8 clusters, one chip has 4"),
        ("chip 1x1, node 2x4", "takes 8 groups 'chip', one node has 4"),
        ("chip 1x4, node 2x16", "takes 8 groups 'chip', one node has 4"),
    ],
)
def test_tiles_must_fit_their_groups(mapping: str, reason: str) -> None:
    plan = make_plan(pp=2, dp=16, mapping=RankMapping.parse(mapping))
    with pytest.raises(DiagnosticError, match=reason) as caught:
        placement_of(plan, load_machine(NODES))
    assert [d.code for d in caught.value.diagnostics] == ["RT064"]


def test_a_machine_that_is_too_small_is_named() -> None:
    small = machine(group("chip", 4, 1e9, 0), group("board", 8, 1e9, 0))
    placement_of(make_plan(pp=2, dp=4), small)
    with pytest.raises(DiagnosticError, match="are 16 clusters: the machine test has 8"):
        placement_of(make_plan(pp=2, dp=8), small)
    with pytest.raises(DiagnosticError, match="'plan 2x4' takes 4 groups 'chip', one board has 2"):
        placement_of(make_plan(pp=2, dp=4, mapping=RankMapping.parse("chip 1x2")), small)


def test_a_mapping_is_part_of_plan_files_and_schedules() -> None:
    plan = make_plan(pp=2, dp=4, mapping=RankMapping.parse("chip 1x4, node 2x4"))
    check_plan(plan, MODEL)
    assert parse_plan(plan_to_toml(plan), file="p.toml", model=MODEL) == plan
    module = api.compile(MODEL, plan, machine=NODES)
    assert 'mapping = "chip 1x4, node 2x4"' in print_module(module)
    assert parse_module(print_module(module), file="m.rtir").plan == evolve(plan, schedule="1f1b")
    assert "mapping" not in make_plan(pp=2, dp=4).to_fields(), "texts without one stay as they are"
    assert api.emit(module, machine=NODES).stages[0].streams[Engine.COLLECTIVE]

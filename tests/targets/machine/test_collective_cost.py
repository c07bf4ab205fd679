"""Collectives as rounds of messages: what they take, and which of them are taken."""

from __future__ import annotations

from math import ceil, log2

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from ratrain.ratrain_ir.config.rank_mapping import Tile
from ratrain.ratrain_ir.lowering import lower
from ratrain.ratrain_ir.model.context_rows import run_length
from ratrain.ratrain_ir.ops.base import Group
from ratrain.ratrain_ir.ops.collectives import TENSOR_OPS, GatherRows, ReduceRows, ReduceScatter
from ratrain.ratrain_ir.ops.context_ranks import GatherKeys, ReduceKeys
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.topology import Mesh, grid
from ratrain.targets.machine.collective_cost import (
    _GATHERS,
    _REDUCTIONS,
    Algorithm,
    all_gathers,
    all_reduces,
    all_to_alls,
    cheapest,
    copied_shards,
    neighbours,
    reduce_scatters,
    scalar_all_reduces,
)
from ratrain.targets.machine.constants import Constant
from ratrain.targets.machine.link_groups import Link
from ratrain.targets.machine.machine import COLLECTIVES, Machine, load_machine, parse_machine
from ratrain.targets.machine.placement import Members, Placement
from ratrain.targets.machine.record import machine_digest
from ratrain.targets.machine.resource_work import Flow
from ratrain.targets.machine.slowest_rank import expected_largest, slowest_rank
from ratrain.targets.machine.timing import collective_way, op_key, op_work
from ratrain.targets.machine.writer import machine_lines
from ratrain.targets.target import target_of
from tests.end_to_end.tiny_runs import MODEL, make_plan

MACHINE = load_machine(None)
SHARED = load_machine("mt3000-shared-port")
MIB = 1 << 20


def machine(on: Machine = MACHINE, **values: float) -> Machine:
    return evolve(on, constants=on.constants | {k: Constant(v, "", "assumed", "a test") for k, v in values.items()})


ALONE = machine(clusters_per_chip=1)
"""The case of uniform links."""


def members_of(count: int, on: Machine) -> Members:
    """The replicas of a stage, without a mapping."""
    return Placement(on.link_groups, grid(1, count), None).members("replicas")


def named(ways: list[Algorithm], name: str) -> Algorithm:
    return next(way for way in ways if way.name.startswith(name))


@pytest.mark.parametrize("members", [2, 3, 8, 128])
def test_rounds_have_latency_and_all_but_one_part_of_the_bytes(members: int) -> None:
    alpha, beta = MACHINE["link_latency"], MACHINE["link_bandwidth"]
    group, part = members_of(members, ALONE), 64 * MIB / members
    scatters, gathers = reduce_scatters(32 * MIB, 2, group, ALONE), all_gathers(64 * MIB, group, ALONE)
    rounds = {"ring": members - 1, "pairwise": members - 1, "recursive": ceil(log2(members))}
    for name, count in rounds.items():
        for ways, width in ((scatters, 1 if name == "pairwise" else 2), (gathers, 1)):
            way, sent = named(ways, name), width * part * (members - 1)
            assert way.seconds(ALONE) == pytest.approx(count * alpha + sent / beta, rel=1e-12), "sums are f32"
            assert sum(each.count for each in way.rounds) == count
            assert way.work(ALONE, 0).link_bytes == pytest.approx(sent)
            assert way.work(ALONE, 0).flows == (Flow(pytest.approx(sent), 0),)


@pytest.mark.parametrize(("distance", "messages"), [(1, 1), (1, 2), (5, 2)])
def test_neighbours_send_what_those_behind_them_see(distance: int, messages: int) -> None:
    way = neighbours(MIB, distance, messages, members_of(16, ALONE))
    sent = distance * messages
    assert way.work(ALONE, 0).link_bytes == sent * MIB
    assert way.seconds(ALONE) == pytest.approx(sent * (ALONE["link_latency"] + MIB / ALONE["link_bandwidth"]))
    assert way.seconds(ALONE) < cheapest(all_gathers(16 * messages * MIB, members_of(16, ALONE), ALONE), ALONE).seconds(
        ALONE
    )


def test_keys_under_a_window_are_priced_as_exchanges_of_neighbours() -> None:
    model = evolve(MODEL, family="mistral", sliding_window=5)
    plan = make_plan(model, pp=1, dp=1, cp=8, seq_len=64)
    found = {
        window: [
            (op, target_of(ALONE).timed(module, module.stages[0], op))
            for op in module.stages[0].ops
            if isinstance(op, GatherKeys | ReduceKeys)
        ]
        for window in (5, None)
        for module in (lower(evolve(model, sliding_window=window, family="mistral" if window else "llama"), plan),)
    }
    for (op, near), (_, every) in zip(found[5], found[None], strict=True):
        assert (near.gathered_runs, every.gathered_runs) == (2, 8)
        (rounds,) = collective_way(near, plan, ALONE).rounds
        elements = plan.micro_batch_size * run_length(plan) * model.kv_heads * model.head_dim
        itemsize = 2 if isinstance(op, GatherKeys) else 4
        assert (rounds.count, rounds.message_bytes) == (2, 2 * elements * itemsize)
        assert op_work(near, plan, ALONE).seconds < op_work(every, plan, ALONE).seconds
        assert op_key(near, plan) != op_key(every, plan)


@pytest.mark.parametrize("peers", [{"tp": 2}, {"tp": 2, "sequence_sharding": False}, {"cp": 2, "seq_len": 64}])
def test_only_exchanges_that_ask_the_arena_for_chunks_are_priced_by_chunks(peers: dict[str, int]) -> None:
    tiny = machine(ALONE, collective_chunk=64)
    plan = make_plan(MODEL, pp=1, dp=2, **peers)
    module = lower(MODEL, plan)
    stage, target = module.stages[0], target_of(tiny)
    seen = set()
    for op in stage.ops:
        if isinstance(op, (*TENSOR_OPS, ReduceScatter)):
            way = collective_way(target.timed(module, stage, op), plan, tiny)
            chunks = target.workspace(module, op) is not None
            assert any(rounds.staged for rounds in way.rounds) == chunks
            assert chunks or target.op_seconds(module, stage, op) == target_of(ALONE).op_seconds(module, stage, op)
            seen.add((type(op), chunks))
    assert (ReduceScatter, True) in seen
    assert (ReduceKeys if "cp" in peers else ReduceRows, False) in seen


@pytest.mark.parametrize("on", [ALONE, evolve(ALONE, collectives=("ring",))])
def test_parts_of_rows_arrive_by_an_exchange_of_all_and_are_added_in_one_pass(on: Machine) -> None:
    times, tp, bandwidth = {}, 4, on["link_bandwidth"]
    for sharding in (True, False):
        plan = make_plan(MODEL, pp=1, dp=1, tp=tp, sequence_sharding=sharding)
        module = lower(MODEL, plan)
        stage = module.stages[0]
        ops = {type(op): op for op in stage.ops if isinstance(op, GatherRows | ReduceRows) and len(op.reads) < 3}
        of = target_of(on)
        times[sharding] = of.op_seconds(module, stage, ops[ReduceRows])
        if sharding:
            gather = of.op_seconds(module, stage, ops[GatherRows])
            summed = ops[ReduceRows]
    part, others = summed.reads[0].type.nbytes, sum(t.type.nbytes for t in (*summed.reads[1:], *summed.writes))
    alone = (tp - 1) * (on["link_latency"] + part / tp / bandwidth)
    assert times[True] == pytest.approx(alone + (part + others) / on["ddr_bandwidth"])
    assert times[False] == pytest.approx(times[True] + gather)


@pytest.mark.parametrize("window", [None, 5])
def test_groups_of_heads_move_the_bytes_of_all_in_as_many_exchanges(window: int | None) -> None:
    model = evolve(MODEL, kv_heads=4, family="mistral" if window else "llama", sliding_window=window)
    plan = make_plan(model, pp=1, dp=1, cp=8, seq_len=64)
    totals = {}
    for groups in (1, 2, 4):
        module = lower(model, own := evolve(plan, context_groups=groups))
        of_keys = [op for op in module.stages[0].ops if isinstance(op, GatherKeys | ReduceKeys)]
        timed = [target_of(ALONE).timed(module, module.stages[0], op) for op in of_keys]
        assert {each.gathered_runs for each in timed} == {2 if window else 8}
        ways = [collective_way(each, own, ALONE) for each in timed]
        moved = sum(rounds.nbytes for way in ways for rounds in way.rounds)
        assert len(ways) == groups * len(totals.setdefault(1, (ways, 0, 0))[0])
        totals[groups] = ways, moved, sum(each.own_bytes for each in timed)
    for number in (1, 2):
        assert totals[1][number] == totals[2][number] == totals[4][number] > 0


def test_hosts_and_skew_add_to_every_round() -> None:
    group = members_of(16, ALONE)
    for ways in (reduce_scatters(8 * MIB, 2, group, ALONE), all_gathers(8 * MIB, group, ALONE)):
        for way in ways:
            rounds = sum(each.count for each in way.rounds)
            later = machine(ALONE, message_cost=3e-6, round_skew=4e-6)
            assert way.seconds(later) == pytest.approx(way.seconds(ALONE) + 7e-6 * rounds)


@given(st.integers(2, 300), st.sampled_from([1, 4]), st.floats(1, 1e10))
def test_every_way_moves_what_it_must(count: int, chip: int, nbytes: float) -> None:
    """A member must receive all but its own part; a tree's scatter sends all but one; sums are never narrower."""
    on = machine(clusters_per_chip=chip)
    group = members_of(count, on)
    least = nbytes * (count - 1) / count
    every = reduce_scatters(nbytes / 2, 2, group, on) + all_gathers(nbytes, group, on)
    for way in every + all_reduces(nbytes / 2, 2, group, on):
        assert sum(each.nbytes for each in way.rounds) >= least * (1 - 1e-9)
        assert sum(each.count for each in way.rounds) >= (count - 1).bit_length()
        assert way.work(on, 0).seconds >= way.seconds(on)


@pytest.mark.parametrize("uplink", [None, 30e9])
def test_all_to_all_group_by_group_crosses_outer_links_in_fewer_rounds(uplink: float | None) -> None:
    """Of 2 groups of 4 members, 4 rounds in place of 7; an own link carries the same bytes in both orders."""
    on = machine(link_latency=0.0, clusters_per_chip=4, chip_bandwidth=150e9)
    on = on if uplink is None else machine(on, chip_uplink=uplink)
    group = members_of(8, on)
    around, by_groups = all_to_alls(8e9, group)
    assert (around.name, by_groups.name) == ("pairwise", "pairwise by groups")
    outer = on["link_bandwidth"] if uplink is None else min(on["link_bandwidth"], uplink / 4)
    assert by_groups.seconds(on) == pytest.approx(3e9 / 150e9 + 4e9 / outer)
    assert cheapest([around, by_groups], on).seconds(on) <= around.seconds(on)
    for level in range(2):
        assert by_groups.bytes_at(level) == pytest.approx(around.bytes_at(level))
    assert len(all_to_alls(8e9, members_of(4, on))) == 1


@given(
    st.sampled_from([1, 2, 4, 6]),
    st.integers(1, 150),
    st.floats(1, 1e10),
    st.floats(1, 3),
    st.sampled_from([0.0, 1e-5, 1e-3]),
    st.sampled_from([1024, MIB]),
    st.sampled_from([None, 3.7e9]),
)
def test_cost_never_falls_with_bytes_or_members(
    chip: int, groups: int, nbytes: float, factor: float, latency: float, chunk: int, uplink: float | None
) -> None:
    """Of full groups; with chunks so small that their latency shows, too."""
    on = machine(link_latency=latency, collective_chunk=chunk, clusters_per_chip=chip)
    if uplink is not None and chip > 1:
        on = machine(on, chip_uplink=uplink, chip_bandwidth=15e9)
    one, other = members_of(chip * groups, on), members_of(chip * (groups + 1), on)
    for kind in (
        lambda size, members: reduce_scatters(size / 2, 2, members, on),
        lambda size, members: all_gathers(size, members, on),
        lambda size, members: all_reduces(size / 2, 2, members, on),
        all_to_alls,
    ):
        seconds, larger = (
            cheapest(kind(size, one), on).seconds(on) if one.count > 1 else 0.0 for size in (nbytes, nbytes * factor)
        )
        assert seconds <= larger * (1 + 1e-12)
        assert seconds <= cheapest(kind(nbytes, other), on).seconds(on) * (1 + 1e-12)
        if one.count > 1:
            assert larger <= factor * seconds * (1 + 1e-9), "twice the bytes never take more than twice the time"


def test_a_ring_of_more_members_takes_longer_though_its_chunks_become_whole() -> None:
    """At 1 ms a message, 384 members once took longer than 512: their last chunks were counted as full ones."""
    slow = machine(ALONE, link_latency=1e-3)
    seconds = [
        named(reduce_scatters(256 * MIB, 4, members_of(count, slow), slow), "ring").seconds(slow)
        for count in (256, 384, 512, 640, 1024, 1025)
    ]
    assert seconds == sorted(seconds)
    chunk, chunks = MIB / 3.7e9, 1024 * (1 / 256 - 1 / 512)
    assert seconds[2] - seconds[0] == pytest.approx(256 * chunk + chunks * 1e-3), (
        "a chunk a round, and the bytes that are more"
    )


def test_what_a_collective_occupies_is_what_its_rounds_cross() -> None:
    """Of 32 members on chips of four with one port each: only what leaves a chip is on the port, only that on far links."""
    group, part = members_of(32, SHARED), 1024.0
    gathers = all_gathers(32 * part, group, SHARED)
    assert gathers[0].name == "ring"
    assert gathers[0].work(SHARED, 0).flows == (
        Flow(31 * part, 0),
        Flow(31 * part, 1),
        Flow(31 * part / 4, None, (0,)),
    ), (
        "one of four messages leaves a chip; the member that sends it has all its bytes on the far link, the others on the near one"
    )
    pairwise = named(gathers, "pairwise").work(SHARED, 0)
    assert pairwise.flows == (
        Flow(pytest.approx(3 * part), 0),
        Flow(pytest.approx(28 * part), 1),
        Flow(pytest.approx(28 * part), None, (0,)),
    ), "three partners are on the chip"
    hierarchical = named(gathers, "hierarchical").work(SHARED, 0)
    assert hierarchical.flows == (Flow(24 * part, 0), Flow(7 * part, 1), Flow(7 * part, None, (0,)))
    assert named(gathers, "ring").seconds(SHARED) < named(gathers, "pairwise").seconds(SHARED)


def test_a_shared_port_is_as_long_in_use_as_the_collective_takes_alone() -> None:
    """Uplink bytes of a replica, at its replica's share, take what the rounds are priced at."""
    placement = Placement(SHARED.link_groups, grid(1, 64), None)
    group, share = placement.members("replicas"), placement.link_levels()[0].uplink
    for way in all_gathers(64 * MIB, group, SHARED):
        used = way.uplink_bytes(0) / share
        assert used <= way.seconds(SHARED) * (1 + 1e-9)
        if way.name == "recursive":
            assert used > 0.9 * way.seconds(SHARED)


def test_small_sums_go_in_few_rounds_and_large_ones_in_rank_order() -> None:
    group = members_of(128, ALONE)
    assert cheapest(scalar_all_reduces(8, group, ALONE), ALONE).name == "recursive"
    assert cheapest(scalar_all_reduces(8, group, ALONE), ALONE).seconds(ALONE) == pytest.approx(7e-5, rel=0.01)
    assert cheapest(scalar_all_reduces(8, group, evolve(ALONE, collectives=("ring", "tree"))), ALONE).name == "tree"
    assert cheapest(reduce_scatters(32 * MIB, 2, group, ALONE), ALONE).name == "pairwise"
    assert cheapest(all_reduces(32 * MIB, 2, group, ALONE), ALONE).name == "pairwise + recursive"


def test_a_shared_port_makes_the_hierarchy_pay() -> None:
    group = members_of(128, SHARED)
    way = cheapest(all_gathers(64 * MIB, group, evolve(SHARED, collectives=("pairwise", "hierarchical"))), SHARED)
    assert way.name == "hierarchical (pairwise, pairwise)"
    scatter = named(reduce_scatters(32 * MIB, 2, group, SHARED), "hierarchical")
    assert scatter.uplink_bytes(0) == pytest.approx(32 * MIB * 4 / 4 * 31 / 32), "only sums leave the chip, as f32"
    assert scatter.bytes_at(0) == pytest.approx(32 * MIB * 2 * 3 / 4), "what is summed first is as narrow as it was"


def test_copies_of_shards_move_what_groups_have_summed() -> None:
    """Within a group all parts but one of a gradient, then sums of a shard there and the sum back, over as many groups."""
    nodes = Placement(SHARED.link_groups, Mesh(1, 16, 1, (0,), shard_group=4), None)
    group, copies = nodes.members("shards"), nodes.copies
    assert (group.within, copies.within) == ((4, 4), (1, 4))
    way = copied_shards(32 * MIB, (2, 2), group, copies, SHARED, 0.0)
    assert way.bytes_at(0) == pytest.approx(64 * MIB * 3 / 4)
    assert way.bytes_at(1) == pytest.approx(32 * MIB / 4 * (4 + 2) * 3 / 4)
    everyone = named(reduce_scatters(32 * MIB, 2, nodes.members("replicas"), SHARED), "hierarchical")
    assert way.bytes_at(1) > everyone.bytes_at(1)
    assert cheapest(all_gathers(64 * MIB, group, SHARED), SHARED).bytes_at(1) == 0, "views stay on the chip"


@pytest.mark.parametrize(
    ("tile", "within"), [(Tile("chip", 1, 4), (4, 8)), (Tile("chip", 1, 2), (2, 8)), (Tile("chip", 1, 1), (1, 8))]
)
def test_shard_groups_fill_tiles_as_replicas_do(tile: Tile, within: tuple[int, ...]) -> None:
    mesh = Mesh(1, 16, 1, (0,), shard_group=8)
    assert Placement(SHARED.link_groups, mesh, (tile,)).members("shards").within == within


@pytest.mark.parametrize(
    ("tiles", "peers", "within"),
    [
        (None, 1, (4, 8)),
        (None, 2, (2, 8)),
        (None, 4, (1, 8)),
        ((Tile("chip", 1, 2),), 1, (2, 8)),
        ((Tile("chip", 1, 4),), 1, (4, 8)),
        ((Tile("chip", 1, 2, 2),), 2, (2, 8)),
    ],
)
def test_context_ranks_are_neighbours_outside_tensor_ranks(
    tiles: tuple[Tile, ...] | None, peers: int, within: tuple[int, ...]
) -> None:
    """A chip of four holds as many as the order of ranks, or a tile, puts there; never more than there are."""
    mesh = Mesh(1, 16, peers, (0,), contexts=8)
    placement = Placement(SHARED.link_groups, mesh, tiles)
    assert placement.members("context").within == within
    if tiles is None:
        on_chip = [rank for rank in mesh.members(Group.CONTEXT, mesh.ranks[0]) if mesh.lane(rank) < 4]
        assert len(on_chip) == within[0]
    few = Placement(SHARED.link_groups, Mesh(1, 16, peers, (0,), contexts=2), tiles).members("context")
    assert few.within == (min(within[0], 2), 2)


def test_chips_must_be_full() -> None:
    four = machine(clusters_per_chip=4)
    assert [members_of(n, four).within[0] for n in (1, 2, 3, 4, 6, 8, 128)] == [1, 2, 1, 4, 1, 4, 4]


def test_staging_hides_a_chunk_s_latency_unless_chunks_are_small() -> None:
    alpha, beta = MACHINE["link_latency"], MACHINE["link_bandwidth"]
    message, group = 8.0 * MIB, Members((4,), (Link(beta, alpha),))
    gather = named(all_gathers(4 * message, group, ALONE), "ring")
    scatter = named(reduce_scatters(message, 4, group, ALONE), "ring")
    whole = 3 * (alpha + message / beta)
    assert gather.seconds(ALONE) == scatter.seconds(ALONE) == pytest.approx(whole)
    tiny = machine(ALONE, collective_chunk=1024, message_cost=1e-6)
    assert gather.seconds(tiny) == pytest.approx(whole + 3e-6)
    exposed = 3 * (message / 1024 - 1) * (alpha + 1e-6 - 1024 / beta)
    assert scatter.seconds(tiny) == pytest.approx(whole + 3e-6 + exposed)


def test_a_machine_has_the_ways_that_its_file_names() -> None:
    assert {*_REDUCTIONS} == {*_GATHERS} == {*COLLECTIVES} - {"tree", "hierarchical"}
    rings = parse_machine(
        'base = "mt3000-shared-port"\nname = "rings"\ncollectives = ["tree", "ring"]\n', file="m.toml"
    )
    group = members_of(16, rings)
    assert rings.collectives == ("ring", "tree")
    for ways in (
        reduce_scatters(8 * MIB, 2, group, rings),
        all_gathers(8 * MIB, group, rings),
        all_reduces(8 * MIB, 2, group, rings),
    ):
        assert [way.name for way in ways] == ["ring", "tree"]
    assert parse_machine("\n".join(machine_lines(rings)), file="m.toml") == rings
    assert machine_digest(rings) != machine_digest(evolve(rings, collectives=COLLECTIVES))
    level_by_level = evolve(SHARED, collectives=("ring", "hierarchical"))
    assert {way.name for way in all_gathers(8, group, level_by_level)} == {"ring", "hierarchical (ring, ring)"}


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ('"ring"', "a list of one or more of ring, pairwise, recursive, tree, hierarchical"),
        ("[]", "a list of one or more"),
        ('["rings"]', "'rings' is no way to do a collective"),
        ("[3]", "3 is no way to do a collective"),
        ('["ring", "ring"]', "names a way twice"),
        ('["hierarchical"]', "is built of other ways"),
        ('["tree", "hierarchical"]', "is built of other ways"),
    ],
)
def test_ways_that_are_none_are_refused(value: str, reason: str) -> None:
    with pytest.raises(DiagnosticError, match=reason) as caught:
        parse_machine(f'base = "mt3000"\nname = "other"\ncollectives = {value}\n', file="m.toml")
    (found,) = caught.value.diagnostics
    assert found.code == "RT065"
    assert found.location is not None
    assert found.location.line == 3


def test_the_slowest_of_many_ranks() -> None:
    """Closed forms of two and three deviates, tables of order statistics for more (Teichroew, 1956; Harter, 1961)."""
    known = {1: 0.0, 2: 0.5641895835, 3: 0.8462843753, 4: 1.0293753730, 10: 1.5387527308, 100: 2.5075936}
    for count, value in known.items():
        assert expected_largest(count) == pytest.approx(value, abs=2e-7), count
    many = [expected_largest(count) for count in (1000, 10**4, 10**6)]
    assert many == sorted(many)
    assert slowest_rank(0.3, 1) == 1.0
    assert slowest_rank(0.01, 4) == pytest.approx(1.010293753730)


def test_a_way_that_DDR_makes_slow_is_not_taken() -> None:
    """Links faster than memory: sums twice as wide take fewer rounds, but more of the DDR."""
    fast = machine(ALONE, link_bandwidth=1e15, ddr_bandwidth=1e9)
    ways = reduce_scatters(MIB, 2, members_of(64, fast), fast)
    assert named(ways, "recursive").seconds(fast) < named(ways, "pairwise").seconds(fast)
    assert cheapest(ways, fast, 2.0 * MIB).name == "pairwise"
    seconds = {way.name: way.work(fast, 2.0 * MIB).seconds for way in ways}
    assert min(seconds, key=seconds.__getitem__) == "pairwise"

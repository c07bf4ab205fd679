"""Topology: chunks, channels, groups and shards, for any number of chunks and tensor-parallel ranks."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from ratrain.ratrain_ir.model.blocks import block_chain, flat_elements
from ratrain.ratrain_ir.ops.base import Group, Payload
from ratrain.ratrain_ir.topology import Mesh, Rank, Topology, grid, topology_of
from ratrain.targets.runtime.weights.weights import block_elements
from tests.end_to_end.tiny_runs import MODEL, make_plan


def loop(stages: int, chunks: int) -> tuple[int, ...]:
    """The stages of chunks that go round: chunk c on stage c mod P."""
    return tuple(range(stages)) * chunks


def vee(stages: int) -> tuple[int, ...]:
    """The stages of two chunks each, there and back."""
    return (*range(stages), *reversed(range(stages)))


SIZES = st.integers(1, 5)
LAYOUTS = st.one_of(st.builds(loop, SIZES, st.integers(1, 3)), st.builds(vee, SIZES))


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    """Meshes with and without groups of replicas, one in another."""
    held, viewers, parts, groups = draw(LAYOUTS), draw(SIZES), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    group = viewers * parts
    shards, views = group if group > 1 and groups > 1 else None, viewers if viewers > 1 and parts > 1 else None
    return Mesh(max(held) + 1, group * groups, draw(SIZES), held, shard_group=shards, view_group=views)


MESHES = meshes()
GROUPS = st.sampled_from(Group)


@given(MESHES)
def test_every_chunk_is_held_once_and_every_rank_is_there_once(mesh: Mesh) -> None:
    held = [chunk for stage in range(mesh.stages) for chunk in mesh.chunks_of(stage)]
    assert sorted(held) == list(range(len(mesh.chunk_stages)))
    assert list(mesh.ranks) == sorted(set(mesh.ranks))
    assert len(mesh.ranks) == mesh.size == mesh.stages * mesh.replicas * mesh.peers


@given(MESHES)
def test_a_channel_is_one_edge_between_chunks_and_no_two_share_one(mesh: Mesh) -> None:
    crossing = [
        (a, b) for a, b in pairwise(range(len(mesh.chunk_stages))) if mesh.chunk_stages[a] != mesh.chunk_stages[b]
    ]
    channels = [hop.channel for hop in mesh.hops]
    assert len(set(channels)) == len(channels) == 2 * len(crossing)
    assert sorted(mesh.channel_numbers.values()) == list(range(len(channels)))
    for hop in mesh.hops:
        assert (hop.source, hop.target) == (
            mesh.chunk_stages[hop.channel.source],
            mesh.chunk_stages[hop.channel.target],
        )
        forward = hop.channel.payload is Payload.ACTIVATION
        assert hop.channel.target - hop.channel.source == (1 if forward else -1)


@given(MESHES)
def test_neighbours_are_the_ends_of_channels(mesh: Mesh) -> None:
    for chunk, stage in enumerate(mesh.chunk_stages):
        before, after = mesh.neighbours(chunk)
        sent = {(hop.target, hop.channel.payload) for hop in mesh.hops if hop.channel.source == chunk}
        wanted = {(after, Payload.ACTIVATION), (before, Payload.GRADIENT)}
        assert sent == {(peer, payload) for peer, payload in wanted if peer is not None}
        assert stage not in (before, after)


@given(MESHES, GROUPS)
def test_groups_of_a_kind_part_the_ranks_that_have_one(mesh: Mesh, group: Group) -> None:
    ends = {mesh.first_stage, mesh.last_stage}
    seen: set[Rank] = set()
    for rank in mesh.ranks:
        if group is Group.ENDS and rank.stage not in ends:
            continue
        members = mesh.members(group, rank)
        assert rank in members
        assert list(members) == sorted(members)
        assert all(mesh.members(group, other) == members for other in members)
        assert {member.stage for member in members} == set(mesh.stages_of(group, rank.stage))
        assert len(members) == mesh.group_size(group)
        seen.update(members)
    assert seen == {rank for rank in mesh.ranks if group is not Group.ENDS or rank.stage in ends}


def test_the_groups_of_a_pipeline_with_replicas() -> None:
    mesh = grid(3, 2)
    assert mesh.members(Group.REPLICAS, Rank(1, 0)) == (Rank(1, 0), Rank(1, 1))
    assert mesh.members(Group.ENDS, Rank(0, 1)) == (Rank(0, 1), Rank(2, 1))
    assert mesh.group_size(Group.ALL) == 6
    assert grid(1, 2).members(Group.ENDS, Rank(0, 1)) == (Rank(0, 1),)


def test_shard_groups_are_neighbours_that_have_all_shards_between_them() -> None:
    mesh = Mesh(1, 6, 2, (0,), shard_group=3)
    assert mesh.members(Group.SHARDS, Rank(0, 4, 1)) == (Rank(0, 3, 1), Rank(0, 4, 1), Rank(0, 5, 1))
    assert grid(1, 6).members(Group.SHARDS, Rank(0, 4)) == grid(1, 6).members(Group.REPLICAS, Rank(0, 4))


def test_a_message_says_its_chunk_where_stages_hold_several() -> None:
    one, two = grid(2, 1), Mesh(2, 1, 1, loop(2, 2))
    for mesh in (one, two):
        for hop in mesh.hops:
            said = mesh.chunk_of_message(hop.channel)
            assert (said is None) == (mesh is one)
            assert mesh.hop(hop.source, hop.target, hop.channel.payload, said) is hop
    assert one.hop(0, 1, Payload.ACTIVATION, 1) is None
    assert two.hop(0, 1, Payload.ACTIVATION, None) is None
    into = [hop.channel.into for hop in two.hops if (hop.source, hop.channel.payload) == (0, Payload.ACTIVATION)]
    assert into == [1, 3], "two edges between the same two stages"


def test_tensor_peers_meet_replicas_of_the_same_peer() -> None:
    mesh = Mesh(2, 2, 2, (0, 1))
    assert mesh.members(Group.REPLICAS, Rank(1, 0, 1)) == (Rank(1, 0, 1), Rank(1, 1, 1))
    assert mesh.group_size(Group.ALL) == 8


def test_first_and_last_are_where_the_first_and_the_last_chunk_are() -> None:
    assert (Mesh(3, 1, 1, vee(3)).first_stage, Mesh(3, 1, 1, vee(3)).last_stage) == (0, 0)
    assert Mesh(3, 1, 1, vee(3)).stages_of(Group.ENDS, 1) == (0,)
    assert Mesh(3, 1, 1, loop(3, 2)).last_stage == 2


@given(LAYOUTS)
def test_blocks_stand_in_order_once_whatever_the_layout(held: tuple[int, ...]) -> None:
    model = evolve(MODEL, layers=len(held) + 1)
    layers = (range(2), *(range(at, at + 1) for at in range(2, model.layers)))
    topology = Topology(max(held) + 1, 1, 1, held, model, make_plan(model, pp=1), layers)
    assert [unit for blocks in topology.chunk_blocks for unit in blocks] == list(block_chain(model))
    assert sorted(map(str, (unit for blocks in topology.stage_blocks for unit in blocks))) == sorted(
        map(str, block_chain(model))
    )
    for hop in topology.hops:
        unit = topology.crossing_block(hop.channel)
        assert unit in topology.blocks_behind_cuts
        receives = hop.target if hop.channel.payload is Payload.ACTIVATION else hop.source
        assert unit in topology.stage_blocks[receives]


@pytest.mark.parametrize("zero", range(4))
def test_shards_part_a_block_in_equal_ranges(zero: int) -> None:
    plan = make_plan(dp=4, zero=zero)
    topology = topology_of(MODEL, plan)
    for unit in block_chain(MODEL):
        ranges = [topology.shard_range(unit, replica) for replica in range(4)]
        whole = flat_elements(MODEL, plan, unit)
        if zero == 0:
            assert ranges == [range(whole)] * 4
        else:
            assert [i for owned in ranges for i in owned] == list(range(whole))
            assert len({len(owned) for owned in ranges}) == 1
        assert whole >= block_elements(MODEL, unit)


def test_what_is_asked_twice_is_the_same_object() -> None:
    plan = make_plan()
    assert topology_of(MODEL, plan) is topology_of(MODEL, evolve(plan))


ASKS = {
    "which stage is the last": r"\bpp - 1\b|stages - 1\b(?!\})",
    "which stage is beside another": r"stage\.index [+-] 1\b|stage_index [+-] 1\b",
    "where a shard begins": r"\breplica \* (?!self\.plan)|index \* shard",
}
"""What nobody but the topology works out, and what that looks like."""
EXCUSED = {
    "ratrain_ir/topology.py",
    "ratrain_ir/config/cuts.py",  # chooses the cuts that make the stages
    "ratrain_ir/config/plan_checks.py",  # counts the cuts that are given
    "ratrain_ir/testing/strategies.py",  # draws them
    "ratrain_ir/testing/invariants.py",  # works it out again, as a second opinion
    "passes/placement/place_1f1b.py",  # how far warm-up runs ahead: the schedule's own
    "ratrain_ir/schedules/one_chunk.py",  # where 1F1B waits for gradients: the schedule's own
    "ratrain_ir/schedules/interleaved.py",  # how far warm-up runs ahead: likewise
    "ratrain_ir/schedules/vee.py",
    "ratrain_ir/schedules/building_block.py",
    "ratrain_ir/schedules/shape.py",  # which chunks a stage holds, from which the topology has it
}


@pytest.mark.parametrize("what", ASKS)
def test_nobody_else_works_out_who_is_where(what: str) -> None:
    root = Path(__file__).resolve().parents[2]
    found = [
        f"{path.relative_to(root)}:{number}: {line.strip()}"
        for package in ("ratrain_ir", "passes", "targets", "ratrainc")
        for path in sorted((root / package).rglob("*.py"))
        if str(path.relative_to(root)) not in EXCUSED
        and "planner" not in path.parts
        and "calibration" not in path.parts
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(ASKS[what], line)
    ]
    assert not found, f"ask the topology {what}:\n" + "\n".join(found)

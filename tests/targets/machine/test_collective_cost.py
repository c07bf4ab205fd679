"""Collectives as rounds of messages."""

from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from ratrain.ratrain_ir.topology import grid
from ratrain.targets.machine.collective_cost import (
    Rounds,
    all_gathers,
    all_reduces,
    cheapest,
    reduce_scatters,
)
from ratrain.targets.machine.link_groups import Link
from ratrain.targets.machine.machine import Constant, Machine, load_machine
from ratrain.targets.machine.placement import Members, Placement

MACHINE = load_machine(None)
MIB = 1 << 20


def machine(**values: float) -> Machine:
    return evolve(
        MACHINE, constants=MACHINE.constants | {k: Constant(v, "", "assumed", "a test") for k, v in values.items()}
    )


ALONE = machine(clusters_per_chip=1)
"""The case of uniform links."""


def members_of(count: int, on: Machine) -> Members:
    """The replicas of a stage, without a mapping."""
    return Placement(on.link_groups, grid(1, count), None).members("replicas")


@pytest.mark.parametrize("members", [2, 3, 8, 128])
def test_a_ring_has_latency_in_proportion_to_its_members_and_all_but_one_part_of_the_bytes(members: int) -> None:
    alpha, beta = MACHINE["link_latency"], MACHINE["link_bandwidth"]
    all_of_them = members_of(members, ALONE)
    for ways in (reduce_scatters(32 * MIB, 2, all_of_them), all_gathers(64 * MIB, all_of_them)):
        ring = next(way for way in ways if way.name == "ring")
        bytes_sent = 64 * MIB * (members - 1) / members
        assert ring.seconds(MACHINE) == pytest.approx((members - 1) * alpha + bytes_sent / beta, rel=1e-12)
        assert ring.work(MACHINE, 0).link_bytes == pytest.approx(bytes_sent)


@given(st.integers(2, 300), st.sampled_from([1, 4]), st.floats(1, 1e10))
def test_every_way_moves_what_it_must(members: int, chip: int, nbytes: float) -> None:
    """A member must receive all but its own part; a tree's scatter sends all but one; sums are never narrower."""
    group = members_of(members, machine(clusters_per_chip=chip))
    least = nbytes * (members - 1) / members
    every = reduce_scatters(nbytes / 2, 2, group) + all_gathers(nbytes, group) + all_reduces(nbytes / 2, 2, group)
    for way in every:
        assert sum(each.nbytes for each in way.rounds) >= least * (1 - 1e-9)
        assert sum(each.count for each in way.rounds) >= (members - 1).bit_length()
        assert way.work(MACHINE, 0).seconds >= way.seconds(MACHINE)


def test_small_sums_go_by_tree_and_large_ones_by_ring() -> None:
    assert cheapest(all_reduces(1, 8, members_of(128, ALONE)), MACHINE).name == "tree"
    assert cheapest(reduce_scatters(32 * MIB, 2, members_of(128, MACHINE)), MACHINE).name == "ring"


def test_a_faster_chip_makes_the_hierarchy_pay() -> None:
    """Gathers have no sums to widen, so that fewer rounds pay at once; a reduction needs a faster way within the chip."""
    assert cheapest(all_gathers(64 * MIB, members_of(128, MACHINE)), MACHINE).name == "hierarchical"
    fast = machine(chip_bandwidth=30e9, chip_latency=1e-6)
    chosen = cheapest(reduce_scatters(32 * MIB, 2, members_of(128, fast)), fast)
    assert chosen.name == "hierarchical"
    assert chosen.work(fast, 0).link_bytes == pytest.approx(32 * MIB * 4 / 4 * 31 / 32), "only sums leave the chip"


def test_chips_must_be_full() -> None:
    four = machine(clusters_per_chip=4)
    assert [members_of(n, four).within[0] for n in (1, 2, 3, 4, 6, 8, 128)] == [1, 2, 1, 4, 1, 4, 4]


def test_staging_hides_a_chunk_s_latency_unless_chunks_are_small() -> None:
    alpha, beta = MACHINE["link_latency"], MACHINE["link_bandwidth"]
    message = 8.0 * MIB
    link = Link(beta, alpha)
    whole = Rounds(3, message, 0, link).seconds(MACHINE)
    assert whole == pytest.approx(3 * (alpha + message / beta))
    assert Rounds(3, message, 0, link, staged=True).seconds(MACHINE) == whole
    tiny = machine(collective_chunk=1024)
    exposed = (message / 1024 - 1) * (alpha - 1024 / beta)
    assert Rounds(3, message, 0, link, staged=True).seconds(tiny) == pytest.approx(whole + 3 * exposed)

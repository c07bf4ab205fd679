"""What collectives are priced at, against a simulation of every message."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratrain.ratrain_ir.topology import grid
from ratrain.targets.machine.collective_cost import (
    Algorithm,
    all_gathers,
    all_reduces,
    reduce_scatters,
    scalar_all_reduces,
)
from ratrain.targets.machine.machine import Machine, load_machine
from ratrain.targets.machine.placement import Members, Placement
from tests.targets.simulator.message_rounds import message_seconds

NODES = str(Path(__file__).resolve().parents[3] / "examples" / "mt3000-nodes.toml")
MACHINES = ("mt3000", "mt3000-shared-port", NODES)
SIZES = (2, 3, 4, 6, 8, 16, 24, 64, 100)
LARGE = (256, 384, 512, 1024)


def case(count: int, on: Machine) -> Members:
    return Placement(on.link_groups, grid(1, count), None).members("replicas")


def every_way(nbytes: float, members: Members, on: Machine) -> list[Algorithm]:
    ways = reduce_scatters(nbytes / 2, 2, members, on) + all_gathers(nbytes, members, on)
    return ways + all_reduces(nbytes / 2, 2, members, on) + scalar_all_reduces(8, members, on)


def check(name: str, count: int, nbytes: float, ways: tuple[str, ...] = ("",)) -> None:
    on = load_machine(name)
    members = case(count, on)
    for way in every_way(nbytes, members, on):
        if not way.name.startswith(ways):
            continue
        priced = way.seconds(on)
        assert message_seconds(way, members, on) == pytest.approx(priced, rel=1e-9), (name, count, way.name)
        assert message_seconds(way, members, on, in_turn=True) <= priced * (1 + 1e-9), (name, count, way.name)


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.sampled(3)
def test_prices_are_those_of_all_messages(name: str, count: int) -> None:
    """Ports that are shared evenly make the price exact; such as serve in turn let one member's latency hide behind another's bytes."""
    check(name, count, 1 << 20)


@pytest.mark.parametrize("count", LARGE)
@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.sampled(4)
def test_prices_of_many_members(name: str, count: int) -> None:
    check(name, count, 1 << 26, ("recursive", "tree", "hierarchical (recursive"))


@pytest.mark.full
@pytest.mark.parametrize("count", LARGE)
@pytest.mark.parametrize("name", MACHINES)
def test_prices_of_a_million_messages(name: str, count: int) -> None:
    check(name, count, 1 << 26)


def test_bytes_in_turn_hide_latency_and_no_more() -> None:
    """Where bytes are many, so that latency is little, the order in which a port serves them makes no difference."""
    on = load_machine("mt3000-shared-port")
    members = case(64, on)
    for nbytes, least in ((1 << 16, 0.75), (1 << 32, 0.99)):
        for way in every_way(nbytes, members, on):
            assert message_seconds(way, members, on, in_turn=True) >= least * way.seconds(on), (nbytes, way.name)

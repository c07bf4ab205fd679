"""Which stage and replica a process runs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratrain.ratrain_ir.config.rank_mapping import RankMapping
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.topology import Mesh, grid
from ratrain.targets.runtime.ranks.rank_layout import RankLayout, check_reduction
from tests.end_to_end.tiny_runs import make_plan


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 4), st.sampled_from(["pp-first", "dp-first"]))
def test_every_process_has_its_place(stages: int, replicas: int, peers: int, order: Any) -> None:
    mesh = Mesh(stages, replicas, peers, tuple(range(stages)))
    layout = RankLayout(mesh, order)
    places = [layout.place(process) for process in range(layout.size)]
    assert sorted(places) == list(mesh.ranks)
    assert [layout.process(place) for place in places] == list(range(layout.size))
    assert [mesh.in_lane(place.stage, mesh.lane(place)) for place in places] == places


def places(layout: RankLayout, count: int) -> list[tuple[int, int]]:
    """Stage and replica of the first processes."""
    return [layout.place(process)[:2] for process in range(count)]


def test_rank_order_says_what_is_next_to_each_other() -> None:
    assert places(RankLayout(grid(3, 2), "pp-first"), 3) == [(0, 0), (1, 0), (2, 0)]
    assert places(RankLayout(grid(3, 2), "dp-first"), 3) == [(0, 0), (0, 1), (1, 0)]
    for order in ("pp-first", "dp-first"):  # tensor-parallel ranks follow one another in either
        layout = RankLayout(Mesh(2, 2, 2, (0, 1)), order)  # type: ignore[arg-type]
        assert [layout.place(process).peer for process in range(8)] == [0, 1] * 4
        assert places(layout, 2) == [(0, 0), (0, 0)]
    tiled = RankLayout.of_plan(make_plan(pp=2, dp=4, mapping=RankMapping.parse("chip 2x2")), "mapping")
    assert places(tiled, 5) == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2)]
    assert [tiled.process(tiled.place(i)) for i in range(8)] == list(range(8))
    check_reduction(make_plan(), "fast")
    packed = make_plan(reduce_quantised="int8-block")
    check_reduction(packed, "ordered")
    with pytest.raises(DiagnosticError, match="which no library sums"):
        check_reduction(packed, "fast")
    with pytest.raises(DiagnosticError, match="has no mapping to order ranks by"):
        RankLayout.of_plan(make_plan(pp=2, dp=4), "mapping")

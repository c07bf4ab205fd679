"""Which stage and replica a process runs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratrain.ratrain_ir.diagnostics import DiagnosticError
from ratrain.ratrain_ir.frontend.rank_mapping import RankMapping
from ratrain.ratrain_ir.topology import grid
from ratrain.targets.runtime.ranks.layout import Layout
from tests.end_to_end.tiny_runs import make_plan


@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from(["pp-first", "dp-first"]))
def test_every_process_has_its_place(stages: int, replicas: int, order: Any) -> None:
    layout = Layout(grid(stages, replicas), order)
    places = [layout.place(process) for process in range(layout.size)]
    assert sorted(places) == [(s, r) for s in range(stages) for r in range(replicas)]
    assert [layout.process(*place) for place in places] == list(range(layout.size))


def test_rank_order_says_what_is_next_to_each_other() -> None:
    assert [Layout(grid(3, 2), "pp-first").place(i) for i in range(3)] == [(0, 0), (1, 0), (2, 0)]
    assert [Layout(grid(3, 2), "dp-first").place(i) for i in range(3)] == [(0, 0), (0, 1), (1, 0)]
    tiled = Layout.of_plan(make_plan(pp=2, dp=4, mapping=RankMapping.parse("chip 2x2")), "mapping")
    assert [tiled.place(i) for i in range(5)] == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2)]
    assert [tiled.process(*tiled.place(i)) for i in range(8)] == list(range(8))
    with pytest.raises(DiagnosticError, match="has no mapping to order ranks by"):
        Layout.of_plan(make_plan(pp=2, dp=4), "mapping")

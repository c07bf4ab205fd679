"""The wait graph against networkx: who waits for ever, the circle that is named, and when events end."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain.ratrain_ir.analysis import wait_graph
from ratrain.ratrain_ir.analysis.wait_graph import WaitGraph, all_behind, circle_of, edge_ends
from ratrain.ratrain_ir.support.loops import Allowance

EDGES = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=14)


@settings(max_examples=100)
@given(EDGES)
def test_circles_and_what_waits_are_found_by_brute_force_too(edges: list[tuple[int, int]]) -> None:
    waits: dict[int, list[int]] = {node: [] for edge in edges for node in edge}
    for node, other in edges:
        waits[node].append(other)
    behind = {node: {other for other in waits if other != node and reaches(waits, other, node)} for node in waits}
    assert {node: all_behind(waits, node) for node in waits} == behind
    circle = circle_of(waits)
    assert bool(circle) == any(reaches(waits, node, node) for node in waits)
    assert all(after in waits[node] for node, after in zip(circle, [*circle[1:], *circle[:1]], strict=True))


def reaches(waits: dict[int, list[int]], start: int, end: int) -> bool:
    """Tell whether a way of one wait or more leads from a node to another."""
    seen: set[int] = set()
    ahead = list(waits[start])
    while ahead:
        node = ahead.pop()
        if node not in seen:
            seen.add(node)
            ahead += waits[node]
    return end in seen


@settings(max_examples=100)
@given(st.integers(1, 8), EDGES, st.integers(0, 3))
def test_events_that_are_one_wait_for_what_each_waits_for(
    events: int, edges: list[tuple[int, int]], pairs: int
) -> None:
    edges = [(source % events, target % events) for source, target in edges]
    ones = {2 * pair + 1: 2 * pair for pair in range(pairs) if 2 * pair + 1 < events}
    graph = WaitGraph(events)
    graph.add_waits(*edge_ends(edges))
    graph.merge(np.array(list(ones), np.int64), np.array(list(ones.values()), np.int64))
    joined = nx.DiGraph([(ones.get(source, source), ones.get(target, target)) for source, target in edges])
    joined.add_nodes_from(range(events))
    circles = {node for node in joined if any(nx.has_path(joined, after, node) for after in joined.successors(node))}
    late = circles.union(*(nx.descendants(joined, node) for node in circles))
    assert graph.never().tolist() == [ones.get(event, event) in late for event in range(events)]
    circle = graph.circle()
    assert bool(circle) == bool(circles)
    for event, awaited in zip(circle, [*circle[1:], *circle[:1]], strict=True):
        assert joined.has_edge(awaited, event)


@settings(max_examples=50)
@given(st.lists(st.floats(0, 10), min_size=1, max_size=8), EDGES)
@pytest.mark.parametrize("edges_in_python", [1 << 40, 0])
def test_an_event_ends_as_the_longest_way_to_it(
    edges_in_python: int, seconds: list[float], edges: list[tuple[int, int]]
) -> None:
    count = len(seconds)
    edges = [(source % count, target % count) for source, target in edges]
    graph = WaitGraph(count)
    graph.add_waits(*edge_ends(edges))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wait_graph, "ALLOWANCE", Allowance(edges_in_python))
        ends = graph.ends(seconds)
    plain = nx.DiGraph(edges)
    plain.add_nodes_from(range(count))
    if not nx.is_directed_acyclic_graph(plain):
        assert ends is None
        return
    expected: dict[int, float] = {}
    for node in nx.topological_sort(plain):
        expected[node] = max((expected[before] for before in plain.predecessors(node)), default=0.0) + seconds[node]
    assert ends == [expected[node] for node in range(count)]

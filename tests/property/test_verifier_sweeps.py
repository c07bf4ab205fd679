"""What the verifier finds in sweeps over numbers, and of alike ops at once, against brute force and against each op alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain.passes.manager import PassManager
from ratrain.ratrain_ir.analysis import columns, wait_graph
from ratrain.ratrain_ir.analysis.lifetime import lifetimes
from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrain_ir.config.types import Dtype, Home, StateKind, aligned, tensor_type
from ratrain.ratrain_ir.lowering import lower
from ratrain.ratrain_ir.model.blocks import block
from ratrain.ratrain_ir.support.diagnostics import Diagnostics
from ratrain.ratrain_ir.support.loops import Allowance
from ratrain.ratrain_ir.testing.fake_target import FakeTarget
from ratrain.ratrain_ir.testing.strategies import cases
from ratrain.ratrain_ir.verifier import memory_sweep, verify
from ratrain.ratrain_ir.verifier.memory import check_no_shared_byte
from ratrain.ratrain_ir.verifier.reporter import Reporter

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module, Stage

SMALL = {"max_layers": 3, "max_stages": 2, "max_micro_batches": 3}
PLAIN, COMPILED = 1 << 40, 0


@st.composite
def moved_bytes(draw: st.DrawFn) -> Module:
    """An allocated module of which some tensors have the addresses of others."""
    module = PassManager(FakeTarget()).run(draw(cases(**SMALL)).module(), "insert-release,allocate-ddr")
    for stage in module.stages:
        tensors = list(stage.tensors.values())
        for _ in range(draw(st.integers(0, 2))):
            one, other = (draw(st.sampled_from(tensors)) for _ in range(2))
            one.offset = other.offset
    return module


def pairs_that_share(stage: Stage) -> set[frozenset[str]]:
    """By brute force: of tensors that are live at the same op, those that have a byte in common."""
    lives = lifetimes(stage).intervals
    found = set()
    for one, spans in lives.items():
        for other, others in lives.items():
            together = any(a < d and c < b for a, b in spans for c, d in others)
            if one is not other and together and one.offset < end(other) and other.offset < end(one):
                found.add(frozenset({one.name, other.name}))
    return found


def end(tensor) -> int:
    return tensor.offset + aligned(tensor.type.nbytes)


def reports(module: Module, stage: Stage) -> list[str]:
    found = Diagnostics()
    report = Reporter(module, found)
    check_no_shared_byte(stage, report.columns(stage), report)
    return [item.render() for item in found.items]


@settings(max_examples=25)
@given(moved_bytes())
def test_shared_bytes_are_found_exactly_where_brute_force_finds_some(module):
    for stage in module.stages:
        shared = pairs_that_share(stage)
        found = reports(module, stage)
        assert bool(found) == bool(shared)
        for text in found:
            assert any(all(f"%{name} " in text for name in pair) for pair in shared), text


@settings(max_examples=10)
@given(moved_bytes())
def test_the_compiled_sweep_of_bytes_finds_what_the_plain_one_finds(module):
    for stage in module.stages:
        found = []
        for accesses in (PLAIN, COMPILED):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(memory_sweep, "ALLOWANCE", Allowance(accesses))
                found.append(reports(module, stage))
        assert found[0] == found[1]


@settings(max_examples=50)
@given(st.integers(1, 8), st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=14))
def test_events_are_stuck_exactly_behind_cycles(events, edges):
    edges = [(source % events, target % events) for source, target in edges]
    graph = nx.DiGraph(edges)
    graph.add_nodes_from(range(events))
    cycles = {node for node in graph if any(nx.has_path(graph, after, node) for after in graph.successors(node))}
    expected = [any(nx.has_path(graph, node, event) for node in cycles) for event in range(events)]
    sources, targets = (np.array([edge[side] for edge in edges], np.int64) for side in (0, 1))
    for accesses in (PLAIN, COMPILED):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(wait_graph, "ALLOWANCE", Allowance(accesses))
            assert wait_graph.stuck_events(events, sources, targets).tolist() == expected


def findings(module: Module) -> list[str]:
    found = Diagnostics()
    verify(module, found, FakeTarget())
    return [item.render() for item in found.items]


OTHERS = {
    "type": tensor_type(Dtype.I32, (7,)),
    "kind": StateKind.MOMENT,
    "home": Home.HOST,
    "name": "s.mlp.0.m2.other",
    "micro_batch": 3,
    "slice": 0,
    "block": block("attention", 7),
    "peer": 5,
}
"""What is right nowhere in the module below."""


@pytest.mark.parametrize("changed", OTHERS)
def test_alike_ops_are_judged_as_each_alone(changed):
    """One thing about an op or a tensor of the last micro-batch is another: what is wrong is wrong there, however many ops were like it."""
    model = ModelConfig("toy", "llama", 8, 4, 2, 1, 1, 4, 4, 1e-5)
    module = lower(model, Plan(2, 1, (1,), 1, 3, 2, zero=0))
    PassManager(FakeTarget()).run(module, "place-1f1b,insert-release,legalise")
    assert not findings(module)
    ops = [op for stage in module.stages for op in stage.ops if getattr(op, "micro_batch", None) == 2]
    tensors = {tensor: None for op in ops for tensor in op.operands if tensor.name.find(".m2") > 0}
    for subject in tensors if hasattr(next(iter(tensors)), changed) else [op for op in ops if hasattr(op, changed)]:
        before = getattr(subject, changed)
        setattr(subject, changed, OTHERS[changed])
        together = findings(module)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(columns, "_Keys", lambda _: id)  # each op is of a kind of its own
            assert findings(module) == together
        assert together or (changed == "name" and subject.kind is not StateKind.SAVED)
        setattr(subject, changed, before)

"""The fast analyses of dependence and progress against the plain networkx graph, over two unrolled steps."""

from __future__ import annotations

from itertools import islice, pairwise
from typing import NamedTuple

import networkx as nx
import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from ratrain.passes.manager import PassManager
from ratrain.ratrain_ir.analysis import dependence_sweep
from ratrain.ratrain_ir.analysis.dependence import ops_as_numbers
from ratrain.ratrain_ir.analysis.progress import blocking_cycle
from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrain_ir.lowering import lower
from ratrain.ratrain_ir.module import Level, Module, Stage
from ratrain.ratrain_ir.ops.base import ENGINES, Engine, Op
from ratrain.ratrain_ir.ops.collectives import is_blocking
from ratrain.ratrain_ir.ops.compute import Forward, Release
from ratrain.ratrain_ir.ops.messages import Recv, Send
from ratrain.ratrain_ir.support.diagnostics import Diagnostics
from ratrain.ratrain_ir.support.loops import Allowance
from ratrain.ratrain_ir.testing.fake_target import FakeTarget
from ratrain.ratrain_ir.testing.strategies import cases, for_plan, pipelines, targets
from ratrain.ratrain_ir.verifier.memory import check_memory
from ratrain.ratrain_ir.verifier.reporter import Reporter
from tests.ratrain_ir.analysis.graph import (
    BLOCKING,
    critical_path,
    dependence_graph,
    finish_times,
    module_graph,
    op_at,
)

PASSES = (
    ("place-1f1b", {}),
    ("place-zb-h1", {"delay": ("0", "1", "9")}),
    ("recompute", {"policy": ("full", "attention", "mlp")}),
    ("bucket-grad-sync", {"bytes": ("1B", "1KiB"), "blocking": ("true",)}),
    ("insert-prefetch", {"blocking": ("true",)}),
    ("insert-release", {}),
    ("legalise", {}),
    ("allocate-ddr", {}),
)
SMALL = {"max_layers": 4, "max_stages": 3, "max_micro_batches": 3}


@st.composite
def compiled(draw, **bounds: int) -> Module:
    case = draw(cases(**bounds))
    text = for_plan(draw(pipelines(PASSES)), case.plan)
    return PassManager(draw(targets())).run(case.module(), text)


class Wait(NamedTuple):
    """An op at list position `position`, of this step or the one before, must have completed."""

    engine: Engine
    position: int
    previous_step: bool


def stage_waits(stage: Stage) -> list[tuple[Wait, ...]]:
    """What each op of a stage waits for."""
    count = len(stage.ops)
    kept, needed = ops_as_numbers(stage).reduced_waits()
    waits = iter([Wait(stage.ops[place % count].engine, place % count, place < count) for place in needed])
    return [tuple(islice(waits, number)) for number in kept]


def fast_graph(stage: Stage, waits=None) -> nx.DiGraph:
    """What the analysis says, as a graph of the two steps: engine order and the given waits."""
    graph = nx.DiGraph()
    waits = stage_waits(stage) if waits is None else waits
    last = {}
    for step in (0, 1):
        for position, op in enumerate(stage.ops):
            if type(op) is Release:
                continue
            node = (step, position)
            graph.add_node(node)
            if op.engine in last:
                graph.add_edge(last[op.engine], node)
            last[op.engine] = node
            for wait in waits[position]:
                if step >= wait.previous_step:
                    graph.add_edge((step - wait.previous_step, wait.position), node)
    return graph


def closure(graph: nx.DiGraph) -> set:
    return set(nx.transitive_closure_dag(graph).edges)


@settings(max_examples=25)
@given(compiled(**SMALL))
def test_the_waits_and_the_engine_order_say_what_the_plain_graph_says(module):
    for stage in module.stages:
        plain, fast = closure(dependence_graph(stage)), closure(fast_graph(stage))
        assert fast == plain, f"lacks {sorted(plain - fast)[:3]}, has too many {sorted(fast - plain)[:3]}"


@settings(max_examples=25)
@given(compiled(**SMALL))
def test_no_wait_can_be_dropped(module):
    for stage in module.stages:
        waits = stage_waits(stage)
        graph = fast_graph(stage)
        for position, of_op in enumerate(waits):
            for wait in of_op:
                # dropping the edge in the second step changes the closure exactly if nothing else leads there
                source, target = (1 - wait.previous_step, wait.position), (1, position)
                assert stage.ops[wait.position].engine is wait.engine is not stage.ops[position].engine
                graph.remove_edge(source, target)
                assert not nx.has_path(graph, source, target), f"the wait of op {position} for {wait} is implied"
                graph.add_edge(source, target)


@settings(max_examples=10)
@given(compiled(**SMALL))
def test_the_compiled_sweep_finds_what_the_plain_one_finds(module):
    for stage in module.stages:
        found = []
        for accesses in (0, 1 << 40):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(dependence_sweep, "ALLOWANCE", Allowance(accesses, accesses))
                found.append(stage_waits(stage))
        assert found[0] == found[1]


@settings(max_examples=15)
@given(compiled(**SMALL))
def test_an_edge_of_the_plain_graph_gives_its_reason(module):
    for stage in module.stages:
        graph = dependence_graph(stage)
        for before, after, reason in graph.edges(data="reason"):
            assert before < after
            first, second = (stage.ops[position] for _, position in (before, after))
            shared = [t.name for t in first.operands if t in second.operands]
            if reason == BLOCKING:
                assert is_blocking(first) != is_blocking(second)
                assert Engine.COMPUTE in (first.engine, second.engine)
            else:
                assert (
                    reason == "engine order"
                    or any(f"%{name}" in reason for name in shared)
                    or " takes bytes of " in reason
                )


def agree(module: Module, *, rendezvous: bool) -> bool:
    """Whether the module hangs; the analysis and the plain graph must agree on it, and the cycle must be one."""
    graph = module_graph(module, rendezvous=rendezvous)
    cycle = blocking_cycle(module, rendezvous=rendezvous)
    assert (cycle is None) == nx.is_directed_acyclic_graph(graph)
    if cycle is not None:
        name = {member: node for node, members in graph.nodes(data="members") for member in members}
        nodes = [name[event.stage, event.step, event.position] for event in cycle]
        assert len(set(nodes)) == len(nodes)
        for waiting, awaited in zip(nodes, [*nodes[1:], nodes[0]], strict=True):
            assert nx.has_path(graph, awaited, waiting), "the cycle names an op that does not wait for the next"
    return cycle is not None


@settings(max_examples=25)
@given(compiled(**SMALL))
def test_what_the_passes_make_ends_in_both_send_modes(module):
    for rendezvous in (False, True):
        assert not agree(module, rendezvous=rendezvous)


def keeps_bytes_apart(module: Module) -> bool:
    """Whether no two live tensors share a byte: the verifier asks this before it asks for progress."""
    found = Diagnostics()
    check_memory(module, Reporter(module, found), module.stages)
    return not found.errors


MOVES = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 11), st.integers(0, 11)), min_size=1, max_size=3)


@settings(max_examples=20)
@given(
    cases(min_stages=3, max_stages=3, max_micro_batches=3),
    st.sampled_from(("place-schedule", "allocate-ddr")),
    MOVES,
)
def test_moved_messages_hang_exactly_if_the_plain_graph_has_a_cycle(case, pipeline, moves):
    """Sends and receives are moved among the messages of their stage, matched still: many such programs hang."""
    module = PassManager(FakeTarget()).run(case.module(), pipeline)
    for of_stage, of_message, to in moves:
        ops = module.stages[of_stage].ops
        messages = [place for place, op in enumerate(ops) if isinstance(op, Send | Recv)]
        ops.insert(messages[to % len(messages)], ops.pop(messages[of_message % len(messages)]))
    assume(module.level is not Level.ALLOCATED or keeps_bytes_apart(module))
    hangs = [agree(module, rendezvous=rendezvous) for rendezvous in (False, True)]
    event(f"hangs with buffered, rendezvous sends: {hangs}")
    assert hangs[1] or not hangs[0], "a rendezvous is a buffered message that also waits for its receive"


def one_forward_one_backward() -> tuple[Module, list[Op], list[Op]]:
    """Two stages, two micro-batches, and the op lists of both stages."""
    model = ModelConfig("toy", "llama", 8, 4, 2, 1, 1, 4, 4, 1e-5)
    module = lower(model, Plan(2, 1, (1,), 1, 2, 2, zero=0))
    PassManager(FakeTarget()).run(module, "place-1f1b")
    return module, *(stage.ops for stage in module.stages)


def move(ops: list[Op], op: str, *, before: str) -> None:
    """Move the one op of that text to stand before another."""
    (moved,) = [candidate for candidate in ops if repr(candidate) == op]
    ops.remove(moved)
    ops.insert(next(place for place, candidate in enumerate(ops) if repr(candidate) == before), moved)


def hangs(module: Module) -> tuple[bool, bool]:
    return agree(module, rendezvous=False), agree(module, rendezvous=True)


def test_a_sound_program_does_not_hang():
    module, _, _ = one_forward_one_backward()
    assert hangs(module) == (False, False)


def test_a_gradient_awaited_before_its_activation_is_sent_hangs():
    module, first, second = one_forward_one_backward()
    # the receive engine of stage 1 is blocked by m1, which stage 0 computes only ...
    move(second, "recv activation m1 @0", before="recv activation m0 @0")
    # ... after m0, whose send it gets rid of first: the channel's order is broken, so both are swapped
    move(first, "send activation m1 @1", before="send activation m0 @1")
    assert hangs(module) == (False, False)
    (_, gradient) = (op for op in first if repr(op).startswith("recv gradient"))
    first.remove(gradient)
    first.insert(0, gradient)
    assert hangs(module) == (False, False), "it waits on an engine of its own"
    # now a forward of stage 0 writes over the gradient's bytes: it cannot start before the gradient has been used
    forward = next(op for op in first if type(op) is Forward)
    forward.updates = gradient.writes
    assert hangs(module) == (True, True)


def test_two_sends_that_each_wait_for_the_other_to_receive_hang_only_without_buffers():
    """The bytes of what is sent last are what is received next, on both stages: the textbook case."""
    module, first, second = one_forward_one_backward()
    move(first, "recv gradient m0 @1", before="backward attention.0 m0")
    move(first, "send activation m1 @1", before="recv gradient m0 @1")
    for ops, send, recv in (
        (first, "send activation m1 @1", "recv gradient m0 @1"),
        (second, "send gradient m0 @0", "recv activation m1 @0"),
    ):
        (sent,) = (op for op in ops if repr(op) == send)
        (received,) = (op for op in ops if repr(op) == recv)
        received.updates = sent.reads  # as if both had the same bytes
    assert hangs(module) == (False, True)


def test_a_collective_waits_for_all_its_members():
    """Stage 0 enters the flags' collective with what stage 1 sends; if stage 1 sends only after it, both wait for ever."""
    module, first, second = one_forward_one_backward()
    assert any(repr(op) == "all_reduce_scalar flags all" for op in first)
    collective = next(op for op in second if repr(op) == "all_reduce_scalar flags all")
    (send,) = (op for op in second if repr(op) == "send gradient m1 @0")
    second.remove(send)
    second.insert(second.index(collective) + 1, send)
    assert hangs(module) == (False, False), "it may send before: on another engine"
    send.reads += collective.writes
    assert hangs(module) == (True, True)


@settings(max_examples=20)
@given(
    cases(), st.sampled_from((*("recompute{policy=" + policy + "}" for policy in ("full", "mlp")), "insert-release"))
)
def test_the_lists_agree_with_one_order_of_the_whole_program(case, pipeline):
    """Even stages that run strictly in list order end, without buffers: so any reuse of bytes in list order is safe."""
    module = PassManager(FakeTarget()).run(case.module(), f"place-schedule,{pipeline}")
    graph = module_graph(module, rendezvous=True)
    name = {member: node for node, members in graph.nodes(data="members") for member in members}
    for stage in module.stages:
        order = [name[stage.index, 0, p] for p, op in enumerate(stage.ops) if type(op) is not Release]
        graph.add_edges_from(pairwise(order))
    assert nx.is_directed_acyclic_graph(graph)


@settings(max_examples=15)
@given(cases(**SMALL))
def test_the_critical_path_is_the_longest_chain(case):
    module = PassManager(FakeTarget()).run(case.module(), "place-schedule")
    target = FakeTarget()
    graph = module_graph(module, rendezvous=False)

    def seconds(node):
        return target.op_seconds(module, module.stages[node[0]], op_at(module, node))

    total, path = critical_path(graph, seconds)
    assert all(graph.has_edge(a, b) for a, b in pairwise(path))
    assert total == pytest.approx(sum(map(seconds, path)), rel=1e-12)
    weighted = nx.DiGraph()
    for a, b in graph.edges:
        weighted.add_edge(a, b, weight=seconds(b))
    weighted.add_edges_from(("start", node, {"weight": seconds(node)}) for node in graph if not graph.in_degree(node))
    assert total == pytest.approx(nx.dag_longest_path_length(weighted), rel=1e-12)
    assert max(finish_times(graph, seconds).values()) == total


def test_a_graph_with_a_cycle_has_no_critical_path():
    with pytest.raises(ValueError, match="does not end"):
        critical_path(nx.DiGraph([(0, 1), (1, 0)]), lambda _node: 1.0)
    assert critical_path(nx.DiGraph(), lambda _node: 1.0) == (0.0, [])


def test_the_fast_analysis_knows_every_engine():
    named = {"compute", "send", "recv", "collective", "tensor", "store", "fetch", "host"}
    assert {engine.value for engine in ENGINES} == named

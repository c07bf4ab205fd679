"""The fast analyses of dependence and progress against the plain networkx graph, over two unrolled steps."""

from __future__ import annotations

import networkx as nx
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from passes.manager import PassManager
from ratrain_ir.analysis.dependence import stage_waits
from ratrain_ir.analysis.progress import blocking_cycle
from ratrain_ir.graph import critical_path, dependence_graph, finish_times, module_graph, op_at
from ratrain_ir.module import Module, Stage
from ratrain_ir.ops import ENGINES, Recv, Release, Send
from ratrain_ir.testing.fake_target import FakeTarget
from ratrain_ir.testing.strategies import cases, pipelines, targets

PASSES = (
    ("place-1f1b", {}),
    ("recompute", {"policy": ("full", "attention", "mlp")}),
    ("bucket-grad-sync", {"bytes": ("1B", "1KiB")}),
    ("insert-prefetch", {}),
    ("insert-release", {}),
    ("legalise", {}),
    ("allocate-ddr", {}),
)
SMALL = {"max_layers": 2, "max_stages": 3, "max_micro_batches": 3}


@st.composite
def compiled(draw, **bounds: int) -> Module:
    module = draw(cases(**bounds)).module()
    text = draw(pipelines(PASSES))
    return PassManager(draw(targets())).run(module, text)


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


@settings(max_examples=15)
@given(compiled(**SMALL))
def test_an_edge_of_the_plain_graph_gives_its_reason(module):
    for stage in module.stages:
        graph = dependence_graph(stage)
        for before, after, reason in graph.edges(data="reason"):
            assert before < after
            first, second = (stage.ops[position] for _, position in (before, after))
            shared = [t.name for t in first.operands if t in second.operands]
            assert reason == "engine order" or any(f"%{name}" in reason for name in shared) or " takes bytes of " in reason


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


@settings(max_examples=60)
@given(compiled(max_layers=3, max_stages=3, max_micro_batches=3), st.data())
def test_shuffled_messages_hang_exactly_if_the_plain_graph_has_a_cycle(module, data):
    """Sends and receives are moved to any other place of their stage, pairwise matched still: many such programs hang."""
    assume(len(module.stages) > 1)
    for _ in range(data.draw(st.integers(1, 3))):
        stage = data.draw(st.sampled_from(module.stages))
        messages = [place for place, op in enumerate(stage.ops) if isinstance(op, Send | Recv)]
        place = data.draw(st.sampled_from(messages))
        stage.ops.insert(data.draw(st.integers(0, len(stage.ops) - 1)), stage.ops.pop(place))
    for rendezvous in (False, True):
        agree(module, rendezvous=rendezvous)


def two_stages(*, forward_first: tuple[bool, bool]) -> Module:
    """Stage 0 sends and receives in one order or the other, and so does stage 1; two collectives stand between."""
    from ratrain_ir.frontend.lowering import lower
    from ratrain_ir.frontend.model_config import ModelConfig
    from ratrain_ir.frontend.plan import Plan

    model = ModelConfig("toy", "llama", 8, 4, 2, 1, 1, 4, 4, 1e-5)
    module = lower(model, Plan(2, 1, (1,), 1, 2, 2, zero=0))
    PassManager(FakeTarget()).run(module, "place-1f1b")
    for stage, keep in zip(module.stages, forward_first, strict=True):
        if not keep:
            messages = [place for place, op in enumerate(stage.ops) if type(op) in (Send, Recv)]
            first, last = messages[0], messages[-1]
            stage.ops[first], stage.ops[last] = stage.ops[last], stage.ops[first]
    return module


@pytest.mark.parametrize("rendezvous", [False, True])
def test_a_program_that_hangs_is_found(rendezvous):
    assert not agree(two_stages(forward_first=(True, True)), rendezvous=rendezvous)
    assert agree(two_stages(forward_first=(False, True)), rendezvous=rendezvous)


def test_some_programs_hang_with_rendezvous_sends_only():
    """Stage 0 sends m1 before it takes the gradient of m0; stage 1 takes m1 only after that gradient is sent and gone."""
    module = two_stages(forward_first=(True, True))
    first, second = module.stages
    # both stages now send before they receive: with buffers fine, with rendezvous each waits for the other's receive
    sends = [place for place, op in enumerate(first.ops) if type(op) is Send]
    recvs = [place for place, op in enumerate(second.ops) if type(op) is Recv]
    assert len(sends) == len(recvs) == 2
    recv = second.ops.pop(recvs[1])
    gradient = next(place for place, op in enumerate(second.ops) if type(op) is Send)
    second.ops.insert(gradient + 1, recv)
    blocked = {mode: agree(module, rendezvous=mode) for mode in (False, True)}
    assert not blocked[False]


@settings(max_examples=15)
@given(cases(**SMALL))
def test_the_critical_path_is_the_longest_chain(case):
    module = PassManager(FakeTarget()).run(case.module(), "place-1f1b")
    target = FakeTarget()
    graph = module_graph(module, rendezvous=False)

    def seconds(node):
        return target.op_seconds(module, module.stages[node[0]], op_at(module, node))

    total, path = critical_path(graph, seconds)
    assert all(graph.has_edge(a, b) for a, b in zip(path, path[1:], strict=False))
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
    assert {engine.value for engine in ENGINES} == {"compute", "send", "recv", "collective", "host"}

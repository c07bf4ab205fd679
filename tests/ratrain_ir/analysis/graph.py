"""The schedule as a networkx graph: dependences within a stage, the whole module, cycles and critical paths.

This is the plain view, for people, for reports and as the oracle of the fast analyses: an edge for every pair of ops that
must not swap, nothing left out, nothing clever. It is quadratic in the accesses to a byte; hot loops use
`ratrain.ratrain_ir.analysis.dependence` instead. networkx is imported when a graph is made.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from itertools import combinations, pairwise
from typing import TYPE_CHECKING, TypeVar

from attrs import frozen

from ratrain.ratrain_ir.analysis.progress import hop_of, meeting_stages
from ratrain.ratrain_ir.ops.base import Direction, Engine
from ratrain.ratrain_ir.ops.collectives import is_blocking
from ratrain.ratrain_ir.ops.compute import Release
from ratrain.ratrain_ir.ops.kinds import piece_of
from ratrain.ratrain_ir.ops.messages import MessageOp, PeerOffload, PeerReload, meets
from ratrain.ratrain_ir.ops.tensor import Tensor

if TYPE_CHECKING:
    import networkx as nx

    from ratrain.ratrain_ir.module import Module, Stage
    from ratrain.ratrain_ir.ops.base import Op
    from ratrain.ratrain_ir.topology import Hop

STEPS = 2
"""Consecutive steps that are unrolled, so that what crosses the step's end has edges too."""

BLOCKING = "blocking"
"""The reason of an edge between a compute op and a collective that compute waits for."""

StageNode = tuple[int, int]
"""(step, position): one op of one stage."""

ModuleNode = tuple[int, int, int]
"""(stage, step, position)."""

Node = TypeVar("Node", bound=Hashable)


@frozen
class _Access:
    node: StageNode
    tensor: Tensor
    writes: bool


def dependence_graph(stage: Stage) -> nx.DiGraph[StageNode]:
    """Which ops of a stage must complete before which others start, over two consecutive steps.

    Nodes are (step, position) of every op that an engine runs. There is an edge from an op to every later one that touches
    one of its bytes, where one of the two writes it, and to the next op of its engine; from a compute op to every later blocking
    collective, and from there to every later compute op. Edges carry `reason`.
    """
    import networkx as nx

    graph: nx.DiGraph[StageNode] = nx.DiGraph()
    for step in range(STEPS):
        graph.add_nodes_from((step, position) for position, op in enumerate(stage.ops) if type(op) is not Release)
    for accesses in _accesses_of_shared_bytes(stage):
        for earlier, later in combinations(sorted(accesses, key=lambda access: access.node), 2):
            if earlier.node != later.node and (earlier.writes or later.writes):
                graph.add_edge(earlier.node, later.node, reason=_reason(earlier, later))
    for nodes in _engine_orders(stage):
        graph.add_edges_from(pairwise(nodes), reason="engine order")
    graph.add_edges_from(_blocked_pairs(stage), reason=BLOCKING)
    graph.add_edges_from(_offloaded_pairs(stage), reason="reloaded after it was offloaded")
    return graph


def module_graph(module: Module, *, rendezvous: bool) -> nx.DiGraph[ModuleNode]:
    """All stages of a module over two steps, with messages and collectives; the program ends exactly if it has no cycle.

    A collective is one node for all its members, and so is a message with `rendezvous` sends, and any message of
    remote buffers; with buffered sends a receive waits for its send. A node is named after its first member, (stage, step, position), and has all of them in `members`.
    """
    import networkx as nx

    name: dict[ModuleNode, ModuleNode] = {}
    graph: nx.DiGraph[ModuleNode] = nx.DiGraph()
    meetings = list(_collectives(module))
    messages = list(_messages(module))
    together = [ends for ends, meet in messages if meet or rendezvous]
    for meeting in meetings + together:
        name.update(dict.fromkeys(meeting, meeting[0]))
        graph.add_node(meeting[0], members=tuple(meeting))
    for stage in module.stages:
        local = dependence_graph(stage)
        for step, position in local.nodes:
            node = (stage.index, step, position)
            if node not in name:
                name[node] = node
                graph.add_node(node, members=(node,))
        for (step, position), (later_step, later), reason in local.edges(data="reason"):
            source, target = name[stage.index, step, position], name[stage.index, later_step, later]
            graph.add_edge(source, target, reason=reason)
    for (send, recv), meet in messages:
        if not (meet or rendezvous):
            graph.add_edge(name[send], name[recv], reason="message")
    return graph


def op_at(module: Module, node: ModuleNode) -> Op:
    """The op a node of a module's graph stands for (its first member's)."""
    stage, _, position = node
    return module.stages[stage].ops[position]


def critical_path(graph: nx.DiGraph[Node], seconds: Callable[[Node], float]) -> tuple[float, list[Node]]:
    """The longest chain of ops, each waiting for the one before: its seconds and its nodes; (0, []) where there is none.

    Raises ValueError where the graph has a cycle.
    """
    finish = finish_times(graph, seconds)
    if not finish:
        return 0.0, []
    node = max(finish, key=finish.__getitem__)
    total = finish[node]
    path = [node]
    while before := list(graph.predecessors(path[-1])):
        path.append(max(before, key=finish.__getitem__))
    return total, path[::-1]


def finish_times(graph: nx.DiGraph[Node], seconds: Callable[[Node], float]) -> dict[Node, float]:
    """When each op ends if it starts as soon as it may and takes `seconds`.

    Raises ValueError where the graph has a cycle.
    """
    import networkx as nx

    if not nx.is_directed_acyclic_graph(graph):
        raise ValueError("a program that does not end has no finish times")
    finish: dict[Node, float] = {}
    for node in nx.topological_sort(graph):
        start = max((finish[before] for before in graph.predecessors(node)), default=0.0)
        finish[node] = start + seconds(node)
    return finish


def _accesses_of_shared_bytes(stage: Stage) -> Iterator[list[_Access]]:
    """The accesses to each tensor, and to each pair of tensors that have a byte in common."""
    by_tensor: dict[Tensor, list[_Access]] = defaultdict(list)
    for step in range(STEPS):
        for position, op in enumerate(stage.ops):
            if type(op) is Release:
                continue
            written = op.writes + op.updates + op.scratch
            for tensor in dict.fromkeys(op.operands):
                by_tensor[tensor].append(_Access((step, position), tensor, tensor in written))
    yield from by_tensor.values()
    for one, other in combinations(by_tensor, 2):
        if _share_a_byte(one, other):
            yield by_tensor[one] + by_tensor[other]


def _share_a_byte(one: Tensor, other: Tensor) -> bool:
    if one.home is not other.home or one.offset is None or other.offset is None:
        return False
    return one.offset < other.offset + other.type.nbytes and other.offset < one.offset + one.type.nbytes


def _reason(earlier: _Access, later: _Access) -> str:
    if earlier.tensor is not later.tensor:
        return f"%{later.tensor.name} takes bytes of %{earlier.tensor.name}"
    first, second = ("write" if access.writes else "read" for access in (earlier, later))
    return f"{second} after {first} of %{later.tensor.name}"


def _engine_orders(stage: Stage) -> list[list[StageNode]]:
    orders: dict[object, list[StageNode]] = defaultdict(list)
    for step in range(STEPS):
        for position, op in enumerate(stage.ops):
            if type(op) is not Release:
                orders[op.engine].append((step, position))
    return list(orders.values())


def _blocked_pairs(stage: Stage) -> Iterator[tuple[StageNode, StageNode]]:
    """Blocking collectives and compute ops: every pair, the earlier first."""
    nodes = [((step, position), op) for step in range(STEPS) for position, op in enumerate(stage.ops)]
    compute = [node for node, op in nodes if op.engine is Engine.COMPUTE]
    for collective in [node for node, op in nodes if is_blocking(op)]:
        for node in compute:
            yield min(node, collective), max(node, collective)


def _offloaded_pairs(stage: Stage) -> Iterator[tuple[StageNode, StageNode]]:
    """Yield every offload with each reload of the same tensors, the earlier first."""
    nodes = [((step, position), op) for step in range(STEPS) for position, op in enumerate(stage.ops)]
    offloads: dict[object, list[StageNode]] = defaultdict(list)
    for node, op in nodes:
        if isinstance(op, PeerOffload):
            offloads[op.peer, op.block, piece_of(op)].append(node)
        elif isinstance(op, PeerReload):
            yield from ((sent, node) for sent in offloads[op.peer, op.block, piece_of(op)])


def _messages(module: Module) -> Iterator[tuple[list[ModuleNode], bool]]:
    """[send, recv] of every message, and whether these always meet: the k-th receive of a channel takes the k-th message sent."""
    for hop, (sent, received) in _channels(module).items():
        for send, recv in zip(sent, received, strict=True):
            for step in range(STEPS):
                yield [(send[0], step, send[1]), (recv[0], step, recv[1])], meets(hop.channel.payload)


def _channels(module: Module) -> dict[Hop, tuple[list[tuple[int, int]], list[tuple[int, int]]]]:
    """Sends and receives of each channel, as (stage, position), in order."""
    places: dict[Hop, tuple[list[tuple[int, int]], list[tuple[int, int]]]] = {}
    for stage in module.stages:
        for position, op in enumerate(stage.ops):
            if isinstance(op, MessageOp) and (hop := hop_of(op, stage, module.topology)) is not None:
                places.setdefault(hop, ([], []))[op.direction is Direction.IN].append((stage.index, position))
    return places


def _collectives(module: Module) -> Iterator[list[ModuleNode]]:
    """The members of every collective that spans stages: the k-th one of a group is the same on all its stages."""
    meetings: dict[Hashable, list[tuple[int, int]]] = defaultdict(list)
    topology = module.topology
    for stage in module.stages:
        count: dict[Hashable, int] = defaultdict(int)
        for position, op in enumerate(stage.ops):
            group = meeting_stages(op, stage, topology)
            if group:
                meetings[group, count[group]].append((stage.index, position))
                count[group] += 1
    for places in meetings.values():
        for step in range(STEPS):
            yield [(stage, step, position) for stage, position in places]

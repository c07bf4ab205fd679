"""Works of ops on a machine: block ops by their routine, messages and collectives by links, updates by DDR."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from ratrain.ratrain_ir.config.quantised import FORMATS, packed_nbytes
from ratrain.ratrain_ir.config.types import Dtype, StateKind
from ratrain.ratrain_ir.model.expert_blocks import expert_rows
from ratrain.ratrain_ir.model.expert_ranks import balanced_rows, capacity_of, pool_elements, rows_of_rank
from ratrain.ratrain_ir.model.slots import shares_rows
from ratrain.ratrain_ir.ops.base import Engine, Group
from ratrain.ratrain_ir.ops.collectives import (
    TENSOR_OPS,
    AllGather,
    AllReduce,
    AllReduceScalar,
    CombineLoss,
    GatherRows,
    ReduceRows,
    ReduceScatter,
    ReduceSums,
)
from ratrain.ratrain_ir.ops.compute import BLOCK_OPS, LoadInput, Release, ScaleUpdate, Update
from ratrain.ratrain_ir.ops.context_ranks import HEAD_OPS, KEY_OPS, GatherHeads, GatherKeys, ReduceKeys, ReturnHeads
from ratrain.ratrain_ir.ops.expert_ranks import EXPERT_OPS, Combine, Dispatch
from ratrain.ratrain_ir.ops.kinds import LONE_OPS
from ratrain.ratrain_ir.ops.memory import MEMORY_OPS, Fetch
from ratrain.ratrain_ir.ops.messages import MESSAGE_OPS, DonorAccept, DonorReturn, PeerOffload, PeerReload, Recv, Send
from ratrain.ratrain_ir.ops.per_op import PerOp
from ratrain.ratrain_ir.topology import mesh_of
from ratrain.targets.machine.collective_cost import (
    Algorithm,
    all_gathers,
    all_reduces,
    all_to_all,
    all_to_alls,
    cheapest,
    copied_shards,
    neighbours,
    reduce_scatters,
    scalar_all_reduces,
)
from ratrain.targets.machine.cost import (
    copy_work,
    host_work,
    is_of_experts,
    message_work,
    routine_work,
    update_work,
)
from ratrain.targets.machine.measured_kernels import call_sizes, digest
from ratrain.targets.machine.op_table import MEMBERS_MARK, SHAPES_MARK
from ratrain.targets.machine.placement import placement_of
from ratrain.targets.machine.resource_work import ResourceWork
from ratrain.targets.machine.routing import ExpertLoads, expert_loads, rank_loads, sent_rows
from ratrain.targets.machine.shared_gradients import most_shared
from ratrain.targets.machine.slowest_rank import slowest_rank
from ratrain.targets.machine.store_cost import NOTHING_ELSEWHERE, Elsewhere, StreamedBytes, streamed_work, transfer_work
from ratrain.targets.program.instruction import Access
from ratrain.targets.program.routine import Routine, Step, parse_reference

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.ratrain_ir.config.types import TensorType
    from ratrain.ratrain_ir.model.blocks import Block
    from ratrain.ratrain_ir.ops.tensor import Tensor
    from ratrain.targets.machine.link_groups import Link
    from ratrain.targets.machine.machine import Machine
    from ratrain.targets.machine.placement import Members
    from ratrain.targets.machine.routing import Routing
    from ratrain.targets.program.columns import TensorForm
    from ratrain.targets.program.instruction import ProgramTensor

_SCALAR_BYTES = 8
_CHANGED = Access.READ, Access.UPDATE
_CARRIED: PerOp[tuple[Access, ...]] = PerOp(
    "payload",
    {
        **dict.fromkeys(
            (
                LoadInput,
                Recv,
                DonorAccept,
                PeerReload,
                AllGather,
                GatherRows,
                GatherKeys,
                GatherHeads,
                Dispatch,
                Combine,
            ),
            (Access.WRITE,),
        ),
        **dict.fromkeys((Send, PeerOffload, DonorReturn, *MEMORY_OPS, Update, ScaleUpdate), _CHANGED),
        **dict.fromkeys((AllReduce, AllReduceScalar, ReduceRows, ReduceSums, CombineLoss), _CHANGED),
        # the shards it adds to stay where they are; summed keys are rounded behind the exchange
        **dict.fromkeys((ReduceScatter, ReduceKeys, ReturnHeads), (Access.READ,)),
    },
    never=(*BLOCK_OPS, Release),
)
"""Accesses by which an op that calls no routine touches what travels or is loaded."""
_OF_PARTS = frozenset(kind.keyword for kind in (ReduceRows, ReduceSums, CombineLoss))
"""Collectives that also read tensors which do not travel."""
_OF_SUMS = frozenset(kind.keyword for kind in (ReduceRows, ReduceSums, ReduceKeys))
"""Exchanges whose parts arrive whole in memory of the transport, where each rank adds up those of its own run."""
_OF_KEYS = frozenset(kind.keyword for kind in KEY_OPS)
"""Exchanges of keys and values, or of parts of their gradients, between context ranks."""
_OF_HEADS = frozenset(kind.keyword for kind in HEAD_OPS)
"""Exchanges of tokens for heads between context ranks."""
_OF_EXPERTS = frozenset(kind.keyword for kind in EXPERT_OPS)
"""Exchanges of rows between expert ranks."""
_OF_BLOCKS = (StateKind.VIEW, StateKind.GRAD)
"""Kinds of tensors with parameters of a block, or their gradients."""
_PASSES = {Access.READ: 1, Access.WRITE: 1, Access.UPDATE: 2, Access.SCRATCH: 0}
"""Number of times an access moves a tensor to or from DDR."""


@frozen
class TimedOp:
    """Facts that the time of an op depends on, taken from an IR op or an instruction."""

    keyword: str
    group: str
    engine: Engine
    routine: Routine | None
    payload_bytes: int
    """bytes that travel or are loaded: boundary, gradients, gathered views"""
    payload_elements: int
    own_bytes: int
    """bytes of its tensors that it reads and writes; updated tensors count twice"""
    hop: tuple[int, int] | None = None
    """of a message: the stages at its ends, in ascending order"""
    elsewhere: Elsewhere = NOTHING_ELSEWHERE
    """its operands in another memory: stored or fetched, or streamed state"""
    gathered_runs: int = 0
    """of an exchange of keys: the runs that a rank gathers for each of its own"""
    loads: ExpertLoads = ()
    """of a routine with products of experts whose rows are told: these rows"""


def timed_op(
    model: ModelConfig,
    plan: Plan,
    keyword: str,
    group: str,
    engine: Engine,
    routine: Routine | None,
    operands: Iterable[tuple[Tensor | ProgramTensor | TensorForm, Access]],
    ends: tuple[int, int] | None,
    blocks: Iterable[Block],
) -> TimedOp:
    """Return the facts that the time of an op or instruction depends on; if it calls a routine, the routine alone.

    `ends` are the stages at both ends of a message, in any order; `blocks` are the blocks of a collective. `plan` is
    that of the op's slice, if it has one.
    """
    if routine is not None:
        return TimedOp(keyword, "", engine, routine, 0, 0, 0)
    operands = list(operands)
    carries, parts_alone, of_experts = _CARRIED[keyword], keyword in _OF_PARTS, keyword in _OF_EXPERTS
    groups = plan.context_groups if keyword in _OF_KEYS else 1
    nbytes = elements = own = rest = 0
    for tensor, access in operands:
        if tensor.kind is StateKind.SCALAR or (of_experts and not _travels_to_experts(tensor)):
            continue
        if of_experts and (kept := _expected_part(model, plan, tensor.type)) < 1:
            nbytes += round(kept * tensor.type.nbytes) * (access in carries)
            own += round(kept * tensor.type.nbytes) * _PASSES[access]
            continue
        if access in carries and (tensor.kind is StateKind.PARTIAL or not parts_alone):
            nbytes += tensor.type.nbytes
            elements += tensor.type.elements
        elif groups > 1:  # of a rank's own keys, or their gradients, the rows of one group alone
            rest += tensor.type.elements // groups
            own += tensor.type.nbytes // groups
            continue
        else:
            rest += tensor.type.elements
        own += tensor.type.nbytes * _PASSES[access]
    if sums_shared(keyword, group):
        shared = most_shared(model, plan, blocks, group)
        itemsize = nbytes // max(1, elements)
        nbytes, elements = shared.given * itemsize, shared.given
        own = (shared.added + shared.given) * itemsize
    hop = None if ends is None else (min(ends), max(ends))
    elsewhere = Elsewhere.of((tensor.home, tensor.kind, tensor.type) for tensor, _ in operands)
    runs = elements // max(1, rest) if keyword in _OF_KEYS else 0
    return TimedOp(keyword, group, engine, None, nbytes, elements, own, hop, elsewhere, runs)


def under_routing(
    op: TimedOp,
    routing: Routing,
    layer: int,
    model: ModelConfig,
    plan: Plan,
    tensors: Iterable[ProgramTensor | TensorForm],
) -> TimedOp:
    """Return the facts of an op of a layer whose experts get as many rows as a routing says.

    Products of experts take the rows of each. An exchange of rows takes what its busiest rank sends or receives, with
    copies of experts; with a capacity, only the rows that are not dropped. Under a balanced router nothing changes.
    `plan` is that of the op's slice, if it has one.
    """
    shares = routing.of_layer(layer)
    if shares is None:
        return op
    rows, capacity = expert_rows(model, plan), capacity_of(model, plan)
    if op.routine is not None:
        if not any(map(is_of_experts, op.routine.steps)):
            return op
        return evolve(op, loads=expert_loads(shares, plan.ep, rows, capacity))
    if op.keyword not in _OF_EXPERTS:
        return op
    pool, expected = pool_elements(model, plan), balanced_rows(model, plan)
    loads = rank_loads(shares, plan.ep, rows, capacity)
    copies = sum(t.type.nbytes for t in tensors if t.type.shape == (pool,) and t.kind not in _OF_BLOCKS)
    a_row, a_copy = op.payload_bytes / expected, copies * plan.ep / len(shares)
    busiest = max(
        max(
            load.rows_sent * a_row + load.copies_sent * a_copy,
            load.rows_received * a_row + load.copies_received * a_copy,
        )
        for load in loads
    )
    moved = 2 * max(load.copies_sent + load.copies_received for load in loads) * a_copy
    # the busiest rank's rows come, or have come and go back; what it has sent comes back to it
    more = max(load.rows for load in loads) - expected
    if op.keyword == Combine.keyword:
        more += sent_rows(shares, rows, capacity) - expected
    # each of n ranks keeps an n-th of what an exchange of equal parts is priced by
    nbytes = round(busiest * plan.ep / (plan.ep - 1))
    return evolve(op, payload_bytes=nbytes, own_bytes=op.own_bytes + round(moved + more * a_row))


def _travels_to_experts(tensor: Tensor | ProgramTensor | TensorForm) -> bool:
    """Return whether a tensor of an exchange of rows has a line for each of them, or for each token.

    Experts are copied only where routers are not balanced (`under_routing`).
    """
    return tensor.kind not in _OF_BLOCKS and len(tensor.type.shape) > 1


def _expected_part(model: ModelConfig, plan: Plan, type_: TensorType) -> float:
    """Return the part of a tensor's rows that travels if routers are balanced; less than 1 with a capacity alone.

    Above the mean a capacity leaves room for more rows than travel; below it, rows of tokens are dropped.
    """
    rows, expected = type_.shape[0], balanced_rows(model, plan)
    return expected / rows if rows in (rows_of_rank(model, plan), expert_rows(model, plan)) else 1.0


def sums_shared(keyword: str, group: str) -> bool:
    """Return whether an op sums gradients that tensor-parallel or expert ranks share, so that only those move."""
    return keyword == AllReduce.keyword and group in (Group.TENSOR.value, Group.EXPERTS.value)


def op_work(op: TimedOp, plan: Plan, machine: Machine) -> ResourceWork:
    """Return the work of an op; on the compute engine, that of the slowest of all ranks."""
    work = _work_of_a_rank(op, plan, machine)
    if op.elsewhere.nbytes and op.keyword in _STREAMING:
        work = _STREAMING[op.keyword](op, work, machine)
    if op.engine is not Engine.COMPUTE or not machine.rank_jitter:
        return work
    return evolve(work, seconds=work.seconds * slowest_rank(machine.rank_jitter, plan.clusters))


def _work_of_a_rank(op: TimedOp, plan: Plan, machine: Machine) -> ResourceWork:
    modelled = routine_work(op.routine, machine, op.loads) if op.routine is not None else None
    measured = _measured(op, plan, machine, modelled.seconds if modelled is not None else op.own_bytes)
    if measured is not None:
        return ResourceWork(measured)
    return modelled if modelled is not None else _WORKS[op.keyword](op, plan, machine)


def _measured(op: TimedOp, plan: Plan, machine: Machine, size: float) -> float | None:
    """Return the seconds of an op by the machine's table; None where it has no table, or not this op."""
    return machine.table.seconds(op_key(op, plan), size) if machine.cost == "table" else None


def op_key(op: TimedOp, plan: Plan) -> str:
    """Return the key of an op in the table: ops of one key and one size take the same time.

    It is the routine's, or the kind and the number of members.
    """
    if op.routine is not None:
        return routine_key(op.routine)
    if not op.group:
        return op.keyword
    keyword = f"{op.keyword}/{plan.shard_group}" if _copies_shards(op, plan) else op.keyword
    if (bits := _packed_bits(op, plan)) is not None:
        keyword += f"/{bits}-bit"
    if 0 < op.gathered_runs < plan.cp:
        keyword += f"/{op.gathered_runs}-runs"
    return f"{keyword}{MEMBERS_MARK}{mesh_of(plan).group_size(Group(op.group))}"


def _copies_shards(op: TimedOp, plan: Plan) -> bool:
    """Return whether a reduction goes into shards of which several replicas have a copy."""
    return op.keyword == ReduceScatter.keyword and plan.shard_group is not None


def routine_key(routine: Routine) -> str:
    """Return the table's key of a routine: a digest of its kernels, and behind the mark one of shapes and numbers.

    Constants (an epsilon, a denominator), steps that only pad a shard, and on-chip schedules, which a CPU does not
    follow, make no difference.
    """
    steps = [step for step in routine.steps if not _pads(step)]
    kernels = [(step.kernel, sorted(step.operands)) for step in steps]
    shapes = [call_sizes(routine, step) for step in steps]
    return f"{routine.key}:{digest(kernels)}{SHAPES_MARK}{digest(shapes)}"


def _pads(step: Step) -> bool:
    """Return whether a step only clears the padding of a gradient, whose bytes depend on the number of replicas."""
    return all(parse_reference(reference).part.startswith("gap") for reference in step.operands.values())


def message_seconds(nbytes: int, link: Link, machine: Machine) -> float:
    """Return the seconds of a message between stages that has its link to itself."""
    measured = machine.table.seconds(Send.keyword, nbytes) if machine.cost == "table" else None
    return message_work(nbytes, link, 0, machine).seconds if measured is None else measured


def _message_work(op: TimedOp, plan: Plan, machine: Machine) -> ResourceWork:
    placement = placement_of(plan, machine)
    level = placement.outermost if op.hop is None else placement.level_between(*op.hop)
    return message_work(op.payload_bytes, placement.message_link(level), level, machine)


def _collective_work(op: TimedOp, plan: Plan, machine: Machine) -> ResourceWork:
    way = collective_way(op, plan, machine)
    if way is None:
        return copy_work(op.own_bytes, machine)
    work = _work_by(way, op, plan, machine)
    if op.keyword not in _BY_PARTS:
        return work
    copies = placement_of(plan, machine).members(op.group).count
    return evolve(work, seconds=work.seconds + copies * machine.part_copy)


_BY_PARTS = (AllGather.keyword, ReduceScatter.keyword)
"""Collectives whose parts a transport may copy one by one, a part a member (`part_copy`)."""


def _work_by(way: Algorithm, op: TimedOp, plan: Plan, machine: Machine) -> ResourceWork:
    """Return the work of a collective by an algorithm, with the packing that goes with it."""
    if (bits := _packed_bits(op, plan)) is not None:
        return copy_work(_packing_bytes(op, plan, bits), machine) + way.work(machine, _as_packed(op, bits).own_bytes)
    if op.keyword in _OF_HEADS | _OF_EXPERTS:  # parts are packed to be sent, and unpacked
        return copy_work(op.own_bytes, machine) + way.work(machine, op.own_bytes)
    if op.keyword in _OF_SUMS:
        return way.work(machine, op.payload_bytes) + copy_work(_summed_bytes(op, plan, machine), machine)
    if op.keyword == AllReduceScalar.keyword:  # its source is read first; the number itself is small
        return copy_work(op.payload_bytes, machine) + way.work(machine, 0)
    return way.work(machine, op.own_bytes)


def _summed_bytes(op: TimedOp, plan: Plan, machine: Machine) -> float:
    """Return the bytes that a rank reads and writes to add up the parts that have arrived of its run of a sum."""
    others = op.own_bytes - op.payload_bytes  # the residual stream and the sum
    if not _sums_whole(op, plan):
        return op.own_bytes
    count = placement_of(plan, machine).members(op.group).count
    return op.payload_bytes * count + others if op.payload_elements % count else op.payload_bytes + others / count


def _sums_whole(op: TimedOp, plan: Plan) -> bool:
    """Return whether every rank needs all of a sum, rather than its own run alone."""
    return op.keyword == ReduceSums.keyword or (op.keyword == ReduceRows.keyword and not shares_rows(plan))


def _packed_bits(op: TimedOp, plan: Plan) -> int | None:
    """Return the bits of an element that travels block-quantised; None for data that travels unpacked."""
    if op.group == Group.VIEWS.value:  # parts of views were rounded when they were made
        return None
    name = {AllGather.keyword: plan.gather_quantised, ReduceScatter.keyword: plan.reduce_quantised}.get(op.keyword)
    return None if name is None else FORMATS[name]


def _as_packed(op: TimedOp, bits: int) -> TimedOp:
    """Return a collective on packed data, which it reads to send, or writes as it arrives."""
    nbytes = round(packed_nbytes(op.payload_elements, bits))
    return evolve(op, payload_bytes=nbytes, own_bytes=op.own_bytes - op.payload_bytes + nbytes)


def _packing_bytes(op: TimedOp, plan: Plan, bits: int) -> float:
    """Return the bytes read and written to pack a rank's part and to unpack the parts that have arrived.

    Packed gradients are unpacked where they are added, which reads them in any case.
    """
    packed = packed_nbytes(op.payload_elements, bits)
    if op.keyword == ReduceScatter.keyword:
        return op.payload_bytes + packed
    shards = mesh_of(plan).group_size(Group(op.group))
    return (op.payload_bytes + packed) * (1 + 1 / shards)


def _transfer_work(op: TimedOp, _plan: Plan, machine: Machine) -> ResourceWork:
    return transfer_work(op.payload_bytes, op.elsewhere.home, machine, fetches=op.keyword == Fetch.keyword)


def _update_work(op: TimedOp, _plan: Plan, machine: Machine) -> ResourceWork:
    return update_work(op.own_bytes, machine, on_host=op.engine is Engine.HOST)


def _host_work(op: TimedOp, _plan: Plan, machine: Machine) -> ResourceWork:
    return host_work(op.payload_bytes, machine)


def _copy_work(op: TimedOp, _plan: Plan, machine: Machine) -> ResourceWork:
    return copy_work(op.payload_bytes, machine)


_WORKS: PerOp[Callable[[TimedOp, Plan, Machine], ResourceWork]] = PerOp(
    "work on the machine",
    {
        Send: _message_work,
        Recv: _copy_work,
        **dict.fromkeys((PeerOffload, DonorReturn), _message_work),
        **dict.fromkeys((DonorAccept, PeerReload), _copy_work),
        LoadInput: _host_work,
        Update: _update_work,
        ReduceScatter: _collective_work,
        AllReduce: _collective_work,
        AllGather: _collective_work,
        AllReduceScalar: _collective_work,
        **dict.fromkeys(TENSOR_OPS, _collective_work),
        **dict.fromkeys(MEMORY_OPS, _transfer_work),
        ScaleUpdate: _host_work,
    },
    never=(*BLOCK_OPS, Release),
)
"""Works of ops that call no routine."""


def _streaming_update(op: TimedOp, work: ResourceWork, machine: Machine) -> ResourceWork:
    """Return the work of an update of state that is in another memory.

    The state comes and goes. If a processor there updates it, gradients go there and views come back instead.
    """
    home, streamed = op.elsewhere.home, op.elsewhere.nbytes
    if not machine.updates_in(home):
        return streamed_work(work, StreamedBytes(home, fetched=streamed, stored=streamed), machine)
    given = op.payload_bytes - streamed
    taken = op.own_bytes - op.payload_bytes - streamed
    there = ResourceWork(machine.host_handover + op.own_bytes / machine["host_update"], given + taken)
    return streamed_work(there, StreamedBytes(home, fetched=taken, stored=given), machine)


def _streaming_gather(op: TimedOp, work: ResourceWork, machine: Machine) -> ResourceWork:
    """Return the work of a gather of masters, or of frozen parameters, that are in another memory.

    They come unchanged; masters come rounded where there is a processor next to them.
    """
    home, frozen_bytes = op.elsewhere.home, op.elsewhere.frozen_bytes
    fetched = op.elsewhere.nbytes - frozen_bytes
    if machine.updates_in(home):
        fetched = fetched // _MASTER_BYTES * op.payload_bytes // max(1, op.payload_elements)
    fetched += frozen_bytes
    return streamed_work(work, StreamedBytes(home, fetched=fetched), machine)


_MASTER_BYTES = 4
_STREAMING = {Update.keyword: _streaming_update, AllGather.keyword: _streaming_gather}
"""Work of an op whose state is in another memory, by keyword."""


def collective_names(ops: Iterable[TimedOp], plan: Plan, machine: Machine) -> dict[str, list[str]]:
    """Return by kind of collective the names of the algorithms that price some ops; measured ones are left out."""
    found: dict[str, set[str]] = {}
    for op in ops:
        if op.group and _measured(op, plan, machine, op.own_bytes) is None:
            way = collective_way(op, plan, machine)
            if way is not None:
                found.setdefault(op.keyword, set()).add(way.name)
    return {keyword: sorted(names) for keyword, names in sorted(found.items())}


def collective_way(op: TimedOp, plan: Plan, machine: Machine) -> Algorithm | None:
    """Return the cheapest algorithm of a collective; None where a member meets no other."""
    members = placement_of(plan, machine).members(op.group)
    if members.count == 1 or op.gathered_runs == 1:
        return None
    return _WAYS[op.keyword](op, plan, machine, members)


def _scalar_way(_op: TimedOp, _plan: Plan, machine: Machine, members: Members) -> Algorithm:
    return cheapest(scalar_all_reduces(_SCALAR_BYTES, members, machine), machine)


def _gather_way(op: TimedOp, plan: Plan, machine: Machine, members: Members) -> Algorithm:
    if (bits := _packed_bits(op, plan)) is not None:
        op = _as_packed(op, bits)
    return cheapest(all_gathers(op.payload_bytes, members, machine), machine, op.own_bytes)


def _keys_way(op: TimedOp, plan: Plan, machine: Machine, members: Members) -> Algorithm:
    """Return the algorithm of an exchange of keys: of all ranks, or of those before that a rank sees."""
    if op.gathered_runs < members.count:
        nbytes = op.payload_bytes / (op.gathered_runs * plan.context_runs)
        return neighbours(nbytes, op.gathered_runs - 1, plan.context_runs, members)
    return (_sum_way if op.keyword == ReduceKeys.keyword else _gather_way)(op, plan, machine, members)


def _heads_way(op: TimedOp, _plan: Plan, machine: Machine, members: Members) -> Algorithm:
    """Return the algorithm of an exchange of tokens for heads, or of rows: a member has another part for each."""
    return cheapest(all_to_alls(op.payload_bytes, members), machine, op.own_bytes)


def _all_reduce_way(op: TimedOp, _plan: Plan, machine: Machine, members: Members) -> Algorithm:
    if op.keyword == CombineLoss.keyword or sums_shared(op.keyword, op.group):  # everyone gathers and adds all parts
        return cheapest(all_gathers(op.payload_bytes * members.count, members, machine), machine, op.own_bytes)
    return cheapest(all_reduces(op.payload_elements, _itemsize(op), members, machine), machine, op.own_bytes)


def _reduce_scatter_way(op: TimedOp, plan: Plan, machine: Machine, members: Members) -> Algorithm:
    if (bits := _packed_bits(op, plan)) is not None:
        return _packed_reduction(op, plan, machine, packed_nbytes(op.payload_elements, bits))
    if _copies_shards(op, plan):
        placement = placement_of(plan, machine)
        group = placement.members(Group.SHARDS.value)
        itemsizes = _itemsize(op), Dtype(plan.grad_shard_dtype).itemsize
        return copied_shards(op.payload_elements, itemsizes, group, placement.copies, machine, op.own_bytes)
    return cheapest(reduce_scatters(op.payload_elements, _itemsize(op), members, machine), machine, op.own_bytes)


def _sum_way(op: TimedOp, plan: Plan, machine: Machine, members: Members) -> Algorithm:
    """Return the algorithm that brings the parts of a sum to the ranks that add them up, the same on any machine.

    Each rank gets the parts of its own run. Where all need the whole sum, the runs are gathered afterwards; a sum that
    does not divide into runs has all its parts go to everyone.
    """
    whole = _sums_whole(op, plan)
    if whole and op.payload_elements % members.count:
        return cheapest(all_gathers(op.payload_bytes * members.count, members, machine), machine, op.payload_bytes)
    parts = cheapest(all_to_alls(op.payload_bytes, members), machine, op.payload_bytes)
    if not whole:
        return parts
    gather = cheapest(all_gathers(op.payload_bytes, members, machine), machine)
    return Algorithm(f"{parts.name} + {gather.name}", parts.rounds + gather.rounds)


def _itemsize(op: TimedOp) -> float:
    return op.payload_bytes / max(1, op.payload_elements)


_WAYS: PerOp[Callable[[TimedOp, Plan, Machine, Members], Algorithm]] = PerOp(
    "algorithm",
    {
        ReduceScatter: _reduce_scatter_way,
        **dict.fromkeys(KEY_OPS, _keys_way),
        **dict.fromkeys((*HEAD_OPS, *EXPERT_OPS), _heads_way),
        AllReduce: _all_reduce_way,
        AllGather: _gather_way,
        AllReduceScalar: _scalar_way,
        GatherRows: _gather_way,
        **dict.fromkeys((ReduceRows, ReduceSums), _sum_way),
        CombineLoss: _all_reduce_way,
    },
    never=(*LONE_OPS, *MESSAGE_OPS, Release),
)
"""Cheapest algorithms of collectives whose group has several members."""


def _packed_reduction(op: TimedOp, plan: Plan, machine: Machine, nbytes: float) -> Algorithm:
    """Return the algorithm of a quantised reduction: every replica sends to every other.

    If several replicas have a copy of a shard, each then has a part of it, which the copies gather.
    """
    placement = placement_of(plan, machine)
    exchange = all_to_all(nbytes, placement.members(op.group), staged=True)
    if not _copies_shards(op, plan):
        return exchange
    shard = op.payload_elements / mesh_of(plan).shards * Dtype(plan.grad_shard_dtype).itemsize
    gather = cheapest(all_gathers(shard, placement.copies, machine), machine)
    return Algorithm(f"{exchange.name}, then {gather.name} of copies", exchange.rounds + gather.rounds)

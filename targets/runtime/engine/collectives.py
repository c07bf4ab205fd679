"""Collectives of the local engine: all members' arenas are in reach, and sums are made in rank order.

Each function takes all members of one collective in rank order, reads the operands of their instructions by role, and
writes the results into the members' arenas:

    reduce_scatter    g of replicas 0..D-1 (whole)  ->  gs of replica r = mean of part r
    all_gather        p of replicas 0..D-1 (parts)  ->  w of every replica = all parts, rounded

Gradients are averaged over replicas in float32 and rounded once. A block's flag is set on all replicas as soon as one
local contribution, or the reduced shard, is not finite. `docs/rtir.md` defines these results for every engine. Fixed
orders make them reproducible: shards by replica, the norm by blocks in forward order, shards in their order and chunks
of `SQUARES_CHUNK` elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from numpy.typing import NDArray

from ratrain.ratrain_ir.config.tensor_ranks import rank_model, share_of
from ratrain.ratrain_ir.model.blocks import Held, block, named_block, parameters_within, tied_table_elements
from ratrain.ratrain_ir.model.expert_blocks import choices_per_step
from ratrain.ratrain_ir.model.expert_ranks import expert_copies, shares_experts
from ratrain.ratrain_ir.ops.base import Group
from ratrain.targets.program.instruction import Instruction
from ratrain.targets.runtime.arena.kernel_memory import SQUARES_CHUNK
from ratrain.targets.runtime.arena.scalars import BiasMove
from ratrain.targets.runtime.engine.quantised import gradient_bits, mean_of_packed, round_view, view_bits
from ratrain.targets.runtime.engine.rank import RankExecutor
from ratrain.targets.runtime.engine.streamed_state import cast_master, copy_frozen

if TYPE_CHECKING:
    from ratrain.targets.program.program import Program
    from ratrain.targets.runtime.arena.scalars import Scalars, Views
    from ratrain.targets.runtime.kernels import KernelSet, Scratch

Member = tuple[RankExecutor, Instruction]
"""Rank of a collective and its instruction."""


def shard_slice(rank: RankExecutor, name: str) -> slice:
    """Return the place of a rank's shard in a block's flat tensors."""
    owned = rank.program.topology.shard_range(named_block(name), rank.replica)
    return slice(owned.start, owned.stop)


def reduce_scatter(members: Sequence[Member], kernels: KernelSet, scalars: Scalars, scratch: Scratch) -> None:
    """Set each replica's shard to the mean of that part of all replicas' gradients, or add the mean to it.

    Several replicas may have the same part. It is computed once and copied.
    """
    views = [rank.by_role(instruction) for rank, instruction in members]
    accumulate = members[0][1].accumulates
    for name in members[0][1].blocks:
        flags = [mine[f"flag.{name}"] for mine in views]
        if not accumulate:  # while micro-batches accumulate, a flag stays raised
            scalars.clear(flags)
        first: dict[int, NDArray[Any]] = {}
        bits = gradient_bits(members[0][0].program, name)
        for (rank, _), mine in zip(members, views, strict=True):
            shard = mine[f"gs.{name}"]
            part = shard_slice(rank, name)
            if part.start in first:
                kernels.memory.copy(shard, first[part.start])
                continue
            first[part.start] = shard
            parts = in_sum_order([other[f"g.{name}"][part] for other in views], rank)
            if bits is not None:
                # Several ranks that have the same shard reduce a part of it each, so quantisation blocks begin where
                # these parts do.
                length = len(shard) * rank.program.topology.shards // len(views)
                for start in range(0, len(shard), length):
                    at = slice(start, start + length)
                    mean_of_packed(
                        [each[at] for each in parts],
                        shard[at],
                        flags,
                        bits=bits,
                        kernels=kernels,
                        scalars=scalars,
                        scratch=scratch,
                        accumulate=accumulate,
                        divisor=mean_divisor(rank),
                    )
                continue
            scratch.reset()
            scalars.mean_of_replicas(
                parts, shard, flags, scratch=scratch, accumulate=accumulate, divisor=mean_divisor(rank)
            )


T = TypeVar("T")


def in_sum_order(parts: Sequence[T], rank: RankExecutor) -> list[T]:
    """Return what each replica gives, in rank order, in the order in which gradients are summed."""
    topology = rank.program.topology
    return list(parts) if topology.contexts == 1 else [parts[replica] for replica in topology.sum_order]


def mean_divisor(rank: RankExecutor) -> float:
    """Return the number of replicas that a gradient is the mean of. Gradients of context ranks are summed."""
    return float(rank.program.plan.dp)


def all_reduce_replicas(members: Sequence[Member], kernels: KernelSet, scalars: Scalars, scratch: Scratch) -> None:
    """Set every replica's gradient to the mean of all."""
    views = [rank.by_role(instruction) for rank, instruction in members]
    for name in members[0][1].blocks:
        gradients, flags = ([view[f"{what}.{name}"] for view in views] for what in ("g", "flag"))
        scalars.clear(flags)
        scratch.reset()
        rank = members[0][0]
        parts, divisor = in_sum_order(gradients, rank), mean_divisor(rank)
        # the first part may be the result
        scalars.mean_of_replicas(parts, parts[0], flags, scratch=scratch, accumulate=False, divisor=divisor)
        gradients = parts
        for other in gradients[1:]:
            kernels.memory.copy(other, gradients[0])


def all_reduce_ends(members: Sequence[Member], kernels: KernelSet, scalars: Scalars, scratch: Scratch) -> None:
    """Sum the gradients of tied embeddings (first + last stage), on both; a flag of either is a flag of both.

    The elements after the table in either tensor, norm or positions, belong to that end alone and are left unchanged.
    """
    views: Views = {}
    for rank, instruction in members:
        views |= rank.by_role(instruction)
    rank = members[0][0]
    shared = tied_elements(rank, len(views["gs.embed"]))
    first, last = views["gs.embed"][:shared], views["gs.head"][:shared]
    flags = [views["flag.embed"], views["flag.head"]]
    if shared:
        scratch.reset()
        kernels.add(first, last, first, scratch=scratch)
        kernels.memory.copy(last, first)
        scratch.reset()
        scalars.check_finite(first, flags, scratch=scratch)
    scalars.spread(flags, flags)


def tied_elements(rank: RankExecutor, elements: int) -> int:
    """Return how many of a replica's elements belong to the tied table, which is first in both tensors."""
    start = rank.program.topology.shard_range(block("embed"), rank.replica).start
    model = rank_model(rank.program.model, rank.program.plan)
    # The shard may begin inside the table, end inside it, or lie behind it.
    return min(max(tied_table_elements(model) - start, 0), elements)


def all_gather(members: Sequence[Member], kernels: KernelSet, scratch: Scratch) -> None:
    """Set the view of every member to all their shards of the masters, rounded to the view's dtype or quantised.

    For a group that shares a view, members gather the parts of it that they hold; `Group.PARTS` makes such a part.
    """
    views = [rank.by_role(instruction) for rank, instruction in members]
    program, first = members[0][0].program, members[0][1]
    made = gathered_name(first)
    for name in first.blocks:
        for part, role in gathered_frozen(views[0], name):
            whole = views[0][role]
            for member, place in zip(members, whole.reshape(len(members), -1), strict=True):
                copy_frozen(*member, part, place, kernels)
            for other in views[1:]:
                kernels.memory.copy(other[role], whole)
        if f"{made}.{name}" not in views[0]:
            continue
        whole, bits = views[0][f"{made}.{name}"], view_bits(program, name)
        places = whole.reshape(len(members), -1)
        for (rank, instruction), mine, place in zip(members, views, places, strict=True):
            # Parts of views were rounded when they were made.
            if gathers_parts(instruction):
                kernels.memory.copy(place, mine[f"v.{name}"])
                continue
            cast_master(rank, instruction, f"p.{name}", place, kernels, scratch)
            if bits is not None:
                round_view(place, bits, kernels, scratch)
        for other in views[1:]:
            kernels.memory.copy(other[f"{made}.{name}"], whole)


def gathered_frozen(views: Views, name: str) -> list[tuple[str, str]]:
    """Return the roles of a block's frozen parameters that a gather makes whole: (role of the part, of the whole)."""
    roles = [(f"{held.value}s.{name}", f"{held.value}.{name}") for held in (Held.PLAIN, Held.PACKED)]
    return [(part, whole) for part, whole in roles if part in views]


def gathers_parts(instruction: Instruction) -> bool:
    """Return True if a gather collects parts of views, which are rounded already, rather than masters."""
    return instruction.group == Group.VIEWS.value


def gathered_name(instruction: Instruction) -> str:
    """Return the role, without the block, of a gather's result: `w` for whole views, `v` for parts of them."""
    return "v" if instruction.group == Group.PARTS.value else "w"


def any_flag(members: Sequence[Member], scalars: Scalars) -> None:
    """Set the overflow flag of all ranks if any block's flag is set."""
    views = [rank.by_role(instruction) for rank, instruction in members]
    flags = [view for mine in views for role, view in mine.items() if role.startswith("flag.")]
    scalars.spread(flags, [mine["overflow"] for mine in views])


def gradient_norm(members: Sequence[Member], scalars: Scalars, scratch: Scratch) -> None:
    """Set the Euclidean norm of the whole reduced gradient, still scaled; infinite if any block's flag is set.

    Blocks in forward order, shards in their order within these, fixed chunks in float64. Padding does not count, a tied
    table counts once.
    """
    views = [rank.by_role(instruction) for rank, instruction in members]
    flags: list[NDArray[Any]] = []
    stages: dict[int, list[tuple[Member, Views]]] = {}
    for member, mine in zip(members, views, strict=True):
        flags += block_flags(mine, member[1])
        stages.setdefault(member[0].stage_index, []).append((member, mine))
    chunks = [
        {name: list(_chunks_of_block(lanes, name)) for name in lanes[0][0][1].blocks} for lanes in stages.values()
    ]
    scalars.norm(chunks, flags, [mine["norm"] for mine in views], scratch=scratch)


def _chunks_of_block(lanes: Sequence[tuple[Member, Views]], name: str) -> Iterator[NDArray[Any]]:
    """Yield the chunks of a block that a stage's ranks count for the norm, in the order of their shards."""
    owner = named_block(name)
    for lane in lanes[0][0][0].program.topology.lanes_by_shard(owner):
        (rank, _), mine = lanes[lane]
        yield from gradient_chunks(rank, name, mine[f"gs.{name}"])


def block_flags(views: Views, instruction: Instruction) -> list[NDArray[Any]]:
    """Return a rank's flags of all blocks of an instruction."""
    return [views[f"flag.{name}"] for name in instruction.blocks]


def gradient_chunks(rank: RankExecutor, name: str, gradient: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Yield the fixed chunks of a rank's part of a block's gradient that it contributes to the norm."""
    for low, high in norm_chunks(rank.program, name, rank.replica, len(gradient), rank.peer):
        yield gradient[low:high]


def norm_chunks(program: Program, name: str, replica: int, elements: int, peer: int = 0) -> Iterator[tuple[int, int]]:
    """Yield the ranges [low, high) of a rank's part of a block's gradient that it counts for the norm.

    Elements that several ranks hold count once.
    """
    model, peers = rank_model(program.model, program.plan), program.plan.tp
    owner = named_block(name)
    if not program.topology.is_first_holder(owner, replica):
        return
    start, routed = program.topology.shard_range(owner, replica).start, shares_experts(model, program.plan, owner)
    for parameter, low, high in parameters_within(model, owner, start, elements):
        if model.tied_embeddings and owner.kind == "head" and parameter.weight == "table":
            continue  # counted with embed
        if peer % share_of(program.model, peers, parameter.weight).copies:
            continue  # counted with the first peer that has it
        if routed and replica % expert_copies(program.plan, parameter.weight):
            continue  # counted with the first expert rank
        for first in range(low, high, SQUARES_CHUNK):
            yield first, min(first + SQUARES_CHUNK, high)


def total_loss(members: Sequence[Member], scalars: Scalars, scratch: Scratch) -> None:
    """Sum the step's loss over replicas in rank order, in float64, in nats over all tokens."""
    scalars.sum_losses([rank.by_role(instruction)["loss"] for rank, instruction in members], scratch=scratch)


def move_biases(members: Sequence[Member], scalars: Scalars, scratch: Scratch) -> None:
    """Move the biases of routers by the tokens that all replicas have sent to each expert."""
    views = [rank.by_role(instruction) for rank, instruction in members]
    for name in members[0][1].blocks:
        counts = [mine[f"load.{name}"] for mine in views]
        scalars.move_bias(bias_move(members[0][0].program, name, counts, views), scratch=scratch)


def bias_move(program: Program, name: str, counts: Sequence[NDArray[Any]], views: Sequence[Views]) -> BiasMove:
    """Return the step of a block's bias on some ranks, whose operands are `views`, by the counts of all replicas."""
    plan = program.plan
    return BiasMove(
        counts,
        [(mine[f"bias.{name}"], mine[f"load.{name}"]) for mine in views],
        [mine[f"flag.{name}"] for mine in views],
        views[0].get("norm"),
        choices_per_step(program.model, plan),
        plan.router.bias_update,
    )

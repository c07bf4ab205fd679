"""Collectives of the local engine: all members' arenas are in reach, sums are made in rank order.

Gradients are averaged over replicas in float32 and rounded once; a flag of a block is set on all replicas as soon as one local
contribution, or the reduced shard, is not finite. Results are those that `docs/rtir.md` defines for every engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from ratrain.ratrain_ir.blocks import block, parameters_within, parse_block, tied_table_elements
from ratrain.ratrain_ir.tensor_peers import peer_model, share_of
from ratrain.targets.program.program import Instruction
from ratrain.targets.runtime.memory import SQUARES_CHUNK
from ratrain.targets.runtime.quantised import gradient_bits, mean_of_packed, round_view, view_bits
from ratrain.targets.runtime.rank import Rank
from ratrain.targets.runtime.streamed_state import cast_master

if TYPE_CHECKING:
    from ratrain.targets.program.program import Program
    from ratrain.targets.runtime.kernels import KernelSet, Scratch
    from ratrain.targets.runtime.scalars import Scalars, Views

Member = tuple[Rank, Instruction]


def shard_slice(rank: Rank, name: str) -> slice:
    """Where a rank's shard of a block lies in the block's flat tensors."""
    owner = parse_block(name)
    assert owner is not None
    owned = rank.program.topology.shard_range(owner, rank.replica)
    return slice(owned.start, owned.stop)


def reduce_scatter(members: Sequence[Member], kernels: KernelSet, scalars: Scalars, scratch: Scratch) -> None:
    """Each replica's shard becomes (or grows by) the mean of that part of all replicas' gradients; several may have the same part."""
    views = [rank.by_role(instruction) for rank, instruction in members]
    accumulate = members[0][1].accumulates
    for name in members[0][1].blocks:
        flags = [mine[f"flag.{name}"] for mine in views]
        if not accumulate:  # over micro-batches a flag stays raised
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
            parts = [other[f"g.{name}"][part] for other in views]
            if bits is not None:
                # of shards that several have, each reduces a part: blocks begin where such parts do
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
                    )
                continue
            scratch.reset()
            scalars.mean_of_replicas(
                parts, shard, flags, scratch=scratch, accumulate=accumulate, divisor=float(len(views))
            )


def all_reduce_replicas(members: Sequence[Member], kernels: KernelSet, scalars: Scalars, scratch: Scratch) -> None:
    """Every replica's gradient becomes the mean of all."""
    views = [rank.by_role(instruction) for rank, instruction in members]
    for name in members[0][1].blocks:
        gradients, flags = ([view[f"{what}.{name}"] for view in views] for what in ("g", "flag"))
        scalars.clear(flags)
        scratch.reset()
        scalars.mean_of_replicas(
            gradients, gradients[0], flags, scratch=scratch, accumulate=False, divisor=float(len(views))
        )
        for other in gradients[1:]:
            kernels.memory.copy(other, gradients[0])


def all_reduce_ends(members: Sequence[Member], kernels: KernelSet, scalars: Scalars, scratch: Scratch) -> None:
    """Tied embeddings: first + last, on both; a flag of either is a flag of both.

    What follows the table in either tensor, norm or positions, is of that end alone, and is left as it is.
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


def tied_elements(rank: Rank, elements: int) -> int:
    """How many of a replica's elements belong to the tied table, which stands first in both tensors."""
    start = rank.program.topology.shard_range(block("embed"), rank.replica).start
    model = peer_model(rank.program.model, rank.program.plan)
    return min(max(tied_table_elements(model) - start, 0), elements)


def all_gather(members: Sequence[Member], kernels: KernelSet, scratch: Scratch) -> None:
    """The view of every replica of a shard group becomes all shards of the master weights, rounded to the view's type, or packed."""
    views = [rank.by_role(instruction) for rank, instruction in members]
    for name in members[0][1].blocks:
        whole, bits = views[0][f"w.{name}"], view_bits(members[0][0].program, name)
        for rank, instruction in members:
            shard = whole[shard_slice(rank, name)]
            cast_master(rank, instruction, f"p.{name}", shard, kernels, scratch)
            if bits is not None:
                round_view(shard, bits, kernels, scratch)
        for other in views[1:]:
            kernels.memory.copy(other[f"w.{name}"], whole)


def any_flag(members: Sequence[Member], scalars: Scalars) -> None:
    """The overflow flag of all ranks: set where any block's flag is."""
    views = [rank.by_role(instruction) for rank, instruction in members]
    flags = [view for mine in views for role, view in mine.items() if role.startswith("flag.")]
    scalars.spread(flags, [mine["overflow"] for mine in views])


def gradient_norm(members: Sequence[Member], scalars: Scalars, scratch: Scratch) -> None:
    """The Euclidean norm of the whole reduced gradient, still scaled; infinite when a block's flag is set anywhere.

    Blocks in forward order, shards in rank order, fixed chunks in float64. Padding does not count, a tied table counts once.
    """
    views = [rank.by_role(instruction) for rank, instruction in members]
    flags: list[NDArray[Any]] = []
    stages: dict[int, dict[str, list[NDArray[Any]]]] = {}
    for (rank, instruction), mine in zip(members, views, strict=True):
        flags += block_flags(mine, instruction)
        chunks = stages.setdefault(rank.stage_index, {name: [] for name in instruction.blocks})
        for name in instruction.blocks:
            chunks[name] += gradient_chunks(rank, name, mine[f"gs.{name}"])
    scalars.norm(list(stages.values()), flags, [mine["norm"] for mine in views], scratch=scratch)


def block_flags(views: Views, instruction: Instruction) -> list[NDArray[Any]]:
    """A rank's flags of all blocks of an instruction."""
    return [views[f"flag.{name}"] for name in instruction.blocks]


def gradient_chunks(rank: Rank, name: str, gradient: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """The fixed chunks of a rank's part of a block's gradient that it contributes to the norm."""
    for low, high in norm_chunks(rank.program, name, rank.replica, len(gradient), rank.peer):
        yield gradient[low:high]


def norm_chunks(program: Program, name: str, replica: int, elements: int, peer: int = 0) -> Iterator[tuple[int, int]]:
    """The chunks of a rank's part of a block's gradient that it counts for the norm; what several ranks have counts once."""
    model, peers = peer_model(program.model, program.plan), program.plan.tp
    owner = parse_block(name)
    assert owner is not None
    if not program.topology.is_first_holder(owner, replica):
        return
    start = program.topology.shard_range(owner, replica).start
    for parameter, low, high in parameters_within(model, owner, start, elements):
        if model.tied_embeddings and owner.kind == "head" and parameter.weight == "table":
            continue  # counted with embed
        if peer % share_of(program.model, peers, parameter.weight).copies:
            continue  # counted with the first peer that has it
        for first in range(low, high, SQUARES_CHUNK):
            yield first, min(first + SQUARES_CHUNK, high)


def total_loss(members: Sequence[Member], scalars: Scalars, scratch: Scratch) -> None:
    """The step's loss summed over replicas in rank order, float64, in nats over all tokens."""
    scalars.sum_losses([rank.by_role(instruction)["loss"] for rank, instruction in members], scratch=scratch)

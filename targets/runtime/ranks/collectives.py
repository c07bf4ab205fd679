"""Collectives of ranks that are processes, as phases.

Each method is a generator: it yields requests, and is resumed when all of them are done. Bytes go straight from and
into the arena wherever no sum is needed. A reduction of gradients is one of two:

    ordered:  replica 0 has a0 a1   --all-to-all-->   replica 0 gets a0 b0, its shard is (a0 + b0) / 2
              replica 1 has b0 b1                     replica 1 gets a1 b1, its shard is (a1 + b1) / 2
    fast:     the library's reduce-scatter of float32 copies, in any order

`ordered` sums in float32 in rank order, which gives the same bits as the local engine. Both send (D - 1) / D of the
gradient from each of D replicas. Gradients are never summed in the library's half precision, which rounds after every
addition.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from functools import cached_property, partial
from itertools import accumulate as running_sums
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ratrain.ratrain_ir.config.quantised import packed_bytes
from ratrain.ratrain_ir.model.blocks import named_block
from ratrain.ratrain_ir.ops.base import Engine, Group, Quantity
from ratrain.ratrain_ir.ops.collectives import TENSOR_OPS, AllGather, AllReduce, AllReduceScalar, ReduceScatter
from ratrain.ratrain_ir.ops.compute import Release
from ratrain.ratrain_ir.ops.kinds import LONE_OPS
from ratrain.ratrain_ir.ops.messages import MESSAGE_OPS
from ratrain.ratrain_ir.ops.per_op import PerOp
from ratrain.targets.runtime.engine import collectives, tensor_collectives
from ratrain.targets.runtime.engine.quantised import gradient_bits, view_bits
from ratrain.targets.runtime.engine.streamed_state import cast_master, copy_frozen
from ratrain.targets.runtime.kernels.host_scalars import any_raised, norm_of_stages
from ratrain.targets.runtime.ranks.communicator import Communicator, Request

if TYPE_CHECKING:
    from ratrain.targets.program.instruction import Instruction
    from ratrain.targets.program.program import Program, ProgramStage
    from ratrain.targets.runtime.arena.scalars import Scalars, Views
    from ratrain.targets.runtime.engine.rank import RankExecutor
    from ratrain.targets.runtime.kernels import KernelSet, Scratch
    from ratrain.targets.runtime.ranks.communicators import Communicators
    from ratrain.targets.runtime.ranks.rank_layout import Reduction

Phases: TypeAlias = Generator[Sequence[Request], None, None]

_SCALARS_BYTES = 1 << 12
"""Staging bytes for flags and losses, in addition to those for gradients."""


class GroupCollectives:
    """The collectives of one rank. Only one runs at a time, since all use the same staging bytes."""

    def __init__(
        self,
        rank: RankExecutor,
        communicators: Communicators,
        kernels: KernelSet,
        scalars: Scalars,
        scratch: Scratch,
        reduction: Reduction,
    ) -> None:
        self.rank = rank
        self.communicators = communicators
        self.kernels = kernels
        self.scalars = scalars
        self.scratch = scratch
        self.reduction = reduction
        # Reset when a collective starts, never between its phases: the requests of earlier phases may still point into
        # it.
        self.staging: Scratch = kernels.memory.scratch(staging_bytes(rank, reduction))
        """Transport memory for parts of other ranks, outside the arena and of the same kind."""
        self.squares = np.empty(sum(1 + sum(blocks.values()) for _, blocks in self.norm_counts))
        """Host memory for the sums of squares of all ranks; the host adds them."""
        self.loss: float | None = None
        """The last step's loss over all its tokens, where this rank learned it."""
        self.norm: float | None = None
        """The last gradient norm before clipping, where the plan clips."""

    @cached_property
    def norm_counts(self) -> list[tuple[int, dict[str, int]]]:
        """Each rank's stage and number of chunks in the norm by block, in rank order; empty if there is no norm."""
        stream = self.rank.stage.streams[Engine.COLLECTIVE]
        clips = any(instruction.variant == "norm" for instruction in stream)
        return _norm_counts(self.rank.program) if clips else []

    def start(self, instruction: Instruction) -> Phases:
        """Start a collective that this rank has reached; return its phases."""
        self.staging.reset()
        return _PHASES[instruction.keyword](self, instruction)

    def all_reduce(self, instruction: Instruction) -> Phases:
        """Sum gradients over a group: replicas, both pipeline ends (tied embeddings) or tensor-parallel ranks."""
        return _ALL_REDUCES[Group(instruction.group)](self, instruction)

    def all_reduce_scalar(self, instruction: Instruction) -> Phases:
        """Combine losses, norms, overflow flags or counts of experts' tokens."""
        match Quantity(instruction.variant):
            case Quantity.LOSS:
                return self._sum_loss(instruction)
            case Quantity.NORM:
                return self._norm(instruction)
            case Quantity.FLAGS:
                return self._any_flag(instruction)
            case Quantity.COUNTS:
                return self._move_biases(instruction)

    def reduce_scatter(self, instruction: Instruction) -> Phases:
        """Reduce gradients into the shards of all members.

        Replicas with the same shard (`copies`) each reduce a part of it, then gather the parts.
        """
        views = self.rank.by_role(instruction)
        shards = {block: views[f"gs.{block}"] for block in instruction.blocks}
        copies, topology = self.communicators.copies, self.rank.program.topology
        own = shards
        if copies is not None:
            own = {block: shard.reshape(copies.size, -1)[copies.rank] for block, shard in shards.items()}
        exact = [block for block in shards if gradient_bits(self.rank.program, block) is None]
        placed = [block for block in exact if topology.is_rearranged(named_block(block))]
        gradients = {f"g.{block}": self._by_reducer(block, views[f"g.{block}"]) for block in placed}
        members = self.communicators.of_mean(Group(instruction.group))
        yield from self._reduce(views | gradients, own, members, accumulate=instruction.accumulates)
        if copies is not None:
            yield [copies.iallgather(shard) for shard in shards.values()]

    def _by_reducer(self, block: str, gradient: NDArray[Any]) -> NDArray[Any]:
        """Copy a gradient with its parts permuted: part r of the result is the one that replica r reduces."""
        memory, topology = self.kernels.memory, self.rank.program.topology
        placed = self.staging.take(len(gradient), memory.element_type(gradient))
        parts, places = (whole.reshape(topology.replicas, -1) for whole in (gradient, placed))
        for replica in range(topology.replicas):
            memory.copy(places[replica], parts[topology.reduced_part(named_block(block), replica)])
        return placed

    def _sum_replicas(self, instruction: Instruction) -> Phases:
        """Reduce this rank's part of every gradient in place, then gather all parts on every replica."""
        views = self.rank.by_role(instruction)
        replicas = self.communicators.of_mean(Group(instruction.group))
        parts = {block: views[f"g.{block}"].reshape(replicas.size, -1)[replicas.rank] for block in instruction.blocks}
        yield from self._reduce(views, parts, replicas, accumulate=False)
        yield [replicas.iallgather(views[f"g.{block}"]) for block in instruction.blocks]

    def _reduce(
        self, views: Views, outs: dict[str, NDArray[Any]], replicas: Communicator, *, accumulate: bool
    ) -> Phases:
        """Set `outs[block]` to this rank's part of the replicas' mean gradient, or add it; agree on the flags."""
        collect = self._collect_parts if self.reduction == "ordered" else self._sum_by_library
        parts: dict[str, Sequence[NDArray[Any]]] = {}
        requests = []
        for block in outs:
            bits = gradient_bits(self.rank.program, block)
            gradient = views[f"g.{block}"]
            if bits is None:
                parts[block], request = collect(gradient, replicas)
            else:
                parts[block], request = self._collect_packed(block, gradient, bits)
            # All blocks are posted before the first is waited for, in the same order on every replica.
            requests.append(request)
        yield requests
        # One all-reduce for the flags of all blocks: a block that is not finite on one replica is skipped on all.
        flags = self.staging.take(len(outs), np.uint8)
        for index, (block, out) in enumerate(outs.items()):
            self.scratch.reset()
            bits = gradient_bits(self.rank.program, block)
            mean = self.kernels.mean_of_replicas
            if bits is not None:
                mean = partial(self.kernels.mean_of_quantised, bits=bits)
            flags[index] = not mean(
                self._in_sum_order(parts[block]),
                out,
                scratch=self.scratch,
                accumulate=accumulate,
                divisor=collectives.mean_divisor(self.rank),
            )
        yield [replicas.iallreduce_max(flags)]
        for index, block in enumerate(outs):
            flag = views[f"flag.{block}"]
            flag[0] = int(flags[index]) | (int(flag[0]) if accumulate else 0)  # stays raised over micro-batches

    def _in_sum_order(self, parts: Sequence[NDArray[Any]]) -> Sequence[NDArray[Any]]:
        """Return every replica's part in the order of the sum; a sum that a library has made is one part."""
        return parts if len(parts) == 1 else collectives.in_sum_order(parts, self.rank)

    def _collect_parts(self, gradient: NDArray[Any], replicas: Communicator) -> tuple[Sequence[NDArray[Any]], Request]:
        """Collect every replica's part of this rank's shard, in rank order."""
        shape = replicas.size, len(gradient) // replicas.size
        parts = self.staging.take(shape, self.kernels.memory.element_type(gradient))
        return list(parts), replicas.ialltoall(parts, gradient)

    def _collect_packed(self, block: str, gradient: NDArray[Any], bits: int) -> tuple[Sequence[NDArray[Any]], Request]:
        """Collect every replica's part of this rank's share, quantised by its sender, in rank order."""
        replicas, topology = self.communicators.replicas, self.rank.program.topology
        parts = gradient.reshape(replicas.size, -1)
        given, gathered = (
            self.staging.take((replicas.size, packed_bytes(len(parts[0]), bits)), np.uint8) for _ in range(2)
        )
        for replica in range(replicas.size):
            self.scratch.reset()
            part = parts[topology.reduced_part(named_block(block), replica)]
            self.kernels.quantise(part, given[replica], scratch=self.scratch, bits=bits)
        return list(gathered), replicas.ialltoall(gathered, given)

    def _sum_by_library(self, gradient: NDArray[Any], replicas: Communicator) -> tuple[Sequence[NDArray[Any]], Request]:
        """Let the library sum this rank's shard over all replicas: in float32, in an order of its choice."""
        whole = gradient
        if self.kernels.memory.element_type(gradient) != np.float32:
            whole = self.staging.take(len(gradient), np.float32)
            self.scratch.reset()
            self.kernels.cast(gradient, whole, scratch=self.scratch)
        total = self.staging.take(len(gradient) // replicas.size, np.float32)
        return [total], replicas.ireduce_scatter_block(total, whole)

    def _sum_ends(self, instruction: Instruction) -> Phases:
        """Exchange the tied embedding's shards of first and last stage, and add them in the same order on both."""
        ends = self.communicators.ends
        assert ends is not None  # only these ranks have the instruction
        if ends.size == 1:
            collectives.all_reduce_ends([(self.rank, instruction)], self.kernels, self.scalars, self.scratch)
            return
        views = self.rank.by_role(instruction)
        (block,) = instruction.blocks
        mine, flag = views[f"gs.{block}"], views[f"flag.{block}"]
        shared = collectives.tied_elements(self.rank, len(mine))
        theirs = self.staging.take(shared, self.kernels.memory.element_type(mine))
        flags = self.staging.take(1, np.uint8)
        flags[0] = int(flag[0])
        own, other = ends.rank, 1 - ends.rank
        # A message's tag is the end that sends it: the two messages between two ranks go in opposite directions.
        yield [
            ends.irecv(theirs, other, other),
            ends.isend(mine[:shared], other, own),
            ends.iallreduce_max(flags),
        ]
        finite = True
        if shared:
            # first + last on both ends, never mine + theirs, so that both compute the same bits
            first, last = (mine[:shared], theirs) if ends.rank == 0 else (theirs, mine[:shared])
            self.scratch.reset()
            self.kernels.add(first, last, mine[:shared], scratch=self.scratch)
            self.scratch.reset()
            finite = self.kernels.all_finite(mine[:shared], scratch=self.scratch)
        flag[0] = max(int(flags[0]), int(not finite))

    def _sum_shared(self, instruction: Instruction) -> Phases:
        """Sum gradients of parameters that several tensor-parallel ranks have copies of.

        All ranks gather the shared ranges of all; each adds the ranges of its own group of `copies` neighbours, in rank
        order.
        """
        of_experts = instruction.group == Group.EXPERTS.value
        peers = self.communicators.expert_gradients if of_experts else self.communicators.tensor_gradients
        assert peers is not None  # only ranks with peers have the instruction
        views, memory = self.rank.by_role(instruction), self.kernels.memory
        group = instruction.group
        ranges = {
            block: list(_shared(self.rank, block, len(views[f"gs.{block}"]), group)) for block in instruction.blocks
        }
        arrived: dict[str, NDArray[Any]] = {}
        requests = []
        for block, shared in ranges.items():
            gradient, elements = views[f"gs.{block}"], sum(high - low for _, low, high in shared)
            mine = self.staging.take(elements, memory.element_type(gradient))
            arrived[block] = self.staging.take((peers.size, elements), memory.element_type(gradient))
            for (_, low, high), at in zip(shared, _starts(shared), strict=True):
                memory.copy(mine[at : at + high - low], gradient[low:high])
            requests.append(peers.iallgather(arrived[block], mine))
        yield requests
        flags = self.staging.take(len(ranges), np.uint8)
        for index, (block, shared) in enumerate(ranges.items()):
            flag = views[f"flag.{block}"]
            for (copies, low, high), at in zip(shared, _starts(shared), strict=True):
                first = peers.rank - peers.rank % copies
                parts = [part[at : at + high - low] for part in arrived[block][first : first + copies]]
                out = views[f"gs.{block}"][low:high]
                tensor_collectives.summed(parts, out, [flag], self.scalars, self.scratch)
            flags[index] = int(flag[0])
        yield [peers.iallreduce_max(flags)]
        for index, block in enumerate(ranges):
            views[f"flag.{block}"][0] = int(flags[index])

    def all_gather(self, instruction: Instruction) -> Phases:
        """Gather shards of masters (rounded to the view's type, perhaps quantised) or parts of views from all members.

        Each rank first writes its own part into its place of the result; then the places, or their packed bytes, are
        exchanged.
        """
        views, made = self.rank.by_role(instruction), collectives.gathered_name(instruction)
        members = self.communicators.of_gather(Group(instruction.group))
        packed: dict[str, NDArray[Any]] = {}
        requests = []
        for block in instruction.blocks:
            for part, role in collectives.gathered_frozen(views, block):
                place = views[role].reshape(members.size, -1)[members.rank]
                copy_frozen(self.rank, instruction, part, place, self.kernels)
                requests.append(members.iallgather(views[role]))
            if f"{made}.{block}" not in views:
                continue
            whole, bits = views[f"{made}.{block}"], _packed_bits(self.rank.program, instruction, block)
            place = whole.reshape(members.size, -1)[members.rank]
            if collectives.gathers_parts(instruction):
                self.kernels.memory.copy(place, views[f"v.{block}"])
            else:
                cast_master(self.rank, instruction, f"p.{block}", place, self.kernels, self.scratch)
            if bits is not None:
                packed[block] = self.staging.take((members.size, packed_bytes(len(place), bits)), np.uint8)
                self.scratch.reset()
                self.kernels.quantise(place, packed[block][members.rank], scratch=self.scratch, bits=bits)
            requests.append(members.iallgather(packed.get(block, whole)))
        yield requests
        for block, rows in packed.items():
            self._unpack(rows, views[f"{made}.{block}"], view_bits(self.rank.program, block))

    def _unpack(self, rows: NDArray[Any], view: NDArray[Any], bits: int | None) -> None:
        """Set a view from the packed rows of all members, this rank's own included: every member has the same bits."""
        assert bits is not None  # else nothing was
        for row, place in zip(rows, view.reshape(len(rows), -1), strict=True):
            self.scratch.reset()
            self.kernels.dequantise(row, place, scratch=self.scratch, bits=bits)

    def _sum_loss(self, instruction: Instruction) -> Phases:
        replicas = self.communicators.replicas
        losses = self.staging.take(replicas.size, np.float64)
        yield [replicas.iallgather(losses, self.rank.by_role(instruction)["loss"])]
        self.loss = float(sum(losses.tolist()))

    def _any_flag(self, instruction: Instruction) -> Phases:
        views = self.rank.by_role(instruction)
        flag = self.staging.take(1, np.uint8)
        flag[0] = any(int(view[0]) for role, view in views.items() if role.startswith("flag."))
        yield [self.communicators.everyone.iallreduce_max(flag)]
        views["overflow"][0] = int(flag[0])

    def _move_biases(self, instruction: Instruction) -> Phases:
        """Gather the counts of all replicas, of all blocks at once, and move this rank's biases by their sums."""
        views, replicas = self.rank.by_role(instruction), self.communicators.replicas
        loads = [views[f"load.{block}"] for block in instruction.blocks]
        mine = self.staging.take((len(loads), len(loads[0])), np.int32)
        gathered = self.staging.take((replicas.size, *mine.shape), np.int32)
        for place, load in zip(mine, loads, strict=True):
            self.kernels.memory.copy(place, load)
        yield [replicas.iallgather(gathered, mine)]
        for number, block in enumerate(instruction.blocks):
            counts = [theirs[number] for theirs in gathered]
            move = collectives.bias_move(self.rank.program, block, counts, [views])
            self.scalars.move_bias(move, scratch=self.scratch)

    def _norm(self, instruction: Instruction) -> Phases:
        """Compute the gradient norm from all ranks' sums of squares, added in the order of the local engine."""
        views = self.rank.by_role(instruction)
        everyone = self.communicators.everyone
        counts = self.norm_counts
        mine = [float(any_raised(collectives.block_flags(views, instruction)))]
        for block in instruction.blocks:
            chunks = collectives.gradient_chunks(self.rank, block, views[f"gs.{block}"])
            mine.extend(self.scalars.squares_of(chunks, scratch=self.scratch))
        sizes = [1 + sum(blocks.values()) for _, blocks in counts]
        # Each rank sends its flag, then its chunks' sums: `sizes` follows from the program, so that no rank asks for
        # it.
        gathered = self.squares
        yield [everyone.iallgatherv(gathered, np.array(mine), sizes)]
        values = iter(gathered.tolist())
        overflow = False
        squares: dict[int, list[dict[str, list[float]]]] = {}
        for stage, blocks in counts:
            overflow |= bool(next(values))
            squares.setdefault(stage, []).append({block: list(islice(values, n)) for block, n in blocks.items()})
        norm = norm_of_stages([self._totals(lanes) for lanes in squares.values()], overflow=overflow)
        self.norm = norm / self.rank.loss_scale[0]
        views["norm"][0] = norm

    def _totals(self, lanes: list[dict[str, list[float]]]) -> dict[str, float]:
        """Sum a stage's squares by block. The chunks of its ranks go in the order of their shards, not of the ranks."""
        topology = self.rank.program.topology
        return {
            block: sum(
                (square for lane in topology.lanes_by_shard(named_block(block)) for square in lanes[lane][block]), 0.0
            )
            for block in lanes[0]
        }


_ALL_REDUCES: dict[Group, Callable[[GroupCollectives, Instruction], Phases]] = {
    Group.REPLICAS: GroupCollectives._sum_replicas,  # noqa: SLF001 - of this module
    Group.ENDS: GroupCollectives._sum_ends,  # noqa: SLF001
    Group.TENSOR: GroupCollectives._sum_shared,  # noqa: SLF001
    Group.EXPERTS: GroupCollectives._sum_shared,  # noqa: SLF001
    Group.COPIES: GroupCollectives._sum_replicas,  # noqa: SLF001
}

_PHASES: PerOp[Callable[[GroupCollectives, Instruction], Phases]] = PerOp(
    "phases of collectives",
    {
        ReduceScatter: GroupCollectives.reduce_scatter,
        AllReduce: GroupCollectives.all_reduce,
        AllGather: GroupCollectives.all_gather,
        AllReduceScalar: GroupCollectives.all_reduce_scalar,
    },
    never=(*LONE_OPS, *MESSAGE_OPS, *TENSOR_OPS, Release),
)


def staging_bytes(rank: RankExecutor, reduction: Reduction) -> int:
    """Return the most bytes that a collective of a rank needs outside the arena."""
    stream = rank.stage.streams[Engine.COLLECTIVE]
    return _SCALARS_BYTES + max((_staging_of(rank, instruction, reduction) for instruction in stream), default=0)


def _staging_of(rank: RankExecutor, instruction: Instruction, reduction: Reduction) -> int:
    # Mirrors the `staging.take` calls of the methods above; a new one needs its bytes here.
    total, scatters = 0, instruction.keyword == ReduceScatter.keyword
    # An update of the loss scale, on the same engine, is of no group.
    members = rank.program.topology.group_size(Group(instruction.group)) if instruction.group else 1
    for role, view in rank.by_role(instruction).items():
        packed = _packed_bytes(rank, instruction, role, len(view))
        if packed is not None:
            total += packed
            continue
        if (
            role.startswith("g.")
            and scatters
            and rank.program.topology.is_rearranged(named_block(role.removeprefix("g.")))
        ):
            total += view.nbytes
        if role.startswith("g.") and reduction == "fast":
            total += 4 * (len(view) + len(view) // members)
        elif role.startswith("g.") or (role.startswith("gs.") and instruction.group == "ends"):
            total += view.nbytes
        elif role.startswith("load."):
            total += (1 + members) * view.nbytes
        elif role.startswith("gs.") and instruction.group in ("tensor", "experts"):
            block = role.removeprefix("gs.")
            shared = sum(high - low for _, low, high in _shared(rank, block, len(view), instruction.group))
            total += (1 + members) * shared * view.itemsize
    return total + _SCALARS_BYTES * len(instruction.blocks)


def _packed_bytes(rank: RankExecutor, instruction: Instruction, role: str, elements: int) -> int | None:
    """Return the staging bytes of a quantised tensor (None: it is not quantised).

    They hold the parts sent and received, or the gathered view.
    """
    kind, _, block = role.partition(".")
    program = rank.program
    if kind == "g" and instruction.keyword == ReduceScatter.keyword:
        bits, parts, copies = gradient_bits(program, block), program.plan.replicas, 2
    elif instruction.keyword == AllGather.keyword and kind == collectives.gathered_name(instruction):
        bits, copies = _packed_bits(program, instruction, block), 1
        parts = program.topology.group_size(Group(instruction.group))
    else:
        return None
    return None if bits is None else copies * parts * packed_bytes(elements // parts, bits)


def _packed_bits(program: Program, instruction: Instruction, block: str) -> int | None:
    """Return the bits per element of a quantised gather; None if it is not quantised.

    Parts of views are not: they hold rounded values already.
    """
    return None if collectives.gathers_parts(instruction) else view_bits(program, block)


def _shared(rank: RankExecutor, block: str, elements: int, group: str) -> Iterator[tuple[int, int, int]]:
    """Yield (copies, start, end) for each range of a block's gradient that `copies` neighbouring ranks share."""
    return tensor_collectives.shared_ranges(rank, block, elements, group)


def _starts(shared: Sequence[tuple[int, int, int]]) -> list[int]:
    """Return the start of each range when all ranges are packed one after another."""
    return [0, *running_sums(high - low for _, low, high in shared)][:-1]


def _norm_counts(program: Program) -> list[tuple[int, dict[str, int]]]:
    """Return by rank, in rank order, its stage and its number of chunks in the norm by block."""
    by_rank = []
    for index, stage in enumerate(program.stages):
        elements = _reduced_elements(stage)
        for lane in range(program.topology.lanes):
            rank = program.topology.in_lane(index, lane)
            counts = {
                block: sum(1 for _ in collectives.norm_chunks(program, block, rank.replica, size, rank.peer))
                for block, size in elements.items()
            }
            by_rank.append((index, counts))
    return by_rank


def _reduced_elements(stage: ProgramStage) -> dict[str, int]:
    """Return the number of elements of every reduced gradient that the norm reads, by block in the norm's order."""
    norm = next(instruction for instruction in stage.streams[Engine.COLLECTIVE] if instruction.variant == "norm")
    tensors = {operand.role: stage.tensors[operand.tensor] for operand in norm.operands}
    return {block: tensors[f"gs.{block}"].type.elements for block in norm.blocks}

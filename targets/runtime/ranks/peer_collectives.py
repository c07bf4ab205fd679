"""What a rank does with its tensor peers while others of its collectives are under way: rows gathered and summed, the loss combined.

Parts of sums are collected and added in rank order in float32, whatever the reduction of gradients: bytes on the links are those of a
library's own sum of so many elements, and activations are of half precision, in which libraries would round after each addition.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.ops.base import Engine
from ratrain.ratrain_ir.ops.collectives import STATE_OPS, CombineLoss, GatherRows, ReduceRows, ReduceSums
from ratrain.ratrain_ir.ops.compute import Release
from ratrain.ratrain_ir.ops.kinds import LONE_OPS
from ratrain.ratrain_ir.ops.messages import MESSAGE_OPS
from ratrain.ratrain_ir.ops.per_op import PerOp
from ratrain.targets.runtime.arena.dtypes import NUMPY_DTYPES
from ratrain.targets.runtime.arena.scratch import Buffer, plan_bytes
from ratrain.targets.runtime.engine import peer_collectives

if TYPE_CHECKING:
    from ratrain.targets.program.instruction import Instruction
    from ratrain.targets.runtime.arena.scalars import Scalars
    from ratrain.targets.runtime.engine.rank import RankExecutor
    from ratrain.targets.runtime.kernels import KernelSet, Scratch
    from ratrain.targets.runtime.ranks.collectives import Phases
    from ratrain.targets.runtime.ranks.communicator import Communicator


class PeerCollectives:
    """The exchanges of one rank's tensor engine with its peers. One is under way at a time: they share the staging bytes."""

    def __init__(
        self, rank: RankExecutor, peers: Communicator, kernels: KernelSet, scalars: Scalars, scratch: Scratch
    ) -> None:
        self.rank = rank
        self.peers = peers
        self.kernels = kernels
        self.scalars = scalars
        self.scratch = scratch
        stream = rank.stage.streams[Engine.TENSOR]
        needed = max((plan_bytes(_arriving(rank, each)) for each in stream), default=0)
        self.staging: Scratch = kernels.memory.scratch(needed)
        """Where parts of other peers arrive: transport memory outside the arena, of the same kind."""

    def start(self, instruction: Instruction) -> Phases:
        """The phases of an exchange that this rank has reached."""
        self.staging.reset()
        return _PHASES[instruction.keyword](self, instruction)

    def gather_rows(self, instruction: Instruction) -> Phases:
        """Rows go straight from arena to arena."""
        views = self.rank.by_role(instruction)
        yield [self.peers.iallgather(views["whole"], views["rows"])]

    def reduce_rows(self, instruction: Instruction) -> Phases:
        """Each peer sums its run of the rows; where all have all of them, the runs then go to everyone."""
        views = self.rank.by_role(instruction)
        (parts,) = self.staging.take_all(_arriving(self.rank, instruction))
        part, whole = views["part"].reshape(-1), views["sum"].reshape(-1)
        run = slice(0, len(whole))
        if len(parts[0]) < len(whole):
            run = slice(self.peers.rank * len(parts[0]), (self.peers.rank + 1) * len(parts[0]))
        stream = [views["stream"].reshape(-1)[run]] if "stream" in views else []
        collect = self.peers.iallgather if len(parts[0]) == len(part) else self.peers.ialltoall
        yield [collect(parts, part)]
        peer_collectives.summed([*stream, *parts], whole[run], (), self.scalars, self.scratch)
        if len(parts[0]) < len(whole):
            yield [self.peers.iallgather(whole)]

    def combine_loss(self, instruction: Instruction) -> Phases:
        """Everyone gets the logs of all, and the sums of the logits of their labels, and adds them in rank order."""
        views, own = self.rank.by_role(instruction), self.peers.rank
        logs, at_labels = self.staging.take_all(_arriving(self.rank, instruction))
        self.scratch.reset()
        self.scalars.logits_of_labels([views], at_labels[own : own + 1], scratch=self.scratch)
        yield [self.peers.iallgather(logs, views["lse_part"]), self.peers.iallgather(at_labels)]
        self.scratch.reset()
        self.scalars.combine_losses(
            list(logs), at_labels, [views], scratch=self.scratch, accumulate=instruction.accumulates
        )


_PHASES: PerOp[Callable[[PeerCollectives, Instruction], Phases]] = PerOp(
    "phases of exchanges of tensor peers",
    {
        GatherRows: PeerCollectives.gather_rows,
        **dict.fromkeys((ReduceRows, ReduceSums), PeerCollectives.reduce_rows),
        CombineLoss: PeerCollectives.combine_loss,
    },
    never=(*LONE_OPS, *MESSAGE_OPS, *STATE_OPS, Release),
)


def _arriving(rank: RankExecutor, instruction: Instruction) -> list[Buffer]:
    """What of an exchange arrives outside the arena, a row from each peer: parts of this one's run of a sum, or logs of all rows, and a number.

    Of sums that do not divide evenly everyone gets all parts.
    """
    peers = rank.program.plan.tp
    tensors = {operand.role: rank.stage.tensors[operand.tensor].type for operand in instruction.operands}
    arriving = tensors.get("part") or tensors.get("lse_part")
    if arriving is None:
        return []
    is_cut = "part" in tensors and not arriving.elements % peers
    elements = arriving.elements // peers if is_cut else arriving.elements
    numbers = [] if "part" in tensors else [peer_collectives.at_labels_buffer(peers)]
    return [Buffer((peers, elements), NUMPY_DTYPES[arriving.dtype]), *numbers]

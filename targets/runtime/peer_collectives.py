"""What tensor peers of the local engine do together: rows gathered and summed, the loss combined, gradients of shared parameters summed.

Sums are made in rank order in float32 (the loss in float64) and rounded once, so that results are the same in every run of as many peers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ratrain.ratrain_ir.blocks import parameters_within, parse_block, shares_rows
from ratrain.ratrain_ir.ops import Engine
from ratrain.ratrain_ir.tensor_peers import peer_model, share_of
from ratrain.targets.program.kernels import IGNORED_LABEL
from ratrain.targets.runtime.rank import shape_only

if TYPE_CHECKING:
    from ratrain.targets.program.program import Program
    from ratrain.targets.runtime.collectives import Member
    from ratrain.targets.runtime.kernels import KernelSet, Scratch
    from ratrain.targets.runtime.memory import Memory
    from ratrain.targets.runtime.rank import Rank
    from ratrain.targets.runtime.scalars import Flags, Scalars, Views


def gather_rows(members: Sequence[Member], kernels: KernelSet) -> None:
    """Every peer gets the rows of all."""
    views = [rank.by_role(instruction) for rank, instruction in members]
    length = len(views[0]["rows"])
    for mine in views:
        for number, other in enumerate(views):
            kernels.memory.copy(mine["whole"][number * length : (number + 1) * length], other["rows"])


def reduce_rows(members: Sequence[Member], scalars: Scalars, scratch: Scratch) -> None:
    """Every peer gets its rows, or all, of the sum of the stream, where one goes around, and all parts."""
    views = [rank.by_role(instruction) for rank, instruction in members]
    shares = shares_rows(members[0][0].program.plan)
    for number, mine in enumerate(views):
        length = len(mine["sum"])
        rows = slice(number * length, (number + 1) * length) if shares else slice(0, length)
        stream = [mine["stream"]] if "stream" in mine else []
        parts = [each.reshape(-1) for each in (*stream, *(other["part"][rows] for other in views))]
        summed(parts, mine["sum"].reshape(-1), (), scalars, scratch)


def summed(parts: Sequence[NDArray[Any]], out: NDArray[Any], flags: Flags, scalars: Scalars, scratch: Scratch) -> None:
    """Set `out` to the sum of parts, of which it may be the first; raise flags unless all of it is finite."""
    scratch.reset()
    scalars.mean_of_replicas(parts, out, flags, scratch=scratch, accumulate=False, divisor=1.0)


def exchange_scratch_bytes(program: Program, kernels: KernelSet) -> int:
    """Scratch of the largest sum of rows of any stage."""
    most = 0
    for stage in program.stages:
        for instruction in stage.streams[Engine.TENSOR]:
            types = {operand.role: stage.tensors[operand.tensor].type for operand in instruction.operands}
            if "sum" in types:
                out = shape_only(types["sum"].dtype, (types["sum"].elements,))
                parts = [out] * (1 + program.plan.tp)
                needed = kernels.scratch_bytes("mean_of_replicas", parts=parts, out=out, accumulate=False, divisor=1.0)
                most = max(most, needed + kernels.scalar_bytes)
    return most


def combine_loss(members: Sequence[Member]) -> None:
    """Of each row the log of the sum of exponentials over the whole vocabulary, and the loss of the rows that count."""
    views = [rank.by_role(instruction) for rank, instruction in members]
    memory = members[0][0].memory
    parts = np.stack([np.asarray(memory.to_host(mine["lse_part"]), np.float64) for mine in views])
    at_labels = [logits_of_labels(mine, memory) for mine in views]
    total, loss = combined_loss(parts, at_labels, memory.to_host(views[0]["labels"]))
    for (_, instruction), mine in zip(members, views, strict=True):
        keep_loss(mine, memory, total, loss, accumulate=instruction.accumulates)


def logits_of_labels(views: Views, memory: Memory) -> float:
    """The sum of the logits of the labels that a peer has.

    The loss of a peer's rows is the sum of (its log - logit of the label); so these logits are what its own logs have more.
    """
    part = np.asarray(memory.to_host(views["lse_part"]), np.float64)
    own = np.asarray(memory.to_host(views["labels"])) >= 0
    return float(part[own].sum()) - float(views["loss_part"][0])


def combined_loss(
    parts: NDArray[np.float64], at_labels: Sequence[float], labels: NDArray[np.int32]
) -> tuple[NDArray[np.float32], float]:
    """The log of the sum of exponentials of each row from those of all peers, shape [peers, rows]; and the loss of the rows that count."""
    peak = parts.max(axis=0)
    finite = np.isfinite(peak)
    safe = np.where(finite, peak, 0.0)
    total = np.where(finite, safe + np.log(np.exp(parts - safe).sum(axis=0)), peak).astype(np.float32)
    counted = np.asarray(labels) != IGNORED_LABEL
    return total, float(total[counted].astype(np.float64).sum()) - sum(at_labels)


def keep_loss(views: Views, memory: Memory, total: NDArray[np.float32], loss: float, *, accumulate: bool) -> None:
    """Write the logs of all rows, and the loss or what it grows by."""
    memory.write(views["lse"], total)
    views["loss"][0] = (float(views["loss"][0]) if accumulate else 0.0) + loss


def all_reduce_shared(members: Sequence[Member], kernels: KernelSet, scalars: Scalars, scratch: Scratch) -> None:
    """Gradients of parameters that several peers have become the sum of theirs; a block's flag of any is a flag of all."""
    views = [rank.by_role(instruction) for rank, instruction in members]
    ranks = [rank for rank, _ in members]
    for name in members[0][1].blocks:
        gradients, flags = ([mine[f"{what}.{name}"] for mine in views] for what in ("gs", "flag"))
        for copies, low, high in shared_ranges(ranks[0], name, len(gradients[0])):
            for first in range(0, len(members), copies):
                parts = [gradient[low:high] for gradient in gradients[first : first + copies]]
                summed(parts, parts[0], flags, scalars, scratch)
                for other in parts[1:]:
                    kernels.memory.copy(other, parts[0])
        scalars.spread(flags, flags)


def shared_ranges(rank: Rank, name: str, elements: int) -> Iterator[tuple[int, int, int]]:
    """What of a rank's part of a block's gradient is of parameters that several peers have: how many, and where it begins and ends."""
    program = rank.program
    owner = parse_block(name)
    assert owner is not None
    start = program.topology.shard_range(owner, rank.replica).start
    for parameter, low, high in parameters_within(peer_model(program.model, program.plan), owner, start, elements):
        copies = share_of(program.model, program.plan.tp, parameter.weight).copies
        if copies > 1:
            yield copies, low, high

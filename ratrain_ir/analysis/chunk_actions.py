"""Actions of a stage's op list: the passes of micro-batches through chunks that its ops add up to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.model.slots import SPLIT_KINDS
from ratrain.ratrain_ir.ops.compute import BackwardWeight, Forward, InputGradientOp
from ratrain.ratrain_ir.ops.kinds import piece_of
from ratrain.ratrain_ir.schedules.action import Action, ActionKind, most_in_flight
from ratrain.ratrain_ir.schedules.named import most_held

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module, Stage
    from ratrain.ratrain_ir.ops.base import Op


def chunk_actions(module: Module, stage: Stage) -> Iterator[tuple[Op, Action]]:
    """Yield (op, action) for each action, with the op that ends it, in list order.

    A forward ends at the chunk's last block. A backward, or the input half of one, ends at its first block with one. A
    message
    thus never seems to carry something that is not made yet. A weight half stands at the first block that has one.
    """
    topology = module.topology
    chunk_of = topology.chunk_of
    lasts = {blocks[-1] for blocks in topology.chunk_blocks}
    firsts = topology.backward_ends
    # the first block of a chunk with a weight half: the embedding has none
    first_halves = {next(b for b in blocks if b.kind in SPLIT_KINDS) for blocks in topology.chunk_blocks}
    # In a chunk that begins with the embedding, the op that ends the input half is a whole `backward`. Only its weight
    # halves tell that its backward is split.
    split = {
        (chunk_of[op.block], piece_of(op))
        for op in stage.ops
        if type(op) is BackwardWeight and op.block in first_halves
    }
    for op in stage.ops:
        if isinstance(op, Forward):
            if op.block in lasts:
                yield op, Action(ActionKind.FORWARD, op.micro_batch, chunk_of[op.block], op.slice or 0)
        elif isinstance(op, InputGradientOp):
            if op.block in firsts:
                chunk = chunk_of[op.block]
                kind = ActionKind.BACKWARD_INPUT if (chunk, piece_of(op)) in split else ActionKind.BACKWARD
                yield op, Action(kind, op.micro_batch, chunk, op.slice or 0)
        elif isinstance(op, BackwardWeight) and op.block in first_halves:
            yield op, Action(ActionKind.BACKWARD_WEIGHT, op.micro_batch, chunk_of[op.block], op.slice or 0)


def most_in_flight_on(module: Module, stage: Stage) -> int:
    """Return the most passes of a micro-batch (or slice) through a chunk that a placed stage has in flight at once.

    Taken from the plan's schedule if it names one, else counted from the stage's ops.
    """
    if module.plan.schedule is not None:
        return most_held(module.plan.schedule, module.topology.shape, stage.index)
    passes = ((action.kind, action.chunk) for _, action in chunk_actions(module, stage))
    return most_in_flight(passes, module.topology.forward_only)

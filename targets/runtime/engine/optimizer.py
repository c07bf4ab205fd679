"""Optimizer updates of shards and the loss scale, as the interpreter runs them.

An update is skipped, on all replicas alike, if its block's flag is set: some contribution to the gradient was not
finite. Adam's step count is carried per block and counts applied updates. The loss scale halves after a step with an
overflow and doubles after `GROWTH_INTERVAL` steps without one.
"""

from __future__ import annotations

from functools import partial
from math import sqrt
from typing import TYPE_CHECKING, Any

from ratrain.ratrain_ir.config.tensor_ranks import rank_model
from ratrain.ratrain_ir.config.types import Dtype, StateKind
from ratrain.ratrain_ir.model.blocks import block_chain, parameters_within, parse_block
from ratrain.targets.runtime.arena.scalars import BlockUpdate
from ratrain.targets.runtime.engine.collectives import gradient_chunks
from ratrain.targets.runtime.engine.quantised import quantised_scratch_bytes
from ratrain.targets.runtime.engine.rank import RankExecutor, shape_only
from ratrain.targets.runtime.engine.streamed_state import cast_master, streamed_parts

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.targets.program.instruction import Instruction
    from ratrain.targets.program.program import Program
    from ratrain.targets.runtime.kernels import KernelSet, Scratch


class Updater:
    """Application of AdamW to the shards of a program's blocks."""

    def __init__(self, program: Program, kernels: KernelSet) -> None:
        self.program = program
        self.kernels = kernels
        blocks = {rank: program.topology.stage_blocks[rank.stage] for rank in program.topology.ranks}
        self.scalars = kernels.scalars(
            {(rank.stage, program.topology.lane(rank)): [*map(str, of)] for rank, of in blocks.items()}
        )
        self.log = self.scalars.read()
        """Log of the last finished step."""

    def begin_step(self, step: int, scale: float) -> None:
        """Set the learning rate of a step and its loss scale."""
        self.scalars.begin_step(self.program.plan.optimizer.learning_rate(step), scale)

    def end_step(self) -> None:
        """Read the log of a step, or of an evaluation pass."""
        self.log = self.scalars.read()

    def update(self, rank: RankExecutor, instruction: Instruction, scratch: Scratch) -> None:
        """Update one block; a raised flag leaves everything unchanged but the view, which is written all the same."""
        views = rank.by_role(instruction)
        block, place = instruction.blocks[0], (rank.stage_index, rank.lane)
        squares = None if "norm" in views else gradient_chunks(rank, block, views["g"])
        decay = self.decayed_ranges(block, rank.replica, len(views["g"]))
        files = rank.in_files(instruction)
        stream = partial(streamed_parts, files=files, memory=rank.memory) if files else None
        update = BlockUpdate(place, block, views, self.program.plan.optimizer, decay, squares, stream)
        self.scalars.update(update, scratch=scratch)

    def gradient_norm(self) -> float | None:
        """Return the norm of the last step's reduced gradient: the program's, or over the blocks this process updated.

        Blocks are in forward order within a rank, ranks in rank order. None if neither is known.
        """
        if self.log.norm is not None or not self.log.squares:
            return self.log.norm
        return sqrt(sum(self.squares_of(*place) for place in sorted(self.log.squares)))

    def squares_of(self, stage: int, lane: int) -> float:
        """Return a rank's contribution to the square of that norm, if the program computes no norm."""
        mine = self.log.squares.get((stage, lane), {})
        return sum(mine[name] for block in block_chain(self.program.model) if (name := str(block)) in mine)

    def refresh_view(self, rank: RankExecutor, instruction: Instruction, scratch: Scratch) -> None:
        """Write the view of an update's block from the present masters, if the update writes one."""
        views = rank.by_role(instruction)
        if "w" in views:
            cast_master(rank, instruction, "p", views["w"], self.kernels, scratch)

    def decayed_ranges(self, name: str, replica: int, elements: int) -> list[tuple[int, int]]:
        """Return the ranges of a replica's shard that weight decay applies to: matrices, not norms or biases."""
        block = parse_block(name)
        assert block is not None
        start = self.program.topology.shard_range(block, replica).start
        parts = parameters_within(rank_model(self.program.model, self.program.plan), block, start, elements)
        return [(low, high) for parameter, low, high in parts if parameter.decayed]


def update_scratch_bytes(program: Program, kernels: KernelSet) -> int:
    """Return the scratch of the largest update or reduction of any stage."""
    plan = program.plan
    most = 0
    for stage in program.stages:
        for tensor in stage.tensors:
            if tensor.kind is StateKind.MASTER:
                most = max(most, _bytes_for(plan, kernels, tensor.type.elements))
    return most + kernels.scalar_bytes


def _bytes_for(plan: Plan, kernels: KernelSet, elements: int) -> int:
    f32, shard = shape_only(Dtype.F32, (elements,)), shape_only(Dtype(plan.grad_shard_dtype), (elements,))
    whole = shape_only(Dtype(plan.grad_dtype), (elements,))
    view = shape_only(Dtype(plan.view_dtype), (elements,))
    options: dict[str, Any] = {"step": 1, "grad_multiplier": 1.0, "lr": 1.0, "beta1": 0.9, "beta2": 0.9}
    options |= {"eps": 1.0, "weight_decay": 0.0, "decay": [(0, elements)]}
    parts, divisor = [whole] * max(plan.replicas, plan.tp), float(plan.dp)
    needs = [
        kernels.scratch_bytes("adamw", master=f32, m=f32, v=f32, grad=shard, view=view, **options),
        kernels.scratch_bytes("cast", src=f32, dst=view),
        kernels.scratch_bytes("add", a=shard, b=shard, out=shard),
        kernels.scratch_bytes("all_finite", a=shard),
        kernels.scratch_bytes("mean_of_replicas", parts=parts, out=shard, accumulate=True, divisor=divisor),
    ]
    return max(*needs, quantised_scratch_bytes(plan, kernels, elements))

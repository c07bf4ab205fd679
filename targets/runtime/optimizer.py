"""UpdateShard and the loss scale as the interpreter runs them.

An update is skipped, on all replicas alike, when its block's flag is set: some contribution to the gradient was not finite. Adam's
step count is carried per block and counts applied updates. The loss scale halves after a step with an overflow and doubles after
`GROWTH_INTERVAL` steps without one.
"""

from __future__ import annotations

from math import inf, isfinite, sqrt
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ratrain.ratrain_ir.blocks import block_chain, parameters_within, parse_block
from ratrain.ratrain_ir.types import Dtype, StateKind
from ratrain.targets.runtime.collectives import chunk_squares
from ratrain.targets.runtime.rank import Rank, shape_only

if TYPE_CHECKING:
    from ratrain.targets.program.program import Instruction, Program
    from ratrain.targets.runtime.kernels import KernelSet, Scratch

INITIAL_SCALE = 65536.0
GROWTH_INTERVAL = 2000
_MAX_SCALE = 2.0**24


@frozen(eq=False)
class LossScale:
    """The carried scalar `scale`: the factor of the loss, and the steps since it last changed."""

    values: NDArray[np.float32]

    def start(self, fixed: float | None) -> None:
        """The scale of the first step: the plan's, or the dynamic one's start."""
        self.values[0] = INITIAL_SCALE if fixed is None else fixed
        self.values[1] = 0.0

    def advance(self, *, overflow: bool) -> None:
        """The scale of the next step."""
        if overflow:
            self.values[0] = max(1.0, float(self.values[0]) / 2)
            self.values[1] = 0.0
            return
        self.values[1] += 1.0
        if self.values[1] >= GROWTH_INTERVAL:
            self.values[0] = min(_MAX_SCALE, float(self.values[0]) * 2)
            self.values[1] = 0.0


class Updater:
    """Applies AdamW to the shards of a program's blocks."""

    def __init__(self, program: Program, kernels: KernelSet) -> None:
        self.program = program
        self.kernels = kernels
        self.learning_rate = 0.0
        self.skipped = 0
        """Blocks skipped in this step, counted once a rank."""
        self._lock = Lock()
        self.squares: dict[tuple[int, int], dict[str, float]] = {}
        """Of this step, by (stage, replica) and block: the sums of squares of reduced gradients, where the program has no norm."""

    def begin_step(self, step: int) -> None:
        """Set what depends on the step's number alone."""
        self.learning_rate = self.program.plan.optimizer.learning_rate(step)
        self.skipped = 0
        self.squares = {}

    def update(self, rank: Rank, instruction: Instruction, scratch: Scratch) -> None:
        """One block's update; a set flag leaves everything as it was but the view, which is written all the same."""
        views = rank.by_role(instruction)
        master, view = views["p"], views.get("w")
        multiplier = self.gradient_multiplier(views)
        if "norm" not in views:
            self._note_squares(rank, instruction.blocks[0], views["g"], views["scale"], finite=multiplier is not None)
        if multiplier is None:
            with self._lock:  # ranks may run side by side
                self.skipped += 1
            self.refresh_view(rank, instruction, scratch)
            return
        scratch.reset()
        views["t"][0] += 1
        settings = self.program.plan.optimizer
        self.kernels.adamw(
            master,
            views["m1"],
            views["m2"],
            views["g"],
            scratch=scratch,
            view=view,
            step=int(views["t"][0]),
            grad_multiplier=multiplier,
            lr=self.learning_rate,
            beta1=settings.betas[0],
            beta2=settings.betas[1],
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            decay=self.decayed_ranges(instruction.blocks[0], rank.replica, len(master)),
        )

    def _note_squares(
        self, rank: Rank, block: str, gradient: NDArray[Any], scale: NDArray[Any], *, finite: bool
    ) -> None:
        """Sum the squares of a block's gradient for the log, without its loss scale; infinite where it overflowed."""
        mine = self.squares.setdefault((rank.stage_index, rank.replica), {})
        squares = chunk_squares(rank, block, {f"gs.{block}": gradient})
        mine[block] = sum(squares) / float(scale[0]) ** 2 if finite else inf

    def gradient_norm(self) -> float | None:
        """The norm of the reduced gradient over this process's ranks in this step; None where the program computes it.

        Blocks in forward order within a rank, then ranks in stage and replica order.
        """
        return sqrt(sum(self.squares_of(*place) for place in sorted(self.squares))) if self.squares else None

    def squares_of(self, stage: int, replica: int) -> float:
        """What a rank contributes to the square of that norm."""
        mine = self.squares.get((stage, replica), {})
        return sum(mine[name] for block in block_chain(self.program.model) if (name := str(block)) in mine)

    def refresh_view(self, rank: Rank, instruction: Instruction, scratch: Scratch) -> None:
        """Write the view of an update's block, where it writes one, from the master weights as they are."""
        views = rank.by_role(instruction)
        if "w" in views:
            scratch.reset()
            self.kernels.cast(views["p"], views["w"], scratch=scratch)

    def gradient_multiplier(self, views: dict[str, NDArray[Any]]) -> float | None:
        """What the reduced gradient is multiplied with: the loss scale's inverse, and clipping's factor; None: skip.

        Clipping as `torch.nn.utils.clip_grad_norm_` does it; its norm is infinite when any block overflowed.
        """
        if int(views["flag"][0]):
            return None
        inverse = 1.0 / float(views["scale"][0])
        if "norm" not in views:
            return inverse
        norm = float(views["norm"][0]) * inverse
        return inverse * min(1.0, self.program.plan.optimizer.max_norm / (norm + 1e-6)) if isfinite(norm) else None

    def decayed_ranges(self, name: str, replica: int, elements: int) -> list[tuple[int, int]]:
        """The parts of a replica's shard that are decayed: matrices, not norms or biases."""
        block = parse_block(name)
        assert block is not None
        start = self.program.topology.shard_range(block, replica).start
        parts = parameters_within(self.program.model, block, start, elements)
        return [(low, high) for parameter, low, high in parts if parameter.decayed]

    def scratch_bytes(self) -> int:
        """Scratch of the largest update or reduction of any stage."""
        plan = self.program.plan
        most = 0
        for stage in self.program.stages:
            for tensor in stage.tensors:
                if tensor.kind is StateKind.MASTER:
                    most = max(most, self._bytes_for(tensor.type.elements, plan.dp, Dtype(plan.grad_shard_dtype)))
        return most

    def _bytes_for(self, elements: int, replicas: int, dtype: Dtype) -> int:
        plan = self.program.plan
        f32, shard = shape_only(Dtype.F32, (elements,)), shape_only(dtype, (elements,))
        whole = shape_only(Dtype(plan.grad_dtype), (elements,))
        view = shape_only(Dtype(plan.view_dtype), (elements,))
        options: dict[str, Any] = {"step": 1, "grad_multiplier": 1.0, "lr": 1.0, "beta1": 0.9, "beta2": 0.9}
        options |= {"eps": 1.0, "weight_decay": 0.0, "decay": [(0, elements)]}
        needs = [
            self.kernels.scratch_bytes("adamw", master=f32, m=f32, v=f32, grad=shard, view=view, **options),
            self.kernels.scratch_bytes("cast", src=f32, dst=view),
            self.kernels.scratch_bytes("add", a=shard, b=shard, out=shard),
            self.kernels.scratch_bytes("all_finite", a=shard),
            self.kernels.scratch_bytes(
                "mean_of_replicas", parts=[whole] * replicas, out=shard, accumulate=True, divisor=float(replicas)
            ),
        ]
        return max(needs)

"""Single numbers of a step (loss, norm, flags, loss scale) as Python numbers, for kernels on host memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from math import inf, isfinite, sqrt
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ratrain.targets.program.kernels import IGNORED_LABEL
from ratrain.targets.runtime.arena.kernel_memory import HOST
from ratrain.targets.runtime.arena.scalars import LossScale, StepLog

if TYPE_CHECKING:
    from ratrain.targets.runtime.arena.scalars import BiasMove, BlockUpdate, Chunks, Flags, Place, Views
    from ratrain.targets.runtime.arena.scratch import Scratch
    from ratrain.targets.runtime.kernels.interface import KernelSet


class HostScalars:
    """`Scalars` for kernels on host memory."""

    def __init__(self, kernels: KernelSet) -> None:
        self._kernels = kernels
        self._lock = Lock()
        self.begin_step(0.0, 1.0)

    def begin_step(self, learning_rate: float, scale: float) -> None:
        """Set the learning rate and loss scale of a step; forget the log of the last one."""
        self._learning_rate = learning_rate
        self._scale = scale
        self._loss: float | None = None
        self._norm: float | None = None
        self._skipped = 0
        self._squares: dict[Place, dict[str, float]] = {}

    def read(self) -> StepLog:
        """Return the log of the step so far."""
        norm = None if self._norm is None else self._norm / self._scale
        return StepLog(self._loss, norm, self._skipped, self._squares)

    def clear(self, flags: Flags) -> None:
        """Lower flags."""
        for flag in flags:
            flag[0] = 0

    def spread(self, flags: Flags, outs: Flags) -> None:
        """Set all of `outs` to 1 if any flag is raised, else to 0."""
        raised = int(any_raised(flags))
        for out in outs:
            out[0] = raised

    def mean_of_replicas(
        self,
        parts: Sequence[NDArray[Any]],
        out: NDArray[Any],
        flags: Flags,
        *,
        scratch: Scratch,
        accumulate: bool,
        divisor: float,
        bits: int | None = None,
    ) -> None:
        """Run the kernel of parts as they are or of packed ones; raise the flags unless all results are finite."""
        kernels = self._kernels
        mean = kernels.mean_of_replicas if bits is None else partial(kernels.mean_of_quantised, bits=bits)
        if not mean(parts, out, scratch=scratch, accumulate=accumulate, divisor=divisor):
            _raise(flags)

    def check_finite(self, a: NDArray[Any], flags: Flags, *, scratch: Scratch) -> None:
        """Raise flags unless all elements are finite."""
        if not self._kernels.all_finite(a, scratch=scratch):
            _raise(flags)

    def sum_losses(self, losses: Sequence[NDArray[Any]], *, scratch: Scratch) -> None:
        """Set the step's loss to the sum of `losses`, in order."""
        del scratch
        self._loss = float(sum(float(loss[0]) for loss in losses))

    def logits_of_labels(self, peers: Sequence[Views], out: NDArray[np.float64], *, scratch: Scratch) -> None:
        """Set `out[i]` to the sum of the label logits that tensor-parallel rank i holds, in float64.

        A rank's `loss_part` is the sum of its log-sum-exps minus those logits, over the rows whose label it holds.
        """
        del scratch
        for number, mine in enumerate(peers):
            part = np.asarray(mine["lse_part"], np.float64)
            out[number] = float(part[mine["labels"] >= 0].sum()) - float(mine["loss_part"][0])

    def combine_losses(
        self,
        parts: Sequence[NDArray[np.float32]],
        at_labels: NDArray[np.float64],
        peers: Sequence[Views],
        *,
        scratch: Scratch,
        accumulate: bool,
    ) -> None:
        """Combine partial log-sum-exps and label logits into all ranks' `lse` and `loss`, in float64, rank by rank."""
        del scratch
        total = _combined_logs(np.stack([np.asarray(part, np.float64) for part in parts]))
        counted = peers[0]["labels"] != IGNORED_LABEL
        loss = float(total[counted].astype(np.float64).sum()) - sum(at_labels.tolist())
        for mine in peers:
            mine["lse"][:] = total
            mine["loss"][0] = (float(mine["loss"][0]) if accumulate else 0.0) + loss

    def norm(
        self,
        stages: Sequence[Mapping[str, Chunks]],
        flags: Flags,
        outs: Sequence[NDArray[Any]],
        *,
        scratch: Scratch,
    ) -> None:
        """Set `outs` to the norm of the reduced gradient.

        Squares are summed in float64 chunk by chunk, then over blocks, then over stages.
        """
        totals = [{block: self._added(chunks, scratch) for block, chunks in blocks.items()} for blocks in stages]
        self._norm = norm_of_stages(totals, overflow=any_raised(flags))
        for out in outs:
            out[0] = self._norm

    def squares_of(self, chunks: Chunks, *, scratch: Scratch) -> list[float]:
        """Return the sum of the squares of each chunk."""
        of_halves = partial(self._kernels.cast, scratch=scratch)  # numpy takes six times as long for float16
        return [HOST.sum_of_squares(each, of_halves if each.dtype == np.float16 else None) for each in chunks]

    def _added(self, chunks: Chunks, scratch: Scratch) -> float:
        """Return the sum of the squares of all chunks."""
        total = 0.0
        for squares in self.squares_of(chunks, scratch=scratch):
            total += squares
        return total

    def update(self, update: BlockUpdate, *, scratch: Scratch) -> None:
        """Update one block by AdamW. If its gradient is not finite, only the view is rounded from the master again."""
        views, settings = update.views, update.settings
        multiplier = self._multiplier(views, settings.max_norm)
        if update.squares is not None:
            mine = self._squares.setdefault(update.place, {})
            finite = multiplier is not None
            mine[update.block] = self._added(update.squares, scratch) / self._scale**2 if finite else inf
        scratch.reset()
        if multiplier is None:
            with self._lock:  # ranks may run in parallel
                self._skipped += 1
            if "w" in views:
                for part in update.parts():
                    self._kernels.cast(part.views["p"], part.views["w"], scratch=scratch)
            return
        views["t"][0] += 1
        for part in update.parts():
            scratch.reset()
            self._kernels.adamw(
                part.views["p"],
                part.views["m1"],
                part.views["m2"],
                part.views["g"],
                scratch=scratch,
                view=part.views.get("w"),
                step=int(views["t"][0]),
                grad_multiplier=multiplier,
                lr=self._learning_rate,
                beta1=settings.betas[0],
                beta2=settings.betas[1],
                eps=settings.eps,
                weight_decay=settings.weight_decay,
                decay=part.decay,
            )

    def _multiplier(self, views: Views, max_norm: float) -> float | None:
        """Return the factor of the reduced gradient, 1 / loss scale times the clipping factor; None: skip the update.

        Clipping follows `torch.nn.utils.clip_grad_norm_`. The norm is infinite if any block overflowed.
        """
        if int(views["flag"][0]):
            return None
        inverse = 1.0 / float(views["scale"][0])
        if "norm" not in views:
            return inverse
        norm = float(views["norm"][0]) * inverse
        return inverse * min(1.0, max_norm / (norm + 1e-6)) if isfinite(norm) else None

    def move_bias(self, move: BiasMove, *, scratch: Scratch) -> None:
        """Move a bias by the signs of what experts lack of the mean, unless the block's update is skipped."""
        del scratch
        skips = any_raised(move.flags) or (move.norm is not None and not isfinite(float(move.norm[0])))
        lacking = move.doubled_mean - 2 * np.sum(move.counts, axis=0, dtype=np.int64)
        step = np.sign(lacking).astype(np.float32) * np.float32(0 if skips else move.rate)
        for bias, counts in move.ranks:
            bias[:] = bias + step
            counts[:] = 0

    def advance_scale(self, scale: NDArray[Any], overflow: NDArray[Any], *, scratch: Scratch) -> None:
        """Set the loss scale of the next step."""
        del scratch
        LossScale(scale).advance(overflow=bool(overflow[0]))


def _combined_logs(parts: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return each row's log-sum-exp from the partial ones of all tensor-parallel ranks, shape [ranks, rows]."""
    peak = parts.max(axis=0)
    finite = np.isfinite(peak)
    # inf - inf would be NaN: a row whose peak is infinite keeps that peak as its result
    safe = np.where(finite, peak, 0.0)
    logs: NDArray[np.float32] = np.where(finite, safe + np.log(np.exp(parts - safe).sum(axis=0)), peak).astype(
        np.float32
    )
    return logs


def any_raised(flags: Iterable[NDArray[Any]]) -> bool:
    """Return whether any flag in host memory is raised."""
    return any(int(flag[0]) for flag in flags)


def norm_of_stages(stages: Sequence[Mapping[str, float]], *, overflow: bool) -> float:
    """Return the norm from each stage's sums of squares by block, both in forward order; infinite on overflow."""
    return inf if overflow else sqrt(sum(sum(totals.values()) for totals in stages))


def _raise(flags: Flags) -> None:
    for flag in flags:
        flag[0] = 1

"""The single numbers of a step as numbers of Python, from what is in the memory of this process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf, isfinite, sqrt
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ratrain.targets.program.kernels import IGNORED_LABEL
from ratrain.targets.runtime.arena.kernel_memory import HOST
from ratrain.targets.runtime.arena.scalars import LossScale, StepLog

if TYPE_CHECKING:
    from ratrain.targets.runtime.arena.scalars import BlockUpdate, Chunks, Flags, Place, Views
    from ratrain.targets.runtime.arena.scratch import Scratch
    from ratrain.targets.runtime.kernels.interface import KernelSet


class HostScalars:
    """`Scalars` of kernels on a host's memory."""

    def __init__(self, kernels: KernelSet) -> None:
        self._kernels = kernels
        self._lock = Lock()
        self.begin_step(0.0, 1.0)

    def begin_step(self, learning_rate: float, scale: float) -> None:
        """Note what the step depends on, and forget the last one's log."""
        self._learning_rate = learning_rate
        self._scale = scale
        self._loss: float | None = None
        self._norm: float | None = None
        self._skipped = 0
        self._squares: dict[Place, dict[str, float]] = {}

    def read(self) -> StepLog:
        """The log."""
        norm = None if self._norm is None else self._norm / self._scale
        return StepLog(self._loss, norm, self._skipped, self._squares)

    def clear(self, flags: Flags) -> None:
        """Lower flags."""
        for flag in flags:
            flag[0] = 0

    def spread(self, flags: Flags, outs: Flags) -> None:
        """Set all of `outs` to whether any flag is raised."""
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
    ) -> None:
        """The kernel of that name; flags are raised unless all is finite."""
        if not self._kernels.mean_of_replicas(parts, out, scratch=scratch, accumulate=accumulate, divisor=divisor):
            _raise(flags)

    def mean_of_quantised(
        self,
        parts: Sequence[NDArray[Any]],
        out: NDArray[Any],
        flags: Flags,
        *,
        scratch: Scratch,
        accumulate: bool,
        divisor: float,
        bits: int,
    ) -> None:
        """The kernel of that name; flags are raised unless all is finite."""
        if not self._kernels.mean_of_quantised(
            parts, out, scratch=scratch, accumulate=accumulate, divisor=divisor, bits=bits
        ):
            _raise(flags)

    def check_finite(self, a: NDArray[Any], flags: Flags, *, scratch: Scratch) -> None:
        """Raise flags unless all elements are finite."""
        if not self._kernels.all_finite(a, scratch=scratch):
            _raise(flags)

    def sum_losses(self, losses: Sequence[NDArray[Any]], *, scratch: Scratch) -> None:
        """The step's loss is the sum of these, in order."""
        del scratch
        self._loss = float(sum(float(loss[0]) for loss in losses))

    def logits_of_labels(self, peers: Sequence[Views], out: NDArray[np.float64], *, scratch: Scratch) -> None:
        """In float64."""
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
        """In float64, peer by peer."""
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
        """Chunk by chunk in float64, then blocks, then stages."""
        del scratch
        totals = [{block: _added(chunks) for block, chunks in blocks.items()} for blocks in stages]
        self._norm = norm_of_stages(totals, overflow=any_raised(flags))
        for out in outs:
            out[0] = self._norm

    def squares_of(self, chunks: Chunks, *, scratch: Scratch) -> list[float]:
        """The sum of the squares of each chunk."""
        del scratch
        return [HOST.sum_of_squares(chunk) for chunk in chunks]

    def update(self, update: BlockUpdate, *, scratch: Scratch) -> None:
        """AdamW, unless the gradient is not finite."""
        views, settings = update.views, update.settings
        multiplier = self._multiplier(views, settings.max_norm)
        if update.squares is not None:
            mine = self._squares.setdefault(update.place, {})
            finite = multiplier is not None
            mine[update.block] = _added(update.squares) / self._scale**2 if finite else inf
        scratch.reset()
        if multiplier is None:
            with self._lock:  # ranks may run side by side
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
        """What the reduced gradient is multiplied with: the loss scale's inverse, and clipping's factor; None: skip.

        Clipping as `torch.nn.utils.clip_grad_norm_` does it; its norm is infinite when any block overflowed.
        """
        if int(views["flag"][0]):
            return None
        inverse = 1.0 / float(views["scale"][0])
        if "norm" not in views:
            return inverse
        norm = float(views["norm"][0]) * inverse
        return inverse * min(1.0, max_norm / (norm + 1e-6)) if isfinite(norm) else None

    def advance_scale(self, scale: NDArray[Any], overflow: NDArray[Any], *, scratch: Scratch) -> None:
        """The loss scale of the next step."""
        del scratch
        LossScale(scale).advance(overflow=bool(overflow[0]))


def _combined_logs(parts: NDArray[np.float64]) -> NDArray[np.float32]:
    """The log of the sum of exponentials of each row from those of all peers, shape [peers, rows]."""
    peak = parts.max(axis=0)
    finite = np.isfinite(peak)
    safe = np.where(finite, peak, 0.0)
    logs: NDArray[np.float32] = np.where(finite, safe + np.log(np.exp(parts - safe).sum(axis=0)), peak).astype(
        np.float32
    )
    return logs


def any_raised(flags: Iterable[NDArray[Any]]) -> bool:
    """Whether any flag of a host is raised."""
    return any(int(flag[0]) for flag in flags)


def norm_of_stages(stages: Sequence[Mapping[str, float]], *, overflow: bool) -> float:
    """The norm from each stage's sums of squares by block, both in forward order."""
    return inf if overflow else sqrt(sum(sum(totals.values()) for totals in stages))


def _raise(flags: Flags) -> None:
    for flag in flags:
        flag[0] = 1


def _added(chunks: Chunks) -> float:
    """The squares of all chunks of a host."""
    total = 0.0
    for chunk in chunks:
        total += HOST.sum_of_squares(chunk)
    return total

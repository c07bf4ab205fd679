"""The single numbers of a step: flags, loss, norm, loss scale, and what updates are made with.

On a host they are numbers of Python. A device computes them itself, so that nothing in a step waits for what the host reads: it is told
some before the step, and what a log shows is read when the step has ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf, isfinite, sqrt
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from attrs import frozen
from numpy.typing import NDArray

from ratrain.ratrain_ir.frontend.plan import Optimizer
from ratrain.targets.runtime.memory import HOST

if TYPE_CHECKING:
    from ratrain.targets.runtime.kernels.interface import KernelSet
    from ratrain.targets.runtime.kernels.scratch import Scratch

INITIAL_SCALE = 65536.0
GROWTH_INTERVAL = 2000
LARGEST_SCALE = 2.0**24

Views: TypeAlias = dict[str, Any]
"""Arrays of some memory, by role."""
Place: TypeAlias = tuple[int, int]
"""A rank: stage and replica."""
Flags: TypeAlias = Sequence[Any]
"""Arrays of one element each: 1 where something was not finite, else 0."""
Chunks: TypeAlias = Iterable[Any]
"""Parts of a gradient whose squares are summed one after the other, each in float64."""


@frozen(eq=False)
class LossScale:
    """The carried scalar `scale`: the factor of the loss, and the steps since it last changed."""

    values: NDArray[Any]

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
            self.values[0] = min(LARGEST_SCALE, float(self.values[0]) * 2)
            self.values[1] = 0.0


@frozen(eq=False)
class Update:
    """One block's update on one rank."""

    place: Place
    block: str
    views: Views
    """p, m1, m2, t; g, flag, scale; norm where the plan clips; w where the update writes the view"""
    settings: Optimizer
    decay: Sequence[tuple[int, int]]
    """the elements that are decayed"""
    squares: Chunks | None
    """of the gradient, where the log wants them: where the program has no norm"""


@frozen
class StepLog:
    """What is known of a step when it has ended."""

    loss: float | None
    """summed over the ranks of this process in rank order, in nats over all tokens; None where they did not sum it"""
    norm: float | None
    """of the whole reduced gradient, without its loss scale; None where the ranks of this process did not compute it"""
    skipped: int
    """updates left out for an overflow, counted once a rank"""
    squares: Mapping[Place, Mapping[str, float]]
    """by rank and block: the sums of squares of reduced gradients without their loss scale, where the program has no norm"""


class Scalars(Protocol):
    """Computes the single numbers of a step where the arenas are. Ranks may call it side by side, each with scratch of its own.

    Arrays and scratch are those of its memory.
    """

    def begin_step(self, learning_rate: float, scale: float) -> None:
        """What the host knows of the next step; the log is empty again. Between steps only."""

    def read(self) -> StepLog:
        """The log of the step that has ended. Between steps only."""

    def clear(self, flags: Flags) -> None:
        """Lower flags."""

    def spread(self, flags: Flags, outs: Flags) -> None:
        """Set all of `outs` to whether any flag is raised; they may be the same."""

    def mean_of_replicas(
        self,
        parts: Sequence[Any],
        out: Any,
        flags: Flags,
        *,
        scratch: Any,
        accumulate: bool,
        divisor: float,
    ) -> None:
        """The kernel of that name; flags are raised unless all is finite."""

    def check_finite(self, a: Any, flags: Flags, *, scratch: Any) -> None:
        """Raise flags unless all elements are finite."""

    def sum_losses(self, losses: Sequence[Any], *, scratch: Any) -> None:
        """The step's loss is the sum of these, in order."""

    def norm(
        self,
        stages: Sequence[Mapping[str, Chunks]],
        flags: Flags,
        outs: Sequence[Any],
        *,
        scratch: Any,
    ) -> None:
        """Set `outs` to the Euclidean norm of gradients by stage and block, both in forward order; to infinity where a flag is raised."""

    def update(self, update: Update, *, scratch: Any) -> None:
        """One block's update; a raised flag leaves everything as it was but the view, which is written all the same."""

    def advance_scale(self, scale: Any, overflow: Any, *, scratch: Any) -> None:
        """The loss scale of the next step."""


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

    def check_finite(self, a: NDArray[Any], flags: Flags, *, scratch: Scratch) -> None:
        """Raise flags unless all elements are finite."""
        if not self._kernels.all_finite(a, scratch=scratch):
            _raise(flags)

    def sum_losses(self, losses: Sequence[NDArray[Any]], *, scratch: Scratch) -> None:
        """The step's loss is the sum of these, in order."""
        del scratch
        self._loss = float(sum(float(loss[0]) for loss in losses))

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

    def update(self, update: Update, *, scratch: Scratch) -> None:
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
                self._kernels.cast(views["p"], views["w"], scratch=scratch)
            return
        views["t"][0] += 1
        self._kernels.adamw(
            views["p"],
            views["m1"],
            views["m2"],
            views["g"],
            scratch=scratch,
            view=views.get("w"),
            step=int(views["t"][0]),
            grad_multiplier=multiplier,
            lr=self._learning_rate,
            beta1=settings.betas[0],
            beta2=settings.betas[1],
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            decay=update.decay,
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

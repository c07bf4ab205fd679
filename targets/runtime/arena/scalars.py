"""The single numbers of a step: flags, loss, norm, loss scale, and what updates are made with.

On a host they are numbers of Python. A device computes them itself, so that nothing in a step waits for what the host reads: it is told
some before the step, and what a log shows is read when the step has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from attrs import frozen
from numpy.typing import NDArray

from ratrain.ratrain_ir.config.plan import Optimizer

INITIAL_SCALE = 65536.0
GROWTH_INTERVAL = 2000
LARGEST_SCALE = 2.0**24

Views: TypeAlias = dict[str, Any]
"""Arrays of some memory, by role."""
Place: TypeAlias = tuple[int, int]
"""A rank: its stage, and its lane (`topology.Mesh.lane`)."""
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
class BlockUpdate:
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
    stream: Callable[[UpdatePart], Iterator[UpdatePart]] | None = None
    """of state in a file: all of it in parts, as arrays of this memory, which are written back when the next is asked for"""

    def parts(self) -> Iterator[UpdatePart]:
        """What is updated, one part after the other."""
        whole = UpdatePart(self.views, self.decay)
        return iter((whole,)) if self.stream is None else self.stream(whole)


@frozen(eq=False)
class UpdatePart:
    """Consecutive elements of one block's update."""

    views: Views
    """p, m1, m2, g; w where the update writes the view"""
    decay: Sequence[tuple[int, int]]
    """the elements that are decayed, counted from the first of these"""


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

    def mean_of_quantised(
        self,
        parts: Sequence[Any],
        out: Any,
        flags: Flags,
        *,
        scratch: Any,
        accumulate: bool,
        divisor: float,
        bits: int,
    ) -> None:
        """The kernel of that name; flags are raised unless all is finite."""

    def check_finite(self, a: Any, flags: Flags, *, scratch: Any) -> None:
        """Raise flags unless all elements are finite."""

    def sum_losses(self, losses: Sequence[Any], *, scratch: Any) -> None:
        """The step's loss is the sum of these, in order."""

    def logits_of_labels(self, peers: Sequence[Views], out: Any, *, scratch: Any) -> None:
        """Set `out`, float64 [peers], to the sum of the logits of the labels that each of some tensor peers has.

        A peer has `lse_part` and `loss_part` of its words, and `labels` as rows of its table. The loss of its rows is the sum of (its log -
        logit of the label); so these logits are what its own logs have more.
        """

    def combine_losses(
        self, parts: Sequence[Any], at_labels: Any, peers: Sequence[Views], *, scratch: Any, accumulate: bool
    ) -> None:
        """The loss of a micro-batch from what all tensor peers know of its rows' logits, for some of them.

        `parts` are the logs of all in rank order, `at_labels` the sums of the logits of their labels. A peer's `lse` becomes the log of each
        row's sum of exponentials over all words; `loss` becomes, or grows by, the sum over the rows whose `labels` count.
        """

    def norm(
        self,
        stages: Sequence[Mapping[str, Chunks]],
        flags: Flags,
        outs: Sequence[Any],
        *,
        scratch: Any,
    ) -> None:
        """Set `outs` to the Euclidean norm of gradients by stage and block, both in forward order; to infinity where a flag is raised."""

    def squares_of(self, chunks: Chunks, *, scratch: Any) -> list[float]:
        """The sum of the squares of each chunk, on the host, which waits for them: of ranks that exchange them."""

    def update(self, update: BlockUpdate, *, scratch: Any) -> None:
        """One block's update; a raised flag leaves everything as it was but the view, which is written all the same."""

    def advance_scale(self, scale: Any, overflow: Any, *, scratch: Any) -> None:
        """The loss scale of the next step."""

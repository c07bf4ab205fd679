"""Single numbers of a step: flags, loss, gradient norm, loss scale, and the inputs of updates.

On a host they are Python numbers. A device computes them itself, so that no instruction of a step waits for the host:
the host sets its numbers before the step, and reads those for the log after its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from attrs import frozen
from numpy.typing import NDArray

from ratrain.ratrain_ir.config.optimizer import Optimizer

INITIAL_SCALE = 65536.0
GROWTH_INTERVAL = 2000
LARGEST_SCALE = 2.0**24

Views: TypeAlias = dict[str, Any]
"""Arrays of one memory, by role."""
Place: TypeAlias = tuple[int, int]
"""Rank as (stage, lane), with the lane of `topology.Mesh.lane`."""
Flags: TypeAlias = Sequence[Any]
"""Arrays of one element each: 1 where something was not finite, else 0."""
Chunks: TypeAlias = Iterable[Any]
"""Parts of a gradient whose squares are summed one after the other, each in float64."""


@frozen(eq=False)
class LossScale:
    """Carried scalar `scale`: [factor of the loss, steps since it last changed]."""

    values: NDArray[Any]

    def start(self, fixed: float | None) -> None:
        """Set the scale of the first step: `fixed`, or the start of the dynamic scale if None."""
        self.values[0] = INITIAL_SCALE if fixed is None else fixed
        self.values[1] = 0.0

    def advance(self, *, overflow: bool) -> None:
        """Set the scale of the next step: halve it on overflow, double it after `GROWTH_INTERVAL` steps without one."""
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
    """Update of one block on one rank."""

    place: Place
    block: str
    views: Views
    """p, m1, m2, t; g, flag, scale; norm where the plan clips; w where the update also writes the view"""
    settings: Optimizer
    decay: Sequence[tuple[int, int]]
    """ranges of elements that weight decay applies to"""
    squares: Chunks | None
    """parts of the gradient whose sum of squares the log wants; None where the program computes a norm"""
    stream: Callable[[UpdatePart], Iterator[UpdatePart]] | None = None
    """for state in a file: yields all of it in parts, as arrays of this memory; a part is written back when the next
    is asked for"""

    def parts(self) -> Iterator[UpdatePart]:
        """Return the parts to update, one after the other; a single one unless state is streamed from a file."""
        whole = UpdatePart(self.views, self.decay)
        return iter((whole,)) if self.stream is None else self.stream(whole)


@frozen(eq=False)
class BiasMove:
    """Step of the bias of one block's router, on ranks that count the tokens of all its experts between them.

    A bias moves by `rate` up where fewer than the mean of `choices` tokens went to an expert, down where more did.
    """

    counts: Sequence[Any]
    """counts of each rank in an int32 array [experts], in rank order; the first may be changed"""
    ranks: Sequence[tuple[Any, Any]]
    """bias and counts, on each rank, that are set: the moved bias, and zeros"""
    flags: Flags
    """flags of the block's update"""
    norm: Any | None
    """norm of the gradient where the plan clips: infinite if a block overflowed"""
    choices: int
    """tokens times experts of each, of a step"""
    rate: float

    @property
    def doubled_mean(self) -> int:
        """Twice the mean as an integer: m - 2 n has the sign of (mean - n) for every count n.

        The mean is q + r / experts. Without a rest m = 2 q; with one m = 2 q + 1 is never twice a count.
        """
        mean, rest = divmod(self.choices, len(self.counts[0]))
        return 2 * mean + (rest > 0)


@frozen(eq=False)
class UpdatePart:
    """Consecutive elements of one block's update."""

    views: Views
    """p, m1, m2, g; w where the update also writes the view"""
    decay: Sequence[tuple[int, int]]
    """ranges of elements that weight decay applies to, counted from the first element of this part"""


@frozen
class StepLog:
    """Facts about a step, known at its end."""

    loss: float | None
    """summed over the ranks of this process in rank order, in nats over all tokens; None if they did not sum it"""
    norm: float | None
    """norm of the whole reduced gradient, without its loss scale; None if the ranks of this process did not compute
    it"""
    skipped: int
    """updates skipped because of an overflow, counted once per rank"""
    squares: Mapping[Place, Mapping[str, float]]
    """by rank and block: the sums of squares of reduced gradients without their loss scale, where the program has no
    norm"""


class Scalars(Protocol):
    """Computation of a step's single numbers in the memory of the arenas.

    Arrays and scratch are of that memory. Ranks may call it concurrently, each with a scratch of its own.
    """

    def begin_step(self, learning_rate: float, scale: float) -> None:
        """Set the host's numbers for the next step and clear the log. Call it between steps only."""

    def read(self) -> StepLog:
        """Return the log of the step that has ended. Call it between steps only."""

    def clear(self, flags: Flags) -> None:
        """Set flags to 0."""

    def spread(self, flags: Flags, outs: Flags) -> None:
        """Set all of `outs` to 1 if any of `flags` is raised, else to 0; they may be the same arrays."""

    def mean_of_replicas(
        self,
        parts: Sequence[Any],
        out: Any,
        flags: Flags,
        *,
        scratch: Any,
        accumulate: bool,
        divisor: float,
        bits: int | None = None,
    ) -> None:
        """Run the kernel of this name, or `mean_of_quantised` of `bits`; raise the flags unless all is finite."""

    def check_finite(self, a: Any, flags: Flags, *, scratch: Any) -> None:
        """Raise the flags unless all elements of `a` are finite."""

    def sum_losses(self, losses: Sequence[Any], *, scratch: Any) -> None:
        """Set the step's loss to the sum of these, in order."""

    def logits_of_labels(self, peers: Sequence[Views], out: Any, *, scratch: Any) -> None:
        """Set `out`, float64 [peers], to each tensor-parallel rank's sum of label logits.

        A rank's words are a part of the vocabulary. It has `lse_part` (the log of each row's sum of exponentials over
        its words), `labels` (indices into its words, negative for labels of other ranks) and `loss_part`, the sum of
        (`lse_part` - label logit) over the rows whose label it has. The sum of its label logits is therefore the sum of
        `lse_part` over these rows, minus `loss_part`.
        """

    def combine_losses(
        self, parts: Sequence[Any], at_labels: Any, peers: Sequence[Views], *, scratch: Any, accumulate: bool
    ) -> None:
        """Compute a micro-batch's loss from what all tensor-parallel ranks know of their logits; give it to `peers`.

        `parts` are the `lse_part` of all ranks in rank order, `at_labels` their sums of label logits. Each peer's `lse`
        becomes the log of every row's sum of exponentials over all words. Its `loss` is set to, or with `accumulate`
        increased by, the sum over the rows whose `labels` count.
        """

    def norm(
        self,
        stages: Sequence[Mapping[str, Chunks]],
        flags: Flags,
        outs: Sequence[Any],
        *,
        scratch: Any,
    ) -> None:
        """Set `outs` to the Euclidean norm of gradients, or to infinity where a flag is raised.

        `stages` has each stage's gradients by block; stages and blocks are in forward order.
        """

    def squares_of(self, chunks: Chunks, *, scratch: Any) -> list[float]:
        """Return the sum of squares of each chunk, on the host; wait for them. For ranks that exchange these sums."""

    def update(self, update: BlockUpdate, *, scratch: Any) -> None:
        """Update one block. A raised flag leaves state unchanged; the view is written all the same."""

    def move_bias(self, move: BiasMove, *, scratch: Any) -> None:
        """Move a bias by the counts of a whole step; the counts and the biases of all ranks are set."""

    def advance_scale(self, scale: Any, overflow: Any, *, scratch: Any) -> None:
        """Set the loss scale of the next step."""

"""What the interpreter asks of a kernel set.

Arrays are C-contiguous views of an arena; storage is float16 or float32, and where nothing else is said the arrays
of one call share it. Arithmetic and accumulation are float32, with one rounding to storage. Infinities and NaNs
propagate: an overflow of float16 is stored as infinity. Results depend on values, shapes and arguments only, never on
addresses, timing or what ran before. A kernel writes its outputs only, and takes temporaries from `scratch`; it does
not reset it. Shapes use T tokens (rows), h hidden size, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from attrs import field, frozen, validators
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ratrain.targets.program.routine import OnChipSchedule
    from ratrain.targets.runtime.kernels.scratch import Scratch

Array: TypeAlias = NDArray[Any]
"""float16 or float32."""
F32: TypeAlias = NDArray[np.float32]
F64: TypeAlias = NDArray[np.float64]
I32: TypeAlias = NDArray[np.int32]
I64: TypeAlias = NDArray[np.int64]

_POSITIVE = validators.ge(1)


@frozen
class AttentionSpec:
    """Shape and mask of a causal attention; scores are scaled by 1/sqrt(head_dim).

    Query i sees the keys j <= i of its own sequence, with `window` only those with j > i - window. With `alibi` the
    score of (i, j) has slope_head * (j - i) added (Press et al., 2021). Query head n reads key-value head
    n // (heads / kv_heads).
    """

    batch: int = field(validator=_POSITIVE)
    seq_len: int = field(validator=_POSITIVE)
    heads: int = field(validator=_POSITIVE)
    kv_heads: int = field(validator=_POSITIVE)
    head_dim: int = field(validator=_POSITIVE)
    window: int | None = field(default=None, validator=validators.optional(_POSITIVE))
    alibi: bool = False

    def __attrs_post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} query heads cannot share {self.kv_heads} key-value heads evenly")

    @property
    def group(self) -> int:
        """Query heads that share one key-value head."""
        return self.heads // self.kv_heads

    def first_key(self, query: int) -> int:
        """The first key position that a query position sees."""
        return 0 if self.window is None else max(0, query - self.window + 1)


class KernelSet(Protocol):
    """One implementation of every primitive kernel."""

    @property
    def name(self) -> str:
        """The name `kernel_set` knows it by."""

    @property
    def constant_bytes(self) -> int:
        """Bytes of the tables built so far (rotary cosines and sines)."""

    def prepare_rope(self, seq_len: int, head_dim: int, theta: float) -> None:
        """Build the table that `rope` needs for these values, so that no step allocates it."""

    def scratch_bytes(self, kernel: str, **arguments: Any) -> int:
        """Bytes of scratch that method `kernel` takes when called with these arguments, all given by name.

        Only shapes, dtypes and options are read, never elements; `scratch` itself is left out.

        Raises:
            ValueError: no kernel has that name.
        """

    def gemm(
        self,
        a: Array,
        b: Array,
        out: Array,
        *,
        scratch: Scratch,
        trans_a: bool = False,
        trans_b: bool = False,
        accumulate: bool = False,
        bias: Array | None = None,
        residual: Array | None = None,
    ) -> None:
        """Compute out = [out +] op(a) @ op(b) [+ bias, one per column] [+ residual], rounded once.

        `residual` may be `out` itself; `a` and `b` must not overlap it. Dtypes may differ.
        """

    def column_sum(self, a: Array, out: Array, *, scratch: Scratch, accumulate: bool) -> None:
        """out[n] = [out +] the sum over the rows of a[m, n]. Dtypes may differ."""

    def rmsnorm_forward(self, x: Array, gamma: Array, xn: Array, rstd: F32, *, scratch: Scratch, eps: float) -> None:
        """rstd[t] = 1 / sqrt(mean(x[t]^2) + eps); xn = x * rstd * gamma. x and xn are [T, h]."""

    def rmsnorm_backward(
        self,
        dxn: Array,
        x: Array,
        gamma: Array,
        rstd: F32,
        dx: Array,
        dgamma: Array,
        *,
        scratch: Scratch,
        residual: Array | None = None,
        accumulate: bool,
    ) -> None:
        """Gradients of `rmsnorm_forward`: dx = [residual +] ..., dgamma = [dgamma +] ...; dgamma's dtype may differ.

        `dx` may be `dxn` or `residual` itself.
        """

    def rope(
        self,
        x: Array,
        *,
        scratch: Scratch,
        heads: int,
        head_dim: int,
        seq_len: int,
        theta: float,
        inverse: bool,
    ) -> None:
        """Rotate x[T, heads * head_dim] in place; row t has position t % seq_len.

        Hugging Face's `rotate_half` convention: element i of a head pairs with i + head_dim / 2. `inverse` rotates
        back, which is also the gradient.
        """

    def attention_forward(
        self, q: Array, k: Array, v: Array, o: Array, lse: F32, *, scratch: Scratch, spec: AttentionSpec
    ) -> None:
        """Compute o = softmax(scores) @ v; lse[head, t] is the log of the sum of exponentiated scores.

        q and o are [T, heads * head_dim], k and v [T, kv_heads * head_dim], T = batch * seq_len, lse [heads, T].
        Memory is linear in seq_len.
        """

    def attention_backward(
        self,
        q: Array,
        k: Array,
        v: Array,
        o: Array,
        lse: F32,
        do: Array,
        dq: Array,
        dk: Array,
        dv: Array,
        delta: F32,
        *,
        scratch: Scratch,
        spec: AttentionSpec,
    ) -> None:
        """Gradients of `attention_forward`, probabilities recomputed from lse.

        delta[heads, T] receives rowsum(do * o). The query heads of a group are summed before dk and dv are rounded.
        """

    def swiglu_forward(self, gate: Array, up: Array, prod: Array, *, scratch: Scratch) -> None:
        """Compute prod = silu(gate) * up."""

    def swiglu_backward(
        self, gate: Array, up: Array, dprod: Array, dgate: Array, dup: Array, *, scratch: Scratch
    ) -> None:
        """Gradients of `swiglu_forward`; `dgate` and `dup` may be `gate`, `up` or `dprod` themselves."""

    def embedding_forward(self, tokens: I32, table: Array, y: Array, *, scratch: Scratch) -> None:
        """y[t] = table[tokens[t]].

        Raises:
            IndexError: a token is outside the table.
        """

    def embedding_backward(self, tokens: I32, dy: Array, dtable: Array, *, scratch: Scratch, accumulate: bool) -> None:
        """dtable[tokens[t]] += dy[t], over zeros unless `accumulate`; dtable's dtype may differ.

        The rows of one token are summed in float32 in ascending t, then added and rounded once.

        Raises:
            IndexError: a token is outside the table.
        """

    def head_forward(
        self,
        xn: Array,
        table: Array,
        labels: I32,
        lse: F32,
        loss: F64,
        logits: F32,
        *,
        scratch: Scratch,
        normalise: bool,
        accumulate: bool,
    ) -> None:
        """Cross-entropy of the logits xn @ table^T, in chunks of as many rows as the workspace `logits` has.

        lse[t] is the log-sum-exp of row t; loss[0] = [loss[0] +] sum over ascending t of lse[t] - logit[t, label], in
        float64. `normalise` divides each row of the table by its Euclidean norm, or 1e-12 where that is larger.

        Raises:
            IndexError: a label is outside the table.
        """

    def head_backward(
        self,
        xn: Array,
        table: Array,
        labels: I32,
        lse: F32,
        scale: F32,
        logits: F32,
        dxn: Array,
        dtable: Array,
        *,
        scratch: Scratch,
        denominator: float,
        normalise: bool,
        accumulate: bool,
    ) -> None:
        """Gradients of loss * scale[0] / denominator, logits recomputed; dtable's dtype may differ.

        dtable = [dtable +] ... is rounded once for each chunk of rows.

        Raises:
            IndexError: a label is outside the table.
        """

    def adamw(
        self,
        master: F32,
        m: F32,
        v: F32,
        grad: Array,
        view: Array | None,
        *,
        scratch: Scratch,
        step: int,
        grad_multiplier: float,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        decay: Sequence[tuple[int, int]],
    ) -> None:
        """One update as `torch.optim.AdamW` does it; view = master, rounded to its dtype.

        The gradient is grad * grad_multiplier, `step` counts from 1, and only the elements [start, stop) of `decay`
        are decayed.
        """

    def mean_of_replicas(
        self, parts: Sequence[Array], out: Array, *, scratch: Scratch, accumulate: bool, divisor: float
    ) -> bool:
        """Compute out = [out +] (parts[0] + parts[1] + ...) * (1 / divisor), summed in the given order.

        Dtypes may differ. A part may be `out` itself. True if all parts and the result are finite.
        """

    def all_finite(self, a: Array, *, scratch: Scratch) -> bool:
        """Whether no element is infinite or NaN."""

    def cast(self, src: Array, dst: Array, *, scratch: Scratch) -> None:
        """Set dst = src, rounded to nearest even; overflow gives infinity."""

    def zero(self, a: Array, *, scratch: Scratch) -> None:
        """Set a = 0."""

    def add(self, a: Array, b: Array, out: Array, *, scratch: Scratch) -> None:
        """Compute out = a + b; `out` may be `a` or `b` itself. Dtypes may differ."""


@runtime_checkable
class OnChipKernels(Protocol):
    """A kernel set that executes the on-chip schedules of a step; others compute the same without them."""

    def bound_to(self, schedules: Mapping[str, OnChipSchedule]) -> KernelSet:
        """The set that executes these schedules, by the part of the kernel."""

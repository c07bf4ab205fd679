"""Options that an implementation of a kernel takes together: `def rope(self, x, *, scratch, **options)`.

`KernelSet` calls name each option. An implementation that works with all of them passes them on to a class here, so
that names, defaults and what follows from them stand once for all kernel sets:

    turn = RopeOptions(**options)       an unknown name raises TypeError; `turn.width` is the same in every set

Meaning and allowed values are declared with the kernel (`ratrain.targets.program.kernels`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import frozen


@frozen(kw_only=True)
class ProductOptions:
    """Options of `gemm`, and its operands that may be left out: arrays of the set."""

    trans_a: bool = False
    trans_b: bool = False
    accumulate: bool = False
    half_run: int | None = None
    bias: Any = None
    residual: Any = None

    @property
    def is_plain(self) -> bool:
        """True if nothing is added to the product."""
        return not self.accumulate and self.bias is None and self.residual is None


@frozen(kw_only=True)
class RopeOptions:
    """Options of `rope`."""

    heads: int
    head_dim: int
    seq_len: int
    theta: float
    inverse: bool
    first_position: int = 0
    rotary_dim: int | None = None
    interleaved: bool = False
    scaling: str = ""

    @property
    def width(self) -> int:
        """Rotated elements of a head."""
        return self.rotary_dim or self.head_dim

    @property
    def table(self) -> tuple[slice, int, float, str]:
        """Rows of the rotary table that the call reads, and the table's width, theta and scaling."""
        return slice(0, self.first_position + self.seq_len), self.width, self.theta, self.scaling


@frozen(kw_only=True)
class RouterOptions:
    """Options of `route_backward`, and its operand that may be left out: an array of the set."""

    normalise: bool
    balance: float = 0.0
    z: float = 0.0
    scale: Any = None

    def pull(self, tokens: int, experts: int, choices: int) -> float:
        """Return the factor of an expert's number of rows in the gradient of the balancing loss, without `scale`."""
        return self.balance * experts / (choices * tokens**2)

    def push(self, tokens: int) -> float:
        """Return the factor of the log-sum-exp of a row in the gradient of the z-loss, without `scale`."""
        return 2 * self.z / tokens


@frozen(kw_only=True)
class LogitOptions:
    """Options of the head kernels that turn products of rows and table into logits."""

    normalise: bool
    scale_of_logits: float = 1.0
    softcap: float | None = None

    @property
    def is_plain(self) -> bool:
        """True if the products are the logits."""
        return not self.normalise and self.scale_of_logits == 1 and self.softcap is None


@frozen(kw_only=True)
class AdamWOptions:
    """Options of `adamw` that are the same at every step."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decay: Sequence[tuple[int, int]]

    def step_size(self, lr: float, step: int) -> float:
        """Return the learning rate over the bias correction of the first moment."""
        return lr / float(1 - self.beta1**step)

    def root(self, step: int) -> float:
        """Return the root of the bias correction of the second moment."""
        return float((1 - self.beta2**step) ** 0.5)

    def kept(self, lr: float, *, decayed: bool) -> float:
        """Return the share of a weight that decay leaves."""
        return 1 - lr * self.weight_decay if decayed else 1.0

"""What the interpreter asks of a kernel set: a method for each kernel that is declared (`ratrain.targets.program.kernels`).

A kernel of a set names its parameters; their order, kinds, types and meaning are the declaration's, and a set that differs
cannot be made. Arrays are C-contiguous views of an arena. A kernel writes its outputs only, and takes temporaries from `scratch`; it does not reset
it. Methods are called by the names that steps give; those that the runtime itself calls are typed here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ratrain.targets.program.routine import OnChipSchedule
    from ratrain.targets.runtime.arena.kernel_memory import Memory
    from ratrain.targets.runtime.arena.scalars import Place, Scalars
    from ratrain.targets.runtime.arena.scratch import Scratch

Array: TypeAlias = NDArray[Any]
"""float16, bfloat16 or float32."""
U8: TypeAlias = NDArray[np.uint8]
F32: TypeAlias = NDArray[np.float32]
F64: TypeAlias = NDArray[np.float64]
I32: TypeAlias = NDArray[np.int32]
I64: TypeAlias = NDArray[np.int64]


class KernelSet(Protocol):
    """One implementation of every kernel."""

    @property
    def name(self) -> str:
        """The name `kernel_set` knows it by."""

    @property
    def on_devices(self) -> bool:
        """Whether its arrays are tensors of a device."""

    @property
    def memory(self) -> Memory:
        """Where the arrays are that it works on."""

    @property
    def constant_bytes(self) -> int:
        """Bytes of the tables that are kept (rotary cosines and sines)."""

    @property
    def scalar_bytes(self) -> int:
        """Bytes of scratch that `scalars` take beside those of the kernels that they call."""

    def combined_loss_bytes(self, rows: int) -> int:
        """Bytes of scratch that `scalars` take to combine the loss of so many rows."""

    def scalars(self, blocks: Mapping[Place, Sequence[str]]) -> Scalars:
        """What computes the single numbers of steps of ranks that hold these blocks, with these kernels."""

    def prepare_rope(self, seq_len: int, width: int, theta: float, scaling: str = "") -> None:
        """Build the table that `rope` needs for these values, so that no step allocates it."""

    def scratch_bytes(self, kernel: str, **arguments: Any) -> int:
        """Bytes of scratch that method `kernel` takes when called with these arguments, all given by name.

        Only shapes, dtypes and options are read, never elements; `scratch` itself is left out.

        Raises:
            ValueError: no kernel has that name.
        """

    def adamw(
        self,
        master: F32,
        m: F32,
        v: F32,
        grad: Array,
        *,
        scratch: Scratch,
        view: Array | None = None,
        step: int,
        grad_multiplier: float,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        decay: Sequence[tuple[int, int]],
    ) -> None:
        """Update a shard."""

    def mean_of_replicas(
        self, parts: Sequence[Array], out: Array, *, scratch: Scratch, accumulate: bool, divisor: float
    ) -> bool:
        """Average what replicas contribute; whether all of it is finite."""

    def quantise(self, a: Array, packed: U8, *, scratch: Scratch, bits: int) -> None:
        """Set packed = a, block-quantised."""

    def dequantise(self, packed: U8, out: Array, *, scratch: Scratch, bits: int) -> None:
        """Set out = what was packed."""

    def mean_of_quantised(
        self, parts: Sequence[U8], out: Array, *, scratch: Scratch, accumulate: bool, divisor: float, bits: int
    ) -> bool:
        """Average what replicas contribute, packed; whether all of it is finite."""

    def all_finite(self, a: Array, *, scratch: Scratch) -> bool:
        """Whether no element is infinite or NaN."""

    def zero(self, a: Array, *, scratch: Scratch) -> None:
        """Set a = 0."""

    def cast(self, src: Array, dst: Array, *, scratch: Scratch) -> None:
        """Set dst = src."""

    def add(self, a: Array, b: Array, out: Array, *, scratch: Scratch, scale: float = 1.0) -> None:
        """Set out = a + b."""


@runtime_checkable
class OnChipKernels(Protocol):
    """A kernel set that executes the on-chip schedules of a step; others compute the same without them."""

    def bound_to(self, schedules: Mapping[str, OnChipSchedule]) -> KernelSet:
        """The set that executes these schedules, by the part of the kernel."""

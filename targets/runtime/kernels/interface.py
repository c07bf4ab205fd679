"""Interface of kernel sets: one method for each declared kernel (`ratrain.targets.program.kernels`).

A declaration fixes the order, kinds, types and meaning of a kernel's parameters; a set that differs cannot be created.
Arrays are C-contiguous views of an arena. A kernel writes its outputs only, and takes temporaries from `scratch`, which
its caller resets. Steps call methods by name; only those that the runtime itself calls are typed here.
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
"""An array of float16, bfloat16 or float32."""
U8: TypeAlias = NDArray[np.uint8]
F32: TypeAlias = NDArray[np.float32]
F64: TypeAlias = NDArray[np.float64]
I32: TypeAlias = NDArray[np.int32]
I64: TypeAlias = NDArray[np.int64]


class KernelSet(Protocol):
    """One implementation of every kernel."""

    @property
    def name(self) -> str:
        """Name of the set, as `kernel_set` takes it."""

    @property
    def on_devices(self) -> bool:
        """True if its arrays are tensors of a device."""

    @property
    def memory(self) -> Memory:
        """Memory that its arrays are in."""

    @property
    def constant_bytes(self) -> int:
        """Bytes of the tables that it keeps (rotary cosines and sines)."""

    @property
    def scalar_bytes(self) -> int:
        """Bytes of scratch that `scalars` take, in addition to the scratch of kernels that they call."""

    def combined_loss_bytes(self, rows: int) -> int:
        """Return the bytes of scratch that `scalars` take to combine the loss of `rows` rows."""

    def scalars(self, blocks: Mapping[Place, Sequence[str]]) -> Scalars:
        """Make the object that computes single numbers of steps (loss, norm, updates) with these kernels.

        `blocks` are the names of the blocks that each rank holds.
        """

    def prepare_rope(self, seq_len: int, width: int, theta: float, scaling: str = "") -> None:
        """Build the table that `rope` needs for these values, so that no step allocates it."""

    def scratch_bytes(self, kernel: str, **arguments: Any) -> int:
        """Return the bytes of scratch that the kernel takes with these arguments, all given by name.

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
        """Update a shard of master weights and moments in place; set `view` to the rounded master if given."""

    def mean_of_replicas(
        self, parts: Sequence[Array], out: Array, *, scratch: Scratch, accumulate: bool, divisor: float
    ) -> bool:
        """Set out = [out +] sum(parts) / divisor; return whether all of it is finite."""

    def quantise(self, a: Array, packed: U8, *, scratch: Scratch, bits: int) -> None:
        """Set packed = a, block-quantised to `bits` bits an element."""

    def dequantise(self, packed: U8, out: Array, *, scratch: Scratch, bits: int) -> None:
        """Set out = the unpacked elements."""

    def dequantise_nf4(self, packed: U8, out: Array, *, scratch: Scratch) -> None:
        """Set out = the elements of a matrix in nf4."""

    def mean_of_quantised(
        self, parts: Sequence[U8], out: Array, *, scratch: Scratch, accumulate: bool, divisor: float, bits: int
    ) -> bool:
        """Do what `mean_of_replicas` does, with quantised parts."""

    def all_finite(self, a: Array, *, scratch: Scratch) -> bool:
        """Return whether no element is infinite or NaN."""

    def zero(self, a: Array, *, scratch: Scratch) -> None:
        """Set a = 0."""

    def cast(self, src: Array, dst: Array, *, scratch: Scratch) -> None:
        """Set dst = src, rounded to its type."""

    def add(self, a: Array, b: Array, out: Array, *, scratch: Scratch, scale: float = 1.0) -> None:
        """Set out = a + scale * b."""


@runtime_checkable
class OnChipKernels(Protocol):
    """A kernel set that executes the on-chip tile schedules of a step; other sets compute the same without them."""

    def bound_to(self, schedules: Mapping[str, OnChipSchedule]) -> KernelSet:
        """Return the set that executes these schedules, given by part of a routine."""


@runtime_checkable
class OnePassHeadKernels(Protocol):
    """A kernel set that can compute a head's loss and gradients from logits that are made once."""

    def makes_head_in_one_pass(self, xn: Array, table: Array, logits: F32, **shaping: Any) -> bool:
        """Return whether `head_in_one_pass` takes these arrays, of which shapes and types count, and options."""

    def head_in_one_pass(
        self,
        xn: Array,
        table: Array,
        labels: I32,
        lse: F32,
        scale: F32,
        logits: F32,
        dxn: Array,
        loss: F64,
        *,
        scratch: Scratch,
        denominator: float,
        accumulate: bool,
        adds_loss: bool,
        dtable: Array | None = None,
        **shaping: Any,
    ) -> None:
        """Compute `head_forward`, then `head_backward`, to the same bits, in the scratch of the backward.

        `accumulate` is the backward's option, `adds_loss` the forward's.
        """

"""Types of tensors: dtype and shape, interned, so that equal types are the same object."""

from __future__ import annotations

from enum import Enum
from functools import cache
from math import prod
from typing import TYPE_CHECKING

from attrs import field, frozen

if TYPE_CHECKING:
    from collections.abc import Callable

ALIGNMENT_BYTES = 64
"""Every tensor starts at a multiple of this many bytes (SIMD width, and bit-identical BLAS: facts on determinism)."""


class Dtype(Enum):
    """Element types; the value is the name used in the text."""

    F16 = "f16"
    BF16 = "bf16"
    F32 = "f32"
    F64 = "f64"
    I32 = "i32"
    I64 = "i64"
    U8 = "u8"
    U32 = "u32"

    __hash__ = object.__hash__  # members are single objects; what `Enum` has is several times slower

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEMSIZE[self]


_ITEMSIZE = {
    Dtype.F16: 2,
    Dtype.BF16: 2,
    Dtype.F32: 4,
    Dtype.F64: 8,
    Dtype.I32: 4,
    Dtype.I64: 8,
    Dtype.U8: 1,
    Dtype.U32: 4,
}

STORAGE_DTYPES = (Dtype.F16, Dtype.BF16, Dtype.F32)
"""In which parameters, activations and gradients can be stored."""


class Home(Enum):
    """The memory that holds a tensor of a rank; the value is the word used in the text."""

    DDR = "ddr"
    """the one that ops compute in"""
    HOST = "host"
    """what the host of an accelerator has beside it"""
    FILE = "file"
    """a file, on the fastest storage that a rank has"""

    __hash__ = object.__hash__  # members are single objects; what `Enum` has is several times slower


STORES = (Home.HOST, Home.FILE)
"""The memories in which nothing is computed: what is there was stored, and is fetched before its use."""


class StateKind(Enum):
    """What part of the training state a tensor holds; the value is the word used in the text."""

    MASTER = "master"
    """float32 parameters, the replica's shard where the optimizer is sharded"""
    MOMENT = "moment"
    """Adam's first or second moment, sharded like the master"""
    VIEW = "view"
    """the parameters of a block as forward and backward read them"""
    VIEW_SHARD = "view_shard"
    """the replica's part of a view that a group of replicas has between them from step to step"""
    GRAD = "grad"
    """the full gradient of a block"""
    GRAD_SHARD = "grad_shard"
    """the replica's part of a reduced gradient"""
    BOUNDARY = "boundary"
    """an activation or gradient that crosses a stage cut"""
    ACTIVATION = "activation"
    """a block's output, or its gradient, inside a stage"""
    CHECKPOINT = "checkpoint"
    """a block's input kept for recovery"""
    SAVED = "saved"
    """what a block's backward needs beside its input"""
    PARTIAL = "partial"
    """a sum of which each tensor peer has a part: of no use before the parts have met"""
    GUEST = "guest"
    """what another stage keeps here until its backward"""
    INPUT = "input"
    """tokens or labels of one micro-batch, or where its documents start"""
    WORKSPACE = "workspace"
    """scratch of one op, sized by the target"""
    SCALAR = "scalar"
    """loss, flags, loss scale, counters"""

    __hash__ = object.__hash__  # members are single objects; what `Enum` has is several times slower


@frozen(eq=False)
class TensorType:
    """Element type and shape. Make one through `tensor_type` only: there is one object of each."""

    dtype: Dtype
    shape: tuple[int, ...]
    nbytes: int = field(init=False, repr=False)
    """Bytes of the tensor itself, without alignment."""
    _text: str = field(init=False, repr=False)

    def __reduce__(self) -> tuple[Callable[..., TensorType], tuple[object, ...]]:
        return tensor_type, (self.dtype, self.shape)

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @nbytes.default
    def _nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @_text.default
    def _written(self) -> str:
        return f"{self.dtype.value}[{', '.join(map(str, self.shape))}]"

    def __str__(self) -> str:
        return self._text


@cache
def tensor_type(dtype: Dtype, shape: tuple[int, ...]) -> TensorType:
    """The one type object of this dtype and shape."""
    return TensorType(dtype, shape)


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to the alignment."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

"""Types of tensors: dtype and shape, interned so that equal types are one object."""

from __future__ import annotations

from enum import Enum
from functools import cache
from math import prod
from typing import TYPE_CHECKING

from attrs import field, frozen

if TYPE_CHECKING:
    from collections.abc import Callable

ALIGNMENT_BYTES = 64
"""Alignment in bytes of every tensor: a SIMD width, and a condition for bit-identical results of BLAS."""


class Dtype(Enum):
    """Element types; the value is the name in the text format."""

    F16 = "f16"
    BF16 = "bf16"
    F32 = "f32"
    F64 = "f64"
    I32 = "i32"
    I64 = "i64"
    U8 = "u8"
    U32 = "u32"

    __hash__ = object.__hash__  # members are single objects; the hash of `Enum` is several times slower

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
"""Types in which parameters, activations and gradients can be stored."""


class Home(Enum):
    """Memory that holds a tensor of a rank; the value is the word in the text format."""

    DDR = "ddr"
    """the device memory, in which ops compute"""
    HOST = "host"
    """memory of the accelerator's host"""
    FILE = "file"
    """a file on the fastest storage that a rank has"""

    __hash__ = object.__hash__  # members are single objects; the hash of `Enum` is several times slower


STORES = (Home.HOST, Home.FILE)
"""Memories without computation: tensors are stored there, and fetched before use."""


class StateKind(Enum):
    """Role of a tensor in the training state; the value is the word in the text format."""

    MASTER = "master"
    """float32 parameters; the replica's shard of them if the optimizer is sharded"""
    MOMENT = "moment"
    """Adam's first or second moment, sharded like the master"""
    VIEW = "view"
    """parameters of a block as forward and backward read them"""
    FROZEN = "frozen"
    """parameters of a block that do not train, as forward and backward read them"""
    VIEW_SHARD = "view_shard"
    """the replica's part of a view that a group of replicas shares out from step to step"""
    GRAD = "grad"
    """full gradient of a block"""
    GRAD_SHARD = "grad_shard"
    """the replica's part of a reduced gradient"""
    BOUNDARY = "boundary"
    """an activation or gradient that crosses a stage cut"""
    ACTIVATION = "activation"
    """a block's output, or its gradient, inside a stage"""
    CHECKPOINT = "checkpoint"
    """a block's input kept for recovery"""
    SAVED = "saved"
    """tensor that a block's backward needs in addition to its input"""
    PARTIAL = "partial"
    """a tensor-parallel rank's part of a sum; useless before the parts are summed"""
    REMOTE = "remote"
    """activation kept here for another stage until its backward (a remote buffer)"""
    INPUT = "input"
    """tokens or labels of one micro-batch, or the starts of its documents"""
    WORKSPACE = "workspace"
    """scratch of one op, sized by the target"""
    SCALAR = "scalar"
    """loss, flags, loss scale, counters"""

    __hash__ = object.__hash__  # members are single objects; the hash of `Enum` is several times slower


@frozen(eq=False)
class TensorType:
    """Element type and shape. Make types through `tensor_type` only: equal ones are one object."""

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
    """Return the one object for this dtype and shape."""
    return TensorType(dtype, shape)


def aligned(nbytes: int) -> int:
    """Round bytes up to a multiple of the alignment."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

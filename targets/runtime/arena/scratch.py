"""Temporary space of a kernel: a bump allocator over one byte buffer that is allocated once.

A kernel describes the buffers it needs as a plan (a sequence of `Buffer`), from shapes and dtypes alone; it takes
exactly that plan when it runs, so the size computed before the first step is the size used.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
from attrs import field, frozen
from numpy.typing import DTypeLike, NDArray

ALIGNMENT = 64
"""Bytes: one cache line, and the width of the widest vector register."""


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _dtype(value: DTypeLike) -> np.dtype[Any]:
    return np.dtype(value)


@frozen
class Buffer:
    """One temporary array of a kernel."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any] = field(default=np.float32, converter=_dtype)

    @property
    def nbytes(self) -> int:
        """Bytes it takes in a `Scratch`, rounded up to `ALIGNMENT`."""
        return _aligned(math.prod(self.shape) * self.dtype.itemsize)


Plan: TypeAlias = Sequence[Buffer]


def plan_bytes(plan: Iterable[Buffer]) -> int:
    """Return the bytes of scratch that a plan takes."""
    return sum(buffer.nbytes for buffer in plan)


T = TypeVar("T")
"""Type of a temporary: array or tensor."""


class BumpAllocator(ABC, Generic[T]):
    """Allocator that hands out `capacity` bytes from the bottom up; `reset` frees all of them.

    Not safe for two threads at once: each engine thread has its own.
    """

    __slots__ = ("capacity", "high_water", "used")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self.high_water = 0

    @abstractmethod
    def at(self, start: int, buffer: Buffer) -> T:
        """View the bytes from `start` on as the array that `buffer` describes."""

    def take(self, shape: int | tuple[int, ...], dtype: DTypeLike = np.float32) -> T:
        """Take the next free bytes: uninitialised, C-contiguous, aligned to `ALIGNMENT`.

        Raises:
            MemoryError: fewer bytes are left than it needs.
        """
        return self._take(Buffer(shape if isinstance(shape, tuple) else (shape,), dtype))

    def _take(self, buffer: Buffer) -> T:
        start, end = self.used, self.used + buffer.nbytes
        if end > self.capacity:
            raise MemoryError(f"scratch of {self.capacity} bytes: {start} in use, {end - start} more wanted")
        self.used = end
        self.high_water = max(self.high_water, end)
        return self.at(start, buffer)

    def take_all(self, plan: Plan) -> list[T]:
        """Take one array for each buffer of `plan`, in order.

        Raises:
            MemoryError: the plan does not fit in the free bytes.
        """
        return [self._take(buffer) for buffer in plan]

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Free, at the end of the context, everything that was taken inside it."""
        used = self.used
        yield
        self.used = used

    def reset(self) -> None:
        """Free everything; arrays taken before must no longer be used."""
        self.used = 0


class Scratch(BumpAllocator[NDArray[Any]]):
    """Temporaries that are numpy arrays."""

    __slots__ = ("_bytes",)

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        raw = np.empty(capacity + ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        self._bytes: NDArray[np.uint8] = raw[start : start + capacity]

    def at(self, start: int, buffer: Buffer) -> NDArray[Any]:
        """View the bytes from `start` on as the array that `buffer` describes."""
        return np.ndarray(buffer.shape, buffer.dtype, self._bytes, start)

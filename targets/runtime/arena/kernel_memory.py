"""What arenas are made of: bytes of the host, as numpy has them. Devices have memories of their own, which engines use by the same words.

An array of a memory is sliced, indexed and assigned to by numbers as numpy's are; everything else goes through its memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ratrain.ratrain_ir.config.types import ALIGNMENT_BYTES, Dtype
from ratrain.targets.runtime.arena.dtypes import NUMPY_DTYPES
from ratrain.targets.runtime.arena.process_memory import room
from ratrain.targets.runtime.arena.scratch import Scratch
from ratrain.targets.runtime.arena.stopwatch import DeviceFacts, HostStopwatch, Stopwatch
from ratrain.targets.runtime.arena.streams import AtOnce, Order

SQUARES_CHUNK = 1 << 16
"""Elements at most of which squares are summed at a time."""


@frozen
class Work:
    """What a run asks of a memory beside arenas, scratch, tables and messages."""

    inputs: Mapping[tuple[Dtype, tuple[int, ...]], int]
    """instructions that load an input of each form"""
    sums: int
    """sums of squares that are made at a time, by the host"""
    areas: int
    """arenas and scratches"""
    streams: int
    """engines that multiply"""
    denominators: int
    """calls of kernels that divide by the labels of a step"""
    ranks: int
    blocks: int
    """that ranks hold, each counted on every rank that holds it"""


class Feed(Protocol):
    """What the host puts into an array, again in every step."""

    @property
    def values(self) -> NDArray[Any]:
        """An array of the host, to be written."""

    @property
    def is_ahead(self) -> bool:
        """Whether that is written before the step, as the array is only reached behind the program; else when it is delivered."""

    def deliver(self) -> None:
        """Have in the array what was written."""


class Memory(Protocol):
    """Bytes that a kernel set works on."""

    @property
    def place(self) -> str:
        """Where it is, in a word."""

    @property
    def overlaps(self) -> bool:
        """Whether instructions are executed behind the program, several at a time."""

    def room(self) -> tuple[int, str]:
        """Bytes that there are, and a clause that says so."""

    def allocate(self, count: int) -> Any:
        """Zeroed bytes that start at a multiple of the alignment. Raises MemoryError where there are not so many."""

    def scratch(self, capacity: int) -> Any:
        """What kernels take temporaries from: a `Scratch`, or the like of this memory."""

    def order(self) -> Order:
        """What has instructions done here in their order."""

    def stopwatch(self) -> Stopwatch:
        """What tells how long something takes here."""

    def device_facts(self) -> DeviceFacts | None:
        """What the device is; None where it is the host."""

    def typed(self, data: Any, dtype: Dtype, shape: tuple[int, ...]) -> Any:
        """An array over contiguous bytes."""

    def bytes_of(self, array: Any) -> Any:
        """The bytes of a contiguous array."""

    def element_type(self, array: Any) -> np.dtype[Any]:
        """The type of its elements, as numpy has it."""

    def empty_like(self, array: Any) -> Any:
        """A new array of the same shape and type."""

    def beside(self, count: int) -> Any:
        """Zeroed bytes of the host, as arrays of this memory are: `copy` goes both ways. Raises MemoryError where there are not so many."""

    def copy(self, target: Any, source: Any) -> None:
        """Set target = source, both of this memory or one of what is beside it; in the order of what is issued."""

    def read_into(self, array: Any, read: Callable[[NDArray[np.uint8]], None]) -> None:
        """Have the host write the bytes of an array, once all is done that was issued before."""

    def staged(self, values: NDArray[Any]) -> Any:
        """Values of the host as an array of this memory, for the moment."""

    def write(self, target: Any, values: Any) -> None:
        """Set an array to numbers of the host: one for all elements, or one for each."""

    def to_host(self, array: Any) -> NDArray[Any]:
        """The elements on the host, to be read only."""

    def feed(self, target: Any) -> Feed:
        """How an array gets, in every step, what the host has for it."""

    def number(self, value: float, held: Any = None) -> Any:
        """What kernels are given for a number that may be another in another step: `held`, where this memory keeps such a one, set anew.

        Between steps only.
        """

    def constants(self, work: Work) -> dict[str, int]:
        """Bytes that it holds at most for a run's work, by what for, known before anything is allocated."""


class _Squares(threading.local):
    """A chunk in float64 for each thread that sums squares, made once and not in every step."""

    def __init__(self) -> None:
        self.chunk = np.empty(SQUARES_CHUNK, np.float64)


@frozen(eq=False)
class DirectFeed:
    """`Feed` of an array of the host, which is written itself."""

    values: NDArray[Any]
    is_ahead = False

    def deliver(self) -> None:
        """It is there."""


class HostMemory:
    """`Memory` of this process: arrays are numpy's."""

    place = "host"
    overlaps = False

    def __init__(self) -> None:
        self._squares = _Squares()

    def room(self) -> tuple[int, str]:
        """Of this process."""
        return room()

    def allocate(self, count: int) -> NDArray[np.uint8]:
        """Zeroed bytes that start at a multiple of the alignment."""
        raw = np.zeros(count + ALIGNMENT_BYTES, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT_BYTES
        return raw[start : start + count]

    def scratch(self, capacity: int) -> Scratch:
        """What kernels take temporaries from."""
        return Scratch(capacity)

    def order(self) -> AtOnce:
        """Instructions are done when they return."""
        return AtOnce()

    def stopwatch(self) -> HostStopwatch:
        """The clock of this process."""
        return HostStopwatch()

    def device_facts(self) -> None:
        """It is the host."""

    def typed(self, data: NDArray[np.uint8], dtype: Dtype, shape: tuple[int, ...]) -> NDArray[Any]:
        """An array over contiguous bytes."""
        return data.view(NUMPY_DTYPES[dtype]).reshape(shape)

    def bytes_of(self, array: NDArray[Any]) -> NDArray[np.uint8]:
        """The bytes of a contiguous array."""
        return array.reshape(-1).view(np.uint8)

    def element_type(self, array: NDArray[Any]) -> np.dtype[Any]:
        """The type of its elements."""
        return array.dtype

    def empty_like(self, array: NDArray[Any]) -> NDArray[Any]:
        """A new array of the same shape and type."""
        return np.empty_like(array)

    def beside(self, count: int) -> NDArray[np.uint8]:
        """Bytes like any other."""
        return self.allocate(count) if count else np.empty(0, np.uint8)

    def copy(self, target: NDArray[Any], source: NDArray[Any]) -> None:
        """Set target = source."""
        np.copyto(target, source)

    def read_into(self, array: NDArray[Any], read: Callable[[NDArray[np.uint8]], None]) -> None:
        """Read into the bytes themselves."""
        read(self.bytes_of(array))

    def staged(self, values: NDArray[Any]) -> NDArray[Any]:
        """The values themselves."""
        return values

    def write(self, target: NDArray[Any], values: Any) -> None:
        """Set an array to numbers."""
        target[...] = values

    def to_host(self, array: NDArray[Any]) -> NDArray[Any]:
        """The array itself."""
        return array

    def feed(self, target: NDArray[Any]) -> DirectFeed:
        """The array itself."""
        return DirectFeed(target)

    def number(self, value: float, held: Any = None) -> float:
        """The number itself."""
        del held
        return value

    def sum_of_squares(self, array: NDArray[Any]) -> float:
        """Of at most `SQUARES_CHUNK` elements, in float64."""
        chunk = self._squares.chunk[: len(array)]
        np.copyto(chunk, array)
        return float(np.dot(chunk, chunk))

    def constants(self, work: Work) -> dict[str, int]:
        """Room to align, and a chunk of squares for each sum."""
        return {"alignment": work.areas * ALIGNMENT_BYTES, "sums of squares": work.sums * SQUARES_CHUNK * 8}


HOST = HostMemory()
"""The one there is."""

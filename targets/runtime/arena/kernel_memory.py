"""Memory that arenas are allocated in: the interface, and its implementation on the host by numpy.

A device implements the same interface with a memory of its own (`targets/pytorch/device/device_memory.py`), so engines
use both alike. Arrays of any memory are sliced, indexed and assigned numbers as numpy arrays are; everything else goes
through `Memory`.
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
"""Most elements whose squares are summed at a time."""


@frozen
class Work:
    """Demands of a run on a memory besides arenas, scratch, tables and messages."""

    inputs: Mapping[tuple[Dtype, tuple[int, ...]], int]
    """number of instructions that load an input, by dtype and shape"""
    sums: int
    """sums of squares that the host computes at the same time"""
    areas: int
    """number of arenas and scratch buffers"""
    streams: int
    """number of engines that run matrix products"""
    denominators: int
    """calls of kernels that divide by the number of labels of a step"""
    ranks: int
    blocks: int
    """blocks on all ranks, each counted once for every rank that holds it"""


class Feed(Protocol):
    """Channel by which the host sets an array anew in every step."""

    @property
    def values(self) -> NDArray[Any]:
        """Host array to write the new values into."""

    @property
    def is_ahead(self) -> bool:
        """True if `values` must be written before the step starts; False if they are written just before `deliver`.

        A device that runs asynchronously needs them early: it reads them later than the call that issues the
        instruction.
        """

    def deliver(self) -> None:
        """Bring the written values into the array."""


class Memory(Protocol):
    """Memory that a kernel set works on."""

    @property
    def place(self) -> str:
        """Name of the place, in one word."""

    @property
    def overlaps(self) -> bool:
        """True if instructions run asynchronously, several at a time, after the calls that issue them have returned."""

    def room(self) -> tuple[int, str]:
        """Return the bytes available and a clause for messages that says so."""

    def allocate(self, count: int) -> Any:
        """Allocate `count` zeroed bytes, aligned to `ALIGNMENT_BYTES`. Raises MemoryError where there are too few."""

    def scratch(self, capacity: int) -> Any:
        """Return an allocator of `capacity` bytes of temporaries for kernels: a `Scratch`, or its equivalent here."""

    def order(self) -> Order:
        """Return the object that makes instructions take effect here in the order of the program's waits."""

    def stopwatch(self) -> Stopwatch:
        """Return a clock for the time that work takes here."""

    def device_facts(self) -> DeviceFacts | None:
        """Return name and memory size of the device; None on the host."""

    def typed(self, data: Any, dtype: Dtype, shape: tuple[int, ...]) -> Any:
        """View contiguous bytes as an array of `dtype` and `shape`."""

    def bytes_of(self, array: Any) -> Any:
        """View a contiguous array as bytes."""

    def element_type(self, array: Any) -> np.dtype[Any]:
        """Return the numpy dtype of the array's elements."""

    def empty_like(self, array: Any) -> Any:
        """Allocate an uninitialised array of the same shape and type."""

    def host_buffer(self, count: int) -> Any:
        """Allocate `count` zeroed bytes on the host as an array that `copy` accepts in both directions.

        Raises MemoryError where there are too few.
        """

    def copy(self, target: Any, source: Any) -> None:
        """Set target = source, in the order of issue. One of the two may come from `host_buffer`."""

    def read_into(self, array: Any, read: Callable[[NDArray[np.uint8]], None]) -> None:
        """Let the host write the bytes of an array by `read`, once everything issued before is done."""

    def staged(self, values: NDArray[Any]) -> Any:
        """Return host values as an array of this memory, valid for immediate use only."""

    def write(self, target: Any, values: Any) -> None:
        """Set an array to numbers of the host: one for all elements, or one for each."""

    def to_host(self, array: Any) -> NDArray[Any]:
        """Return the elements on the host, read-only."""

    def feed(self, target: Any) -> Feed:
        """Return the channel by which the host sets `target` in every step."""

    def number(self, value: float, held: Any = None) -> Any:
        """Return a kernel argument for a number that may change from step to step.

        Where the memory keeps such arguments itself, `held` (the argument of an earlier call) is updated in place and
        returned. Call it between steps only.
        """

    def constants(self, work: Work) -> dict[str, int]:
        """Return an upper bound of the bytes this memory takes for a run's work, by purpose.

        It is known before anything is allocated.
        """


class _Squares(threading.local):
    """One float64 chunk for each thread that sums squares, allocated once instead of in every step."""

    def __init__(self) -> None:
        self.chunk = np.empty(SQUARES_CHUNK, np.float64)


@frozen(eq=False)
class DirectFeed:
    """`Feed` of a host array, which is written directly."""

    values: NDArray[Any]
    is_ahead = False

    def deliver(self) -> None:
        """Do nothing: the values are in the array already."""


class HostMemory:
    """`Memory` of this process: arrays are numpy's."""

    place = "host"
    overlaps = False

    def __init__(self) -> None:
        self._squares = _Squares()

    def room(self) -> tuple[int, str]:
        """Return the bytes this process may still take, and a clause that says so."""
        return room()

    def allocate(self, count: int) -> NDArray[np.uint8]:
        """Allocate `count` zeroed bytes, aligned to `ALIGNMENT_BYTES`."""
        raw = np.zeros(count + ALIGNMENT_BYTES, np.uint8)
        # numpy's own alignment may be smaller: allocate more and start at the first multiple.
        start = -raw.ctypes.data % ALIGNMENT_BYTES
        return raw[start : start + count]

    def scratch(self, capacity: int) -> Scratch:
        """Return a scratch buffer of `capacity` bytes."""
        return Scratch(capacity)

    def order(self) -> AtOnce:
        """Return the order of a host: an instruction is done when it returns."""
        return AtOnce()

    def stopwatch(self) -> HostStopwatch:
        """Return a clock of this thread's CPU time."""
        return HostStopwatch()

    def device_facts(self) -> None:
        """Return None: this is the host."""

    def typed(self, data: NDArray[np.uint8], dtype: Dtype, shape: tuple[int, ...]) -> NDArray[Any]:
        """View contiguous bytes as an array of `dtype` and `shape`."""
        return data.view(NUMPY_DTYPES[dtype]).reshape(shape)

    def bytes_of(self, array: NDArray[Any]) -> NDArray[np.uint8]:
        """View a contiguous array as bytes."""
        return array.reshape(-1).view(np.uint8)

    def element_type(self, array: NDArray[Any]) -> np.dtype[Any]:
        """Return the numpy dtype of the array's elements."""
        return array.dtype

    def empty_like(self, array: NDArray[Any]) -> NDArray[Any]:
        """Allocate an uninitialised array of the same shape and type."""
        return np.empty_like(array)

    def host_buffer(self, count: int) -> NDArray[np.uint8]:
        """Allocate `count` zeroed bytes, as `allocate` does."""
        return self.allocate(count) if count else np.empty(0, np.uint8)

    def copy(self, target: NDArray[Any], source: NDArray[Any]) -> None:
        """Set target = source."""
        np.copyto(target, source)

    def read_into(self, array: NDArray[Any], read: Callable[[NDArray[np.uint8]], None]) -> None:
        """Let `read` write the array's bytes in place."""
        read(self.bytes_of(array))

    def staged(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the values themselves."""
        return values

    def write(self, target: NDArray[Any], values: Any) -> None:
        """Set an array to numbers."""
        target[...] = values

    def to_host(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return the array itself."""
        return array

    def feed(self, target: NDArray[Any]) -> DirectFeed:
        """Return a feed that is the array itself."""
        return DirectFeed(target)

    def number(self, value: float, held: Any = None) -> float:
        """Return the number itself."""
        del held
        return value

    def sum_of_squares(
        self, array: NDArray[Any], cast: Callable[[NDArray[Any], NDArray[np.float64]], None] | None = None
    ) -> float:
        """Sum the squares of at most `SQUARES_CHUNK` elements in float64, to which `cast`, or else numpy, converts."""
        chunk = self._squares.chunk[: len(array)]
        if cast is None:
            np.copyto(chunk, array)
        else:
            cast(array, chunk)
        return float(np.dot(chunk, chunk))

    def constants(self, work: Work) -> dict[str, int]:
        """Return the bytes for alignment, and for one chunk of squares per concurrent sum."""
        return {"alignment": work.areas * ALIGNMENT_BYTES, "sums of squares": work.sums * SQUARES_CHUNK * 8}


HOST = HostMemory()
"""The host's memory, the only instance."""

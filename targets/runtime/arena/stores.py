"""Memories other than DDR in which a rank stores data it needs later: bytes of the host, or a file."""

from __future__ import annotations

import os
import tempfile
import weakref
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ratrain.ratrain_ir.config.types import Dtype
from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.targets.runtime.arena.dtypes import NUMPY_DTYPES
from ratrain.targets.runtime.arena.kernel_memory import HOST
from ratrain.targets.runtime.arena.process_memory import Traffic
from ratrain.targets.runtime.arena.tensor_file import cut

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ratrain.targets.runtime.arena.kernel_memory import Memory

_PIECE = 1 << 24
"""Bytes written at a time when filling a file."""


class StoredBytes(Protocol):
    """Bytes in a memory without compute, paired with a memory that has compute."""

    def put(self, offset: int, array: Any) -> None:
        """Copy the bytes of an array to `offset`."""

    def get(self, offset: int, array: Any) -> None:
        """Copy bytes from `offset` into an array."""

    def fill(self, offset: int, count: int, value: int) -> None:
        """Set `count` bytes from `offset` on to one value."""


class HostBytes:
    """`StoredBytes` in the memory of this process."""

    def __init__(self, count: int, memory: Memory) -> None:
        self._memory = memory
        self._bytes = memory.host_buffer(count)

    def at(self, offset: int, count: int) -> Any:
        """View `count` bytes from `offset` on."""
        return self._bytes[offset : offset + count]

    def put(self, offset: int, array: Any) -> None:
        """Copy the bytes of an array to `offset`."""
        self._memory.copy(self.at(offset, array.nbytes), self._memory.bytes_of(array))

    def get(self, offset: int, array: Any) -> None:
        """Copy bytes from `offset` into an array."""
        self._memory.copy(self._memory.bytes_of(array), self.at(offset, array.nbytes))

    def fill(self, offset: int, count: int, value: int) -> None:
        """Set `count` bytes from `offset` on to one value."""
        self._bytes[offset : offset + count] = value


class FileBytes:
    """`StoredBytes` in a file without a name, which vanishes with the process however that ends.

    Raises `DiagnosticError` RT093 where the folder has no room for all bytes.
    """

    def __init__(self, count: int, folder: Path | None, memory: Memory) -> None:
        self._memory = memory
        self._folder = str(folder or tempfile.gettempdir())
        self.traffic = Traffic()
        """Bytes read and written so far."""
        try:
            self._file, name = tempfile.mkstemp(prefix="ratrain-", dir=self._folder)
            # Unlinked at once: the open handle keeps the bytes, and no crash leaves a file behind. Reserving them now
            # makes a full disk fail here, not in the middle of a step.
            weakref.finalize(self, os.close, self._file)
            Path(name).unlink()
            os.posix_fallocate(self._file, 0, count)
        except OSError as error:
            text = f"{count} bytes cannot be had in a file in '{self._folder}': {error.strerror}"
            fail("RT093", text, help="name a folder with more room: --scratch DIR")

    def put(self, offset: int, array: Any) -> None:
        """Write the bytes of an array to `offset`."""
        # A device's array is copied to the host first; a contiguous host array is written without a copy.
        self.write(offset, HOST.bytes_of(np.ascontiguousarray(self._memory.to_host(array))))

    def get(self, offset: int, array: Any) -> None:
        """Read bytes from `offset` into an array."""
        self._memory.read_into(array, partial(self.read, offset))

    def write(self, offset: int, data: NDArray[np.uint8]) -> None:
        """Write bytes of the host to `offset`."""
        self._through(os.pwrite, offset, data)
        self.traffic += Traffic(written=data.nbytes)

    def read(self, offset: int, data: NDArray[np.uint8]) -> None:
        """Read bytes from `offset` into host memory."""
        self._through(lambda file, view, at: os.preadv(file, [view], at), offset, data)
        self.traffic += Traffic(read=data.nbytes)

    def fill(self, offset: int, count: int, value: int) -> None:
        """Write `count` bytes of one value from `offset` on."""
        piece = np.full(min(count, _PIECE), value, np.uint8)
        for at in range(0, count, _PIECE):
            self.write(offset + at, piece[: count - at])

    def _through(self, move: Callable[[int, memoryview, int], int], offset: int, data: NDArray[np.uint8]) -> None:
        """Repeat `move` until all of `data` is transferred, as one system call may transfer only a part.

        Raises `DiagnosticError` RT093 if the file fails or has been cut.
        """
        view, done = data.data, 0
        while done < len(view):
            try:
                moved = move(self._file, view[done:], offset + done)
            except OSError as error:
                fail("RT093", f"the file in '{self._folder}' in which a rank stores bytes fails: {error.strerror}")
            if not moved:
                fail("RT093", f"the file in '{self._folder}' in which a rank stores bytes has been cut")
            done += moved


@frozen(eq=False)
class StoredArray:
    """Array of elements in a file, read and written in pieces."""

    store: FileBytes
    offset: int
    element: Dtype
    length: int

    def __len__(self) -> int:
        return self.length

    @property
    def dtype(self) -> np.dtype[Any]:
        """Numpy dtype of the elements."""
        return np.dtype(NUMPY_DTYPES[self.element])

    def get(self, start: int, into: Any) -> None:
        """Copy elements from `start` on into an array of the memory that computes."""
        self.store.get(self.offset + start * self.dtype.itemsize, into)

    def put(self, start: int, array: Any) -> None:
        """Overwrite elements from `start` on with an array of the memory that computes."""
        self.store.put(self.offset + start * self.dtype.itemsize, array)

    def read(self, start: int, into: NDArray[Any]) -> None:
        """Copy elements from `start` on into an array of the host."""
        self.store.read(self.offset + start * self.dtype.itemsize, into.view(np.uint8))

    def write(self, start: int, values: NDArray[Any]) -> None:
        """Overwrite elements from `start` on with numbers of the host."""
        self.store.write(
            self.offset + start * self.dtype.itemsize, np.ascontiguousarray(values, self.dtype).view(np.uint8)
        )

    def fill(self, value: float) -> None:
        """Set all elements to one number."""
        for start, stop in cut(0, self.length):
            self.write(start, np.full(stop - start, value, self.dtype))

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yield elements [start, stop) in pieces, each with the index of its first element."""
        for low, high in cut(start, stop):
            piece = np.empty(high - low, self.dtype)
            self.read(low, piece)
            yield low, piece

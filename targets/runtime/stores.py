"""The memories beside DDR in which a rank stores what it needs later: bytes of the host, or a file."""

from __future__ import annotations

import os
import tempfile
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from ratrain.ratrain_ir.diagnostics import fail
from ratrain.ratrain_ir.types import Home
from ratrain.targets.runtime.memory import HOST

if TYPE_CHECKING:
    from collections.abc import Callable

_PIECE = 1 << 24
"""Bytes that are written at a time where nothing has to be kept of them."""


class StoredBytes(Protocol):
    """So many bytes of a memory in which nothing is computed."""

    def put(self, offset: int, data: NDArray[np.uint8]) -> None:
        """Copy bytes there."""

    def get(self, offset: int, data: NDArray[np.uint8]) -> None:
        """Copy bytes from there."""

    def fill(self, offset: int, count: int, value: int) -> None:
        """Set bytes to one value."""


class HostBytes:
    """`StoredBytes` of this process."""

    def __init__(self, count: int) -> None:
        self._bytes = HOST.allocate(count)

    def put(self, offset: int, data: NDArray[np.uint8]) -> None:
        """Copy bytes there."""
        self._bytes[offset : offset + data.nbytes] = data

    def get(self, offset: int, data: NDArray[np.uint8]) -> None:
        """Copy bytes from there."""
        data[:] = self._bytes[offset : offset + data.nbytes]

    def fill(self, offset: int, count: int, value: int) -> None:
        """Set bytes to one value."""
        self._bytes[offset : offset + count] = value


class FileBytes:
    """`StoredBytes` of a file without a name, which goes with the process however that ends.

    Raises `DiagnosticError` RT093 where the folder has no room for all of them.
    """

    def __init__(self, count: int, folder: Path | None) -> None:
        self._folder = str(folder or tempfile.gettempdir())
        try:
            self._file, name = tempfile.mkstemp(prefix="ratrain-", dir=self._folder)
            weakref.finalize(self, os.close, self._file)
            Path(name).unlink()
            os.posix_fallocate(self._file, 0, count)
        except OSError as error:
            text = f"{count} bytes cannot be had in a file in '{self._folder}': {error.strerror}"
            fail("RT093", text, help="name a folder with more room: --scratch DIR")

    def put(self, offset: int, data: NDArray[np.uint8]) -> None:
        """Write bytes there."""
        self._through(os.pwrite, offset, data)

    def get(self, offset: int, data: NDArray[np.uint8]) -> None:
        """Read bytes from there."""
        self._through(lambda file, view, at: os.preadv(file, [view], at), offset, data)

    def fill(self, offset: int, count: int, value: int) -> None:
        """Write one value."""
        piece = np.full(min(count, _PIECE), value, np.uint8)
        for at in range(0, count, _PIECE):
            self.put(offset + at, piece[: count - at])

    def _through(self, move: Callable[[int, memoryview, int], int], offset: int, data: NDArray[np.uint8]) -> None:
        view, done = data.data, 0
        while done < len(view):
            try:
                moved = move(self._file, view[done:], offset + done)
            except OSError as error:
                fail("RT093", f"the file in '{self._folder}' in which a rank stores bytes fails: {error.strerror}")
            if not moved:
                fail("RT093", f"the file in '{self._folder}' in which a rank stores bytes has been cut")
            done += moved


def open_store(home: Home, count: int, folder: Path | None) -> StoredBytes:
    """So many bytes of a memory; files are in a folder, or in the system's own for temporary files."""
    return HostBytes(count) if home is Home.HOST else FileBytes(count, folder)

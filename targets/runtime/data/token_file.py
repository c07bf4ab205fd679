"""Tokens of a file, read when they are used: the file may be of any size, and a change of it is noticed.

A memory map would be as fast, but fails worse: if the file is cut short, the process dies by a signal; if it is written
to, the data changes silently. Here every read is followed by a check of the open file's size and time of last change,
which costs less than a microsecond. A file that is *replaced* (another one renamed to its place) continues to be read
in its old version.
"""

from __future__ import annotations

import os
import stat
import weakref
from abc import ABC, abstractmethod
from typing import Any, NoReturn, Self

import numpy as np
from attrs import evolve, field, frozen
from numpy.typing import NDArray

from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.ratrain_ir.support.files import MARK, help_for


@frozen(eq=False)
class OpenFile:
    """Open file, with its size and time of last change when it was opened."""

    path: str
    descriptor: int
    size: int
    """bytes"""
    changed: int
    """time of the last change, in nanoseconds"""

    def read(self, start: int, count: int) -> bytearray:
        """Return bytes [start, start + count) of the file.

        Raises `DiagnosticError` RT002 where they cannot be read, and RT090 if the file has changed since it was opened.
        """
        data = bytearray(count)
        view = memoryview(data)
        done = 0
        try:
            while done < count and (got := os.preadv(self.descriptor, [view[done:]], start + done)):
                done += got
            # After the read, not before: a write in between would go unnoticed.
            now = os.fstat(self.descriptor)
        except OSError as error:
            fail("RT002", f"cannot read the training data '{self.path}': {error.strerror or error}")
        if done < count or (now.st_size, now.st_mtime_ns) != (self.size, self.changed):
            self._has_changed(now.st_size)
        return data

    def _has_changed(self, size: int) -> NoReturn:
        what = (
            f"it had {self.size:,} bytes and has {size:,}"
            if size != self.size
            else f"its {size:,} bytes were written to"
        )
        fail(
            "RT090",
            f"'{self.path}' has changed since this run opened it ({what}): what follows would be other data",
            help="put the file back as it was and go on from the last checkpoint with --resume, or with "
            "--new-data on what "
            "it holds now; data that is in use is replaced by renaming a new file to its place",
        )


@frozen(eq=False)
class ReadTokens(ABC):
    """Tokens [start, stop) of a source outside memory; each slice is read when it is taken, as a new array."""

    dtype: np.dtype[Any] = field(kw_only=True)
    start: int = field(kw_only=True)
    stop: int = field(kw_only=True)

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, piece: slice) -> NDArray[Any]:
        low, high, step = piece.indices(len(self))
        if step != 1:
            raise IndexError("tokens are read in their order, without gaps")
        return self.read_at(self.start + low, max(0, high - low))

    @abstractmethod
    def read_at(self, position: int, count: int) -> NDArray[Any]:
        """Return `count` tokens from `position` on, counted from the source's first token."""

    def part(self, start: int, stop: int) -> Self:
        """Return tokens [start, stop) of these, not read yet."""
        return evolve(self, start=self.start + start, stop=self.start + stop)


@frozen(eq=False)
class FileTokens(ReadTokens):
    """Tokens of a file."""

    file: OpenFile

    def read_at(self, position: int, count: int) -> NDArray[Any]:
        """Return `count` tokens of the file from `position` on."""
        size = self.dtype.itemsize
        return np.frombuffer(self.file.read(position * size, count * size), self.dtype)

    def as_type(self, dtype: np.dtype[Any]) -> FileTokens:
        """Return all bytes of the file as tokens of another type; an incomplete last token is left out."""
        return FileTokens(self.file, dtype=dtype, start=0, stop=self.file.size // dtype.itemsize)


def file_bytes(path: str) -> FileTokens:
    """Return the bytes of a regular, non-empty file, read when used.

    Raises `DiagnosticError` RT002 where it cannot be read or is something else, RT090 where it is empty.
    """
    try:
        kind = os.stat(path).st_mode  # noqa: PTH116 - before it is opened: a pipe would wait for its writer
        if not stat.S_ISREG(kind):
            what = "a directory" if stat.S_ISDIR(kind) else "no regular file"
            fail("RT002", f"cannot read the training data '{path}': it is {what}")
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        status = os.fstat(descriptor)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        fail("RT002", f"cannot read the training data '{path}': {reason}", help=help_for(error))
    file = OpenFile(path, descriptor, status.st_size, status.st_mtime_ns)
    weakref.finalize(file, os.close, descriptor)
    if not status.st_size:
        fail("RT090", f"'{path}' is empty", help="name a file with text, or with token numbers (*.bin)")
    return FileTokens(file, dtype=np.dtype(np.uint8), start=0, stop=status.st_size)


def text_bytes(path: str) -> FileTokens:
    """Return the bytes of a text file without its byte order mark. Raises `DiagnosticError` as `file_bytes`."""
    data = file_bytes(path)
    if data[: len(MARK)].tobytes() != MARK:
        return data
    if len(data) == len(MARK):
        fail("RT090", f"'{path}' is empty but for a byte order mark", help="name a file with text")
    return data.part(len(MARK), len(data))


_TELLING = 16
"""Nonzero numbers needed for a judgement: 16 that all stand at even places occur by chance once in 65,536."""
_LEAST_SHARE = 50
"""Ratio from which on the sparser of even and odd places is taken for the upper halves of wider numbers."""


def check_width(tokens: FileTokens, chunk: int) -> None:
    """Refuse numbers that are halves of wider ones: every other number is zero, or nearly every other one.

        uint32 tokens 5, 300 read as uint16:    5 0   300 0        odd places are zero

    It looks at pieces of `chunk` numbers, a multiple of four, until enough are nonzero: mostly one piece. Zeros as such
    mean nothing: padding stands at even and odd places alike. Raises `DiagnosticError` RT090.
    """
    path, bits = tokens.file.path, 8 * tokens.dtype.itemsize
    counts = np.zeros(4, np.int64)
    for start in range(0, len(tokens), chunk):
        piece = tokens[start : start + chunk]
        counts += [np.count_nonzero(piece[place::4]) for place in range(4)]
        few, many = sorted((int(counts[::2].sum()), int(counts[1::2].sum())))
        if many < _TELLING:
            continue
        if few * _LEAST_SHARE > many:
            return
        share = "every other one" if not few else f"all but {few:,} of every other one"
        place = int(counts[1::2].sum() < counts[::2].sum())
        fail(
            "RT090",
            f"'{path}' is read as uint{bits} numbers, but {share} from position {place} on is zero, as far as position "
            f"{start + len(piece) - 1}: these are halves of wider numbers",
            help=_way_out(bits, counts.tolist()),
        )


def _way_out(bits: int, counts: list[int]) -> str:
    """Return advice on how to read the wider numbers; `counts` are the nonzero numbers by place modulo 4."""
    if counts[1] + counts[3] > counts[0] + counts[2]:
        return f"its numbers stand high byte first: write the file again, little-endian{_ASTYPE}"
    # Of four 16-bit parts only the first is used: 64-bit numbers.
    if bits > 16 or counts[2] * _LEAST_SHARE <= counts[0]:
        return f"its numbers are of 64 bits: write them again as uint32 or uint16{_ASTYPE}"
    return "--data-dtype uint32 if its tokens are 32 bits wide"


_ASTYPE = ", for example by numpy's tokens.astype('<u4').tofile(), and read them with --data-dtype uint32"


def better_type(tokens: FileTokens, types: tuple[str, ...], vocab_size: int, chunk: int) -> str | None:
    """Return another type under which the file's first numbers fit the vocabulary and do not look like halves.

    None if there is none. If the vocabulary covers the whole range of the other type, fitting proves nothing: then most
    numbers must be outside the vocabulary under the present type.
    """
    outside = np.count_nonzero(tokens[:chunk] >= vocab_size) * 2 > len(tokens[:chunk])
    for name in types:
        other = np.dtype(name).newbyteorder("<")
        if other == tokens.dtype or tokens.file.size % other.itemsize:
            continue
        if vocab_size > int(np.iinfo(other).max) and not outside:
            continue
        piece = tokens.as_type(other)[:chunk]
        if int(piece.max()) < vocab_size and np.count_nonzero(piece[1::2]) * _LEAST_SHARE > np.count_nonzero(
            piece[::2]
        ):
            return name
    return None

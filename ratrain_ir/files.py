"""Reading and writing files: bad bytes become diagnostics, and what is on disk is replaced only by a whole file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from errno import EISDIR, ENOENT, ENOTDIR
from pathlib import Path
from typing import IO

from ratrain_ir.diagnostics import Location, fail


def read_bytes(path: str, what: str) -> bytes:
    """The bytes of a file.

    Raises `DiagnosticError` RT002 when it cannot be read.
    """
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        fail("RT002", f"cannot read the {what} '{path}': {reason}")


def read_text(path: str, what: str) -> str:
    """The text of a UTF-8 file.

    Raises `DiagnosticError` RT002 when it cannot be read or is not UTF-8, with the place of the first bad byte.
    """
    data = read_bytes(path, what)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        line = before.count(b"\n") + 1
        column = error.start - (before.rfind(b"\n") + 1) + 1
        place = Location(path, line, column)
        fail("RT002", f"the {what} is not UTF-8 text: byte {data[error.start]:#04x} at position {error.start}", place)


def _resolved(path: str) -> Path:
    """Where a path leads: a link keeps pointing there, what it points to is replaced. A pipe or device stays as it is named."""
    try:
        place = Path(path)
        if not path or (place.exists() and not place.is_file() and not place.is_dir()):
            return place  # what /dev/stdout leads to has a name that cannot be opened where that is a pipe
        return Path(os.path.realpath(path))
    except ValueError as error:
        fail("RT002", f"cannot write {path!r}: {error}")


@contextmanager
def _writing_directly(target: Path) -> Iterator[IO[bytes]]:
    try:
        with target.open("wb") as stream:
            yield stream
    except OSError as error:
        fail("RT002", f"cannot write '{target}': {error.strerror}")


@contextmanager
def replacing(path: str) -> Iterator[IO[bytes]]:
    """A binary file beside `path` that takes its place when the block ends without an error.

    Raises `DiagnosticError` RT002 when it cannot be written.
    """
    target = _resolved(path)
    if target.exists() and not target.is_file():  # a device or pipe (/dev/null, /dev/stdout) is written, never replaced
        with _writing_directly(target) as stream:
            yield stream
        return
    try:
        handle, beside = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        fail("RT002", f"cannot write '{path}': {error.strerror}")
    try:
        with os.fdopen(handle, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        umask = os.umask(0)
        os.umask(umask)
        Path(beside).chmod(0o666 & ~umask)
        Path(beside).replace(target)
    except OSError as error:
        Path(beside).unlink(missing_ok=True)
        fail("RT002", f"cannot write '{path}': {error.strerror or error}")
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise


def check_writable(path: str) -> None:
    """Raise `DiagnosticError` RT002 where no file can be written: good to know before the work whose result goes there."""
    target = _resolved(path)
    if target.exists() and not target.is_file() and not target.is_dir():
        return  # a device or pipe: opening it could wait for a reader
    try:
        if target.is_dir():
            raise IsADirectoryError(EISDIR, os.strerror(EISDIR))
        tempfile.TemporaryFile(dir=target.parent).close()
    except OSError as error:
        fail("RT002", f"cannot write '{path}': {error.strerror}")


def write_lines(path: str, lines: Iterable[str]) -> None:
    """Write lines of text, atomically.

    Raises `DiagnosticError` RT002 when it cannot be written.
    """
    with replacing(path) as stream:
        write: Callable[[bytes], int] = stream.write
        for line in lines:
            write(line.encode() + b"\n")


def made_directory(path: str) -> Path:
    """A directory, made if it is not there.

    Raises `DiagnosticError` RT002 when it cannot be made.
    """
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        fail("RT002", f"cannot make the directory '{path}': {getattr(error, 'strerror', None) or error}")
    return Path(path)


def check_directory_writable(path: str) -> None:
    """Raise `DiagnosticError` RT002 where a directory cannot be written, or cannot be made if it is not there; nothing is made."""
    try:
        place = Path(path)
        if not path:
            raise FileNotFoundError(ENOENT, os.strerror(ENOENT))
        if place.exists() and not place.is_dir():
            raise NotADirectoryError(ENOTDIR, os.strerror(ENOTDIR))
        existing = place if place.is_dir() else next(parent for parent in place.absolute().parents if parent.exists())
        # A directory, as a file system may have room for no new one, or none at all (/proc): permissions do not tell.
        Path(tempfile.mkdtemp(dir=existing, prefix=f".{place.name}.")).rmdir()
    except (OSError, ValueError) as error:
        fail("RT002", f"cannot write to the directory '{path}': {getattr(error, 'strerror', None) or error}")

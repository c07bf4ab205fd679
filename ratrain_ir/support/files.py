"""Reading and writing files: bad bytes become diagnostics, and what is on disk is replaced only by a whole file."""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from errno import EINVAL, EISDIR, ENOENT, ENOTDIR
from pathlib import Path
from secrets import token_hex
from typing import IO, TypeVar

from ratrain.ratrain_ir.support.diagnostics import DiagnosticError, Location, fail

T = TypeVar("T", str, bytes)

MIB = 1 << 20
MOST_BYTES: dict[str, int] = {
    "schedule": 256 * MIB,  # LLaMA-2-70B on 96 clusters has 13 MiB
    "program": 256 * MIB,
    "schedule table": 8 * MIB,
    "allocation problem": 64 * MIB,
    "table of measured steps": 4 * MIB,
    "table of measured iterations": 4 * MIB,
    "validation table": 4 * MIB,
    "table of op times": 1 * MIB,
    "machine file": 16 * MIB,
    "profile": 512 * MIB,
    "tokenizer": 256 * MIB,
    "generation config": 1 * MIB,
    "index of the weights": 64 * MIB,
    "log": 1024 * MIB,
}
"""The most bytes that are read of each kind of file: many times what one has, so that a device or a wrong file ends in a
diagnostic, not with this machine's memory."""


@contextmanager
def path_errors(what: str) -> Iterator[None]:
    """What the system says of a path, as RT002 behind the words `what`: "cannot read 'x'".

    A ValueError is one too: it tells of a zero byte, which no path has.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        fail("RT002", f"{what}: {getattr(error, 'strerror', None) or error}")


_NOTHING = (ENOENT, ENOTDIR)


def status_of(path: str | Path) -> os.stat_result | None:
    """What a path leads to, through links; None where nothing is there.

    Raises `DiagnosticError` RT002 where that cannot be told: no permission to search a directory, a name longer than the file
    system's names, a circle of links, a zero byte.
    """
    with path_errors(f"cannot read '{path}'"):
        try:
            return os.stat(path)  # noqa: PTH116 - a NUL in a path is a ValueError here, whatever the version of pathlib
        except OSError as error:
            if error.errno in _NOTHING:
                return None
            raise
    raise AssertionError  # `path_errors` raises


def is_there(path: str | Path) -> bool:
    """Whether a path leads to anything. Raises `DiagnosticError` RT002 as `status_of` does."""
    return status_of(path) is not None


def is_directory(path: str | Path) -> bool:
    """Whether a path leads to a directory. Raises `DiagnosticError` RT002 as `status_of` does."""
    status = status_of(path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def is_regular(path: str | Path) -> bool:
    """Whether a path leads to a file with bytes of its own, no device, pipe or directory.

    Raises `DiagnosticError` RT002 as `status_of` does.
    """
    status = status_of(path)
    return status is not None and stat.S_ISREG(status.st_mode)


_FROM_SHELL = re.compile(r"/dev/stdin|/dev/fd/\d+|/proc/(self|\d+)/fd/\d+")
"""What a shell calls the pipes it makes: `... | ratrainc lint /dev/stdin`, `ratrainc lint <(...)`."""


def _without_waiting(path: str | Path, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def opened(path: str | Path) -> IO[bytes]:
    """A file opened for reading, which waits for nobody: a named pipe would have its reader wait for a writer, perhaps for ever.

    Raises OSError where it cannot be opened, or is a named pipe that no shell made for this command; ValueError for a zero byte.
    """
    # PTH116: a NUL in a path is a ValueError here, whatever the version of pathlib
    if stat.S_ISFIFO(os.stat(path).st_mode) and not _FROM_SHELL.fullmatch(str(path)):  # noqa: PTH116
        raise OSError(EINVAL, "it is a named pipe, not a file (/dev/stdin reads from a pipe)")
    stream = open(path, "rb", opener=_without_waiting)  # noqa: SIM115 - the caller closes it
    os.set_blocking(stream.fileno(), True)
    return stream


def opened_regular(path: str | Path) -> IO[bytes]:
    """A file with bytes of its own opened for reading: what else there is may have no end.

    Raises OSError where it cannot be opened or is something else, and ValueError for a zero byte.
    """
    kind = os.stat(path).st_mode  # noqa: PTH116 - as in `opened`
    if not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):
        raise OSError(EINVAL, "it is not a regular file")
    return opened(path)


MARK = b"\xef\xbb\xbf"
"""The byte order mark of UTF-8, which some editors and spreadsheets put at a file's start. It is no part of the text: every reader
passes over it there, and anywhere else it is a character like others."""


def without_mark(data: bytes) -> bytes:
    """The bytes of a text without a byte order mark at their start."""
    return data.removeprefix(MARK)


def read_bytes(path: str, what: str) -> bytes:
    """The bytes of a file, without a byte order mark at its start; `what` is a kind in `MOST_BYTES`.

    Raises `DiagnosticError` RT002 when it cannot be read, or has more bytes than a file of that kind may have.
    """
    most = MOST_BYTES[what]
    with path_errors(f"cannot read the {what} '{path}'"), opened(path) as stream:
        data = stream.read(most + 1)
    if len(data) > most:
        fail(
            "RT002",
            f"cannot read the {what} '{path}': it has more than {most // MIB} MiB, the most that is read of such a file",
            help=f"name the file that holds the {what}",
        )
    return without_mark(data)


def read_text(path: str, what: str) -> str:
    """The text of a UTF-8 file.

    Raises `DiagnosticError` RT002 when it cannot be read or is not UTF-8, with the place of the first bad byte.
    """
    return decoded(read_bytes(path, what), path, what)


def decoded(data: bytes, path: str, what: str) -> str:
    """The text that the bytes of a file are.

    Raises `DiagnosticError` RT002 when they are not UTF-8, with the place of the first bad one.
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        line = before.count(b"\n") + 1
        column = error.start - (before.rfind(b"\n") + 1) + 1
        place = Location(path, line, column)
        fail(
            "RT002",
            f"the {what} is not UTF-8 text: byte {data[error.start]:#04x} at position {error.start}",
            place,
            help="save the file as UTF-8",
        )


def _resolved(path: str) -> Path:
    """Where a path leads: a link keeps pointing there, what it points to is replaced. A pipe or device stays as it is named."""
    with path_errors(f"cannot write '{path}'"):
        try:
            status = os.stat(path)  # noqa: PTH116 - as in `status_of`
        except OSError as error:
            if error.errno not in _NOTHING:
                raise
        else:
            if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
                return Path(path)  # what /dev/stdout leads to has a name that cannot be opened where that is a pipe
        if not path:
            raise FileNotFoundError(ENOENT, os.strerror(ENOENT))
        return Path(os.path.realpath(path))
    raise AssertionError  # `path_errors` raises


def _is_special(target: Path) -> bool:
    """Whether a path leads to a device or pipe (/dev/null, /dev/stdout): it is written, never replaced."""
    status = status_of(target)
    return status is not None and not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode)


@contextmanager
def _writing_directly(target: Path) -> Iterator[IO[bytes]]:
    try:
        with target.open("wb") as stream:
            yield stream
    except OSError as error:
        fail("RT002", f"cannot write '{target}': {error.strerror}")


@contextmanager
def replacing(path: str) -> Iterator[IO[bytes]]:
    """A binary file that takes the place of `path`, and its owner and permissions, when the block ends without an error.

    Where the system can, it has no name until then, so that nothing is left of it where the process is killed; elsewhere it stands
    beside `path`. Raises `DiagnosticError` RT002 when it cannot be written.
    """
    target = _resolved(path)
    if _is_special(target):
        with _writing_directly(target) as stream:
            yield stream
        return
    with path_errors(f"cannot write '{path}'"):
        handle, beside = _new_file(target)
    try:
        with os.fdopen(handle, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
            beside = beside or _named(stream.fileno(), target)
        _take_permissions(beside, target)
        Path(beside).replace(target)
    except BaseException as error:
        if beside is not None:
            Path(beside).unlink(missing_ok=True)
        if isinstance(error, OSError):
            fail("RT002", f"cannot write '{path}': {error.strerror or error}")
        raise


def _new_file(target: Path) -> tuple[int, str | None]:
    """A file in the folder of another, and its name, where this system has no files without one. Raises OSError."""
    if _HAS_FILES_WITHOUT_NAMES:
        with suppress(OSError):  # a file system that has none; what else is wrong is seen below
            return os.open(target.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600), None
    return _beside(target)


def _beside(target: Path) -> tuple[int, str]:
    return tempfile.mkstemp(dir=target.parent, prefix=_prefix_beside(target.name))


def _named(handle: int, target: Path) -> str:
    """The name beside another that a file without one has got; where it can get none, that of a copy. Raises OSError."""
    name = target.with_name(f"{_prefix_beside(target.name)}{token_hex(4)}")
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.link(f"/proc/self/fd/{handle}", name.name, dst_dir_fd=folder)  # with a folder the call follows the link
    except OSError:
        pass
    else:
        return str(name)
    finally:
        os.close(folder)
    copy, beside = _beside(target)
    try:
        with os.fdopen(copy, "wb") as stream, open(handle, "rb", closefd=False) as written:
            written.seek(0)
            shutil.copyfileobj(written, stream)
            stream.flush()
            os.fsync(stream.fileno())
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise
    return beside


_HAS_FILES_WITHOUT_NAMES = hasattr(os, "O_TMPFILE") and os.path.isdir("/proc/self/fd")  # noqa: PTH112 - of the system


_LONGEST_PREFIX = 100
"""Bytes: with it and its own letters the name of a file beside another fits wherever that other's name does."""


def _prefix_beside(name: str) -> str:
    """How the name of the file begins that is to take the place of the one of this name."""
    return f".{os.fsdecode(os.fsencode(name)[:_LONGEST_PREFIX])}."


def _take_permissions(path: str, replaced: Path) -> None:
    """Give a new file the mode, and where that is allowed the owner and group, of the file whose place it takes.

    Where there was none it gets the mode that any new file has. A group that cannot be kept has its permissions taken away.
    """
    before = status_of(replaced)
    if before is None:
        umask = os.umask(0)
        os.umask(umask)
        Path(path).chmod(0o666 & ~umask)
        return
    mode = stat.S_IMODE(before.st_mode) & 0o777
    for owner, group in ((before.st_uid, -1), (-1, before.st_gid)):
        with suppress(OSError):
            os.chown(path, owner, group)
    if Path(path).stat().st_gid != before.st_gid:
        mode &= ~stat.S_IRWXG
    Path(path).chmod(mode)


def check_writable(path: str) -> None:
    """Raise `DiagnosticError` RT002 where no file can be written: good to know before the work whose result goes there."""
    target = _resolved(path)
    if _is_special(target):
        return  # opening it could wait for a reader
    with path_errors(f"cannot write '{path}'"):
        if target.is_dir():
            raise IsADirectoryError(EISDIR, os.strerror(EISDIR))
        tempfile.TemporaryFile(dir=target.parent).close()


def write_lines(path: str, lines: Iterable[str]) -> None:
    """Write lines of text, atomically.

    Raises `DiagnosticError` RT002 when it cannot be written.
    """
    with replacing(path) as stream:
        write: Callable[[bytes], int] = stream.write
        for line in lines:
            write(line.encode() + b"\n")


def write_text(path: str, text: str) -> None:
    """Write a text, atomically.

    Raises `DiagnosticError` RT002 when it cannot be written.
    """
    with replacing(path) as stream:
        stream.write(text.encode())


def checked(content: T, what: str, read: Callable[[T], object]) -> T:
    """Return the text or the bytes of a file that is about to be written or shown, once the reader of such files has taken them.

    `read` raises `DiagnosticError` where they are refused, or say something else than was meant. Raises `DiagnosticError` RT011 then:
    a command that says "wrote" has written what it would read itself.
    """
    try:
        read(content)
    except DiagnosticError as error:
        first = error.diagnostics[0]
        fail(
            "RT011",
            f"the {what} that was made is not read back, so nothing was written: {first.message}",
            first.location,
            help="this is a defect of ratrainc: please report the command and its input",
            source=first.source,
        )
    return content


def made_directory(path: str) -> Path:
    """A directory, made if it is not there.

    Raises `DiagnosticError` RT002 when it cannot be made.
    """
    with path_errors(f"cannot make the directory '{path}'"):
        Path(path).mkdir(parents=True, exist_ok=True)
    return Path(path)


def check_directory_writable(path: str) -> None:
    """Raise `DiagnosticError` RT002 where a directory cannot be written, or cannot be made if it is not there; nothing is made."""
    with path_errors(f"cannot write to the directory '{path}'"):
        place = Path(path)
        if not path:
            raise FileNotFoundError(ENOENT, os.strerror(ENOENT))
        if place.exists() and not place.is_dir():
            raise NotADirectoryError(ENOTDIR, os.strerror(ENOTDIR))
        existing = place if place.is_dir() else next(parent for parent in place.absolute().parents if parent.exists())
        # A directory, as a file system may have room for no new one, or none at all (/proc): permissions do not tell.
        Path(tempfile.mkdtemp(dir=existing, prefix=_prefix_beside(place.name))).rmdir()

"""Reading and writing files: unreadable input becomes diagnostics, and a file is only replaced by a complete one."""

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
from shlex import quote
from typing import IO, NoReturn, TypeVar

from ratrain.ratrain_ir.support.diagnostics import DiagnosticError, Location, fail, nearest

T = TypeVar("T", str, bytes)

MIB = 1 << 20
MOST_BYTES: dict[str, int] = {
    "schedule": 1024 * MIB,  # LLaMA-2-70B on 96 clusters needs 13 MiB, three million ops 300
    "program": 1024 * MIB,
    "schedule table": 8 * MIB,
    "allocation problem": 64 * MIB,
    "table of measured steps": 4 * MIB,
    "table of measured iterations": 4 * MIB,
    "validation table": 4 * MIB,
    "file of results": 64 * MIB,
    "table of op times": 1 * MIB,
    "routing": 16 * MIB,
    "machine file": 16 * MIB,
    "profile": 512 * MIB,
    "tokenizer": 256 * MIB,
    "chat template": 16 * MIB,
    "generation config": 1 * MIB,
    "configuration of adapters": 4 * MIB,
    "index of the weights": 64 * MIB,
    "log": 1024 * MIB,
}
"""Largest size, in bytes, of each kind of file that is read.

The limits are many times the usual sizes: a device or a wrong file gives a diagnostic instead of filling the memory.
"""


_ENDINGS = {"schedule": ".rtir", "program": ".rtx"}
"""Kinds of files that a command makes of a model and a plan."""


def _way_to(what: str, path: str) -> str | None:
    """Return advice on how a file is made that is not there, or stands as a folder; None for a file of other kinds."""
    ending = _ENDINGS.get(what)
    if ending is None:
        return None
    config = Path(path, "config.json")
    model = quote(str(config)) if config.is_file() else "M"
    output = f"X{ending}" if Path(path).is_dir() else quote(path)
    return f"'ratrainc compile --model {model} --plan P.toml -o {output}' makes one"


@contextmanager
def path_errors(what: str, way_out: Callable[[], str | None] = lambda: None) -> Iterator[None]:
    """Turn an OSError or ValueError of the block into RT002, introduced by `what`: "cannot read 'x'".

    A ValueError is raised for a path with a zero byte. `way_out` gives the help where there is no file, or a directory.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        if isinstance(error, IsADirectoryError):
            fail("RT002", f"{what}: it is a directory", help=way_out() or "name a file in it")
        missing = isinstance(error, FileNotFoundError)
        help_text = help_for(error) or (way_out() if missing else None)
        fail("RT002", f"{what}: {getattr(error, 'strerror', None) or error}", help=help_text)


_NOTHING = (ENOENT, ENOTDIR)
_MOST_LISTED = 5


def help_for(error: OSError | ValueError) -> str | None:
    """Return help for a path that leads nowhere: what is there and nearest to it; None for other errors."""
    path = error.filename if isinstance(error, FileNotFoundError) else None
    return existing_like(os.fspath(path)) if isinstance(path, str | Path) else None


def existing_like(path: str) -> str | None:
    """Return help for a path that leads nowhere: the nearest name in its folder, or the files of that ending there.

    Where the folder does not exist, its own name is looked for in the same way.
    """
    missing = Path(path)
    while not missing.parent.is_dir() and missing.parent != missing:
        missing = missing.parent
    try:
        found = sorted(entry.name for entry in missing.parent.iterdir() if not entry.name.startswith("."))
    except OSError:
        return None
    alike = [name for name in found if Path(name).suffix == missing.suffix]
    for names in (alike, found):
        paths = {name.lower(): str(missing.parent / name) for name in names}
        if (near := nearest(missing.name, (), paths)) is not None:
            return near
    if not missing.suffix or not 0 < len(alike) <= _MOST_LISTED:
        return None
    return f"there {'is' if len(alike) == 1 else 'are'} {', '.join(str(missing.parent / name) for name in alike)}"


def status_of(path: str | Path) -> os.stat_result | None:
    """Return the status of the file that a path leads to, following links; None if there is none.

    Raises `DiagnosticError` RT002 if that cannot be found out: a directory may not be searched, a name is too long for
    the file system, links form a circle, or the path has a zero byte.
    """
    with path_errors(f"cannot read '{path}'"):
        try:
            return os.stat(path)  # noqa: PTH116 - a NUL in a path is a ValueError here, in every version of pathlib
        except OSError as error:
            if error.errno in _NOTHING:
                return None
            raise
    raise AssertionError  # `path_errors` raises


def is_there(path: str | Path) -> bool:
    """Tell whether a path leads to anything. Raises `DiagnosticError` RT002 as `status_of` does."""
    return status_of(path) is not None


def is_directory(path: str | Path) -> bool:
    """Tell whether a path leads to a directory. Raises `DiagnosticError` RT002 as `status_of` does."""
    status = status_of(path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def is_regular(path: str | Path) -> bool:
    """Tell whether a path leads to a regular file: no device, pipe or directory.

    Raises `DiagnosticError` RT002 as `status_of` does.
    """
    status = status_of(path)
    return status is not None and stat.S_ISREG(status.st_mode)


_FROM_SHELL = re.compile(r"/dev/stdin|/dev/fd/\d+|/proc/(self|\d+)/fd/\d+")
"""Names that a shell gives to pipes it makes: `... | ratrainc lint /dev/stdin`, `ratrainc lint <(...)`."""


def _without_waiting(path: str | Path, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def opened(path: str | Path) -> IO[bytes]:
    """Open a file for reading without ever waiting: a reader of a named pipe would wait for a writer, perhaps forever.

    Raises OSError if it cannot be opened, or is a named pipe that no shell made for this command; ValueError for a zero
    byte in the path.
    """
    # PTH116: a NUL in a path is a ValueError here, whatever the version of pathlib
    if stat.S_ISFIFO(os.stat(path).st_mode) and not _FROM_SHELL.fullmatch(str(path)):  # noqa: PTH116
        raise OSError(EINVAL, "it is a named pipe, not a file (/dev/stdin reads from a pipe)")
    stream = open(path, "rb", opener=_without_waiting)  # noqa: SIM115 - the caller closes it
    # Only the opening must not wait. Reading from a pipe that a shell made has to.
    os.set_blocking(stream.fileno(), True)
    return stream


def opened_regular(path: str | Path) -> IO[bytes]:
    """Open a regular file for reading; anything else may never end.

    Raises OSError if it cannot be opened or is not a regular file, and ValueError for a zero byte in the path.
    """
    kind = os.stat(path).st_mode  # noqa: PTH116 - as in `opened`
    if not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):
        raise OSError(EINVAL, "it is not a regular file")
    return opened(path)


MARK = b"\xef\xbb\xbf"
"""The byte order mark of UTF-8, which some editors and spreadsheets put at the start of a file.

It is not part of the text: every reader skips it there. Anywhere else it is an ordinary character.
"""


def without_mark(data: bytes) -> bytes:
    """Return the bytes of a text without a byte order mark at their start."""
    return data.removeprefix(MARK)


def read_bytes(path: str, what: str) -> bytes:
    """Return the bytes of a file, without a byte order mark at its start; `what` is a kind in `MOST_BYTES`.

    Raises `DiagnosticError` RT002 if the file cannot be read, or is larger than its kind may be.
    """
    most = MOST_BYTES[what]
    with path_errors(f"cannot read the {what} '{path}'", lambda: _way_to(what, path)), opened(path) as stream:
        data = stream.read(most + 1)
    if len(data) > most:
        fail(
            "RT002",
            f"cannot read the {what} '{path}': it has more than {most // MIB} MiB, the most that is read of "
            "such a file",
            help=f"name the file that holds the {what}",
        )
    return without_mark(data)


def read_text(path: str, what: str) -> str:
    """Return the text of a UTF-8 file; `what` is a kind in `MOST_BYTES`.

    Raises `DiagnosticError` RT002 if it cannot be read or is not UTF-8, with the place of the first bad byte.
    """
    return decoded(read_bytes(path, what), path, what)


def decoded(data: bytes, path: str, what: str) -> str:
    """Decode the bytes of the file `path` as UTF-8.

    Raises `DiagnosticError` RT002 if they are not UTF-8, with the place of the first bad one.
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
    """Follow links to the file that is to be written, so that the file is replaced and the link stays.

    A pipe or device keeps its own name. Raises `DiagnosticError` RT002.
    """
    with path_errors(f"cannot write '{path}'"):
        try:
            status = os.stat(path)  # noqa: PTH116 - as in `status_of`
        except OSError as error:
            if error.errno not in _NOTHING:
                raise
        else:
            if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
                return Path(path)  # /dev/stdout of a pipe resolves to `pipe:[123]`, which cannot be opened
        if not path:
            raise FileNotFoundError(ENOENT, os.strerror(ENOENT))
        return Path(os.path.realpath(path))
    raise AssertionError  # `path_errors` raises


def _is_special(target: Path) -> bool:
    """Tell whether a path leads to a device or pipe (/dev/null, /dev/stdout): it is written, never replaced."""
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
def replacing(path: str, what: str | None = None) -> Iterator[IO[bytes]]:
    """Open a new binary file that replaces `path` when the block ends without an error.

    If it is one of the kinds in `MOST_BYTES`, `what`, it replaces nothing where it has more bytes than are read of such
    a file.

    It takes over the owner and permissions of the replaced file. On Linux it has no name until then, so nothing remains
    if the process is killed; elsewhere it is a temporary file next to `path`. Raises `DiagnosticError` RT002 if it
    cannot be written.
    """
    target = _resolved(path)
    if _is_special(target):
        with _writing_directly(target) as stream:
            yield stream
        return
    with path_errors(f"cannot write '{path}'"):
        handle, temporary = _new_file(target)
    try:
        with os.fdopen(handle, "wb") as stream:
            yield stream
            if what is not None and stream.tell() > MOST_BYTES[what]:
                _refuse_size(path, what)
            stream.flush()
            os.fsync(stream.fileno())
            # The bytes are on disk before the name is: a crash leaves the old file or the whole new one.
            temporary = temporary or _named(stream.fileno(), target)
        _take_permissions(temporary, target)
        Path(temporary).replace(target)
    except BaseException as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):
            fail("RT002", f"cannot write '{path}': {error.strerror or error}")
        raise


def _new_file(target: Path) -> tuple[int, str | None]:
    """Create an empty file in the folder of `target`; return its handle and name.

    The name is None if the system has files without names. Raises OSError.
    """
    if _HAS_FILES_WITHOUT_NAMES:
        with suppress(OSError):  # this file system has none; any other error comes up again below
            return os.open(target.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600), None
    return _temporary_file(target)


def _temporary_file(target: Path) -> tuple[int, str]:
    return tempfile.mkstemp(dir=target.parent, prefix=_temporary_prefix(target.name))


def _named(handle: int, target: Path) -> str:
    """Give a file without a name one next to `target`, and return it.

    If that is not possible, copy the file to one that has a name. Raises OSError.
    """
    name = target.with_name(f"{_temporary_prefix(target.name)}{token_hex(4)}")
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.link(f"/proc/self/fd/{handle}", name.name, dst_dir_fd=folder)  # linkat follows the link
    except OSError:
        pass
    else:
        return str(name)
    finally:
        os.close(folder)
    copy, temporary = _temporary_file(target)
    try:
        with os.fdopen(copy, "wb") as stream, open(handle, "rb", closefd=False) as written:
            written.seek(0)
            shutil.copyfileobj(written, stream)
            stream.flush()
            os.fsync(stream.fileno())
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return temporary


def _refuse_size(path: str, what: str) -> NoReturn:
    text = f"cannot write the {what} '{path}': it has more than {MOST_BYTES[what] // MIB} MiB, the most that is read"
    fail(
        "RT002", f"{text} of such a file", help="a plan with fewer micro-batches, slices or layers makes a smaller one"
    )


_HAS_FILES_WITHOUT_NAMES = hasattr(os, "O_TMPFILE") and os.path.isdir("/proc/self/fd")  # noqa: PTH112 - of the system


_LONGEST_PREFIX = 100
"""Bytes of a file's name that go into the name of its temporary file.

The suffix that is added to it keeps the name as short as file systems require.
"""


def _temporary_prefix(name: str) -> str:
    """Return the start of the temporary name of a file that is to replace the file `name`."""
    return f".{os.fsdecode(os.fsencode(name)[:_LONGEST_PREFIX])}."


def _take_permissions(path: str, replaced: Path) -> None:
    """Give a new file the mode and, where allowed, the owner and group of the file that it replaces.

    If there was none, it gets the mode of any new file (0666 without the umask). If the group cannot be kept, the group
    gets no permissions.
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
    """Raise `DiagnosticError` RT002 if no file can be written at `path`; callers ask before long work."""
    target = _resolved(path)
    if _is_special(target):
        return  # opening it could wait for a reader
    with path_errors(f"cannot write '{path}'"):
        if target.is_dir():
            raise IsADirectoryError(EISDIR, os.strerror(EISDIR))
        tempfile.TemporaryFile(dir=target.parent).close()


def write_lines(path: str, lines: Iterable[str], what: str | None = None) -> None:
    """Write lines of text, atomically; `what` is a kind in `MOST_BYTES` that bounds them.

    Raises `DiagnosticError` RT002 when it cannot be written, or would not be read for its size.
    """
    with replacing(path, what) as stream:
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
    """Return the content of a file that is about to be written or shown, after its own reader has accepted it.

    `read` raises `DiagnosticError` if it refuses the content, or reads something else than was meant; then this raises
    `DiagnosticError` RT011. So a command never writes a file that it could not read.
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
    """Make a directory, with its parents, if it does not exist; return its path.

    Raises `DiagnosticError` RT002 if it cannot be made.
    """
    with path_errors(f"cannot make the directory '{path}'"):
        Path(path).mkdir(parents=True, exist_ok=True)
    return Path(path)


def check_directory_writable(path: str) -> None:
    """Raise `DiagnosticError` RT002 if a directory cannot be written or made; leave nothing behind."""
    with path_errors(f"cannot write to the directory '{path}'"):
        place = Path(path)
        if not path:
            raise FileNotFoundError(ENOENT, os.strerror(ENOENT))
        if place.exists() and not place.is_dir():
            raise NotADirectoryError(ENOTDIR, os.strerror(ENOTDIR))
        existing = place if place.is_dir() else next(parent for parent in place.absolute().parents if parent.exists())
        # Try it: permissions do not show that a file system is full, or takes no new directories at all (/proc).
        Path(tempfile.mkdtemp(dir=existing, prefix=_temporary_prefix(place.name))).rmdir()

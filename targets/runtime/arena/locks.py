"""Places that one run alone writes to: each has a lock file, which the kernel releases when its process ends, however that ends.

A lock is `flock` on a file that says who holds it. The file is removed with the lock; one that a killed process has left is taken by
the next. Within a process a lock can be held several times over: what writes to a place takes it as well as the run around it.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

from attrs import define

from ratrain.ratrain_ir.support.diagnostics import Diagnostic, Severity, fail
from ratrain.ratrain_ir.support.text import shown

if TYPE_CHECKING:
    from types import TracebackType

try:
    import fcntl
except ImportError:  # there is none on this system: no place can be locked
    fcntl = None  # type: ignore[assignment]

_MOST_SAID = 1 << 12  # bytes of a lock file that are read
_TRIES = 16
"""A lock file can vanish between opening and locking it, where its holder ends; so often in a row it does not."""


@define(eq=False)
class _Held:
    handle: int
    count: int


_HELD: dict[str, _Held] = {}
"""What this process holds, by the path of the lock file."""


@define(eq=False)
class Lock:
    """A lock that is held, or the reason why there can be none; a context manager that releases it."""

    path: str
    warning: Diagnostic | None = None
    """why the place could not be locked, so that nothing keeps others from writing there"""
    _open: bool = True

    @property
    def is_held(self) -> bool:
        """Whether it is certain that no other process writes to the place."""
        return self._open and self.warning is None

    def release(self) -> None:
        """Let others have the place. Does nothing the second time."""
        if not self.is_held:
            return
        self._open = False
        held = _HELD[self.path]
        held.count -= 1
        if held.count == 0:
            del _HELD[self.path]
            with suppress(OSError):  # removed while it is locked: who has opened it meanwhile sees that it is gone
                os.unlink(self.path)  # noqa: PTH108
            os.close(held.handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def lock_beside(place: str) -> Path:
    """The lock file of a place, beside it; inside it where that is a directory and the one above cannot be written."""
    target = Path(os.path.realpath(place))
    if target.is_dir() and not os.access(target.parent, os.W_OK):
        return target / ".lock"
    return target.with_name(f".{target.name}.lock")


def hold(path: Path, code: str, place: str) -> Lock:
    """Lock a place by its lock file.

    Raises `DiagnosticError` with `code`, naming the other process, where that writes to the place.
    """
    name = str(path)
    if name in _HELD:
        _HELD[name].count += 1
        return Lock(name)
    try:
        handle = _locked(name)
    except BlockingIOError:
        fail(
            code,
            f"{_holder(path)} writes to '{place}': what one of two runs writes there would be lost",
            help="name another place, or wait until that one has ended",
        )
    except OSError as error:
        text = f"'{place}' cannot be locked ({error.strerror or error}): nothing keeps another run from writing there"
        return Lock(name, Diagnostic(code, text, severity=Severity.WARNING))
    _HELD[name] = _Held(handle, 1)
    return Lock(name)


def is_held_by_another(path: Path) -> bool:
    """Whether another process has this lock file locked; not where it cannot be told. Nothing is made or left."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (OSError, AttributeError):  # the last where this system has no locks
        pass
    finally:
        os.close(handle)
    return False


def _locked(name: str) -> int:
    """The handle of a lock file that is locked. Raises BlockingIOError where another process has it, OSError where none can."""
    if fcntl is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    for _ in range(_TRIES):
        handle = _opened(name)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_there(name, handle):
                _say_who(handle)
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)
    raise BlockingIOError


def _opened(name: str) -> int:
    """A lock file, made if it is not there; links are not followed. One of another user may be readable only, which is enough."""
    flags = os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(name, os.O_RDWR | os.O_CREAT | flags, 0o666)
    except PermissionError:
        return os.open(name, os.O_RDONLY | flags)


def _is_there(name: str, handle: int) -> bool:
    """Whether a file still has its name."""
    try:
        named, opened = os.lstat(name), os.fstat(handle)
    except FileNotFoundError:
        return False
    return (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)


def _say_who(handle: int) -> None:
    """Write who holds the lock. It holds whether this can be read or not."""
    text = f"{os.getpid()} {int(time.time())} {socket.gethostname()}\n"
    with suppress(OSError):
        os.ftruncate(handle, 0)
        os.pwrite(handle, text.encode(), 0)


def _holder(path: Path) -> str:
    """Who holds a lock, in words."""
    try:
        with path.open("rb") as stream:
            pid, since, host = stream.read(_MOST_SAID).decode().split()
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(int(since)))
        return f"process {int(pid)} on {shown(host)}, begun {began},"
    except (OSError, ValueError, OverflowError):
        return "another process"

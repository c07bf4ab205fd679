"""Locks on places that only one run may write to; the kernel releases one when its process ends, for whatever reason.

A lock is `flock` on a lock file, which says who holds it. Releasing removes the file; a file that a killed process left
is locked by the next. One process can hold a lock several times (it is counted): both a run and a save within it lock
the same place.
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
except ImportError:  # not on this system: no place can be locked
    fcntl = None  # type: ignore[assignment]

_MOST_SAID = 1 << 12  # bytes of a lock file that are read
_TRIES = 16
"""Attempts to lock a file that vanishes between opening and locking because its holder ends; it does not happen so
often in a row."""


@define(eq=False)
class _Held:
    handle: int
    count: int


_HELD: dict[str, _Held] = {}
"""Locks that this process holds, by path of the lock file."""


@define(eq=False)
class Lock:
    """Held lock, or the reason why there is none; a context manager that releases it."""

    path: str
    warning: Diagnostic | None = None
    """reason why the place could not be locked, so nothing prevents others from writing there; None if it is locked"""
    _open: bool = True

    @property
    def is_held(self) -> bool:
        """True if it is certain that no other process writes to the place."""
        return self._open and self.warning is None

    def release(self) -> None:
        """Let others have the place; do nothing on a second call."""
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


def lock_path(place: str) -> Path:
    """Return the path of a place's lock file: `.NAME.lock` next to it.

    For a directory whose parent is not writable it is `.lock` inside the directory.
    """
    target = Path(os.path.realpath(place))
    if target.is_dir() and not os.access(target.parent, os.W_OK):
        return target / ".lock"
    return target.with_name(f".{target.name}.lock")


def hold(path: Path, code: str, place: str) -> Lock:
    """Lock `place` by the lock file `path`; where the system cannot lock, return a `Lock` with a warning.

    Raises `DiagnosticError` with `code`, naming the other process, where another process holds the lock.
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
    """Return True if another process has this lock file locked; False also where that cannot be told.

    Nothing is created or left behind.
    """
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
    """Open and lock a lock file; return its handle.

    Raises BlockingIOError where another process has it, OSError where it cannot be locked.
    """
    if fcntl is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    for _ in range(_TRIES):
        handle = _opened(name)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The holder unlinks the file before it releases the lock. A lock on a file without a name excludes nobody,
            # because the next process creates a new file: open again.
            if _is_there(name, handle):
                _say_who(handle)
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)
    raise BlockingIOError


def _opened(name: str) -> int:
    """Open a lock file, creating it if needed, without following links.

    Another user's file may be readable only, which is enough for `flock`.
    """
    flags = os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(name, os.O_RDWR | os.O_CREAT | flags, 0o666)
    except PermissionError:
        return os.open(name, os.O_RDONLY | flags)


def _is_there(name: str, handle: int) -> bool:
    """Return True if `name` still refers to the open file."""
    try:
        named, opened = os.lstat(name), os.fstat(handle)
    except FileNotFoundError:
        return False
    return (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)


def _say_who(handle: int) -> None:
    """Write process id, time and host into the lock file. The lock holds even if this fails."""
    text = f"{os.getpid()} {int(time.time())} {socket.gethostname()}\n"
    with suppress(OSError):
        os.ftruncate(handle, 0)
        os.pwrite(handle, text.encode(), 0)


def _holder(path: Path) -> str:
    """Describe the holder of a lock in words."""
    try:
        with path.open("rb") as stream:
            pid, since, host = stream.read(_MOST_SAID).decode().split()
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(int(since)))
        return f"process {int(pid)} on {shown(host)}, begun {began},"
    except (OSError, ValueError, OverflowError):
        return "another process"

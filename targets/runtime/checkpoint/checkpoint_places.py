"""Replacing a directory by a newly written one as a whole, and finding the leftovers of an interrupted replacement.

A checkpoint `DIR` is written as `DIR.tmp-XXXXXXXX` next to its place. Linux exchanges the two in one step
(`renameat2(RENAME_EXCHANGE)`): `DIR` is whole at every moment, and a killed process leaves `DIR.tmp-XXXXXXXX`.
Elsewhere two renames are needed, and `DIR` is absent between them:

    before        DIR (old)                      DIR.tmp-X (new)
    between       DIR.tmp-X.old (old)            DIR.tmp-X (new)
    after         DIR (new)                      DIR.tmp-X.old (old), then removed
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Collection
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from attrs import frozen

_WRITTEN, _ASIDE = ".tmp-", ".old"
_LETTERS = r"[a-z0-9_]{8}"
"""Pattern of the random suffix that `tempfile` appends to a name."""
_EARLIER = ".old-"
"""Suffix under which earlier versions of this program set the old directory aside. People name copies like this too:
such a directory is used where there is no other, and never removed."""
_AT_CWD, _EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux
_CANNOT = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)


def temporary_directory(target: Path) -> Path:
    """Create a directory next to `target`, in which its replacement is written. Raises OSError."""
    return Path(tempfile.mkdtemp(dir=target.parent, prefix=f"{target.name}{_WRITTEN}"))


def aside_of(temporary: Path) -> Path:
    """Return the path of the old directory while the new one takes its place."""
    return temporary.with_name(temporary.name + _ASIDE)


def move_into_place(temporary: Path, target: Path, aside: Path) -> None:
    """Make `temporary` the directory `target`; remove the old one once that is done, or put it back if it fails.

    The two are exchanged in one step where the system can; elsewhere the old one stands at `aside` in between, which
    must not exist. Raises OSError.
    """
    if target.exists():
        keep_modes(temporary, target)
        if exchange(temporary, target):
            _finish_exchange(temporary, target)
        else:
            _replace_by_renames(temporary, target, aside)
        return
    temporary.rename(target)
    sync_folder(target.parent)


def _finish_exchange(old: Path, target: Path) -> None:
    """Make the exchange durable and remove the old directory; undo the exchange if that fails."""
    try:
        # A rename is durable only once its parent directory is synced; only then may the old one go.
        sync_folder(target.parent)
    except BaseException:
        exchange(old, target)  # the caller removes `old`: let that be the new one, which is not safely on disk
        raise
    shutil.rmtree(old, ignore_errors=True)  # a failure here does not matter: the new checkpoint stands


def _replace_by_renames(temporary: Path, target: Path, aside: Path) -> None:
    """Replace `target` by two renames; rename the old one back if the second fails."""
    try:
        target.rename(aside)
        temporary.rename(target)
    except BaseException:
        if aside.exists() and not target.exists():
            aside.rename(target)
        raise
    sync_folder(target.parent)
    shutil.rmtree(aside, ignore_errors=True)


@cache
def _renameat2() -> Any:
    """Return the C library's function of this name, or None."""
    try:
        return ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError, TypeError):
        return None


def exchange(one: Path, other: Path) -> bool:
    """Exchange two directories in one step; return False where the system or the file system cannot. Raises OSError."""
    call = _renameat2()
    if call is None:
        return False
    if call(_AT_CWD, os.fsencode(one), _AT_CWD, os.fsencode(other), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _CANNOT:
        return False
    raise OSError(number, os.strerror(number), str(one))


def keep_modes(temporary: Path, target: Path) -> None:
    """Give a directory and its files the permissions of the ones they replace. Raises OSError."""
    for path in temporary.iterdir():
        with suppress(FileNotFoundError):
            path.chmod(stat.S_IMODE((target / path.name).lstat().st_mode))
    temporary.chmod(stat.S_IMODE(target.stat().st_mode))


def sync_folder(folder: Path) -> None:
    """Flush the names in a directory to the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@frozen
class Leftovers:
    """Directories that interrupted saves left next to a place."""

    ours: tuple[Path, ...]
    """names that only this program gives"""
    earlier: tuple[Path, ...]
    """names that earlier versions of this program give, or people give to copies"""

    @property
    def paths(self) -> tuple[Path, ...]:
        """All of them."""
        return self.ours + self.earlier


def leftovers(target: Path, files: Collection[str]) -> Leftovers:
    """Find the leftovers next to `target`: directories of the right name that hold only `files`. Raises OSError."""
    ours = re.compile(rf"{re.escape(target.name)}{re.escape(_WRITTEN)}{_LETTERS}({re.escape(_ASIDE)})?")
    earlier = re.compile(rf"{re.escape(target.name)}{re.escape(_EARLIER)}{_LETTERS}")
    names = sorted(target.parent.iterdir())
    return Leftovers(
        tuple(path for path in names if ours.fullmatch(path.name) and _holds_only(path, files)),
        tuple(path for path in names if earlier.fullmatch(path.name) and _holds_only(path, files)),
    )


def _holds_only(path: Path, files: Collection[str]) -> bool:
    try:
        return not path.is_symlink() and path.is_dir() and all(entry.name in files for entry in path.iterdir())
    except OSError:  # it is gone, or somebody else's
        return False

"""Putting a written directory in its place as a whole, and finding what was left where that was interrupted.

A checkpoint `DIR` is written as `DIR.tmp-XXXXXXXX` beside its place. Where the system can exchange two directories at once, `DIR` is
whole at every moment, and what is left when a process is killed is in `DIR.tmp-XXXXXXXX`. Elsewhere the old one stands as
`DIR.tmp-XXXXXXXX.old` between two renames; then `DIR` is absent, and both are whole beside it.
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
"""What `tempfile` puts at the end of a name."""
_EARLIER = ".old-"
"""An earlier version of this program set the old one aside under this name. It had no lock, and people name copies like that: it is
used where there is no other, and never removed."""
_AT_CWD, _EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux
_CANNOT = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)


def written_beside(target: Path) -> Path:
    """A new directory in which what becomes `target` is written. Raises OSError."""
    return Path(tempfile.mkdtemp(dir=target.parent, prefix=f"{target.name}{_WRITTEN}"))


def aside_of(beside: Path) -> Path:
    """Where the old directory stands while the new one takes its place."""
    return beside.with_name(beside.name + _ASIDE)


def move_into_place(beside: Path, target: Path, aside: Path) -> None:
    """Make `beside` the directory `target`; what was there is removed once that is done, and put back if it fails.

    The two are exchanged at once where the system can. Elsewhere the old one stands at `aside`, which does not exist, in between.
    Raises OSError.
    """
    if target.exists():
        keep_modes(beside, target)
        if exchange(beside, target):
            _finish_exchange(beside, target)
        else:
            _replace_by_renames(beside, target, aside)
        return
    beside.rename(target)
    sync_folder(target.parent)


def _finish_exchange(old: Path, target: Path) -> None:
    try:
        sync_folder(target.parent)
    except BaseException:
        exchange(old, target)  # the caller removes what was not saved: let that be the new one
        raise
    shutil.rmtree(old, ignore_errors=True)  # the new checkpoint stands, whatever becomes of the old one


def _replace_by_renames(beside: Path, target: Path, aside: Path) -> None:
    try:
        target.rename(aside)
        beside.rename(target)
    except BaseException:
        if aside.exists() and not target.exists():
            aside.rename(target)
        raise
    sync_folder(target.parent)
    shutil.rmtree(aside, ignore_errors=True)


@cache
def _renameat2() -> Any:
    """The C library's function of this name, or None."""
    try:
        return ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError, TypeError):
        return None


def exchange(one: Path, other: Path) -> bool:
    """Exchange two directories at once; False where the system or the file system cannot. Raises OSError."""
    call = _renameat2()
    if call is None:
        return False
    if call(_AT_CWD, os.fsencode(one), _AT_CWD, os.fsencode(other), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _CANNOT:
        return False
    raise OSError(number, os.strerror(number), str(one))


def keep_modes(beside: Path, target: Path) -> None:
    """Give a directory and its files the permissions of those that they replace. Raises OSError."""
    for path in beside.iterdir():
        with suppress(FileNotFoundError):
            path.chmod(stat.S_IMODE((target / path.name).lstat().st_mode))
    beside.chmod(stat.S_IMODE(target.stat().st_mode))


def sync_folder(folder: Path) -> None:
    """Bring the names in a directory to the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@frozen
class Leftovers:
    """What interrupted saves have left beside the place of a directory."""

    ours: tuple[Path, ...]
    """written by nobody else, under names that nobody else gives"""
    earlier: tuple[Path, ...]
    """those of earlier versions, or copies that somebody made"""

    @property
    def paths(self) -> tuple[Path, ...]:
        """All of them."""
        return self.ours + self.earlier


def leftovers(target: Path, files: Collection[str]) -> Leftovers:
    """What was left beside `target`, and holds nothing but such files. Raises OSError."""
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

"""Proof cache: remembers what this installation has proved sound, so that the next command need not prove it again.

An entry is a file in a folder of the user's cache. Its name is the SHA-256 of all that the proof is about
and of all that made it:

    XXXX

So if a byte of the content, a line of the verifier or a library changes, the name changes, and the proof runs again.
The trusted assumption is that only this user's commands write to the folder; a folder that others can write to is not
used. `RATRAIN_CACHE_DIR` names another folder; if it is empty, nothing is cached. Nothing is cached either with
plugins, which may change what is proved, nor in a process that started before a file of the package was changed: the
code that it runs is not the code on disk.
"""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ratrain.ratrain_ir.support.plugins import plugins

VARIABLE = "RATRAIN_CACHE_DIR"
_PACKAGE = Path(__file__).parents[2]
_STARTED = time.time()
_LIBRARIES = ("attrs", "lark", "numba", "numpy")
_MOST = 4096
"""Most entries that are kept; the oldest are removed first."""


def prove(proof: Callable[[], object], kind: str, *content: bytes, anew: bool = False) -> None:
    """Run a proof, which raises if it fails, and remember that it succeeded.

    Skip it if it is remembered for this `kind` and these parts of content, unless `anew` is set.
    """
    entry = _entry(kind, content)
    if entry is None:
        proof()
        return
    if not anew and _is_held(entry):
        return
    proof()
    with suppress(OSError):  # without an entry the next command proves it again
        _leave(entry)


def entry_name(installed: str, kind: str, content: Iterable[bytes]) -> str:
    """Return the file name of the entry for a proof of this kind about this content, by this installation."""
    digest = sha256()
    for part in (installed.encode(), kind.encode(), *content):
        # Each part's length goes first, so that moving bytes from one part to the next changes the digest.
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


@cache
def installation() -> str | None:
    """Return a text that differs between installations that may prove differently.

    It is of the package's files, Python, and the libraries that proofs use. None if this process may run other code
    than is on disk.
    """
    files = _files_below(_PACKAGE)
    if not files or max(os.stat(path).st_mtime for _, path in files) > _STARTED:  # noqa: PTH116 - as below
        return None
    libraries = [f"{name} {version(name)}" for name in _LIBRARIES]
    return "\n".join([_digest_of(files), sys.version, *libraries])


def _digest_of(files: Iterable[tuple[str, str]]) -> str:
    """Return the SHA-256 of the names and bytes of files."""
    digest = sha256()
    for name, path in files:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - making a Path takes as long as reading the file
            data = file.read()
        digest.update(f"{name}\n{len(data)}\n".encode())
        digest.update(data)
    return digest.hexdigest()


def _files_below(folder: Path) -> list[tuple[str, str]]:
    """List all files below a folder as (name relative to it, with "/"; path), each folder's own files sorted.

    Links are followed, because the folders of a checkout are links.
    """
    root = os.fspath(folder)
    found = []
    for place, folders, names in os.walk(root, followlinks=True):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        below = place[len(root) + 1 :].replace(os.sep, "/")
        found += [(f"{below}/{name}" if below else name, f"{place}{os.sep}{name}") for name in sorted(names)]
    return found


def _entry(kind: str, content: tuple[bytes, ...]) -> Path | None:
    """Return the path of the entry of a proof; None if nothing can be cached."""
    folder = None if plugins() else _folder()
    try:
        installed = None if folder is None else installation()
    except (OSError, PackageNotFoundError):
        installed = None
    return None if folder is None or installed is None else folder / entry_name(installed, kind, content)


def _folder() -> Path | None:
    """Return the folder of entries, made if missing; None if there is none, or others can write to it."""
    try:
        base = os.environ.get(VARIABLE)
        if base is None:
            base = str(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ratrain")
        folder = Path(base) / "proofs"
        if not base or not folder.is_absolute():
            return None
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except (OSError, RuntimeError, ValueError):  # no home, a zero byte
        return None
    own = not hasattr(os, "geteuid") or status.st_uid == os.geteuid()
    return folder if own and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else None


def _is_held(entry: Path) -> bool:
    try:
        return entry.read_text("ascii") == entry.name
    except (OSError, UnicodeDecodeError):
        return False


def _leave(entry: Path) -> None:
    """Write an entry, and remove the oldest above `_MOST`. Raises OSError if it cannot be written."""
    entry.write_text(entry.name, "ascii")
    others = [path for path in entry.parent.iterdir() if path != entry]
    if len(others) >= _MOST:
        others.sort(key=lambda path: path.stat().st_mtime)
        for path in others[: len(others) + 1 - _MOST]:
            path.unlink(missing_ok=True)

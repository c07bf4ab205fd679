"""Receipts: which files this installation has proved sound, so that the next command on the same bytes need not prove it again.

A receipt is a file in a folder of the user's cache. Its name is the SHA-256 of all that the proof is about and of all that made it:

    every file of the installed package | versions of Python and of the libraries that prove | kind | each part of the content

So another byte of the content, another line of the verifier, or another library has another receipt, and is proved anew. What is trusted
is that the folder holds what this user's commands have put there; a folder that others can write to is not. `RATRAIN_CACHE_DIR` names
another folder; empty, there are no receipts. There are none either with plugins, which may change what is proved, nor in a process that
is older than a file of the package: what it runs is not what is installed.
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
"""Receipts that are kept; the oldest go first."""


def prove(proof: Callable[[], object], kind: str, *content: bytes, anew: bool = False) -> None:
    """Run a proof, which raises where it fails, and leave a receipt of it; with a receipt there is nothing to do, unless it is wanted `anew`."""
    receipt = _receipt(kind, content)
    if receipt is None:
        proof()
        return
    if not anew and _is_held(receipt):
        return
    proof()
    with suppress(OSError):  # without a receipt it is proved again
        _leave(receipt)


def receipt_name(installed: str, kind: str, content: Iterable[bytes]) -> str:
    """The name of the receipt of a proof of this kind about this content, by an installation."""
    digest = sha256()
    for part in (installed.encode(), kind.encode(), *content):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


@cache
def installation() -> str | None:
    """What tells installations apart that may prove differently: the package, Python, and the libraries that proofs run on.

    None where this process cannot tell what it runs.
    """
    files = _files_below(_PACKAGE)
    if not files or max(os.stat(path).st_mtime for _, path in files) > _STARTED:  # noqa: PTH116 - as below
        return None
    libraries = [f"{name} {version(name)}" for name in _LIBRARIES]
    return "\n".join([_digest_of(files), sys.version, *libraries])


def digest_of_files(folder: Path) -> str:
    """The SHA-256 of all files below a folder, names and bytes, without what Python and numba keep there of them."""
    return _digest_of(_files_below(folder))


def _digest_of(files: Iterable[tuple[str, str]]) -> str:
    digest = sha256()
    for name, path in files:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - a Path for each of hundreds takes as long as to read them
            data = file.read()
        digest.update(f"{name}\n{len(data)}\n".encode())
        digest.update(data)
    return digest.hexdigest()


def _files_below(folder: Path) -> list[tuple[str, str]]:
    """All files in the order of their names: below the folder, with "/" between them, and as paths; the folders of a checkout are links."""
    root = os.fspath(folder)
    found = []
    for place, folders, names in os.walk(root, followlinks=True):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        below = place[len(root) + 1 :].replace(os.sep, "/")
        found += [(f"{below}/{name}" if below else name, f"{place}{os.sep}{name}") for name in sorted(names)]
    return found


def _receipt(kind: str, content: tuple[bytes, ...]) -> Path | None:
    """Where the receipt of a proof is, or is left; None where there can be none."""
    folder = None if plugins() else _folder()
    try:
        installed = None if folder is None else installation()
    except (OSError, PackageNotFoundError):
        installed = None
    return None if folder is None or installed is None else folder / receipt_name(installed, kind, content)


def _folder() -> Path | None:
    """Where receipts are, made if it is not there; None where there is no such place, or others can write to it."""
    try:
        base = os.environ.get(VARIABLE)
        if base is None:
            base = str(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ratrain")
        folder = Path(base) / "receipts"
        if not base or not folder.is_absolute():
            return None
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except (OSError, RuntimeError, ValueError):  # no home, a zero byte
        return None
    own = not hasattr(os, "geteuid") or status.st_uid == os.geteuid()
    return folder if own and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else None


def _is_held(receipt: Path) -> bool:
    try:
        return receipt.read_text("ascii") == receipt.name
    except (OSError, UnicodeDecodeError):
        return False


def _leave(receipt: Path) -> None:
    """Raises OSError where it cannot be written."""
    receipt.write_text(receipt.name, "ascii")
    others = [path for path in receipt.parent.iterdir() if path != receipt]
    if len(others) >= _MOST:
        others.sort(key=lambda path: path.stat().st_mtime)
        for path in others[: len(others) + 1 - _MOST]:
            path.unlink(missing_ok=True)

"""`python -m ratrain`: the same command as the `ratrainc` script."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn


def drop_current_directory() -> None:
    """Remove the current directory from the import path, unless this package itself was found there.

    `python -m` puts the current directory first on `sys.path`, so a file `numpy.py` beside the user's data would be
    imported, and executed, in place of a library. The installed `ratrainc` script does not have the problem; this gives
    `-m` the same behaviour. With `PYTHONSAFEPATH` or `-P` Python did not add the directory: what stands first then was
    asked for, and stays.
    """
    if sys.flags.safe_path or not sys.path:
        return
    try:
        current = Path.cwd().resolve()
    except FileNotFoundError:  # deleted while a shell stood in it: then Python could not add it either
        return
    home = Path(__file__).resolve().parent.parent
    if current != home and Path(sys.path[0]).resolve() == current:  # an empty entry means the current directory too
        del sys.path[0]


def _run() -> NoReturn:
    """Run the command line and leave with its exit code, as the script that pip generates does."""
    drop_current_directory()
    from ratrain.ratrainc.cli import main  # only now: it imports libraries that a foreign file could shadow

    command: Callable[[], int | None] = main
    sys.exit(command())


if __name__ == "__main__":
    _run()

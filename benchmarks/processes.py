"""Processes of benchmarks: their environment, their end, and the figures that they hand back as JSON.

Only the standard library is imported, so that gpu_drill.py can say what else is missing.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def environment(*folders: Path, **variables: str) -> dict[str, str]:
    """Return this process's variables and `variables`; `src` and `folders` come first on PYTHONPATH."""
    paths = [str(ROOT / "src"), *map(str, folders), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def end_group(process: subprocess.Popen[Any]) -> None:
    """End a process that leads a group, and all that it started: SIGTERM first, SIGKILL two seconds later."""
    for word in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, word)
        except ProcessLookupError:
            break
        try:
            process.wait(2)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def interrupt_on_sigterm() -> None:
    """Let SIGTERM raise KeyboardInterrupt, as Ctrl-C does, so that processes end with the one that started them."""

    def interrupt(_signal: int, _frame: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


@contextmanager
def handed_back(as_json: bool) -> Iterator[dict[str, Any]]:
    """Yield a dict for figures; with `as_json` print it as one JSON object at the end, and all text to stderr.

    An exception leaves stdout empty.
    """
    figures: dict[str, Any] = {}
    with redirect_stdout(sys.stderr if as_json else sys.stdout):
        yield figures
    if as_json:
        print(json.dumps(figures))

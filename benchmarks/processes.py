"""Processes of benchmarks: their environment, their end, and the figures that they hand back as JSON.

Only the standard library is imported, so that gpu_drill.py can say what else is missing.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]


def environment(*folders: Path, **variables: str) -> dict[str, str]:
    """Return this process's variables and `variables`; `src` and `folders` come first on PYTHONPATH."""
    paths = [str(ROOT / "src"), *map(str, folders), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


class Taken(NamedTuple):
    """Cost of one command."""

    cpu: float
    """seconds of its processes, user and system"""
    wall: float
    peak_bytes: int
    """largest resident memory of one of its processes"""
    text: str
    """what it printed"""


def command_cost(words: list[str], cache: Path) -> Taken:
    """Run a command of `ratrainc` in a process of its own and return its cost; it has to succeed.

    Compiled loops, and receipts of what was proved, are kept in `cache`.
    """
    variables = environment(RATRAIN_CACHE_DIR=str(cache.resolve()))
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    code = "import sys; from ratrain.ratrainc.cli import main; sys.exit(main())"
    begin = time.monotonic()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen([sys.executable, "-c", code, *words], env=variables, stdout=output, stderr=output)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        wall = time.monotonic() - begin
        output.seek(0)
        text = output.read().decode()
    if process.returncode:
        sys.exit(f"{' '.join(words)} failed:\n{text}")
    return Taken(usage.ru_utime + usage.ru_stime, wall, usage.ru_maxrss * 1024, text)


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

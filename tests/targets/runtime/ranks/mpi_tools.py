"""Starting MPI processes from tests; skips where mpi4py or a launcher is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
_SEARCHED = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])

needs_mpi = pytest.mark.skipif(
    find_spec("mpi4py") is None or shutil.which("mpirun", path=_SEARCHED) is None,
    reason="mpi4py and mpirun are needed (extra `mpi`)",
)


def run_ranks(
    ranks: int, *words: str | Path, environment: dict[str, str] | None = None, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run `python words...` as so many MPI processes, with this checkout's packages."""
    launcher = shutil.which("mpirun", path=_SEARCHED)
    assert launcher is not None
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [launcher, "-n", str(ranks), sys.executable, *map(str, words)],
        env={**os.environ, "PYTHONPATH": paths, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )

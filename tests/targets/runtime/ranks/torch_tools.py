"""Starting processes by torchrun from tests; skips where PyTorch is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.targets.runtime.ranks.mpi_tools import ROOT

needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is needed (extra `torch`)")


def run_by_torchrun(
    ranks: int, *words: str | Path, environment: dict[str, str] | None = None, timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    """Run `python words...` as so many processes of torchrun, with this checkout's packages."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "--no-python"]
    return subprocess.run(
        [sys.executable, *start, sys.executable, *map(str, words)],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **(environment or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )

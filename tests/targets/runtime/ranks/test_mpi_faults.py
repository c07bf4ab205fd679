"""The table of faults: every one is injected into a real run over MPI, and has the outcome that docs/distributed.md promises."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.targets.runtime.ranks.mpi_tools import ROOT, needs_mpi


@needs_mpi
@pytest.mark.everything
def test_every_fault_has_its_outcome() -> None:
    result = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "faults.py", "--kills", "2", "--json"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    rows = json.loads(result.stdout)
    assert {row["fault"] for row in rows} >= {"kill", "stop", "hang", "lose", "SIGTERM", "nan", "slow", "delay"}
    assert not [row for row in rows if not row["passed"]]
    assert result.returncode == 0

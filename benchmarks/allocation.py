"""The allocator on pipeline instances: height against the lower bound, and time.

    python benchmarks/allocation.py                       pipelines of 50,000 buffers
    python benchmarks/allocation.py --buffers 1000000     a million
    python benchmarks/allocation.py --cold                also compile everything first, in an empty cache, and say how long

Every placement is checked. CPU seconds stand beside those on the clock, for machines that others use too.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ratrain.passes.memory.allocation import AllocationProblem, Effort, allocate, check_allocation

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
from allocation_instances import INSTANCES, pipeline  # noqa: E402 - found where this file is, also when it is imported

WARM_UP = 2000
COLUMNS = (
    f"{'instance':24} {'buffers':>8} {'lower bound':>14} {'arena':>14} {'ratio':>8} {'seconds':>8} {'CPU s':>8}  method"
)


def row(name: str, problem: AllocationProblem) -> None:
    """Place, check and print one instance."""
    cpu = time.process_time()
    allocation = allocate(problem, effort=Effort())
    cpu = time.process_time() - cpu
    assert not check_allocation(problem, allocation.offsets), name
    ratio = allocation.arena_bytes / allocation.lower_bound_bytes
    print(
        f"{name:24} {len(problem.sizes):8} {allocation.lower_bound_bytes:14} {allocation.arena_bytes:14} {ratio:8.5f} "
        f"{allocation.seconds:8.2f} {cpu:8.2f}  {allocation.method}",
        flush=True,
    )


def warm_up() -> float:
    """Run every compiled loop once; CPU seconds."""
    cpu = time.process_time()
    allocate(pipeline(WARM_UP, 2, split=True, varying=True), effort=Effort(gap=0, work=1_000_000))
    lives = ((0, 3), (7, 9), (4, 6), (3, 4), (5, 7), (2, 5), (3, 4), (4, 7), (6, 8))  # 10 bytes live, 11 needed
    allocate(AllocationProblem([4, 5, 3, 5, 2, 3, 1, 3, 5], [(life,) for life in lives], 9), effort=Effort(gap=0))
    return time.process_time() - cpu


def cold() -> None:
    """Compile in a process whose cache is empty."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"NUMBA_CACHE_DIR": folder}
        command = [sys.executable, "-c", "import allocation; print(f'{allocation.warm_up():.1f}')"]
        where = {"PYTHONPATH": os.pathsep.join((str(ROOT / "benchmarks"), str(ROOT)))}
        for state in ("cold", "warm"):
            done = subprocess.run(command, env=environment | where, check=True, capture_output=True, text=True)
            print(f"loading the compiled loops, {state} cache: {done.stdout.strip()} CPU s")


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--buffers", type=int, default=50_000)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--only", help="instances whose name contains this")
    chosen = parser.parse_args(arguments)
    if chosen.cold:
        cold()
    warm_up()
    print(COLUMNS)
    for name, options in INSTANCES.items():
        if chosen.only is None or chosen.only in name:
            row(name, pipeline(chosen.buffers, **options))


if __name__ == "__main__":
    main()

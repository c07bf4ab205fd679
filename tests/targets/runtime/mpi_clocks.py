"""Run by every process of an MPI job in test_run_profile.py: measures clocks that differ by 1000 s a process; process 0 prints the offsets."""

from __future__ import annotations

import json
import sys
import time

from mpi4py import MPI

from ratrain.targets.runtime.mpi.clocks import measured_offset

if __name__ == "__main__":
    world = MPI.COMM_WORLD
    own = measured_offset(world, lambda: time.perf_counter() + 1000.0 * world.rank, machine=f"machine {world.rank}")
    found = world.gather((own.seconds, own.error))
    if world.rank == 0:
        sys.stdout.write(json.dumps(found))

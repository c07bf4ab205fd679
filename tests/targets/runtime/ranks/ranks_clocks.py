"""Run by every process of a job in test_run_profile.py: measures clocks that differ by 1000 s a process; process 0 prints the offsets."""

from __future__ import annotations

import json
import sys
import time

from ratrain.targets.runtime.ranks.clocks import measured_offset
from ratrain.targets.runtime.ranks.communicators import exchanged
from tests.targets.runtime.ranks.ranks_program import transport_of

if __name__ == "__main__":
    transport = transport_of(sys.argv[1])
    world = transport.world(transport.number)
    own = measured_offset(world, lambda: time.perf_counter() + 1000.0 * world.rank, machine=f"machine {world.rank}")
    found = exchanged(world, (own.seconds, own.error))
    if world.rank == 0:
        sys.stdout.write(json.dumps(found))
    transport.close()

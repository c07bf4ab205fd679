"""The order in which a rank looks at its engines, and waiting for requests without taking the processor from the ranks that are waited for."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.ops.base import Engine

if TYPE_CHECKING:
    from ratrain.targets.runtime.ranks.communicator import Request

VISITED = (
    Engine.TENSOR,
    Engine.COLLECTIVE,
    Engine.RECV,
    Engine.SEND,
    Engine.STORE,
    Engine.FETCH,
    Engine.HOST,
    Engine.COMPUTE,
)
"""The order in which a rank visits its engines: what communicates first, so that it is under way while the rank computes."""
LONGEST_PAUSE = 1e-3
"""Seconds between two looks of a rank that has waited for long."""
PAUSE_SHARE = 1 / 16
"""Of what it has waited, how long a rank waits until it looks again: what it waits for is noticed that much late at most."""
_SHORTEST_PAUSE = 20e-6
_YIELDS = 50


def wait_until(happened: Callable[[], bool]) -> None:
    """Wait until something has happened: first give the processor away between two looks, then sleep longer and longer.

    Ranks may share cores; one that spins takes the time of the rank it waits for.
    """
    began, looks = time.perf_counter(), 0
    while not happened():
        looks += 1
        if looks < _YIELDS:
            os.sched_yield()
            continue
        waited = time.perf_counter() - began
        time.sleep(min(max(PAUSE_SHARE * waited, _SHORTEST_PAUSE), LONGEST_PAUSE))


def all_done(requests: Iterable[Request]) -> bool:
    """Whether all requests are done now."""
    return all(request.test() for request in requests)


def finish(*requests: Request) -> None:
    """Wait for requests without spinning."""
    wait_until(partial(all_done, requests))

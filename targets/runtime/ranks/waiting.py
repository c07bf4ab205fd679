"""The order in which a rank visits its engines, and waiting for requests without taking other ranks' cores."""

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
"""Order in which a rank visits its engines: communication first, so that it proceeds while the rank computes."""
LONGEST_PAUSE = 1e-3
"""Longest sleep between two tests, in seconds."""
PAUSE_SHARE = 1 / 16
"""Length of the next sleep as a share of the time waited so far: an event is noticed late by at most this share."""
_SHORTEST_PAUSE = 20e-6
_YIELDS = 50


def wait_until(happened: Callable[[], bool]) -> None:
    """Wait until `happened()` is true: yield the processor 50 times, then sleep longer and longer.

    Ranks may share cores; a rank that spins takes time from the rank that it waits for.
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
    """Return whether all requests are done."""
    return all(request.test() for request in requests)


def finish(*requests: Request) -> None:
    """Wait until all requests are done, without spinning."""
    wait_until(partial(all_done, requests))

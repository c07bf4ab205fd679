"""The order in which a rank looks at its engines, and waiting for requests without taking the processor from the ranks that are waited for."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.ops import Engine

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
_SHORTEST_PAUSE = 20e-6
_YIELDS = 50


class Patience:
    """Waits between two looks at requests: first gives the processor away, then sleeps longer and longer.

    Ranks may share cores; one that spins takes the time of the rank it waits for.
    """

    def __init__(self) -> None:
        self.looks = 0
        self.pause = _SHORTEST_PAUSE

    def wait(self) -> None:
        """Wait a little, longer than the last time."""
        self.looks += 1
        if self.looks < _YIELDS:
            os.sched_yield()
            return
        time.sleep(self.pause)
        self.pause = min(self.pause * 1.5, LONGEST_PAUSE)


def all_done(requests: Iterable[Request]) -> bool:
    """Whether all requests are done now."""
    return all(request.test() for request in requests)


def finish(*requests: Request) -> None:
    """Wait for requests without spinning."""
    patience = Patience()
    while not all_done(requests):
        patience.wait()

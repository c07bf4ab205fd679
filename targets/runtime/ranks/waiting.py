"""Waiting for requests without taking the processor from the ranks that are waited for."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ratrain.targets.runtime.ranks.communicator import Request

_YIELDS = 50
_SHORTEST_PAUSE, _LONGEST_PAUSE = 20e-6, 1e-3


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
        self.pause = min(self.pause * 1.5, _LONGEST_PAUSE)


def all_done(requests: Iterable[Request]) -> bool:
    """Whether all requests are done now."""
    return all(request.test() for request in requests)


def finish(*requests: Request) -> None:
    """Wait for requests without spinning."""
    patience = Patience()
    while not all_done(requests):
        patience.wait()

"""What PyTorch's allocator gives out on the CPU, as it reports it itself: every tensor's bytes, whoever asked for them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from attrs import define
from torch.autograd.profiler import profile


@define
class Allocations:
    """Of a stretch of a program: bytes that it had more at most, and had more at its end."""

    peak: int = 0
    held: int = 0
    count: int = 0


@contextmanager
def allocations() -> Iterator[Allocations]:
    """Those of the body, on this thread; the figures are there when it has ended.

    The hook is in the allocator, not in operations: what an operation asks for inside itself is seen too. What does not go through the
    allocator is not: arrays of numpy that a tensor stands on, and what libraries take from the system themselves.
    """
    found = Allocations()
    gc.collect()  # what is left of runs before would be given back meanwhile
    with profile(profile_memory=True) as seen:
        yield found
    events = [event for event in seen.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda each: each.start_ns()):
        found.held += event.nbytes()
        found.peak = max(found.peak, found.held)
        found.count += event.nbytes() > 0

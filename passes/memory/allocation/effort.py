"""Budgets of an allocation. Work is counted, so that the same problem gets the same placement on a slow machine."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import ge

TREE_WORK = 50
"""Cost of placing a buffer in the tree of `tree.py`, in placements of a sweep."""


@frozen
class Effort:
    """Budgets of one allocation."""

    gap: float = field(default=0.001, validator=ge(0))
    """Share of the bound by which a good enough arena may exceed it."""
    work: int = field(default=100_000_000, validator=ge(0))
    """Placements of single buffers in a sweep, the unit of all other work too.

    At most about 20 seconds of a slow core.
    """
    nodes: int = field(default=2_500_000, validator=ge(0))
    """Nodes of the exact search."""
    seconds: float = field(default=120.0, validator=ge(0))
    """Outer limit for slow machines: nothing new begins after it. Results that it cuts short depend on the machine."""

"""The works of a program's ops: each distinct one once, and by op which it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen

from ratrain.targets.machine.resource_work import ResourceWork
from ratrain.targets.simulator.flat_program import Int64s

if TYPE_CHECKING:
    from ratrain.targets.simulator.flat_program import Float64s, Records

WORK = np.dtype([("seconds", np.float64), ("ddr_bytes", np.float64), ("link_bytes", np.float64)])


@frozen(eq=False)
class OpWorks:
    """What the ops of a program ask for."""

    distinct: list[ResourceWork]
    numbers: Int64s
    """by op: which of them"""

    @property
    def seconds(self) -> Float64s:
        """By op: what it takes alone."""
        return np.array([work.seconds for work in self.distinct], np.float64)[self.numbers]

    def records(self) -> Records:
        """By op: what the event loop takes, flows apart."""
        rows = [tuple(getattr(work, name) for name in WORK.names or ()) for work in self.distinct]
        return np.array(rows, WORK)[self.numbers]

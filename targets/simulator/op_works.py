"""The works of a program's ops: each distinct one once, with a number for each op."""

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
    """Works of all ops of a program."""

    distinct: list[ResourceWork]
    numbers: Int64s
    """by op: its work's place in `distinct`"""

    @property
    def seconds(self) -> Float64s:
        """Seconds that each op takes alone."""
        return np.array([work.seconds for work in self.distinct], np.float64)[self.numbers]

    def records(self) -> Records:
        """Return by op the record (WORK) that the event loop reads; flows are not in it."""
        rows = [tuple(getattr(work, name) for name in WORK.names or ()) for work in self.distinct]
        return np.array(rows, WORK)[self.numbers]

"""The MT-3000 as a target: block ops are tiled for its on-chip memories where the machine file says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from ratrain.targets.mt3000.tiling.core import cluster_of
from ratrain.targets.mt3000.tiling.select import with_tiles
from ratrain.targets.target import MachineTarget

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module
    from ratrain.ratrain_ir.ops.compute import BlockOp
    from ratrain.targets.program.routine import Routine


@frozen
class Mt3000Target(MachineTarget):
    """Target of machine files whose cost may be that of tile schedules."""

    def routine(self, module: Module, op: BlockOp) -> Routine:
        """Return the routine of a block op, with tile schedules where the machine file's cost is `tiles`."""
        routine = super().routine(module, op)
        return with_tiles(routine, cluster_of(self.machine)) if self.machine.cost == "tiles" else routine

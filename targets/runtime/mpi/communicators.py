"""The communicators of a rank, made by all processes in one order, and what waits for requests."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from attrs import frozen
from mpi4py import MPI

from ratrain.ratrain_ir.diagnostics import fail
from ratrain.ratrain_ir.ops import Group
from ratrain.ratrain_ir.topology import Rank

if TYPE_CHECKING:
    from ratrain.targets.runtime.mpi.layout import Layout

_YIELDS = 50
_SHORTEST_PAUSE, _LONGEST_PAUSE = 20e-6, 1e-3


@frozen(eq=False)
class Communicators:
    """Who a rank talks with. Ranks of each are numbered by replica, by stage, or by both, stages first."""

    stage: int
    replica: int
    world: MPI.Comm
    """all ranks in stage and replica order, for what is no instruction: reports, checkpoints"""
    everyone: MPI.Comm
    """all ranks in stage and replica order: collectives of the group `all`"""
    replicas: MPI.Comm
    """the replicas of this rank's stage"""
    pipeline: MPI.Comm
    """the stages of this rank's replica: messages only, tag = channel"""
    ends: MPI.Comm
    """first and last stage of this rank's replica; `MPI.COMM_NULL` on stages between"""

    @classmethod
    def of_layout(cls, layout: Layout) -> Communicators:
        """Make the communicators of this process.

        Raises `DiagnosticError` RT093 where MPI started another number of processes than the plan has ranks.
        """
        job, mesh = MPI.COMM_WORLD, layout.mesh
        if job.size != layout.size:
            fail(
                "RT093",
                f"the plan has {mesh.stages} stages x {mesh.replicas} replicas = {layout.size} ranks, "
                f"but MPI started {job.size} process{'es' if job.size > 1 else ''}",
                help=f"start it as: mpirun -n {layout.size} ratrainc run ... --engine mpi",
            )
        stage, replica = layout.place(job.rank)
        world = job.Split(0, mesh.ranks.index(Rank(stage, replica)))
        is_end = stage in mesh.stages_of(Group.ENDS, stage)
        return cls(
            stage,
            replica,
            world,
            world.Dup(),
            world.Split(stage, replica),
            world.Split(replica, stage),
            world.Split(replica if is_end else MPI.UNDEFINED, stage),
        )


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


def finish(request: MPI.Request) -> None:
    """Wait for a request without spinning."""
    patience = Patience()
    while not request.Test():
        patience.wait()

"""What is chosen about an MPI job without MPI: which stage and replica a process runs, and how sums are made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

from attrs import frozen

if TYPE_CHECKING:
    from ratrain_ir.frontend.plan import Plan

RankOrder: TypeAlias = Literal["pp-first", "dp-first"]
"""What consecutive processes are: the stages of one replica, or the replicas of one stage."""

Reduction: TypeAlias = Literal["ordered", "mpi"]
"""How gradients are summed over replicas: in rank order, which gives the bits of the local engine, or by MPI."""


@frozen
class Layout:
    """The map between process numbers and (stage, replica), for P stages and D replicas."""

    stages: int
    replicas: int
    order: RankOrder = "pp-first"

    @classmethod
    def of_plan(cls, plan: Plan, order: RankOrder) -> Layout:
        """The layout of a plan's ranks."""
        return cls(plan.pp, plan.dp, order)

    @property
    def size(self) -> int:
        """Processes of the job."""
        return self.stages * self.replicas

    def place(self, process: int) -> tuple[int, int]:
        """(stage, replica) of a process."""
        if self.order == "pp-first":
            replica, stage = divmod(process, self.stages)
        else:
            stage, replica = divmod(process, self.replicas)
        return stage, replica

    def process(self, stage: int, replica: int) -> int:
        """The process that runs a stage of a replica."""
        return replica * self.stages + stage if self.order == "pp-first" else stage * self.replicas + replica

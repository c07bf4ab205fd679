"""The processes that MPI started, each of which runs one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from targets.runtime.mpi.communicators import Communicators, finish
from targets.runtime.mpi.engine import MpiEngine
from targets.runtime.processes import Processes

if TYPE_CHECKING:
    from targets.program import Program
    from targets.runtime.data import Batches
    from targets.runtime.kernels import KernelSet
    from targets.runtime.mpi.layout import Layout, Reduction

T = TypeVar("T")


class MpiProcesses(Processes):
    """The processes of an MPI job, numbered by stage, then by replica."""

    def __init__(self, layout: Layout, reduction: Reduction) -> None:
        """Make the communicators, with all other processes.

        Raises `DiagnosticError` RT093 where MPI started another number of processes than the layout has.
        """
        self.communicators = Communicators.of_layout(layout)
        self.reduction = reduction
        self.number = self.communicators.world.rank
        self.count = layout.size
        self.started_as = layout.process(self.communicators.stage, self.communicators.replica)

    def make_engine(
        self, program: Program, kernels: KernelSet, batches: Batches, interleave_seed: int | None, threads: int
    ) -> MpiEngine:
        """The engine of this process's rank; the order of instructions is the machine's, never drawn, and one thread makes all calls."""
        assert interleave_seed is None
        del threads
        return MpiEngine(program, kernels, batches, self.communicators, reduction=self.reduction)

    def exchange(self, value: T) -> list[T]:
        """What every process gave, by number. All must call it."""
        world = self.communicators.world
        finish(world.Ibarrier())  # others may take long: wait for them without spinning
        found: list[T] = world.allgather(value)
        return found

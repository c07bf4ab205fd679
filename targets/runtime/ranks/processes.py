"""The processes that a launcher started, each running one rank."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, ClassVar, TypeVar

import numpy as np

from ratrain.ratrain_ir.process_pool import usable_cores
from ratrain.targets.runtime.engine.processes import Processes
from ratrain.targets.runtime.engine.profile import Profile
from ratrain.targets.runtime.ranks.clocks import ClockOffset, measured_offset, this_machine
from ratrain.targets.runtime.ranks.communicators import Communicators, exchanged
from ratrain.targets.runtime.ranks.engine import RankEngine
from ratrain.targets.runtime.ranks.waiting import finish

if TYPE_CHECKING:
    from ratrain.targets.program.program import Program
    from ratrain.targets.runtime.data.data import Batches
    from ratrain.targets.runtime.kernels import KernelSet
    from ratrain.targets.runtime.ranks.communicator import Transport
    from ratrain.targets.runtime.ranks.rank_layout import RankLayout, Reduction

T = TypeVar("T")


class RankProcesses(Processes):
    """The processes of a job, numbered in rank order."""

    engine_class: ClassVar[type[RankEngine]] = RankEngine
    """Class that runs a rank."""

    def __init__(self, transport: Transport, layout: RankLayout, reduction: Reduction) -> None:
        """Make the communicators; all processes of the job must do so.

        Raises `DiagnosticError` RT093 if the launcher started another number of processes than the layout has.
        """
        self.communicators = Communicators.of_layout(layout, transport)
        self.library = transport.description
        self.reduction = reduction
        self.number = self.communicators.world.rank
        self.count = layout.size
        self.offsets: list[ClockOffset] = []
        self.started_as = layout.process(self.communicators.place)

    def make_engine(
        self, program: Program, kernels: KernelSet, batches: Batches, interleave_seed: int | None, threads: int
    ) -> RankEngine:
        """Make the engine of this process's rank.

        `interleave_seed` must be None: order is the machine's. `threads` is ignored: one thread makes all calls.
        """
        assert interleave_seed is None
        del threads
        return self.engine_class(
            program, kernels, batches, self.communicators, reduction=self.reduction, library=self.library
        )

    def begin_profile(self) -> Profile:
        """Return a profile for this rank to record in; all processes measure their clocks first."""
        profile = Profile()
        self.offsets = [measured_offset(self.communicators.world, profile.clock)]
        return profile

    def merged_profile(self, profile: Profile) -> Profile:
        """Return the records of all ranks, by the clock of process 0.

        The clocks are measured a second time; between the two measurements their offset is interpolated.
        """
        self.offsets.append(measured_offset(self.communicators.world, profile.clock))
        moments, seconds = ([getattr(each, name) for each in self.offsets] for name in ("at", "seconds"))
        own = profile.by_clock(lambda times: times + np.interp(times, moments, seconds))
        merged = self.exchange(own.recorded)
        recorded = {key: numbers for each in merged for key, numbers in each.items()}
        return Profile(profile.clock, own.steps, recorded, self.ranks_per_core())

    def ranks_per_core(self) -> float:
        """Return the ranks per core of the most crowded machine, counting the cores that any of its ranks may use.

        All processes must call it.
        """
        ranks: Counter[str] = Counter()
        cores: dict[str, set[int]] = defaultdict(set)
        for machine, usable in self.exchange((this_machine(), usable_cores())):
            ranks[machine] += 1
            cores[machine] |= usable
        return max(count / len(cores[machine]) for machine, count in ranks.items())

    def exchange(self, value: T) -> list[T]:
        """Exchange a value; return every process's by its number. All must call it."""
        world = self.communicators.world
        finish(world.ibarrier())  # others may take long: let them end before bytes are moved
        return exchanged(world, value)

"""The processes that a launcher started, each of which runs one rank."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, ClassVar, TypeVar

import numpy as np

from ratrain.ratrain_ir.side_by_side import usable_cores
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
    """What runs a rank."""

    def __init__(self, transport: Transport, layout: RankLayout, reduction: Reduction) -> None:
        """Make the communicators, with all other processes.

        Raises `DiagnosticError` RT093 where the launcher started another number of processes than the layout has.
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
        """The engine of this process's rank; the order of instructions is the machine's, never drawn, and one thread makes all calls."""
        assert interleave_seed is None
        del threads
        return self.engine_class(
            program, kernels, batches, self.communicators, reduction=self.reduction, library=self.library
        )

    def begin_profile(self) -> Profile:
        """A profile that this rank records in; all agree about the time first."""
        profile = Profile()
        self.offsets = [measured_offset(self.communicators.world, profile.clock)]
        return profile

    def merged_profile(self, profile: Profile) -> Profile:
        """What all ranks have recorded, by the clock of process 0; how far the clocks ran apart since the begin is spread evenly."""
        self.offsets.append(measured_offset(self.communicators.world, profile.clock))
        moments, seconds = ([getattr(each, name) for each in self.offsets] for name in ("at", "seconds"))
        own = profile.by_clock(lambda times: times + np.interp(times, moments, seconds))
        merged = self.exchange(own.recorded)
        recorded = {key: numbers for each in merged for key, numbers in each.items()}
        return Profile(profile.clock, own.steps, recorded, self.ranks_per_core())

    def ranks_per_core(self) -> float:
        """Of the machine where most ranks share a core; its cores are all that any of them may run on. All must call it."""
        ranks: Counter[str] = Counter()
        cores: dict[str, set[int]] = defaultdict(set)
        for machine, usable in self.exchange((this_machine(), usable_cores())):
            ranks[machine] += 1
            cores[machine] |= usable
        return max(count / len(cores[machine]) for machine, count in ranks.items())

    def exchange(self, value: T) -> list[T]:
        """What every process gave, by number. All must call it."""
        world = self.communicators.world
        finish(world.ibarrier())  # others may take long: let them end before bytes are moved
        return exchanged(world, value)

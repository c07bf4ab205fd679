"""The processes of a run, as saving and loading see them: each has its number, and all can exchange what they found."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from ratrain.ratrain_ir.support.diagnostics import Diagnostic, DiagnosticError
from ratrain.targets.runtime.engine.local import LocalEngine
from ratrain.targets.runtime.engine.profile import Profile
from ratrain.targets.runtime.engine.threaded import ThreadedEngine

if TYPE_CHECKING:
    from ratrain.targets.program.program import Program
    from ratrain.targets.runtime.data.data import Batches
    from ratrain.targets.runtime.engine.engine import ProgramEngine
    from ratrain.targets.runtime.kernels import KernelSet

T = TypeVar("T")


class Processes:
    """One process, which runs all ranks."""

    number = 0
    count = 1
    started_as = 0
    """The number that the launcher gave this process."""

    def make_engine(
        self, program: Program, kernels: KernelSet, batches: Batches, interleave_seed: int | None, threads: int
    ) -> ProgramEngine:
        """The engine of this process's ranks: side by side where there are threads for it and no order is prescribed."""
        if threads > 1 and interleave_seed is None:
            return ThreadedEngine(program, kernels, batches)
        return LocalEngine(program, kernels, batches, interleave_seed=interleave_seed)

    def begin_profile(self) -> Profile:
        """A profile that this process's engine records in. All must call it."""
        return Profile()

    def merged_profile(self, profile: Profile) -> Profile:
        """What all processes have recorded, by one clock. All must call it."""
        return profile

    def exchange(self, value: T) -> list[T]:
        """What every process gave, by number. All must call it."""
        return [value]

    def together(self, action: Callable[[], T]) -> T:
        """What `action` gives here; all must call it, and go on only when all succeeded.

        Raises `DiagnosticError` on every process, with what was wrong on any.
        """
        problems: list[Diagnostic] = []
        try:
            result = action()
        except DiagnosticError as error:
            problems = list(error.diagnostics)
        every = [problem for theirs in self.exchange(problems) for problem in theirs]
        if every:
            raise DiagnosticError(every)
        return result

    def first_only(self, action: Callable[[], None]) -> None:
        """Process 0 does it; all go on when it is done, or raise what it raised."""
        self.together(action if self.number == 0 else lambda: None)

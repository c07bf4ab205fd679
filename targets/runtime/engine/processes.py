"""Processes of a run as saving and loading see them: each has a number, and all can exchange values."""

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
    """A single process that runs all ranks; subclasses have several."""

    number = 0
    count = 1
    started_as = 0
    """Number that the launcher gave this process."""

    def make_engine(
        self, program: Program, kernels: KernelSet, batches: Batches, interleave_seed: int | None, threads: int
    ) -> ProgramEngine:
        """Create the engine of this process's ranks: with threads if `threads` > 1 and no order is prescribed."""
        if threads > 1 and interleave_seed is None:
            return ThreadedEngine(program, kernels, batches)
        return LocalEngine(program, kernels, batches, interleave_seed=interleave_seed)

    def begin_profile(self) -> Profile:
        """Return a profile for this process's engine to record in. All processes must call it."""
        return Profile()

    def merged_profile(self, profile: Profile) -> Profile:
        """Return the records of all processes, by one clock. All processes must call it."""
        return profile

    def exchange(self, value: T) -> list[T]:
        """Return the values of all processes, by number. All processes must call it."""
        return [value]

    def together(self, action: Callable[[], T]) -> T:
        """Run `action` on all processes; return its result here once it has succeeded on all.

        All processes must call it. Raises `DiagnosticError` on every process, with the problems of all.
        """
        problems: list[Diagnostic] = []
        try:
            result = action()
        except DiagnosticError as error:
            problems = list(error.diagnostics)
        # A process that failed still takes part in the exchange: otherwise the others would wait for ever.
        every = [problem for theirs in self.exchange(problems) for problem in theirs]
        if every:
            raise DiagnosticError(every)
        return result

    def first_only(self, action: Callable[[], None]) -> None:
        """Run `action` on process 0; all return when it is done, or raise its problems."""
        self.together(action if self.number == 0 else lambda: None)

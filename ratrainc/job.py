"""The processes of a run: this one alone, or one of those that mpirun started."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from attrs import frozen

from ratrain.ratrain_ir.diagnostics import fail
from ratrain.ratrainc.run_choices import Ranks
from ratrain.ratrainc.terminal import echo
from ratrain.targets.runtime.mpi.layout import Layout
from ratrain.targets.runtime.processes import Processes

if TYPE_CHECKING:
    from ratrain.targets.program.program import Program

_HEAD_START = 1.0
"""Seconds that process 0 has to report a failure, and to end the job with it, before others that met the same one do."""


@frozen
class Job:
    """One process, which runs all ranks."""

    @property
    def speaks(self) -> bool:
        """Whether this process reports on the run."""
        return True

    @property
    def count(self) -> int:
        """How many processes there are."""
        return 1

    def processes(self, program: Program) -> Processes:
        """The processes of a program's run."""
        del program
        return Processes()


@frozen
class MpiJob(Job):
    """One of the processes that MPI started, which runs one rank."""

    world: Any
    """mpi4py's COMM_WORLD"""
    ranks: Ranks

    @property
    def speaks(self) -> bool:
        """Process 0 reports on the run."""
        return int(self.world.rank) == 0

    @property
    def count(self) -> int:
        """How many processes there are."""
        return int(self.world.size)

    def processes(self, program: Program) -> Processes:
        """The processes of a program's run; all meet here.

        Raises `DiagnosticError` RT093 where MPI started another number of processes than the plan has ranks.
        """
        from ratrain.targets.runtime.mpi.processes import MpiProcesses

        return MpiProcesses(Layout.of_plan(program.plan, self.ranks.order), self.ranks.reduction)


def job_of(ranks: Ranks, *, as_json: bool) -> AbstractContextManager[Job]:
    """The processes of a run. Over MPI, whatever escapes the context ends all of them."""
    return nullcontext(Job()) if ranks.engine == "local" else _mpi_job(ranks, as_json=as_json)


@contextmanager
def _mpi_job(ranks: Ranks, *, as_json: bool) -> Iterator[Job]:
    world = _started_world()
    try:
        yield MpiJob(world, ranks)
    except (Exception, KeyboardInterrupt) as error:  # whatever it is: the others would wait for this process for ever
        from ratrain.ratrainc.cli import show_failure

        if world.size == 1:
            raise
        if world.rank:
            time.sleep(_HEAD_START)
        code = show_failure(error, as_json=as_json)
        echo(f"ending all {world.size} processes", err=True)
        sys.stdout.flush()
        sys.stderr.flush()
        world.Abort(code)


def _started_world() -> Any:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: there is no MPI library to load
        reason = str(error).splitlines()[0]
        help_text = "pip install 'ratrain[mpi]' brings both; a system's Open MPI or MPICH serves too"
        fail("RT093", f"--engine mpi needs mpi4py and an MPI library: {reason}", help=help_text)
    return MPI.COMM_WORLD

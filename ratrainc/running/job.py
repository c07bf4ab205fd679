"""The processes of a run: this one alone, or one of those that a launcher started."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from attrs import frozen

from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.ratrainc.choices.run_choices import Ranks
from ratrain.ratrainc.console.extras import check_installed
from ratrain.ratrainc.console.terminal import echo
from ratrain.targets.runtime.engine.processes import Processes
from ratrain.targets.runtime.ranks.communicator import Transport
from ratrain.targets.runtime.ranks.rank_layout import RankLayout, check_reduction
from ratrain.targets.runtime.settings import HOST_DEVICE

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
class RankJob(Job):
    """One of the processes that a launcher started, which runs one rank."""

    transport: Transport
    ranks: Ranks

    @property
    def speaks(self) -> bool:
        """Process 0 reports on the run."""
        return self.transport.number == 0

    @property
    def count(self) -> int:
        """How many processes there are."""
        return self.transport.count

    def processes(self, program: Program) -> Processes:
        """The processes of a program's run; all meet here.

        Raises `DiagnosticError` RT093 where another number of processes was started than the plan has ranks, RT064 where
        their order or their sums are not for the plan.
        """
        from ratrain.targets.runtime.ranks.processes import RankProcesses

        layout = RankLayout.of_plan(program.plan, self.ranks.order)
        check_reduction(program.plan, self.ranks.reduction)
        return RankProcesses(self.transport, layout, self.ranks.reduction)


def job_of(ranks: Ranks, device: str = HOST_DEVICE, *, as_json: bool) -> AbstractContextManager[Job]:
    """The processes of a run on a device. Where there are several, whatever escapes the context ends all of them."""
    if ranks.engine == "local":
        return nullcontext(Job())
    return _rank_job(lambda: _TRANSPORTS[ranks.engine](device), ranks, as_json=as_json)


@contextmanager
def _rank_job(start: Callable[[], Transport], ranks: Ranks, *, as_json: bool) -> Iterator[Job]:
    transport = start()
    try:
        yield RankJob(transport, ranks)
    except (Exception, KeyboardInterrupt) as error:  # whatever it is: the others would wait for this process for ever
        from ratrain.ratrainc.console.failures import show_failure

        if transport.count == 1:
            raise
        if transport.number:
            time.sleep(_HEAD_START)
        code = show_failure(error, as_json=as_json)
        echo(f"ending all {transport.count} processes", err=True)
        sys.stdout.flush()
        sys.stderr.flush()
        transport.abort(code)
    transport.close()


def _mpi(_device: str) -> Transport:
    try:
        from ratrain.targets.runtime.mpi.transport import MpiTransport
    except (ImportError, RuntimeError) as error:  # RuntimeError: there is no MPI library to load
        reason = str(error).splitlines()[0]
        help_text = "pip install 'ratrain[mpi]' brings both; a system's Open MPI or MPICH serves too"
        fail("RT093", f"--engine mpi needs mpi4py and an MPI library: {reason}", help=help_text)
    return MpiTransport()


def _torch(device: str) -> Transport:
    check_installed("torch", "torch", "--engine torch")
    from ratrain.targets.pytorch.place import TorchrunPlace
    from ratrain.targets.pytorch.ranks.transport import TorchTransport

    return TorchTransport(TorchrunPlace.of_environment(os.environ), gpus=device != HOST_DEVICE)


_TRANSPORTS: Mapping[str, Callable[[str], Transport]] = {"mpi": _mpi, "torch": _torch}
"""How a process joins the job, by `--engine`."""

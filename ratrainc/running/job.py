"""The processes of a run or a generation: this one alone, or one of several that a launcher started."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from attrs import frozen

from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.ratrain_ir.support.quantities import number_of
from ratrain.ratrainc.choices.run_choices import Ranks
from ratrain.ratrainc.console.extras import check_installed
from ratrain.ratrainc.console.terminal import echo
from ratrain.ratrainc.running.copies import HEAD_START, refuse_copies
from ratrain.targets.runtime.engine.forward import KeyHolders, OneHolder
from ratrain.targets.runtime.engine.processes import Processes
from ratrain.targets.runtime.ranks.communicator import Transport
from ratrain.targets.runtime.ranks.rank_layout import RankLayout, check_reduction
from ratrain.targets.runtime.settings import HOST_DEVICE

if TYPE_CHECKING:
    from ratrain.targets.program.program import Program


@frozen
class Job:
    """Work of this process alone, which has all ranks."""

    @property
    def speaks(self) -> bool:
        """True if this process reports on the run."""
        return True

    @property
    def count(self) -> int:
        """The number of processes."""
        return 1

    def holders(self) -> KeyHolders:
        """Return the processes as holders of a text's keys and values; all of them must call this."""
        return OneHolder()

    def processes(self, program: Program) -> Processes:
        """Return the processes of a program's run."""
        del program
        return Processes()


@frozen
class RankJob(Job):
    """A process with one rank, one of several that a launcher started."""

    transport: Transport
    ranks: Ranks

    @property
    def speaks(self) -> bool:
        """True for process 0."""
        return self.transport.number == 0

    @property
    def count(self) -> int:
        """The number of processes."""
        return self.transport.count

    def holders(self) -> KeyHolders:
        """Return the processes as holders of a text's keys and values; all of them must call this."""
        from ratrain.targets.runtime.ranks.key_holders import RankHolders

        return RankHolders(self.transport.world(self.transport.number))

    def processes(self, program: Program) -> Processes:
        """Return the processes of a program's run; all processes must call this.

        Raises `DiagnosticError` RT093 if the number of processes is not the plan's number of ranks, RT064 if their
        order or the way of their sums does not fit the plan.
        """
        from ratrain.targets.runtime.ranks.processes import RankProcesses

        layout = RankLayout.of_plan(program.plan, self.ranks.order)
        check_reduction(program.plan, self.ranks.reduction)
        return RankProcesses(self.transport, layout, self.ranks.reduction)


def job_of(ranks: Ranks, device: str = HOST_DEVICE, *, as_json: bool) -> AbstractContextManager[Job]:
    """Return a context with this process's job on a device; an exception that leaves it ends all processes.

    Raises `DiagnosticError` RT093 if this process was to have all ranks, but is one of several.
    """
    if ranks.engine == "local":
        refuse_copies(os.environ)
        return nullcontext(Job())
    return _rank_job(lambda: _TRANSPORTS[ranks.engine](device), ranks, as_json=as_json)


@contextmanager
def _rank_job(start: Callable[[], Transport], ranks: Ranks, *, as_json: bool) -> Iterator[Job]:
    transport = start()
    try:
        yield RankJob(transport, ranks)
    except (Exception, KeyboardInterrupt) as error:  # every kind: the other processes would wait for this one forever
        from ratrain.ratrainc.console.failures import show_failure

        if transport.count == 1:
            raise
        if transport.number:
            time.sleep(HEAD_START)
        code = show_failure(error, as_json=as_json)
        echo(f"ending all {number_of(transport.count, 'process')}", err=True)
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
"""Functions by which a process joins the job, by `--engine`."""

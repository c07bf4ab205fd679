"""Refusal of a run of one process that a launcher has started several times, from the launcher's environment."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping

from attrs import frozen

from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.ratrain_ir.support.quantities import number_of

HEAD_START = 1.0
"""Seconds that process 0 has to report a failure and end the job, before others with the same failure do."""


@frozen
class _Launcher:
    """A launcher of processes, and the variables that only it sets."""

    name: str
    count: str
    """variable with the number of processes"""
    number: str
    """variable with the number of this one"""
    also: str
    """variable without which the others may have been set by somebody else"""
    engine: str
    """engine whose ranks it starts"""


_LAUNCHERS = (
    _Launcher("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_RANK", "mpi"),  # Open MPI
    _Launcher("mpirun", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "mpi"),  # MVAPICH
    # torchrun's WORLD_SIZE alone is set by others too, like a cluster's templates of jobs.
    _Launcher("torchrun", "WORLD_SIZE", "RANK", "LOCAL_RANK", "torch"),
    # A job's script has SLURM_NTASKS and SLURM_PROCID too; only a step, which srun starts, has the third.
    _Launcher("srun", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "mpi"),
    # MPICH and Intel MPI; srun may set them too, and is named then.
    _Launcher("mpirun", "PMI_SIZE", "PMI_RANK", "PMI_RANK", "mpi"),
)
"""Launchers, the innermost first: mpirun inside a job of Slurm started the processes, whatever Slurm set."""


def refuse_copies(environment: Mapping[str, str]) -> None:
    """Raise `DiagnosticError` RT093 if a launcher started several processes and each would be the whole run.

    Only the first process speaks: others give it time, in which most launchers end them, and leave with the same code.
    """
    for each in _LAUNCHERS:
        if not {each.count, each.number, each.also} <= environment.keys():
            continue
        count, number = environment[each.count], environment[each.number]
        if not (count.isascii() and count.isdecimal()) or int(count) < 2:
            return
        if number != "0":
            time.sleep(HEAD_START)
            sys.exit(1)
        fail(
            "RT093",
            f"{each.name} started {number_of(int(count), 'process')}, and each would do the whole work: {count} copies "
            "of one run, side by side (--engine local)",
            help=f"add --engine {each.engine}: each process is one rank then; or start it without {each.name}",
        )

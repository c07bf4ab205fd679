"""A run of one process is not started several times: what launchers leave in the environment, and what is not theirs."""

from __future__ import annotations

import pytest

from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrainc.cli import main
from ratrain.ratrainc.running import copies
from ratrain.ratrainc.running.copies import refuse_copies

OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"}
MPICH = {"PMI_SIZE": "4", "PMI_RANK": "0"}
TORCHRUN = {"WORLD_SIZE": "4", "RANK": "0", "LOCAL_RANK": "0"}
SRUN = {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"}


@pytest.mark.parametrize(
    ("set_by", "launcher", "engine"),
    [
        (OPEN_MPI, "mpirun", "mpi"),
        (MPICH, "mpirun", "mpi"),
        (TORCHRUN, "torchrun", "torch"),
        (SRUN, "srun", "mpi"),
        (SRUN | MPICH, "srun", "mpi"),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1"} | OPEN_MPI, "mpirun", "mpi"),
    ],
)
def test_copies_of_a_run_are_refused_with_the_engine_that_is_meant(
    set_by: dict[str, str], launcher: str, engine: str
) -> None:
    with pytest.raises(DiagnosticError, match=f"RT093.*{launcher} started 4 processes") as refused:
        refuse_copies(set_by)
    assert f"--engine {engine}:" in str(refused.value)


@pytest.mark.parametrize(
    "set_by",
    [
        {},
        {"WORLD_SIZE": "4", "RANK": "0"},
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"},
        OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1"},
        # one process of mpirun in a step of several tasks
        SRUN | OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1"},
        MPICH | {"PMI_SIZE": "many"},
    ],
)
def test_a_process_alone_runs(set_by: dict[str, str]) -> None:
    refuse_copies(set_by)


def test_the_first_process_speaks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(copies.time, "sleep", slept.append)
    with pytest.raises(DiagnosticError):
        refuse_copies(MPICH)
    with pytest.raises(SystemExit, match="1"):
        refuse_copies(MPICH | {"PMI_RANK": "3"})
    assert slept == [copies.HEAD_START]


def test_run_asks_before_it_reads_its_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in OPEN_MPI.items():
        monkeypatch.setenv(name, value)
    assert main(["run", "missing.rtx"]) == 1
    assert "mpirun started 4 processes" in capsys.readouterr().err

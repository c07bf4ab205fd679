"""What a process reads in torchrun's variables, and what is said where they are missing; PyTorch is not needed."""

from __future__ import annotations

import pytest

from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrainc.cli import main
from ratrain.ratrainc.console import extras
from ratrain.targets.pytorch.place import TorchrunPlace

SET = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def test_a_process_has_its_place() -> None:
    assert TorchrunPlace.of_environment(SET) == TorchrunPlace(1, 4, "localhost", 29500, "0", launcher_has_store=False)
    more = {"TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    found = TorchrunPlace.of_environment(SET | more)
    assert (found.attempt, found.launcher_has_store) == ("2", True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"RANK": ""}, "but RANK is not set"),
        ({"MASTER_ADDR": "", "MASTER_PORT": ""}, "but MASTER_ADDR, MASTER_PORT are not set"),
        ({"RANK": "-1"}, "RANK=-1 is not a number"),
        ({"WORLD_SIZE": "four"}, "WORLD_SIZE=four is not a number"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT=65536 is not a number"),
        ({"RANK": "4"}, "RANK=4 is not one of WORLD_SIZE=4 processes"),
    ],
)
def test_variables_that_make_no_place_are_refused(change: dict[str, str], said: str) -> None:
    with pytest.raises(DiagnosticError, match=f"RT093.*{said}"):
        TorchrunPlace.of_environment(SET | change)


@pytest.mark.parametrize(
    "words", [("run", "a.rtx", "--engine", "torch"), ("launch", "-n", "2", "--engine", "torch", "a.rtx")]
)
def test_without_pytorch_its_extra_is_named(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(extras, "is_installed", lambda package: package != "torch")
    assert main(list(words)) == 1
    shown = capsys.readouterr().err
    assert "--engine torch needs torch, which is not installed" in shown
    assert "pip install 'ratrain[torch]'" in shown


def test_a_launcher_of_mpi_is_none_of_torch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "-n", "2", "--engine", "torch", "--mpirun", "mpirun", "a.rtx"]) == 2
    assert "--mpirun is for --engine mpi" in capsys.readouterr().err
    assert main(["launch", "-n", "2", "a.rtx", "--engine", "torch"]) == 2
    assert "--engine stands before FILE" in capsys.readouterr().err

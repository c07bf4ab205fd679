"""A checkpoint that a run does not go on from is replaced, and the run says so before its first step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ratrain.ratrainc.cli import main
from tests.ratrainc.commands.test_cli_tools import MODEL, PLAN

if TYPE_CHECKING:
    from pathlib import Path

WORD = "holds a checkpoint that this run does not go on from"


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = str(tmp_path / "x.rtx")
    assert main(["compile", "--model", str(MODEL), "--plan", str(PLAN), "-o", path]) in (0, None)
    return path


def test_a_checkpoint_that_is_not_gone_on_from_is_named_before_it_is_replaced(
    program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other, best = (str(tmp_path / name) for name in ("one", "other", "best"))

    def told(*words: str) -> str:
        assert main(["run", program, "--steps", "1", "--kernels", "reference", "--eval-every", "1", *words]) == 0
        said = capsys.readouterr()
        return " ".join((said.out + said.err).split())

    assert WORD not in told("--save", one, "--save-best", best)
    again = told("--save", one)
    assert f"'{one}' {WORD}" in again
    assert f"--resume {one} goes on from it" in again
    assert WORD not in told("--save", one, "--resume", one)
    assert WORD not in told("--save", other, "--resume", one)
    assert f"'{other}' {WORD}" in told("--save", other, "--resume", one)
    assert f"'{best}' {WORD}" in told("--save-best", best)
    assert WORD not in told("--resume", one, "--save-best", best)

"""The folder with the inputs of every command, and commands run there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ratrain.ratrainc.cli import main
from tests.ratrainc.commands.command_runs import CONFIG, PLAN, Cli


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the inputs of every command."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "tiny.json").write_text(json.dumps(CONFIG), "utf-8")
    (folder / "plan.toml").write_text(PLAN, "utf-8")
    model = ["--model", str(folder / "tiny.json"), "--plan", str(folder / "plan.toml")]
    for name in ("a.rtir", "a.rtx"):
        assert main(["compile", *model, "-o", str(folder / name)]) == 0
    assert main(["compile", *model, "--passes", "", "-o", str(folder / "dataflow.rtir")]) == 0
    assert main(["compile", *model, "--passes", "place-1f1b", "-o", str(folder / "placed.rtir")]) == 0
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40, "utf-8")
    return folder


@pytest.fixture
def cli(files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Commands, run where the inputs are."""
    monkeypatch.chdir(files)
    return Cli(files, capsys)

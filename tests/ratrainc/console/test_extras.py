"""What needs an extra says which, before it works; docs/command-line.md has all of them."""

from __future__ import annotations

import re
import shutil
import sys
import tomllib
from pathlib import Path

import pytest

from ratrain.ratrainc.cli import main
from ratrain.ratrainc.console import extras

ROOT = Path(__file__).resolve().parents[3]
MODEL, PLAN = str(ROOT / "examples" / "tiny.json"), str(ROOT / "examples" / "tiny.toml")
NEEDS = {
    "plot": "run x.rtx --steps 1 --plot l.svg",
    "tokenizer": "run x.rtx --steps 1 --tokenizer t.json",
    "calibrate": "calibrate --rows rows.csv --fit launch",
    "mpi": "run x.rtx --steps 1 --engine mpi",
    "torch": "run x.rtx --steps 1 --engine torch",
    "triton": "run x.rtx --steps 1 --kernels torch-triton",
    "tensorboard": "run x.rtx --steps 1 --log-to tensorboard",
    "wandb": "run x.rtx --steps 1 --log-to wandb",
}
"""A command that needs an extra."""
LIBRARIES = ("matplotlib", "tokenizers", "scipy", "mpi4py", "torch", "triton", "tensorboard", "wandb")


def table() -> dict[str, str]:
    """What the page says of each extra."""
    text = (ROOT / "docs" / "command-line.md").read_text().partition("## Extras")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]*`) \| (.*) \|$", text, re.MULTILINE)
    return {name: told for names, told in rows for name in re.findall(r"`([\w-]+)`", names)}


def test_the_page_has_every_extra() -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(table()) == set(known)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("program") / "x.rtx"
    assert main(["compile", "--model", MODEL, "--plan", PLAN, "-o", str(path)]) == 0
    return path


@pytest.mark.parametrize("extra", NEEDS)
def test_a_command_names_the_extra_that_it_lacks(
    extra: str, program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(program, "x.rtx")
    Path("t.json").write_text("{}")
    Path("rows.csv").write_text(f"model,plan,step_seconds\n{MODEL},{PLAN},0.01\n")
    for library in LIBRARIES:
        for name in [name for name in sys.modules if name.partition(".")[0] == library]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, library, None)
    for name in [
        name for name in sys.modules if name.startswith(("ratrain.targets.pytorch", "ratrain.targets.runtime.mpi"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(extras, "is_installed", lambda package: package not in LIBRARIES)
    assert main(NEEDS[extra].split()) == 1
    said = capsys.readouterr().err
    assert f"pip install 'ratrain[{extra}]'" in said
    assert "Traceback" not in said
    assert extra in table()

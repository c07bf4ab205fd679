"""Passes and targets of others: by `--plugin`, by the environment, by entry points; and what is told where one is not what it should be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PASS = """
from attrs import field, frozen
from ratrain.passes.pass_base import Pass
from ratrain.passes.registry import register_pass

@register_pass
@frozen
class Rename(Pass):
    '''Gives the module another name.'''
    name = "{name}"
    requires = frozenset()
    forbids = frozenset()
    to: str = field(default="renamed", metadata={{"choices": ("renamed", "other")}})

    def run(self, module, context):
        module.name = self.to
"""
TARGET = """
from attrs import frozen
from ratrain.ratrain_ir.target import WorkspaceRequest
from ratrain.targets.registry import TARGETS
from ratrain.targets.target import MachineTarget

@frozen
class Roomy(MachineTarget):
    def workspace(self, module, op):
        asked = super().workspace(module, op)
        return asked and WorkspaceRequest(asked.key, asked.nbytes + 4096)

TARGETS.register("roomy", f"{__name__}:Roomy")
"""


def ratrainc(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The command, started in a folder."""
    environment = {name: value for name, value in os.environ.items() if name != "RATRAIN_PLUGINS"} | variables
    command = [sys.executable, "-m", "ratrain", *words]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture
def schedule(tmp_path: Path) -> str:
    """A small schedule, lowered alone."""
    model, plan = ROOT / "examples" / "tiny.json", ROOT / "examples" / "tiny.toml"
    words = ["compile", "--model", str(model), "--plan", str(plan), "--passes", "place-1f1b", "-o", "tiny.rtir"]
    assert ratrainc(tmp_path, *words).returncode == 0
    return "tiny.rtir"


def test_a_pass_of_a_file_is_listed_run_and_given_options(tmp_path: Path, schedule: str) -> None:
    (tmp_path / "mine.py").write_text(PASS.format(name="rename"))
    listed = ratrainc(tmp_path, "--plugin", "mine.py", "passes").stdout
    assert "rename\n    Gives the module another name." in listed
    done = ratrainc(tmp_path, "--plugin", "mine.py", "opt", schedule, "--passes", "rename{to=other}", "-o", "b.rtir")
    assert done.returncode == 0, done.stderr
    assert "module @other " in (tmp_path / "b.rtir").read_text()


def test_a_pass_of_a_module_is_found_by_the_environment_too(tmp_path: Path, schedule: str) -> None:
    (tmp_path / "mine.py").write_text(PASS.format(name="rename"))
    words = ["opt", schedule, "--passes", "rename", "-o", "b.rtir"]
    assert ratrainc(tmp_path, *words).returncode == 1
    found = ratrainc(tmp_path, *words, RATRAIN_PLUGINS="mine", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT / 'src'}")
    assert found.returncode == 0, found.stderr


def test_a_pass_of_an_installed_distribution_is_found(tmp_path: Path, schedule: str) -> None:
    (tmp_path / "mine.py").write_text(PASS.format(name="rename").replace("@register_pass\n", ""))
    facts = tmp_path / "mine-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[ratrain.passes]\nrename = mine:Rename\n")
    words = ["opt", schedule, "--passes", "rename", "-o", "b.rtir"]
    found = ratrainc(tmp_path, *words, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT / 'src'}")
    assert found.returncode == 0, found.stderr


def test_a_target_of_ones_own_sizes_the_workspace(tmp_path: Path) -> None:
    (tmp_path / "roomy.py").write_text(TARGET)
    (tmp_path / "m.toml").write_text('base = "mt3000"\nname = "m"\ntarget = "roomy"\n')
    (tmp_path / "plain.toml").write_text('base = "mt3000"\nname = "m"\n')
    model, plan = ROOT / "examples" / "tiny.json", ROOT / "examples" / "tiny.toml"
    peaks = {}
    for machine in ("m.toml", "plain.toml"):
        words = ["compile", "--model", str(model), "--plan", str(plan), "--machine", machine, "-o", "a.rtx", "--json"]
        done = ratrainc(tmp_path, "--plugin", "roomy.py", *words)
        assert done.returncode == 0, done.stderr
        peaks[machine] = json.loads(done.stdout)["stages"][0]["peak_live_bytes"]
    assert peaks["m.toml"] > peaks["plain.toml"]
    without = ratrainc(tmp_path, "compile", "--model", str(model), "--plan", str(plan), "--machine", "m.toml")
    assert without.returncode == 1
    assert "target is one of mt3000, got 'roomy'" in without.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be loaded: FileNotFoundError"),
        ("1 / 0", "cannot be loaded: ZeroDivisionError: division by zero"),
        (PASS.format(name="lifetime"), "the pass 'lifetime' of bad:Rename has the name of"),
        (
            "from ratrain.passes.registry import PASSES\nPASSES.register('odd', 'json:dumps')",
            "'json:dumps' is not a pass",
        ),
        ("from ratrain.passes.registry import PASSES\nPASSES.register('odd', 'json:gone')", "cannot be loaded from"),
    ],
)
def test_what_is_wrong_with_a_plugin_is_told(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "bad.py").write_text(text)
    found = ratrainc(tmp_path, "--plugin", "bad.py", "passes")
    assert found.returncode == 1
    assert "error[RT004]" in found.stderr
    assert message in found.stderr

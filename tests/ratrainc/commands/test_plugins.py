"""Passes and targets of others: by `--plugin`, by the environment, by entry points; and what is told where one is not what it should be."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
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
from ratrain.targets.machine.registry import TARGETS
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
    assert "target is one of mt3000, pytorch, got 'roomy'" in without.stderr


@pytest.mark.parametrize(
    ("place", "message"), [("json:dumps", "'json:dumps' is no pass"), ("json:gone", "cannot be loaded from")]
)
@pytest.mark.full
def test_a_pass_that_cannot_be_used_is_listed_as_such_and_refused_where_it_is_asked_for(
    tmp_path: Path, place: str, message: str
) -> None:
    """Load a pass when it is needed: one that is broken does not hide the others."""
    (tmp_path / "bad.py").write_text(f"from ratrain.passes.registry import *\nPASSES.register('odd', '{place}')")
    listed = ratrainc(tmp_path, "--plugin", "bad.py", "passes")
    assert listed.returncode == 0, listed.stderr
    assert "cannot be used" in " ".join(listed.stdout.split())
    (tmp_path / "in.rtir").write_text("")
    told = ratrainc(tmp_path, "--plugin", "bad.py", "opt", "in.rtir", "--passes", "odd", "-o", "out.rtir")
    assert told.returncode == 1
    assert message in " ".join(told.stderr.split())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "there is no plugin"),
        ("1 / 0", "cannot be loaded: ZeroDivisionError: division by zero (FOLDER/bad.py:1)"),
        ("open('gone.txt')", "cannot be loaded: FileNotFoundError: [Errno 2] No such file or directory: 'gone.txt'"),
        ("def f(:\n", "cannot be loaded: SyntaxError"),
        ("import sys\nsys.exit(3)", "cannot be loaded: SystemExit: 3 (FOLDER/bad.py:2)"),
        ("import gone_away", "cannot be loaded: No module named 'gone_away' (FOLDER/bad.py:1)"),
        (PASS.format(name="lifetime"), "the pass 'lifetime' of ratrain_plugin_bad:Rename has the name of"),
        (PASS.format(name="My Pass"), "has the name 'My Pass'"),
        (PASS.format(name="rename").replace("@frozen\n", ""), "help: decorate it: @attrs.frozen"),
        (re.sub("metadata=.*", ")", PASS.format(name="rename")), "declares neither choices nor a unit"),
        ("from ratrain.passes.registry import *\nPASSES.register('odd', 7)", "is registered as 7: a class or"),
        ("from ratrain.passes.registry import *\n@register_pass\nclass A: name = 'a'", "A' is no pass"),
    ],
)
@pytest.mark.sampled(3)
def test_what_is_wrong_with_a_plugin_is_told(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "bad.py").write_text(text)
    told = ratrainc(tmp_path, "--plugin", "bad.py", "passes")
    assert told.returncode == 1
    assert "error[RT072]" in told.stderr
    assert message.replace("FOLDER", str(tmp_path)) in told.stderr


def test_a_module_that_is_a_file_here_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PASS.format(name="rename"))
    told = ratrainc(tmp_path, "--plugin", "mine", "passes")
    assert told.returncode == 1
    assert "help: a file is given with its ending: --plugin mine.py" in told.stderr


@pytest.mark.parametrize(
    "name",
    ["numba.py", "a.b.py", "co:lon/p.py"]
    + [pytest.param(name, marks=pytest.mark.full) for name in ("json.py", "my-pass.py", "with space.py")],
)
@pytest.mark.sampled(3)
def test_a_plugin_may_have_any_name(tmp_path: Path, schedule: str, name: str) -> None:
    """That of a library too, which stays what it is."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(PASS.format(name="rename"))
    done = ratrainc(tmp_path, "compile", schedule, "-o", "z.rtx", "--json", "--plugin", name)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)


@pytest.mark.parametrize("words", [["--plugin", "mine.py"], ["--plugin=mine.py"]])
def test_the_option_may_stand_behind_the_command(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "mine.py").write_text(PASS.format(name="rename"))
    assert "Gives the module another name." in ratrainc(tmp_path, "passes", *words).stdout


FAULTS = {
    "raises": (
        "raise ValueError('my own fault')",
        "the pass 'rename' failed: ValueError: my own fault (FOLDER/mine.py:",
    ),
    "empties a stage": ("module.stages[0].ops = []", "the pass 'rename' broke the schedule (FOLDER/mine.py:RUN)"),
    "drops a load": (
        "module.stages[0].ops = [op for op in module.stages[0].ops if type(op).__name__ != 'LoadInput']",
        "the pass 'rename' broke the schedule (FOLDER/mine.py:RUN)",
    ),
    "drops the stages": ("module.stages = []", "the pass 'rename' left 0 stages of 2"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.sampled(3)
def test_what_a_pass_does_wrong_is_told_as_its_fault(tmp_path: Path, schedule: str, fault: str) -> None:
    body, message = FAULTS[fault]
    (tmp_path / "mine.py").write_text(PASS.format(name="rename").replace("module.name = self.to", body))
    words = ["opt", schedule, "--passes", "rename,allocate-ddr", "-o", "b.rtir"]
    told = ratrainc(tmp_path, "--plugin", "mine.py", *words)
    assert told.returncode == 1, told.stderr
    said = " ".join(told.stderr.split())
    assert said.startswith("error[RT072]: ")
    assert "FOLDER/mine.py:".replace("FOLDER", str(tmp_path)) in said
    run = 1 + PASS.splitlines().index("    def run(self, module, context):")
    assert message.replace("FOLDER", str(tmp_path)).replace("RUN", str(run)) in said


def test_the_examples_of_the_page_work(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "plugins.md").read_text("utf-8")
    (own_pass, _, own_target), tables = (
        re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL) for kind in ("python", "toml")
    )
    (machine,) = (text for text in tables if "entry-points" not in text)
    for name, text in (("mine.py", own_pass), ("roomy.py", own_target), ("roomy1.toml", machine)):
        (tmp_path / name).write_text(text)
    words = ["compile", "--model", str(ROOT / "examples" / "tiny.json"), "--plan", str(ROOT / "examples" / "tiny.toml")]
    pipeline = "place-gpipe,tokens-first{order=ascending},allocate-ddr"
    options = ["--passes", pipeline, "--machine", "roomy1.toml", "--plugin", "mine.py", "--plugin", "roomy.py"]
    done = ratrainc(tmp_path, *words, *options, "-o", "x.rtir")
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "x.rtir").read_text().splitlines()
    loads = [number for number, line in enumerate(lines) if "load_input tokens" in line]
    assert len(loads) == 4
    assert loads[-1] < next(number for number, line in enumerate(lines) if " = forward " in line)

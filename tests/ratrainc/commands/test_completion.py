"""Shells complete what can be typed: commands, options, and the names of what comes with the package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from ratrain.passes.registry import PASSES
from ratrain.ratrain_ir.config.model_files import preset_names
from ratrain.ratrainc.choices.strategies import STRATEGIES
from ratrain.ratrainc.cli import _COMMANDS, commands, main
from ratrain.targets.machine.machine import machine_names

NAMES = [strategy.name for strategy in STRATEGIES]


def completed(words: str) -> tuple[set[str], bool]:
    """What the last word may become, and whether it may be a file."""
    *before, begun = words.split(" ")
    found = ShellComplete(commands, {}, "ratrainc", "_X").get_completions(before, begun)
    return {item.value for item in found if item.type == "plain"}, any(item.type == "file" for item in found)


@pytest.mark.parametrize(
    ("words", "names", "is_file"),
    [
        ("", set(_COMMANDS), False),
        ("comp", {"compile", "compare", "completion"}, False),
        ("compile --model ", set(preset_names()), True),
        ("compile --model llama-2-70", {"llama-2-70b"}, True),
        ("compile --plan ", set(), True),
        ("compile --strategy ", set(NAMES), False),
        ("compile --passes ", set(PASSES.names()), False),
        ("compile --passes place-gpipe,recompute{policy=full},allocate", {"place-gpipe,recompute{policy=full},allocate-ddr"}, False),
        ("compile --passes recompute{pol", set(), False),
        ("compile -o ", set(), True),
        ("compare --strategies ratrain,zero3-", {"ratrain,zero3-blocking"}, False),
        ("opt x.rtir --print-ir-after legal", {"legalise"}, False),
        ("simulate x.rtx --machine ", set(machine_names()), True),
        ("machines mt3000-sh", {"mt3000-shared-port"}, True),
        ("plan --zer", {"--zero"}, False),
        ("schedule --kind zb-", {"zb-h1", "zb-h2", "zb-v"}, False),
        ("completion ", {"bash", "zsh", "fish"}, False),
        ("--ver", {"--version"}, False),
    ],
)  # fmt: skip
def test_what_can_be_typed_is_completed(words: str, names: set[str], is_file: bool) -> None:
    assert completed(words) == (names, is_file)


def test_completing_a_command_imports_none() -> None:
    program = (
        "import sys; from ratrain.ratrainc.cli import main\n"
        "try: main([])\n"
        "except SystemExit: pass\n"
        "print([name for name in sys.modules if name.startswith('ratrain.ratrainc.commands.')], file=sys.stderr)"
    )
    asked = {"COMP_WORDS": "ratrainc p", "COMP_CWORD": "1", "_RATRAINC_COMPLETE": "bash_complete"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | asked, capture_output=True, text=True, check=True
    )
    assert "plain,plan" in done.stdout.split()
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_a_script_of_its_own(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert f"_RATRAINC_COMPLETE={shell}_complete" in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    program = tmp_path / "ratrainc"
    program.write_text(f"#!/bin/sh\nexec '{sys.executable}' -m ratrain \"$@\"\n")
    program.chmod(0o755)
    asked = "COMP_WORDS=(ratrainc simulate x.rtx --machine mt3000-ti); COMP_CWORD=4; compopt() { :; }\n"
    script = f'{capsys.readouterr().out}\n{asked}_ratrainc_completion ratrainc\necho "${{COMPREPLY[@]}}"\n'
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash"], input=script, env=os.environ | {"PATH": path}, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["mt3000-tiles"], done.stderr

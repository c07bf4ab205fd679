"""The command line starts quickly: what only some commands need is imported by those commands."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from ratrain import api
from ratrain.targets.program.rtx import write_program
from tests.end_to_end.tiny_runs import make_program

HEAVY = ("numpy", "networkx", "numba", "llvmlite")  # each takes from a tenth of a second to a second to import


def heavy_imports(folder: Path, *arguments: str) -> list[str]:
    """Run Python with `arguments` in `folder` and return which heavy packages it imported."""
    command = [sys.executable, "-X", "importtime", *arguments]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    lines = result.stderr.splitlines()
    report = [line for line in lines if line.startswith("import time:")]
    assert result.returncode == 0, "\n".join(line for line in lines if line not in report)
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in report}
    assert "runpy" in imported, "the interpreter no longer reports its imports in this form"
    return [name for name in HEAVY if name in imported]


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_imports_nothing_heavy(tmp_path: Path, option: str) -> None:
    assert heavy_imports(tmp_path, "-m", "ratrain", option) == []


def test_the_help_of_no_command_imports_anything_heavy(tmp_path: Path) -> None:
    (tmp_path / "every_help.py").write_text(
        "import sys\n"
        "from ratrain.ratrainc.cli import _COMMANDS, main\n"
        "for name in _COMMANDS:\n"
        "    assert main([name, '--help']) == 0, name\n"
        f"    heavy = [module for module in {HEAVY} if module in sys.modules]\n"
        "    assert not heavy, f'{name} --help imports {heavy}'\n"
    )
    assert heavy_imports(tmp_path, "-m", "every_help") == []


@pytest.mark.parametrize("name", HEAVY)
def test_a_heavy_import_is_noticed(tmp_path: Path, name: str) -> None:
    (tmp_path / "lazy.py").write_text(f"def run():\n    import {name}.core\n\nrun()\n")
    for module in (name, f"{name}/core"):
        (tmp_path / module).mkdir()
        (tmp_path / module / "__init__.py").touch()
    assert heavy_imports(tmp_path, "-m", "lazy") == [name]


def test_the_api_says_once_where_each_name_stands() -> None:
    """What type checkers read, and what a name is looked up by."""
    tree = ast.parse(Path(api.__file__).read_text("utf-8"))
    (checked,) = [node for node in tree.body if isinstance(node, ast.If)]
    read = {
        alias.name: node.module for node in checked.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    for name, room in read.items():
        assert getattr(api, name) is getattr(import_module(str(room)), name)
    assert {*read, "Diagnostic", "DiagnosticError"} == {*api.__all__}
    assert {*api.__all__} <= {*dir(api)}
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = api.nothing


def test_what_is_read_and_simulated_needs_no_compiler(tmp_path: Path) -> None:
    write_program(make_program(), str(tmp_path / "x.rtx"))
    (tmp_path / "simulates.py").write_text(
        "import sys\n"
        "from ratrain import api\n"
        "from ratrain.ratrainc.compiling.opening import program_in\n"
        "from pathlib import Path\n"
        "program = program_in(Path('x.rtx').read_bytes(), 'x.rtx')\n"
        "api.simulate(program).to_json()\n"
        "unwanted = ('ratrain.passes.placement', 'ratrain.ratrainc.planner', 'ratrain.ratrain_ir.text.parser')\n"
        "assert not [module for module in sys.modules if module.startswith(unwanted)]\n"
    )
    heavy_imports(tmp_path, "-m", "simulates")

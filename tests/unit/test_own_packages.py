"""Files of the user's by the names of our packages: commands work all the same, the API names the file that is in the way."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from ratrainc.own_packages import NAMES

SCRIPT = Path(sysconfig.get_path("scripts")) / "ratrainc"


def module(folder: Path, name: str) -> Path:
    """A module of that name."""
    (folder / f"{name}.py").write_text("raise SystemExit('a file of the user was run')\n")
    return folder / f"{name}.py"


def package(folder: Path, name: str) -> Path:
    """A package of that name."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text("raise SystemExit('a file of the user was run')\n")
    return folder / name / "__init__.py"


def process(folder: Path, words: list[str], path: str | None = None) -> subprocess.CompletedProcess[str]:
    """A process in a folder."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    environment |= {} if path is None else {"PYTHONPATH": path}
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("make", [module, package])
@pytest.mark.parametrize("start", [[str(SCRIPT)], [sys.executable, "-m", "ratrainc"]], ids=["script", "module"])
def test_commands_beside_files_of_the_same_names(
    tmp_path: Path, start: list[str], make: Callable[[Path, str], Path]
) -> None:
    """In the current directory, on PYTHONPATH, and both. The command imports all of our packages."""
    if not Path(start[0]).exists():
        pytest.skip("ratrainc is not installed as a script")
    (tmp_path / "elsewhere").mkdir()
    for name in NAMES:
        make(tmp_path, name)
    for folder, path in ((tmp_path, None), (tmp_path / "elsewhere", str(tmp_path))):
        found = process(folder, [*start, "verify", "missing.rtir"], path)
        assert found.returncode == 1
        assert "error[RT002]: cannot read the schedule 'missing.rtir'" in found.stderr, found.stderr


@pytest.mark.parametrize("make", [module, package])
@pytest.mark.parametrize("name", NAMES)
def test_the_api_names_the_file_that_is_in_the_way(
    tmp_path: Path, name: str, make: Callable[[Path, str], Path]
) -> None:
    file = make(tmp_path, name)
    found = process(tmp_path, [sys.executable, "-c", "from ratrainc import api"])
    assert found.returncode == 1
    last = found.stderr.splitlines()[-1]
    assert f"'{file}' stands in the way of ratrain's own package '{name}'" in last
    assert "rename it" in last


def test_a_folder_without_python_files_is_in_nobodys_way(tmp_path: Path) -> None:
    for name in NAMES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "data.csv").touch()
    found = process(tmp_path, [sys.executable, "-c", "from ratrainc import api; print(api.__name__)"], str(tmp_path))
    assert found.stdout == "ratrainc.api\n", found.stderr


def test_a_command_in_a_process_that_has_imported_another_says_so(tmp_path: Path) -> None:
    (tmp_path / "passes.py").write_text("")
    words = "import sys, passes; from ratrainc.cli import main; sys.exit(main(['passes']))"
    found = process(tmp_path, [sys.executable, "-c", words])
    assert found.returncode == 1
    assert found.stderr.startswith("error: ")
    assert "a fault of ratrainc" not in found.stderr
    assert str(tmp_path / "passes.py") in found.stderr

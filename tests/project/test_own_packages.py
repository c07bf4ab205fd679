"""Files of the user's by the names of our packages: the command and the API work all the same."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

NAMES = ("grammar", "ratrain_ir", "passes", "targets", "ratrainc")
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


@pytest.mark.parametrize(
    ("start", "make"),
    [
        pytest.param([str(SCRIPT)], module, id="script-module"),
        pytest.param([sys.executable, "-m", "ratrain"], package, id="module-package"),
        pytest.param([str(SCRIPT)], package, id="script-package", marks=pytest.mark.full),
        pytest.param([sys.executable, "-m", "ratrain"], module, id="module-module", marks=pytest.mark.full),
    ],
)
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
@pytest.mark.parametrize("on_path", [True, False], ids=["on PYTHONPATH", "beside"])
@pytest.mark.sampled(2)
def test_the_api_beside_files_of_the_same_names(
    tmp_path: Path, make: Callable[[Path, str], Path], *, on_path: bool
) -> None:
    (tmp_path / "elsewhere").mkdir()
    for name in NAMES:
        make(tmp_path, name)
    folder, path = (tmp_path / "elsewhere", str(tmp_path)) if on_path else (tmp_path, None)
    words = [sys.executable, "-c", "from ratrain import api; print(api.__name__)"]
    found = process(folder, words, path)
    assert found.stdout == "ratrain.api\n", found.stderr


@pytest.mark.parametrize("name", NAMES)
def test_an_editable_install_gives_no_everyday_name_away(tmp_path: Path, name: str) -> None:
    words = [sys.executable, "-c", f"from importlib.util import find_spec; print(find_spec('{name}'))"]
    assert process(tmp_path, words).stdout == "None\n"

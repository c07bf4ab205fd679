"""What users install: the wheel holds every file of the packages, and runs from any folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path

import pytest

import ratrain.__main__ as package_main

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PACKAGES = ("grammar", "ratrain_ir", "passes", "targets", "ratrainc")

pytestmark = pytest.mark.xdist_group("packaging")  # one process builds the wheel, once


PROJECT_EXAMPLES = [path.relative_to(ROOT / "examples").as_posix() for path in (ROOT / "examples").rglob("*.*")]
"""What the quickstart trains and `ratrainc examples` copies, carried by the wheel."""


def run(command: list[str | Path], folder: Path, environment: Mapping[str, str] | None = None) -> str:
    """Run a command in `folder` and return what it printed; its errors are the test's."""
    result = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, f"{command} ended with {result.returncode}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def clean_environment() -> dict[str, str]:
    """Return the environment without the variables that would lead Python to other packages than the installed."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel with the tools of this environment, so that nothing is downloaded."""
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check"]
    run([sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", folder, ROOT], folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel into a fresh environment that borrows only the dependencies; return its `bin` folder.

    The borrowed folder stands in a .pth file. Python does not read the .pth files inside a folder named that way, so
    an editable install of this checkout there has no effect.
    """
    home = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(home, with_pip=False, symlinks=True)
    binaries = home / "bin"
    python = binaries / "python"
    site = Path(run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], home).strip())
    borrowed = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    (site / "dependencies.pth").write_text("".join(f"{folder}\n" for folder in borrowed))
    options = ["--quiet", "--no-deps", "--no-index", "--ignore-installed", "--disable-pip-version-check"]
    run([sys.executable, "-m", "pip", "--python", python, "install", *options, wheel], home, clean_environment())
    return binaries


def test_the_source_distribution_has_every_file_of_the_package(tmp_path: Path) -> None:
    """As files of their folders: the links are of the checkout."""
    run([sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", tmp_path], ROOT)
    (built,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(built) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    package = {name.removeprefix("ratrain/") for name in files_of_the_package()}
    folders = {name for name in package if name.partition("/")[0] in PACKAGES}
    assert folders | {f"src/ratrain/{name}" for name in package - folders} <= names
    assert not {name for name in names if name.startswith("src/ratrain/") and name.count("/") > 2}


@pytest.fixture(params=["empty", "hostile"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return an empty folder, or one with modules of the same names as ours that must never be imported."""
    if request.param == "hostile":
        for name in ("passes", "targets", "grammar", "ratrain_ir", "click"):
            (tmp_path / f"{name}.py").write_text(f"raise SystemExit('the foreign {name}.py was imported')\n")
    return tmp_path


def files_of_the_package() -> set[str]:
    """What the checkout holds of the package, by the path in it."""
    source = ROOT / "src"
    return {
        (Path(folder) / name).relative_to(source).as_posix()
        for folder, _, names in os.walk(source, followlinks=True)
        for name in names
        if not folder.endswith("__pycache__")
    }


def test_the_wheel_holds_exactly_the_files_of_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.partition("/")[0].endswith(".dist-info")}
    assert names == files_of_the_package() | {f"ratrain/ratrainc/examples/{name}" for name in PROJECT_EXAMPLES}


@pytest.mark.parametrize(
    "pattern",
    ["grammar/*.lark", "ratrain_ir/config/presets/*.json", "targets/*/machines/*.toml", "py.typed"],
)
def test_package_data_is_in_the_wheel(wheel: Path, pattern: str) -> None:
    expected = {name for name in files_of_the_package() if fnmatch(name, f"ratrain/{pattern}")}
    assert expected, f"the checkout has no {pattern}"
    with zipfile.ZipFile(wheel) as archive:
        assert expected <= set(archive.namelist())


def test_the_wheel_carries_license_and_entry_point(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        texts = {name.partition("/")[2]: name for name in archive.namelist() if ".dist-info/" in name}
        assert archive.read(texts["licenses/LICENSE"]) == (ROOT / "LICENSE").read_bytes()
        assert "ratrainc = ratrain.ratrainc.cli:main" in archive.read(texts["entry_points.txt"]).decode()


def test_the_installed_package_is_the_one_imported(installed: Path, folder: Path) -> None:
    modules = [f"ratrain.{name}" for name in (*PACKAGES, "api")]
    program = f"import {', '.join(modules)}\nfor module in ({', '.join(modules)}): print(module.__file__)"
    files = run([installed / "python", "-P", "-c", program], folder, clean_environment()).split()
    assert len(files) == len(modules)
    assert all(Path(file).is_relative_to(installed.parent) for file in files), files


def test_nothing_is_installed_by_an_everyday_name(installed: Path, tmp_path: Path) -> None:
    program = f"from importlib.util import find_spec\nprint([name for name in {PACKAGES} if find_spec(name)])"
    assert run([installed / "python", "-c", program], tmp_path, clean_environment()) == "[]\n"


@pytest.mark.parametrize("start", ["script", "module"])
def test_version_and_help(installed: Path, folder: Path, start: str) -> None:
    command: list[str | Path] = (
        [installed / "ratrainc"] if start == "script" else [installed / "python", "-m", "ratrain"]
    )
    environment = clean_environment()
    assert PROJECT["project"]["version"] in run([*command, "--version"], folder, environment)
    usage = run([*command, "--help"], folder, environment)
    assert all(name in usage for name in ("compile", "simulate", "quickstart")), usage


def test_the_installed_quickstart_needs_no_checkout(installed: Path, folder: Path) -> None:
    report = run([installed / "ratrainc", "quickstart", "--steps", "2"], folder, clean_environment())
    assert "loss" in report.rpartition("report")[2], report


def test_the_examples_of_help_work_where_only_the_wheel_is(installed: Path, tmp_path: Path) -> None:
    """Whatever help says of `examples/` can be typed after `ratrainc examples examples`; a second time nothing is overwritten."""
    command = installed / "ratrainc"
    assert "copied" in run([command, "examples", "examples"], tmp_path, clean_environment())
    assert {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.*")} == {
        f"examples/{name}" for name in PROJECT_EXAMPLES
    }
    (tmp_path / "examples" / "tiny.toml").write_text("mine")
    told = json.loads(run([command, "examples", "examples", "--json"], tmp_path, clean_environment()))
    assert (told["copied"], set(told["kept"])) == ([], set(PROJECT_EXAMPLES))
    assert (tmp_path / "examples" / "tiny.toml").read_text() == "mine"
    words = "compile --model llama-2-7b --plan examples/llama-2-7b-8.toml --passes place-1f1b --json"
    assert run([command, *words.split()], tmp_path, clean_environment())


@pytest.mark.parametrize(
    ("where", "first", "kept"),
    [
        ("foreign", "foreign", False),
        ("foreign", "", False),
        ("foreign", "other", True),  # python -P, or PYTHONSAFEPATH: the first entry is not the current directory
        ("home", "home", True),  # a checkout that is not installed: the packages are here and only here
    ],
)
def test_only_a_foreign_current_directory_leaves_the_import_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str, first: str, *, kept: bool
) -> None:
    places = {"foreign": tmp_path, "other": tmp_path.parent, "home": Path(package_main.__file__).parents[1]}
    path = [str(places.get(first, "")) if first else "", "/further"]
    monkeypatch.chdir(places[where])
    monkeypatch.setattr(sys, "path", list(path))
    package_main.drop_current_directory()
    assert sys.path == (path if kept else path[1:])


def test_what_pythonsafepath_left_out_is_not_taken_from_another(installed: Path, tmp_path: Path) -> None:
    """A current directory that PYTHONPATH names was asked for; with PYTHONSAFEPATH it is the first entry, and stays."""
    program = (
        "import os, sys; from ratrain.__main__ import drop_current_directory as drop; drop(); "
        "print(os.path.realpath(sys.path[0]) == os.getcwd())"
    )
    environment = {**clean_environment(), "PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"}
    assert run([installed / "python", "-c", program], tmp_path, environment) == "True\n"


def test_a_deleted_current_directory_is_no_reason_to_fail(installed: Path, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    script = 'rmdir "$PWD" && exec "$0" -m ratrain --version'
    assert PROJECT["project"]["version"] in run(["sh", "-c", script, installed / "python"], gone, clean_environment())

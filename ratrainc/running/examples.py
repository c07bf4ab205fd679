"""The example files, inside the installed package or in the checkout next to it."""

from __future__ import annotations

import shutil
from pathlib import Path

from ratrain.ratrain_ir.support.files import made_directory, path_errors


def _folder() -> Path:
    """Return the folder of the examples."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "examples"
    return installed if installed.is_dir() else package.parent / "examples"


def example_path(name: str) -> Path:
    """Return the path of an example file."""
    return _folder() / name


def example_names() -> list[str]:
    """Return the paths of the example files below their folder; files of the folder itself come first."""
    folder = _folder()
    names = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")]
    return [name.as_posix() for name in sorted(names, key=lambda name: (len(name.parts), name))]


def example_summary(name: str) -> str:
    """Return the first comment line of an example, or a fixed sentence for JSON and notebooks."""
    if name.endswith(".json"):
        return "A model, as Hugging Face's config.json."
    if name.endswith(".ipynb"):
        return "A notebook: the Python API from a plan to a short training."
    lines = example_path(name).read_text(encoding="utf-8").splitlines()
    return next((line.removeprefix("# ") for line in lines if line.startswith("# ")), "")


def copy_examples(to: str) -> tuple[list[str], list[str]]:
    """Copy the examples into a folder, which is made if needed; return the names copied, and those that existed.

    Nothing is overwritten. Raises `DiagnosticError` RT002 if something cannot be written.
    """
    target, copied, kept = made_directory(to), [], []
    for name in example_names():
        place = target / name
        made_directory(str(place.parent))
        with path_errors(f"cannot write '{place}'"):
            try:
                with example_path(name).open("rb") as source, place.open("xb") as copy:
                    shutil.copyfileobj(source, copy)
            except FileExistsError:
                kept.append(name)
            else:
                copied.append(name)
    return copied, kept

"""The walk through a first change (`docs/contributing/first-change.md`), followed word by word on a copy of the tree."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "contributing" / "first-change.md"
_BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def steps(page: str) -> Iterator[tuple[str, str, str]]:
    """List the fenced blocks of a page as (language, file name or "", content)."""
    for match in _BLOCK.finditer(page):
        yield match[1], match[2] or "", match[3]


def copy_of_the_tree(folder: Path) -> None:
    """Copy what a clone has, links as links."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)


def follow(page: str, folder: Path) -> list[str]:
    """Do what a page says in a folder. Return each command that printed something else than the page shows."""
    environment = {**os.environ, "PYTHONPATH": str(folder / "src"), "COLUMNS": "120", "PYTHONDONTWRITEBYTECODE": "1"}
    wrong = []
    for language, name, content in steps(page):
        if language == "python":
            (folder / name).write_text(content)
        elif language == "diff":
            applied = subprocess.run(
                ["git", "apply", "-"],
                input=content, cwd=folder, capture_output=True, text=True, check=False,
            )  # fmt: skip
            assert applied.returncode == 0, f"{applied.stderr}\n{content}"
        else:
            command, _, shown = content.removeprefix("$ ").partition("\n")
            command = re.sub(r"^python", sys.executable, command)
            found = subprocess.run(
                command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, check=False
            )
            printed = re.sub(r"\s+", " ", found.stdout + found.stderr)
            missing = [line for line in shown.splitlines() if re.sub(r"\s+", " ", line).strip() not in printed]
            if missing:
                wrong.append(f"$ {command}\nlacks {missing}\n{found.stdout[-3000:]}{found.stderr[-3000:]}")
    return wrong


@pytest.mark.full
def test_the_first_change_can_be_followed(tmp_path: Path) -> None:
    copy_of_the_tree(tmp_path)
    assert follow(PAGE.read_text(), tmp_path) == []


def test_the_walk_is_short_and_has_steps_of_each_kind() -> None:
    page = PAGE.read_text()
    kinds = [language for language, _, _ in steps(page)]
    assert {"python", "diff", "console"} == set(kinds)
    prose = _BLOCK.sub("", page)
    assert len(prose.split()) <= 1500

"""The generated pages are what the code says now."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ratrain.ratrain_ir.support.diagnostics import CODES
from ratrain.ratrain_ir.text.parser import parse_module
from ratrain.ratrain_ir.verifier import check

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def generator() -> ModuleType:
    """`docs/generate.py`, which is no part of a package."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_fresh() -> None:
    """In a process of its own: what other tests load, as plugins, shows in the pages too."""
    command = [sys.executable, str(ROOT / "docs" / "generate.py"), "--check"]
    environment = dict(os.environ)  # readline, which pytest loads, sets COLUMNS behind its back
    checked = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_every_code_in_the_sources_is_in_the_table() -> None:
    used: set[str] = set()
    for package in ("ratrain_ir", "passes", "targets", "ratrainc"):
        for path in (ROOT / package).rglob("*.py"):
            used |= set(re.findall(r"\bRT0\d\d\b", path.read_text()))
    assert used <= set(CODES), used - set(CODES)


def test_the_annotated_schedule_is_a_sound_schedule() -> None:
    text = (ROOT / "docs" / "annotated-schedule.md").read_text().split("```")[1].lstrip("\n")
    module = parse_module(text, file="annotated-schedule.md")
    check(module)
    assert [len(stage.ops) > 30 for stage in module.stages] == [True, True]


def test_files_where_things_are_decided_are_there() -> None:
    """Each stands by its path from the checkout, or from the folder of the one before it, or from one above; names in them."""
    _, _, table = (ROOT / "docs" / "architecture.md").read_text().partition("## Where is X decided?")
    for line in table.splitlines():
        folders, texts = [ROOT], ""
        for name in re.findall(r"`([\w./]+(?:\.\w+|/))`", line.rpartition(" | ")[2]):
            found = next((folder / name for folder in folders if (folder / name).exists()), None)
            assert found is not None, f"{name} is not there: {line}"
            folder = found if found.is_dir() else found.parent
            folders = [ROOT, folder, folder.parent]
            texts += "".join(each.read_text() for each in (found.rglob("*.py") if found.is_dir() else [found]))
        for name in re.findall(r"`(\w+)`", line):
            assert name in texts, f"{name} is in none of the files of its line: {line}"


def test_every_room_of_the_house_is_named() -> None:
    """Each folder of sources in a package, by its name in the tables of rooms or with its package in the drawing."""
    house, _, _ = (ROOT / "docs" / "architecture.md").read_text().partition("## Where is X decided?")
    for package in ("ratrain_ir", "passes", "targets", "ratrainc"):
        for room in sorted(found.parent for found in (ROOT / package).glob("*/__init__.py")):
            assert f"{room.name}/" in house or f"{package}/{room.name}" in house, room


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
OUTPUTS = {"notebook.md", "annotated-schedule.md", "mistakes.md", "commands.md", "start-here.md"}
"""Pages whose code blocks are what a command writes, in lines as long as it writes them."""
TABLES = {"json.md", "passes.md", "rtir.md", "keys.md", "validation.md", "coming-from.md"}
"""Pages whose tables are made of what the code, or tables of measurements, say: a row of such a table cannot be broken."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_in_the_pages_lead_somewhere(page: Path) -> None:
    for file, _, anchor in re.findall(r"\]\((?!https?:)([^)#:]*)(#([^)]+))?\)", page.read_text()):
        target = page.parent / file if file else page
        assert target.exists(), f"{page.name} links to {file}"
        assert not anchor or anchor in anchors(target), f"{page.name} links to {file}#{anchor}"


def anchors(page: Path) -> set[str]:
    """The names by which a page's headings can be linked to, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_of_the_pages_are_short(page: Path) -> None:
    fenced = False
    for number, line in enumerate(page.read_text().split("\n"), 1):
        fenced ^= line.startswith("```")
        if (fenced and page.name in OUTPUTS) or (line.startswith("|") and page.name in TABLES):
            continue
        assert len(line) < 120, f"{page.name}:{number} has {len(line)} characters"


def test_pages_are_wrapped_without_touching_what_cannot_be() -> None:
    long = "word " * 40
    code = f"    {long}\n\n```\n{long}\n```\n\n| {long} |\n|---|\n\n# {long}"
    wrapped = generator().wrapped
    assert wrapped(code) == code
    lines = wrapped(f"- {long}- {long}`{'a b ' * 20}` end").split("\n")
    assert max(map(len, lines)) < 120
    assert lines[0].startswith("- word")
    assert all(line.startswith("  ") and not line.startswith("  - ") for line in lines[1:])
    assert all(line.count("`") % 2 == 0 for line in lines)


LOOKED_UP = OUTPUTS | TABLES | {"diagnostics.md", "glossary.md"}
"""Pages that nobody reads from the beginning to the end."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_that_is_read_is_short(page: Path) -> None:
    """At most 1,500 words; code and tables are not counted."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    words = sum(len(line.split()) for line in prose.split("\n") if not line.startswith(("    ", "|")))
    assert words <= 1500 or page.name in LOOKED_UP, f"{page.name} has {words} words"


def test_the_readme_can_be_read_at_once() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 120

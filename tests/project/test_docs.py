"""The generated pages are what the code says now."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from ratrain.ratrain_ir.diagnostics import CODES
from ratrain.ratrain_ir.parser import parse_module
from ratrain.ratrain_ir.verifier import check

ROOT = Path(__file__).resolve().parents[2]


def test_generated_pages_are_fresh() -> None:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert [*module.stale_pages()] == [], "run: python docs/generate.py"


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


def test_links_in_the_pages_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"

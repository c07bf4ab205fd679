"""The tables of `benchmarks/published` say what their README promises, and have no files that nothing names."""

from __future__ import annotations

import csv
import re
from collections import Counter
from pathlib import Path

import pytest

from ratrain.targets.machine.machine import load_machine

FOLDER = Path(__file__).parents[2] / "benchmarks" / "published"
README = (FOLDER / "README.md").read_text()
MEASURES = {
    "bubble": {"bubble_fraction"},
    "step-time": {"step_seconds", "tokens_per_second"},
    "scaling": {"step_seconds", "tokens_per_second"},
    "zero3-micro-batch": {"step_seconds", "tokens_per_second"},
    "memory": {"peak_bytes"},
    "out-of-memory": {"fits"},
}
TABLES = sorted(path.stem for path in FOLDER.glob("*.csv"))


def rows(table: str) -> list[dict[str, str]]:
    lines = (FOLDER / f"{table}.csv").read_text().splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def test_every_table_has_its_line_in_the_readme() -> None:
    lines = re.findall(r"^\| `([\w-]+)` \| (\d+) of (\d+)", README, re.MULTILINE)
    counted = {
        table: (str(sum(not row.get("needs") for row in rows(table))), str(len(rows(table)))) for table in TABLES
    }
    assert {table: (runnable, total) for table, runnable, total in lines} == counted


def test_the_readme_counts_the_rows_of_each_class() -> None:
    sentence = re.sub(r"\s+", " ", README.partition("By class, runnable and all: ")[2].partition(".")[0])
    every = [row for table in TABLES for row in rows(table)]
    runnable = Counter(row["class"] for row in every if not row.get("needs"))
    total = Counter(row["class"] for row in every)
    assert sentence == ", ".join(f"{name} {runnable[name]} of {total[name]}" for name in MEASURES)


@pytest.mark.parametrize("table", TABLES)
def test_a_row_measures_one_thing_and_says_how_sure_it_is(table: str) -> None:
    needs = set(re.findall(r"^- `([\w-]+)`:", README, re.MULTILINE))
    every_measure = set[str]().union(*MEASURES.values())
    for row in rows(table):
        given = {name for name in every_measure if row.get(name)}
        assert len(given) == 1, row["id"]
        assert given <= MEASURES[row["class"]], row["id"]
        assert row["split"] in {"fit", "held-out"}, row["id"]
        assert row["certainty"] in {"read", "recalled"}, row["id"]
        assert row["source"], row["id"]
        assert row.get("needs") in {None, "", *needs}, row["id"]


def test_no_two_rows_have_one_id() -> None:
    ids = Counter(row["id"] for table in TABLES for row in rows(table))
    assert [name for name, count in ids.items() if count > 1] == []


@pytest.mark.parametrize("kind", ["model", "machine"])
def test_the_folder_has_the_files_that_rows_name_and_no_others(kind: str) -> None:
    named = {row.get(kind) or "" for table in TABLES for row in rows(table)}
    here = {path.relative_to(FOLDER).as_posix() for path in (FOLDER / f"{kind}s").iterdir()}
    assert {name for name in named if name.startswith(f"{kind}s/")} == here


@pytest.mark.parametrize("path", sorted((FOLDER / "machines").iterdir()), ids=lambda path: path.stem)
def test_a_machine_has_the_groups_that_plans_map_to(path: Path) -> None:
    machine = load_machine(str(path))
    assert machine.name == path.stem
    assert [group.name for group in machine.link_groups] == ["node", "system"]

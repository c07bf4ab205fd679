"""Benchmarks run: a small one from beginning to end. What they measure is for people to read."""

from __future__ import annotations

import runpy
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_language(capsys):
    runpy.run_path(str(BENCHMARKS / "language.py"))["main"](["--ops", "1000", "--xdsl-ops", "0", "--repeat", "1"])
    head, titles, *rows = capsys.readouterr().out.splitlines()
    assert " ops, " in head
    assert titles.split() == ["ops/s", "RATrain"]
    assert [row.rsplit(maxsplit=1)[0].strip() for row in rows] == [
        *("parse", "print", "verify: structure", "verify: dataflow", "verify: memory", "verify: communication"),
        *("lifetimes", "dependence graph"),
    ]
    assert all(int(row.rsplit(maxsplit=1)[1].replace(",", "")) > 0 for row in rows)

"""Shards of the slow tests: a test is in one, and in the same one wherever the project is checked out."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import shard_of

FILE = "tests/data/configs/qwen3-0.6b.json"


def collected(root: str, name: str, group: str | None = None) -> Any:
    """Make what pytest collects of a test in a checkout."""
    marker = None if group is None else SimpleNamespace(args=(group,))
    return SimpleNamespace(
        nodeid=name.format(root=root),
        config=SimpleNamespace(rootpath=Path(root)),
        get_closest_marker=lambda _name: marker,
    )


@pytest.mark.parametrize("name", ["tests/a.py::test_a[1-f16]", f"tests/b.py::test_b[{{root}}/{FILE}-8]"])
def test_a_shard_does_not_depend_on_the_folder(name: str) -> None:
    found = {shard_of(collected(root, name), 40) for root in ("/home/me/ratrain", "/tmp/clone", "/x")}
    assert len(found) == 1


def test_tests_are_spread_and_groups_stay_together() -> None:
    assert {shard_of(collected("/x", f"tests/a.py::test_a[{n}]"), 8) for n in range(200)} == set(range(1, 9))
    assert len({shard_of(collected("/x", f"tests/a.py::test_{n}", "packaging"), 40) for n in range(20)}) == 1

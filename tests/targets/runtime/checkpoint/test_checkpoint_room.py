"""The disk that a run's checkpoints need is what they take, and a run that lacks it does not begin."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from attrs import evolve

from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.targets.runtime.checkpoint.checkpoint import MANIFEST_FILE
from ratrain.targets.runtime.checkpoint.checkpoint_room import check_room, checkpoint_bytes
from ratrain.targets.runtime.checkpoint.checkpoint_series import saved_steps
from tests.end_to_end.tiny_runs import MODEL, make_program, run_settings, start, train

PROGRAM = make_program()
ONE, SHARDED = (checkpoint_bytes(PROGRAM, is_series=is_series) for is_series in (False, True))
NAMES = 1 << 14
"""More than the bytes of tensor names in these small files."""


@pytest.fixture
def place(tmp_path: Path) -> str:
    return str(tmp_path / "ck")


def leave(monkeypatch: pytest.MonkeyPatch, free: int, total: int = 1 << 40) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _place: SimpleNamespace(total=total, used=0, free=free))


def tensor_bytes(folder: str) -> int:
    return sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))


@pytest.mark.parametrize("keys", [{}, {"model": evolve(MODEL, tied_embeddings=True)}, {"zero": 0}])
def test_the_size_is_that_of_the_files(keys: dict[str, Any], place: str) -> None:
    program = make_program(**keys)
    train(program, 1, save=place)
    assert 0 < tensor_bytes(place) - checkpoint_bytes(program, is_series=False) < NAMES
    train(program, 1, save=f"{place}s", save_every=1)
    assert 0 < tensor_bytes(saved_steps(f"{place}s")[0][1]) - checkpoint_bytes(program, is_series=True) < 4 * NAMES


@pytest.mark.parametrize(
    ("steps", "words", "size", "count"),
    [
        (3, {}, ONE, 1),
        (3, {"save_every": 5}, SHARDED, 1),
        (4, {"save_every": 2}, SHARDED, 2),
        (5, {"save_every": 2}, SHARDED, 3),
        (9, {"save_every": 1}, SHARDED, 3),
        (9, {"save_every": 1, "keep_last": 1}, SHARDED, 2),
    ],
)
def test_a_run_begins_only_where_all_that_stand_at_once_fit(
    steps: int, words: dict[str, Any], size: int, count: int, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = run_settings(steps, save=place, **words)
    is_series = settings.saving.is_series(1)
    leave(monkeypatch, count * size)
    check_room(PROGRAM, settings, 0, is_series=is_series)
    leave(monkeypatch, count * size - 1)
    with pytest.raises(
        DiagnosticError, match=r"RT002.* would not hold what this run saves.* MiB are needed"
    ) as refused:
        check_room(PROGRAM, settings, 0, is_series=is_series)
    assert ("--keep-last 1" in str(refused.value)) == (count == 3)


def test_checkpoints_that_will_be_removed_make_room(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    train(PROGRAM, 3, save=place, save_every=1, keep_last=2)
    leave(monkeypatch, SHARDED)
    check_room(PROGRAM, run_settings(9, save=place, save_every=1, keep_last=2), 3, is_series=True)


def test_a_file_system_without_a_size_refuses_nothing(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(monkeypatch, 0, total=0)
    check_room(PROGRAM, run_settings(9, save=place), 0, is_series=False)


@pytest.mark.parametrize("words", [{}, {"save_every": 1}])
def test_no_step_is_trained_that_could_not_be_saved(
    words: dict[str, Any], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(monkeypatch, 1000)
    with pytest.raises(DiagnosticError, match="would not hold what this run saves"):
        start(PROGRAM, 2, save=place, **words)
    assert not list(Path(place).rglob(MANIFEST_FILE))

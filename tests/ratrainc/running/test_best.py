"""Runs that end when held-out data say so, and the state that they keep."""

from __future__ import annotations

import json
from math import inf, nan
from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from ratrain.ratrainc.cli import main
from ratrain.targets.program.rtx import write_program
from ratrain.targets.runtime.training.best import Best
from tests.end_to_end.tiny_runs import MODEL, make_program

if TYPE_CHECKING:
    from pathlib import Path


@given(st.lists(st.floats(0, 9) | st.sampled_from([inf, nan]), max_size=20), st.integers(0, 20))
def test_the_lowest_loss_so_far(losses: list[float], cut: int) -> None:
    """Also over a checkpoint between two evaluations."""
    best = Best("data")
    for step, loss in enumerate(losses):
        if step == cut:
            since = best.since
            best = Best.noted(json.loads(json.dumps(best.note(), allow_nan=False)), "data")
            best.since = since  # before the first finite loss nothing is kept
        before = [each for each in losses[:step] if each < inf]
        assert best.hear(loss, step) is (loss < inf and (not before or loss < min(before)))
    finite = [(loss, step) for step, loss in enumerate(losses) if loss < inf]
    if finite:
        assert (best.loss, best.step) == min(finite)
        assert best.since == len(losses) - 1 - best.step
    assert Best.noted(best.note(), "other data") == Best("other data")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("best") / "t.rtx"
    write_program(make_program(evolve(MODEL, vocab_size=256), view_dtype="f32"), str(path))
    return str(path)


def run(program: str, folder: Path, *words: str) -> list[dict[str, Any]]:
    log = folder / "log.jsonl"
    text = "a text of words that say nothing new, again and again. " * 40
    (folder / "book.txt").write_text(text)
    words = ("--data", str(folder / "book.txt"), "--log", str(log), "--eval-every", "1", "--eval-batches", "1", *words)
    assert main(["run", program, "--lr", "0.08", "--kernels", "reference", "--eval-fraction", "0.3", *words]) == 0
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_a_run_ends_early_and_keeps_its_best(program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "best"
    lines = run(program, tmp_path, "--steps", "60", "--patience", "2", "--save-best", str(saved))
    said = capsys.readouterr().out
    losses = [line["eval_loss"] for line in lines]
    lowest = losses.index(min(losses))
    assert 0 < lowest < len(losses) < 60
    assert len(losses) == lowest + 3  # two evaluations after it
    assert f"lowest held-out loss: {losses[lowest]:.4f}, after step {lowest}" in said
    assert "ended early: no lower one than" in said
    manifest = json.loads((saved / "manifest.json").read_text())
    assert manifest["step"] == lowest + 1
    # What was kept goes on to what the run itself came to next.
    again = run(program, tmp_path, "--steps", "1", "--resume", str(saved))
    assert again[lowest + 1]["loss"] == lines[lowest + 1]["loss"]


def test_a_resumed_run_goes_on_counting(program: str, tmp_path: Path) -> None:
    whole = run(program, tmp_path, "--steps", "60", "--patience", "2")
    (tmp_path / "log.jsonl").unlink()
    cut = len(whole) - 1
    run(program, tmp_path, "--steps", str(cut), "--save", str(tmp_path / "half"))
    lines = run(program, tmp_path, "--steps", "60", "--patience", "2", "--resume", str(tmp_path / "half"))
    assert [line["eval_loss"] for line in lines] == [line["eval_loss"] for line in whole]

"""Tokens of a file: how wide they are, and that they stay what they were when the run opened them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from attrs import evolve

from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrainc.choices.run_choices import DataChoice
from ratrain.ratrainc.running.training_data import open_data
from ratrain.targets.runtime.data import data
from ratrain.targets.runtime.data.data import open_tokens
from ratrain.targets.runtime.kernels import kernel_set
from ratrain.targets.runtime.settings import Evaluation, Execution, RunSettings
from tests.end_to_end.tiny_runs import MODEL, make_program
from tests.program_files import prepare

if TYPE_CHECKING:
    from ratrain.targets.runtime.training.training import TrainingRun

WIDE = 1 << 17
"""A vocabulary whose tokens take 32 bits."""


def written(path: Path, tokens: Any, dtype: str) -> str:
    path.write_bytes(np.asarray(tokens).astype(dtype).tobytes())
    return str(path)


def drawn(count: int, below: int, *, zeros: float = 0.0, seed: int = 1) -> Any:
    random = np.random.default_rng(seed)
    tokens = random.integers(0, below, count)
    tokens[random.random(count) < zeros] = 0
    return tokens


# What is written, under which vocabulary it is read, and what the refusal names.
CONTRADICTIONS = {
    "32 bits, small tokens": (drawn(500, 300), "<u4", 300, "--data-dtype uint32"),
    "32 bits, mostly zero": (drawn(5000, 300, zeros=0.95), "<u4", 300, "--data-dtype uint32"),
    "32 bits, padded in front": (np.r_[np.zeros(300), drawn(500, 300)], "<u4", 300, "--data-dtype uint32"),
    "32 bits, a few beyond 16": (np.r_[drawn(5000, 60000), [65536 + 7] * 30], "<u4", 65536, "--data-dtype uint32"),
    "32 bits, high byte first": (drawn(500, 300), ">u4", 300, "high byte first"),
    "64 bits": (drawn(500, 300), "<i8", 300, "64 bits"),
    "64 bits for 32": (drawn(500, 100_000), "<i8", WIDE, "64 bits"),
    "16 bits for 32": (drawn(500, 60_000), "<u2", WIDE, "--data-dtype uint16"),
}

SOUND = {
    "all zero": (np.zeros(400), "<u2", 300),
    "mostly zero": (drawn(4000, 300, zeros=0.99), "<u2", 300),
    "padded documents": (np.concatenate([np.r_[drawn(40, 300, seed=i), np.zeros(216)] for i in range(20)]), "<u2", 300),
    "few tokens at even places": ([5, 0, 7, 0, 9, 0], "<u2", 300),
    "two tokens": (drawn(500, 2), "<u2", 2),
    "32 bits": (drawn(500, 100_000), "<u4", WIDE),
    "32 bits, mostly zero": (drawn(5000, 100_000, zeros=0.95), "<u4", WIDE),
}


@pytest.mark.parametrize("chunk", [64, 1 << 22])
@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_width_that_contradicts_the_content_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, chunk: int
) -> None:
    monkeypatch.setattr(data, "_CHUNK", chunk)
    tokens, dtype, vocab, way_out = CONTRADICTIONS[name]
    path = written(tmp_path / "t.bin", tokens, dtype)
    with pytest.raises(DiagnosticError) as caught:
        open_tokens(path, vocab_size=vocab)
    problem = caught.value.diagnostics[0]
    assert problem.code == "RT090"
    assert path in problem.message
    assert "position" in problem.message
    assert way_out in (problem.help or "")


@pytest.mark.parametrize("chunk", [64, 1 << 22])
@pytest.mark.parametrize("name", SOUND)
def test_zeros_alone_are_no_contradiction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, chunk: int
) -> None:
    monkeypatch.setattr(data, "_CHUNK", chunk)
    tokens, dtype, vocab = SOUND[name]
    stream = open_tokens(written(tmp_path / "t.bin", tokens, dtype), vocab_size=vocab)
    assert np.array_equal(stream.tokens[:], tokens)


def test_the_option_has_the_last_word(tmp_path: Path) -> None:
    tokens = drawn(500, 300)
    path = written(tmp_path / "t.bin", tokens, "<u4")
    assert len(open_tokens(path, vocab_size=300, dtype="uint16").tokens) == 1000
    assert open_tokens(path, vocab_size=300, dtype="uint32").tokens[:].tolist() == tokens.tolist()


def begun(path: str, *, evaluated: bool, threads: int = 1) -> TrainingRun:
    """A run on a file, on its training part and on the held-out one."""
    model = evolve(MODEL, vocab_size=256)
    program = make_program(model)
    evaluation = Evaluation(every=1 if evaluated else None, fraction=0.4)
    stream, held = open_data(program, DataChoice((path,)), evaluation)
    settings = RunSettings(9, evaluation=evaluation, execution=Execution(threads=threads))
    return prepare(program, stream, settings, kernel_set("reference"), held_out=held)


def cut(path: Path) -> None:
    os.truncate(path, 10)


def grow(path: Path) -> None:
    with path.open("ab") as stream:
        stream.write(bytes(2))


def write_inside(path: Path) -> None:
    with path.open("r+b") as stream:
        stream.write(bytes(64))
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))  # the clock of some file systems is coarse


@pytest.mark.parametrize("change", [cut, grow, write_inside])
@pytest.mark.parametrize("name", ["t.bin", "t.txt"])
@pytest.mark.parametrize(("evaluated", "threads"), [(False, 1), (True, 1), (False, 4)])
@pytest.mark.sampled(4)
def test_a_file_that_changes_ends_the_run(
    tmp_path: Path, name: str, change: Callable[[Path], None], *, evaluated: bool, threads: int
) -> None:
    path = tmp_path / name
    written(path, np.frombuffer(b"some words to learn " * 400, np.uint8), "<u2" if name == "t.bin" else "u1")
    run = begun(str(path), evaluated=evaluated, threads=threads)
    steps = run.steps()
    next(steps)
    change(path)
    with pytest.raises(DiagnosticError) as caught:
        next(steps)
    (problem,) = caught.value.diagnostics
    assert problem.code == "RT090"
    assert f"'{path}' has changed" in problem.message
    assert "--resume" in (problem.help or "")
    assert len(run.done) == 1


def test_a_file_that_is_replaced_goes_on_as_it_was(tmp_path: Path) -> None:
    words = np.frombuffer(b"some words to learn " * 400, np.uint8)
    path = tmp_path / "t.bin"
    written(path, words, "<u2")
    run, other = (begun(str(path), evaluated=False) for _ in range(2))
    found = [step.report.loss for step in other.steps()]
    Path(written(tmp_path / "new.bin", words[:500], "<u2")).replace(path)
    assert [step.report.loss for step in run.steps()] == found

"""A byte order mark at a file's start is no part of it, whichever command reads the file; anywhere else it is named."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ratrain.ratrain_ir.support import files
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrainc.cli import main
from ratrain.ratrainc.running.examples import example_path
from ratrain.targets.machine.machine import load_machine
from ratrain.targets.machine.writer import write_machine
from ratrain.targets.runtime.data.data import open_tokens
from ratrain.targets.runtime.data.jsonl import Fields, open_jsonl
from ratrain.targets.runtime.weights.companions import byte_tokenizer_files, files_of_tokenizer

MARK = "\ufeff".encode()
SCRIPT = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 8 --seq-length 64 --micro-batch-size 1 --lr 1e-3 --train-iters 9"
    " --global-batch-size 8\n"
)
JOB = "[parallelism]\npipeline_parallel_degree = 1\n[training]\nlocal_batch_size = 1\nseq_len = 64\n"
DEEPSPEED = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    for name in ("tiny.json", "tiny.toml"):
        shutil.copy(example_path(name), folder)
    write_machine(load_machine("mt3000"), str(folder / "machine.toml"))
    compiling = ["compile", "--model", str(folder / "tiny.json"), "--plan", str(folder / "tiny.toml")]
    assert main([*compiling, "-o", str(folder / "tiny.rtir")]) == 0
    assert main([*compiling, "-o", str(folder / "tiny.rtx")]) == 0
    (folder / "pretrain.sh").write_text(SCRIPT)
    (folder / "job.toml").write_text(JOB)
    (folder / "ds.json").write_text(json.dumps(DEEPSPEED))
    (folder / "t.csv").write_text("0F0,0B0\n")
    (folder / "alloc.csv").write_text("id,lower,upper,size\na,0,3,4\n")
    (folder / "times.toml").write_text("forward = 1.0\nbackward = 2.0\n")
    (folder / "words.txt").write_text("some words to learn " * 200)
    (folder / "words.jsonl").write_text(json.dumps({"text": "some words to learn " * 200}) + "\n")
    (folder / "log.jsonl").write_text("".join(json.dumps({"step": k, "loss": 2.5}) + "\n" for k in range(3)))
    return folder


COMPILE = ["compile", "--model", "{f}/tiny.json", "--plan", "{f}/tiny.toml"]
READERS: dict[str, list[str]] = {
    "tiny.json": ["model", "{f}/tiny.json"],
    "tiny.toml": COMPILE,
    "machine.toml": [*COMPILE, "--machine", "{f}/machine.toml"],
    "tiny.rtir": ["verify", "{f}/tiny.rtir"],
    "pretrain.sh": ["import-plan", "--from", "megatron", "{f}/pretrain.sh"],
    "job.toml": ["import-plan", "--from", "torchtitan", "{f}/job.toml", "--clusters", "8"],
    "ds.json": ["import-plan", "--from", "deepspeed", "{f}/ds.json", "--clusters", "4", "--seq-len", "64"],
    "t.csv": ["lint", "{f}/t.csv"],
    "alloc.csv": ["alloc", "{f}/alloc.csv", "--capacity", "64"],
    "times.toml": ["simulate", "{f}/tiny.rtir", "--times", "{f}/times.toml"],
    "words.txt": ["run", "{f}/tiny.rtx", "--steps", "1", "--data", "{f}/words.txt"],
    "words.jsonl": ["run", "{f}/tiny.rtx", "--steps", "1", "--data", "{f}/words.jsonl"],
    "log.jsonl": ["watch", "{f}/log.jsonl", "--once", "-o", "{f}/w.html"],
}


def said(words: list[str], place: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main([word.format(f=place) for word in words])
    shown = capsys.readouterr()
    text = shown.out + shown.err
    if words[0] == "run":
        text = "".join(line for line in text.splitlines() if line.startswith("data:"))
    return code, re.sub(r"[0-9][0-9.,]*|\s+", " ", text)


@pytest.mark.parametrize("name", READERS)
def test_a_mark_changes_nothing(name: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Check that a command says the same with a mark as without.

    Numbers are left out, since times are among them. Of a run only the lines on its data are compared.
    """
    before = said(READERS[name], place, capsys)
    assert before[0] == 0, before[1]
    path = place / name
    plain = path.read_bytes()
    path.write_bytes(MARK + plain)
    try:
        assert said(READERS[name], place, capsys) == before
    finally:
        path.write_bytes(plain)


def with_mark(path: Path, text: str, mark: bytes = MARK) -> str:
    path.write_bytes(mark + text.encode())
    return str(path)


def test_a_mark_is_not_learned(tmp_path: Path) -> None:
    path = with_mark(tmp_path / "t.txt", "hello")
    assert bytes(open_tokens(path, vocab_size=256).tokens[:]) == b"hello"
    plain = with_mark(tmp_path / "p.txt", "hello", b"")
    assert open_tokens(path, vocab_size=256).digest == open_tokens(plain, vocab_size=256).digest


def test_a_mark_counts_as_no_column_but_as_bytes(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_bytes(MARK + b"ab\xffc")
    with pytest.raises(DiagnosticError) as caught:
        open_tokens(str(path), vocab_size=256)
    (problem,) = caught.value.diagnostics
    assert "position 5" in problem.message
    assert problem.location is not None
    assert problem.location.column == 3


@pytest.mark.parametrize("name", ["t.txt", "t.jsonl"])
def test_a_file_of_a_mark_alone_is_empty(tmp_path: Path, name: str) -> None:
    path = with_mark(tmp_path / name, "")
    open_: Callable[[], object] = (
        (lambda: open_tokens(path, vocab_size=256))
        if name == "t.txt"
        else (lambda: open_jsonl(path, Fields(("text",)), vocab_size=256))
    )
    with pytest.raises(DiagnosticError, match="empty but for a byte order mark"):
        open_()


def test_a_mark_within_a_file_is_named_and_deleted_as_advised(tmp_path: Path) -> None:
    lines = [json.dumps({"text": text}) for text in ("one", "two")]
    path = tmp_path / "d.jsonl"
    path.write_text("\ufeff" + lines[0] + "\n\ufeff" + lines[1] + "\n", "utf-8")
    with pytest.raises(DiagnosticError) as caught:
        open_jsonl(str(path), Fields(("text",)), vocab_size=256)
    (problem,) = caught.value.diagnostics
    assert "line 2 of the training data begins with a byte order mark" in problem.message
    assert (problem.help or "").startswith("delete it")
    path.write_text(path.read_text("utf-8").replace("\ufeff", ""), "utf-8")
    assert bytes(open_jsonl(str(path), Fields(("text",)), vocab_size=256).tokens[:]) == b"onetwo"


def test_a_tokenizer_is_copied_without_its_mark(tmp_path: Path) -> None:
    plain = byte_tokenizer_files()["tokenizer.json"]
    (tmp_path / "tokenizer.json").write_bytes(MARK + plain)
    assert files_of_tokenizer(str(tmp_path / "tokenizer.json"))["tokenizer.json"] == plain


@pytest.mark.parametrize("kind", files.MOST_BYTES)
def test_every_kind_of_file_is_read_without_its_mark(tmp_path: Path, kind: str) -> None:
    path = with_mark(tmp_path / "x", "text \ufeff within")
    assert files.read_text(path, kind) == "text \ufeff within"


def test_text_of_another_encoding_is_saved_as_advised(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("0F0,0B0\n", "utf-16")
    with pytest.raises(DiagnosticError) as caught:
        files.read_text(str(path), "schedule table")
    assert caught.value.diagnostics[0].help == "save the file as UTF-8"
    path.write_text(path.read_text("utf-16"), "utf-8")
    assert files.read_text(str(path), "schedule table") == "0F0,0B0\n"

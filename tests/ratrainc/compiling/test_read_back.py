"""Whatever a command writes, its own reader reads; what it would not read is never written."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain import api
from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.support import files, toml_text
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError, fail
from ratrain.ratrain_ir.testing.strategies import Case, cases
from ratrain.ratrain_ir.text.plan_file import load_plan
from ratrain.ratrain_ir.text.printer import print_module
from ratrain.ratrainc.bridge import exporting
from ratrain.ratrainc.cli import main
from ratrain.ratrainc.planner.answer.plan_files import plan_text
from ratrain.ratrainc.report import schedule_table
from ratrain.ratrainc.running.examples import example_path
from ratrain.targets.machine.machine import load_machine, machine_names, parse_machine
from ratrain.targets.machine.writer import machine_text, write_machine
from ratrain.targets.program import rtx
from tests.end_to_end.tiny_runs import MODEL, make_plan

TINY = ["--model", str(example_path("tiny.json")), "--plan", str(example_path("tiny.toml"))]
MEGATRON = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 8 --tensor-model-parallel-size {tp} --seq-length 64"
    " --micro-batch-size 1 --global-batch-size 8 --lr 1e-3 --lr-decay-style constant {more}\n"
)
DEEPSPEED = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}


def written(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(words) == 0
    return capsys.readouterr().err


@pytest.mark.parametrize("more", ["", "--sequence-parallel"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_plan_of_tensor_peers_is_compiled_as_it_was_written(
    tp: int, more: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, plan = tmp_path / "pretrain.sh", tmp_path / "p.toml"
    script.write_text(MEGATRON.format(tp=tp, more=more))
    assert "wrote" in written(["import-plan", "--from", "megatron", str(script), "-o", str(plan)], capsys)
    read = load_plan(plan, load_model("llama-2-7b"))
    assert (read.tp, read.sequence_sharding) == (tp, tp == 1 or more != "")


def test_autotp_is_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, plan = tmp_path / "ds.json", tmp_path / "p.toml"
    config.write_text(json.dumps(DEEPSPEED | {"tensor_parallel": {"autotp_size": 2}}))
    words = ["import-plan", "--from", "deepspeed", str(config), "--clusters", "4", "--seq-len", "64", "-o", str(plan)]
    written(words, capsys)
    assert load_plan(plan, load_model("llama-2-7b")).sequence_sharding is False


LINES = st.text(st.characters(), max_size=12)


@settings(max_examples=50)
@given(cases(max_chunks=1, max_slices=1), LINES, LINES, st.sampled_from(("place-1f1b", "place-gpipe,allocate-ddr")))
def test_a_plan_under_any_words_reads_back(case: Case, head: str, model: str, pipeline: str) -> None:
    text = plan_text(case.plan, pipeline, case.model, model, [head])  # reads it back itself, and raises where it cannot
    text.encode()
    assert "pp = " in text


@given(
    st.sampled_from(machine_names()),
    st.from_regex(r"[A-Za-z0-9._-]+", fullmatch=True),
    st.text(),
    st.floats(1e-12, 1e20),
)
def test_a_machine_of_any_words_reads_back(base: str, name: str, source: str, value: float) -> None:
    machine = load_machine(base)
    launch = evolve(machine.constants["launch"], value=value, source=source.encode("utf-8", "replace").decode() or "x")
    changed = evolve(machine, name=name, constants={**machine.constants, "launch": launch})
    assert parse_machine(machine_text(changed, "m.toml"), file="m.toml") == changed


@settings(max_examples=25, deadline=None)
@given(cases(max_layers=3, max_stages=2), st.text(st.characters(exclude_characters="\n"), min_size=1, max_size=9))
def test_a_schedule_that_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, case: Case, odd: str) -> None:
    path = str(tmp_path_factory.mktemp("schedule") / "x.rtir")
    module = evolve(case.module(), pipeline=f"place-1f1b{odd}")
    with suppress(DiagnosticError):
        api.save(module, path)
    if Path(path).exists():
        assert print_module(api.load_schedule(path)) == print_module(module)
    else:
        with pytest.raises(DiagnosticError, match="RT011"):
            api.save(module, path)


def test_no_schedule_or_program_is_written_that_is_too_large_to_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = api.compile(MODEL, make_plan(MODEL), passes="place-1f1b,allocate-ddr")
    for what, made, name in (("schedule", module, "m.rtir"), ("program", api.emit(module), "m.rtx")):
        path = tmp_path / name
        api.save(made, str(path))
        size = len(path.read_bytes())
        monkeypatch.setitem(files.MOST_BYTES, what, size)
        api.save(made, str(path))
        monkeypatch.setitem(files.MOST_BYTES, what, size - 1)
        with pytest.raises(DiagnosticError, match=f"cannot write the {what}.*the most that is read"):
            api.save(made, str(path))
        assert [each.name for each in tmp_path.iterdir()] == [path.name]
        path.unlink()


def test_a_schedule_table_that_lint_would_not_read_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The longest actions of a table are longer than those that tell beforehand whether it may be too long."""
    path = tmp_path / "t.csv"
    words = ["schedule", "--kind", "1f1b", "--stages", "16", "--micro-batches", "200"]
    written([*words, "-o", str(path)], capsys)
    size = len(path.read_bytes())
    assert main(["lint", str(path)]) == 0
    path.unlink()
    most = {**files.MOST_BYTES, "schedule table": size - 1}
    monkeypatch.setattr(schedule_table, "MOST_BYTES", most)
    assert main([*words, "-o", str(path)]) == 2
    assert "longer than 'ratrainc lint' reads" in capsys.readouterr().err
    assert not path.exists()
    monkeypatch.setattr(schedule_table, "MOST_BYTES", most | {"schedule table": size})
    written([*words, "-o", str(path)], capsys)


def wrong_word(value: object) -> str:
    return repr(value)


def no_program(data: bytes, file: str) -> Any:
    fail("RT080", f"'{file}' is damaged")


BROKEN: dict[str, tuple[list[str], str, list[tuple[Any, str, Any]]]] = {
    "import-plan": (
        ["import-plan", "--from", "megatron", "{folder}/pretrain.sh", "-o", "{out}.toml"],
        "cuts = ()",
        [(sys.modules["ratrain.ratrain_ir.config.plan_keys"], "toml_value", wrong_word)],
    ),
    "compile": (
        ["compile", *TINY, "-o", "{out}.rtir"],
        "model",
        [(sys.modules["ratrain.ratrain_ir.text.printer"], "_value", lambda value: f"<{value}>")],
    ),
    "opt": (
        ["opt", "{folder}/tiny.rtir", "--passes", "lifetime", "-o", "{out}.rtir"],
        "model",
        [(sys.modules["ratrain.ratrain_ir.text.printer"], "_value", lambda value: f"<{value}>")],
    ),
    "compile a program": (
        ["compile", *TINY, "-o", "{out}.rtx"],
        "is damaged",
        [(rtx, "parse_program", no_program)],
    ),
    "schedule": (
        ["schedule", "--kind", "1f1b", "--stages", "2", "--micro-batches", "2", "-o", "{out}.csv"],
        "0F0;0F1",
        [(schedule_table, "torch_csv_row", lambda row: ";".join(map(str, row)))],
    ),
    "export": (
        ["export", "{folder}/tiny.rtir", "--format", "megatron", "-o", "{out}.sh"],
        "micro-batch-size",
        [(exporting, "toml_comment", lambda text: "--micro-batch-size x")],
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("inputs")
    (place / "pretrain.sh").write_text(MEGATRON.format(tp=2, more=""))
    assert main(["compile", *TINY, "-o", str(place / "tiny.rtir")]) == 0
    return place


@pytest.mark.parametrize("kind", BROKEN)
def test_a_writer_that_goes_wrong_writes_nothing(
    kind: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words, named, breaks = BROKEN[kind]
    words = [word.format(folder=folder, out=tmp_path / "out") for word in words]
    for module, name, value in breaks:
        monkeypatch.setattr(module, name, value)
    assert main(words) == 1
    said = capsys.readouterr().err
    assert "RT011" in said
    assert named in said
    assert "wrote" not in said.replace("nothing was written", "")
    assert not list(tmp_path.iterdir())


def test_a_machine_that_is_not_read_as_it_is_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = load_machine("mt3000")
    original = toml_text.toml_value

    def rounded(value: object) -> str:
        if isinstance(value, dict) and isinstance(value.get("value"), float):
            return original(value | {"value": value["value"] * 0.5})
        return original(value)

    writer = sys.modules["ratrain.targets.machine.writer"]
    for wrong, named in ((wrong_word, "is not TOML"), (rounded, "is read back as something else")):
        monkeypatch.setattr(writer, "toml_value", wrong)
        with pytest.raises(DiagnosticError, match="RT011") as caught:
            write_machine(machine, str(tmp_path / "m.toml"))
        assert named in str(caught.value)
        assert not list(tmp_path.iterdir())

"""`compile --schedule-file`: the schedule of another runtime under a plan, and where a table goes that is given to another command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ratrain.ratrain_ir.text.parser import parse_module
from ratrain.ratrain_ir.text.printer import print_module
from ratrain.ratrain_ir.verifier import check
from ratrain.ratrainc.cli import main

TABLES = Path(__file__).parents[2] / "data/torch_schedules"
ZBV = (TABLES / "zbv-2x2-lowered.csv").read_text()
GPIPE = "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n"
CONFIG = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 5,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
BATCH = "[batch]\nmicro_batch_size = 1\nseq_len = 4\n"
SAID = "pp = 2\nchunks = 2\nlayout = 'vee'\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a model, `m.json`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.json").write_text(json.dumps(CONFIG))
    return tmp_path


def compiled(folder: Path, parallel: str, batch: str, *words: str) -> int:
    """The exit code of `compile` of a plan to `x.rtir`."""
    (folder / "p.toml").write_text(f"[parallel]\ndp = 2\n{parallel}{BATCH}{batch}")
    return main(["compile", "--model", "m.json", "--plan", "p.toml", "-o", "x.rtir", *words])


def test_it_is_a_pipeline_with_that_placement_under_a_plan_of_that_shape(folder: Path) -> None:
    (folder / "t.csv").write_text(ZBV)
    assert compiled(folder, "", "", "--schedule-file", "t.csv") == 0
    taken = (folder / "x.rtir").read_text()
    passes = "place-from-file{path=t.csv},joint-order,allocate-ddr"
    assert compiled(folder, SAID, "micro_batches = 4\n", "--passes", passes) == 0
    assert (folder / "x.rtir").read_text() == taken
    plan = parse_module(taken).plan
    assert (plan.pp, plan.micro_batches, plan.chunks, plan.layout, len(plan.cuts)) == (2, 4, 2, "vee", 3)
    assert plan.schedule == "zb-v"


def test_a_table_goes_before_the_passes_of_a_strategy_or_a_pipeline(folder: Path) -> None:
    (folder / "t.csv").write_text(ZBV)
    for words in (("--strategy", "full-save"), ("--passes", "recompute{policy=none},allocate-ddr"), ("--passes", "")):
        assert compiled(folder, "", "", "--schedule-file", "t.csv", *words) == 0
        text = (folder / "x.rtir").read_text()
        pipeline = parse_module(text).pipeline
        assert pipeline.partition(",")[0] == "place-from-file{path=t.csv}"


@pytest.mark.parametrize(
    ("parallel", "batch", "words"),
    [
        ("chunks = 1\n", "", ["chunks = 2", "the plan has", "chunks = 1"]),
        ("chunks = 2\nlayout = 'loop'\n", "", ['layout = "vee"', 'the plan has layout = "loop"']),
        ("pp = 3\n", "", ["the table has pp = 2", "the plan has pp = 3"]),
        ("", "micro_batches = 8\n", ["the table has micro_batches = 4", "the plan has micro_batches = 8"]),
    ],
)
def test_a_plan_that_says_another_shape_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], parallel: str, batch: str, words: list[str]
) -> None:
    (folder / "t.csv").write_text(ZBV)
    rest = {"pp": "pp = 2\n"} if "pp" not in parallel else {}
    shape = "".join(rest.values()) + parallel
    assert compiled(folder, shape, batch or "micro_batches = 4\n", "--schedule-file", "t.csv") == 1
    error = capsys.readouterr().err
    assert "t.csv:1:1: error[RT010]" in error
    assert 'it fits a plan with pp = 2, micro_batches = 4, chunks = 2, layout = "vee"' in error
    assert all(word in error for word in words)
    assert not (folder / "x.rtir").exists()


@pytest.mark.parametrize(
    ("said", "lengths"), [("", (2, 2)), ("slices = [3, 1]\n", (3, 1)), ("slices = 2\n", (2, 2)), ("slices = 4\n", None)]
)
def test_slices_of_a_table_are_even_where_the_plan_leaves_them_out(
    folder: Path, capsys: pytest.CaptureFixture[str], said: str, lengths: tuple[int, ...] | None
) -> None:
    (folder / "t.csv").write_text("0F0.0,0F0.1,0B0.1,0B0.0\n1F0.0,1F0.1,1B0.1,1B0.0\n")
    words = ("--schedule-file", "t.csv", "--passes", "")
    if lengths is None:
        assert compiled(folder, "pp = 2\n", f"micro_batches = 1\n{said}", *words) == 1
        assert "the table has slices = 2, but the plan has slices = 4" in capsys.readouterr().err
    else:
        assert compiled(folder, "", said, *words) == 0
        assert parse_module((folder / "x.rtir").read_text()).plan.slices == lengths


def test_cuts_for_fewer_chunks_than_the_table_has_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "t.csv").write_text(ZBV)
    assert compiled(folder, "cuts = [2]\n", "", "--schedule-file", "t.csv") == 1
    assert "1 cuts are given, but 4 chunks have 3" in capsys.readouterr().err
    assert compiled(folder, "cuts = [2, 3, 4]\n", "", "--schedule-file", "t.csv") == 0
    assert parse_module((folder / "x.rtir").read_text()).plan.cuts == (2, 3, 4)


def test_a_plan_that_names_the_schedule_agrees_with_the_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "t.csv").write_text(GPIPE)
    assert compiled(folder, "schedule = 'gpipe'\n", "", "--schedule-file", "t.csv") == 0
    assert compiled(folder, "schedule = '1f1b'\n", "", "--schedule-file", "t.csv") == 1
    error = capsys.readouterr().err
    assert "t.csv:2:5: error[RT064]" in error
    assert "1F1B has '1B0' where rank 1 of the table has '1F1'" in error


@pytest.mark.parametrize(
    "name",
    ["a b.csv", "50 %, {both} \"'`\\.csv", "tab\t.csv", "größe\n.csv", b"\xff.csv".decode("utf-8", "surrogateescape")],
)
@pytest.mark.sampled(2)
def test_a_path_of_any_characters_is_in_the_text_and_back(folder: Path, name: str) -> None:
    (folder / name).write_text(GPIPE)
    assert compiled(folder, "", "", "--schedule-file", name) == 0
    text = (folder / "x.rtir").read_text()
    module = parse_module(text)
    assert print_module(module) == text
    check(module)
    # the pipeline of the text can be run again
    (folder / "again.rtir").write_text(text)
    assert compiled(folder, "pp = 2\n", "micro_batches = 2\n", "--passes", module.pipeline) == 0
    assert (folder / "x.rtir").read_text() == text


def test_what_was_compiled_needs_the_table_no_more(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "t.csv").write_text(ZBV)
    assert compiled(folder, "", "", "--schedule-file", "t.csv") == 0
    (folder / "t.csv").unlink()
    assert main(["verify", "x.rtir"]) == 0
    assert main(["simulate", "x.rtir"]) == 0
    capsys.readouterr()
    assert main(["explain", "x.rtir"]) == 0
    assert "no levers are tried: the pipeline 'place-from-file{path=t.csv}," in capsys.readouterr().err


def test_what_does_not_fit_is_told_with_changes_that_do(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "t.csv").write_text(ZBV)
    assert compiled(folder, "", "", "--schedule-file", "t.csv", "--capacity", "1MB") == 1
    error = capsys.readouterr().err
    assert "RT053" in error
    assert "no single change and no pair of changes that was tried fits" in error


@pytest.mark.parametrize("command", ["compile", "verify", "simulate"])
@pytest.mark.parametrize("name", ["t.csv", "T a.CSV"])
def test_a_table_given_as_a_schedule_points_to_the_right_command(
    folder: Path, capsys: pytest.CaptureFixture[str], command: str, name: str
) -> None:
    (folder / name).write_text(GPIPE)
    assert main([command, name]) == 1
    error = capsys.readouterr().err
    word = name if " " not in name else f"'{name}'"
    assert "'ratrainc compile --model M --plan P.toml -o X." in error
    assert f" --schedule-file {word}'" in error
    assert f"'ratrainc lint {word}'" in error

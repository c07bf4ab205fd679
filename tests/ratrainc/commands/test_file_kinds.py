"""A file of another kind than a command reads: it is said what it is, and what takes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrainc.cli import main
from ratrain.ratrainc.commands.words.file_kinds import refuse_wrong_kind
from ratrain.ratrainc.running.examples import example_path


@pytest.mark.parametrize(
    ("words", "way_out"),
    [
        ("compile tiny.json --plan tiny.toml", "'ratrainc compile --model tiny.json --plan P.toml -o X.rtir'"),
        ("compile tiny.toml", "'ratrainc compile --model M --plan tiny.toml -o X.rtir'"),
        ("compile s.csv", "--schedule-file s.csv"),
        ("compile x.rtx", "give the .rtir that it was compiled from"),
        ("opt x.rtx --passes allocate-ddr", "give the .rtir that it was compiled from"),
        ("diff a.rtir s.csv", "'ratrainc lint s.csv'"),
        ("export tiny.json", "'ratrainc compile --model tiny.json"),
        ("verify page.html", "'ratrainc compile --model M --plan P.toml -o X.rtx' makes one"),
        ("run s.csv --steps 1", "--schedule-file s.csv"),
        ("simulate tiny.json", "'ratrainc compile --model tiny.json"),
        ("report tiny.toml -o a.html", "--plan tiny.toml"),
        ("explain s.csv", "'ratrainc lint s.csv'"),
        ("generate x.rtx --prompt a", "'ratrainc run x.rtx --save DIR'"),
        ("export-weights x.toml -o w", "'ratrainc run X.rtx --save DIR' writes one"),
        ("lint x.rtir", "'ratrainc verify x.rtir'"),
        ("alloc x.rtir --capacity 1MiB", "'ratrainc opt x.rtir --passes allocate-ddr'"),
        ("model tiny.toml", "--plan tiny.toml"),
        ("machines x.rtir", "'ratrainc machines' lists those"),
        ("compile --model tiny.json --plan tiny.json", "a model is given with --model tiny.json"),
        ("simulate x.rtx --machine tiny.json", "'ratrainc machines' lists those"),
    ],
)
def test_a_file_of_another_kind_leads_to_the_command_that_takes_it(
    capsys: pytest.CaptureFixture[str], words: str, way_out: str
) -> None:
    assert main(words.split()) == 1
    shown = capsys.readouterr()
    assert way_out in " ".join(shown.err.split())
    assert not shown.out


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("schedule", "x.rtir"),
        ("schedule", "/dev/stdin"),
        ("schedule", "x.txt"),
        ("program", "X.RTX"),
        ("model", "qwen2.5-32b"),
        ("data", "tokens.csv"),
        ("machine", "mt3000"),
        ("", ""),
    ],
)
def test_right_kinds_and_endings_that_say_nothing_are_left_to_the_reader(kind: str, path: str) -> None:
    refuse_wrong_kind(kind, path)


def test_paths_stay_one_word_in_what_is_to_be_typed() -> None:
    with pytest.raises(DiagnosticError) as refused:
        refuse_wrong_kind("schedule", "my model.json")
    assert "--model 'my model.json'" in str(refused.value.diagnostics[0].help)


MACHINE = 'base = "cpu"\nname = "mine"\n'
PLAN = example_path("tiny.toml").read_text()
CONTENTS = {
    "mine.toml": MACHINE,
    "bare.toml": "ddr_capacity = 1\n",
    "flat.toml": "pp = 2\n",
    "plan.toml": PLAN,
    "job.toml": "[training]\nsteps = 1\n",
    "part.toml": '[optimizer]\nlr = 1e-3\n[job]\ndump_folder = "x"\n',
    "x.yaml": "a: 1\n",
    "ds.json": '{"train_batch_size": 8}',
    "run.jsonl": '{"step": 1, "loss": 2.5}\n',
}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "compile --model tiny.json --plan mine.toml",
            "a machine (TOML), not a plan (TOML) help: a machine is given with --machine mine.toml",
        ),
        ("compile --model tiny.json --plan bare.toml", "a machine is given with --machine bare.toml"),
        ("compile --model tiny.json --plan p.toml --machine plan.toml", "a plan is given with --plan plan.toml"),
        ("compile --model tiny.json --plan p.toml --machine flat.toml", "a plan is given with --plan flat.toml"),
        ("compile --model tiny.json --plan job.toml", "'ratrainc import-plan --from torchtitan job.toml -o P.toml'"),
        ("verify mine.toml", "'ratrainc compile --model M --plan P.toml -o X.rtx --machine mine.toml' compiles for it"),
        ("verify plan.toml", "'ratrainc compile --model M --plan plan.toml -o X.rtx' compiles a plan"),
        ("model mine.toml", "a machine is given with --machine mine.toml"),
        ("model ds.json", "'ratrainc import-plan --from deepspeed ds.json -o P.toml'"),
        (
            "report run.jsonl -o a.html",
            "the log of a run (JSON lines), not a schedule (.rtir) or program (.rtx) help: 'ratrainc watch run.jsonl'",
        ),
        ("generate mine.toml --prompt a", "'ratrainc run X.rtx --save DIR' writes one"),
        *(
            (f"{command} {name}", said)
            for command in ("import-plan", "import-plan --from torchtitan", "fit", "fit --beside x.yaml")
            for name, said in (
                ("plan.toml", "'ratrainc compile --model M --plan plan.toml -o X.rtx' compiles it"),
                ("mine.toml", "--plan P.toml -o X.rtx --machine mine.toml' compiles for it"),
                ("x.rtx", "'ratrainc explain x.rtx' says what it needs"),
                ("x.rtir", "'ratrainc explain x.rtir' says what it needs"),
            )
        ),
    ],
)
def test_content_tells_apart_files_of_one_ending_and_one_error_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in CONTENTS.items():
        Path(name).write_text(text)
    assert main(words.split()) == 1
    shown = " ".join(capsys.readouterr().err.split())
    assert said in shown
    assert shown.count("error[") == 1


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("machine", "mine.toml"),
        ("plan", "plan.toml"),
        ("plan", "flat.toml"),
        ("settings", "job.toml"),
        ("settings", "part.toml"),
        ("settings", "ds.json"),
        ("settings", "x.yaml"),
    ],
)
def test_what_is_wanted_by_its_content_is_taken(tmp_path: Path, kind: str, name: str) -> None:
    path = tmp_path / name
    path.write_text(CONTENTS[name])
    refuse_wrong_kind(kind, str(path))


@pytest.mark.parametrize("name", ["page.pdf", "r.png", "x.HTM5"])
def test_a_report_is_not_written_under_an_ending_of_another_form(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    assert main(["report", "x.rtx", "-o", str(tmp_path / name)]) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert "name a .html or .htm or .svg" in shown
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize(
    ("words", "way_out"),
    [
        ("report a.rtx b.rtx -o c.html", "--against b.rtx"),
        ("run a.rtx b.jsonl --steps 1", "--data b.jsonl"),
        ("simulate a.rtx m.toml", "--machine m.toml"),
        ("verify a.rtx b", None),
    ],
)
def test_a_file_too_many_leads_to_the_option_that_takes_it(
    capsys: pytest.CaptureFixture[str], words: str, way_out: str | None
) -> None:
    assert main(words.split()) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert (
        "unexpected extra argument" in said if way_out is None else f"one file too many: give it as {way_out}" in said
    )

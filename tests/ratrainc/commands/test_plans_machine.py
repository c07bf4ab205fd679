"""A plan's file names the machine that it was made for: commands that are given none take that one, and say so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratrain import api
from ratrain.ratrain_ir.config.fields import Report
from ratrain.ratrain_ir.config.made_for import MadeFor, take_made_for
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.support.toml_text import parse_toml
from ratrain.ratrain_ir.text.plan_file import made_for, parse_plan
from ratrain.ratrainc.choices.machine_choice import MachineChoice
from ratrain.ratrainc.choices.plan_choices import PlanChoice
from ratrain.ratrainc.cli import main
from ratrain.ratrainc.running.examples import example_path
from ratrain.targets.machine.machine import load_machine

TINY = str(example_path("tiny.json"))
PLAN = Path(example_path("tiny.toml")).read_text("utf-8")
OWN = 'base = "mt3000"\nname = "elsewhere"\n'
ASKED = ["plan", "--model", TINY, "--clusters", "2", "--global-batch", "8", "--seq-len", "64", "--quick"]


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plans").mkdir()
    Path("machines").mkdir()
    Path("machines/own.toml").write_text(OWN, "utf-8")


def compiled_on(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, str]:
    """Compile; return the machine that the schedule carries, and what is said on stderr."""
    capsys.readouterr()
    assert main(["compile", "--model", TINY, *words, "-o", "x.rtir"]) == 0
    found = capsys.readouterr()
    line = next(line for line in found.out.splitlines() if line.startswith("capacity of a stage on "))
    target = api.load_schedule("x.rtir").target
    assert target is not None
    assert line.startswith(f"capacity of a stage on {target.name}: ")
    return target.name, found.err


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ([], "mt3000"),
        (["--machine", "h100-node"], "h100-node"),
        (["--machine", "machines/own.toml"], "elsewhere"),
        (["--capacity", "12GiB"], "mt3000-12GiB"),
        (["--machine", "machines/own.toml", "--capacity", "12GB"], "elsewhere-12GB"),
    ],
)
def test_a_written_plan_compiles_for_its_machine_from_any_folder(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str], name: str
) -> None:
    assert main([*ASKED, *words, "-o", "plans/P.toml"]) == 0
    text = Path("plans/P.toml").read_text("utf-8")
    assert "--plan plans/P.toml" in text, "its comments say the name that it was written to"
    assert compiled_on(capsys, "--plan", "plans/P.toml")[0] == name
    monkeypatch.chdir("plans")
    found, said = compiled_on(capsys, "--plan", "P.toml")
    assert found == name
    assert ("which P.toml was made for" in said) == (words != [])
    assert api.compile(TINY, "P.toml").target.name == name  # type: ignore[union-attr]
    if "h100" not in name:  # whose groups the others do not have
        assert api.compile(TINY, "P.toml", machine=load_machine("cpu")).target.name == "cpu"  # type: ignore[union-attr]


@pytest.mark.parametrize("how", [["--keep", "2"], ["--pareto", "clusters"], ["--smallest"], ["--what-if", "ddr=9GB"]])
def test_every_way_to_write_a_plan_names_its_machine(how: list[str]) -> None:
    words = [word for word in ASKED if word != "--quick" or "--smallest" not in how]
    if "--smallest" in how:
        at = words.index("--global-batch")
        del words[at : at + 2]
    assert main([*words, "--machine", "machines/own.toml", *how, "-o", "plans/P.toml"]) == 0
    written = [path for path in Path("plans").glob("P*.toml") if not path.name.endswith(".machine.toml")]
    assert written
    for path in written:
        found = made_for(path)
        assert found is not None
        wanted = "plans/P.machine.toml" if "--what-if" in how else "machines/own.toml"
        assert found.machine == wanted
        assert f"--plan {path}" in path.read_text("utf-8")


def test_another_machine_is_stated_and_the_same_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    Path("P.toml").write_text(f'[made_for]\nmachine = "machines/own.toml"\ncapacity = "12GiB"\n\n{PLAN}', "utf-8")
    name, said = compiled_on(capsys, "--plan", "P.toml", "--machine", "h100-node")
    assert name == "h100-node"
    assert said == "the machine is 'h100-node', of --machine; P.toml was made for 'machines/own.toml' with 12GiB\n"
    own = str(Path("machines/own.toml").resolve())
    _, said = compiled_on(capsys, "--plan", "P.toml", "--machine", own, "--capacity", "12GiB")
    assert "was made for" not in said
    name, said = compiled_on(capsys, "--plan", "P.toml", "--capacity", "9GiB")
    assert name == "elsewhere-9GiB", "the machine is the plan's, the capacity the command's"


@pytest.mark.parametrize(
    "command", [["compare", "--strategies", "ratrain"], ["scale", "--clusters", "4"], ["doctor"], ["plan"]]
)
def test_every_command_that_reads_a_plan_takes_its_machine(
    capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    Path("P.toml").write_text(f'[made_for]\nmachine = "machines/own.toml"\n\n{PLAN}', "utf-8")
    words = ["--like", "P.toml", *ASKED[1:]] if command == ["plan"] else ["--model", TINY, "--plan", "P.toml"]
    assert main([*command, *words]) in {0, 1}
    found = capsys.readouterr()
    assert "the machine is 'machines/own.toml', which P.toml was made for" in found.err
    if command != ["doctor"]:
        assert "elsewhere" in found.out


def test_functions_take_the_machine_of_a_plans_file() -> None:
    Path("P.toml").write_text(f'[made_for]\nmachine = "machines/own.toml"\n\n{PLAN}', "utf-8")
    assert api.compare(TINY, "P.toml", strategies=["ratrain"]).machine == "elsewhere"
    assert api.scale(TINY, [4], plan="P.toml").machine == "elsewhere"
    like = PlanChoice(like="P.toml")
    assert api.plan(TINY, 2, 8, seq_len=64, quick=True, plans=like).answer.request.machine.name == "elsewhere"
    assert api.plan(TINY, 2, 8, seq_len=64, quick=True, plans=like, machine="cpu").answer.request.machine.name == "cpu"


def test_the_plan_of_a_pipe_brings_its_machine(capsys: pytest.CaptureFixture[str]) -> None:
    for machine in ("h100-node", str(Path("machines/own.toml").resolve())):
        reading, writing = os.pipe()
        os.write(writing, f'[made_for]\nmachine = "{machine}"\n\n{PLAN}'.encode())
        os.close(writing)
        assert compiled_on(capsys, "--plan", f"/dev/fd/{reading}")[0] == load_machine(machine).name
        os.close(reading)


@pytest.mark.parametrize(
    ("table", "message", "way_out"),
    [
        ('made_for = "mt3000"', "a section is expected", "[made_for]"),
        ("[made_for]", "'made_for.machine' must be the name of a machine or a file: it is missing", "mt3000"),
        ("[made_for]\nmachine = 3", "got 3", "mt3000"),
        ('[made_for]\nmachin = "mt3000"', 'the key "machin" is not known in [made_for]', "'machine'"),
        ('[made_for]\nmachine = "mt3000"\ncapacity = "20G"', "'made_for.capacity' must be bytes", "GiB"),
        ('[made_for]\nmachine = "mt3000"\ncapacity = -1', "'made_for.capacity' must be bytes", ""),
        ('[madefor]\nmachine = "mt3000"', 'the section "madefor" is not known', "made_for"),
        ('[made_for]\nmachine = "mt300"', "'mt300' is neither a machine", "mt3000"),
        ('[made_for]\nmachine = "gone.toml"', "gone.toml", ""),
    ],
)
def test_a_wrong_table_is_refused_at_its_place(
    capsys: pytest.CaptureFixture[str], table: str, message: str, way_out: str
) -> None:
    Path("P.toml").write_text(f"{table}\n\n{PLAN}", "utf-8")
    assert main(["compile", "--model", TINY, "--plan", "P.toml"]) == 1
    said = capsys.readouterr().err
    assert message in said
    assert way_out in said
    assert "Traceback" not in said


NAMES = st.sampled_from(
    ["mt3000", "h100-node", "own.toml", "a/b.toml", "../up.toml", "/abs/m.toml", "./odd", 'q"x.toml']
)


@given(NAMES, st.none() | st.integers(1, 1 << 45), st.sampled_from(["P.toml", "x/P.toml", "../P.toml", "/y/P.toml"]))
def test_what_is_written_is_read_back(name: str, capacity: int | None, plan_file: str) -> None:
    said = MadeFor(name, capacity)
    found = take_made_for(parse_toml(said.text(plan_file)), Report())
    assert found is not None
    back = found.beside(plan_file)
    assert os.path.abspath(back.machine) == os.path.abspath(name)  # noqa: PTH100 - resolve() would follow links
    assert back.capacity == capacity
    plan = parse_plan(said.text(plan_file) + PLAN, file=plan_file, model=None)
    assert plan == parse_plan(PLAN, file=plan_file, model=None)


def test_a_machine_that_is_in_no_file_stands_in_the_command_alone() -> None:
    from attrs import evolve

    found = api.plan(TINY, 2, 8, seq_len=64, quick=True, machine=evolve(load_machine("mt3000"), name="made-here"))
    text = found.text()
    assert "[made_for]" not in text
    assert "--machine made-here" in text


def test_a_choice_that_names_a_machine_keeps_it() -> None:
    Path("P.toml").write_text(f'[made_for]\nmachine = "gone.toml"\n\n{PLAN}', "utf-8")
    assert MachineChoice("cpu").for_plan("P.toml") == MachineChoice("cpu"), "the plan's own is not even loaded"
    with pytest.raises(DiagnosticError, match=r"gone\.toml"):
        MachineChoice().for_plan("P.toml").load()

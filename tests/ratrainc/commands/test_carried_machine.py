"""The machine that a schedule or a program was compiled for goes along in it: no command needs to be told again, and none takes another."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain import api
from ratrain.ratrain_ir.module import Module, TargetInfo
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.text.parser import parse_module
from ratrain.ratrain_ir.text.printer import print_module
from ratrain.ratrainc.cli import commands, main
from ratrain.ratrainc.running.examples import example_path
from ratrain.targets.machine.constants import Constant, is_whole
from ratrain.targets.machine.machine import Machine, load_machine, machine_names, parse_machine
from ratrain.targets.machine.op_table import MeasuredOp, OpTable
from ratrain.targets.machine.record import compiled_for, machine_digest, machine_info
from ratrain.targets.mt3000.tiles.calls import tiles_of
from ratrain.targets.program.rtx import parse_program, program_bytes, read_program, write_program
from tests.end_to_end.tiny_runs import make_program

if TYPE_CHECKING:
    from ratrain.targets.program.program import Program

MODEL, PLAN = str(example_path("tiny.json")), str(example_path("tiny.toml"))
ROOT = Path(__file__).resolve().parents[3]
OWN = """base = "mt3000"
name = "elsewhere"
update_engine = "host"
[launch]
value = 1.5e-5
unit = "s"
certainty = "assumed"
source = "// a \\"remark\\" } \\u2028 with everything"
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A schedule and a program for one's own machine, whose file is gone."""
    folder = tmp_path_factory.mktemp("own")
    machine = folder / "own.toml"
    machine.write_text(OWN)
    found = {kind: str(folder / f"own.{kind}") for kind in ("rtir", "rtx")}
    for path in found.values():
        assert main(["compile", "--model", MODEL, "--plan", PLAN, "--machine", str(machine), "-o", path]) == 0
    machine.unlink()
    return found


# -- every command that takes a schedule or a program --------------------------------------------------------------------

WORDS: dict[str, list[list[str]]] = {
    "compile": [["-o", "{out}.rtx"], ["-o", "{out}.rtir"], ["--json"]],
    "opt": [["--passes", "lifetime", "-o", "{out}.rtir"]],
    "diff": [[]],
    "verify": [[]],
    "export": [["--format", "torch-csv"]],
    "explain": [["--time"], ["--seconds", "0"]],
    "simulate": [["--json"], ["--one-core"], ["--cores", "2"]],
    "report": [["-o", "{out}.html"]],
    "run": [["--steps", "1", "--threads", "1"]],
    "disasm": [["--stage", "0", "--engine", "host"], ["--routines"]],
    "doctor": [["--json"]],
}
LAUNCHERS = {"launch"}
"""Commands that start `run` in processes of their own."""


def commands_with_files() -> list[tuple[str, str, int]]:
    """Each command with the kind and number of files that it takes, by what its own usage says."""
    context = click.Context(commands)
    found = []
    for name in commands.list_commands(context):
        command = commands.get_command(context, name)
        assert command is not None
        arguments = [p for p in command.params if isinstance(p, click.Argument)]
        taken = [a.metavar or "" for a in arguments if re.search(r"\.rti?[rx]", a.metavar or "")]
        kinds = [kind for kind in ("rtir", "rtx") if any(f".{kind}" in metavar for metavar in taken)]
        found += [(name, kind, len(taken)) for kind in kinds]
    return found


CASES = [
    pytest.param([name, *["{file}"] * count, *words], kind, id=" ".join((name, kind, *words)))
    for name, kind, count in commands_with_files()
    for words in WORDS.get(name, [])
]


def test_the_table_of_commands_is_complete() -> None:
    assert {name for name, _, _ in commands_with_files()} == {*WORDS, *LAUNCHERS}


@pytest.mark.parametrize(("words", "kind"), CASES)
@pytest.mark.sampled(3)
def test_no_command_needs_to_be_told_the_machine_again(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], kind: str
) -> None:
    filled = [word.format(file=files[kind], out=tmp_path / "out") for word in words]
    assert main(filled) == 0, capsys.readouterr().err
    for output in tmp_path.iterdir():
        if output.suffix in (".rtir", ".rtx"):
            assert machine_in(str(output)) == parse_machine(OWN, file="own.toml")


def machine_in(path: str) -> Machine:
    if path.endswith(".rtx"):
        return api.machine_of(read_program(path))
    return api.machine_for(api.load_schedule(path), None)


def simulated(path: str, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[dict[str, object], str]:
    capsys.readouterr()
    assert main(["simulate", path, "--json", *words]) == 0
    shown = capsys.readouterr()
    found: dict[str, object] = json.loads(shown.out)
    return found, shown.err


# -- what is carried is the machine, exactly -----------------------------------------------------------------------------


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    """Machines with other numbers, names, sources and measured ops than those that are built in."""
    base = load_machine(draw(st.sampled_from((*machine_names(), str(ROOT / "examples" / "mt3000-nodes.toml")))))
    changed = draw(st.sets(st.sampled_from(sorted(base.constants)), max_size=3))
    texts = st.text(min_size=1, max_size=10)
    constants = {
        key: Constant(
            constant.value / (1 if is_whole(key) else draw(st.floats(1.01, 9))), constant.unit, "assumed", draw(texts)
        )
        for key, constant in base.constants.items()
        if key in changed and key != "clock" and not (key == "fp16_peak" and base.cost == "tiles")
    }
    seconds = st.floats(1e-9, 1e3)
    ops = draw(st.lists(st.builds(MeasuredOp, texts.filter(lambda t: "*" not in t), seconds, seconds), max_size=3))
    measured = {"cost": "table", "table": OpTable(tuple(ops))} if ops else {}
    name = draw(st.sampled_from((base.name, "mt3000", "my.machine-2")))
    return evolve(base, name=name, constants=base.constants | constants, **measured)


@settings(max_examples=20, deadline=None)
@given(machines())
def test_a_machine_goes_along_exactly(machine: Machine) -> None:
    """Through the records, the text and the container; one that is built in by name alone."""
    info = machine_info(machine)
    found = compiled_for(info)
    assert machine_digest(found) == machine_digest(machine) == info.digest
    built_in = machine.name in machine_names() and info.digest == machine_digest(load_machine(machine.name))
    assert built_in == (not info.machine)
    module = small_module()
    module.target = info
    text = print_module(module)
    read = parse_module(text)
    assert read.target == info
    assert print_module(read) == text
    program = small_program()
    program.target, program.machine_digest, program.machine_text = info.name, info.digest, info.machine
    assert parse_program(program_bytes(program), "a.rtx").info == evolve(info, capacity_bytes=program.capacity_bytes)


@cache
def small_module() -> Module:
    """A golden file; as it says nothing of its machine but the name, it stands for those of older versions too."""
    return parse_module((ROOT / "tests" / "golden" / "allocated.rtir").read_text())


@cache
def small_program() -> Program:
    return make_program()


@pytest.mark.parametrize("name", [*machine_names(), str(ROOT / "examples" / "mt3000-nodes.toml")])
def test_every_number_and_name_is_in_the_digest_and_no_source(name: str) -> None:
    machine = load_machine(name)
    other_sources = {key: evolve(c, source="other", certainty="assumed") for key, c in machine.constants.items()}
    assert machine_digest(evolve(machine, constants=other_sources)) == machine_digest(machine)
    digests = {machine_digest(machine)}
    for key, constant in machine.constants.items():
        more = machine.constants | {key: evolve(constant, value=constant.value + 1)}
        less = {other: c for other, c in machine.constants.items() if other != key}
        digests |= {machine_digest(evolve(machine, constants=changed)) for changed in (more, less)}
    ops = OpTable((MeasuredOp("a", 1.0, 1.0),))
    engine = next(e for e in type(machine.update_engine) if e is not machine.update_engine)
    for change in (
        {"name": "x"},
        {"cost": "other"},
        {"update_engine": engine},
        {"table": ops},
        {"group_names": ("x",)},
    ):
        digests.add(machine_digest(evolve(machine, **change)))
    assert len(digests) == 2 * len(machine.constants) + 6


def test_a_machine_with_the_name_of_one_that_is_built_in_is_not_taken_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m.toml").write_text(OWN.replace('"elsewhere"', '"mt3000"').replace("1.5e-5", "0.5"))
    for kind in ("rtx", "rtir"):
        own, plain = str(tmp_path / f"own.{kind}"), str(tmp_path / f"plain.{kind}")
        compiling = ["compile", "--model", MODEL, "--plan", PLAN]
        assert main([*compiling, "--machine", str(tmp_path / "m.toml"), "-o", own]) == 0
        assert main([*compiling, "-o", plain]) == 0
        slow, quick = (simulated(path, capsys)[0]["step_seconds"] for path in (own, plain))
        assert isinstance(slow, float)
        assert isinstance(quick, float)
        assert slow > 10 * quick


# -- headers that contradict themselves ----------------------------------------------------------------------------------

Change = Callable[[TargetInfo], TargetInfo]
CONTRADICTIONS: dict[str, tuple[Change, str]] = {
    "another number": (lambda t: evolve(t, machine=t.machine.replace("1.5e-05", "2.5e-05")), "their digests differ"),
    "another engine": (lambda t: evolve(t, machine=t.machine.replace('"host"', '"compute"')), "their digests differ"),
    "another digest": (lambda t: evolve(t, digest="0" * 64), "their digests differ"),
    "another name": (lambda t: evolve(t, name="other"), "its machine is 'elsewhere'"),
    "a name that is built in": (lambda t: evolve(t, name="mt3000"), "its machine is 'elsewhere'"),
    "another name inside": (lambda t: evolve(t, machine=t.machine.replace("elsewhere", "other")), "its machine is 'other'"),
    "too large a capacity": (lambda t: evolve(t, capacity_bytes=t.capacity_bytes + 1), "has a ddr_capacity of"),
    "a character that cannot be shown": (
        lambda t: evolve(t, machine=t.machine.replace('"host"', '"host" # \u0085')),
        "cannot be shown|expected a line of text",
    ),
    "no TOML": (lambda t: evolve(t, machine=t.machine.replace("=", "", 1)), "this is not TOML"),
    "no machine": (lambda t: evolve(t, machine='name = "elsewhere"'), r"the machine needs \[ddr_capacity\]"),
    "another base": (lambda t: evolve(t, machine='base = "nothing"'), "base is a machine that is built in"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["rtir", "rtx"])
@pytest.mark.parametrize("case", CONTRADICTIONS)
@pytest.mark.sampled(2)
def test_a_header_that_contradicts_itself_is_refused(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str, kind: str
) -> None:
    """By whatever reads the file, even what needs no machine; --machine does not make it sound."""
    change, words = CONTRADICTIONS[case]
    path = str(tmp_path / f"a.{kind}")
    rewrite(files[kind], path, change)
    for command in (["verify"], ["simulate"], ["simulate", "--machine", "mt3000"]):
        assert main([command[0], path, *command[1:]]) == 1
        shown = capsys.readouterr().err
        # what a program's header cannot hold at all is refused before its meaning is looked at
        assert f"error[{'RT080' if kind == 'rtx' and 'shown' in case else 'RT065'}]" in shown
        assert re.search(words, shown)
        assert "help:" in shown or case in ("no TOML", "no machine", "another base")
        assert kind == "rtx" or f"{path}:5" in shown


def rewrite(source: str, path: str, change: Change) -> None:
    """A file with another target in its header."""
    if path.endswith(".rtx"):
        program = read_program(source)
        info = change(program.info)
        program.target, program.capacity_bytes = info.name, info.capacity_bytes
        program.machine_digest, program.machine_text = info.digest, info.machine
        Path(path).write_bytes(program_bytes(program))  # as `write_program` would not write it
        return
    module = api.load_schedule(source)
    assert module.target is not None
    module.target = change(module.target)
    Path(path).write_text(print_module(module))


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        (r"  target .*\n", "", "RT005"),
        (r'digest = "[0-9a-f]*"', 'digest = "12"', "RT005"),
        (r'digest = "[0-9a-f]*"', "digest = 12", "RT005"),
        (r', digest = "[0-9a-f]*"', "", "RT005"),
        (r"(  machine \{\n(.*\n)*?  \}\n)", r"\1\1", "RT006"),
        (r"    \| cost", "    cost", "RT001"),
        (r"  machine \{\n", "  machine { ", "RT001"),
    ],
)
def test_headers_that_say_too_little_or_too_much(files: dict[str, str], old: str, new: str, code: str) -> None:
    text = Path(files["rtir"]).read_text(encoding="utf-8")
    changed = re.sub(old, new, text, count=1)
    assert changed != text
    with pytest.raises(DiagnosticError) as refused:
        parse_module(changed, file="a.rtir")
    assert [d.code for d in refused.value.diagnostics][:1] == [code]


def test_layout_around_the_machine_does_not_matter(files: dict[str, str]) -> None:
    text = Path(files["rtir"]).read_text(encoding="utf-8")
    module = parse_module(text)
    for changed in (
        text.replace("\n", "\r\n"),
        text.replace("    | ", "|"),
        text.replace("\n    | cost", "\n  // c\n\n // c\n\t| cost"),
    ):
        assert parse_module(changed).target == module.target


# -- files of other versions, and --machine ------------------------------------------------------------------------------


def without_record(info: TargetInfo) -> TargetInfo:
    return evolve(info, digest="", machine="")


@pytest.mark.parametrize("kind", ["rtir", "rtx"])
def test_files_from_before_machines_went_along(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """They are for the built-in machine of that name; one's own needs its file."""
    known, own = str(tmp_path / f"known.{kind}"), str(tmp_path / f"own.{kind}")
    rewrite(files[kind], known, lambda info: evolve(without_record(info), name="mt3000"))
    rewrite(files[kind], own, without_record)
    assert simulated(known, capsys) == simulated(known, capsys, "--machine", "mt3000")
    (tmp_path / "own.toml").write_text(OWN)
    assert main(["simulate", own]) == 1
    assert "give the machine's file with --machine" in capsys.readouterr().err
    found, _ = simulated(own, capsys, "--machine", str(tmp_path / "own.toml"))
    assert found == simulated(files[kind], capsys)[0]
    assert main(["verify", own]) == 1, "workspace is held against what the machine needs"
    assert main(["verify", own, "--machine", str(tmp_path / "own.toml")]) == 0


@pytest.mark.parametrize("kind", ["rtir", "rtx"])
def test_a_built_in_machine_of_another_version_is_not_exchanged_silently(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    path = str(tmp_path / f"a.{kind}")
    rewrite(files[kind], path, lambda info: evolve(info, name="mt3000", machine=""))
    assert main(["simulate", path]) == 1
    shown = capsys.readouterr().err
    assert "another 'mt3000' than the built-in one" in shown
    assert "--machine mt3000" in shown
    assert simulated(path, capsys, "--machine", "mt3000")[0]["machine"] == "mt3000"
    assert main(["verify", path]) == 1


@pytest.mark.parametrize("kind", ["rtir", "rtx"])
def test_another_machine_wins_and_is_stated(
    files: dict[str, str], capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    own, silent = simulated(files[kind], capsys)
    other, stated = simulated(files[kind], capsys, "--machine", "mt3000")
    assert (own["machine"], other["machine"]) == ("elsewhere", "mt3000")
    assert other["step_seconds"] != own["step_seconds"]
    assert not silent
    assert "the machine is 'mt3000', of --machine" in stated
    assert "compiled for 'elsewhere'" in stated


@pytest.mark.parametrize("kind", ["rtir", "rtx"])
def test_a_schedule_that_is_compiled_for_another_machine_is_for_that_one(
    files: dict[str, str], tmp_path: Path, kind: str
) -> None:
    path = str(tmp_path / f"a.{kind}")
    assert main(["compile", files["rtir"], "--machine", "mt3000", "-o", path]) == 0
    assert machine_in(path) == load_machine("mt3000")
    assert main(["verify", path]) == 0


@pytest.mark.parametrize(
    ("constant", "value", "code"), [("ddr_capacity", "8000000", "RT052"), ("collective_chunk", "9e6", "RT025")]
)
def test_a_schedule_is_not_compiled_for_a_machine_that_cannot_run_it(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], constant: str, value: str, code: str
) -> None:
    small = f'base = "mt3000"\nname = "small"\n{constant} = {{ value = {value}, unit = "bytes", certainty = "assumed", source = "s" }}\n'
    (tmp_path / "small.toml").write_text(small)
    assert main(["verify", files["rtir"], "--machine", str(tmp_path / "small.toml")]) == 1
    assert f"error[{code}]" in capsys.readouterr().err
    for kind in ("rtir", "rtx"):
        path = tmp_path / f"a.{kind}"
        assert main(["compile", files["rtir"], "--machine", str(tmp_path / "small.toml"), "-o", str(path)]) == 1
        assert f"error[{code}]" in capsys.readouterr().err
        assert not path.exists()


def test_a_capacity_beyond_the_machine_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", "--model", MODEL, "--plan", PLAN, "--passes", "allocate-ddr{capacity=40GiB}"]) == 1
    assert "the machine 'mt3000' has 20000000000" in capsys.readouterr().err


def test_diff_tells_machines_apart(files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = str(tmp_path / "other.rtir")
    assert main(["compile", files["rtir"], "--machine", "mt3000", "-o", other]) == 0
    capsys.readouterr()
    assert main(["diff", files["rtir"], other]) == 0
    shown = capsys.readouterr().out
    assert re.match(r"compiled for: elsewhere \(\w+\), \d+ bytes a stage -> mt3000 \(\w+\), ", shown)
    assert main(["diff", files["rtir"], files["rtir"]]) == 0
    assert capsys.readouterr().out == "no difference\n"


@pytest.mark.parametrize("kind", ["rtir", "rtx"])
def test_a_capacity_beyond_a_built_in_machine_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    path = str(tmp_path / f"a.{kind}")
    assert main(["compile", "--model", MODEL, "--plan", PLAN, "-o", path]) == 0
    rewrite(path, path, lambda info: evolve(info, capacity_bytes=1 << 50))
    assert main(["verify", path]) == 1
    assert "its machine has a ddr_capacity of 20000000000" in capsys.readouterr().err


def test_tiles_for_other_memories_than_the_machines_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "t.rtx")
    assert main(["compile", "--model", MODEL, "--plan", PLAN, "--machine", "mt3000-tiles", "-o", path]) == 0
    program = read_program(path)
    for number, routine in enumerate(program.routines):
        steps = tuple(
            evolve(
                step,
                on_chip={
                    part: evolve(tiles, memories=evolve(tiles.memories, gsm_bytes=1 << 49))
                    for part, tiles in tiles_of(step.on_chip).items()
                },
            )
            for step in routine.steps
        )
        program.routines[number] = evolve(routine, steps=steps)
    write_program(program, path)
    for command in (["verify", path], ["simulate", path], ["run", path, "--steps", "1", "--kernels", "tiled"]):
        assert main(command) == 1
        assert "for other on-chip memories than those of 'mt3000-tiles'" in capsys.readouterr().err


def test_another_capacity_makes_another_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is compiled under --capacity says so by its machine's name, carries that machine, and is no file of the mt3000."""
    schedule = str(tmp_path / "x.rtir")
    assert main(["compile", "--model", MODEL, "--plan", PLAN, "--capacity", "20GiB", "-o", schedule]) == 0
    assert "21474836480 bytes (21.47 GB, 20.00 GiB)" in capsys.readouterr().out
    carried = api.load_schedule(schedule).target
    assert carried is not None
    assert (carried.name, carried.capacity_bytes) == ("mt3000-20GiB", 20 << 30)
    assert compiled_for(carried).whole("ddr_capacity") == 20 << 30
    assert main(["compile", "--model", MODEL, "--plan", PLAN, "--capacity", "20GB", "-o", schedule]) == 0
    assert "20000000000 bytes (20.00 GB, 18.63 GiB)" in capsys.readouterr().out
    carried = api.load_schedule(schedule).target
    assert carried is not None
    assert carried.name == "mt3000"


@pytest.mark.parametrize("claim", ["place-1f1b,legalize,allocate-ddr", "recompute{policy=odd}", "place-gpipe"])
def test_a_pipeline_that_cannot_have_made_a_schedule_is_refused(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], claim: str
) -> None:
    text = Path(files["rtir"]).read_text(encoding="utf-8")
    line = next(line for line in text.splitlines() if line.startswith("  pipeline "))
    path = tmp_path / "claim.rtir"
    path.write_text(text.replace(line, f'  pipeline "{claim}"'))
    assert main(["verify", str(path)]) == 1
    shown = capsys.readouterr().err
    assert f'  pipeline "{claim}"' in shown
    assert "cannot have made it" in shown
    path.write_text(text.replace(f"{line}\n", ""))
    assert main(["verify", str(path)]) == 0, "deleting the line is a way out"


def test_the_machine_of_a_program_is_not_exchanged_where_it_is_known(
    files: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", files["rtx"], "--machine", "mt3000"]) == 2
    assert "leave it out" in capsys.readouterr().err

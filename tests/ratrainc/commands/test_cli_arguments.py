"""What a newcomer types wrong: nothing is taken silently, nothing is refused only after the work, nothing is left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from ratrain import api
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.text.printer import write_module
from ratrain.ratrainc.cli import commands, main
from ratrain.ratrainc.running import supervisor
from ratrain.ratrainc.running.examples import example_path
from ratrain.targets.program.rtx import write_program
from ratrain.targets.runtime.watch.liveness import Liveness
from ratrain.targets.runtime.watch.positions import RunFolder
from tests.end_to_end.tiny_runs import make_plan

MODEL, PLAN = str(example_path("tiny.json")), str(example_path("tiny.toml"))
SEARCH = ("--model", MODEL, "--clusters", "4")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("arguments") / "tiny.rtx")
    assert main(["compile", "--model", MODEL, "--plan", PLAN, "-o", path]) == 0
    return path


@pytest.mark.parametrize("number", ["nan", "inf"])
@pytest.mark.parametrize(
    "words",
    [
        ("plan", *SEARCH, "--global-batch", "16", "--seconds"),
        ("plan", *SEARCH, "--global-batch", "16", "--tokens"),
        ("scale", *SEARCH, "--seconds"),
        ("compare", *SEARCH, "--plan", "auto", "--global-batch", "16", "--seconds"),
        ("explain", "a.rtir", "--seconds"),
        ("alloc", "a.csv", "--capacity", "1MiB", "--seconds"),
        ("run", "a.rtx", "--hang-timeout"),
        ("run", "a.rtx", "--eval-every", "1", "--eval-fraction"),
    ],
)
def test_numbers_that_are_not_finite_are_refused(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], number: str
) -> None:
    assert main([*words, number]) == 2
    assert words[-1] in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ("run", "a.rtx", "--steps", "100000000000000000000"),
        ("run", "a.rtx", "--threads", "100000000000000000000"),
        ("quickstart", "--steps", "100000000000000000000"),
        ("scale", *SEARCH[:2], "--clusters", "4,8,4"),
        ("doctor", "--machine", "mt3000"),
        ("calibrate", "--profile", "p.json", "--fit", "launch"),
        ("simulate", "a.rtx", "--one-core", "--trace", "t.json"),
        ("simulate", "a.rtx", "--one-core", "--cores", "2"),
    ],
)
def test_words_that_cannot_be_meant_are_refused(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    assert main([*words]) == 2
    shown = capsys.readouterr()
    assert not shown.out
    assert "Error:" in shown.err


@pytest.mark.parametrize("words", [("run", "--steps", "1"), ("doctor",), ("simulate",), ("report", "-o", "r.html")])
def test_a_machine_that_is_not_there_is_refused(
    program: str, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    assert main([words[0], program, *words[1:], "--machine", "nosuch.toml"]) == 1
    assert "nosuch.toml" in capsys.readouterr().err


def test_the_only_machine_that_begins_so_is_suggested(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('base = "h100"\nname = "mine"\n')
    for place in ("h100", str(tmp_path / "mine.toml")):
        assert main(["machines", place]) == 1
        assert "did you mean 'h100-node'?" in capsys.readouterr().err


INPUTS = {
    *("--model", "--plan", "--machine", "--data", "--eval-data", "--tokenizer", "--init", "--init-adapter", "--resume"),
    *("--chat-template", "--rows", "--mpirun", "--like", "--times", "--schedule-file", "--links"),
    *(
        "fit --beside",
        "import-plan --beside",
        "calibrate --profile",
        "plan --what-if",
        "run --scratch",
        "report --against",
        "run --log-to",
        "finetune --log-to",
        "simulate --routing",
    ),
}
"""Options that look as if they named a place to write to and do not, of any command or of one."""
PLACE = re.compile(r"DIR|FILE|PATH|\.\w")
"""What the metavar of an option looks like that names a file or directory."""
NEEDED = {
    "plan": ("--model", "missing", "--clusters", "4", "--global-batch", "16"),
    "scale": ("--model", "missing", "--clusters", "4"),
    "calibrate": ("--rows", "missing.csv", "--fit", "launch"),
    "compile": ("--model", "missing", "--plan", "missing.toml"),
    "alloc": ("missing.csv", "--capacity", "1MiB"),
    "schedule": ("--kind", "1f1b", "--stages", "2", "--micro-batches", "2"),
    "opt": ("missing.rtir", "--passes", "missing"),
    "quickstart": (),
    "validate": ("missing.csv", "--markdown"),
    "import-plan": ("missing.sh", "--from", "megatron"),
    "fit": (),
    "finetune": ("--model", "missing", "--data", "missing.jsonl"),
}
"""What a command needs beside the option, where that is not just a file: as little as it refuses at the first look."""


def output_options() -> Iterator[tuple[str, click.Option]]:
    """Every option of every command that names a place to write to: all that name a place and are not known to be read."""
    context = click.Context(commands)
    for name in commands.list_commands(context):
        command = commands.get_command(context, name)
        assert command is not None
        for option in command.params:
            names_place = isinstance(option, click.Option) and PLACE.search(option.metavar or "")
            if names_place and not {option.opts[-1], f"{name} {option.opts[-1]}"} & INPUTS:
                yield name, option


OUTPUTS = [pytest.param(name, option, id=f"{name} {option.opts[-1]}") for name, option in output_options()]


def test_the_places_that_commands_write_to_are_found() -> None:
    found = {parameter.id for parameter in OUTPUTS}
    assert found >= {"run --save", "run --log", "run --run-dir", "plan --output", "opt --dump-dir", "quickstart --keep"}
    assert len(found) >= 18


@pytest.mark.parametrize(("name", "option"), OUTPUTS)
@pytest.mark.parametrize("where", ["/proc/nope", "nowhere"])
def test_places_that_cannot_be_written_are_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, option: click.Option, where: str
) -> None:
    if where == "nowhere":  # a file stands where a directory must be
        (tmp_path / "file").write_text("x")
        where = str(tmp_path / "file" / "out")
    before = sorted(tmp_path.iterdir())
    suffix = ".rtir" if name == "compile" else ".svg" if option.opts[-1] == "--plot" else ""
    more = ("--eval-every", "1") if option.opts[-1] == "--save-best" else ()
    assert main([name, *NEEDED.get(name, ("missing.rtx",)), *more, option.opts[-1], where + suffix]) == 1
    shown = capsys.readouterr()
    assert "cannot write" in shown.err
    assert where + suffix in shown.err
    assert "missing" not in shown.err
    assert not shown.out
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("words", [("--save", "s", "--save-every", "2"), ("--save", "s")])
def test_a_series_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    (tmp_path / "file").write_text("x")
    assert main(["run", "missing.rtx", words[0], str(tmp_path / "file" / "s"), *words[2:]]) == 1
    assert "cannot write" in capsys.readouterr().err


@pytest.fixture
def _mpi4py_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as `launch` looks: what the tests start in place of ranks does without."""
    monkeypatch.setattr("ratrain.ratrainc.console.extras.is_installed", lambda _package: True)


@pytest.mark.usefixtures("_mpi4py_is_there")
@pytest.mark.parametrize("code", [0, 1])
def test_launch_leaves_no_folder_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    launcher = tmp_path / "mpirun"
    launcher.write_text(f"#!/bin/sh\nexit {code}\n")
    launcher.chmod(0o755)
    places = tmp_path / "temporary"
    places.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(places))
    assert main(["launch", "-n", "1", "--mpirun", str(launcher), "a.rtx"]) == code
    assert not list(places.iterdir())


@pytest.mark.usefixtures("_mpi4py_is_there")
@pytest.mark.parametrize("ending", ["rtx", "rtir"])
def test_launch_starts_as_many_processes_as_there_are_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ending: str
) -> None:
    """Another number is refused before any process begins, in words of `launch`."""
    monkeypatch.setenv("COLUMNS", "1000")
    launcher, file, said = tmp_path / "mpirun", str(tmp_path / f"a.{ending}"), tmp_path / "said"
    launcher.write_text(f'#!/bin/sh\n[ "$1" = --version ] || echo "$2" > {said}\n')
    launcher.chmod(0o755)
    module = api.compile(MODEL, make_plan(pp=3, dp=2, micro_batches=4))
    write_module(module, file) if ending == "rtir" else write_program(api.emit(module), file)
    assert main(["launch", "-n", "3", "--mpirun", str(launcher), file]) == 1
    refused = capsys.readouterr().err
    assert f"'{file}' has 6 ranks, and -n 3 would start 3 processes" in refused
    assert f"help: ratrainc launch -n 6 {file} ..." in refused
    assert not said.exists()
    for words in ([], ["-n", "6"]):
        assert main(["launch", *words, "--mpirun", str(launcher), file]) == 0
        assert said.read_text() == "6\n"
        said.unlink()
    assert main(["launch", "--mpirun", str(launcher), "missing.rtx"]) == 1
    assert "RT002" in capsys.readouterr().err


@pytest.mark.usefixtures("_mpi4py_is_there")
@pytest.mark.parametrize(("code", "how"), [("1", "status 1"), ("9", "status 9"), ("$(kill -9 $$)", "signal 9")])
def test_a_launcher_that_fails_without_a_word_is_spoken_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], code: str, how: str
) -> None:
    launcher = tmp_path / "mpirun"
    launcher.write_text(f'#!/bin/sh\n[ "$1" = --version ] || exit {code}\n')
    launcher.chmod(0o755)
    assert main(["launch", "-n", "1", "--mpirun", str(launcher), "a.rtx"]) == 1
    shown = capsys.readouterr().err
    assert f"mpirun' {'ended with' if code.isdigit() else 'was ended by'} {how} before any rank had begun" in shown


@pytest.mark.parametrize("words", [("a.rtx", "-n", "4"), ("a.rtx", "-n4"), ("-n", "4", "a.rtx", "--mpirun=x")])
def test_options_of_launch_stand_before_the_file(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", *words]) == 2
    assert f"{'--mpirun' if len(words) > 3 else '-n'} stands before FILE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"), [("junk", "cannot be started"), ("#!/bin/sh\nexec sleep 60\n", "did not end within")]
)
def test_launchers_that_are_none_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    launcher = tmp_path / "mpirun"
    launcher.write_text(text)
    launcher.chmod(0o755)
    monkeypatch.setattr(supervisor, "_SAY_SECONDS", 0.5)
    assert main(["launch", "-n", "1", "--mpirun", str(launcher), "a.rtx"]) == 1
    shown = capsys.readouterr().err
    assert "RT093" in shown
    assert words in shown


def test_a_position_that_cannot_be_read_does_not_keep_the_supervisor_from_its_end(tmp_path: Path) -> None:
    (tmp_path / "rank-0.position").write_text("junk")
    with pytest.raises(DiagnosticError):
        supervisor.read_positions(str(tmp_path))
    watching = supervisor.Supervisor(RunFolder(str(tmp_path)), None)
    assert watching._tell_ranks(signal.SIGKILL, (Liveness.ALIVE,)) == 0


@pytest.mark.full
def test_doctor_says_that_nothing_is_compiled() -> None:
    words = [sys.executable, "-m", "ratrain", "doctor", "--json"]
    variables = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    found = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 0, found.stderr
    assert "NUMBA_DISABLE_JIT" in json.loads(found.stdout)["facts"]["kernel cache"]["remark"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", [("strategies",), ("simulate", "--json")])
@pytest.mark.sampled(3)
def test_output_that_finds_no_room_is_no_internal_error(program: str, words: tuple[str, ...], unbuffered: str) -> None:
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    file = (program,) if words[0] == "simulate" else ()
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "ratrain", words[0], *file, *words[1:]]
        found = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False, env=env
        )
    assert found.returncode == 1
    assert found.stderr == "error: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_longer_than_a_file_may_be_is_no_internal_error(tmp_path: Path, unbuffered: str) -> None:
    script = 'ulimit -f 1; exec "$0" -m ratrain schedule --kind gpipe --stages 1 --micro-batches 2000 > "$1"'
    command = ["/bin/sh", "-c", script, sys.executable, str(tmp_path / "table.csv")]
    env = {
        **os.environ,
        "PYTHONUNBUFFERED": unbuffered,
        "PYTHONDONTWRITEBYTECODE": "1",
    }  # the limit cuts those files too
    found = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60, check=False, env=env)
    assert found.returncode == 1
    assert found.stderr == "error: the output cannot be written: File too large\n"


def test_json_for_a_closed_output_is_no_internal_error(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["simulate", program, "--json"]) == 0


def test_a_pipe_is_written_under_the_name_it_is_given(program: str, tmp_path: Path) -> None:
    """Where the output is a pipe, /dev/stdout leads to a name that no folder has."""
    script = 'exec "$0" -m ratrain simulate "$1" --json --trace /dev/stderr 2>&1 >/dev/null | cat > "$2"'
    trace = tmp_path / "trace.json"
    subprocess.run(["/bin/sh", "-c", script, sys.executable, program, str(trace)], timeout=60, check=True)
    assert json.loads(trace.read_text())["traceEvents"]


def test_an_option_is_understood_by_the_name_it_had_and_shown_by_the_one_it_has(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", *SEARCH, "--smallest", "--explain-losers"]) == 2
    assert "--explain-rejected does not go with --smallest" in " ".join(capsys.readouterr().err.split())
    assert main(["plan", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--explain-rejected" in shown
    assert "--explain-losers" not in shown

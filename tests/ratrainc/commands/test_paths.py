"""Every path a command takes, with every kind of path that leads nowhere good: a diagnostic, never an internal error or a loss.

The cases are made from the commands themselves: a new command or option is among them, or fails here for want of usual words.
"""

from __future__ import annotations

import builtins
import io
import json
import os
import stat
from collections.abc import Callable
from errno import EACCES
from pathlib import Path
from typing import Any

import click
import pytest
from attrs import frozen

from ratrain.ratrain_ir.support.files import MOST_BYTES
from ratrain.ratrainc.cli import commands, main
from ratrain.ratrainc.commands.words.options import FilePath, Result
from ratrain.ratrainc.running import training
from ratrain.targets.runtime.training import utilisation

CONFIG = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
PLAN = "[parallel]\npp = 1\ndp = 1\n[batch]\nmicro_batch_size = 1\nmicro_batches = 1\nseq_len = 8\n"
MODEL = {"model": "tiny.json", "plan": "plan.toml"}
SEARCH = {"model": "tiny.json", "effort_seconds": "0"}
USUAL: dict[str, dict[str, str]] = {
    "examples": {"folder": "copied"},
    "completion": {"shell": "bash"},
    "quickstart": {"steps": "1"},
    "compile": MODEL,
    "opt": {"file": "a.rtir", "pipeline": "lifetime"},
    "diff": {"before": "a.rtir", "after": "a.rtir"},
    "verify": {"file": "a.rtx"},
    "lint": {"file": "table.csv"},
    "export": {"file": "a.rtir"},
    "fit": {"file": "ds.json", "model": "tiny.json", "devices": "1", "seq_len": "8", "memory": "10GB"},
    "import-plan": {"file": "ds.json", "framework": "deepspeed", "asked_clusters": "1", "asked_seq_len": "8"},
    "schedule": {"kind": "1f1b", "stages": "1", "micro_batches": "1"},
    "explain": {"file": "a.rtir"},
    "simulate": {"file": "a.rtx"},
    "report": {"file": "a.rtx", "output": "out.html"},
    "model": {"model": "tiny.json"},
    "plan": SEARCH | {"size_clusters": "1", "size_global_batch": "1", "size_seq_len": "8"},
    "scale": SEARCH | {"clusters": "1", "seq_len": "8"},
    "calibrate": {"rows": "rows.csv", "names": "launch"},
    "validate": {"tables": "validation.csv"},
    "compare": MODEL,
    "run": {
        "file": "a.rtx",
        "data_paths": "text.txt",
        "settings_steps": "1",
        "settings_execution_kernels": "reference",
    },
    "finetune": {
        "choice_model": "hf",
        "choice_data_paths": "text.txt",
        "choice_output": "tuned",
        "choice_schedule_steps": "1",
        "choice_schedule_seq_len": "64",
        "choice_dtype": "f32",
    },
    "generate": {"path": "checkpoint", "prompt_tokens": "1", "asked_tokens": "1", "asked_kernels": "reference"},
    "watch": {"runs": "log.jsonl"},
    "launch": {"ranks": "1", "mpirun": "/bin/true", "file": "a.rtx"},
    "postmortem": {"directory": "positions"},
    "export-weights": {"checkpoint": "checkpoint", "output": "out"},
    "disasm": {"file": "a.rtx"},
    "doctor": {"file": "a.rtx"},
    "alloc": {"file": "problem.csv", "capacity": "1KiB"},
    "machines": {"machine": "machine.toml"},
    "strategies": {},
    "passes": {},
}
"""What each command needs, by parameter."""
HERE = {"rows": None, "names": None, "device": "cpu", "kernels": "reference"}
WITH: dict[tuple[str, str], dict[str, str | None]] = {
    ("compile", "schedule"): {"model": None, "plan": None},
    ("doctor", "model"): {"file": None, "plan": "plan.toml"},
    ("doctor", "plan"): {"file": None, "model": "tiny.json"},
    ("calibrate", "profile"): {"rows": None, "names": None},
    ("calibrate", "model"): HERE | {"plan": "plan.toml"},
    ("calibrate", "plan"): HERE | {"model": "tiny.json"},
    ("calibrate", "links"): HERE,
    ("validate", "output"): {"markdown": "given"},
    ("import-plan", "model"): {"file": "trl.yaml", "framework": None},
    ("compare", "like"): {
        "plan": "auto",
        "clusters": "1",
        "global_batch": "1",
        "seq_len": "8",
        "effort_seconds": "0",
        "names": "ratrain",
    },
    ("run", "settings_evaluation_paths"): {"settings_evaluation_every": "1"},
    ("run", "settings_saving_best"): {"settings_evaluation_every": "1"},
}
"""What goes with a parameter, or does not."""
NO_PATHS = {
    "data_chat_key",
    *(f"choice_data_{key}_key" for key in ("text", "prompt", "completion", "chat")),
    "choice_adapting_targets",
    "choice_ram_bytes",
    "choice_device",
    "settings_execution_ram_bytes",
    "strategy",
    "strategy_name",
    "passes",
    "pipeline",
    "print_ir_after",
    "plans_strategy",
    "names",
    "name",
}
NO_PATHS |= {
    "format_",
    "memory",
    "max_shard_size",
    "data_completion_key",
    "settings_execution_device",
    "device",
    "data_eos",
    "data_prompt_key",
    "data_text_key",
    "asked_eos",
    "asked_given",
    "given",
    "prompt_text",
    "prompt_chat",
    "prompt_tokens",
    "plans_zero_levels",
    "plans_peers",
    "plans_contexts",
    "plans_expert_ranks",
    "plans_schedules",
    "routing",
    "questions_what_ifs",
    "clusters",
    "engine",
    "capacity",
    "target_capacity",
}
ENDINGS = {"schedule": ".rtir", "program": ".rtx", "picture": ".svg", "data": ".txt", "machine": ".toml"}
FOLDERS = {
    ("run", "settings_saving_directory"),
    ("run", "settings_watch_folder"),
    ("quickstart", "keep"),
    ("export-weights", "output"),
    ("opt", "dump_dir"),
    ("examples", "folder"),
    ("finetune", "choice_output"),
    ("run", "settings_saving_best"),
}
FOLDERS |= {
    ("finetune", "choice_model"),
    ("run", "settings_start_checkpoint"),
    ("run", "settings_start_weights"),
    ("postmortem", "directory"),
    ("export-weights", "checkpoint"),
    ("generate", "path"),
}


def loaded() -> dict[str, click.Command]:
    """The commands by name."""
    context = click.Context(commands)
    found = {name: commands.get_command(context, name) for name in commands.list_commands(context)}
    return {name: command for name, command in found.items() if command is not None}


COMMANDS = loaded()
PATHS = [
    (name, parameter)
    for name, command in COMMANDS.items()
    for parameter in command.params
    if isinstance(parameter.type, FilePath)
]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_text_that_is_no_path_is_known(name: str) -> None:
    """A new option of any text is an `InputFile`, a `Result`, or listed as something else."""
    texts = {parameter.name for parameter in COMMANDS[name].params if parameter.type is click.STRING}
    assert texts <= NO_PATHS


def words(name: str, **values: str | None) -> list[str]:
    """A command with its usual words, some of them replaced."""
    chosen = {key: value for key, value in (USUAL[name] | values).items() if value is not None}
    options: list[str] = []
    arguments: list[str] = []
    assert chosen.keys() <= {parameter.name for parameter in COMMANDS[name].params}, "a parameter has another name"
    for parameter in COMMANDS[name].params:
        if parameter.name in chosen:
            value = chosen[parameter.name]
            if isinstance(parameter, click.Argument):
                arguments.append(value)
            else:
                is_flag = isinstance(parameter, click.Option) and parameter.is_flag
                options += [parameter.opts[0], *([] if is_flag else [value])]
    return [name, *options, *arguments]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound file of every kind."""
    folder = tmp_path_factory.mktemp("paths")
    (folder / "tiny.json").write_text(json.dumps(CONFIG))
    (folder / "plan.toml").write_text(PLAN)
    (folder / "ds.json").write_text('{"train_batch_size": 1}')
    (folder / "trl.yaml").write_text(
        "model_name_or_path: tiny.json\ndataset_name: d\nmax_length: 8\nmax_steps: 9\nper_device_train_batch_size: 1\n"
    )
    (folder / "text.txt").write_text("some text to train on\n" * 40)
    (folder / "table.csv").write_text("0F0,0B0\n")
    (folder / "problem.csv").write_text("id,lower,upper,size\na,0,2,8\n")
    (folder / "rows.csv").write_text("model,plan,step_seconds\ntiny.json,plan.toml,1\n")
    (folder / "validation.csv").write_text(
        "id,class,split,model,plan,step_seconds\nr,step-time,held-out,tiny.json,plan.toml,1\n"
    )
    (folder / "machine.toml").write_text('base = "mt3000"\nname = "mine"\n')
    before = Path.cwd()
    os.chdir(folder)
    try:
        for output in ("a.rtir", "a.rtx"):
            assert main(words("compile", output=output)) == 0
        assert (
            main(
                words(
                    "run",
                    settings_saving_directory="checkpoint",
                    settings_watch_folder="positions",
                    outputs_profile="p.json",
                    outputs_log="log.jsonl",
                    threads="1",
                )
            )
            == 0
        )
        assert main(words("export-weights", output="hf")) == 0
    finally:
        os.chdir(before)
    return folder


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here needs the speed of this machine, nor a device read as far as a file may be long."""
    for module in (utilisation, training):
        monkeypatch.setattr(module, "measured_peak_flops", lambda: 1e9)
    for kind in MOST_BYTES:
        monkeypatch.setitem(MOST_BYTES, kind, 1 << 20)


# Bad paths


def locked(folder: Path, patch: pytest.MonkeyPatch) -> str:
    """A directory that may not be searched, also for the superuser."""
    place = folder / "locked"
    place.mkdir()

    def refusing(function: Callable[..., Any]) -> Callable[..., Any]:
        def checked(path: Any = ".", *rest: Any, **more: Any) -> Any:
            if isinstance(path, str | bytes | os.PathLike):
                whole = os.path.join(os.getcwd(), os.fsdecode(path))  # noqa: PTH109, PTH118 - what is patched
                if whole.startswith(f"{place}{os.sep}"):
                    raise PermissionError(EACCES, os.strerror(EACCES), path)
            return function(path, *rest, **more)

        return checked

    for module, names in (
        (os, ("stat", "lstat", "open", "mkdir", "scandir", "listdir", "readlink", "rename", "replace", "unlink")),
        (builtins, ("open",)),
        (io, ("open",)),
    ):
        for function in names:
            patch.setattr(module, function, refusing(getattr(module, function)))
    access = os.access
    patch.setattr(os, "access", lambda path, *rest: f"{place}" not in os.fsdecode(path) and access(path, *rest))
    return str(place / "inside")


def loop(folder: Path, patch: pytest.MonkeyPatch) -> str:
    """A link that leads to itself."""
    del patch
    (folder / "loop").symlink_to("loop")
    return str(folder / "loop")


def loop_on_the_way(folder: Path, patch: pytest.MonkeyPatch) -> str:
    """A path through such a link."""
    return f"{loop(folder, patch)}/inside"


def directory(folder: Path, patch: pytest.MonkeyPatch) -> str:
    """A directory, empty."""
    del patch
    (folder / "directory").mkdir()
    return str(folder / "directory")


def file_on_the_way(folder: Path, patch: pytest.MonkeyPatch) -> str:
    """A path through a file."""
    del patch
    (folder / "file").touch()
    return str(folder / "file" / "inside")


def pipe(folder: Path, patch: pytest.MonkeyPatch) -> str:
    """A named pipe that nobody writes to or reads from."""
    del patch
    os.mkfifo(folder / "pipe")
    return str(folder / "pipe")


BAD: dict[str, Callable[[Path, pytest.MonkeyPatch], str]] = {
    "locked": locked,
    "loop": loop,
    "loop on the way": loop_on_the_way,
    "directory": directory,
    "file on the way": file_on_the_way,
    "long name": lambda folder, _: str(folder / ("n" * 256)),
    "long path": lambda _, __: "n/" * 3000,
    "long word": lambda _, __: "n" * 5000,
    "zero byte": lambda folder, _: f"{folder}/a\0b",
    "missing": lambda folder, _: str(folder / "missing" / "too"),
    "pipe": pipe,
    "full": lambda _, __: "/dev/full",
    "empty": lambda _, __: "",
}
_READ = {
    ("finetune", "choice_model"),
    ("run", "settings_start_checkpoint"),
    ("run", "settings_start_weights"),
    ("export-weights", "checkpoint"),
    ("postmortem", "directory"),
}
WELL = {(name, parameter, "directory") for name, parameter in FOLDERS - _READ}
"""What is no bad path there: an empty directory for results."""
WELL |= {(name, parameter, "missing") for name, parameter in (("run", "settings_watch_folder"), ("quickstart", "keep"))}
WELL |= {
    (name, parameter, "missing")
    for name, parameter in (
        ("export-weights", "output"),
        ("opt", "dump_dir"),
        ("examples", "folder"),
        ("finetune", "choice_output"),
    )
}
WELL |= {
    (name, str(parameter.name), "pipe")
    for name, parameter in PATHS
    if isinstance(parameter.type, Result) and (name, parameter.name) not in FOLDERS
}
"""A result is written to a pipe: it waits for a reader."""
WELL |= {("compile", "suggest", "full")}
"""Of a plan that fits nothing is suggested, so nothing is written."""
NOT_OPENED = {("launch", "file")}
"""By the command itself."""


@frozen
class Case:
    """A parameter of a command, and a bad path for it."""

    name: str
    parameter: click.Parameter
    bad: str

    def __str__(self) -> str:
        return f"{self.name}-{self.parameter.name}-{self.bad}"


CASES = [
    Case(name, parameter, bad)
    for name, parameter in PATHS
    for bad in BAD
    if (name, parameter.name) not in NOT_OPENED and (name, parameter.name, bad) not in WELL
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.sampled(3)
def test_a_bad_path_ends_in_a_diagnostic(
    case: Case, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(good)
    before = sorted(os.listdir(good))  # noqa: PTH208 - the names alone
    with monkeypatch.context() as patch:
        path = BAD[case.bad](tmp_path, patch)
        ending = ENDINGS.get(kind_of(case.parameter), "")
        if ending and case.bad in ("locked", "loop on the way", "file on the way", "long name", "long word", "missing"):
            path += ending
        name = case.parameter.name or ""
        code = main(words(case.name, **{name: path}, **WITH.get((case.name, name), {})))
    shown = capsys.readouterr()
    assert code in (1, 2), (code, shown)
    assert "rror" in shown.err
    assert "internal error" not in shown.err
    assert "Traceback" not in shown.err
    assert sorted(os.listdir(good)) == before  # noqa: PTH208


# Results that would take the place of something else

FILES = {
    "schedule": "a.rtir",
    "program": "a.rtx",
    "model": "tiny.json",
    "plan": "plan.toml",
    "machine": "machine.toml",
    "rows": "rows.csv",
    "profile": "p.json",
    "log": "log.jsonl",
    "data": "text.txt",
    "tokenizer": "text.txt",
    "weights": "text.txt",
    "checkpoint": "text.txt",
    "table": "table.csv",
    "allocation problem": "problem.csv",
}
"""A file for what a command reads, by kind; that it is sound is not looked at before it is refused."""


def collisions() -> list[tuple[str, click.Parameter, click.Parameter, str]]:
    """Every result of every command with every source and every other result of it, and how the two are one file."""
    return [
        (name, result, other, how)
        for name, result in PATHS
        for owner, other in PATHS
        for how in ("name", "link", "hard link")
        if owner == name and other is not result and isinstance(result.type, Result)
        if how != "name" or isinstance(other.type, Result) or kind_of(other) != kind_of(result)
    ]


def kind_of(parameter: click.Parameter) -> str:
    """The kind of file a parameter names."""
    assert isinstance(parameter.type, FilePath)
    return parameter.type.kind


@pytest.mark.parametrize(
    ("name", "result", "other", "how"), collisions(), ids=lambda item: getattr(item, "name", str(item))
)
def test_no_result_replaces_what_the_command_reads_or_writes(
    good: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    result: click.Parameter,
    other: click.Parameter,
    how: str,
) -> None:
    monkeypatch.chdir(good)
    original = tmp_path / FILES.get(kind_of(other), "text.txt")
    original.write_text("precious")
    place = original
    if how != "name":
        place = tmp_path / "another.name"  # of another ending: it would become something else
        (place.symlink_to if how == "link" else place.hardlink_to)(original)
    values = {str(result.name): str(place), str(other.name): str(original)}
    code = main(words(name, **(WITH.get((name, str(other.name)), {}) | values)))
    shown = capsys.readouterr().err
    if code == 1 and (name, result.name) in FOLDERS:  # no file is a folder to write to, which is seen first
        assert "cannot write to the directory" in shown
    else:
        assert code == 2
        assert "is the same file as that of" in shown or "it is not replaced by a" in shown
    assert original.read_text() == "precious"


FILE_RESULTS = [
    (name, parameter)
    for name, parameter in PATHS
    if isinstance(parameter.type, Result) and (name, parameter.name) not in FOLDERS | {("run", "outputs_log")}
]
"""A log is not among them: what stands in its place is read before it is replaced."""


@pytest.mark.parametrize(("name", "result"), FILE_RESULTS, ids=lambda item: getattr(item, "name", str(item)))
def test_no_result_replaces_a_file_of_another_kind(
    good: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    result: Any,
) -> None:
    monkeypatch.chdir(good)
    for ending in {".rtir", ".toml", ".json", ".csv", ".safetensors", ".HTML"} - set(result.type.endings):
        precious = tmp_path / f"precious{ending}"
        precious.write_text("precious")
        link = tmp_path / f"link{ending}{result.type.endings[0]}"
        link.symlink_to(precious)
        if ending.lower() in result.type.endings:
            continue
        for place in (precious, link):
            assert main(words(name, **{result.name: str(place)})) == 2
            assert f"a {ending.lower()} file: it is not replaced by a" in capsys.readouterr().err
        assert precious.read_text() == "precious"


def test_a_result_replaces_a_file_of_an_ending_nobody_knows(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(good)
    place = tmp_path / "table.txt"
    for _ in range(2):
        assert main(words("schedule", output=str(place))) == 0
    assert place.read_text() == "0F0,0B0\n"


IN_PLACE = {
    "opt": {"file": "a.rtir", "output": "a.rtir"},
    "compile": {"schedule": "a.rtir", "model": None, "plan": None, "output": "a.rtir"},
    "alloc": {"file": "problem.csv", "output": "problem.csv"},
    "plan": {"plans_like": "plan.toml", "output": "plan.toml"},
}
"""Results of the kind of a source, which may stand in its place."""


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_result_may_replace_a_source_of_its_kind(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for file in ("a.rtir", "problem.csv", "plan.toml", "tiny.json"):
        (tmp_path / file).write_bytes((good / file).read_bytes())
    monkeypatch.chdir(tmp_path)
    place = tmp_path / str(IN_PLACE[name]["output"])
    place.chmod(0o640)
    before = place.stat().st_ino
    assert main(words(name, **IN_PLACE[name])) == 0
    assert place.stat().st_ino != before
    assert place.stat().st_size
    assert stat.S_IMODE(place.stat().st_mode) == 0o640


def test_devices_take_any_result(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(good)
    assert main(words("run", outputs_log="/dev/null", outputs_profile="/dev/null", threads="1")) == 0

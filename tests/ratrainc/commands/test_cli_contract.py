"""The command line's contract: options, exit codes, `--json` keys, what goes to stdout and what to stderr."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ratrain.ratrain_ir.support.diagnostics import CODES
from tests.ratrainc.commands.command_runs import CONFIG, Cli

ROOT = Path(__file__).resolve().parents[3]
PIPELINE = "place-1f1b,lifetime,insert-prefetch,recompute,bucket-grad-sync,allocate-ddr"


COMPILE = ("compile", "--model", "tiny.json", "--plan", "plan.toml")


# compile


def test_compile_reports_what_each_stage_needs(cli: Cli) -> None:
    found = cli.good(*COMPILE, "--json").json()
    assert found["capacity_bytes"] == 20000000000
    assert len(found["stages"]) == 2
    for stage in found["stages"]:
        assert 0 < stage["peak_live_bytes"] <= stage["arena_bytes"] <= found["capacity_bytes"]
        assert stage["ops"] > 0


def test_compile_writes_what_the_ending_says(cli: Cli, tmp_path: Path) -> None:
    schedule, program = tmp_path / "x.rtir", tmp_path / "x.rtx"
    for path in (schedule, program):
        assert str(path) in cli.good(*COMPILE, "-o", str(path)).out
        assert cli.good(*COMPILE, "-o", str(path), "--json").json()["output"] == str(path)
    assert schedule.read_text("utf-8").startswith("rtir 2\nmodule @tiny level allocated {\n")
    assert program.read_bytes().startswith(b"RATRAINX")
    assert program.read_bytes() == (cli.folder / "a.rtx").read_bytes(), "equal inputs give equal bytes"


def test_a_schedule_compiles_to_the_program_it_was_made_with(cli: Cli, tmp_path: Path) -> None:
    cli.good("compile", "a.rtir", "-o", str(tmp_path / "b.rtx"))
    assert (tmp_path / "b.rtx").read_bytes() == (cli.folder / "a.rtx").read_bytes()


def test_a_placed_schedule_is_allocated_on_the_way(cli: Cli, tmp_path: Path) -> None:
    found = cli.good("compile", "placed.rtir", "-o", str(tmp_path / "b.rtx"), "--json").json()
    assert found["passes"] == ["insert-release", "legalise", "allocate-ddr"]
    assert found["level"] == "allocated"
    cli.good("verify", str(tmp_path / "b.rtx"))


@pytest.mark.parametrize("name", ["ratrain", "baseline-1f1b", "full-save"])
def test_every_strategy_compiles(cli: Cli, name: str) -> None:
    assert cli.good(*COMPILE, "--strategy", name, "--verify-each", "--json").json()["level"] == "allocated"


def test_a_pipeline_can_be_typed(cli: Cli) -> None:
    found = cli.good(*COMPILE, "--passes", PIPELINE, "--verify-each", "--json").json()
    names = [text.partition("{")[0] for text in found["passes"]]
    wanted = PIPELINE.split(",")
    assert [name for name in names if name in wanted] == wanted


@pytest.mark.parametrize(
    "words",
    [
        ("compile",),
        ("compile", "--model", "tiny.json"),
        ("compile", "a.rtir", "--plan", "plan.toml"),
        ("compile", "a.rtir", "--strategy", "ratrain"),
        (*COMPILE, "--strategy", "ratrain", "--passes", "place-1f1b"),
        (*COMPILE, "-o", "x.bin"),
        (*COMPILE, "--unknown"),
        ("opt", "a.rtir"),
        ("verify",),
        ("simulate",),
        ("run",),
        ("run", "a.rtx", "--steps", "0"),
        ("run", "a.rtx", "--steps", "ten"),
        ("run", "a.rtx", "--kernels", "slow"),
        ("run", "a.rtx", "--init", "w", "--resume", "c"),
        ("run", "a.rtx", "--order", "random"),
        ("disasm", "a.rtx", "--engine", "warp"),
        ("disasm", "a.rtx", "--stage", "2"),
        ("compil",),
        ("--nonsense",),
    ],
)
def test_usage_errors_exit_with_2(cli: Cli, words: tuple[str, ...]) -> None:
    found = cli(*words)
    assert found.code == 2
    assert not found.out
    assert found.err


def test_a_misspelt_command_is_guessed(cli: Cli) -> None:
    assert "did you mean 'compile'?" in cli("compil").err


@pytest.mark.parametrize(
    "words",
    [
        ("compile", "--model", "no-such-model", "--plan", "plan.toml"),
        (*COMPILE, "--strategy", "no-such-strategy"),
        (*COMPILE, "--passes", "no-such-pass"),
        (*COMPILE, "--passes", "allocate-ddr{capacity=1MiB}"),
        (*COMPILE, "--passes", "place-1f1b,allocate-ddr,place-1f1b"),
        (*COMPILE, "--machine", "no-such-machine"),
        (*COMPILE, "-o", "no-such-folder/x.rtx"),
        ("opt", "a.rtir", "--passes", "place-1f1b"),
        ("opt", "a.rtir", "--passes", "place-1f1b{", "-o", "x.rtir"),
        ("opt", "placed.rtir", "--passes", "", "--print-ir-after", "no-such-pass"),
        ("verify", "missing.rtir"),
        ("simulate", "missing.rtx"),
        ("simulate", "a.rtx", "--machine", "plan.toml"),
        ("run", "a.rtx", "--data", "missing.txt"),
        ("run", "a.rtx", "--resume", "missing"),
        ("run", "a.rtx", "--init", "missing"),
        ("run", "a.rtx", "--save", "."),
        ("run", "a.rtx", "--steps", "1", "--log", "."),
        ("run", "a.rtx", "--steps", "1000000", "--plot", "no-such-folder/loss.svg"),
        ("run", "a.rtx", "--eval-every", "1", "--eval-data", "missing.txt"),
        ("run", "a.rtx", "--data", "text.txt", "--eval-every", "1", "--eval-fraction", "0.01"),
        ("run", "a.rtx", "--data", "text.txt", "--tokenizer", "missing.json"),
        ("disasm", "plan.toml"),
    ],
)
def test_faulty_inputs_exit_with_1_and_a_code(cli: Cli, words: tuple[str, ...]) -> None:
    before = {path: path.stat().st_mtime_ns for path in cli.folder.rglob("*")}
    found = cli(*words)
    assert found.code == 1
    assert any(f"error[{code}]" in found.err for code in CODES), found.err
    assert {path: path.stat().st_mtime_ns for path in cli.folder.rglob("*")} == before


def test_diagnostics_are_one_json_object_too(cli: Cli) -> None:
    found = cli("compile", "--model", "no-such-model", "--plan", "plan.toml", "--json")
    assert found.code == 1
    assert [item["code"] for item in found.json()["diagnostics"]] == ["RT004"]
    assert "error[RT004]" in found.err


@pytest.mark.parametrize(
    "words",
    [
        ("compile", "--model", "tiny.json", "--json"),
        ("verify", "--json"),
        ("plan", "--json", "--clusters", "many"),
        ("simulate", "--json", "a.rtx", "--no-such-option"),
        ("disasm", "a.rtx", "--json"),
        ("compil", "--json"),
    ],
)
def test_usage_errors_are_one_json_object_too(cli: Cli, words: tuple[str, ...]) -> None:
    found = cli(*words)
    assert found.code == 2
    (error,) = found.json()["diagnostics"]
    assert (error["severity"], error["code"], error["file"]) == ("error", "usage", None)
    assert error["message"] in " ".join(found.err.split())
    assert "--help" in error["help"]


def test_lists_and_pages_are_told_to_scripts_too(cli: Cli, tmp_path: Path) -> None:
    passes = {each["name"]: each for each in cli.good("passes", "--json").json()["passes"]}
    assert {option["name"] for option in passes["bucket-grad-sync"]["options"]} >= {"bytes"}
    assert all(each["summary"] for each in passes.values())
    for name, kind in (("r.html", "page"), ("r.svg", "picture")):
        told = cli.good("report", "a.rtx", "-o", str(tmp_path / name), "--json").json()
        assert told == {"output": str(tmp_path / name), "kind": kind, "bytes": (tmp_path / name).stat().st_size}


# opt


def test_opt_runs_a_pipeline_and_reports_what_it_inserted(cli: Cli, tmp_path: Path) -> None:
    told = cli.good("opt", "dataflow.rtir", "--passes", PIPELINE, "-o", str(tmp_path / "x.rtir"))
    assert "inserted pass" not in told.err
    found = cli.good("opt", "dataflow.rtir", "--passes", PIPELINE, "-v", "-o", str(tmp_path / "x.rtir"))
    assert not found.out
    assert "inserted pass 'insert-release', which 'allocate-ddr' needs" in found.err
    assert "inserted pass 'legalise', which 'allocate-ddr' needs" in found.err
    assert "peak" in found.err, "what `lifetime` found"
    cli.good("verify", str(tmp_path / "x.rtir"))


def test_opt_prints_the_schedule_and_nothing_else_on_stdout(cli: Cli, tmp_path: Path) -> None:
    cli.good("opt", "dataflow.rtir", "--passes", PIPELINE, "-o", str(tmp_path / "x.rtir"))
    found = cli.good("opt", "dataflow.rtir", "--passes", PIPELINE)
    assert found.out == (tmp_path / "x.rtir").read_text("utf-8")


def test_opt_inserts_placement_where_it_is_missing(cli: Cli) -> None:
    found = cli.good("opt", "dataflow.rtir", "--passes", "recompute", "--verbose")
    assert "inserted pass 'place-1f1b', which 'recompute' needs" in found.err
    assert "level placed" in found.out


def test_opt_shows_the_module_after_a_pass_or_after_all(cli: Cli) -> None:
    one = cli.good("opt", "dataflow.rtir", "--passes", PIPELINE, "--print-ir-after", "place-1f1b").err
    assert one.count("// after ") == one.count("module @tiny") == 1
    assert "level placed" in one
    every = cli.good("opt", "dataflow.rtir", "--passes", PIPELINE, "--print-ir-after", "all").err
    assert every.count("// after ") == every.count("module @tiny") == len(PIPELINE.split(",")) + 2


@pytest.mark.parametrize("file", ["dataflow.rtir", "placed.rtir", "a.rtir"])
@pytest.mark.parametrize(
    "pipeline", ["lifetime", "recompute", "insert-release", "legalise", "allocate-ddr", "recompute,allocate-ddr"]
)
def test_opt_prints_after_each_pass_that_runs_and_refuses_any_other(cli: Cli, file: str, pipeline: str) -> None:
    """Check that each pass that runs can be named, inserted ones too. Any other is refused before one runs."""
    done = cli("opt", file, "--passes", pipeline, "--print-ir-after", "all", "-o", "/dev/null")
    if done.code:
        return  # an order of passes that is refused
    ran = set(re.findall(r"^// after ([a-z0-9-]+)", done.err, re.MULTILINE))
    for name in (*ran, "place-gpipe", "bucket-grad-sync"):
        asked = cli("opt", file, "--passes", pipeline, "--print-ir-after", name, "-o", "/dev/null")
        assert asked.code == (0 if name in ran else 2), name
        if name not in ran:
            assert f"--print-ir-after {name} prints nothing: name one of the passes that run" in asked.err


def test_opt_times_and_verifies_each_pass(cli: Cli) -> None:
    found = cli.good("opt", "dataflow.rtir", "--passes", PIPELINE, "--verify-each", "--time-passes", "--stats")
    for name in PIPELINE.split(","):
        assert any(line.split()[1:2] == ["s"] and f"  {name}" in line for line in found.err.splitlines()), name
    assert "largest workspace bytes" in found.err


@pytest.mark.parametrize(
    ("file", "passes"),
    [
        ("a.rtir", "recompute"),
        ("a.rtir", "place-1f1b"),
        ("a.rtir", "allocate-ddr"),
        ("placed.rtir", "legalise,recompute"),
    ],
)
def test_opt_refuses_an_illegal_order(cli: Cli, file: str, passes: str) -> None:
    found = cli("opt", file, "--passes", passes)
    assert found.code == 1
    assert not found.out
    assert "error[RT071]" in found.err
    assert ("help: leave 'allocate-ddr' out" if passes == "allocate-ddr" else "help: put") in found.err


# verify


@pytest.mark.parametrize("file", ["a.rtir", "a.rtx", "placed.rtir", "dataflow.rtir"])
def test_verify_says_sound(cli: Cli, file: str) -> None:
    assert "sound" in cli.good("verify", file).out
    assert cli.good("verify", file, "--json").json() == {"sound": True, "diagnostics": []}


def test_verify_says_what_is_wrong(cli: Cli, tmp_path: Path) -> None:
    lines = (cli.folder / "placed.rtir").read_text("utf-8").splitlines(keepends=True)
    first = next(i for i, line in enumerate(lines) if "= forward attention.0 m0" in line)
    broken = tmp_path / "broken.rtir"
    broken.write_text("".join(lines[:first] + lines[first + 1 :]), "utf-8")
    found = cli("verify", str(broken), "--json")
    assert found.code == 1
    report = found.json()
    assert report["sound"] is False
    for item in report["diagnostics"]:
        assert item["code"] in CODES
        assert item["severity"] == "error"
        assert item["message"]
        assert {"file", "line", "column", "notes", "help"} <= item.keys()
    assert any(item["file"] == str(broken) for item in report["diagnostics"])


# simulate


@pytest.mark.parametrize("file", ["a.rtx", "a.rtir"])
def test_simulate_reports_the_step(cli: Cli, file: str) -> None:
    found = cli.good("simulate", file, "--json").json()
    assert found["step_seconds"] > 0
    assert found["tokens_per_second"] > 0
    assert 0 < found["mfu"] < 1
    assert len(found["stages"]) == 2
    for stage in found["stages"]:
        assert stage["busy_seconds"] > 0
        assert stage["idle_seconds"] >= 0
        assert stage["busy_seconds"] + stage["idle_seconds"] == pytest.approx(found["step_seconds"])
        assert stage["peak_bytes"] > 0
    text = cli.good("simulate", file).out
    assert "simulated" in text


def test_simulate_takes_another_machine_and_rendezvous_sends(cli: Cli, tmp_path: Path) -> None:
    known = ROOT / "targets" / "mt3000" / "machines" / "mt3000.toml"
    text = known.read_text("utf-8").replace('name = "mt3000"', 'name = "other"')
    (tmp_path / "other.toml").write_text(text, "utf-8")
    first = cli.good("simulate", "a.rtx", "--json").json()
    other = cli.good("simulate", "a.rtx", "--machine", str(tmp_path / "other.toml"), "--json").json()
    assert other["machine"] == "other"
    assert other["step_seconds"] == first["step_seconds"]
    met = cli.good("simulate", "a.rtx", "--rendezvous", "--json").json()
    assert met["step_seconds"] >= first["step_seconds"]


# disasm, strategies, passes


def test_disasm_prints_streams_or_routines(cli: Cli) -> None:
    text = cli.good("disasm", "a.rtx").out
    assert "stage @0: arena" in text
    assert "stage @1: arena" in text
    assert "forward attention.0 m0 call attention.forward" in text
    assert "wait " in text
    one = cli.good("disasm", "a.rtx", "--stage", "1", "--engine", "send").out
    assert "stage @0" not in one
    assert "send gradient m0 @0" in one
    assert "forward attention" not in one
    assert "gemm (a=xn, b=w.q_proj, out=q) trans_b=True" in cli.good("disasm", "a.rtx", "--routines").out


def test_strategies_are_pipelines_that_parse(cli: Cli) -> None:
    found = cli.good("strategies", "--json").json()
    names = [item["name"] for item in found["strategies"]]
    assert {"ratrain", "baseline-1f1b", "full-save"} <= set(names)
    assert found["default"] in names
    text = cli.good("strategies").out
    for item in found["strategies"]:
        assert item["name"] in text
        assert item["passes"] in text
    plan = Path("plan.toml").read_text("utf-8")
    Path("peers.toml").write_text(plan.replace("[parallel]", "[parallel]\ntp = 2"), "utf-8")
    Path("deeper.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 4}), "utf-8")  # two stages of two chunks
    for item in found["strategies"]:
        cli.good(
            "compile",
            "--model",
            "deeper.json",
            "--plan",
            "peers.toml" if item["name"] == "tp-heavy" else "plan.toml",
            "--strategy",
            item["name"],
            "-o",
            "strategy.rtir",
        )
        assert "level allocated" in Path("strategy.rtir").read_text("utf-8")


def test_passes_are_listed_with_their_options(cli: Cli) -> None:
    text = cli.good("passes").out
    for name in PIPELINE.split(","):
        assert any(line == name for line in text.splitlines())
    assert "{policy=" in text
    assert "{capacity=bytes}" in text


@pytest.mark.parametrize("name", ["compile", "opt", "verify", "simulate", "run", "disasm", "machines", "passes"])
def test_every_command_has_help(cli: Cli, name: str) -> None:
    assert name in cli.good("--help").out
    assert f"ratrainc {name}" in cli.good(name, "--help").out


# As a process


def process(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own."""
    command = [sys.executable, "-m", "ratrain", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def test_exit_codes_of_processes(files: Path) -> None:
    good = process(files, "verify", "a.rtx", "--json")
    assert (good.returncode, json.loads(good.stdout)["sound"], good.stderr) == (0, True, "")
    bad = process(files, "verify", "plan.toml")
    assert (bad.returncode, bad.stdout) == (1, "")
    assert "error[RT002]" in bad.stderr
    assert process(files, "verify").returncode == 2

"""The tools around a schedule: explain, compare, diff, doctor, traces, dumps between passes, advice when a plan does not fit."""

from __future__ import annotations

import errno
import json
import re
import shlex
from pathlib import Path

import pytest
from attrs import evolve

from ratrain import api
from ratrain.ratrain_ir.analysis.module_diff import diff_modules
from ratrain.ratrain_ir.lowering import lower
from ratrain.ratrainc.choices import levers
from ratrain.ratrainc.cli import main
from ratrain.ratrainc.console.parts import text_of
from ratrain.ratrainc.facts import machine_facts
from ratrain.ratrainc.planner.answer.strategy_comparison import Comparison
from ratrain.ratrainc.running.examples import example_path
from ratrain.targets.machine.machine import load_machine
from ratrain.targets.program.rtx import write_program
from ratrain.targets.runtime.arena.processor import cpu_flags
from ratrain.targets.runtime.engine.certificate import scratch_bytes
from ratrain.targets.runtime.kernels import kernel_set
from tests.end_to_end.tiny_runs import make_plan
from tests.end_to_end.toys import UNEVEN
from tests.project.test_site import lines_of_commands

MODEL, PLAN = str(example_path("tiny.json")), str(example_path("tiny.toml"))
SOURCES = ("--model", MODEL, "--plan", PLAN)


@pytest.fixture(scope="module")
def schedule(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("tools") / "tiny.rtir")
    assert main(["compile", *SOURCES, "-o", path]) == 0
    return path


def test_the_examples_of_opt_work_on_a_schedule_as_its_help_makes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["opt", "--help"]) == 0
    lines = lines_of_commands(capsys.readouterr().out)
    examples = [shlex.split(line)[1:] for line in lines if line.startswith("ratrainc opt ")]
    assert len(examples) == 3
    assert main(["compile", *SOURCES, "--passes", "place-1f1b", "-o", "placed.rtir"]) == 0
    assert [main(words) for words in examples] == [0, 0, 0]


def printed(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    capsys.readouterr()
    assert main(list(words)) == code
    return capsys.readouterr().out


def test_explain_prices_changes_of_a_schedule_that_has_no_addresses_yet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    placed = str(tmp_path / "placed.rtir")
    assert main(["compile", *SOURCES, "--passes", "place-1f1b,recompute{policy=full}", "-o", placed]) == 0
    levers = json.loads(printed(capsys, "explain", placed, "--seconds", "1", "--json"))["levers"]
    assert levers[0]["name"] == "unchanged"


def test_explain_names_an_owner_for_every_byte(schedule: str, capsys: pytest.CaptureFixture[str]) -> None:
    facts = json.loads(printed(capsys, "explain", schedule, "--no-levers", "--json"))
    reuse = facts["byte_reuse"]
    assert reuse["step_seconds"] >= reuse["without_reuse_seconds"] * (1 - 1e-9) > 0
    assert sum(facts["by_kind"].values()) == facts["peak_live_bytes"] == sum(facts["by_owner"].values())
    assert facts["arena_bytes"] >= facts["peak_live_bytes"]


@pytest.mark.parametrize("options", [(), ("--strategy", "zb-h1"), ("--passes", "place-gpipe,allocate-ddr")])
def test_a_program_is_explained_as_what_it_was_made_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    files = [str(tmp_path / "x.rtir"), str(tmp_path / "x.rtx")]
    assert main(["compile", *SOURCES, *options, "-o", files[0]]) == 0
    assert main(["compile", files[0], "-o", files[1]]) == 0
    told = [printed(capsys, "explain", file, "--no-levers", "--json") for file in files]
    assert told[0] == told[1]


def test_a_program_of_an_edited_schedule_is_not_explained_as_another(
    schedule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = api.load_schedule(schedule)
    module.pipeline = "place-1f1b,recompute{policy=full},allocate-ddr"
    write_program(api.emit(module), str(tmp_path / "edited.rtx"))
    printed(capsys, "explain", str(tmp_path / "edited.rtx"), "--no-levers", "--json", code=1)
    assert main(["explain", str(tmp_path / "edited.rtx"), "--no-levers"]) == 1
    error = capsys.readouterr().err
    assert "cannot be made again: its model, plan and passes give another program" in error
    assert "give the .rtir" in error


@pytest.mark.full
def test_levers_are_tried(schedule: str, capsys: pytest.CaptureFixture[str]) -> None:
    levers = json.loads(printed(capsys, "explain", schedule, "--json"))["levers"]
    by_name = {lever["name"]: lever for lever in levers}
    now, full = by_name["unchanged"], by_name["recompute{policy=full}"]
    assert now["fits"]
    assert full["freed_bytes"] > 0
    assert full["step_seconds"] > now["step_seconds"]
    assert by_name["half the head_chunk"]["fits"]
    assert by_name["half the mlp_chunk"]["freed_bytes"] > 0


def test_compare_shows_the_contract_keys(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("compare", *SOURCES, "--strategies", "baseline-1f1b,ratrain,zero3,zero3-blocking", "--json")
    rows = {row["name"]: row for row in json.loads(printed(capsys, *words))["strategies"]}
    keys = {"name", "step_seconds", "tokens_per_second", "peak_bytes", "exposed_tail_seconds", "speedup", "fits"}
    keys |= {"capacity_bytes"}
    assert all(set(row) == keys for row in rows.values())
    assert rows["baseline-1f1b"]["speedup"] == 1.0
    assert rows["ratrain"]["speedup"] > 1.0
    assert rows["zero3-blocking"]["peak_bytes"] <= rows["baseline-1f1b"]["peak_bytes"]
    assert rows["zero3"]["step_seconds"] < rows["zero3-blocking"]["step_seconds"]
    assert "ratrain" in printed(capsys, *words[:-1])


def test_compare_says_that_the_yardstick_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """full-save lacks bytes under a capacity in which full recomputation has room."""
    words = ("compare", *SOURCES, "--strategies", "full-save,baseline-1f1b", "--capacity", "7MB")
    shown = printed(capsys, *words)
    assert "lacks" in shown
    assert "full-save does not fit, so there is nothing to be faster than" in shown
    rows = {row["name"]: row for row in json.loads(printed(capsys, *words, "--json"))["strategies"]}
    assert [rows[name]["fits"] for name in ("full-save", "baseline-1f1b")] == [False, True]
    assert rows["baseline-1f1b"]["speedup"] is None


def test_compare_says_what_a_strategy_lacks() -> None:
    lacking = {"name": "a", "peak_bytes": 3 << 20, "fits": False}
    assert "lacks 2.00 MiB" in text_of(Comparison(({**lacking, "capacity_bytes": 1 << 20},), "mt3000", ()).parts())
    shown = text_of(Comparison(({**lacking, "capacity_bytes": 4 << 20},), "mt3000", ()).parts())
    assert "not placed" in shown
    assert "lacks" not in shown


@pytest.mark.parametrize(
    ("passes", "changed"),
    [
        (
            "recompute{policy=none budget=5MiB placement=forward-side}",
            "recompute{budget=5242880,placement=forward-side}",
        ),
        ("joint-order{policy=none placement=inline}", "joint-order{policy=full,placement=inline}"),
    ],
)
def test_a_lever_changes_only_what_its_name_says(passes: str, changed: str) -> None:
    setting = levers.CompileSetting(*api.resolved(MODEL, PLAN), f"place-1f1b,{passes},allocate-ddr", load_machine(None))
    (lever,) = (lever for lever in levers.levers_of(0) if lever.name == "recompute{policy=full}")
    found = lever.apply(setting)
    assert found is not None
    assert changed in found.pipeline.replace(" ", ",")


def test_what_does_not_fit_is_refused_with_changes_that_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    passes = "place-1f1b,recompute{policy=none},allocate-ddr{capacity=7MiB}"
    assert main(["compile", *SOURCES, "--passes", passes]) == 1
    shown = capsys.readouterr().err
    assert "RT053" in shown
    assert "tried, and fits: recompute{policy=full}" in shown
    assert main(["compile", *SOURCES, "--passes", passes, "--no-advice"]) == 1
    assert "tried" not in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_diff_speaks_of_ops(schedule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no difference" in printed(capsys, "diff", schedule, schedule)
    placed = str(tmp_path / "placed.rtir")
    assert main(["compile", *SOURCES, "--passes", "place-1f1b", "-o", placed]) == 0
    steps = tmp_path / "steps"
    pipeline = "recompute{policy=full},bucket-grad-sync"
    assert main(["opt", placed, "--passes", pipeline, "--dump-dir", str(steps), "-o", str(tmp_path / "x.rtir")]) == 0
    assert sorted(path.name for path in steps.iterdir()) == ["001-recompute.rtir", "002-bucket-grad-sync.rtir"]
    shown = printed(capsys, "diff", placed, str(steps / "001-recompute.rtir"))
    assert "+ op recompute mlp.1 m0" in shown
    stages = diff_modules(api.load_schedule(placed), api.load_schedule(str(steps / "001-recompute.rtir")))
    assert all(not stage.moved and not stage.dropped and stage.peak_after < stage.peak_before for stage in stages)


def test_diff_counts_a_swap_as_one_move(schedule: str, tmp_path: Path) -> None:
    lines = Path(schedule).read_text().split("\n")
    first = next(i for i, line in enumerate(lines) if "update attention.0" in line)
    second = next(i for i, line in enumerate(lines) if "update mlp.0" in line)
    lines[first], lines[second] = lines[second], lines[first]
    edited = tmp_path / "edited.rtir"
    edited.write_text("\n".join(lines))
    stage = diff_modules(api.load_schedule(schedule), api.load_schedule(str(edited)))[0]
    assert {move.op for move in stage.moved} <= {"update attention.0", "update mlp.0", "all_gather attention.0"}
    assert stage.moved
    assert not stage.added
    assert not stage.dropped


def test_diff_tells_of_a_release_that_moved(schedule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It changes when bytes are free, and may be a use after release: no schedule with it is the same."""
    lines = Path(schedule).read_text().splitlines()
    at = next(index for index, line in enumerate(lines) if line.strip().startswith("release ("))
    lines[at - 1], lines[at] = lines[at], lines[at - 1]
    edited = tmp_path / "edited.rtir"
    edited.write_text("\n".join(lines) + "\n")
    stages = diff_modules(api.load_schedule(schedule), api.load_schedule(str(edited)))
    (stage,) = [stage for stage in stages if not stage.is_empty]
    assert not stage.moved
    assert {f"%{each.tensor}" for each in stage.released} == set(re.findall(r"%[\w.]+", lines[at - 1]))
    shown = printed(capsys, "diff", schedule, str(edited))
    assert "~ released %" in shown
    assert "no difference" not in shown


def test_diff_tells_what_another_cut_of_the_sequences_changes(tmp_path: Path) -> None:
    plan = make_plan(pp=1, dp=1, slices=(5, 5))
    before, after = (lower(UNEVEN, evolve(plan, slices=slices)) for slices in ((5, 5), (4, 6)))
    (stage,) = diff_modules(before, after)
    assert not stage.added
    assert "input %tokens.m0.s0 : i32[10]" in stage.gone_tensors
    assert "input %tokens.m0.s0 : i32[8]" in stage.new_tensors
    assert ("tokens.m0.s0", 40, 32) in [(item.tensor, item.before, item.after) for item in stage.resized]
    assert not any("%p." in text for text in (*stage.new_tensors, *stage.gone_tensors))


def test_print_ir_after_change_is_quiet_without_one(schedule: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["opt", schedule, "--passes", "lifetime", "--print-ir-after-change", "-o", "/dev/null"])
    assert "// after" not in capsys.readouterr().err


def test_trace_has_a_track_per_engine_and_an_arrow_per_message(
    schedule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.json"
    figures = json.loads(printed(capsys, "simulate", schedule, "--trace", str(trace), "--json"))
    events = json.loads(trace.read_text())["traceEvents"]
    tracks = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    assert tracks == {(s, e) for s in (0, 1) for e in ("compute", "send", "recv", "collective", "host")}
    spans = [e for e in events if e["ph"] == "X"]
    assert max(e["ts"] + e["dur"] for e in spans) / 1e6 >= figures["makespan_seconds"] - 1e-9
    starts = {e["id"]: e["ts"] for e in events if e["ph"] == "s"}
    ends = {e["id"]: e["ts"] for e in events if e["ph"] == "f"}
    assert len(starts) == 3 * 2 * 4, "three steps of four activations and four gradients"
    assert all(ends[number] >= start for number, start in starts.items())
    for stage, held in enumerate(figures["stages"]):
        live = [e["args"]["bytes"] for e in events if e["ph"] == "C" and e["pid"] == stage]
        assert 0 < max(live) <= held["arena_bytes"]


def test_doctor_says_what_a_run_needs(schedule: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(printed(capsys, "doctor", schedule, "--json"))
    assert found["problems"] == []
    assert {"blas", "threads", "bf16", "kernel cache", "mpi", "torch.distributed", "free memory", "program"} <= set(
        found["facts"]
    )


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "processor : 0\nflags\t: fpu avx2 avx512_bf16 amx_bf16\n\nprocessor : 1\nflags\t: fpu\n",
            "avx512_bf16, amx_bf16",
        ),
        ("processor : 0\nFeatures\t: fp asimd bf16\n", "(bf16)"),
        ("processor : 0\nflags\t: fpu avx2 avx512f\n", "does not multiply it"),
        (None, "does not multiply it"),
    ],
)
def test_doctor_says_whether_the_processor_multiplies_bf16(text: str | None, found: str, tmp_path: Path) -> None:
    facts = tmp_path / "cpuinfo"
    if text is not None:
        facts.write_text(text, "utf-8")
    fact = machine_facts.bf16_fact(cpu_flags(facts))
    assert found in fact.found
    assert ("--kernels torch" in fact.remark) == ("does not" not in fact.found)
    assert "16 bytes a parameter, not 20" in fact.remark
    assert not fact.stops_a_run


def test_doctor_knows_a_plan_s_memory(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("doctor", *SOURCES, "--json")
    program = api.emit(api.compile(MODEL, PLAN))
    needed = program.arena_bytes_of_all_ranks + scratch_bytes(program, kernel_set("fast"))
    monkeypatch.setattr(machine_facts, "free_memory", lambda: needed)
    assert not json.loads(printed(capsys, *words))["facts"]["program"]["stops_a_run"]
    monkeypatch.setattr(machine_facts, "free_memory", lambda: needed - 1)
    assert main(list(words)) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["problems"] == ["program"]
    assert "3 of its size fit here" in found["facts"]["program"]["remark"]


def test_doctor_says_whether_the_environment_pins_the_core_type(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)
    assert "pins the core type" not in json.loads(printed(capsys, "doctor", "--json"))["facts"]["blas"]["remark"]
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    facts = json.loads(printed(capsys, "doctor", "--json"))["facts"]
    assert "pins the core type (OPENBLAS_CORETYPE=Haswell" in facts["blas"]["remark"]


def test_doctor_tries_the_kernel_cache(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refused(**_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    assert "is writable" in json.loads(printed(capsys, "doctor", "--json"))["facts"]["kernel cache"]["found"]
    monkeypatch.setattr(machine_facts.tempfile, "TemporaryFile", refused)
    fact = json.loads(printed(capsys, "doctor", "--json"))["facts"]["kernel cache"]
    assert "Read-only file system" in fact["found"]
    assert "NUMBA_CACHE_DIR" in fact["remark"]


@pytest.mark.parametrize("command", ["doctor", "run", "simulate", "verify"])
@pytest.mark.parametrize("part", ["steps", "formals", "intermediates", "parameters"])
@pytest.mark.sampled(2)
def test_a_refused_program_is_refused_by_every_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, part: str
) -> None:
    """Routines that lack a part of theirs, in a file that is whole."""
    program = api.emit(api.compile(str(example_path("tiny.json")), str(example_path("tiny.toml"))))
    routines = tuple(evolve(routine, **{part: ()}) for routine in program.routines)
    write_program(evolve(program, routines=routines), str(tmp_path / "a.rtx"))
    assert main([command, str(tmp_path / "a.rtx")]) == 1
    assert "RT080" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["--plan", "p.toml"], ["--model", "llama-2-7b"], ["a.rtx", "--model", "m", "--plan", "p"]]
)
def test_doctor_usage(words: list[str]) -> None:
    assert main(["doctor", *words]) == 2


@pytest.mark.parametrize("command", ["explain", "compare", "diff", "doctor"])
def test_help_teaches_by_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "Examples:" in printed(capsys, command, "--help")


def test_disasm_of_a_program_without_tiles_names_the_machine_that_has_them(
    schedule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it says to type makes a program with tiles."""
    monkeypatch.chdir(tmp_path)
    advice = printed(capsys, "disasm", schedule, "--tiles")
    words = advice.partition("'ratrainc ")[2].partition("'")[0].replace("M --plan P.toml", f"{MODEL} --plan {PLAN}")
    assert main(shlex.split(words)) == 0
    listed = printed(capsys, "disasm", "X.rtx", "--tiles", "--limit", "1")
    assert "no tile schedules" not in listed
    cores = max(map(int, re.findall(r": (\d+) cores;", listed)))
    printed(capsys, "disasm", "X.rtx", "--tiles", "--limit", "1", "--core", str(cores - 1))
    assert main(["disasm", "X.rtx", "--tiles", "--core", str(cores)]) == 2
    refused = capsys.readouterr()
    assert f"there is no core {cores}: the cores are 0 to {cores - 1}" in refused.err
    assert not refused.out

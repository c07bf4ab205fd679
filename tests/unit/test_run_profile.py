"""Profiles of runs, and machine files made of them."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from ratrain_ir.diagnostics import DiagnosticError
from ratrain_ir.ops import Engine
from ratrainc import api
from ratrainc.calibration.from_profile import machine_from_profile
from ratrainc.cli import main
from ratrainc.commands.run import command as run_command
from ratrainc.run_profile import FORMAT, write_profile
from ratrainc.trace import MICROSECONDS
from targets.mt3000.machine import load_machine, parse_machine
from targets.mt3000.op_table import MeasuredOp, OpTable
from targets.mt3000.simulation import one_core_step_seconds
from targets.runtime.profile import Profile, RunSpan
from tests.unit.tiny_runs import make_program

if TYPE_CHECKING:
    from targets.program import Program

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 4
PEAK = 5e10


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Program, Path]:
    folder = tmp_path_factory.mktemp("profile")
    program = folder / "tiny.rtx"
    model, plan = str(EXAMPLES / "tiny.json"), str(EXAMPLES / "tiny.toml")
    assert main(["compile", "--model", model, "--plan", plan, "-o", str(program)]) == 0
    profile = folder / "profile.json"
    assert (
        main(["run", str(program), "--steps", str(STEPS), "--threads", "1", "--profile", str(profile), "--json"]) == 0
    )
    return api.load(str(program)), profile


def spans(path: Path) -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]


def test_profile_has_every_op_of_every_rank_and_step(profiled: tuple[Program, Path]) -> None:
    program, path = profiled
    found = spans(path)
    for step in range(STEPS):
        for index, stage in enumerate(program.stages):
            for replica in range(program.plan.dp):
                titles = [i.title for stream in stage.streams.values() for i in stream]
                pid = index * program.plan.dp + replica
                seen = [e["name"] for e in found if e["pid"] == pid and e["args"]["step"] == step]
                assert sorted(seen) == sorted(titles)


def test_one_op_runs_at_a_time_but_for_members_of_a_collective(profiled: tuple[Program, Path]) -> None:
    ordered = sorted(spans(profiled[1]), key=lambda event: event["ts"])
    end = 0.0
    for event in ordered:
        if event["args"]["members"] == 1:
            assert event["ts"] >= end - 0.01
            end = event["ts"] + event["dur"]


def test_table_sums_to_the_profiled_step(profiled: tuple[Program, Path], tmp_path: Path) -> None:
    program, path = profiled
    out = tmp_path / "here.toml"
    assert main(["calibrate", "--profile", str(path), "-o", str(out)]) == 0
    machine = load_machine(str(out))
    assert machine.cost == "table"
    found = machine_from_profile(str(path), "this-machine", PEAK)
    walls = {}
    for event in spans(path):
        first, last = walls.get(event["args"]["step"], (float("inf"), 0.0))
        walls[event["args"]["step"]] = min(first, event["ts"]), max(last, event["ts"] + event["dur"])
    kept = [(walls[step][1] - walls[step][0]) / MICROSECONDS for step in range(2, STEPS)]
    assert found.step_seconds == pytest.approx(sum(kept) / 2)
    nearest = min(kept, key=lambda seconds: abs(seconds - one_core_step_seconds(program, found.machine)))
    assert one_core_step_seconds(program, found.machine) == pytest.approx(nearest, rel=1e-6)
    assert one_core_step_seconds(program, machine) == pytest.approx(nearest, rel=1e-6)


def test_simulate_predicts_the_ordered_engine(profiled: tuple[Program, Path], tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "here.toml"
    program = tmp_path / "other.rtx"
    plan = tmp_path / "other.toml"
    plan.write_text((EXAMPLES / "tiny.toml").read_text().replace("micro_batches = 4", "micro_batches = 8"))
    assert main(["calibrate", "--profile", str(profiled[1]), "-o", str(out)]) == 0
    assert main(["compile", "--model", str(EXAMPLES / "tiny.json"), "--plan", str(plan), "-o", str(program)]) == 0
    capsys.readouterr()
    assert main(["simulate", str(program), "--machine", str(out), "--one-core", "--json"]) == 0
    seconds = json.loads(capsys.readouterr().out)["one_core_step_seconds"]
    one = one_core_step_seconds(profiled[0], load_machine(str(out)))
    assert 1.5 * one < seconds < 2.5 * one


def test_profiles_of_programs_with_tiles_are_read(tmp_path: Path) -> None:
    """A routine's name in the table is the same with and without its tiles."""
    keys = {}
    for machine in ("mt3000", "mt3000-tiles"):
        program = make_program(machine=machine)
        items = [(s, item) for s, stage in enumerate(program.stages) for item in stage.streams[Engine.COMPUTE]]
        profile = Profile(spans=[RunSpan(s, 0, Engine.COMPUTE, op, 0, k, k + 0.5) for k, (s, op) in enumerate(items)])
        path = str(tmp_path / machine)
        write_profile(program, profile, path, engines_side_by_side=False)
        keys[machine] = {op.key for op in machine_from_profile(path, "this-machine", PEAK).machine.table.ops}
        assert any(step.tiles for routine in program.routines for step in routine.steps) == (machine == "mt3000-tiles")
    assert len(keys["mt3000"]) > 5
    assert keys["mt3000"] == keys["mt3000-tiles"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not JSON"),
        ("[1]", "not a profile"),
        ('{"traceEvents": []}', "not a profile"),
        ('{"otherData": {"format": "x"}, "traceEvents": []}', "not a profile"),
        ('{"otherData": {"format": "ratrain run profile 1", "ordered": false}, "traceEvents": []}', "shared the cores"),
        (
            '{"otherData": {"format": "ratrain run profile 1", "ordered": true, "routines": []}, "traceEvents": []}',
            "no ops",
        ),
    ],
)
def test_bad_profiles_are_diagnosed(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(DiagnosticError, match=words):
        machine_from_profile(str(path), "this-machine", PEAK)


@pytest.mark.parametrize("key", ["ts", "dur"])
@pytest.mark.parametrize("value", ["NaN", "1e999", "-1e999", '"soon"', "1" + "0" * 400])
def test_times_that_are_no_times_are_diagnosed(tmp_path: Path, key: str, value: str) -> None:
    check_bad_event(tmp_path, **{key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *product(["bytes", "members", "step", "routine"], ["1e999", '"two"', "[]", "1" + "0" * 400]),
        *product(["op"], ["1e999", "[]", "1" + "0" * 400]),
    ],
)
def test_ops_that_are_no_ops_are_diagnosed(tmp_path: Path, key: str, value: str) -> None:
    check_bad_event(tmp_path, **{key: value})


def check_bad_event(folder: Path, **changes: str) -> None:
    """A profile of one op, one of whose values is replaced by a text of JSON."""
    names = {"ts": "0.5", "dur": "2.5"} | {"op": '"send"', "bytes": "8", "members": "1", "step": "0", "routine": "null"}
    cells = {name: f'"{name}": {value}' for name, value in (names | changes).items()}
    args = ", ".join(cells[name] for name in ("op", "bytes", "members", "step", "routine"))
    event = f'{{"ph": "X", {cells["ts"]}, {cells["dur"]}, "args": {{{args}}}}}'
    facts = f'{{"format": "{FORMAT}", "ordered": true, "routines": []}}'
    path = folder / "profile.json"
    path.write_text(f'{{"otherData": {facts}, "traceEvents": [{event}]}}')
    with pytest.raises(DiagnosticError, match="not a profile of a run"):
        machine_from_profile(str(path), "this-machine", PEAK)


def test_tables_answer_for_other_sizes_and_members() -> None:
    table = OpTable(
        (MeasuredOp("send", 100.0, 1e-3), MeasuredOp("send", 400.0, 2e-3), MeasuredOp("all_gather*4", 8.0, 5.0))
    )
    assert table.seconds("send", 100) == 1e-3
    assert table.seconds("send", 800) == pytest.approx(4e-3)
    assert table.seconds("send", 50) == pytest.approx(5e-4)
    assert table.seconds("all_gather*2", 16) == pytest.approx(10.0)
    assert table.seconds("update", 16) is None
    assert table.seconds("reduce_scatter*2", 16) is None


def test_a_table_that_is_wrong_is_diagnosed() -> None:
    source = (EXAMPLES.parent / "benchmarks" / "a100.toml").read_text()
    with pytest.raises(DiagnosticError, match="goes with a list of"):
        parse_machine(source.replace('"roofline"', '"table"'), file="m.toml")
    for op in (
        'key = "send"\nsize = "big"',
        "key = 3\nsize = 1",
        'key = "all_gather*x"\nsize = 1',
        'key = "a*"\nsize = 1',
    ):
        wrong = source.replace('"roofline"', '"table"') + f"[[op]]\n{op}\nseconds = 1\n"
        with pytest.raises(DiagnosticError, match="has a key, a size"):
            parse_machine(wrong, file="m.toml")


def test_profile_is_refused_over_mpi() -> None:
    result = CliRunner().invoke(run_command, ["x.rtx", "--engine", "mpi", "--profile", "p.json"])
    assert result.exit_code == 2
    assert "local engine" in result.output

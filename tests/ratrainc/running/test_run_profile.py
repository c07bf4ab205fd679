"""Profiles of runs, and machine files made of them."""

from __future__ import annotations

import json
from array import array
from base64 import b64encode
from itertools import product
from math import log
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from ratrain import api
from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.ops.base import Engine
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.text.plan_file import load_plan
from ratrain.ratrainc.calibration.from_profile import machine_from_profiles
from ratrain.ratrainc.cli import main
from ratrain.ratrainc.report.trace import MICROSECONDS
from ratrain.ratrainc.running.run_profile import FORMAT, write_profile
from ratrain.targets.machine.machine import load_machine, parse_machine
from ratrain.targets.machine.op_table import SHAPES_MARK, MeasuredOp, OpTable
from ratrain.targets.machine.timing import op_work, routine_key
from ratrain.targets.program.rtx import program_bytes, write_program
from ratrain.targets.runtime.engine.profile import Profile, StepSpan
from ratrain.targets.simulator.figures import one_core_step_seconds, shared_cores_step_seconds
from ratrain.targets.simulator.op_works import timed_instruction
from tests.end_to_end.tiny_runs import make_program
from tests.targets.runtime.ranks.mpi_tools import needs_mpi, run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

    from ratrain.targets.program.program import Program

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples"
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
    """Medians of ops and of gaps add up to a step that lies among those that ran; others on the machine spread these widely."""
    program, path = profiled
    out = tmp_path / "here.toml"
    assert main(["calibrate", "--profile", str(path), "-o", str(out)]) == 0
    machine = load_machine(str(out))
    assert machine.cost == "table"
    found = machine_from_profiles([str(path)], "this-machine", PEAK)
    walls = [duration / MICROSECONDS for _, _, duration in json.loads(path.read_text())["otherData"]["steps"]]
    assert found.step_seconds == pytest.approx(sum(walls[2:]) / 2)
    assert 0.25 * min(walls[2:]) < one_core_step_seconds(program, found.machine) < 3 * max(walls[2:])
    assert {op.key for op in machine.table.ops} == {op.key for op in found.machine.table.ops}


def test_ops_and_gaps_are_found_where_a_profile_is_disturbed(profiled: tuple[Program, Path], tmp_path: Path) -> None:
    """A profile whose ops take what a rule says, some of them far longer: the machine made of it takes what the rule says."""
    program, path = profiled
    data = json.loads(path.read_text())
    data["otherData"]["recording"] = 2.0
    data["traceEvents"] = [event for event in data["traceEvents"] if event["ph"] == "X" and event["args"]["step"] == 0]
    for number, event in enumerate(sorted(data["traceEvents"], key=lambda event: event["ts"])):
        event["dur"] = 100.0 * event["args"]["members"]  # a member's share is 100 us
        event["ts"] = number * 1000.0
    once = data["traceEvents"]
    data["traceEvents"] = []
    for step in range(7):
        for event in once:
            slow = 5000.0 if step in (3, 4) else 0.0
            args = event["args"] | {"step": step}
            data["traceEvents"].append(
                event | {"dur": event["dur"] + slow, "ts": event["ts"] + step * 1e7, "args": args}
            )
    covered = sum(event["dur"] for event in once)
    data["otherData"]["steps"] = [[step, step * 1e7, covered + 12.0 * len(once)] for step in range(7)]
    other = tmp_path / "made.json"
    other.write_text(json.dumps(data))
    found = machine_from_profiles([str(other)], "this-machine", PEAK)
    assert [op.seconds for op in found.machine.table.ops] == pytest.approx([100e-6] * len(found.machine.table.ops))
    assert found.machine.engine_gap == pytest.approx(10e-6)
    assert one_core_step_seconds(program, found.machine) == pytest.approx(110e-6 * len(once))


def test_a_routine_is_known_again_under_another_plan() -> None:
    """What pads a shard and what a loss is divided by is of no account; other shapes are, and go by those of the same kernels."""
    model = str(EXAMPLES / "tiny.json")
    plan = load_plan(str(EXAMPLES / "tiny.toml"), load_model(model))
    others = [evolve(plan, pp=1, dp=4, cuts=()), evolve(plan, micro_batches=8), evolve(plan, micro_batch_size=1)]
    ours, four, eight, smaller = (
        {routine_key(routine) for routine in api.emit(api.compile(model, each)).routines} for each in (plan, *others)
    )
    assert ours == four == eight
    assert not ours & smaller
    assert {key.partition("/")[0] for key in ours} == {key.partition("/")[0] for key in smaller}


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
        profile = Profile(steps=[StepSpan(0, 0.0, float(len(items)))])
        for k, (s, _) in enumerate(items):
            profile.recorded.setdefault((s, 0, Engine.COMPUTE), array("d")).extend([k, k, k + 0.5, k + 0.5])
        path = str(tmp_path / machine)
        write_profile(program, profile, path)
        keys[machine] = {op.key for op in machine_from_profiles([path], "this-machine", PEAK).machine.table.ops}
        assert any(step.on_chip for routine in program.routines for step in routine.steps) == (
            machine == "mt3000-tiles"
        )
    assert len(keys["mt3000"]) > 5
    assert keys["mt3000"] == keys["mt3000-tiles"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not JSON"),
        ("[1]", "not a profile"),
        ('{"traceEvents": []}', "not a profile"),
        ('{"otherData": {"format": "x"}, "traceEvents": []}', "not a profile"),
        (
            '{"otherData": {"format": "ratrain run profile 2", "concurrency": "threads", "kernel_threads": 2}}',
            "shared each kernel",
        ),
        ('{"otherData": {"format": "ratrain run profile 2", "concurrency": "dance"}}', "not a profile"),
        (
            (
                '{"otherData": {"format": "ratrain run profile 2", "concurrency": "ordered", "kernel_threads": 1,'
                '"routines": [], "steps": [], "recording": 0}, "traceEvents": []}'
            ),
            "no ops",
        ),
    ],
)
def test_bad_profiles_are_diagnosed(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(DiagnosticError, match=words):
        machine_from_profiles([str(path)], "this-machine", PEAK)


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
    names |= {"cpu": "2", "meeting": "null"}
    cells = {name: f'"{name}": {value}' for name, value in (names | changes).items()}
    args = ", ".join(cells[name] for name in names if name not in ("ts", "dur"))
    event = f'{{"ph": "X", "pid": 0, {cells["ts"]}, {cells["dur"]}, "args": {{{args}}}}}'
    facts = f'{{"format": "{FORMAT}", "concurrency": "ordered", "kernel_threads": 1, "routines": [], "recording": 1'
    facts += ', "steps": [[0, 0, 9]]}'
    path = folder / "profile.json"
    path.write_text(f'{{"otherData": {facts}, "traceEvents": [{event}]}}')
    with pytest.raises(DiagnosticError, match="not a profile of a run"):
        machine_from_profiles([str(path)], "this-machine", PEAK)


def test_tables_answer_for_other_sizes_and_members() -> None:
    table = OpTable(
        (
            *(MeasuredOp("send", size, 1e-3 + 1e-5 * size) for size in (100.0, 400.0)),
            MeasuredOp("recv", 100.0, 1e-3),
            MeasuredOp("all_gather*4", 8.0, 5.0),
            MeasuredOp("reduce_scatter*2", 8.0, 3.0),
            MeasuredOp("f:kernels/shapes", 1e-3, 2e-3),
        )
    )
    assert table.seconds("send", 100) == 2e-3
    for size in (50, 200, 800):
        assert table.seconds("send", size) == pytest.approx(1e-3 + 1e-5 * size), "two sizes tell a line"
    assert table.seconds("recv", 50) == pytest.approx(5e-4), "one size tells a rate"
    assert table.seconds("all_gather*2", 16) == pytest.approx(10.0)
    assert table.seconds("all_reduce*1", 16) == pytest.approx(6.0)
    assert table.seconds("f:kernels/shapes", 7.0) == 2e-3
    assert table.seconds("f:kernels/others", 3e-3) == pytest.approx(6e-3)
    assert table.seconds("f:others/shapes", 3e-3) is None
    assert table.seconds("update", 16) is None
    assert table.seconds("all_gather_scalar*2", 16) is None


@given(st.dictionaries(st.floats(1, 1e9), st.floats(1e-6, 1e3), min_size=1, max_size=5), st.floats(1, 1e9))
def test_tables_answer_within_proportion(known: dict[float, float], size: float) -> None:
    """Whatever was measured: seconds of another size are positive, and change no more than the size."""
    table = OpTable(tuple(MeasuredOp("send", each, seconds) for each, seconds in known.items()))
    nearest = min(known, key=lambda each: abs(log(each / size)))
    found = table.seconds("send", size)
    assert found is not None
    ratio = found / known[nearest]
    assert min(1.0, size / nearest) * (1 - 1e-6) <= ratio <= max(1.0, size / nearest) * (1 + 1e-6)


def test_a_table_that_is_wrong_is_diagnosed() -> None:
    source = (EXAMPLES.parent / "targets/pytorch/machines/a100-node.toml").read_text()
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


def test_threads_are_profiled_by_the_time_of_their_cpu(profiled: tuple[Program, Path], tmp_path: Path) -> None:
    """Engines side by side wait for cores and for one another: what an op takes by itself is the CPU time of its thread."""
    program, _ = profiled
    file, path = tmp_path / "tiny.rtx", tmp_path / "profile.json"
    write_program(program, str(file))
    assert main(["run", str(file), "--steps", "3", "--threads", "2", "--profile", str(path), "--json"]) == 0
    machine = machine_from_profiles([str(path)], "this-machine", PEAK).machine
    measured = {op.key: op.seconds for op in machine.table.ops}
    data = json.loads(path.read_text())
    for event in data["traceEvents"]:
        if event["ph"] == "X":
            event["dur"] *= 7
            event["args"]["cpu"] *= 3
    path.write_text(json.dumps(data))
    slower = {op.key: op.seconds for op in machine_from_profiles([str(path)], "this-machine", PEAK).machine.table.ops}
    assert slower == pytest.approx({key: 3 * seconds for key, seconds in measured.items()})


def test_waiting_over_mpi_is_no_part_of_an_op(profiled: tuple[Program, Path], tmp_path: Path) -> None:
    """As if one process had taken part late in everything: what others take is what is left when it is there."""
    data = json.loads(profiled[1].read_text())
    data["otherData"]["concurrency"] = "processes"
    late, early = 3, 0
    for event in data["traceEvents"]:
        if event["ph"] == "X" and event["args"]["meeting"]:
            begin = 1e6 * event["args"]["step"]
            event["ts"] = begin + (70.0 if event["pid"] == late else 50.0)
            event["dur"] = begin + 100.0 - event["ts"] + (event["pid"] == early)
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(data))
    found = machine_from_profiles([str(path)], "this-machine", PEAK)
    measured = {(op.key, op.size): op.seconds for op in found.machine.table.ops}
    everyone = [seconds for (key, _), seconds in measured.items() if key.endswith("*4")]
    assert everyone
    assert everyone == pytest.approx([30e-6] * len(everyone))
    data["traceEvents"] = [e for e in data["traceEvents"] if e["ph"] != "X" or e["pid"] != late]
    path.write_text(json.dumps(data))
    with pytest.raises(DiagnosticError, match="not all who meet"):
        machine_from_profiles([str(path)], "this-machine", PEAK)


def test_what_a_rank_computes_meanwhile_is_no_part_of_an_exchange(
    profiled: tuple[Program, Path], tmp_path: Path
) -> None:
    """Two ranks run twenty ops of 100 us each, 20 us apart; an exchange is posted before the last ten and found complete 30 us behind them."""
    data = json.loads(profiled[1].read_text())
    usual = {"members": 1, "meeting": None, "routine": None, "bytes": 64, "step": 0, "cpu": 100.0}
    met = usual | {"op": "all_reduce_scalar*2", "members": 2, "meeting": "all"}
    data["traceEvents"] = [
        {"ph": "X", "pid": pid, "ts": ts, "dur": duration, "args": args}
        for pid in range(2)
        for ts, duration, args in [
            *((120.0 * number, 100.0, usual | {"op": "update"}) for number in range(20)),
            (1200.0, 1230.0, met),
        ]
    ]
    data["otherData"] |= {"concurrency": "processes", "recording": 3.0, "steps": [[0, 0.0, 3000.0]]}
    path = tmp_path / "made.json"
    path.write_text(json.dumps(data))
    machine = machine_from_profiles([str(path)], "this-machine", PEAK).machine
    seconds = {op.key: op.seconds for op in machine.table.ops}
    assert seconds == pytest.approx({"update": 100e-6, "all_reduce_scalar*2": 230e-6})
    assert machine.engine_gap == pytest.approx(17e-6)


def test_shared_cores_take_no_less_than_a_rank_and_than_all_work(profiled: tuple[Program, Path]) -> None:
    program, path = profiled
    machine = machine_from_profiles([str(path)], "this-machine", PEAK).machine
    work = one_core_step_seconds(program, machine)
    assert work * (1 - 1e-12) <= shared_cores_step_seconds(program, machine, 1) <= 1.05 * work
    assert shared_cores_step_seconds(program, machine, 2) >= work / 2 * (1 - 1e-12)
    alone = shared_cores_step_seconds(program, machine, 4)
    busiest = max(
        sum(
            op_work(timed_instruction(program, s, e, i), program.plan, machine).seconds + machine.engine_gap
            for i in stream
        )
        for s, stage in enumerate(program.stages)
        for e, stream in stage.streams.items()
    )
    assert busiest <= alone <= work
    assert shared_cores_step_seconds(program, machine, 9) == alone


@needs_mpi
@pytest.mark.full
def test_ranks_over_mpi_are_profiled_by_one_clock(profiled: tuple[Program, Path], tmp_path: Path) -> None:
    """Every op of every rank is there, no message arrives before it was sent, and a machine file comes out."""
    program, _ = profiled
    file, path, out = tmp_path / "tiny.rtx", tmp_path / "profile.json", tmp_path / "here.toml"
    write_program(program, str(file))
    words = ["run", file, "--steps", str(STEPS), "--engine", "mpi", "--profile", path]
    result = run_ranks(4, "-m", "ratrain", *words)
    assert result.returncode == 0, result.stderr
    assert sorted(event["name"] for event in spans(path)) == sorted(event["name"] for event in spans(profiled[1]))
    ends: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for event in sorted(spans(path), key=lambda event: event["ts"]):
        if event["cat"] in ("send", "recv"):
            ends.setdefault((event["args"]["meeting"], event["cat"]), []).append(event)
    for (meeting, keyword), received in ends.items():
        if keyword == "recv":
            for sent, arrived in zip(ends[meeting, "send"], received, strict=True):
                assert arrived["ts"] + arrived["dur"] >= sent["ts"]
    assert main(["calibrate", "--profile", str(path), "-o", str(out)]) == 0
    machine = load_machine(str(out))
    assert machine.constants["link_bandwidth"].certainty == "fitted"
    assert shared_cores_step_seconds(program, machine, 2) > 0


@needs_mpi
@pytest.mark.full
def test_clocks_of_other_machines_are_brought_to_that_of_process_0() -> None:
    """Three processes with clocks of their own, each as if on another machine; the offsets found are within their errors."""
    result = run_ranks(3, ROOT / "tests" / "targets" / "runtime" / "ranks" / "ranks_clocks.py", "mpi")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert len(found) == 3
    for process, (seconds, error) in enumerate(found):
        assert abs(seconds + 1000.0 * process) <= error + 1e-4
        assert error < 0.5


def as_if(path: Path, made: Path, change: Callable[[dict[str, Any]], None]) -> str:
    """A profile whose data are changed; where the other file is."""
    data = json.loads(path.read_text())
    change(data)
    made.write_text(json.dumps(data))
    return str(made)


def times(
    factor: float, ranks_per_core: float | None = None, concurrency: str = "threads"
) -> Callable[[dict[str, Any]], None]:
    """As if every op had taken so many times as long."""

    def change(data: dict[str, Any]) -> None:
        data["otherData"] |= {"concurrency": concurrency, "ranks_per_core": ranks_per_core}
        for event in data["traceEvents"]:
            if event["ph"] == "X":
                event["dur"] *= factor
                event["args"]["cpu"] *= factor

    return change


def with_routines(data: dict[str, Any]) -> None:
    """As if no other op had run."""
    data["traceEvents"] = [e for e in data["traceEvents"] if e["ph"] != "X" or e["args"]["routine"] is not None]


def without_routines(data: dict[str, Any]) -> None:
    """As if no block had run."""
    data["traceEvents"] = [e for e in data["traceEvents"] if e["ph"] != "X" or e["args"]["routine"] is None]


def test_profiles_are_joined(profiled: tuple[Program, Path], tmp_path: Path) -> None:
    """What is in one of them alone is as it is there; what is in both takes the mean."""
    whole = measured([str(profiled[1])])
    parts = [as_if(profiled[1], tmp_path / f"{part.__name__}.json", part) for part in (with_routines, without_routines)]
    known = [measured([path]).keys() for path in parts]
    assert all(known)
    joined = measured(parts)
    assert joined.keys() == known[0] | known[1]
    assert joined == pytest.approx({key: whole[key] for key in joined})
    usual, slow = (as_if(profiled[1], tmp_path / f"{factor}.json", times(factor)) for factor in (1.0, 3.0))
    assert measured([usual, slow]) == pytest.approx({key: 2 * each for key, each in measured([usual]).items()})


def with_steps_of(
    seconds: float, program: Program | None, ranks_per_core: float = 2.0
) -> Callable[[dict[str, Any]], None]:
    """As if every step had taken so long, of ranks that shared cores."""

    def change(data: dict[str, Any]) -> None:
        times(1.0, ranks_per_core)(data)
        steps = [[step, begin, seconds * 1e6] for step, begin, _ in data["otherData"]["steps"]]
        container = None if program is None else b64encode(program_bytes(program)).decode()
        data["otherData"] |= {"steps": steps, "rtx": container}

    return change


def test_ranks_that_shared_cores_say_what_that_costs(profiled: tuple[Program, Path], tmp_path: Path) -> None:
    """The machine predicts the step that they took, and nothing else for ranks that have cores."""
    program, path = profiled
    usual = as_if(path, tmp_path / "usual.json", times(1.0, 1.0))
    without = machine_from_profiles([usual], "m", PEAK).machine
    free, out = shared_cores_step_seconds(program, without, 2), tmp_path / "here.toml"
    shared = as_if(path, tmp_path / "shared.json", with_steps_of(1.2 * free, program))
    assert main(["calibrate", "--profile", shared, "--profile", usual, "-o", str(out)]) == 0
    machine = machine_from_profiles([shared, usual], "m", PEAK).machine
    assert load_machine(str(out)).core_sharing == pytest.approx(machine.core_sharing)
    assert 0.1 < machine.core_sharing < 0.4
    assert machine.table == without.table
    assert shared_cores_step_seconds(program, machine, 2) == pytest.approx(1.2 * free, rel=1e-3)
    clusters = program.plan.clusters
    assert shared_cores_step_seconds(program, machine, clusters) == shared_cores_step_seconds(
        program, without, clusters
    )
    assert machine_from_profiles([shared], "m", PEAK).machine.core_sharing == 0
    quick = as_if(path, tmp_path / "quick.json", with_steps_of(0.5 * free, program))
    assert machine_from_profiles([quick, usual], "m", PEAK).machine.core_sharing == 0
    mean = machine_from_profiles([shared, quick, usual], "m", PEAK).machine.core_sharing
    assert mean == pytest.approx(machine.core_sharing / 2)


def test_profiles_of_ranks_that_shared_cores_are_refused_where_they_cannot_tell(
    profiled: tuple[Program, Path], tmp_path: Path
) -> None:
    program, path = profiled
    usual = as_if(path, tmp_path / "usual.json", times(1.0, 1.0))
    unlike = as_if(path, tmp_path / "unlike.json", times(1.0))
    with pytest.raises(DiagnosticError, match="not the same"):
        machine_from_profiles([unlike, str(path)], "m", PEAK)
    disturbed = as_if(path, tmp_path / "disturbed.json", with_steps_of(60.0, program))
    with pytest.raises(DiagnosticError, match=r"\d\.\d times as long"):
        machine_from_profiles([usual, disturbed], "m", PEAK)
    older = as_if(path, tmp_path / "older.json", with_steps_of(1.0, None))
    with pytest.raises(DiagnosticError, match="does not have the program"):
        machine_from_profiles([usual, older], "m", PEAK)
    shared = as_if(path, tmp_path / "shared.json", with_steps_of(1.0, program))
    other = as_if(Path(shared), tmp_path / "other.json", without_routines)
    with pytest.raises(DiagnosticError, match="other routines"):
        machine_from_profiles([usual, other], "m", PEAK)
    for wrong in ("no program", "UkFU", 7):
        broken = as_if(
            Path(shared), tmp_path / "broken.json", lambda data, rtx=wrong: data["otherData"].update(rtx=rtx)
        )  # type: ignore[misc]
        with pytest.raises(DiagnosticError, match="RT002"):
            machine_from_profiles([usual, broken], "m", PEAK)


def measured(paths: list[str]) -> dict[tuple[str, float], float]:
    """Seconds by key and size; the size of a routine is seconds by fitted rates, and left out."""
    table = machine_from_profiles(paths, "m", PEAK).machine.table
    return {(op.key, 0.0 if SHAPES_MARK in op.key else op.size): op.seconds for op in table.ops}

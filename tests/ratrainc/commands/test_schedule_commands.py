"""Tables of actions of compiled modules, and the three commands around them: lint, export, schedule."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain import api
from ratrain.passes.manager import PassManager
from ratrain.ratrain_ir.analysis.actions import (
    actions_of_module,
    actions_of_orders,
    compute_only,
    torch_csv_lines,
    with_gathered_parameters,
)
from ratrain.ratrain_ir.ops.base import Op, Payload
from ratrain.ratrain_ir.ops.compute import Backward, Forward
from ratrain.ratrain_ir.ops.messages import Send
from ratrain.ratrain_ir.schedules.named import SCHEDULES
from ratrain.ratrain_ir.testing.fake_target import FakeTarget
from ratrain.ratrain_ir.testing.strategies import cases
from ratrain.ratrain_ir.verifier.schedule_rules import check_schedule
from ratrain.ratrainc.cli import main
from tests.ratrain_ir.verifier.schedule_tables import CROSSED, ROOT, runs

# modules


@settings(max_examples=25)
@given(
    cases(max_layers=3, max_stages=4, max_chunks=1, max_slices=1, max_micro_batches=5),
    st.sampled_from(("gpipe", "1f1b", "zb-h1")),
)
def test_compiled_modules_export_soundly(case, schedule: str) -> None:
    module = PassManager(FakeTarget()).run(case.module(), f"place-{schedule}")
    plan = module.plan
    table = actions_of_module(module)
    lowered, bare = with_gathered_parameters(table), compute_only(table)
    for checked in (table, lowered, bare):
        check_schedule(checked)
    assert lowered.is_lowered == (plan.pp > 1)
    assert not bare.is_lowered
    order = SCHEDULES[schedule].actions
    assert bare == actions_of_orders([order(plan.shape, stage) for stage in range(plan.pp)])
    home = list(range(plan.pp))
    rows = [line.split(",") for line in torch_csv_lines(lowered)]
    assert runs(rows, home, plan.micro_batches, rendezvous=False)
    assert runs(rows, home, plan.micro_batches, rendezvous=True)


def postponed(ops: list[Op], work: type[Op], payload: Payload) -> list[Op]:
    """The ops with all of micro-batch 0's work and its message, but for the first op, after that of micro-batch 1."""
    mine = [op for op in ops if type(op) is work or (type(op) is Send and op.payload is payload)]
    late = [op for op in mine if op.micro_batch == 0][1:]
    kept = [op for op in ops if op not in late]
    after = 1 + max(n for n, op in enumerate(kept) if type(op) is work and op.micro_batch == 1)
    return kept[:after] + late + kept[after:]


def test_a_stage_has_done_its_work_when_its_last_block_has() -> None:
    module = api.lowered(str(ROOT / "examples/tiny.json"), str(ROOT / "examples/tiny.toml"))
    first, last = module.stages
    first.ops = postponed(first.ops, Forward, Payload.ACTIVATION)
    last.ops = postponed(last.ops, Backward, Payload.GRADIENT)
    rows = [[str(action) for action in row] for row in actions_of_module(module).rows]
    assert rows[0][:4] == ["0F1", "0F0", "0SEND_F0", "0SEND_F1"]
    assert rows[1][8:12] == ["1B1", "1B0", "1SEND_B0", "1SEND_B1"]


# commands


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A compiled schedule of the example."""
    path = tmp_path_factory.mktemp("export") / "tiny.rtir"
    model, plan = (str(ROOT / "examples" / name) for name in ("tiny.json", "tiny.toml"))
    assert main(["compile", "--model", model, "--plan", plan, "-o", str(path)]) == 0
    return path


def test_export_writes_what_lint_accepts(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["export", str(tiny), "--format", "torch-csv"]) == 0
    rows = capsys.readouterr().out
    assert rows == "0F0,0F1,0B0,0F2,0B1,0F3,0B2,0B3\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n"
    path = tmp_path / "tiny.csv"
    assert main(["export", str(tiny), "--lowered", "-o", str(path)]) == 0
    assert path.read_text().startswith("0UNSHARD,0F0,0SEND_F0,0F1,0RECV_B0,0SEND_F1,0B0")
    assert main(["lint", str(path)]) == 0
    assert "sound (2 ranks, 2 stages, 4 micro-batches, 38 actions, with messages)" in capsys.readouterr().out


def test_export_refuses_an_order_that_hangs_one_action_at_a_time(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = tiny.read_text().splitlines(keepends=True)
    start = next(n for n, line in enumerate(lines) if "stage @1 {" in line)
    send, recv = (
        next(n for n, line in enumerate(lines) if n < start and text in line)
        for text in ("send activation m0 @1", "recv gradient m0 @1")
    )
    lines.insert(send, lines.pop(recv))  # engines run side by side, so the module is still sound
    edited = tmp_path / "edited.rtir"
    edited.write_text("".join(lines))
    assert main(["verify", str(edited)]) == 0
    assert main(["export", str(edited)]) == 0
    capsys.readouterr()
    assert main(["export", str(edited), "--lowered"]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert f"{edited}:{send + 1}:" in shown.err
    assert "error[RT042]: the schedule hangs with buffered sends" in shown.err


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        ("1f1b", "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"),
        ("gpipe", "0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1F1,1F2,1B0,1B1,1B2\n"),
        ("zb-h1", "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1W2\n"),
    ],
)
def test_schedule_prints_a_row_a_stage(
    kind: str, rows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["schedule", "--kind", kind, "--stages", "2", "--micro-batches", "3"]
    assert main(words) == 0
    assert capsys.readouterr().out == rows
    path = tmp_path / "s.csv"
    assert main([*words, "-o", str(path)]) == 0
    assert path.read_text() == rows
    assert main(["lint", str(path), "--format", "torch-csv"]) == 0


@pytest.mark.parametrize(
    ("words", "rows"),
    [
        ("interleaved", "0F0,0F1,2F0,2F1,2B0,2B1,0B0,0B1\n1F0,1F1,3F0,3B0,3F1,3B1,1B0,1B1\n"),
        ("breadth-first --layout vee", "0F0,0F1,3F0,3F1,3B0,3B1,0B0,0B1\n1F0,1F1,2F0,2F1,2B0,2B1,1B0,1B1\n"),
        (
            "v-min",
            "0F0,3F0,3I0,0F1,3W0,0I0,0W0,3F1,3I1,3W1,0I1,0W1\n1F0,2F0,2I0,1I0,1F1,2F1,2W0,1W0,2I1,1I1,2W1,1W1\n",
        ),
        (
            "seq1f1b --slices 2",
            "0F0.0,0F0.1,0F1.0,0B0.1,0F1.1,0B0.0,0B1.1,0B1.0\n1F0.0,1F0.1,1B0.1,1F1.0,1B0.0,1F1.1,1B1.1,1B1.0\n",
        ),
    ],
)
def test_schedule_puts_the_chunks_of_a_stage_into_one_row(
    words: str, rows: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "s.csv"
    given = ["schedule", "--stages", "2", "--micro-batches", "2", "--kind", *words.split()]
    assert main(given) == 0
    assert capsys.readouterr().out == rows
    assert main([*given, "-o", str(path)]) == 0
    assert main(["lint", str(path)]) == 0


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("zb-v --chunks 3", "has two chunks a stage, not 3; for example 'ratrainc schedule --kind zb-v"),
        ("zb-v --layout loop", "in a vee, not in a loop"),
        ("interleaved --chunks 1", "with one use 1f1b"),
        ("interleaved --slices 2", "not 2 slices of each"),
        ("1f1b --layout vee", "--layout vee changes nothing with one chunk a stage"),
        ("gpipe --chunks 2", "has one chunk a stage, not 2"),
        ("seq1f1b", "--micro-batches 8 --slices 4'"),
        ("zb-v --stages 1025", "for up to 1,024 stages"),
    ],
)
def test_schedule_refuses_what_contradicts(words: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    stages = () if "--stages" in words else ("--stages", "2")
    assert main(["schedule", *stages, "--micro-batches", "2", "--kind", *words.split()]) == 2
    assert why in " ".join(capsys.readouterr().err.split())


def test_schedule_tells_what_each_kind_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "--help"]) == 0
    table = capsys.readouterr().out.partition("what it is for")[2]
    assert all(kind in table for kind in SCHEDULES)


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize(("stages", "micro_batches"), [("100000", "100000"), ("1", "9" * 30), ("9" * 30, "1")])
def test_a_table_that_nobody_could_read_is_refused(
    kind: str, stages: str, micro_batches: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sliced = ["--slices", "2"] if kind == "seq1f1b" else []
    assert main(["schedule", "--kind", kind, "--stages", stages, "--micro-batches", micro_batches, *sliced]) == 2
    assert "is longer than 'ratrainc lint' reads (8 MiB)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("0F1,0F0,0B0,0B1\n", "'0F0' comes after '0F1', but the forwards"),
        ("0F0,0F1,0B1,0B0\n", "'0B0' comes after '0B1', but the input gradients"),
        ("0F0,0F1,0I0,0I1,0W1,0W0\n", "'0W0' comes after '0W1', but the weight gradients"),
        ("0F0,0F1,0B0,0B1\n", None),
    ],
)
def test_lint_names_micro_batches_that_do_not_ascend(
    table: str, message: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "s.csv"
    path.write_text(table)
    assert main(["lint", str(path)]) == 0  # sound under runtimes that add in any order
    told = " ".join(capsys.readouterr().out.split())
    assert ("'place-from-file' refuses it" in told) == (message is not None)
    assert message is None or message in told
    assert main(["lint", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ascending"] is (message is None)


def test_lint_prints_one_json_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "s.csv"

    def linted(text: str) -> tuple[int, dict[str, object]]:
        path.write_text(text)
        code = main(["lint", str(path), "--json"])
        return code, json.loads(capsys.readouterr().out)

    worth = {
        "units": 3.0,
        "bubble_fraction": 0.0,
        "bubble_to_work": 0.0,
        "in_flight": [1],
        "in_flight_of_stages": {"0": 1},
        "timed": None,
    }
    sound = {"sound": True, "diagnostics": [], "ranks": 1, "actions": 2, "ascending": True, "worth": worth}
    assert linted("0F0,0B0\n") == (0, sound)
    code, report = linted(CROSSED)
    assert (code, report["sound"], report["ranks"], report["actions"]) == (1, False, 2, 16)
    assert [(d["code"], d["line"], d["column"]) for d in report["diagnostics"]] == [("RT041", 2, 1)]
    code, report = linted("0F0,oops\n")
    assert (code, report["sound"], report["ranks"], report["actions"]) == (1, False, None, None)
    assert report["worth"] is None
    assert [d["code"] for d in report["diagnostics"]] == ["RT007"]


def test_lint_says_what_a_schedule_is_worth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "s.csv")
    assert main(["schedule", "--kind", "interleaved", "--stages", "4", "--micro-batches", "8", "-o", path]) == 0
    assert main(["lint", path, "--forward", "0.5", "--backward", "1.5"]) == 0
    shown = capsys.readouterr().out
    assert "a step takes 57 units: the bubble is 15.8% of it, 18.8% of the work" in shown
    assert "a step takes 38.00 s with the times given: the bubble is 15.8% of it, 18.8% of the work" in shown
    assert "│ 0    │ 0: 8, 4: 4 │        11 │ 32.00 s │ 6.00 s │" in shown, "work and idle are in the step's unit"
    assert main(["lint", path]) == 0
    assert "│ 0    │ 0: 8, 4: 4 │        11 │   48 │    9 │" in capsys.readouterr().out
    assert main(["lint", path, "--forward", "0.5", "--backward", "1.5", "--json"]) == 0
    worth = json.loads(capsys.readouterr().out)["worth"]
    assert (worth["units"], worth["timed"]["seconds"]) == (57, 38)
    assert worth["bubble_to_work"] == worth["timed"]["bubble_to_work"] == 3 / 16
    assert worth["in_flight"] == [11, 9, 7, 5]
    assert worth["in_flight_of_stages"]["4"] == 4


def test_lint_takes_the_weight_half_from_the_backward(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "s.csv")
    assert main(["schedule", "--kind", "zb-h1", "--stages", "4", "--micro-batches", "8", "-o", path]) == 0
    for words, seconds in (([], 8 * 6 + 3 * (2 + 2 - 2)), (["--weight", "1"], 8 * 6 + 3 * (2 + 3 - 1))):
        capsys.readouterr()
        assert main(["lint", path, "--forward", "2", "--backward", "4", *words, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["worth"]["timed"]["seconds"] == seconds


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--forward 1", "--forward and --backward together"),
        ("--backward 1", "--forward and --backward together"),
        ("--weight 1", "--forward and --backward together"),
        ("--forward 1 --backward 1 --weight 1", "--weight 1 must be less than --backward 1"),
        ("--forward 1 --backward 2 --weight 0.5", "--weight changes nothing: the schedule has no backward in halves"),
        ("--forward 0 --backward 2", "'--forward'"),
        ("--forward 1 --backward inf", "'--backward'"),
    ],
)
def test_times_that_contradict_are_refused(
    words: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "s.csv"
    path.write_text("0F0,0B0\n")
    assert main(["lint", str(path), *words.split()]) == 2
    assert why in " ".join(capsys.readouterr().err.split())


def test_lint_of_sharded_stages(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tiny.csv"
    assert main(["export", str(tiny), "--lowered", "-o", str(path)]) == 0
    assert main(["lint", str(path), "--sharded"]) == 0
    path.write_text(path.read_text().replace("1REDUCE_GRAD,", "").replace("0UNSHARD,", ""))
    capsys.readouterr()
    assert main(["lint", str(path), "--sharded"]) == 1
    shown = capsys.readouterr().err
    assert "error[RT008]: '0F0' needs the parameters of stage 0" in shown
    assert "error[RT009]: the gradients of stage 1 are never reduced" in shown
    assert main(["lint", str(path), "--sharded", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["worth"] is None


@pytest.mark.parametrize("words", [["lint"], ["lint", "x.csv", "--format", "xml"], ["schedule", "--kind", "1f1b"]])
def test_wrong_usage(words: list[str]) -> None:
    assert main(words) == 2


def test_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", str(tmp_path / "none.csv"), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["diagnostics"][0]["code"] == "RT002"


@pytest.mark.parametrize("name", ["lint", "export", "schedule"])
def test_help_shows_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    assert f"  ratrainc {name} " in capsys.readouterr().out

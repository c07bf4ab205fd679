"""`ratrainc simulate --times`: a textbook case is a command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ratrain.ratrainc.choices.times_text import textbook_times
from ratrain.ratrainc.cli import main
from ratrain.ratrainc.running.examples import example_path

SIZES = {"num_hidden_layers": 4, "hidden_size": 16, "intermediate_size": 24, "vocab_size": 256}
CONFIG = json.loads(example_path("tiny.json").read_text()) | SIZES
PLAN = """\
[parallel]
pp = 4
dp = 1
[batch]
micro_batch_size = 1
micro_batches = 6
seq_len = 8
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a program in 1F1B and one in ZB-H1 order, P = 4 and M = 6."""
    folder = tmp_path_factory.mktemp("times")
    (folder / "m.json").write_text(json.dumps(CONFIG))
    (folder / "p.toml").write_text(PLAN)
    given = ["compile", "--model", str(folder / "m.json"), "--plan", str(folder / "p.toml")]
    for name, passes in (("1f1b", "place-1f1b"), ("zb-h1", "place-zb-h1")):
        assert main([*given, "--passes", f"{passes},allocate-ddr", "-o", str(folder / f"{name}.rtx")]) == 0
    assert main([*given, "--passes", "place-1f1b", "-o", str(folder / "placed.rtir")]) == 0
    return folder


def found(folder: Path, capsys: pytest.CaptureFixture[str], name: str, *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["simulate", str(folder / name), *words, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert isinstance(data, dict)
    return data


def test_json_has_the_step_and_the_bubble_in_the_unit_of_the_times(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = found(folder, capsys, "1f1b.rtx", "--times", "1,2,1,0")
    assert data["step_seconds"] == pytest.approx((6 + 3) * 4, rel=1e-12)
    assert data["bubble_fraction"] == pytest.approx(3 / 9, rel=1e-12)
    assert [stage["bubble_fraction"] for stage in data["stages"]] == pytest.approx([3 / 9] * 4)
    assert data["times"] == {"forward": 1, "backward_input": 2, "backward_weight": 1, "send": 0}
    assert not {"machine", "mfu", "tokens_per_second"} & data.keys()
    split = found(folder, capsys, "zb-h1.rtx", "--times", "1,2,1,0")
    assert split["step_seconds"] == pytest.approx(6 * 4 + 3 * (1 + 2 - 1), rel=1e-12)


def test_a_machine_has_its_bubble_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = found(folder, capsys, "1f1b.rtx")
    stages = data["stages"]
    assert data["bubble_fraction"] == pytest.approx(sum(stage["bubble_fraction"] for stage in stages) / 4)
    assert stages[0]["bubble_fraction"] == stages[0]["idle_seconds"] / data["step_seconds"]


def test_a_file_says_more(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    times = tmp_path / "times.toml"
    times.write_text("forward = 1\nbackward = 3\n")
    words = ("1f1b.rtx", "--times", str(times))
    assert found(folder, capsys, *words)["step_seconds"] == pytest.approx(9 * 4, rel=1e-12)
    times.write_text("forward = 1\nbackward = 3\nsend = 0.25\nupdate = 2\n")
    assert found(folder, capsys, *words)["step_seconds"] > 9 * 4 + 6 * 0.25
    times.write_text("forward = 1\nbackward = 3\nrecompute = 1\n")
    assert found(folder, capsys, *words)["step_seconds"] == pytest.approx(9 * 4, rel=1e-12)  # nothing is recovered


def test_a_schedule_that_is_not_allocated_may_name_the_machine_it_is_allocated_for(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = found(folder, capsys, "placed.rtir", "--times", "1,2,1,0", "--machine", "mt3000-tiles")
    assert data["step_seconds"] == pytest.approx(9 * 4, rel=1e-12)


def test_the_text_names_the_bubble_and_no_seconds(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["simulate", str(folder / "1f1b.rtx"), "--times", "10,20,10,0"]) == 0
    shown = capsys.readouterr().out
    assert "step (simulated): 360, from cold 360; bubble fraction 0.3333" in shown
    assert "tokens/s" not in shown


def test_rendezvous_and_traces_go_with_times(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "t.json"
    buffered = found(folder, capsys, "1f1b.rtx", "--times", "1,2,1,3")
    data = found(folder, capsys, "1f1b.rtx", "--times", "1,2,1,3", "--rendezvous", "--trace", str(trace))
    assert data["step_seconds"] > buffered["step_seconds"]
    assert json.loads(trace.read_text())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1,2,3", "has 3 of the four numbers"),
        ("1,2,3,4,5", "has 5 of the four numbers"),
        ("1,x,3,4", "in numbers"),
        ("1,,3,4", "in numbers"),
        ("1,-2,3,4", "from 0"),
        ("nan,1,1,1", "from 0"),
        ("inf,1,1,1", "from 0"),
        ("0,0,0,1", "not all of T_F, T_B, T_W are 0"),
    ],
)
def test_times_that_are_none_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        textbook_times(text)
    assert main(["simulate", str(folder / "1f1b.rtx"), "--times", text]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("forward = ", {1: "TOML"}),
        ("forward = 1\nbackwards = 2\nsend = -1\nupdate = true\n", {2: "backward'", 3: "from 0", 4: "number"}),
        ("forward = 1\nbackward = 2\nbackward_weight = 1\n", {2: "the halves alone"}),
        ("forward = 0\n", {1: "takes any time"}),
        ("[times]\nforward = 1\n", {1: "times"}),
    ],
)
def test_all_that_is_wrong_with_a_file_of_times_is_said_at_its_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, lines: dict[int, str]
) -> None:
    times = tmp_path / "times.toml"
    times.write_text(text)
    assert main(["simulate", str(folder / "1f1b.rtx"), "--times", str(times)]) == 1
    shown = capsys.readouterr().err
    for line, words in lines.items():
        assert f"times.toml:{line}:" in shown
        assert words in shown


def test_a_file_of_whole_backwards_does_not_time_halves(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    times = tmp_path / "times.toml"
    times.write_text("forward = 1\nbackward = 2\n")
    assert main(["simulate", str(folder / "zb-h1.rtx"), "--times", str(times)]) == 1
    assert "backward_input and backward_weight" in capsys.readouterr().err


def test_a_trace_does_not_replace_the_times(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--times", str(folder / "t.toml"), "--trace", str(folder / "t.toml")]
    assert main(["simulate", str(folder / "1f1b.rtx"), *words]) == 2
    assert "same file" in capsys.readouterr().err

"""The command `run`: what it logs and draws, on which data it trains, how it is saved, resumed and interrupted."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ratrain.ratrainc.cli import main

if TYPE_CHECKING:
    from tests.ratrainc.commands.command_runs import Cli


def log_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a log."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_run_logs_a_line_a_step(cli: Cli, tmp_path: Path) -> None:
    log = tmp_path / "losses.jsonl"
    found = cli.good("run", "a.rtx", "--steps", "4", "--data", "text.txt", "--log", str(log))
    lines = log_lines(log)
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    for line in lines:
        assert {"step", "loss", "tokens", "tokens_per_second"} <= line.keys()
        assert line["tokens"] == 2 * 3 * 16
        assert line["tokens_per_second"] > 0
        assert 0 < line["loss"] < 8
    assert "loss" in found.out


def test_run_evaluates_and_draws(cli: Cli, tmp_path: Path) -> None:
    logs = [tmp_path / "alone.jsonl", tmp_path / "evaluated.jsonl"]
    words = ("run", "a.rtx", "--steps", "5", "--data", "text.txt", "--log")
    cli.good(*words, str(logs[0]))
    (tmp_path / "other.txt").write_text("the lazy dog jumps over the quick brown fox. " * 40, "utf-8")
    evaluation = ("--eval-every", "2", "--eval-data", str(tmp_path / "other.txt"), "--eval-batches", "1")
    found = cli.good(*words, str(logs[1]), *evaluation, "--plot", str(tmp_path / "loss.svg"))
    alone, evaluated = map(log_lines, logs)
    assert [line["loss"] for line in alone] == [line["loss"] for line in evaluated]
    assert {line["eval_loss"] for line in alone} == {None}
    assert [line["step"] for line in evaluated if line["eval_loss"] is not None] == [1, 3, 4]
    assert evaluated[4]["eval_loss"] < evaluated[1]["eval_loss"]
    assert all(line["mfu"] > 0 and line["learning_rate"] > 0 for line in alone)
    assert "held out" in found.out
    assert "ETA" in found.out
    picture = (tmp_path / "loss.svg").read_text("utf-8")
    assert 'id="training"' in picture
    assert 'id="held-out"' in picture


def test_run_prints_one_object(cli: Cli, tmp_path: Path) -> None:
    log = tmp_path / "losses.jsonl"
    found = cli.good("run", "a.rtx", "--steps", "2", "--log", str(log), "--json").json()
    assert [step["loss"] for step in found["steps"]] == [line["loss"] for line in log_lines(log)]
    assert found["interrupted"] is False


def test_run_takes_an_allocated_schedule_and_gives_the_same_losses(cli: Cli, tmp_path: Path) -> None:
    logs = []
    for number, words in enumerate((("a.rtx",), ("a.rtir",), ("a.rtx", "--interleave", "9"))):
        log = tmp_path / f"{number}.jsonl"
        cli.good("run", *words, "--steps", "3", "--data", "text.txt", "--log", str(log))
        logs.append([line["loss"] for line in log_lines(log)])
    assert logs[0] == logs[1] == logs[2]


def test_run_resumes_where_it_saved(cli: Cli, tmp_path: Path) -> None:
    words = ("run", "a.rtx", "--data", "text.txt", "--order", "sequential", "--seed", "3")
    logs = [tmp_path / f"{name}.jsonl" for name in ("whole", "first", "rest")]
    place = str(tmp_path / "checkpoint")
    cli.good(*words, "--steps", "5", "--log", str(logs[0]))
    assert place in cli.good(*words, "--steps", "2", "--log", str(logs[1]), "--save", place).out
    cli.good(*words, "--steps", "3", "--log", str(logs[2]), "--resume", place, "--save", place)
    whole, first, rest = map(log_lines, logs)
    keys = ("step", "loss", "loss_scale")
    assert [[line[k] for k in keys] for line in first + rest] == [[line[k] for k in keys] for line in whole]
    manifest = json.loads((Path(place) / "manifest.json").read_text("utf-8"))
    assert manifest["step"] == 5


def test_run_trains_on_the_sequences_the_order_says(cli: Cli, tmp_path: Path) -> None:
    """`--order sequential`: step k trains on sequences k*G to (k+1)*G - 1, whatever stands elsewhere in the data."""
    text = (cli.folder / "text.txt").read_bytes()
    step_bytes = 6 * 16
    changed = tmp_path / "changed.txt"
    changed.write_bytes(text[: 2 * step_bytes + 1] + b"x" * (len(text) - 2 * step_bytes - 1))
    found = []
    for data in ("text.txt", str(changed)):
        words = ("run", "a.rtx", "--data", data, "--order", "sequential", "--steps", "3", "--json")
        found.append([step["loss"] for step in cli.good(*words).json()["steps"]])
    assert found[0][:2] == found[1][:2]
    assert found[0][2] != found[1][2]


def test_a_full_disk_ends_the_run_with_a_diagnostic(cli: Cli) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    found = cli("run", "a.rtx", "--steps", "1", "--log", "/dev/full")
    assert found.code == 1
    assert "error[RT002]" in found.err


@pytest.mark.parametrize("presses", [1, 2])
@pytest.mark.sampled(2)
def test_ctrl_c_ends_a_run_after_its_step(files: Path, tmp_path: Path, presses: int) -> None:
    """Once: the step is finished, logged and saved, exit 130. Twice: it stops at once, and what was saved stays."""
    log, place = tmp_path / "losses.jsonl", tmp_path / "checkpoint"
    words = ["run", "a.rtx", "--data", "text.txt", "--steps", "100000", "--log", str(log), "--save", str(place)]
    with subprocess.Popen(
        [sys.executable, "-m", "ratrain", *words],
        cwd=files,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        limit = time.monotonic() + 60
        while not (log.exists() and log.read_bytes().count(b"\n") >= 3) and time.monotonic() < limit:
            time.sleep(0.02)
        for _ in range(presses):
            running.send_signal(signal.SIGINT)
        _, errors = running.communicate(timeout=60)
    assert running.returncode == 130
    assert "Traceback" not in errors
    lines = log_lines(log)
    assert 3 <= len(lines) < 100000
    assert [line["step"] for line in lines] == list(range(len(lines)))
    leftover = [path.name for path in tmp_path.iterdir() if path not in (log, place)]
    assert not leftover
    if presses == 1:
        assert json.loads((place / "manifest.json").read_text("utf-8"))["step"] == len(lines)
        assert (
            main(
                ["run", str(files / "a.rtx"), "--data", str(files / "text.txt"), "--steps", "1", "--resume", str(place)]
            )
            == 0
        )

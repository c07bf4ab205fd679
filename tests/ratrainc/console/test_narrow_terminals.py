"""Eighty columns: nothing is cut, nothing is wider, words stay whole; and of what moves nothing is left behind."""

from __future__ import annotations

import io
import json
import re
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text

from ratrain.ratrain_ir.support.diagnostics import Diagnostic, Location
from ratrain.ratrainc.cli import main
from ratrain.ratrainc.console import console, heartbeat
from ratrain.ratrainc.console.console import drawn, progress, say, show_diagnostic, status, table
from ratrain.ratrainc.console.terminal import echo
from ratrain.ratrainc.console.wrapping import records, wrapped
from ratrain.ratrainc.running.examples import example_path
from tests.ratrainc.console.screens import terminal

MODEL, PLAN = str(example_path("tiny.json")), str(example_path("tiny.toml"))


@given(st.text(alphabet="ab '\n", max_size=200), st.integers(4, 40))
def test_lines_are_as_wide_as_they_may_be_and_lose_no_word(text: str, width: int) -> None:
    lines = wrapped(text, width).split("\n")
    assert all(len(line) <= width or len(line.split()) == 1 for line in lines)
    assert " ".join(lines).split() == text.split()
    assert wrapped(text, None) == text


def test_a_command_to_be_typed_stays_in_one_piece() -> None:
    command = "'ratrainc compile --model M --plan P.toml -o X.rtir --schedule-file s.csv'"
    assert command in wrapped(f"a table, not a schedule: {command} compiles it", 40).split("\n  ")


CELLS = st.lists(
    st.lists(st.text(alphabet="abc1", min_size=1, max_size=30), min_size=3, max_size=3), min_size=1, max_size=4
)


@given(CELLS, st.sampled_from([20, 60, 120]))
def test_a_table_of_any_width_shows_every_cell(rows: list[list[str]], width: int) -> None:
    for line in records(("a", "b", "c"), rows, width):
        assert len(line) <= width or len(line.split()) <= 2, "a name and its value"
    with pytest.MonkeyPatch.context() as patch, terminal(patch, width) as screen:
        table("a title", ("a", "b", "c"), rows)
    shown = re.sub(r"\s|[^a-c1]", "", "\n".join(screen.lines))
    for cell in (cell for row in rows for cell in row):
        assert cell in shown
    assert "…" not in screen.getvalue()


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("narrow") / "tiny.rtx")
    assert main(["compile", "--model", MODEL, "--plan", PLAN, "-o", path]) == 0
    return path


SEARCH = ("plan", "--model", MODEL, "--clusters", "4", "--global-batch", "16", "--seq-len", "128", "--quick")


@pytest.mark.parametrize(
    "words",
    [
        (*SEARCH, "--tokens", "1T", "--what-if", "link=1GB/s"),
        ("compile", "--model", MODEL, "--plan", PLAN),
        ("machines",),
        ("machines", "mt3000"),
        ("model", "llama-2-7b"),
        ("explain", "PROGRAM", "--no-levers"),
        ("explain", "PROGRAM", "--time"),
        ("simulate", "PROGRAM"),
        pytest.param(("doctor", "PROGRAM"), marks=pytest.mark.full),
        ("examples",),
        ("strategies",),
        ("compile", "--model", "tiny.toml", "--plan", PLAN),
        pytest.param(("run", "PROGRAM", "--steps", "2", "--kernels", "reference"), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_commands_keep_to_eighty_columns(program: str, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
    with terminal(monkeypatch) as screen:
        main([program if word == "PROGRAM" else word for word in words])
    lines = screen.lines
    assert len(lines) > 1
    assert not [line for line in lines if len(line) > 80 and len(line.split()) > 1]
    assert "…" not in "\n".join(lines)
    assert not [line for line in lines if "━━━━━━━━ " in line or "⠋" in line], "something that moved is still there"


def test_no_option_of_a_pass_is_wider_than_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as screen:
        main(["passes"])
    assert [line for line in screen.lines if len(line) > 80] == []
    assert "v-half" in screen.getvalue()


def test_the_planner_shows_all_its_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as screen:
        assert main([*SEARCH, "--tokens", "1T"]) == 0
    shown = "\n".join(screen.lines)
    assert all(f" {name} " in shown for name in ("step", "tokens/s", "peak", "tail", "days", "cluster-h"))


def test_json_stays_one_line_on_any_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch, 40) as screen:
        assert main(["machines", "--json"]) == 0
    assert json.loads(screen.getvalue())["machines"]


def test_the_caret_stays_under_its_place_where_words_are_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "x" * 60 + " bad " + "y" * 60
    with terminal(monkeypatch, 40) as screen:
        show_diagnostic(Diagnostic("RT001", "many words " * 10, Location("f", 1, 62, 3), source=source))
    (at,) = [index for index, line in enumerate(screen.lines) if " bad " in line]
    assert screen.lines[at].index("bad") == screen.lines[at + 1].index("^")


@pytest.mark.parametrize("moves", ["bar", "spinner", "dashboard"])
def test_of_what_moves_nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch, moves: str) -> None:
    """Lines of results, of diagnostics and of tables come out whole, in their order, and above what moves."""
    with terminal(monkeypatch) as screen:
        shown = {
            "bar": lambda: progress(3, "work"),
            "spinner": lambda: status("work"),
            "dashboard": lambda: drawn(lambda: Text("a dashboard\nof two lines")),
        }
        with shown[moves]():
            time.sleep(0.15)  # so that it is drawn
            say("first")
            echo("second", err=True)
            time.sleep(0.15)
            table("third", ("a",), [["1"]])
            echo("fourth")
    assert [line for line in screen.lines if line] == [
        "first",
        "second",
        "third",
        "┏━━━┓",
        "┃ a ┃",
        "┡━━━┩",
        "│ 1 │",
        "└───┘",
        "fourth",
    ]


@pytest.mark.parametrize(
    "said", ["", "first step: new kernels are compiled", "a candidate of many words and numbers " * 2]
)
def test_of_a_bar_its_length_gives_way_not_its_figures(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    with terminal(monkeypatch) as screen, progress(120, "training") as (bar, task):
        bar.update(task, completed=7, status=said)
        time.sleep(0.25)  # so that it is drawn
        drawn_now = screen.getvalue().rpartition("\r")[2]
    assert "7/120" in drawn_now
    assert "-:--:--" in drawn_now
    assert said[:20] in drawn_now
    assert "\n" not in drawn_now


def test_results_go_to_stdout_while_a_bar_is_on_the_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    results = io.StringIO()
    with terminal(monkeypatch) as screen:
        monkeypatch.setattr(sys, "stdout", results)
        console.output.cache_clear()
        with progress(3, "work"):
            say("a result")
            print("another")  # noqa: T201
    assert results.getvalue() == "a result\nanother\n"
    assert "result" not in screen.getvalue()


def test_in_a_pipe_there_are_signs_of_life(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(heartbeat, "EVERY_SECONDS", 0.02)
    with progress(4, "work") as (bar, task):
        bar.update(task, advance=1, status="at it")
        time.sleep(0.1)
    with status("reading") as tell:
        tell("reading: second part")
        time.sleep(0.1)
    shown = capsys.readouterr()
    assert not shown.out
    assert re.search(r"^work, 1 of 4 done: at it \(0:00:00 so far\)$", shown.err, re.MULTILINE)
    assert "reading: second part (0:00:00 so far)\n" in shown.err


def test_a_line_of_progress_does_not_wrap_for_two_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(heartbeat, "EVERY_SECONDS", 0.01)
    monkeypatch.setenv("COLUMNS", "80")
    for length in (80 - len(" (0:00:00)"), 80 - len(" (0:00:00 so far)")):
        with heartbeat.said_while_working(lambda length=length: "x" * length):  # type: ignore[misc]
            time.sleep(0.1)
    assert {len(line) for line in capsys.readouterr().err.splitlines()} == {80}


def test_one_process_of_several_gives_them(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(heartbeat, "EVERY_SECONDS", 0.01)
    with heartbeat.speaking(False), status("work"):
        time.sleep(0.05)
    assert not capsys.readouterr().err
    with heartbeat.speaking(True), status("work"):
        time.sleep(0.05)
    assert capsys.readouterr().err


def test_work_that_is_soon_done_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(4, "work"), status("work"):
        pass
    assert not capsys.readouterr().err


def test_a_compile_says_which_pass_is_at_work_and_which_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[str] = []
    monkeypatch.setattr("ratrain.ratrainc.console.console.status", lambda title: Told(title, told))
    passes = "place-1f1b,recompute{policy=full},allocate-ddr"
    assert main(["compile", "--model", MODEL, "--plan", PLAN, "--passes", passes, "-o", str(tmp_path / "a.rtir")]) == 0
    name = f"compiling {MODEL}: "
    assert [line.removeprefix(name) for line in told if line.startswith(name)] == [
        "lowering it",
        "place-1f1b, then recompute, allocate-ddr",
        "recompute, then allocate-ddr",
        "insert-release, then allocate-ddr",
        "legalise, then allocate-ddr",
        "allocate-ddr, the last pass",
    ]
    assert "inserted" not in capsys.readouterr().out


class Told:
    """A status that keeps what it is told."""

    def __init__(self, title: str, told: list[str]) -> None:
        self.told = told
        told.append(title)

    def __enter__(self):
        return self.told.append

    def __exit__(self, *_: object) -> None:
        """Nothing is drawn."""

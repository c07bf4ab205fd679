"""`ratrainc watch`: the page of logs that are whole, half, spoilt, growing, or lack something."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrainc.cli import main
from ratrain.ratrainc.watch import watching
from ratrain.ratrainc.watch.reading import GrowingLog
from ratrain.ratrainc.watch.watch_page import lacking, slow_ranks
from ratrain.targets.runtime.arena.locks import lock_path
from tests.ratrainc.report.report_page import Page


def line(step: int, **more: Any) -> str:
    return json.dumps({"step": step, "loss": 5.0 - step / 10, "tokens": 64, "tokens_per_second": 100.0, **more}) + "\n"


def read(path: Path) -> GrowingLog:
    log = GrowingLog(str(path))
    log.read()
    return log


def test_a_log_read_in_any_two_pieces_is_the_log_read_at_once(tmp_path: Path) -> None:
    path, text = tmp_path / "l.jsonl", "".join(map(line, range(3)))
    for cut in range(len(text) + 1):
        path.write_text(text[:cut])
        log = read(path)
        assert len(log.steps) == text[:cut].count("\n")
        assert log.half_line == (not text[:cut].endswith("\n") and cut > 0)
        with path.open("a") as stream:
            stream.write(text[cut:])
        log.read()
        assert list(log.steps) == [0, 1, 2]
        assert list(log.columns["loss"]) == pytest.approx([5.0, 4.9, 4.8])


def test_lines_that_cannot_be_read_are_left_out_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "l.jsonl"
    path.write_text(
        line(0) + "{broken\n" + '{"step": true}\n' + line(1, loss="high", gradient_norm=1e999) + '{"step": 2'
    )
    assert main(["watch", str(path)]) == 0
    page = (tmp_path / "l.html").read_text("utf-8")
    assert "2 lines cannot be read and are left out, the first is line 2" in page
    assert "the last line is half of one" in page
    assert "1 step without a finite loss, the first is step 1" in page
    assert "2 steps of 1 run" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["a note\n", "a note", '["step"]\n', '{"loss": 1}\n'])
def test_what_is_no_log_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "l.jsonl").write_text(text)
    with pytest.raises(DiagnosticError, match=r"RT002.*not a line of a run's log"):
        read(tmp_path / "l.jsonl")


def test_a_log_that_begins_anew_or_goes_back_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "l.jsonl"
    path.write_text("".join(map(line, range(5))))
    log = read(path)
    with path.open("a") as stream:
        stream.write(line(3, loss=9.0))
    log.read()
    assert (list(log.steps), log.columns["loss"][-1], len(log.ranks)) == ([0, 1, 2, 3], 9.0, 4)
    path.unlink()
    path.write_text(line(7))
    assert log.read()
    assert list(log.steps) == [7]
    assert not log.read()


def test_the_page_is_whole_asks_for_nothing_and_says_what_is_lacking(tmp_path: Path) -> None:
    path = tmp_path / "l.jsonl"
    path.write_text("".join(map(line, range(2000))))
    assert main(["watch", str(path), "--json"]) == 0
    text = (tmp_path / "l.html").read_text("utf-8")
    page = Page(text)
    assert "http:" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "https:" not in text
    assert not [tag for tag, values in page.tags if tag in ("link", "img", "iframe") or "src" in values]
    assert {"eval_loss", "gradient_norm", "resident_bytes", "slowest"} <= set(lacking(read(path)))
    assert "the log has no gradient norm" in text
    points = page.facts["runs"][0]["series"]["loss"]
    assert len(points) == 800
    assert points[-1][0] == 1999
    assert points[0][3] == 5.0
    assert points[-1][2] == pytest.approx(5.0 - 199.9)
    assert page.facts["reload"] is None


def test_smoothing_and_the_log_axis_have_labels_and_need_no_library(tmp_path: Path) -> None:
    """The controls are hidden until the script shows them: without it they would do nothing."""
    path = tmp_path / "l.jsonl"
    path.write_text("".join(map(line, range(3))))
    assert main(["watch", str(path)]) == 0
    page = Page((tmp_path / "l.html").read_text("utf-8"))
    named = {values["id"]: (tag, values) for tag, values in page.tags if "id" in values}
    assert named["smooth"][1]["type"] == "range"
    assert (named["log"][1]["type"], named["log"][1]["role"]) == ("checkbox", "switch")
    assert "hidden" in named["look"][1]
    labels = {values["for"] for tag, values in page.tags if tag == "label"}
    assert labels == {"smooth", "log"}
    for control in ("smooth", "log"):
        assert named[control][1]["aria-describedby"] in named


def test_ranks_that_are_slow_are_counted_without_the_first_step(tmp_path: Path) -> None:
    def of(most: float) -> dict[str, Any]:
        return {"compute_seconds": [{"least": 1.0, "median": 1.0, "most": most, "slowest": "stage @0 replica 3"}]}

    path = tmp_path / "l.jsonl"
    path.write_text(line(0, **of(9.0)) + line(1, **of(1.1)) + line(2, **of(1.5)) + line(3, **of(2.0)))
    assert slow_ranks(read(path)) == [("stage @0 replica 3", 2, 2.0)]


def test_two_logs_are_in_one_page_and_a_folder_names_its_logs(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / f"{name}.jsonl").write_text(line(0) + line(1))
    assert main(["watch", str(tmp_path), "-o", str(tmp_path / "both.html")]) == 0
    runs = Page((tmp_path / "both.html").read_text("utf-8")).facts["runs"]
    assert [run["name"] for run in runs] == ["first.jsonl", "second.jsonl"]


def test_other_files_of_a_folder_are_left_out_and_named_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    (tmp_path / "a-book.jsonl").write_text('{"text": "words"}\n')
    (tmp_path / "notes.jsonl").write_text("not even JSON\n")
    folder, page = str(tmp_path), tmp_path / "p.html"
    assert main(["watch", folder, "-o", str(page)]) == 1
    refused = capsys.readouterr().err
    assert "no file in the folder" in refused
    assert "a-book.jsonl" in refused
    (tmp_path / "losses.jsonl").write_text(line(0) + line(1))
    assert main(["watch", folder, "-o", str(page)]) == 0
    said = capsys.readouterr().err
    assert said.count("warning") == said.count("a-book.jsonl") == said.count("notes.jsonl") == 1
    assert [run["name"] for run in Page(page.read_text("utf-8")).facts["runs"]] == ["losses.jsonl"]
    assert main(["watch", str(tmp_path / "a-book.jsonl"), "-o", str(page)]) == 1


def test_a_page_of_others_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "l.jsonl").write_text(line(0))
    (tmp_path / "l.html").write_text("mine")
    assert main(["watch", str(tmp_path / "l.jsonl")]) == 1
    assert "name the page with -o" in capsys.readouterr().err
    assert (tmp_path / "l.html").read_text() == "mine"


def test_a_run_goes_on_while_another_process_holds_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page is written with each look, says that it reloads itself, and the last one does not."""
    path, page = tmp_path / "l.jsonl", tmp_path / "l.html"
    path.write_text(line(0))
    code = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print(1, flush=True); input()"
    command = [sys.executable, "-c", code, str(lock_path(str(path)))]
    seen: list[Any] = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()

        def look(seconds: float) -> None:
            seen.append((Page(page.read_text("utf-8")).facts["reload"], seconds))
            with path.open("a") as stream:
                stream.write(line(len(seen)))
            if len(seen) == 2:
                holder.communicate("\n")

        monkeypatch.setattr(watching.time, "sleep", look)
        assert main(["watch", str(path), "--every", "3"]) == 0
    assert seen == [(3.0, 3.0)] * 2
    facts = Page(page.read_text("utf-8")).facts
    assert facts["reload"] is None
    assert [point[0] for point in facts["runs"][0]["series"]["loss"]] == [0, 1, 2]


def test_ctrl_c_leaves_a_page_that_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "l.jsonl"
    path.write_text(line(0))
    monkeypatch.setattr(GrowingLog, "is_growing", True)
    monkeypatch.setattr(watching.time, "sleep", interrupt)
    assert main(["watch", str(path)]) == 130
    assert Page((tmp_path / "l.html").read_text("utf-8")).facts["reload"] is None

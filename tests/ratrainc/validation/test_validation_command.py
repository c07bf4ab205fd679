"""The command `validate`: its JSON, text and page, what it keeps of an interrupted call, and what it refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ratrain.ratrainc.cli import main
from ratrain.ratrainc.planner.search import workers
from ratrain.ratrainc.validation.outcome import validate
from ratrain.ratrainc.validation.validation_rows import read_validation_table
from ratrain.ratrainc.validation.validation_tables import row_text
from tests.ratrainc.validation.small_tables import table, validated

if TYPE_CHECKING:
    from ratrain.ratrainc.planner.search.plan_evaluation import PlanEvaluation, Task

LINES = (
    "# Toy rows of one stage.",
    "# They were made up.",
    "#",
    "# Left out: skew.",
    "id,class,split,model,plan,strategy,capacity,step_seconds,fits,bubble_fraction,times,group,needs",
    "a,step-time,fit,m.json,p.toml,,,1,,,,,",
    "b,out-of-memory,held-out,m.json,p.toml,full-save,1KiB,,yes,,,,",
    'c,bubble,held-out,m.json,p.toml,full-save,,,,0.2,"1,1,1,0",,',
    "d,scaling,held-out,m.json,p.toml,,,1,,,,g,",
    "e,scaling,held-out,m.json,p.toml,,,1,,,,g,",
    "f,scaling,held-out,m.json,p.toml,,,1,,,,,tp",
)


def called(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(["validate", *words])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_json_has_rows_errors_and_what_fits(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = table(folder, *LINES)
    code, out, _ = called(capsys, path, "--jobs", "1", "--json")
    data: dict[str, Any] = json.loads(out)
    assert code == 0
    assert data["tables"] == [path]
    assert [row["id"] for row in data["rows"]] == list("abcdef")
    assert [row["line"] for row in data["rows"]] == [6, 7, 8, 9, 10, 11]
    rows = {row["id"]: row for row in data["rows"]}
    assert rows["a"]["error"] == pytest.approx(rows["a"]["simulated"] - 1)
    assert rows["b"]["fits"] == {"measured": True, "simulated": False, "verdict": "false alarm"}
    assert rows["b"]["refusal"]
    assert rows["c"]["error"] == pytest.approx(0, abs=1e-12)
    assert rows["e"]["ratio"] == {"measured": 1.0, "simulated": 1.0}
    assert "simulated" not in rows["f"]
    assert data["errors"]["bubble"].keys() == {"held_out"}
    assert data["errors"]["step-time"]["fit"]["rows"] == 1
    assert data["ratio_errors"]["scaling"]["held_out"]["rows"] == 1
    assert data["fits"]["out-of-memory"]["false_alarms"] == 1
    assert data["left_out"] == {"tp": 1}


def test_the_text_has_each_class_and_the_errors_of_all_rows(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    many = [f"r{number},step-time,held-out,m.json,p.toml,,,1,,,,," for number in range(3)]
    code, out, _ = called(capsys, table(folder, *LINES, *many), "--jobs", "1")
    assert code == 0
    for words in ("step-time", "out-of-memory", "false alarm", "scaling, against the first", "left out: 1 row,", "r2"):
        assert words in out


def test_a_page_has_no_html_of_its_tables(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not of comments, of names of rows and files, or of what is left out; their links and code stay."""
    tag = "<script>alert(1)</script>"
    named = LINES[7].replace("c,", f"{tag}|*c*,", 1)
    lines = [f"# {tag} but `{tag}` is [code](a.md)", *LINES[:7], named, *LINES[8:]]
    lines += [f"{tag}2,step-time,held-out,m.json,p.toml,,,1,,,,,{tag}"]
    code, text, _ = called(capsys, table(folder, *lines, name="<b>toys.csv"), "--jobs", "1", "--markdown")
    assert code == 0
    assert text.replace(f"`{tag}`", "").count("<") == 0
    assert f"&lt;script>alert(1)&lt;/script> but `{tag}` is [code](a.md)" in text
    assert "## &lt;b&gt;toys" in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt; (1)." in " ".join(text.split())
    assert "| &lt;script&gt;alert(1)&lt;/script&gt;\\|\\*c\\* |" in text


def test_the_page_is_the_tables_with_their_comments(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, page = table(folder, *LINES, name="toys.csv"), folder / "page.md"
    code, printed, _ = called(capsys, path, path.replace("toys", "toys"), "--jobs", "1", "--markdown")
    assert code == 0
    code, out, _ = called(capsys, path, "--jobs", "1", "--markdown", "-o", str(page))
    text = page.read_text()
    assert code == 0
    assert out == f"wrote {page}\n"
    assert "## toys\n\nToy rows of one stage. They were made up.\n\nLeft out: skew.\n" in text
    assert "| b | held-out | fits | does not fit | false alarm |" in text
    assert "| c | held-out | 0.2000 | 0.2000 | +0.0000 |" in text
    assert all(len(line) <= 119 for line in text.splitlines() if not line.startswith("|"))
    assert not text.endswith("\n\n")
    assert text.startswith("# Validation\n")
    assert printed.startswith("# Validation\n")
    assert printed.count("## toys") == 2


def test_tables_are_all_read_before_the_first_row_is_simulated(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "evaluate", lambda _task: pytest.fail("it was simulated"))
    good = table(folder, *LINES)
    bad = table(folder, "id,class,split,model,step_seconds", "a,step-time,fit,m.json,-1", name="bad.csv")
    worse = table(folder, "id,class", name="worse.csv")
    code, out, err = called(capsys, good, bad, worse)
    assert (code, out) == (1, "")
    assert "bad.csv:2:" in err
    assert "worse.csv:1:" in err


def test_ctrl_c_ends_it_in_a_line_and_writes_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_task: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(workers, "evaluate", interrupted)
    page = folder / "page.md"
    code, out, err = called(capsys, table(folder, *LINES), "--jobs", "1", "--markdown", "-o", str(page))
    assert (code, out) == (130, "")
    assert err.strip().count("\n") == 0
    assert not page.exists()


def test_progress_is_told_row_by_row(folder: Path) -> None:
    heard: list[str] = []
    path = table(folder, *LINES)
    validate([read_validation_table(path)], 1, lambda outcome: heard.append(row_text(outcome)))
    assert len(heard) == 5
    assert all(": " in text for text in heard)


def test_results_are_kept_as_they_are_found_and_not_found_again(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, kept = table(folder, *LINES), folder / "rows.jsonl"
    evaluated: list[object] = []
    usual = workers.evaluate

    def counted(task: Task) -> PlanEvaluation:
        if len(evaluated) == stops_after:
            raise KeyboardInterrupt
        evaluated.append(task)
        return usual(task)

    monkeypatch.setattr(workers, "evaluate", counted)
    stops_after = 2
    asked = (path, "--jobs", "1", "--json")
    assert called(capsys, *asked, "--results", str(kept))[0] == 130
    assert kept.read_text().count("\n") == 2
    kept.write_text(kept.read_text() + '{"id": "half of a li')
    stops_after = 99
    code, resumed, err = called(capsys, *asked, "--results", str(kept))
    assert (code, len(evaluated)) == (0, 3), "of five rows, three are of one plan"
    assert err.count("measured ") + err.count("fit") >= 5, "a line a row"
    assert kept.read_text().count("\n") == 3
    assert json.loads(called(capsys, *asked)[1]) == json.loads(resumed)
    evaluated.clear()
    called(capsys, *asked, "--results", str(kept), "--machine", "mt3000-1.2ghz")
    assert evaluated, "another machine is another result"


def test_a_file_of_something_else_is_no_file_of_results(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, other = table(folder, *LINES), folder / "log.jsonl"
    other.write_text('{"step": 1, "loss": 2.0}\n')
    code, out, err = called(capsys, path, "--results", str(other))
    assert (code, out) == (1, "")
    assert "log.jsonl:1" in err
    assert other.read_text() == '{"step": 1, "loss": 2.0}\n'


@pytest.mark.parametrize("words", [("--json", "--markdown"), ("-o", "x.md"), ("--json", "-o", "x.md"), ("--jobs", "0")])
def test_words_that_contradict_each_other_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    assert called(capsys, table(folder, *LINES), *words)[0] == 2


def test_a_page_does_not_replace_a_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = table(folder, *LINES)
    before = Path(path).read_text()
    assert called(capsys, path, "--markdown", "-o", path)[0] == 2
    assert Path(path).read_text() == before


def test_numbers_are_finite(folder: Path) -> None:
    found = validated(folder, *LINES)
    errors = [each.error for each in found.outcomes if each.error is not None]
    assert errors
    assert all(map(math.isfinite, errors))

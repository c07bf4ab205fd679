"""Columns of allocation tables that would change the answer are honoured or refused by name; every advice leads to a table that is read."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain import api
from ratrain.ratrain_ir.support.diagnostics import Diagnostic, DiagnosticError
from ratrain.ratrain_ir.testing.strategies import allocation_problems
from ratrain.ratrainc.cli import main
from ratrain.ratrainc.memory.allocation_csv import parse_problem

PLAIN = "id,lower,upper,size\na,0,3,4\nb,0,6,8\n"


def refused(tmp_path: Path, text: str, capacity: int = 64) -> Diagnostic:
    path = tmp_path / "p.csv"
    path.write_text(text)
    with pytest.raises(DiagnosticError) as caught:
        api.alloc(str(path), capacity)
    return caught.value.diagnostics[0]


def placed(tmp_path: Path, text: str, capacity: int = 64) -> dict[str, int]:
    path = tmp_path / "p.csv"
    path.write_text(text)
    return api.alloc(str(path), capacity).offsets


def test_offsets_of_all_buffers_are_checked_and_kept(tmp_path: Path) -> None:
    text = "id,lower,upper,size,offset\na,0,3,4,20\nb,0,6,8,4\nc,3,6,4,20\n"
    assert placed(tmp_path, text) == {"a": 20, "b": 4, "c": 20}
    made = api.alloc(str(tmp_path / "p.csv"), 24)
    made.save(str(tmp_path / "q.csv"))
    assert (tmp_path / "q.csv").read_text() == text
    problem = refused(tmp_path, text, 23)
    assert (problem.code, "need 24 bytes, 1 more" in problem.message) == ("RT052", True)
    assert "leave the column 'offset' out" in (problem.help or "")


@pytest.mark.parametrize("offset", [0, 4, 11])
def test_given_offsets_that_overlap_are_refused_with_the_buffers(tmp_path: Path, offset: int) -> None:
    problem = refused(tmp_path, f"id,lower,upper,size,offset\na,2,3,4,{offset}\nb,0,6,12,0\n")
    assert problem.code == "RT050"
    assert "'b' and 'a' share bytes at time 2" in problem.message


@pytest.mark.parametrize(
    "text", ["id,lower,upper,size,offset\na,0,3,4,4\nb,0,6,4,\n", "offset,id,size,lower,upper\n,b,4,0,6\n4,a,4,0,3\n"]
)
def test_some_offsets_are_refused(tmp_path: Path, text: str) -> None:
    problem = refused(tmp_path, text)
    assert "offset of buffer 'a': it is given, and that of 'b' is not" in problem.message
    assert placed(tmp_path, text.replace("4,4\n", "4,\n").replace("\n4,a", "\n,a")).keys() == {"a", "b"}


@pytest.mark.parametrize("column", ["offset", "alignment", "gaps", "hint"])
def test_an_empty_column_says_nothing(tmp_path: Path, column: str) -> None:
    text = f"id,lower,upper,size,{column}\na,0,3,4,\nb,0,6,8,  \n"
    assert placed(tmp_path, text) == placed(tmp_path, PLAIN)
    made = api.alloc(str(tmp_path / "p.csv"), 64)
    made.save(str(tmp_path / "q.csv"))
    assert api.alloc(str(tmp_path / "q.csv"), 64).offsets == made.offsets


@pytest.mark.parametrize(("column", "value"), [("gaps", "2-8"), ("hint", "4"), ("hint", "0"), ("gaps", "x")])
def test_what_is_not_supported_is_refused_by_its_name(tmp_path: Path, column: str, value: str) -> None:
    problem = refused(tmp_path, f"id,{column},lower,upper,size\na,,0,3,4\nb,{value},0,6,8\n")
    assert f"{column} of buffer 'b': the column '{column}' is not supported" in problem.message
    assert problem.location is not None
    assert problem.location.line == 3


@settings(max_examples=40, deadline=None)
@given(allocation_problems(unit=1), st.sampled_from((1, 2, 3, 8)), st.sampled_from((1, 4)))
def test_sizes_that_are_rounded_up_as_advised_keep_alignments(
    tmp_path_factory: pytest.TempPathFactory, made: dict[str, Any], first: int, second: int
) -> None:
    tmp_path = tmp_path_factory.mktemp("t")
    spans = [(min(a for a, _ in each), max(b for _, b in each)) for each in made["intervals"] if each]
    rows = [
        (f"b{k}", *span, size, (first, second)[k % 2])
        for k, (span, size) in enumerate(zip(spans, made["sizes"], strict=False))
        if span[0] < span[1]
    ]
    if not rows:
        return

    def table(unit: int) -> str:
        lines = [f"{name},{low},{high},{-(-size // unit) * unit},{align}" for name, low, high, size, align in rows]
        return "\n".join(["id,lower,upper,size,alignment", *lines]) + "\n"

    common = first * second if first == 3 else max(first, second) if len(rows) > 1 else first
    text = table(1)
    if any(row[3] % common for row in rows):
        assert f"round every size up to a multiple of {common}" in (refused(tmp_path, text, 1 << 30).help or "")
        text = table(common)
    offsets = placed(tmp_path, text, 1 << 30)
    assert all(offsets[name] % align == 0 for name, _, _, _, align in rows)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("a,0,3,4", "a,0,3,9223372036854775807", "expected an integer between -1152921504606846976 and"),
        ("a,0,3,4", f"a,0,3,{'9' * 5000}", "expected an integer between"),
        ("a,0,3,4", "a,0,3,4.0", "size of buffer 'a': expected an integer in digits"),
        ("a,0,3,4", "a,0,3,1_000", "expected an integer in digits"),
        ("a,0,3,4", "a,0,3,٤", "expected an integer in digits"),
        ("a,0,3,4", "a,0.5,3,4", "lower of buffer 'a'"),
        ("a,0,3,4", "a,0,3,-4", "expected no less than 0, got -4"),
        ("a,0,3,4", "a,3,3,4", "expected more than lower, 3, got 3"),
        ("a,0,3,4", "b,0,3,4", "the buffer 'b' is declared twice; first in line 2"),
        ("a,0,3,4", "a,0,3,", "expected an integer in digits"),
    ],
)
def test_a_wrong_number_is_said_to_be_what_it_is(tmp_path: Path, old: str, new: str, words: str) -> None:
    problem = refused(tmp_path, PLAIN.replace(old, new))
    assert words in problem.message
    assert len(problem.message) < 400


@pytest.mark.parametrize(("cell", "words"), [("-1", "no less than 0"), ("x", "an integer"), ("1e3", "an integer")])
def test_a_wrong_offset_is_refused(tmp_path: Path, cell: str, words: str) -> None:
    problem = refused(tmp_path, f"id,lower,upper,size,offset\na,0,3,4,{cell}\nb,0,6,8,4\n")
    assert f"offset of buffer 'a': expected {words}" in problem.message


def test_blanks_and_times_before_zero_are_read(tmp_path: Path) -> None:
    assert placed(tmp_path, " id , lower, upper , size\n a , -2, 3 , 4\n").keys() == {"a"}


def translated(text: str) -> str:
    """A table of MiniMalloc's other names with ours, as the help texts say."""
    rows = list(csv.reader(text.splitlines()))
    ours = {"start": "lower", "begin": "lower", "end": "upper", "buffer_id": "id", "buffer": "id"}
    last = rows[0].index("end")
    for row in rows[1:]:
        row[last] = str(int(row[last]) + 1)
    return "\n".join(",".join(row) for row in [[ours.get(name, name) for name in rows[0]], *rows[1:]]) + "\n"


@pytest.mark.parametrize("names", ["id,start,end,size", "buffer_id,begin,end,size", "buffer,start,end,size"])
def test_other_names_of_columns_are_told_and_lead_to_ours(tmp_path: Path, names: str) -> None:
    text = f"{names}\na,0,3,4\nb,3,6,4\n"
    help_text = refused(tmp_path, text).help or ""
    assert "upper = end + 1" in help_text
    assert all(f"'{name}'" in help_text for name in names.split(",") if name not in ("id", "size"))
    offsets = placed(tmp_path, translated(text))
    assert sorted(offsets.values()) == [0, 4]  # both live at time 3, which they would not with the end left out


def test_an_unknown_column_is_refused(tmp_path: Path) -> None:
    problem = refused(tmp_path, "id,lower,upper,size,name\na,0,3,4,x\n")
    assert (problem.code, problem.message) == ("RT004", "there is no column 'name'")


def test_a_solution_that_would_not_be_read_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "p.csv", tmp_path / "q.csv"
    path.write_text(PLAIN)
    module = sys.modules["ratrain.ratrainc.memory.allocation_csv"]
    original = module._lines
    monkeypatch.setattr(module, "_lines", lambda table, offsets: original(table, [each + 1 for each in offsets]))
    assert main(["alloc", str(path), "--capacity", "64", "-o", str(out)]) == 1
    said = capsys.readouterr()
    assert "RT011" in said.err
    assert "wrote" not in said.out
    assert not out.exists()


@given(st.text(max_size=80))
def test_any_text_is_read_or_diagnosed(text: str) -> None:
    for head in ("", "id,lower,upper,size,offset,alignment\n"):
        try:
            parse_problem(head + text, "p.csv")
        except DiagnosticError as error:
            assert error.diagnostics  # noqa: PT017 - most are refused, not all

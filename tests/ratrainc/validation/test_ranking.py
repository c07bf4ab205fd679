"""Rank correlation of measured and simulated rates: its value, and which rows it is of."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratrain.ratrainc.cli import main
from ratrain.ratrainc.running.examples import example_path
from ratrain.ratrainc.validation.outcome import validate
from ratrain.ratrainc.validation.ranking import LEAST_ROWS, mean_ranks, spearman
from ratrain.ratrainc.validation.validation_rows import read_validation_table

if TYPE_CHECKING:
    from pathlib import Path

VALUES = st.lists(st.integers(-20, 20), min_size=2, max_size=30)
DIFFERENT = st.lists(st.integers(-(10**6), 10**6), min_size=2, max_size=30, unique=True)
HEAD = "id,class,split,model,pp,dp,micro_batch_size,micro_batches,seq_len,group,step_seconds"


@given(DIFFERENT)
def test_a_monotone_map_correlates_by_1_and_its_reverse_by_minus_1(values: list[int]) -> None:
    assert spearman(values, [each**3 + 7 for each in values]) == pytest.approx(1)
    assert spearman(values, [-(each**3) for each in values]) == pytest.approx(-1)


@given(VALUES)
def test_ranks_are_from_1_and_equal_values_share_the_mean_of_theirs(values: list[int]) -> None:
    ranks = mean_ranks(values)
    assert ranks.sum() == pytest.approx(len(values) * (len(values) + 1) / 2)
    for value, rank in zip(values, ranks, strict=True):
        below, same = sum(each < value for each in values), values.count(value)
        assert rank == below + (same + 1) / 2


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=2, max_size=30))
def test_ties_count_as_scipy_counts_them(pairs: list[tuple[int, int]]) -> None:
    stats = pytest.importorskip("scipy.stats")
    first, second = zip(*pairs, strict=True)
    if len({*first}) == 1 or len({*second}) == 1:
        assert spearman(first, second) is None
    else:
        assert spearman(first, second) == pytest.approx(stats.spearmanr(first, second).statistic, abs=1e-12)
    assert mean_ranks(first) == pytest.approx(np.asarray(stats.rankdata(first)))


def toys(folder: Path, count: int) -> str:
    """A table of steps of a small model, each of one sequence more, measured as longer and longer."""
    (folder / "m.json").write_text(example_path("tiny.json").read_text())
    rows = [
        f"r{number},step-time,{'fit' if number % 2 else 'held-out'},m.json,1,1,1,{number},16,,{number**2}"
        for number in range(1, count + 1)
    ]
    path = folder / "toys.csv"
    path.write_text("\n".join([HEAD, *rows]) + "\n")
    return str(path)


def test_few_rows_have_no_ranking(tmp_path: Path) -> None:
    found = validate([read_validation_table(toys(tmp_path, LEAST_ROWS - 1))])
    assert list(found.rankings()) == []


def test_a_table_is_ranked_by_rates_as_a_whole_and_held_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = toys(tmp_path, LEAST_ROWS)
    assert main(["validate", path, "--jobs", "1", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    whole, held = data["rankings"]
    assert (whole["table"], whole["group"], whole["split"], whole["rows"]) == (path, "", "all", LEAST_ROWS)
    assert (held["split"], held["rows"]) == ("held-out", LEAST_ROWS // 2)
    # measured rates fall with the number of micro-batches, simulated ones do not
    assert whole["spearman"] < 0
    errors = [abs(row["error"]) for row in data["rows"]]
    assert whole["median"] == pytest.approx(np.median(errors))
    (medians,) = data["errors_by_table"]
    assert (medians["table"], medians["class"]) == (path, "step-time")
    assert medians["held_out"]["median"] == held["median"]
    assert main(["validate", path, "--jobs", "1", "--markdown"]) == 0
    page = capsys.readouterr().out
    assert f"| toys | whole table | held-out | {LEAST_ROWS // 2} | {held['spearman']:.3f} |" in page
    assert "## Errors by table" in page


def test_rows_of_a_group_and_of_a_model_are_ranked_by_themselves(tmp_path: Path) -> None:
    path = tmp_path / "toys.csv"
    toys(tmp_path, 1)
    (tmp_path / "n.json").write_text(json.dumps(json.loads((tmp_path / "m.json").read_text()) | {"vocab_size": 512}))
    rows = [
        f"r{number},scaling,fit,{model},1,1,1,{1 + number % 6},16,{'odd' if number % 2 else 'even'},{number + 1}"
        for model in ("m.json", "n.json")
        for number in range(LEAST_ROWS)
    ]
    named = [line.replace("r", f"{at}-", 1) for at, line in enumerate(rows)]
    path.write_text("\n".join([HEAD, *named]) + "\n")
    found = list(validate([read_validation_table(str(path))]).rankings())
    assert [(each.group, each.rows) for each in found] == [
        ("", 2 * LEAST_ROWS),
        ("even", LEAST_ROWS),
        ("m on mt3000", LEAST_ROWS),
        ("odd", LEAST_ROWS),
        ("n on mt3000", LEAST_ROWS),
    ]

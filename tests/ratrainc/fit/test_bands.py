"""The error that answers state is that of the published peaks."""

from __future__ import annotations

import math
import runpy
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from ratrain.ratrainc.fit.bands import HELD, LEAST, MANY, RAN_OUT, WORST, band_of, group_of, mechanism_of
from ratrain.ratrainc.fit.holdings.holdings import holdings
from ratrain.ratrainc.fit.holdings.refusals import refusal

BENCHMARK = runpy.run_path(str(Path(__file__).parents[3] / "benchmarks" / "fit_cases.py"))


def errors() -> dict[str, list[float]]:
    """Errors of predicted peaks by framework or kind of adapters, ascending; a run that two tables have counts once."""
    found: dict[str, set[tuple[int, float]]] = defaultdict(set)
    for case in (*BENCHMARK["cases"](), *BENCHMARK["tables"]()):
        if case.peak_bytes and not refusal(case.job):
            error = abs(case.predicted(holdings(case.job)) / case.peak_bytes - 1)
            found[group_of(case.job)].add((case.peak_bytes, error))
    return {name: sorted(error for _, error in pairs) for name, pairs in found.items()}


def test_every_framework_with_a_published_peak_has_its_error() -> None:
    found = errors()
    assert found.keys() == HELD.keys()
    assert max(ascending[-1] for name, ascending in found.items() if "adapters" not in name) == pytest.approx(
        WORST, abs=0.001
    )
    for name, ascending in found.items():
        count, error = HELD[name]
        assert count == len(ascending), name
        last = math.ceil(0.9 * count) - 1 if count >= MANY else count - 1
        assert error == pytest.approx(ascending[last], abs=0.001), name


def test_no_run_that_ran_out_of_memory_is_said_to_fit() -> None:
    """Of a mechanism whose runs did, the band is as wide as it takes."""
    short: dict[str, list[float]] = defaultdict(list)
    for case in (*BENCHMARK["cases"](), *BENCHMARK["tables"]()):
        if case.fits is False and case.job.device_bytes and not refusal(case.job):
            usable = case.job.device_bytes - BENCHMARK["CONTEXTLESS"]
            needed = max(each.reserved_bytes for each in holdings(case.job))
            assert needed * (1 + band_of(case.job).error) > usable, case.id
            if needed < usable * (1 - LEAST):
                short[mechanism_of(case.job)].append(usable / needed - 1)
    assert {name: len(errors) for name, errors in short.items()} == {
        name: count for name, (count, _) in RAN_OUT.items()
    }
    for name, (_, error) in RAN_OUT.items():
        assert max(short[name]) == pytest.approx(error, abs=0.001)


def test_the_page_has_these_figures() -> None:
    page = (Path(__file__).parents[3] / "docs" / "fit-errors.md").read_text()
    titles = {"megatron-lm": "Megatron-LM"}
    for name, (count, error) in HELD.items():
        assert f"| {titles.get(name, name)} | {count} | {100 * error:.1f} %" in page
    assert page.count(f"{100 * WORST:.1f} %") == 2
    assert all(f"{100 * error:.1f} %" in page for _, error in RAN_OUT.values())
    every = [case for case in BENCHMARK["cases"]() if case.job.device_bytes and not refusal(case.job)]
    adapters = [case for case in every if case.job.adapter is not None]
    assert all(BENCHMARK["verdict"](case, holdings(case.job)) == "right" for case in adapters)
    assert f"All {len(adapters)} runs of adapters" in " ".join(page.split())
    known = [case for case in every if case.job.adapter is None]
    judged = Counter(BENCHMARK["verdict"](case, holdings(case.job)) for case in known)
    assert judged == {"right": 25, "close": 2, "miss": 1}
    assert f"Of {len(known)} runs whose device is known {judged['right']} are judged rightly" in page

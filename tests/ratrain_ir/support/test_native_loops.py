"""Loops that are loaded without numba: they do what the functions do, are compiled once, and anew when anything they were made from changes."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratrain.ratrain_ir.support import native_loops
from ratrain.ratrain_ir.support.loops import part
from ratrain.ratrain_ir.support.native_loops import NotAloneWarning, native

PAIR = np.dtype([("count", np.int64), ("weight", np.float64)])


class Held(NamedTuple):
    """As loops take their state."""

    pairs: Any
    table: Any


@part
def scaled(value: float, factor: int) -> float:
    """What a loop calls."""
    return value * factor if factor else value / factor


def mixed(held: Held, line: Any, times: int, extra: float, forwards: bool) -> float:
    """Everything that loops are handed, read and written; divided by 0 where `times` is."""
    total = extra
    for index in range(len(held.pairs)):
        at = index if forwards else len(held.pairs) - 1 - index
        held.pairs[at].count += times
        total += scaled(held.pairs[at].weight, times) + line[at]
        held.table[at, 1] = total
    return total


def leaves_at(numbers: Any, bound: int) -> bool:
    """Whether a number is above a bound, which it becomes."""
    for at in range(len(numbers)):
        if numbers[at] > bound:
            numbers[at] = bound
            return True
    return False


def clear(numbers: Any) -> None:
    """A loop that returns nothing."""
    for at in range(len(numbers)):
        numbers[at] = 0


MIXED, LEAVES_AT, CLEAR = native(mixed), native(leaves_at), native(clear)
FLOATS = st.floats(-1e9, 1e9)


@given(rows=st.lists(st.tuples(st.integers(-99, 99), FLOATS), max_size=6), times=st.integers(-2, 2), extra=FLOATS)
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("forwards", [False, True])
def test_a_loop_gives_the_bits_of_its_function(
    rows: list[tuple[int, float]], times: int, extra: float, forwards: bool, strided: bool
) -> None:
    def arguments() -> tuple[Any, ...]:
        pairs = np.array(rows, PAIR).view(np.recarray)
        table = np.zeros((len(rows), 4))[:, ::2] if strided else np.zeros((len(rows), 2))
        line = np.arange(2.0 * len(rows))[::2] if strided else np.arange(1.0 * len(rows))
        return Held(np.asarray(pairs), table), line, times, np.float64(extra) if times else extra, forwards

    plain, fast = arguments(), arguments()
    listed = plain[0]._replace(pairs=plain[0].pairs.view(np.recarray))
    with np.errstate(all="ignore"):
        wanted = mixed(listed, *plain[1:])
    np.testing.assert_array_equal(MIXED(*fast), wanted)
    for one, other in zip(plain[0], fast[0], strict=True):
        np.testing.assert_array_equal(one, other)


@given(numbers=st.lists(st.integers(-5, 5)), bound=st.integers(-5, 5))
def test_loops_return_truths_or_nothing(numbers: list[int], bound: int) -> None:
    plain, fast = list(numbers), np.array(numbers, np.int64)
    assert LEAVES_AT(fast, bound) is leaves_at(plain, bound)
    assert fast.tolist() == plain
    assert CLEAR(fast) is None
    assert not fast.any()


def test_what_needs_more_than_itself_is_left_to_numba() -> None:
    def allocates(count: int) -> int:
        return int(np.ones(count, np.int64).sum())

    def raises(count: int) -> int:
        if count > 3:
            raise ValueError(count)
        return count

    def calls(angle: float) -> float:
        return math.sin(angle)

    def pairs(count: int) -> tuple[int, int]:
        return count, count

    wanted: list[tuple[Callable[[Any], Any], str]] = [
        (allocates, "nopython"),
        (raises, "NRT required"),
        (calls, "calls needs more than itself: sin"),
        (pairs, "pairs returns"),
    ]
    for function, why in wanted:
        loop = native(function)
        with pytest.warns(NotAloneWarning, match=why):
            assert loop(3) == function(3)
        assert loop(2) == function(2)
    with pytest.raises(TypeError, match="takes arrays, numbers and tuples of them, no list"):
        LEAVES_AT([1], 3)


def test_a_numba_of_other_insides_is_left_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled(count: int) -> int:
        return 2 * count

    def gone(*_: Any) -> Any:
        raise AttributeError("'JITCodeLibrary' object has no attribute '_get_compiled_object'")

    loop = native(doubled)
    monkeypatch.setattr(native_loops, "_compiled", gone)
    with pytest.warns(NotAloneWarning, match="has no attribute '_get_compiled_object'"):
        assert loop(4) == 8


SUMS = """
import sys
import numpy as np
import terms
from terms import FIRST
from ratrain.ratrain_ir.support.loops import compiled_anew
from ratrain.ratrain_ir.support.native_loops import native

term = terms.term

@native
def total(numbers):
    found = FIRST
    for at in range(len(numbers)):
        found += term(numbers[at])
    return found

if __name__ == "__main__":
    from sums import total
    print("ready", flush=True)
    sys.stdin.readline()
    print(total(np.arange(4)), compiled_anew(), "numba" in sys.modules)
"""


def terms(first: int, factor: int) -> str:
    """What the loop takes from another file."""
    return f"""
from ratrain.ratrain_ir.support.loops import part

FIRST = {first}

@part
def term(n):
    return {factor} * n
"""


def printed(folder: Path, processes: int = 1, **variables: str) -> list[str]:
    """What processes print that reach the loop together."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **variables}
    started = [
        subprocess.Popen(
            [sys.executable, "sums.py"],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(processes)
    ]
    for each in started:
        assert each.stdout is not None
        assert each.stdout.readline() == "ready\n"
    for each in started:
        assert each.stdin is not None
        each.stdin.write("\n")
        each.stdin.flush()
    return sorted(each.communicate(timeout=300)[0].strip() for each in started)


def test_a_loop_is_compiled_once_and_then_loaded_without_numba(tmp_path: Path) -> None:
    """Anew where a constant or a part of another file has changed, numba is told something else, or half of the file is missing."""
    (tmp_path / "sums.py").write_text(SUMS)
    (tmp_path / "terms.py").write_text(terms(1, 1))
    assert printed(tmp_path, 2) == ["7 0 False", "7 1 True"]
    (kept,) = (tmp_path / "__pycache__").glob("sums.total-*.loop")
    kept.write_bytes(kept.read_bytes()[: kept.stat().st_size // 2])
    assert printed(tmp_path) == ["7 1 True"]
    assert printed(tmp_path) == ["7 0 False"]
    (tmp_path / "terms.py").write_text(terms(5, 1))
    assert printed(tmp_path) == ["11 1 True"]
    (tmp_path / "terms.py").write_text(terms(5, 2))
    assert printed(tmp_path) == ["17 1 True"]
    assert printed(tmp_path, NUMBA_OPT="1") == ["17 1 True"]
    assert printed(tmp_path, NUMBA_DISABLE_JIT="1") == ["17 0 False"]
    (tmp_path / "terms.py").write_text(terms(1, 1))
    assert printed(tmp_path) == ["7 0 False"]


def test_loops_are_kept_where_numba_is_told_to_keep(tmp_path: Path) -> None:
    (tmp_path / "sums.py").write_text(SUMS)
    (tmp_path / "terms.py").write_text(terms(1, 1))
    folder = tmp_path / "loops"
    assert printed(tmp_path, NUMBA_CACHE_DIR=str(folder)) == ["7 1 True"]
    assert len(list(folder.rglob("*.loop"))) == 1
    assert printed(tmp_path, NUMBA_CACHE_DIR=str(folder)) == ["7 0 False"]


def test_a_loop_says_whether_a_call_compiles_nothing(tmp_path: Path) -> None:
    """By the types of its arguments, whatever their sizes; where numba is told not to compile, nothing is kept."""
    last = 'print(total(np.arange(4)), compiled_anew(), "numba" in sys.modules)'
    asked = "print(*(total.is_kept(each) for each in (np.arange(9), np.ones(9))), total(np.arange(4)), total.is_kept(np.arange(9)))"
    assert last in SUMS
    (tmp_path / "sums.py").write_text(SUMS.replace(last, asked))
    (tmp_path / "terms.py").write_text(terms(1, 1))
    assert printed(tmp_path) == ["False False 7 True"]
    assert printed(tmp_path) == ["True False 7 True"]
    assert printed(tmp_path, NUMBA_DISABLE_JIT="1") == ["False False 7 False"]

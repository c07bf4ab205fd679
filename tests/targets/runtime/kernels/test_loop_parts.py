"""Views and choices of kernels' loops: they do what slices, `reshape`, `max` and `min` do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ratrain.targets.runtime.kernels.fast.fast_numba import called, exact, inlined, larger, matrix, smaller, span


@exact()
def _copy_span(x: Any, start: Any, stop: Any, out: Any) -> None:
    view = span(x, start, stop)
    for i in range(view.shape[0]):
        out[i] = view[i]


@exact()
def _mark(line: Any, rows: Any, columns: Any) -> Any:
    view = matrix(line, rows, columns)
    for r in range(rows):
        for c in range(columns):
            view[r, c] = 10 * r + c
    return view.size


@exact()
def _choose(a: Any, b: Any, out: Any) -> None:
    for i in range(out.shape[1]):
        out[0, i], out[1, i] = larger(a[i], b[i]), smaller(a[i], b[i])


@inlined()
def _double(x: Any) -> Any:
    return x + x


@called()
def _add_all(x: Any) -> Any:
    total = 0.0
    for i in range(x.size):
        total += _double(x[i])
    return total


@exact()
def _twice(x: Any) -> Any:
    return _add_all(x) + _add_all(span(x, 0, 2))


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize(("start", "stop"), [(0, 0), (0, 6), (2, 5), (6, 6)])
def test_a_span_is_a_slice(start: int, stop: int, step: int) -> None:
    """Of lines and of columns, whose elements are not neighbours."""
    x = np.arange(6 * step, dtype=np.float32)[::step]
    out = np.zeros(stop - start, np.float32)
    _copy_span(x, start, stop, out)
    np.testing.assert_array_equal(out, x[start:stop])


def test_a_matrix_is_the_beginning_of_a_line() -> None:
    line = np.full(8, -1, np.float32)
    assert _mark(line, 2, 3) == 6
    np.testing.assert_array_equal(line, [0, 1, 2, 10, 11, 12, -1, -1])


@pytest.mark.parametrize("dtype", [np.int64, np.float32])
def test_the_larger_and_the_smaller_are_those_of_python(dtype: type) -> None:
    """The first is kept where it is equal or not comparable."""
    values = [-3, 0, 5, 7] if dtype is np.int64 else [-3.5, -0.0, 0.0, np.inf, np.nan]
    a, b = np.array([(x, y) for x in values for y in values], dtype).T
    a, b = a.copy(), b.copy()
    out = np.zeros((2, a.size), dtype)
    _choose(a, b, out)
    wanted = [[max(pair) for pair in zip(a, b, strict=True)], [min(pair) for pair in zip(a, b, strict=True)]]
    assert out.tobytes() == np.array(wanted, dtype).tobytes()


def test_functions_within_loops_are_not_called_from_python() -> None:
    """A loop that calls one twice does what it says; the function has no machine code of its own."""
    x = np.arange(4, dtype=np.float64)
    assert _twice(x) == 2 * (0 + 1 + 2 + 3) + 2 * (0 + 1)
    with pytest.raises((KeyError, TypeError)):
        _add_all(x)

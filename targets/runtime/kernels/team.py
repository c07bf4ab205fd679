"""Threads that share the work of one kernel: rows, heads or ranges of elements, each part done by one thread.

BLAS itself runs with one thread: its own pool would compete for the cores, and its threads spin while they wait. Parts
never share an output, and the computation of an element does not depend on the part that it falls into.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import pairwise
from math import prod
from typing import TypeVar

import numpy as np

ELEMENTS = 1 << 16
"""Least elements of a part: a smaller one is done sooner than another thread wakes up."""

PRODUCTS = 1 << 22
"""Least multiplications of a part of a matrix product, for the same reason."""

PRODUCT_ROWS = 24
"""Rows that all BLAS kernels handle in whole groups: parts cut there mostly give the bits of the whole product."""

LINE_BYTES = 64
"""Bytes of a cache line: a factor's part that begins within one is packed more slowly, by up to a tenth."""

PRODUCT_COLUMNS = 64
"""Columns that a BLAS kernel for AVX-512 handles in whole groups."""

_Part = TypeVar("_Part")
_Result = TypeVar("_Result")


class Team:
    """A team of `threads` threads, the caller included; kernels of several ranks may use it at the same time."""

    def __init__(self, threads: int) -> None:
        if threads < 1:
            raise ValueError(f"a team needs a thread, not {threads}")
        self.threads = threads
        self._pool: ThreadPoolExecutor | None = None
        if threads > 1:
            # Threads start when they are first needed: several ranks may each have a kernel running.
            most = threads + (os.cpu_count() or 1)
            # Overflow is expected in float16 runs and found by flags; numpy's error state is one of each thread.
            self._pool = ThreadPoolExecutor(most, "kernel", initializer=np.seterr, initargs=("ignore",))

    def ranges(self, count: int, *, unit: int = 1, least: int = 1) -> list[slice]:
        """Cut [0, count) into at most `threads` ranges of about `least` or more, equal up to multiples of `unit`."""
        if self.threads == 1 and count:
            return [slice(0, count)]
        parts = max(1, min(self.threads, count // max(1, least)))
        # each cut at the nearest multiple: cut at the one below, the last of two parts of 512 rows has 13 % more
        bounds = [min(count, (count * part // parts + unit // 2) // unit * unit) for part in range(parts)] + [count]
        return [slice(low, high) for low, high in pairwise(bounds) if low < high]

    def rows(self, shape: tuple[int, ...]) -> list[slice]:
        """Cut the rows of an array of this shape into ranges, for work that touches each element once or twice."""
        if self.threads == 1:
            return self.ranges(shape[0])
        width = max(1, prod(shape[1:]))
        return self.ranges(shape[0], least=-(-ELEMENTS // width))

    def run(self, work: Callable[[_Part], _Result], parts: Sequence[_Part]) -> list[_Result]:
        """Do all parts, the first one on this thread; return their results in order.

        The others start later by a thread's waking: where parts differ, the first should be the largest. An exception
        of a part is raised here.
        """
        if self._pool is None or len(parts) < 2:
            return [work(part) for part in parts]
        others = [self._pool.submit(work, part) for part in parts[1:]]
        try:
            first = work(parts[0])
        finally:  # no thread may still be writing when the caller goes on, or gives up
            wait(others)
        return [first, *(other.result() for other in others)]

    def product_rows(self, rows: int, size: int, unit: int = PRODUCT_ROWS) -> list[slice]:
        """Cut the rows of a matrix product into ranges; `size` is the number of elements of its other factor."""
        return self.ranges(rows, unit=unit, least=-(-PRODUCTS // max(1, size)))

    def product_columns(self, columns: int, size: int, unit: int = PRODUCT_COLUMNS) -> list[slice]:
        """Cut the columns of a matrix product into ranges; `size` is the number of elements of its first factor."""
        return self.ranges(columns, unit=unit, least=-(-PRODUCTS // max(1, size)))

    def products(self, count: int, size: int) -> list[slice]:
        """Cut `count` equal products into ranges; `size` is the number of multiplications of one."""
        return self.ranges(count, least=-(-PRODUCTS // max(1, size)))

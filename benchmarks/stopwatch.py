"""Timing for benchmarks that compare: contestants take turns in one run, medians count, thread pools are named."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ratrain.targets.runtime.arena.processor import cpu_flags

CLOCKS: Mapping[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
"""`cpu` is the time of this process on all its threads: right while others use the machine, for one thread alone."""


def medians(contestants: Mapping[str, Callable[[], object]], repeat: int, clock: str) -> dict[str, float]:
    """Seconds of each contestant: the median of `repeat` turns, all of them once before anybody's next turn."""
    now = CLOCKS[clock]
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    for contestant in contestants.values():  # compilation, first touch of memory
        contestant()
    for _ in range(repeat):
        for name, contestant in contestants.items():
            start = now()
            contestant()
            taken[name].append(now() - start)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def machine() -> str:
    """The processor and what pins BLAS to a core type."""
    model = next(
        (line.split(":")[1].strip() for line in _cpu_info() if line.startswith("model name")), platform.machine()
    )
    sets = ("avx2", "f16c", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16")
    flags = cpu_flags()
    wide = [flag for flag in sets if flag in flags]
    pinned = os.environ.get("OPENBLAS_CORETYPE", "unset")
    return f"{model}, {os.cpu_count()} cores, {' '.join(wide)}; OPENBLAS_CORETYPE {pinned}"


def _cpu_info() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:  # no Linux
        return []


def pools() -> list[str]:
    """One line for each thread pool of the process."""
    from threadpoolctl import threadpool_info

    lines = []
    for pool in threadpool_info():
        core = f", core type {pool['architecture']}" if pool.get("architecture") else ""
        version = f" {pool['version']}" if pool.get("version") else ""
        lines.append(f"{pool['internal_api']}{version}: {pool['num_threads']} threads{core} ({pool['prefix']})")
    return lines

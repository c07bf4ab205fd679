"""Every loop keeps its own rounding rules, whichever caller has it compiled first in a process."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import TYPE_CHECKING

import numba
import numpy as np
import pytest

from ratrain.targets.mt3000 import kernels as tiled
from ratrain.targets.runtime.kernels import fast
from ratrain.targets.runtime.kernels.fast.fast_numba import SPLIT_SUMS, inlined

if TYPE_CHECKING:
    from types import ModuleType

MODULES = [
    import_module(f"{package.__name__}.{found.name}")
    for package in (fast, tiled)
    for found in pkgutil.iter_modules(package.__path__)
]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_every_loop_says_its_rules(module: ModuleType) -> None:
    for name, loop in vars(module).items():
        if hasattr(loop, "targetoptions"):
            assert "fastmath" in loop.targetoptions, name


@pytest.mark.parametrize("fast_first", [False, True])
def test_a_function_keeps_its_rules_in_a_fast_caller_and_after_it(fast_first: bool) -> None:
    """Regrouped, as fast sums may be, (c * p) / q has a product that no float32 holds in full."""

    @inlined()
    def scaled(c, p, q):
        return c * (p / q)

    @numba.njit(fastmath=SPLIT_SUMS)
    def fast_caller(c, p, q, out):
        for i in range(out.size):
            out[i] = scaled(c[i], p[i], q[i])

    @numba.njit
    def exact_caller(c, p, q, out):
        for i in range(out.size):
            out[i] = scaled(c[i], p[i], q[i])

    chance = np.random.default_rng(1)
    c = np.full(1000, 1e-37, np.float32)
    p, q = (chance.uniform(0.004, 0.005, 1000).astype(np.float32) for _ in range(2))
    for caller in (fast_caller, exact_caller) if fast_first else (exact_caller, fast_caller):
        out = np.empty_like(c)
        caller(c, p, q, out)
        np.testing.assert_array_equal(out, c * (p / q))

"""Where the time of a training step goes: by kernel, and inside each kernel how much of it is products."""

from __future__ import annotations

import ctypes
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import wraps
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
from attrs import define, field, frozen

from ratrain.targets.program.kernels import KERNELS
from ratrain.targets.runtime.kernels import openblas
from ratrain.targets.runtime.kernels.interface import OnePassHeadKernels

if TYPE_CHECKING:
    from ratrain.targets.runtime.kernels import KernelSet

ARRAYS = (7, 9, 12)
"""Which arguments of sgemm are arrays."""


@frozen
class Product:
    """One call of sgemm. Seconds are those of the thread that made it."""

    kernel: str
    seconds: float
    thread: int
    arguments: tuple[Any, ...]
    """those of `openblas.Sgemm`, without the arrays"""


@define
class Profile:
    """What happened in one step. Seconds of kernels are those of the engine's thread."""

    kernels: dict[str, float] = field(factory=lambda: defaultdict(float))
    products: list[Product] = field(factory=list)
    seconds: float = 0.0
    running: str = "other"

    def product_seconds(self, kernel: str | None = None) -> float:
        """Seconds inside sgemm, over all threads; of one kernel, or of the whole step."""
        return sum(product.seconds for product in self.products if kernel in {None, product.kernel})


class StepProfiler:
    """Books what a step does in `profile`, where the step runs on its `kernels`."""

    def __init__(self, kernels: KernelSet, now: Callable[[], float]) -> None:
        self._kernels = kernels
        self._now = now
        self.profile = Profile()
        self.kernels = copy(kernels)
        """The same set, but that its kernels book their time."""
        one_pass = ["head_in_one_pass"] if isinstance(kernels, OnePassHeadKernels) else []
        for name in (*KERNELS, *one_pass):
            setattr(self.kernels, name, self._booked(name))

    def _booked(self, name: str) -> Callable[..., Any]:
        kernel = getattr(self._kernels, name)

        @wraps(kernel)  # the engine knows a routine's kernels by their names
        def call(*arguments: Any, **options: Any) -> Any:
            profile, start = self.profile, self._now()
            profile.running = name
            result = kernel(*arguments, **options)
            profile.kernels[name] += self._now() - start
            profile.running = "other"
            return result

        return call

    @contextmanager
    def booked_products(self) -> Iterator[None]:
        """Book every product too."""
        sgemm, now = openblas.Sgemm(openblas.SGEMM), self._now

        def call(*arguments: Any) -> None:
            start = now()
            sgemm(*arguments)
            seconds = now() - start
            without = tuple(None if at in ARRAYS else argument for at, argument in enumerate(arguments))
            self.profile.products.append(Product(self.profile.running, seconds, threading.get_ident(), without))

        booked = openblas.Sgemm(call)
        with mock.patch.object(openblas, "SGEMM", ctypes.cast(booked, ctypes.c_void_p).value):
            yield

    def step(self, run: Callable[[], object]) -> Profile:
        """The profile of one step."""
        self.profile = Profile()
        start = self._now()
        run()
        self.profile.seconds = self._now() - start
        return self.profile


def products_alone(products: list[Product], now: Callable[[], float]) -> float:
    """Seconds that the products of a step take with nothing between them, each thread doing those it did then."""
    size = max(max(_extents(product.arguments)) for product in products)
    pool = np.random.default_rng(0).standard_normal((len(ARRAYS), size), np.float32)
    calls: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
    for product in products:
        arguments = list(product.arguments)
        for at, row in zip(ARRAYS, pool, strict=True):
            arguments[at] = row.ctypes.data
        calls[product.thread].append(tuple(arguments))
    threads = [threading.Thread(target=_multiply, args=(part,)) for part in calls.values()]
    start = now()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return now() - start


def _multiply(calls: list[tuple[Any, ...]]) -> None:
    sgemm = openblas.Sgemm(openblas.SGEMM)
    for arguments in calls:
        sgemm(*arguments)


def _extents(arguments: tuple[Any, ...]) -> tuple[int, int, int]:
    """Elements from the first to behind the last of a, b and c."""
    _order, transpose_a, transpose_b, m, n, k, _alpha, _a, lda, _b, ldb, _beta, _c, ldc = arguments
    rows_of_a = k if transpose_a == openblas.TRANSPOSED else m
    rows_of_b = n if transpose_b == openblas.TRANSPOSED else k
    return rows_of_a * lda, rows_of_b * ldb, m * ldc

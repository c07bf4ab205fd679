"""Where the time of a training step goes: by kernel, and inside each kernel how much of it is products."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
from attrs import define, field, frozen

from targets.runtime.kernels.shared import KERNELS

if TYPE_CHECKING:
    from targets.runtime.kernels import KernelSet

Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides."""


@frozen
class Product:
    """One call of sgemm. Seconds are those of the thread that made it."""

    kernel: str
    seconds: float
    thread: int
    layouts: tuple[Layout, Layout, Layout]
    """of both factors and of the result"""


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


class ProfiledKernels:
    """A kernel set that books its time in `profile`."""

    def __init__(self, kernels: KernelSet, now: Callable[[], float]) -> None:
        self._kernels = kernels
        self._now = now
        self.profile = Profile()
        for name in KERNELS:
            setattr(self, name, self._booked(name))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def scheduled(self, tiles: object) -> ProfiledKernels:
        """This set: the kernels that are profiled take no tiles."""
        del tiles
        return self

    def _booked(self, name: str) -> Callable[..., Any]:
        kernel = getattr(self._kernels, name)

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
        """Book every `np.matmul` too."""
        matmul, now = np.matmul, self._now

        def call(a: Any, b: Any, out: Any) -> Any:
            start = now()
            result = matmul(a, b, out=out)
            seconds = now() - start
            layouts = tuple((x.shape, x.strides) for x in (a, b, out))
            self.profile.products.append(Product(self.profile.running, seconds, threading.get_ident(), layouts))
            return result

        with mock.patch.object(np, "matmul", call):
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
    operands = [layout for product in products for layout in product.layouts]
    size = max(_extent(layout) for layout in operands)
    pool = np.random.default_rng(0).standard_normal((3, size), np.float32)
    calls: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
    for product in products:
        views = (
            np.lib.stride_tricks.as_strided(row, *layout) for row, layout in zip(pool, product.layouts, strict=True)
        )
        calls[product.thread].append(tuple(views))
    threads = [threading.Thread(target=_multiply, args=(part,)) for part in calls.values()]
    start = now()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return now() - start


def _multiply(calls: list[tuple[Any, ...]]) -> None:
    for a, b, out in calls:
        np.matmul(a, b, out=out)


def _extent(layout: Layout) -> int:
    return sum((extent - 1) * stride for extent, stride in zip(*layout, strict=True)) // 4 + 1

"""Products of experts' rows in the kernel set `torch` on the CPU: within a stated bound in bf16, on any threads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ratrain.targets.runtime.arena import processor
from ratrain.targets.runtime.kernels import Scratch, kernel_set, team
from tests.targets.pytorch.bf16_bounds import BF16, ROUNDING, within
from tests.targets.runtime.kernels.expert_calls import expert_calls
from tests.targets.runtime.kernels.kernels_oracle import DTYPES, EPS, call, f64, same_bits
from tests.targets.runtime.kernels.test_kernels_experts import ROUTERS, SHAPES, choice, experts_of, grouped, random

pytestmark = pytest.mark.parity
pytest.importorskip("torch")


@pytest.fixture
def _multiplies_bf16() -> Iterator[None]:
    """Any processor takes the way of those that multiply bf16."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processor, "multiplies_bf16", lambda: True)
        yield


def normal(seed: int, *shape: int, dtype: Any = BF16) -> np.ndarray:
    return random(seed, *shape, dtype=dtype)


@pytest.mark.usefixtures("_multiplies_bf16")
@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_of_experts_in_bf16_are_within_one_more_rounding(shape: str, router: str, trans_b: bool) -> None:
    tokens, experts, count = SHAPES[shape]
    order, bounds = grouped(choice(tokens, experts, count, router), experts)
    inner, columns = 24, 40
    matrices = normal(1, experts, *((columns, inner) if trans_b else (inner, columns)))
    of_row = f64(matrices.transpose(0, 2, 1) if trans_b else matrices)[0][experts_of(bounds)]
    given = {"b": matrices, "order": order, "bounds": bounds, "trans_b": trans_b}
    for stored in (BF16, np.float32):
        a, out = normal(2, tokens, inner), np.empty((len(order), columns), stored)
        call("torch", "expert_rows", a=a, **given, out=out)
        taken = f64(a)[0][order // count][:, None]
        exact, size = (taken @ of_row)[:, 0], (np.abs(taken) @ np.abs(of_row))[:, 0]
        within(out, exact, ROUNDING * np.abs(exact) + inner * EPS * size)

        a, out = normal(3, len(order), inner), normal(4, tokens, columns, dtype=stored)
        exact, size = f64(out)[0], np.abs(f64(out)[0])
        products = (f64(a)[0][:, None] @ of_row)[:, 0]
        bound = (
            ROUNDING * np.abs(products)
            + (inner + count + 2) * EPS * (np.abs(f64(a)[0])[:, None] @ np.abs(of_row))[:, 0]
        )
        off = (count + 2) * EPS * size
        np.add.at(exact, order // count, products)
        np.add.at(off, order // count, bound)
        call(
            "torch", "expert_sums", a=a, **given, sums=np.empty((tokens, columns), np.float32), out=out, accumulate=True
        )
        within(out, exact, off)


@pytest.mark.usefixtures("_multiplies_bf16")
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("gathers_a", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_of_experts_in_bf16_are_within_one_more_rounding(
    shape: str, gathers_a: bool, accumulate: bool
) -> None:
    tokens, experts, count = SHAPES[shape]
    order, bounds = grouped(choice(tokens, experts, count, "ragged"), experts)
    rows = (tokens, len(order)) if gathers_a else (len(order), tokens)
    a, b = normal(1, rows[0], 24), normal(2, rows[1], 16)
    left, right = f64(a, b)
    left, right = (left[order // count], right) if gathers_a else (left, right[order // count])
    for stored in (BF16, np.float32):
        out = normal(3, experts, 24, 16, dtype=stored)
        before = f64(out)[0] if accumulate else np.zeros(out.shape)
        given = {"a": a, "b": b, "order": order, "bounds": bounds, "out": out}
        call("torch", "expert_gradients", **given, gathers_a=gathers_a, accumulate=accumulate)
        for expert in range(experts):
            at = slice(*bounds[expert : expert + 2])
            product, size = left[at].T @ right[at], np.abs(left[at]).T @ np.abs(right[at]) + np.abs(before[expert])
            bound = ROUNDING * np.abs(product) + (len(order) + 2) * EPS * size
            within(out[expert], before[expert] + product, bound)


@pytest.mark.usefixtures("_multiplies_bf16")
@pytest.mark.parametrize("kernel", ["expert_rows", "expert_sums", "expert_gradients"])
@pytest.mark.parametrize("threads", [2, 3])
def test_threads_change_no_bit_of_products_of_experts(kernel: str, threads: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(team, "ELEMENTS", 1)
    monkeypatch.setattr(team, "PRODUCTS", 1)
    results = []
    for count in (1, threads):
        made = expert_calls(300, 5, 2, hidden=1100, width=520)[kernel]
        given = {name: x.astype(BF16) if getattr(x, "dtype", None) == np.float16 else x for name, x in made.items()}
        kernels = kernel_set("torch", count)
        scratch = Scratch(kernels.scratch_bytes(kernel, **given))
        getattr(kernels, kernel)(**given, scratch=scratch)
        assert scratch.high_water == scratch.capacity
        results.append(given["out"])
    same_bits(*results)


@pytest.mark.usefixtures("_multiplies_bf16")
def test_the_product_of_a_row_in_bf16_does_not_depend_on_other_rows() -> None:
    """The first row of each expert, and a row behind others."""
    matrices, a = normal(1, 2, 96, 80), normal(2, 200, 96)
    found = []
    for tokens, row in ((1, 0), (2, 0), (65, 0), (200, 0), (2, 1), (64, 63), (65, 64), (200, 100)):
        order, bounds = grouped(np.tile(np.arange(2, dtype=np.int32), (tokens, 1)), 2)
        given, out = np.roll(a[:tokens], row, axis=0), np.empty((2 * tokens, 80), BF16)
        call("torch", "expert_rows", a=given, b=matrices, order=order, bounds=bounds, out=out)
        found.append(out[[row, tokens + row]])
    for rows in found[1:]:
        same_bits(rows, found[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", ["expert_rows", "expert_sums", "expert_gradients"])
def test_other_types_and_processors_have_the_bits_of_fast(kernel: str, dtype: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(processor, "multiplies_bf16", lambda: False)
    results = []
    for name in ("torch", "fast"):
        made = expert_calls(100, 5, 2, hidden=40, width=24)[kernel]
        given = {key: x.astype(dtype) if getattr(x, "dtype", None) == np.float16 else x for key, x in made.items()}
        call(name, kernel, **given)
        results.append(given["out"])
    same_bits(*results)

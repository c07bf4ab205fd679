"""Kernels of experts on some of all rows, without an order, and added to what is there; sums over a token's choices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ratrain.targets.runtime.arena import processor
from tests.targets.runtime.kernels.kernels_oracle import DTYPES, SETS, call, same_bits
from tests.targets.runtime.kernels.test_kernels_experts import choice, grouped, random

Values = npt.NDArray[Any]

ALL_SETS = (*SETS, pytest.param("torch", marks=pytest.mark.parity))
TOKENS, EXPERTS, CHOICES, INNER, COLUMNS = 100, 6, 2, 24, 40
BOTH = pytest.mark.parametrize("trans_b", [False, True])


@pytest.fixture(autouse=True)
def _multiplies_bf16() -> Iterator[None]:
    """Any processor takes the way of those that multiply bf16."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processor, "multiplies_bf16", lambda: True)
        yield


def rows() -> tuple[Values, Values]:
    """Order and bounds; the first expert and the last have no row, and another has more than two blocks of them."""
    order, bounds = grouped(choice(TOKENS, EXPERTS - 2, CHOICES, "ragged") + 1, EXPERTS)
    assert bounds[1] == 0
    assert bounds[-2] == bounds[-1] == len(order)
    assert np.diff(bounds).max() > 64
    return order, bounds


def matrices(dtype: Any, trans_b: bool) -> Values:
    return random(1, EXPERTS, *((COLUMNS, INNER) if trans_b else (INNER, COLUMNS)), dtype=dtype)


@BOTH
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ALL_SETS)
def test_two_stacks_share_a_table_of_bounds(name: str, dtype: Any, trans_b: bool) -> None:
    """Two calls give the rows of one call, and each leaves the other's rows alone; a stack may have no row at all."""
    (order, bounds), b, a = rows(), matrices(dtype, trans_b), random(2, TOKENS, INNER, dtype=dtype)
    whole, before = np.empty((len(order), COLUMNS), dtype), random(3, len(order), COLUMNS, dtype=dtype)
    options = {"a": a, "order": order, "trans_b": trans_b}
    call(name, "expert_rows", **options, b=b, bounds=bounds, out=whole)
    for cut in range(1, EXPERTS):
        out, first = before.copy(), bounds[cut]
        call(name, "expert_rows", **options, b=b[cut:], bounds=bounds[cut:], out=out)
        same_bits(out, np.concatenate([before[:first], whole[first:]]))
        call(name, "expert_rows", **options, b=b[:cut], bounds=bounds[: cut + 1], out=out)
        same_bits(out, whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ALL_SETS)
def test_products_of_some_rows_are_those_of_the_rows_alone(name: str, dtype: Any) -> None:
    """Some experts, of which the first begins behind others' rows: as if their rows were cut out by hand."""
    (order, bounds), b, a = rows(), matrices(dtype, False), random(2, TOKENS, INNER, dtype=dtype)
    for start, stop in ((2, 4), (1, 3), (3, 6)):
        at, stack, own = slice(bounds[start], bounds[stop]), b[start:stop], bounds[start : stop + 1]
        out = np.zeros((len(order), COLUMNS), dtype)
        call(name, "expert_rows", a=a, b=stack, order=order, bounds=own, out=out)
        alone = np.empty_like(out[at])
        call(name, "expert_rows", a=a[order[at] // CHOICES], b=stack, bounds=own - own[0], out=alone)
        same_bits(out[at], alone)


@BOTH
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ALL_SETS)
def test_rows_outside_the_bounds_do_not_count_in_sums(name: str, dtype: Any, trans_b: bool) -> None:
    """As if the others' matrices were 0."""
    (order, bounds), b = rows(), matrices(dtype, trans_b)
    a, before = random(2, len(order), INNER, dtype=dtype), random(3, TOKENS, COLUMNS, dtype=dtype)
    for start, stop in ((0, 1), (2, 4), (1, 3), (3, 6), (5, 6)):
        kept = b.copy()
        kept[:start] = kept[stop:] = 0
        results = []
        for stack, of_stack in ((kept, bounds), (b[start:stop], bounds[start : stop + 1])):
            operands = {"a": a, "b": stack, "order": order, "bounds": of_stack}
            sums, out = np.empty((TOKENS, COLUMNS), np.float32), before.copy()
            call(name, "expert_sums", **operands, sums=sums, out=out, accumulate=True, trans_b=trans_b)
            results.append(out)
        same_bits(*results)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("gathers_a", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ALL_SETS)
def test_gradients_of_some_experts_are_those_of_all(name: str, dtype: Any, gathers_a: bool, accumulate: bool) -> None:
    order, bounds = rows()
    lengths = (TOKENS, len(order)) if gathers_a else (len(order), TOKENS)
    a, b = random(1, lengths[0], INNER, dtype=dtype), random(2, lengths[1], COLUMNS, dtype=dtype)
    options = {"a": a, "b": b, "order": order, "gathers_a": gathers_a, "accumulate": accumulate}
    for stored in (dtype, np.float32):
        before = random(3, EXPERTS, INNER, COLUMNS, dtype=stored)
        whole = before.copy()
        call(name, "expert_gradients", **options, bounds=bounds, out=whole)
        for start, stop in ((0, 1), (0, 3), (2, 4), (3, 6), (5, 6)):
            out = before[start:stop].copy()
            call(name, "expert_gradients", **options, bounds=bounds[start : stop + 1], out=out)
            same_bits(out, whole[start:stop])


@BOTH
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ALL_SETS)
def test_products_are_added_in_float32_and_rounded_once(name: str, dtype: Any, ordered: bool, trans_b: bool) -> None:
    """Rows outside the bounds keep their bytes, also -0."""
    (order, bounds), b = rows(), matrices(dtype, trans_b)
    bounds = bounds[2:]
    a = random(2, TOKENS if ordered else len(order), INNER, dtype=dtype)
    options = {"a": a, "b": b[2:], "bounds": bounds, "trans_b": trans_b, **({"order": order} if ordered else {})}
    product = np.zeros((len(order), COLUMNS), np.float32)
    call(name, "expert_rows", **options, out=product)
    for stored in (dtype, np.float32):
        before = random(3, len(order), COLUMNS, dtype=stored)
        before[: bounds[0]] = -0.0
        out = before.copy()
        call(name, "expert_rows", **options, out=out, accumulate=True)
        expected = (before.astype(np.float32) + product).astype(stored)
        same_bits(out, np.concatenate([before[: bounds[0]], expected[bounds[0] :]]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ALL_SETS)
def test_without_an_order_rows_are_as_they_lie(name: str, dtype: Any) -> None:
    """The bits are those with the order 0, 1, 2, ..., in which each row is its own token's."""
    order, bounds = rows()
    order = np.arange(len(order), dtype=np.int32)
    a, b = random(1, len(order), INNER, dtype=dtype), random(2, len(order), COLUMNS, dtype=dtype)
    found: dict[str, list[Values]] = {}
    for given in ({}, {"order": order}):
        for gathers_a in (False, True):
            out = np.empty((EXPERTS, INNER, COLUMNS), dtype)
            options = {"gathers_a": gathers_a, "accumulate": False}
            call(name, "expert_gradients", a=a, b=b, bounds=bounds, out=out, **given, **options)
            found.setdefault("gradients", []).append(out)
        out = np.empty((len(order), COLUMNS), dtype)
        call(name, "expert_rows", a=a, b=matrices(dtype, False), bounds=bounds, out=out, **given)
        found.setdefault("rows", []).append(out)
    for first, *others in found.values():
        for other in others:
            same_bits(first, other)


@pytest.mark.parametrize("added", ["nothing", "out", "residual", "both", "in place"])
@pytest.mark.parametrize("shape", [(7, 1, 40), (150, 3, 33), (2, 8, 5000)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ALL_SETS)
def test_sums_of_choices_have_the_bits_of_a_plain_loop(
    name: str, dtype: Any, shape: tuple[int, int, int], added: str
) -> None:
    """In float32: choices in ascending order, `out`, the residual; one rounding. A token of -0 alone stays -0."""
    tokens, choices, columns = shape
    counts = (tokens * choices, tokens, tokens)
    a, out, residual = (random(seed, count, columns, dtype=dtype) for seed, count in enumerate(counts))
    a[:choices], out[0], residual[0] = -0.0, -0.0, -0.0
    if added == "in place":
        residual = out
    total = a[::choices].astype(np.float32)
    for choice_of_token in range(1, choices):
        total = total + a[choice_of_token::choices].astype(np.float32)
    if added in ("out", "both"):
        total = total + out.astype(np.float32)
    if added in ("residual", "both", "in place"):
        total = total + residual.astype(np.float32)
    options = {"residual": residual} if added in ("residual", "both", "in place") else {}
    call(name, "choice_sums", a=a, out=out, **options, accumulate=added in ("out", "both"))
    same_bits(out, total.astype(dtype))
    assert np.signbit(out[0]).all()

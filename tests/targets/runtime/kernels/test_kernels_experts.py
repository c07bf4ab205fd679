"""Kernels of expert blocks against float64: choice and its gradient, order of rows, grouped products, weighted SwiGLU."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ratrain.targets.program.expert_kernels import ROW_BLOCK
from tests.targets.runtime.kernels.kernels_oracle import (
    DTYPES,
    EPS,
    HOST_SETS,
    SETS,
    at_other_addresses,
    call,
    close,
    f64,
    numeric_gradient,
    same_bits,
    sigmoid,
    swiglu_gradient,
)

Values = npt.NDArray[Any]

SHAPES = {
    "one": (1, 1, 1),
    "few": (7, 4, 2),
    "all": (5, 3, 3),
    "many": (150, 8, 2),
    "idle": (9, 40, 3),
    "blocks": (3 * ROW_BLOCK, 2, 1),
}
"""Tokens, experts, choices of a token."""
ROUTERS = ("random", "one-hot", "ragged")


def random(seed: int, *shape: int, dtype: Any = np.float32) -> Values:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def choice(tokens: int, experts: int, count: int, router: str = "random", seed: int = 0) -> Values:
    """Chosen experts of each token, ascending: at random, always the last ones, or mostly the first ones."""
    logits = random(seed, tokens, experts)
    logits += {"random": 0, "one-hot": 100 * np.arange(experts), "ragged": -np.arange(experts)}[router]
    return np.sort(np.argsort(-logits, axis=1)[:, :count], axis=1).astype(np.int32)


def grouped(chosen: Values, experts: int) -> tuple[Values, Values]:
    """Order and bounds, by their definition."""
    rows = sorted((int(e), t * chosen.shape[1] + j) for t, row in enumerate(chosen) for j, e in enumerate(row))
    counts = np.bincount(chosen.reshape(-1), minlength=experts)
    return np.array([r for _, r in rows], np.int32), np.append(0, np.cumsum(counts)).astype(np.int32)


def experts_of(bounds: Values) -> Values:
    """Expert of each row."""
    return np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", SETS)
def test_choice(name: str, shape: str, normalise: bool) -> None:
    tokens, experts, count = SHAPES[shape]
    logits = random(3, tokens, experts) * 4
    chosen, weights = np.empty((tokens, count), np.int32), np.empty((tokens, count), np.float32)
    call(name, "route_forward", logits=logits, chosen=chosen, weights=weights, normalise=normalise)
    np.testing.assert_array_equal(chosen, np.sort(np.argsort(-logits, axis=1)[:, :count], axis=1))
    wide = np.exp(logits.astype(np.float64))
    taken = np.take_along_axis(wide, chosen, axis=1)
    exact = taken / (taken if normalise else wide).sum(axis=1, keepdims=True)
    close(weights, exact, exact * (1 + np.abs(logits).max()), experts + 8)


def chosen_with(logits: Values, bias: Values, count: int) -> Values:
    """The experts with the largest sums of softmax and bias, ascending; of equal ones those with lower numbers."""
    wide = np.exp(logits.astype(np.float64))
    scores = wide / wide.sum(axis=1, keepdims=True) + bias
    return np.sort(np.argsort(-scores, axis=1, kind="stable")[:, :count], axis=1)


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", SETS)
def test_choice_with_a_bias_has_the_weights_of_the_logits(name: str, shape: str, normalise: bool) -> None:
    tokens, experts, count = SHAPES[shape]
    logits, bias = random(3, tokens, experts) * 2, random(4, experts) * np.float32(0.3)
    chosen, weights = np.empty((tokens, count), np.int32), np.empty((tokens, count), np.float32)
    operands = {"logits": logits, "chosen": chosen, "weights": weights, "normalise": normalise}
    call(name, "route_forward", **operands, bias=bias)
    np.testing.assert_array_equal(chosen, chosen_with(logits, bias, count))
    wide = np.exp(logits.astype(np.float64))
    taken = np.take_along_axis(wide, chosen, axis=1)
    exact = taken / (taken if normalise else wide).sum(axis=1, keepdims=True)
    close(weights, exact, exact * (1 + np.abs(logits).max()), experts + 8)


@pytest.mark.parametrize("name", SETS)
def test_a_bias_of_zeros_chooses_as_none_and_equal_sums_go_to_lower_numbers(name: str) -> None:
    logits = np.array([[1, 2, 2, 2, 0], [0, 0, 0, 0, 0], [4, 3, 2, 1, 0], [np.nan] * 5], np.float32)
    found = []
    for bias in (None, np.zeros(5, np.float32), np.array([0, 0, 0, 9, 9], np.float32)):
        chosen, weights = np.empty((4, 3), np.int32), np.empty((4, 3), np.float32)
        given = {} if bias is None else {"bias": bias}
        call(name, "route_forward", logits=logits, chosen=chosen, weights=weights, normalise=True, **given)
        found.append((chosen, weights))
    (chosen, weights), zeros, last = found
    np.testing.assert_array_equal(zeros[0], chosen)
    np.testing.assert_array_equal(zeros[1], weights)
    np.testing.assert_array_equal(last[0], [[1, 3, 4], [0, 3, 4], [0, 3, 4], [0, 1, 2]])


@pytest.mark.parametrize("name", SETS)
def test_rows_of_experts_are_counted(name: str) -> None:
    bounds, counts = np.array([0, 2, 2, 7], np.int32), np.array([1, 0, 5], np.int32)
    call(name, "add_rows", bounds=bounds, counts=counts)
    np.testing.assert_array_equal(counts, [3, 0, 10])


@pytest.mark.parametrize("name", SETS)
def test_equal_logits_go_to_lower_numbers_and_nans_last(name: str) -> None:
    nan, inf = np.nan, np.inf
    logits = np.array([[1, 2, 2, 2, 0], [0, 0, 0, 0, 0], [nan, 1, nan, 0, -inf], [nan] * 5], np.float32)
    chosen, weights = np.empty((4, 3), np.int32), np.empty((4, 3), np.float32)
    call(name, "route_forward", logits=logits, chosen=chosen, weights=weights, normalise=True)
    np.testing.assert_array_equal(chosen, [[1, 2, 3], [0, 1, 2], [1, 3, 4], [0, 1, 2]])
    assert np.isfinite(weights[:3]).all()


def _losses(logits: Values, chosen: Values, above: Values, counts: Values, normalise: bool, balance: float, z: float):
    """A number whose gradient with regard to logits is the kernel's: weights times `above`, and both losses."""
    (tokens, experts), count = logits.shape, chosen.shape[1]
    wide = np.exp(logits)
    shares = wide / wide.sum(axis=1, keepdims=True)
    taken = np.take_along_axis(shares, chosen, axis=1)
    weights = taken / taken.sum(axis=1, keepdims=True) if normalise else taken
    balanced = balance * experts / (count * tokens**2) * (counts * shares.sum(axis=0)).sum()
    squares = z / tokens * (np.log(wide.sum(axis=1)) ** 2).sum()
    return (weights * above).sum() + 0.5 * (balanced + squares)


@pytest.mark.parametrize(("balance", "z"), [(0.0, 0.0), (0.3, 0.0), (0.0, 0.2), (3.0, 2.0)])
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("shape", ["few", "all", "idle"])
@pytest.mark.parametrize("name", SETS)
def test_gradient_of_choice(name: str, shape: str, normalise: bool, balance: float, z: float) -> None:
    tokens, experts, count = SHAPES[shape]
    logits, above = random(4, tokens, experts), random(5, tokens, count)
    chosen, weights = np.empty((tokens, count), np.int32), np.empty((tokens, count), np.float32)
    call(name, "route_forward", logits=logits, chosen=chosen, weights=weights, normalise=normalise)
    _, bounds = grouped(chosen, experts)
    dlogits = np.empty_like(logits)
    scale = np.array([0.5, 0], np.float32)
    operands = {"logits": logits, "chosen": chosen, "weights": weights, "dweights": above, "bounds": bounds}
    options = {"normalise": normalise, "balance": balance, "z": z}
    call(name, "route_backward", **operands, dlogits=dlogits, scale=scale, **options)
    wide, counts = logits.astype(np.float64), np.diff(bounds)
    exact = numeric_gradient(lambda: _losses(wide, chosen, f64(above)[0], counts, normalise, balance, z), wide)
    np.testing.assert_allclose(dlogits, exact, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", SETS)
def test_order_of_rows(name: str, shape: str, router: str) -> None:
    tokens, experts, count = SHAPES[shape]
    chosen = choice(tokens, experts, count, router)
    order, bounds = np.empty(tokens * count, np.int32), np.empty(experts + 1, np.int32)
    call(name, "group_rows", chosen=chosen, order=order, bounds=bounds)
    exact_order, exact_bounds = grouped(chosen, experts)
    np.testing.assert_array_equal(order, exact_order)
    np.testing.assert_array_equal(bounds, exact_bounds)


def test_a_number_that_is_no_expert_is_refused() -> None:
    for number in (-1, 4):
        operands = {"chosen": np.array([[number]], np.int32), "order": np.empty(1, np.int32)}
        with pytest.raises(IndexError, match=f"expert {number} is outside 4 experts"):
            call("fast", "group_rows", **operands, bounds=np.empty(5, np.int32))


@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETS)
def test_products(name: str, dtype: Any, shape: str, router: str, trans_b: bool) -> None:
    """Rows of tokens to rows of experts, and back as sums."""
    tokens, experts, count = SHAPES[shape]
    inner, columns = 24, 40
    order, bounds = grouped(choice(tokens, experts, count, router), experts)
    matrices = random(1, experts, *((columns, inner) if trans_b else (inner, columns)), dtype=dtype)
    of_row = f64(matrices.transpose(0, 2, 1) if trans_b else matrices)[0][experts_of(bounds)]

    a, out = random(2, tokens, inner, dtype=dtype), np.empty((len(order), columns), dtype)
    call(name, "expert_rows", a=a, b=matrices, order=order, bounds=bounds, out=out, trans_b=trans_b)
    taken = f64(a)[0][order // count][:, None]
    close(out, (taken @ of_row)[:, 0], (np.abs(taken) @ np.abs(of_row))[:, 0], inner)

    a, before = random(3, len(order), inner, dtype=dtype), random(4, tokens, columns, dtype=dtype)
    products, sizes = ((f(f64(a)[0])[:, None] @ f(of_row))[:, 0] for f in (np.asarray, np.abs))
    exact, magnitude = np.zeros((2, tokens, columns))
    np.add.at(exact, order // count, products)
    np.add.at(magnitude, order // count, sizes)
    operands = {
        "a": a,
        "b": matrices,
        "order": order,
        "bounds": bounds,
        "sums": np.empty((tokens, columns), np.float32),
    }
    for added in ("nothing", "accumulate", "residual"):
        out = before.copy()
        extra = {"residual": out} if added == "residual" else {"accumulate": added == "accumulate"}
        call(name, "expert_sums", **operands, out=out, trans_b=trans_b, **extra)
        plus = 0 if added == "nothing" else f64(before)[0]
        close(out, exact + plus, magnitude + np.abs(plus), inner + count + 1)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("gathers_a", [False, True])
@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETS)
def test_gradients(name: str, dtype: Any, shape: str, router: str, gathers_a: bool, accumulate: bool) -> None:
    tokens, experts, count = SHAPES[shape]
    order, bounds = grouped(choice(tokens, experts, count, router), experts)
    rows = (tokens, len(order)) if gathers_a else (len(order), tokens)
    a, b = random(1, rows[0], 24, dtype=dtype), random(2, rows[1], 16, dtype=dtype)
    for stored in (dtype, np.float32):
        out = random(3, experts, 24, 16, dtype=stored)
        before = f64(out)[0]
        operands = {"a": a, "b": b, "order": order, "bounds": bounds, "out": out}
        call(name, "expert_gradients", **operands, gathers_a=gathers_a, accumulate=accumulate)
        left, right = f64(a, b)
        left, right = (left[order // count], right) if gathers_a else (left, right[order // count])
        for expert in range(experts):
            at = slice(*bounds[expert : expert + 2])
            plus = before[expert] if accumulate else 0
            exact = left[at].T @ right[at] + plus
            close(out[expert], exact, np.abs(left[at]).T @ np.abs(right[at]) + np.abs(plus), len(order) + 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETS)
def test_the_product_of_a_row_does_not_depend_on_other_rows(name: str, dtype: Any) -> None:
    """The first row of each expert, with few and with many other rows."""
    matrices, a = random(1, 2, 24, 40, dtype=dtype), random(2, 200, 24, dtype=dtype)
    found = []
    for tokens in (1, 2, ROW_BLOCK, ROW_BLOCK + 1, 200):
        order, bounds = grouped(np.tile(np.arange(2, dtype=np.int32), (tokens, 1)), 2)
        out = np.empty((2 * tokens, 40), dtype)
        call(name, "expert_rows", a=a[:tokens], b=matrices, order=order, bounds=bounds, out=out)
        total = np.empty((tokens, 40), dtype)
        operands = {"a": np.repeat(a[:1], 2 * tokens, axis=0), "b": matrices, "order": order, "bounds": bounds}
        call(name, "expert_sums", **operands, sums=np.empty((tokens, 40), np.float32), out=total)
        found.append((out[[0, tokens]], total[:1]))
    for rows, total in found[1:]:
        same_bits(rows, found[0][0])
        same_bits(total, found[0][1])


@pytest.mark.parametrize("name", HOST_SETS)
def test_products_do_not_depend_on_the_address(name: str) -> None:
    order, bounds = grouped(choice(70, 3, 2, "ragged"), 3)
    x = {"x": random(1, 70, 33, dtype=np.float16), "rows": random(2, 140, 21, dtype=np.float16)}
    x |= {"b": random(3, 3, 33, 21, dtype=np.float16), "order": order, "bounds": bounds}

    def results(x: dict[str, Values]) -> list[Values]:
        sorted_rows = {"order": x["order"], "bounds": x["bounds"]}
        outs = [np.empty(shape, np.float16) for shape in ((140, 21), (70, 33), (3, 21, 33))]
        sums = np.empty((70, 33), np.float32)
        call(name, "expert_rows", a=x["x"], b=x["b"], **sorted_rows, out=outs[0])
        call(name, "expert_sums", a=x["rows"], b=x["b"], **sorted_rows, sums=sums, out=outs[1], trans_b=True)
        factors = {"a": x["rows"], "b": x["x"]}
        call(name, "expert_gradients", **factors, **sorted_rows, out=outs[2], gathers_a=False, accumulate=False)
        return outs

    expected = results(x)
    for moved in at_other_addresses(x):
        for one, other in zip(results(moved), expected, strict=True):
            same_bits(one, other)


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETS)
def test_weighted_swiglu(name: str, dtype: Any, gathered: bool) -> None:
    tokens, count = (37, 3) if gathered else (111, 1)
    order = {"order": np.random.default_rng(0).permutation(111).astype(np.int32)} if gathered else {}
    gate, up, above = (random(seed, 111, 40, dtype=dtype) for seed in (1, 2, 3))
    weights = np.abs(random(4, tokens, count))
    prod, dgate, dup = (np.empty_like(gate) for _ in range(3))
    call(name, "weighted_swiglu_forward", gate=gate, up=up, weights=weights, prod=prod, **order)
    g, u, d = f64(gate, up, above)
    weight = f64(weights)[0].reshape(-1)[order.get("order", slice(None)), None]
    plain = g * sigmoid(g) * u
    close(prod, plain * weight, np.abs(plain * weight), 10)

    dweights = np.empty_like(weights)
    operands = {"gate": gate, "up": up, "weights": weights, "dprod": above, "dgate": dgate, "dup": dup}
    call(name, "weighted_swiglu_backward", **operands, dweights=dweights, **order)
    exact_gate, exact_up = swiglu_gradient(g, u, d * weight)
    close(dgate, exact_gate, np.abs(d * weight * u) * (1 + np.abs(g)), 16)
    close(dup, exact_up, np.abs(exact_up), 12)
    exact = np.empty(111)
    exact[order.get("order", slice(None))] = (d * plain).sum(axis=1)
    magnitude = np.empty(111)
    magnitude[order.get("order", slice(None))] = np.abs(d * plain).sum(axis=1)
    close(dweights, exact.reshape(weights.shape), magnitude.reshape(weights.shape), 52)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETS)
def test_rows_within_bounds_are_weighted_as_among_others(name: str, dtype: Any) -> None:
    """Others may hold anything, and so may what becomes of them."""
    gate, up, above = (random(seed, 111, 40, dtype=dtype) for seed in (1, 2, 3))
    weights, inside = np.abs(random(4, 111, 1)), slice(7, 80)

    def results(*given: Any, **more: Any) -> list[Any]:
        outs = [np.full_like(gate, 5) for _ in range(3)]
        gate_, up_, above_, weights_ = given
        call(name, "weighted_swiglu_forward", gate=gate_, up=up_, weights=weights_, prod=outs[0], **more)
        operands = {"gate": gate_, "up": up_, "weights": weights_, "dprod": above_, "dgate": outs[1], "dup": outs[2]}
        dweights = np.empty_like(weights_)
        call(name, "weighted_swiglu_backward", **operands, dweights=dweights, **more)
        return [*outs, dweights]

    whole = results(gate, up, above, weights)
    spoilt = []
    for each in (gate, up, above, weights):
        copy = np.full_like(each, np.nan)
        copy[inside] = each[inside]
        spoilt.append(copy)
    for bounds in ([7, 30, 30, 80], [7, 80]):
        for one, other in zip(results(*spoilt, bounds=np.array(bounds, np.int32)), whole, strict=True):
            same_bits(one[inside], other[inside])
    results(*spoilt, bounds=np.zeros(4, np.int32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETS)
def test_weights_of_one_are_plain_swiglu(name: str, dtype: Any) -> None:
    gate, up, above = (random(seed, 50, 24, dtype=dtype) for seed in (1, 2, 3))
    weights = {"weights": np.ones((50, 1), np.float32)}
    found, plain = [np.empty_like(gate) for _ in range(3)], [np.empty_like(gate) for _ in range(3)]
    call(name, "weighted_swiglu_forward", gate=gate, up=up, **weights, prod=found[0])
    call(name, "swiglu_forward", gate=gate, up=up, prod=plain[0])
    operands = {"gate": gate, "up": up, "dprod": above}
    more = {**weights, "dweights": np.empty((50, 1), np.float32)}
    call(name, "weighted_swiglu_backward", **operands, **more, dgate=found[1], dup=found[2])
    call(name, "swiglu_backward", **operands, dgate=plain[1], dup=plain[2])
    for one, other in zip(found, plain, strict=True):
        same_bits(one, other)


@pytest.mark.parametrize("name", SETS)
def test_sigmoid(name: str) -> None:
    x, dy = random(1, 77, 1) * 5, random(2, 77, 1)
    y, dx = np.empty_like(x), np.empty_like(x)
    call(name, "sigmoid_forward", x=x, y=y)
    close(y, sigmoid(f64(x)[0]), 1.0, 8)
    call(name, "sigmoid_backward", y=y, dy=dy, dx=dx)
    exact = f64(dy)[0] * f64(y)[0] * (1 - f64(y)[0])
    np.testing.assert_allclose(dx, exact, atol=4 * EPS)

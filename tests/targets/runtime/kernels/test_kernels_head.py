"""The cross-entropy head of both kernel sets against float64, and its gradient against finite differences."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from ratrain.targets.runtime.kernels.fast import fast_head
from ratrain.targets.runtime.kernels.shared import number_within
from tests.targets.runtime.kernels.kernels_oracle import (
    DTYPES,
    EPS,
    SETS,
    call,
    close,
    f64,
    head,
    head_gradient,
    numeric_gradient,
)

TOKENS, HIDDEN, VOCAB = 37, 24, 330


@pytest.fixture(params=[1 << 22, 256 * HIDDEN], ids=["one-block", "table-blocks"])
def _table_blocks(request, monkeypatch):
    """The fast head with the table in one block, and in blocks of 256 and 74 rows."""
    monkeypatch.setattr(fast_head, "TABLE_ELEMENTS", request.param)


def inputs(dtype: type, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    xn, table = rng.normal(size=(TOKENS, HIDDEN)).astype(dtype), rng.normal(size=(VOCAB, HIDDEN)).astype(dtype)
    labels = rng.integers(0, VOCAB, TOKENS).astype(np.int32)
    labels[:4] = 0, VOCAB - 1, 255, 256
    return xn, table, labels


def forward(name, xn, table, labels, *, chunk, normalise, loss=None, **shape):
    lse, loss = np.empty(len(xn), np.float32), np.full(1, np.nan) if loss is None else loss
    accumulate = bool(np.isfinite(loss[0]))
    logits = np.empty((chunk, len(table)), np.float32)
    arguments = {"xn": xn, "table": table, "labels": labels, "lse": lse, "loss": loss, "logits": logits}
    call(name, "head_forward", **arguments, normalise=normalise, accumulate=accumulate, **shape)
    return lse, loss


def backward(name, xn, table, labels, lse, *, chunk, normalise, scale=1.0, dtable=None, dtype=None, **shape):
    accumulate = dtable is not None
    dtable = dtable if accumulate else np.full(table.shape, np.nan, dtype or table.dtype)
    dxn = np.full_like(xn, np.nan)
    call(
        name,
        "head_backward",
        xn=xn,
        table=table,
        labels=labels,
        lse=lse,
        scale=np.array([scale, np.nan], np.float32),
        logits=np.empty((chunk, len(table)), np.float32),
        dxn=dxn,
        dtable=dtable,
        denominator=float(TOKENS),
        normalise=normalise,
        accumulate=accumulate,
        **shape,
    )
    return dxn, dtable


def logit_error(xn, table, normalise) -> float:
    """Bound of a logit's rounding error, and of the lse's: products, inverse norms, peak, logarithm."""
    terms = np.abs(xn) @ np.abs(table).T
    if normalise:
        terms /= np.linalg.norm(table, axis=1)
    return (3 * HIDDEN + 16) * EPS * float(terms.max())


@pytest.mark.usefixtures("_table_blocks")
@pytest.mark.parametrize("chunk", [1, 8, 37, 64])
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETS)
def test_forward_matches_float64(name, dtype, normalise, chunk):
    xn, table, labels = inputs(dtype)
    _, lse_exact, loss_exact = head(*f64(xn, table), labels, normalise)
    lse, loss = forward(name, xn, table, labels, chunk=chunk, normalise=normalise)
    error = logit_error(*f64(xn, table), normalise) + VOCAB * EPS
    close(lse, lse_exact, error / EPS, 1)
    assert abs(loss[0] - loss_exact) <= TOKENS * (2 * error + EPS * np.abs(lse_exact).max())
    again = forward(name, xn, table, labels, chunk=chunk, normalise=normalise, loss=loss.copy())[1]
    # the second sum adds term by term to the first: only the order of the float64 additions differs
    np.testing.assert_allclose(again[0], 2 * loss[0], rtol=1e-13)


@pytest.mark.usefixtures("_table_blocks")
@pytest.mark.parametrize("chunk", [1, 8, 64])
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETS)
def test_backward_matches_float64(name, dtype, normalise, chunk):
    xn, table, labels = inputs(dtype, seed=1)
    x, w = f64(xn, table)
    scale = 64.0
    factor = scale / TOKENS
    lse = head(x, w, labels, normalise)[1].astype(np.float32)
    dx_exact, dw_exact = head_gradient(x, w, labels, factor, normalise)
    dxn, dtable = backward(name, xn, table, labels, lse, chunk=chunk, normalise=normalise, scale=scale)

    logits, exact_lse, _ = head(x, w, labels, normalise)
    prob = np.exp(logits - exact_lse[:, None])
    onehot = np.zeros_like(prob)
    onehot[np.arange(TOKENS), labels] = 1
    # prob is wrong by its logit and lse, then sums of VOCAB or TOKENS products follow; `normalise` scales, squares
    # the inverse norm and sums again for the projection
    wrong = factor * (prob * (logit_error(x, w, normalise) + 4 * EPS * np.abs(lse).max()) + 8 * EPS * onehot)
    terms = factor * (prob + onehot)
    inverse = 1 / np.linalg.norm(w, axis=1, keepdims=True) if normalise else np.ones((VOCAB, 1))
    dx_bound = (wrong + (VOCAB + 16) * EPS * terms) @ (np.abs(w) * inverse)
    dw_terms = wrong + (TOKENS + 3 * HIDDEN + 32) * EPS * terms
    dw_bound = (dw_terms.T @ np.abs(x)) * inverse
    if normalise:
        dw_bound += np.abs(w) * inverse**2 * (dw_terms * np.abs(logits)).sum(axis=0)[:, None]
    close(dxn, dx_exact, dx_bound / EPS, 1)
    # one rounding to storage for each chunk, of values no larger than the sum of the magnitudes
    chunks = -(-TOKENS // chunk)
    stored = (
        (chunks - 1) * float(ml_dtypes.finfo(dtype).eps) / 2 * (dw_magnitude(terms, x, w, inverse, logits, normalise))
    )
    close(dtable, dw_exact, (dw_bound + stored) / EPS + chunks * 2.0**-24 / EPS, 1)


def dw_magnitude(terms, x, w, inverse, logits, normalise):
    size = (terms.T @ np.abs(x)) * inverse
    if normalise:
        size += np.abs(w) * inverse**2 * (terms * np.abs(logits)).sum(axis=0)[:, None]
    return size


@pytest.mark.parametrize("normalise", [False, True])
def test_oracle_gradient_matches_finite_differences(normalise):
    rng = np.random.default_rng(2)
    xn, table = rng.normal(size=(5, 4)), rng.normal(size=(7, 4))
    labels = rng.integers(0, 7, 5)
    dx, dw = head_gradient(xn, table, labels, 0.3, normalise)

    def loss() -> float:
        return 0.3 * head(xn, table, labels, normalise)[2]

    np.testing.assert_allclose(dx, numeric_gradient(loss, xn), atol=1e-8)
    np.testing.assert_allclose(dw, numeric_gradient(loss, table), atol=1e-8)


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("name", SETS)
def test_backward_accumulates(name, normalise):
    xn, table, labels = inputs(np.float32, seed=3)
    lse, _ = forward(name, xn, table, labels, chunk=16, normalise=normalise)
    dxn, once = backward(name, xn, table, labels, lse, chunk=64, normalise=normalise)
    start = np.ones_like(table)
    dxn_again, added = backward(name, xn, table, labels, lse, chunk=64, normalise=normalise, dtable=start.copy())
    np.testing.assert_array_equal(dxn, dxn_again)
    np.testing.assert_array_equal(added, once + start)


@pytest.mark.parametrize("name", SETS)
def test_gradient_may_be_float32(name):
    xn, table, labels = inputs(np.float16, seed=4)
    lse, _ = forward(name, xn, table, labels, chunk=16, normalise=False)
    _, wide = backward(name, xn, table, labels, lse, chunk=64, normalise=False, dtype=np.float32)
    _, narrow = backward(name, xn, table, labels, lse, chunk=64, normalise=False)
    np.testing.assert_array_equal(wide.astype(np.float16), narrow)


@pytest.mark.parametrize("name", SETS)
def test_normalised_rows_of_zeros_are_finite(name):
    xn, table, labels = inputs(np.float32, seed=5)
    table[7] = 0
    table[8] = 2e-13  # shorter than the least norm: divided by that constant, so no projection
    lse, loss = forward(name, xn, table, labels, chunk=16, normalise=True)
    assert np.isfinite(loss[0])
    _, dtable = backward(name, xn, table, labels, lse, chunk=64, normalise=True)
    _, exact = head_gradient(*f64(xn, table), labels, 1 / TOKENS, normalise=True)
    for row in (7, 8):
        np.testing.assert_allclose(dtable[row], exact[row], rtol=1e-4, atol=1e-4 * np.abs(exact[row]).max())
    assert np.isfinite(dtable).all()


@pytest.mark.parametrize("name", SETS)
def test_overflow_and_nan_are_visible(name):
    xn, table, labels = inputs(np.float16, seed=6)
    lse, _ = forward(name, xn, table, labels, chunk=16, normalise=False)
    dxn, dtable = backward(name, xn, table, labels, lse, chunk=16, normalise=False, scale=2.0**24)
    assert np.isinf(dxn).any()
    assert not np.isfinite(dtable).all()
    xn[20, 3] = np.nan
    lse, loss = forward(name, xn, table, labels, chunk=16, normalise=False)
    assert np.isnan(loss[0])
    assert np.isnan(lse[20])
    assert np.isfinite(np.delete(lse, 20)).all()
    dxn, dtable = backward(name, xn, table, labels, lse, chunk=16, normalise=False)
    assert np.isnan(dxn[20]).all()
    assert np.isnan(dtable).all()
    xn[20, 3] = np.inf
    assert not np.isfinite(forward(name, xn, table, labels, chunk=16, normalise=False)[1][0])


@pytest.mark.parametrize("name", SETS)
def test_large_logits_do_not_overflow(name):
    xn, table, labels = inputs(np.float16, seed=7)
    xn *= np.float16(1000)
    table *= np.float16(1000)
    lse, _ = forward(name, xn, table, labels, chunk=16, normalise=False)
    logits, exact, _ = head(*f64(xn, table), labels, normalise=False)
    close(lse, exact, np.abs(logits).max(), 3 * HIDDEN)
    assert np.isfinite(backward(name, xn, table, labels, lse, chunk=16, normalise=False)[0]).all()


@pytest.mark.usefixtures("_table_blocks")
@pytest.mark.parametrize(
    "options",
    [{"normalise": False}, {"normalise": True}, {"normalise": False, "scale_of_logits": 0.25, "softcap": 3.0}],
    ids=["plain", "normalised", "shaped"],
)
@pytest.mark.parametrize("chunk", [8, TOKENS])
@pytest.mark.parametrize("name", SETS)
def test_rows_without_a_label_are_as_if_they_were_not_there(name, chunk, options):
    xn, table, labels = inputs(np.float32, seed=8)
    kept = np.arange(TOKENS) % 3 != 1
    masked = np.where(kept, labels, -1).astype(np.int32)
    lse, loss = forward(name, xn, table, masked, chunk=chunk, **options)
    lse_of_kept, loss_of_kept = forward(name, xn[kept], table, labels[kept], chunk=chunk, **options)
    np.testing.assert_allclose(loss, loss_of_kept, rtol=1e-6)
    np.testing.assert_allclose(lse[kept], lse_of_kept, rtol=1e-5)
    dxn, dtable = backward(name, xn, table, masked, lse, chunk=chunk, **options)
    of_kept = backward(name, xn[kept], table, labels[kept], lse_of_kept, chunk=chunk, **options)
    assert not dxn[~kept].any()
    np.testing.assert_allclose(dxn[kept], of_kept[0], rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(dtable, of_kept[1], rtol=1e-4, atol=1e-6)
    nothing = np.full(TOKENS, -1, np.int32)
    lse, loss = forward(name, xn, table, nothing, chunk=chunk, **options)
    assert loss[0] == 0
    dxn, dtable = backward(name, xn, table, nothing, lse, chunk=chunk, **options)
    assert not dxn.any()
    assert not dtable.any()


@pytest.mark.parametrize(("normalise", "softcap"), [(False, None), (True, 5.0)])
@pytest.mark.parametrize("name", SETS)
def test_words_of_tensor_peers_make_up_the_head(name, normalise, softcap):
    """Labels that another peer has are in no sum of this one, though its logits pull at their rows; rows without any are in none."""
    xn, table, labels = inputs(np.float32, seed=8)
    labels[[7, 20]] = -1
    options = {"chunk": 8, "normalise": normalise, "softcap": softcap}
    lse, loss = forward(name, xn, table, labels, **options)
    dxn, dtable = backward(name, xn, table, labels, lse, **options)
    of_x, of_table, logs, at_labels = np.zeros_like(xn), [], [], 0.0
    for words in (range(200), range(200, VOCAB)):
        mine, own = labels.copy(), table[words.start : words.stop]
        number_within(mine, words)
        assert {-1, -2} < set(mine)
        part, own_loss = forward(name, xn, own, mine, **options)
        logs.append(part)
        at_labels += part[mine >= 0].sum(dtype=np.float64) - own_loss[0]
        of_rows, of_words = backward(name, xn, own, mine, lse, **options)
        of_x += of_rows
        of_table.append(of_words)
    total = np.logaddexp(*f64(*logs))
    np.testing.assert_allclose(total, lse, rtol=1e-6)
    assert total[labels >= 0].sum() - at_labels == pytest.approx(loss[0], rel=1e-6)
    np.testing.assert_allclose(of_x, dxn, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(np.concatenate(of_table), dtable, rtol=1e-4, atol=1e-6)
    assert not of_x[[7, 20]].any()


@pytest.mark.parametrize("label", [-3, VOCAB])  # -2 is a word of another tensor-parallel rank
@pytest.mark.parametrize("name", SETS)
def test_a_label_outside_the_table_is_refused(name, label):
    xn, table, labels = inputs(np.float32)
    labels[5] = label
    with pytest.raises(IndexError, match=f"token {label} is outside a table of {VOCAB} rows"):
        forward(name, xn, table, labels, chunk=8, normalise=False)
    with pytest.raises(IndexError, match=f"token {label} is outside"):
        backward(name, xn, table, labels, np.zeros(TOKENS, np.float32), chunk=8, normalise=False)


@pytest.mark.usefixtures("_table_blocks")
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETS)
def test_logits_that_were_kept_give_the_bits_of_one_chunk_of_all_rows(name, dtype, normalise, accumulate):
    xn, table, labels = inputs(dtype, seed=6)
    logits, lse, loss = np.empty((TOKENS, VOCAB), np.float32), np.empty(TOKENS, np.float32), np.zeros(1)
    operands = {"xn": xn, "table": table, "labels": labels, "lse": lse, "logits": logits}
    call(name, "head_forward", **operands, loss=loss, normalise=normalise, accumulate=False)
    kept, before = logits.copy(), np.ones_like(table) if accumulate else None
    expected = backward(name, xn, table, labels, lse, chunk=TOKENS, normalise=normalise, scale=64.0, dtable=before)
    dxn, dtable = np.full_like(xn, np.nan), np.ones_like(table) if accumulate else np.full_like(table, np.nan)
    call(
        name,
        "head_backward_from_logits",
        **operands,
        scale=np.array([64.0, np.nan], np.float32),
        dlogits=np.full_like(logits, np.nan),
        dxn=dxn,
        dtable=dtable,
        denominator=float(TOKENS),
        normalise=normalise,
        accumulate=accumulate,
    )
    np.testing.assert_array_equal(logits, kept)
    for found, wanted in zip((dxn, dtable), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)

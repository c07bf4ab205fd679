"""Products by sgemm: factors stored either way, of any size, rows apart; results added to, or not read at all."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain.targets.program.attention_spec import AttentionSpec
from ratrain.targets.runtime.kernels import Scratch, kernel_set, openblas
from ratrain.targets.runtime.kernels.fast.blas import multiply, multiply_transposed, share_product
from ratrain.targets.runtime.kernels.fast.fast_numba import exact, power_of_two
from ratrain.targets.runtime.kernels.team import PRODUCT_COLUMNS, PRODUCT_ROWS, Team

EPS = float(np.finfo(np.float32).eps)


@exact()
def product(sgemm, a, b, keep, out):
    multiply(sgemm, a, b, keep, out)


@exact()
def product_transposed(sgemm, a, b, keep, out):
    multiply_transposed(sgemm, a, b, keep, out)


@exact()
def powers(x, out):
    for i in range(x.size):
        out[i] = power_of_two(x[i])


def stored(rng, rows, columns, apart, *, transposed):
    """A matrix whose stored rows are `apart` longer than it is wide."""
    shape = (columns, rows + apart) if transposed else (rows, columns + apart)
    whole = rng.standard_normal(shape).astype(np.float32)
    return whole[:, :rows].T if transposed else whole[:, :columns]


def close(actual, a, b, before=0.0):
    exact_value = a.astype(np.float64) @ b.astype(np.float64) + before
    bound = np.abs(a).astype(np.float64) @ np.abs(b) + np.abs(before)
    assert (np.abs(actual - exact_value) <= (a.shape[1] + 2) * EPS * bound).all()


SIZES = st.integers(1, 40)


@given(
    m=SIZES,
    n=SIZES,
    k=SIZES,
    apart=st.integers(0, 3),
    ways=st.tuples(st.booleans(), st.booleans()),
    seed=st.integers(0, 9),
)
def test_factors_may_be_stored_either_way(m, n, k, apart, ways, seed):
    rng = np.random.default_rng(seed)
    a = stored(rng, m, k, apart, transposed=ways[0])
    b = stored(rng, k, n, apart, transposed=ways[1])
    out = stored(rng, m, n, apart, transposed=False)
    beside = out.base[:, n:].copy() if out.base is not None else None
    share_product(Team(1), a, b, out)
    close(out, a, b)
    if beside is not None:
        np.testing.assert_array_equal(out.base[:, n:], beside)


@given(m=SIZES, n=SIZES, k=SIZES, apart=st.integers(0, 3), seed=st.integers(0, 9))
def test_loops_add_to_the_result_or_do_not_read_it(m, n, k, apart, seed):
    rng = np.random.default_rng(seed)
    for call, a in (
        (product, stored(rng, m, k, apart, transposed=False)),
        (product_transposed, stored(rng, m, k, apart, transposed=True).T),
    ):
        left = a if call is product else a.T
        b = stored(rng, k, n, apart, transposed=False)
        out = np.full((m, n), np.nan, np.float32)
        call(openblas.SGEMM, a, b, np.float32(0), out)
        close(out, left, b)
        before = out.astype(np.float64)
        call(openblas.SGEMM, a, b, np.float32(1), out)
        close(out, left, b, before)


def test_the_library_has_one_thread():
    code = """if True:
        from threadpoolctl import threadpool_info
        from ratrain.targets.runtime.kernels import openblas
        (pool,) = (pool for pool in threadpool_info() if pool["filepath"] == openblas.PATH)
        assert openblas.VERSION == f"openblas {pool['version']}"
        assert openblas.core_type() == pool["architecture"]
        print(pool["num_threads"])"""
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "2"}
    process = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert process.stdout == "1\n"


def test_a_scipy_that_is_imported_later_finds_its_own_library():
    code = """if True:
        import numpy
        from ratrain.targets.runtime.kernels import openblas
        from scipy.linalg import svd
        print(svd(numpy.eye(5, 2), full_matrices=False)[1])"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert process.stdout == "[1. 1.]\n", process.stderr


@contextmanager
def booked():
    """While the block runs, list m, n and k of every product."""
    calls = []
    sgemm = openblas.Sgemm(openblas.SGEMM)

    def book(*arguments):
        calls.append(arguments[3:6])
        sgemm(*arguments)

    function = openblas.Sgemm(book)
    with mock.patch.object(openblas, "SGEMM", ctypes.cast(function, ctypes.c_void_p).value):
        yield calls


def test_another_function_in_its_place_sees_every_product():
    spec = AttentionSpec(batch=1, seq_len=20, heads=2, kv_heads=2, head_dim=8)
    kernels, x = kernel_set("fast"), np.ones((20, 16), np.float16)
    scratch, lse = Scratch(1 << 20), np.empty((2, 20), np.float32)
    with booked() as calls:
        kernels.attention_forward(x, x, x, np.empty_like(x), lse, scratch=scratch, spec=spec)
        kernels.gemm(x, x, np.empty((20, 20), np.float16), scratch=scratch, trans_b=True)
    assert calls == [(20, 20, 8), (20, 8, 20)] * 2 + [(20, 20, 16)]


def test_power_of_two():
    x = np.concatenate([np.linspace(-126, 127, 100_001), np.arange(-126, 128), [-126 - 1e-4, -1e30, -np.inf]])
    x = x.astype(np.float32)
    found = np.empty_like(x)
    powers(x, found)
    value = np.where(x < -126, 0, np.exp2(x.astype(np.float64)))
    np.testing.assert_allclose(found, value, rtol=2 * EPS, atol=0)
    np.testing.assert_array_equal(found[100_001:-3], value[100_001:-3])
    powers(np.array([np.nan], np.float32), found)
    assert np.isnan(found[0])


@pytest.mark.parametrize("threads", [1, 3])
def test_rows_are_shared_out(threads):
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((200, 200)).astype(np.float32) for _ in range(2))
    out, parts = np.empty((200, 200), np.float32), []
    share_product(Team(threads), a, b, out, parts.append)
    close(out, a, b)
    assert sorted(row for part in parts for row in range(part.start, part.stop)) == list(range(200))


@given(
    rows=st.integers(2 * PRODUCT_ROWS, 400),
    depth=st.integers(1, 1200),
    columns=st.integers(2 * PRODUCT_COLUMNS, 2000),
    ways=st.tuples(st.booleans(), st.booleans()),
    threads=st.integers(2, 4),
)
@settings(max_examples=30, deadline=None)
def test_a_product_has_the_same_bits_however_many_threads_share_it(rows, depth, columns, ways, threads):
    rng = np.random.default_rng(0)
    a = stored(rng, rows, depth, 0, transposed=ways[0])
    b = stored(rng, depth, columns, 0, transposed=ways[1])
    whole, shared = np.empty((2, rows, columns), np.float32)
    share_product(Team(1), a, b, whole)
    share_product(Team(threads), a, b, shared)
    np.testing.assert_array_equal(shared, whole)


def test_the_larger_factor_is_cut_where_bits_allow_it():
    few, many = np.ones((256, 512), np.float32), np.ones((512, 8192), np.float32)
    for core_type, parts in (("SkylakeX", [(256, 4096, 512)] * 2), ("Haswell", [(120, 8192, 512), (136, 8192, 512)])):
        with booked() as calls, mock.patch.object(openblas, "core_type", lambda name=core_type: name):
            share_product(Team(2), few, many, np.empty((256, 8192), np.float32))
        assert sorted(calls) == parts


@pytest.mark.parametrize(("core_type", "first"), [("SkylakeX", 688), ("Haswell", 696)])
def test_rows_are_cut_at_cache_lines_where_bits_allow_it(core_type, first):
    many, few = np.ones((1376, 512), np.float32), np.ones((512, 512), np.float32)
    with booked() as calls, mock.patch.object(openblas, "core_type", return_value=core_type):
        share_product(Team(2), many, few, np.empty((1376, 512), np.float32))
    assert sorted(calls) == sorted([(first, 512, 512), (1376 - first, 512, 512)])


HEAD = """if True:
    import numpy as np
    from ratrain.targets.runtime.kernels import Scratch, kernel_set, openblas, team
    from ratrain.targets.runtime.kernels.fast import fast_head
    fast_head.TABLE_ELEMENTS = team.ELEMENTS = team.PRODUCTS = 1
    found = []
    for normalise in (False, True):
        for threads in (1, 2, 3):
            rng = np.random.default_rng(0)
            xn, table = (rng.standard_normal((n, 48)).astype(np.float16) for n in (150, 1500))
            given = {"xn": xn, "table": table, "labels": np.arange(150, dtype=np.int32), "normalise": normalise}
            given |= {"scale": np.ones(1, np.float32), "logits": np.empty((75, 1500), np.float32), "denominator": 1.0}
            given |= {"lse": np.empty(150, np.float32), "dxn": np.empty_like(xn), "dtable": np.empty_like(table)}
            kernels = kernel_set("fast", threads)
            scratch = Scratch(kernels.scratch_bytes("head_backward", **given, accumulate=False))
            one_pass = {"loss": np.zeros(1), "accumulate": False, "adds_loss": False}
            kernels.head_in_one_pass(**given, **one_pass, scratch=scratch)
            found.append([given[name].tobytes() for name in ("lse", "dxn", "dtable")])
        assert found[-1] == found[-2] == found[-3], normalise
    print(openblas.core_type())"""


@pytest.mark.parametrize("core_type", ["Haswell", "SkylakeX"])
def test_threads_change_no_bit_of_a_head(core_type, monkeypatch):
    """Of several blocks of the table, and by kernels that give other bits where columns are cut too."""
    if core_type == "SkylakeX" and openblas.core_type() != core_type:
        pytest.skip("this processor lacks the instructions")
    monkeypatch.setenv("OPENBLAS_CORETYPE", core_type)
    process = subprocess.run([sys.executable, "-c", HEAD], capture_output=True, text=True, check=False)
    assert process.stdout == f"{core_type}\n", process.stderr

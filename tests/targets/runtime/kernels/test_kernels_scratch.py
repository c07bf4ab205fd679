"""Scratch memory, its accounting, and the helpers that all kernel sets share."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratrain.targets.program.attention_spec import AttentionSpec
from ratrain.targets.runtime.arena.scratch import ALIGNMENT, Buffer, plan_bytes
from ratrain.targets.runtime.kernels import Scratch, kernel_set
from ratrain.targets.runtime.kernels.shared import decay_segments, rope_table, token_keys
from tests.targets.runtime.kernels.kernels_oracle import HOST_SETS, SETS, same_bits

BUFFERS = st.builds(
    Buffer,
    st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple),
    st.sampled_from([np.float16, np.float32, np.float64, np.int64]),
)


@given(st.lists(BUFFERS, max_size=8))
def test_a_plan_fits_exactly_aligned_and_disjoint(plan):
    scratch = Scratch(plan_bytes(plan))
    arrays = scratch.take_all(plan)
    assert scratch.used == scratch.capacity == scratch.high_water
    for n, (buffer, array) in enumerate(zip(plan, arrays, strict=True)):
        assert (array.shape, array.dtype) == (buffer.shape, buffer.dtype)
        assert array.flags.c_contiguous
        assert array.size == 0 or array.ctypes.data % ALIGNMENT == 0
        array.fill(n)
    assert all((array == n).all() for n, array in enumerate(arrays))
    with pytest.raises(MemoryError, match="64 more wanted"):
        scratch.take(1)
    scratch.reset()
    assert scratch.used == 0
    assert scratch.high_water == scratch.capacity


def test_a_plan_that_is_one_byte_too_large_is_refused():
    with pytest.raises(MemoryError, match="scratch of 127 bytes: 0 in use, 128 more wanted"):
        Scratch(127).take((3, 6), np.float32)


@pytest.mark.parametrize("name", SETS)
def test_scratch_of_an_unknown_kernel_is_refused(name):
    with pytest.raises(ValueError, match="no kernel 'gem'"):
        kernel_set(name).scratch_bytes("gem")


@pytest.mark.parametrize("name", HOST_SETS)
def test_rope_tables_are_counted_once(name):
    kernels = type(kernel_set(name))()
    assert kernels.constant_bytes == 0
    kernels.prepare_rope(seq_len=10, width=8, theta=1e4)
    assert kernels.constant_bytes == 2 * 10 * 4 * 4
    x = np.ones((20, 16), np.float16)
    kernels.rope(x, scratch=Scratch(64), heads=2, head_dim=8, seq_len=10, theta=1e4, inverse=False)
    assert kernels.constant_bytes == 2 * 10 * 4 * 4
    kernels.prepare_rope(seq_len=10, width=8, theta=5e5)
    assert kernels.constant_bytes == 2 * (2 * 10 * 4 * 4)
    kernels.rope(x[:8], scratch=Scratch(64), heads=2, head_dim=8, seq_len=4, theta=1e4, inverse=False, first_position=6)
    assert kernels.constant_bytes == 2 * (2 * 10 * 4 * 4)  # positions 6 to 9 are in the first table


def test_rows_of_a_rope_table_do_not_depend_on_its_length():
    for short, long in zip(rope_table(1000, 10, 1e4), rope_table(1237, 10, 1e4), strict=True):
        same_bits(short, long[:1000])


@given(
    st.integers(0, 40),
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(lambda pair: tuple(sorted(pair))), max_size=5),
)
def test_decay_segments_cover_the_shard_once(length, ranges):
    ranges = [(start, min(stop, length)) for start, stop in ranges if start <= length]
    decayed = np.zeros(length, bool)
    for start, stop in ranges:
        decayed[start:stop] = True
    done = 0
    for start, stop, flag in decay_segments(length, ranges):
        assert start == done < stop
        assert (decayed[start:stop] == flag).all()
        done = stop
    assert done == length


@pytest.mark.parametrize("wrong", [(-1, 3), (2, 11), (4, 3)])
def test_decay_ranges_outside_the_shard_are_refused(wrong):
    with pytest.raises(ValueError, match="outside a shard of 10 elements"):
        list(decay_segments(10, [wrong]))


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=50))
def test_token_keys_bring_equal_tokens_together_in_order(tokens):
    keys = np.empty(len(tokens), np.int64)
    token_keys(np.array(tokens, np.int32), keys)
    expected = sorted((token, t) for t, token in enumerate(tokens))
    assert [(int(key) >> 32, int(key) & 0xFFFFFFFF) for key in keys] == expected


def test_attention_scratch_is_asked_for_by_spec_alone():
    spec = AttentionSpec(batch=8, seq_len=1024, heads=32, kv_heads=8, head_dim=64)
    one = AttentionSpec(batch=1, seq_len=1024, heads=1, kv_heads=1, head_dim=64)
    for kernel in ("attention_forward", "attention_backward"):
        for name in HOST_SETS:
            kernels = kernel_set(name)
            assert kernels.scratch_bytes(kernel, spec=spec) == kernels.scratch_bytes(kernel, spec=one)

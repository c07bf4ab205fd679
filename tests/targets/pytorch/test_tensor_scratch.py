"""Scratch that is a byte tensor: what it hands out, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratrain.targets.runtime.arena.scratch import ALIGNMENT, Buffer, plan_bytes

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")

from ratrain.targets.pytorch.device.tensor_scratch import TORCH_DTYPES, TensorScratch  # noqa: E402

BUFFERS = st.builds(
    Buffer, st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple), st.sampled_from([*TORCH_DTYPES])
)


@given(plan=st.lists(BUFFERS, max_size=6))
def test_a_plan_fits_exactly_aligned_and_disjoint(plan: list[Buffer]) -> None:
    scratch = TensorScratch(plan_bytes(plan))
    tensors = scratch.take_all(plan)
    assert scratch.used == scratch.high_water == scratch.capacity
    for number, (buffer, tensor) in enumerate(zip(plan, tensors, strict=True)):
        assert tuple(tensor.shape) == buffer.shape
        assert tensor.dtype == TORCH_DTYPES[buffer.dtype]
        assert tensor.is_contiguous()
        if tensor.numel():
            assert tensor.data_ptr() % ALIGNMENT == 0
        tensor.view(-1).view(torch.uint8).fill_(number)
    for number, tensor in enumerate(tensors):
        assert (tensor.reshape(-1).view(torch.uint8) == number).all()
    scratch.reset()
    assert scratch.used == 0
    assert scratch.high_water == scratch.capacity


def test_a_plan_that_is_one_byte_too_large_is_refused() -> None:
    with pytest.raises(MemoryError, match="scratch of 127 bytes: 0 in use, 128 more wanted"):
        TensorScratch(127).take((3, 6), np.float32)

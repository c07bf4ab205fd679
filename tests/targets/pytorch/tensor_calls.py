"""Kernels on tensors, called with numpy arrays: tensors over the very bytes of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ratrain.targets.pytorch.device.tensor_scratch import TensorScratch
from ratrain.targets.pytorch.device.tensors import tensor_of


def as_tensors(value: Any) -> Any:
    """An array, or each of a list of arrays, as a tensor; anything else as it is."""
    if isinstance(value, list) and value and isinstance(value[0], np.ndarray):
        return [tensor_of(each) for each in value]
    return tensor_of(value) if isinstance(value, np.ndarray) else value


def call_on_tensors(kernels: Any, kernel: str, size: int, arguments: dict[str, Any]) -> Any:
    """Run a kernel with a scratch of exactly that size, full of NaNs."""
    scratch = TensorScratch(size)
    scratch.take(size, np.uint8).fill_(0xFF)
    scratch.reset()
    return getattr(kernels, kernel)(**{name: as_tensors(value) for name, value in arguments.items()}, scratch=scratch)

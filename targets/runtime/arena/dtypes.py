"""Numpy dtypes of tensors in memory; numpy has no bfloat16 of its own, so that one comes from `ml_dtypes`."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from ratrain.ratrain_ir.config.types import Dtype

BFLOAT16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)

NUMPY_DTYPES: dict[Dtype, np.dtype[Any]] = {
    Dtype.F16: np.dtype(np.float16),
    Dtype.BF16: BFLOAT16,
    Dtype.F32: np.dtype(np.float32),
    Dtype.F64: np.dtype(np.float64),
    Dtype.I32: np.dtype(np.int32),
    Dtype.I64: np.dtype(np.int64),
    Dtype.U8: np.dtype(np.uint8),
    Dtype.U32: np.dtype(np.uint32),
}
"""Numpy dtype of every element type."""

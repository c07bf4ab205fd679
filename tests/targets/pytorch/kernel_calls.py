"""A call of every kernel with tensors: those of the tests of kernels on arrays, in any storage type."""

from __future__ import annotations

from typing import Any

import numpy as np

from ratrain.targets.program.kernels import KERNELS
from ratrain.targets.pytorch.device.tensor_scratch import TensorScratch
from tests.targets.pytorch.expert_calls import expert_calls
from tests.targets.pytorch.tensor_calls import as_tensors
from tests.targets.runtime.kernels.test_kernels_matrix import big_calls
from tests.targets.runtime.kernels.test_kernels_team import capped, cases

VARIANTS = ("plain", "capped", "packed")
"""How a kernel is called: as the cases have it; with a soft cap, or with documents of 40 tokens, where it takes one."""


def packed() -> dict[str, dict[str, Any]]:
    """Those that take starts of documents, with them."""
    made = {kernel: arguments for kernel, arguments in cases().items() if "documents" in KERNELS[kernel].parameters}
    for kernel, arguments in made.items():
        spec, first = arguments.get("spec"), 0
        if spec is None:
            length = arguments["seq_len"]
            count = len(arguments[{"rope": "x", "position_forward": "y", "position_backward": "dy"}[kernel]]) // length
        else:
            block = getattr(spec, "block", spec)
            count, length, first = block.batch, block.queries, block.first_query
        arguments["documents"] = np.tile(np.arange(first, first + length, dtype=np.int32) // 40 * 40, count)
    return made


def kernel_calls(variant: str, dtype: Any = np.float16) -> dict[str, dict[str, Any]]:
    """Arguments by kernel, new each time; arrays of 16 bits in another type, those that were the same still are."""
    made = {"plain": lambda: {**big_calls(), **cases(), **expert_calls()}, "capped": capped, "packed": packed}[
        variant
    ]()
    known: dict[int, Any] = {}

    def changed(value: Any) -> Any:
        if isinstance(value, list):
            return [changed(each) for each in value]
        if isinstance(value, np.ndarray) and value.dtype == np.float16:
            with np.errstate(all="ignore"):  # of outputs, which hold anything
                return known.setdefault(id(value), value.astype(dtype))
        return value

    return {kernel: {name: changed(value) for name, value in arguments.items()} for kernel, arguments in made.items()}


def run(kernels: Any, kernel: str, arguments: dict[str, Any]) -> tuple[Any, list[Any], TensorScratch]:
    """Call a kernel on tensors over the arrays: what it returns, all tensors, and its scratch."""
    scratch = TensorScratch(kernels.scratch_bytes(kernel, **arguments))
    scratch.take(scratch.capacity, np.uint8).fill_(0xFF)
    scratch.reset()
    given = {name: as_tensors(value) for name, value in arguments.items()}
    value = getattr(kernels, kernel)(**given, scratch=scratch)
    return value, tensors_of(given), scratch


def tensors_of(given: dict[str, Any]) -> list[Any]:
    """The tensors among arguments, those of lists too."""
    lists = (each if isinstance(each, list) else [each] for each in given.values())
    return [each for some in lists for each in some if hasattr(each, "untyped_storage")]

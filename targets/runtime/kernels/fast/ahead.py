"""Compilation of loops before they are needed: of attention in another process, of expert blocks by calling them.

The two attention loops take longest, so they are compiled in another process while the caller does other work. They are
cached on disk as always: whoever needs a loop that another process is compiling waits for it, and reads it. One process
for both compiles their common parts once; two processes would be no faster on two cores.
"""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ratrain.ratrain_ir.process_pool import meanwhile
from ratrain.targets.program.attention_spec import AttentionSpec
from ratrain.targets.runtime.arena.dtypes import NUMPY_DTYPES
from ratrain.targets.runtime.arena.scratch import Scratch
from ratrain.targets.runtime.kernels.fast.attention_loops import backward_head, forward_head
from ratrain.targets.runtime.kernels.fast.fast import Fast

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ratrain.ratrain_ir.config.types import Dtype

_SPEC = AttentionSpec(batch=1, seq_len=1, heads=1, kv_heads=1, head_dim=8)


@contextmanager
def attention_compiling(dtype: Dtype) -> Iterator[None]:
    """While the block runs, compile attention without caps and documents; do nothing if it is cached already."""
    if any(_is_kept(loop) for loop in (forward_head, backward_head)):
        yield
        return
    with meanwhile(lambda: attend(dtype)):
        yield


def _is_kept(loop: Any) -> bool:
    """Return whether a loop is cached for any types, or cannot be cached, so that another process could not help."""
    folder = (
        loop.stats.cache_path if hasattr(loop, "stats") else None
    )  # without its compiler, numba leaves functions unchanged
    return folder is None or any(Path(folder).glob(f"*.{loop.py_func.__name__}-*.nbi"))


def attend(dtype: Dtype) -> None:
    """Run attention of one query and its gradients, which compiles the loops."""
    kernels = Fast(1)
    q, k, v, o, do, dq, dk, dv = np.zeros((8, 1, _SPEC.head_dim), NUMPY_DTYPES[dtype])
    lse, delta = np.zeros((2, 1, 1), np.float32)
    scratch = Scratch(kernels.scratch_bytes("attention_forward", spec=_SPEC))
    kernels.attention_forward(q, k, v, o, lse, scratch=scratch, spec=_SPEC)
    scratch = Scratch(kernels.scratch_bytes("attention_backward", spec=_SPEC))
    kernels.attention_backward(q, k, v, o, lse, do, dq, dk, dv, delta, scratch=scratch, spec=_SPEC)


def run_experts(dtype: Dtype) -> None:
    """Run each kernel of expert blocks on two tokens and three experts, which compiles its loops.

    Views and gradients are of one type. Rows are weighted by order and as they lie.
    """
    kernels, stored = Fast(1), NUMPY_DTYPES[dtype]

    def call(kernel: str, **arguments: Any) -> None:
        getattr(kernels, kernel)(**arguments, scratch=Scratch(kernels.scratch_bytes(kernel, **arguments)))

    logits, dlogits = np.zeros((2, 2, 3), np.float32)
    weights, dweights = np.zeros((2, 2, 2), np.float32)
    chosen, order, bounds = np.zeros((2, 2), np.int32), np.zeros(4, np.int32), np.zeros(4, np.int32)
    router = {"logits": logits, "chosen": chosen, "weights": weights, "normalise": True}
    call("route_forward", **router)
    call("route_forward", **router, bias=np.zeros(3, np.float32))
    call("group_rows", chosen=chosen, order=order, bounds=bounds)
    call("route_backward", **router, dweights=dweights, bounds=bounds, dlogits=dlogits)

    tokens, (gate, up, rows, dgate, dup) = np.zeros((2, 8), stored), np.zeros((5, 4, 8), stored)
    matrices, sums = np.zeros((3, 8, 8), stored), np.zeros((2, 8), np.float32)
    product = {"b": matrices, "order": order, "bounds": bounds}
    call("expert_rows", a=tokens, **product, out=gate)
    call("expert_rows", a=rows, b=matrices, bounds=bounds, out=gate)
    call("expert_sums", a=rows, **product, sums=sums, out=tokens)
    call("choice_sums", a=rows, out=tokens)
    for gathers_a in (False, True):
        factors = {"a": tokens, "b": rows} if gathers_a else {"a": rows, "b": tokens}
        for accumulate in (False, True):  # in float32, tiles that replace a gradient are stored at once
            gradient = {"out": matrices, "gathers_a": gathers_a, "accumulate": accumulate}
            call("expert_gradients", **factors, order=order, bounds=bounds, **gradient)
    for accumulate in (False, True):
        gradient = {"out": matrices, "gathers_a": False, "accumulate": accumulate}
        call("expert_gradients", a=rows, b=gate, bounds=bounds, **gradient)
    for of_rows in ({"weights": weights, "order": order}, {"weights": weights.reshape(4, 1)}):
        call("weighted_swiglu_forward", gate=gate, up=up, **of_rows, prod=rows)
        outputs = {"dgate": dgate, "dup": dup, "dweights": np.zeros_like(of_rows["weights"])}
        call("weighted_swiglu_backward", gate=gate, up=up, dprod=rows, **of_rows, **outputs)
    call("sigmoid_forward", x=logits, y=dlogits)
    call("sigmoid_backward", y=logits, dy=logits, dx=dlogits)

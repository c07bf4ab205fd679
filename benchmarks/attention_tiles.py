"""Time the fused kernels of attention on a GPU with several tile sizes.

Four sequences of 2048 tokens, 32 heads of queries, 4 of keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from statistics import median

import torch
from triton.runtime.errors import TritonError

from ratrain.targets.program.attention_spec import AttentionSpec
from ratrain.targets.pytorch.triton import triton_attention as fused

TILES = {
    64: {
        "attend": [(128, 64, 8, 3), (128, 64, 8, 4), (64, 64, 4, 3), (128, 32, 8, 4)],
        "gradients_of_keys": [(64, 64, 4, 2), (64, 64, 4, 3), (64, 32, 4, 3), (128, 64, 8, 3)],
        "gradients_of_queries": [(64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 3), (128, 32, 4, 3)],
    },
    128: {
        "attend": [(64, 64, 4, 2), (64, 64, 4, 3), (128, 32, 8, 3), (128, 64, 8, 3)],
        "gradients_of_keys": [(64, 64, 4, 2), (64, 32, 4, 2), (64, 64, 4, 1), (32, 64, 4, 2)],
        "gradients_of_queries": [(64, 64, 4, 2), (64, 32, 4, 2), (64, 32, 4, 3), (128, 64, 8, 2)],
    },
}
"""By elements of a head and kernel: rows, columns, warps and stages of tiles to time."""


def timed() -> Iterator[tuple[str, float]]:
    """Yield head width, kernel and tile with the seconds of a call; print them with their rates."""
    usual = fused.tiles_of
    for width, kernels in TILES.items():
        runs, flops = _attention_runs(width)
        for number, (kernel, candidates) in enumerate(kernels.items()):
            for candidate in candidates:
                chosen = list(usual(width, halves=True))
                chosen[number] = fused.Tile(*candidate)
                fused.tiles_of = lambda *_, _chosen=tuple(chosen), **__: _chosen
                try:
                    seconds = _seconds_on_gpu(runs[number])
                except (RuntimeError, TritonError) as error:  # a tile that does not fit is no fault
                    print(f"{width:4d} {kernel:22s} {candidate}: {error!r:.100}", flush=True)
                    continue
                finally:
                    fused.tiles_of = usual
                yield f"{width} {kernel} {candidate}", seconds
                rate = flops[number] / seconds / 1e12
                print(f"{width:4d} {kernel:22s} {candidate}: {seconds * 1e6:7.1f} us, {rate:5.0f} TFLOP/s", flush=True)


def _attention_runs(width: int) -> tuple[list[Callable[[], None]], list[float]]:
    """Return attention's forward, gradients of keys and gradients of queries, ready to run, and operations of each."""
    spec = AttentionSpec(batch=4, seq_len=2048, heads=32, kv_heads=4, head_dim=width)
    rows = spec.batch * spec.seq_len
    q, o, do, dq = (torch.randn(rows, 32 * width, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    k, v, dk, dv = (torch.randn(rows, 4 * width, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    lse, delta = (torch.full((32, rows), 9.0, device="cuda") for _ in range(2))
    call = fused.AttentionCall(spec.block, None, None, halves=True)
    operands = (q, k, v, do, lse, delta)
    product = spec.batch * spec.heads * spec.seq_len**2 * width  # of a causal half, two operations each
    return [
        lambda: call.forward((q, k, v, o, lse, lse)),
        lambda: call.backward_of_keys(operands, (dk, dv), adds=False),
        lambda: call.backward_of_queries(operands, dq, adds=False),
    ], [2.0 * product, 4.0 * product, 3.0 * product]


def _seconds_on_gpu(run: Callable[[], None], repeat: int = 10) -> float:
    """Return the median seconds of a few runs, one after the other."""
    run()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeat + 1)]
    torch.cuda._sleep(20_000_000)  # noqa: SLF001 - the device begins when all are issued
    for mark in marks[:-1]:
        mark.record()
        run()
    marks[-1].record()
    torch.cuda.synchronize()
    return median(one.elapsed_time(other) for one, other in pairwise(marks)) / 1e3

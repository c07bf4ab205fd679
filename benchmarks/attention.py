"""Speed of attention, forward and backward, against PyTorch's scaled_dot_product_attention in the same run.

python benchmarks/attention.py [--threads 1 2] [--repeat 7] [--clock wall|cpu] [--only NAME] [--no-torch]

Causal, head size 64, batch 1. Ours stores float16 and computes in float32; PyTorch's is float32 and bfloat16, on the layout that a
model gives it. Shared keys and values, ALiBi and the window are given to PyTorch as it takes them: `enable_gqa`, and a mask
of scores where there is no other way. Below the times: our scratch, and the largest error of output and gradients against
float64 formulas (of the stored inputs, to which the output belongs when gradients are made), in half ulps of float16: what
rounding the exact result may change.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen
from threadpoolctl import threadpool_limits

sys.path.insert(0, str(Path(__file__).parent))
from stopwatch import CLOCKS, machine, medians, pools

from ratrain.targets.program.attention_spec import AttentionSpec, alibi_slopes
from ratrain.targets.runtime.kernels import Scratch, kernel_set

CASES = {
    "S=1024 H=16": AttentionSpec(1, 1024, 16, 16, 64),
    "S=4096 H=4": AttentionSpec(1, 4096, 4, 4, 64),
    "S=4096 H=8 KV=2": AttentionSpec(1, 4096, 8, 2, 64),
    "S=1024 H=16 ALiBi": AttentionSpec(1, 1024, 16, 16, 64, alibi=True),
    "S=4096 H=4 window 512": AttentionSpec(1, 4096, 4, 4, 64, window=512),
}


@frozen
class Inputs:
    """Queries, keys, values and the output's gradient, [tokens, heads * head_dim], float16."""

    q: Any
    k: Any
    v: Any
    do: Any

    @classmethod
    def make(cls, spec: AttentionSpec) -> Inputs:
        rng = np.random.default_rng(0)
        heads = (spec.heads, spec.kv_heads, spec.kv_heads, spec.heads)
        return cls(*(rng.standard_normal((spec.seq_len, n * spec.head_dim)).astype(np.float16) for n in heads))


@frozen
class Ours:
    """The kernels with everything they write."""

    spec: AttentionSpec
    inputs: Inputs
    threads: int
    o: Any
    dq: Any
    dk: Any
    dv: Any
    lse: Any
    delta: Any
    scratch: Scratch

    @classmethod
    def make(cls, spec: AttentionSpec, inputs: Inputs, threads: int) -> Ours:
        kernels = kernel_set("fast", threads)
        most = max(kernels.scratch_bytes(name, spec=spec) for name in ("attention_forward", "attention_backward"))
        rows = [np.empty((spec.heads, spec.seq_len), np.float32) for _ in range(2)]
        results = (np.empty_like(x) for x in (inputs.q, inputs.q, inputs.k, inputs.v))
        return cls(spec, inputs, threads, *results, *rows, Scratch(most))

    def run(self) -> None:
        kernels, x = kernel_set("fast", self.threads), self.inputs
        self.scratch.reset()
        kernels.attention_forward(x.q, x.k, x.v, self.o, self.lse, scratch=self.scratch, spec=self.spec)
        self.scratch.reset()
        kernels.attention_backward(
            x.q, x.k, x.v, self.o, self.lse, x.do, self.dq, self.dk, self.dv, self.delta,
            scratch=self.scratch, spec=self.spec,
        )  # fmt: skip


def torch_run(spec: AttentionSpec, inputs: Inputs, threads: int, dtype: str) -> Callable[[], object]:
    """Forward and backward of PyTorch."""
    import torch
    from torch.nn import functional

    torch.set_num_threads(threads)

    def leaf(x: Any) -> Any:
        heads = torch.from_numpy(x.astype(np.float32)).to(getattr(torch, dtype)).unflatten(1, (-1, spec.head_dim))
        return heads.transpose(0, 1)[None].detach().requires_grad_()

    q, k, v, do = (leaf(x) for x in (inputs.q, inputs.k, inputs.v, inputs.do))
    mask = None
    if spec.alibi or spec.window is not None:
        mask = torch.from_numpy(score_bias(spec).astype(np.float32)).to(q.dtype)

    def run() -> None:
        out = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=spec.group > 1
        )
        torch.autograd.grad(out, (q, k, v), do)

    return run


def score_bias(spec: AttentionSpec) -> Any:
    """What is added to the scores [heads or 1, queries, keys]."""
    distance = np.arange(spec.seq_len)[None, :] - np.arange(spec.seq_len)[:, None]
    hidden = distance > 0
    if spec.window is not None:
        hidden |= distance <= -spec.window
    slopes = np.array(alibi_slopes(spec.heads) if spec.alibi else [0.0])
    return np.where(hidden, -math.inf, slopes[:, None, None] * distance)


def errors(ours: Ours) -> dict[str, float]:
    """Largest deviation of each result from float64, over half an ulp of float16 at the exact value (at least at 2^-8)."""
    spec, d = ours.spec, ours.spec.head_dim
    q, k, v, do = (x.astype(np.float64) for x in (ours.inputs.q, ours.inputs.k, ours.inputs.v, ours.inputs.do))
    bias = score_bias(spec)
    exact = {name: np.zeros_like(x) for name, x in (("o", q), ("dq", q), ("dk", k), ("dv", v))}
    for head in range(spec.heads):
        at = slice(head * d, (head + 1) * d)
        of = slice(head // spec.group * d, (head // spec.group + 1) * d)
        scores = q[:, at] @ k[:, of].T / math.sqrt(d) + bias[head % len(bias)]
        p = np.exp(scores - scores.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        out = p @ v[:, of]
        ds = p * (do[:, at] @ v[:, of].T - (do[:, at] * ours.o[:, at]).sum(axis=1, keepdims=True)) / math.sqrt(d)
        exact["o"][:, at] = out
        exact["dq"][:, at] = ds @ k[:, of]
        exact["dk"][:, of] += ds.T @ q[:, at]
        exact["dv"][:, of] += p.T @ do[:, at]
    largest = {}
    for name, value in exact.items():
        half_ulp = np.spacing(np.maximum(np.abs(value), 2.0**-8).astype(np.float16)).astype(np.float64) / 2
        largest[name] = float((np.abs(getattr(ours, name) - value) / half_ulp).max())
    return largest


def compare(name: str, spec: AttentionSpec, threads: int, repeat: int, clock: str, *, with_torch: bool) -> None:
    """Print one comparison."""
    inputs = Inputs.make(spec)
    ours = Ours.make(spec, inputs, threads)
    contestants: dict[str, Callable[[], object]] = {"RATrain": ours.run}
    if with_torch:
        contestants |= {dtype: torch_run(spec, inputs, threads, dtype) for dtype in ("float32", "bfloat16")}
    with threadpool_limits(1, user_api="blas"):
        seconds = medians(contestants, repeat, clock)
    figures = "  ".join(
        f"{who} {taken * 1e3:.1f} ms" + ("" if who == "RATrain" else f" ({taken / seconds['RATrain']:.2f}x)")
        for who, taken in seconds.items()
    )
    print(f"  {name:22s} {figures}")
    worst = ", ".join(f"{what} {size:.2f}" for what, size in errors(ours).items())
    print(f"  {'':22s} scratch {ours.scratch.capacity / 2**20:.1f} MiB; errors in half ulps: {worst}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Speed of attention.")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeat", type=int, default=7, help="turns; medians are shown")
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="cpu: with one thread only")
    parser.add_argument("--only", choices=list(CASES), action="append", help="a case; may be given again")
    parser.add_argument("--no-torch", action="store_true", help="do not compare (nor where it cannot be imported)")
    options = parser.parse_args(arguments)
    with_torch = not options.no_torch and importlib.util.find_spec("torch") is not None
    if options.clock == "cpu" and options.threads != [1]:
        parser.error("CPU time compares contestants with one thread only: add --threads 1")
    print(machine())
    for threads in options.threads:
        print(f"{threads} thread{'s' * (threads > 1)}; kernels: a team of {threads}, BLAS in each with 1")
        for name in options.only or CASES:
            compare(name, CASES[name], threads, options.repeat, options.clock, with_torch=with_torch)
        for line in pools():
            print(f"  {line}")


if __name__ == "__main__":
    main()

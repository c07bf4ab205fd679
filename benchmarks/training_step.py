"""Speed of a training step against PyTorch on the CPU: same model, same weights, same tokens, same run.

python benchmarks/training_step.py [--vocab 4096 32000] [--threads 1 2] [--types f16 bf16 f32] [--repeat 5]
    [--clock wall|cpu] [--no-torch] [--compiled] [--only NAME ...] [--no-profile] [--json]

The model is a LLaMA of hidden size 512, 8 layers, 8 heads, ffn 1376; a step is one micro-batch of 4 sequences of 512
tokens: forward, backward, AdamW. Views, gradients and activations are of each of the `--types` in turn; PyTorch's all
of its type, eager and, with `--compiled`, through torch.compile. `--only` names the contestants in place of these
options. Contestants take turns; a figure is the median of `--repeat` turns. Then our step in the first type is
profiled: how much of it is inside sgemm, what the same products take alone (the bound that they set), and where the
rest goes.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import evolve, frozen
from threadpoolctl import threadpool_limits

sys.path.insert(0, str(Path(__file__).parent))
from processes import handed_back
from step_profile import StepProfiler, products_alone
from stopwatch import CLOCKS, machine, medians, pools

from ratrain import api
from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.config.plan import DTYPE_KEYS, DTYPES, Optimizer, Plan
from ratrain.targets.runtime.checkpoint.state import start_from_weights
from ratrain.targets.runtime.data.data import Batches, TokenStream
from ratrain.targets.runtime.engine.local import LocalEngine
from ratrain.targets.runtime.kernels import kernel_set
from ratrain.targets.runtime.weights.weights import named_parameters, random_weights

if TYPE_CHECKING:
    from ratrain.targets.runtime.kernels import KernelSet

SEED = 0
PROFILED_STEPS = 3
"""of which the median one is shown"""
OURS = "RATrain"
TORCH_KERNELS = "torch kernels"
CONTESTANTS = {
    **dict.fromkeys((f"{OURS} {dtype}" for dtype in DTYPES), 5e-3),
    TORCH_KERNELS: 5e-2,
    "float32": 5e-3,
    "bfloat16": 5e-2,
    "float32 compiled": 5e-3,
    "bfloat16 compiled": 5e-2,
}
"""Largest relative difference between the loss of a contestant's last step and that of the first contestant.

RATrain is ours with fast kernels, torch kernels are ours by PyTorch's products of bf16; the others are PyTorch.
"""


@frozen
class Task:
    """A model, a plan and the batches of a training."""

    model: ModelConfig
    plan: Plan
    batches: Batches

    @classmethod
    def make(cls, vocab: int, layers: int, seq_len: int) -> Task:
        """The model of this benchmark, and random tokens: enough that no step sees a sequence again."""
        model = ModelConfig(
            name="benchmark",
            family="llama",
            vocab_size=vocab,
            hidden_size=512,
            layers=layers,
            heads=8,
            kv_heads=8,
            head_dim=64,
            ffn_size=1376,
            norm_eps=1e-5,
        )
        return cls.of(model, 4, seq_len)

    @classmethod
    def of(cls, model: ModelConfig, sequences: int, seq_len: int) -> Task:
        """A step of one micro-batch of a model, and random tokens."""
        plan = Plan(1, 1, (), sequences, 1, seq_len, optimizer=Optimizer(lr=3e-4))
        tokens = np.random.default_rng(SEED).integers(0, model.vocab_size, 256 * seq_len + 1).astype(np.uint32)
        return cls(model, plan, Batches(TokenStream("random tokens", tokens, ""), plan, "sequential", SEED))

    def stored_in(self, dtype: str) -> Task:
        """The task with parameters, gradients and activations in a type."""
        scale = None if dtype == "f16" else 1.0
        types: dict[str, Any] = dict.fromkeys(DTYPE_KEYS, dtype)
        return evolve(self, plan=evolve(self.plan, loss_scale=scale, **types))

    def tokens_and_labels(self, step: int) -> tuple[Any, Any]:
        """The step's data, [sequences, seq_len] each."""
        length, size = self.plan.seq_len, self.plan.global_batch
        stream = self.batches.stream.tokens[:].astype(np.int64)
        starts = [self.batches.sequence_of(step, row) * length for row in range(size)]
        whole = np.stack([stream[start : start + length + 1] for start in starts])
        return whole[:, :-1], whole[:, 1:]


def our_step(task: Task, kernels: KernelSet) -> Callable[[], float]:
    """A function that makes one step here and returns its loss."""
    engine = LocalEngine(api.emit(api.compile(task.model, task.plan)), kernels, task.batches)
    start_from_weights(engine, random_weights(task.model, SEED))
    done = 0

    def step() -> float:
        nonlocal done
        report = engine.run_step(done)
        if report.skipped_blocks:
            sys.exit(f"step {done} overflowed: it did not make all its updates")
        done += 1
        return report.loss

    return step


def torch_step(task: Task, threads: int, name: str) -> Callable[[], float]:
    """Return a function that makes one step in PyTorch and returns its loss; `name` is one of CONTESTANTS."""
    import torch
    from torch_step import make_step

    torch.set_num_threads(threads)
    dtype, _, compiled = name.partition(" ")
    source = random_weights(task.model, SEED)
    weights = {name: source(name) for name in named_parameters(task.model)}
    return make_step(
        task.model,
        task.plan.optimizer,
        task.plan.seq_len,
        getattr(torch, dtype),
        weights,
        task.tokens_and_labels,
        compiled=bool(compiled),
    )


def contestant(task: Task, threads: int, name: str) -> Callable[[], float]:
    """Return a function that makes one step of a contestant and returns its loss."""
    if name == TORCH_KERNELS:
        return on_torch_threads(1, our_step(task.stored_in("bf16"), kernel_set("torch", threads)))
    whose, _, dtype = name.partition(" ")
    if whose == OURS:
        return our_step(task.stored_in(dtype), kernel_set("fast", threads))
    return on_torch_threads(threads, torch_step(task, threads, name))


def on_torch_threads(threads: int, step: Callable[[], float]) -> Callable[[], float]:
    """Run a step with so many threads of PyTorch's own, of which a contestant that shares out its work wants one."""

    def run() -> float:
        import torch

        torch.set_num_threads(threads)
        return step()

    return run


def names_of(types: Sequence[str], *, with_torch: bool, compiled: bool) -> list[str]:
    """Return the contestants of the options; ours in the first type comes first."""
    names = [f"{OURS} {dtype}" for dtype in types]
    if with_torch:
        names += [TORCH_KERNELS] * ("bf16" in types)
        names += [name for name in CONTESTANTS if name.startswith(("float32", "bfloat16"))]
    return [name for name in names if compiled or not name.endswith(" compiled")]


def compare(task: Task, names: Sequence[str], threads: int, repeat: int, clock: str) -> dict[str, float]:
    """Print one comparison and return the seconds of a step by contestant; all are compared with the first one.

    Exit where losses say that the trainings are not the same.
    """
    contestants = {name: contestant(task, threads, name) for name in names}
    first = names[0]
    for line in pools():
        print(f"  {line}")
    print(f"  kernels: a team of {threads}; PyTorch: {threads}")
    seconds = medians(contestants, repeat, clock)
    losses = {name: step() for name, step in contestants.items()}
    for name, taken in seconds.items():
        ratio = "" if name == first else f"  {first} is {taken / seconds[first]:.2f}x as fast"
        print(
            f"  {name:17s} {taken:7.3f} s  {task.plan.tokens_per_step / taken:7.0f} tokens/s  loss {losses[name]:.4f}{ratio}"
        )
        # negated, so that a loss that is not a number is refused too
        if not abs(losses[name] - losses[first]) <= CONTESTANTS[name] * losses[first]:
            sys.exit(f"the loss of {name} is {losses[name]}, of {first} {losses[first]}: this is not the same training")
    return seconds


def profile(task: Task, threads: int, clock: str, peer: float | None) -> None:
    """Print where the time of a step goes; shares are of all threads' time."""
    now = CLOCKS[clock]
    profiler = StepProfiler(kernel_set("fast", threads), now)
    step = our_step(task, profiler.kernels)
    step()
    with profiler.booked_products():
        steps = [profiler.step(step) for _ in range(PROFILED_STEPS)]
    median_step = sorted(steps, key=lambda one: one.seconds)[PROFILED_STEPS // 2]
    alone = statistics.median(products_alone(median_step.products, now) for _ in range(PROFILED_STEPS))
    available = median_step.seconds * (threads if clock == "wall" else 1)
    against = f": at most {peer / alone:.2f}x float32" if peer else ""
    print(f"  inside sgemm {median_step.product_seconds() / available:.1%} of a step of {median_step.seconds:.3f} s")
    print(f"  its products alone: {alone:.3f} s{against}")
    print(f"  {'kernel':20s} {'share':>6s} {'of it not sgemm':>16s}")
    for name, seconds in sorted(median_step.kernels.items(), key=lambda item: -item[1]):
        outside = seconds - median_step.product_seconds(name) / (threads if clock == "wall" else 1)
        print(f"  {name:20s} {seconds / median_step.seconds:6.1%} {outside / median_step.seconds:16.1%}")
    rest = median_step.seconds - sum(median_step.kernels.values())
    print(f"  {'engine':20s} {rest / median_step.seconds:6.1%} {rest / median_step.seconds:16.1%}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Speed of a training step.")
    parser.add_argument("--vocab", type=int, nargs="+", default=[4096, 32000])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--types", nargs="+", choices=DTYPES, default=["f16", "bf16", "f32"], help="of ours")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=5, help="turns; medians are shown")
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="cpu: with one thread only")
    parser.add_argument("--no-torch", action="store_true", help="do not compare (nor where it cannot be imported)")
    parser.add_argument("--compiled", action="store_true", help="compare with torch.compile too")
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, metavar="NAME", help=f"of {', '.join(CONTESTANTS)}")
    parser.add_argument("--no-profile", action="store_true", help="leave out where the time of our step goes")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, the text on stderr")
    options = parser.parse_args(arguments)
    with_torch = not options.no_torch and importlib.util.find_spec("torch") is not None
    if options.clock == "cpu" and options.threads != [1]:
        parser.error("CPU time compares contestants with one thread only: add --threads 1")
    names = options.only or names_of(options.types, with_torch=with_torch, compiled=options.compiled)
    with handed_back(options.json) as figures:
        print(machine())
        figures["steps"] = []
        for threads in options.threads:
            for vocab in options.vocab:
                print(f"vocabulary {vocab}, {threads} thread{'s' * (threads > 1)}")
                with threadpool_limits(1, user_api="blas"):  # our kernels share out their work themselves
                    task = Task.make(vocab, options.layers, options.seq_len)
                    seconds = compare(task, names, threads, options.repeat, options.clock)
                    if not options.no_profile:
                        dtype = options.types[0]
                        profile(task.stored_in(dtype), threads, options.clock, seconds.get("float32"))
                figures["steps"].append({"vocab": vocab, "threads": threads, "seconds": seconds})


if __name__ == "__main__":
    main()

"""Speed of several ranks in one process: engines one after the other, or side by side, for the same global batch.

python benchmarks/ranks.py [--threads 2] [--vocab 4096] [--layers 4] [--repeat 5]

Rates are of the whole job. Two replicas, or two stages, on two threads should not be slower than one rank on two threads; messages and
collectives then run beside compute.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from threadpoolctl import threadpool_limits

sys.path.insert(0, str(Path(__file__).parent))
from typing import TYPE_CHECKING

from stopwatch import machine, medians, pools
from training_step import SEED, Task

from ratrain import api
from ratrain.ratrain_ir.config.plan import Plan
from ratrain.targets.runtime.kernels import kernel_set
from ratrain.targets.runtime.settings import Execution, RunSettings
from ratrain.targets.runtime.training.preparation import prepare

if TYPE_CHECKING:
    from ratrain.targets.runtime.training.training import TrainingRun

LAYOUTS = {"1 rank": (1, 1), "2 replicas": (1, 2), "2 stages": (2, 1)}
"""Stages and replicas."""


def run_of(task: Task, stages: int, replicas: int, threads: int) -> TrainingRun:
    """A run of the task's model and data, spread over ranks: 4 micro-batches a step, all replicas together."""
    cuts = (task.model.layers // 2,) if stages == 2 else ()
    plan = Plan(stages, replicas, cuts, 1, 4 // replicas, task.plan.seq_len, optimizer=task.plan.optimizer)
    execution = Execution(threads=threads)
    settings = RunSettings(steps=1 << 20, order="sequential", seed=SEED, execution=execution)
    program = api.emit(api.compile(task.model, plan))
    return prepare(
        program, task.batches.stream, settings, kernel_set("fast", execution.kernel_threads(stages * replicas))
    )


def stepper(run: TrainingRun) -> Callable[[], object]:
    """A function that runs the next step."""
    steps = run.steps()
    return lambda: next(steps)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Speed of several ranks in one process.")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=5, help="turns; medians are shown")
    options = parser.parse_args(arguments)
    task = Task.make(options.vocab, options.layers, options.seq_len)
    print(machine())
    with threadpool_limits(1, user_api="blas"):
        contestants = {
            f"{name}, {threads} thread{'s' * (threads > 1)}": stepper(run_of(task, *layout, threads))
            for name, layout in LAYOUTS.items()
            for threads in (1, options.threads)
        }
        seconds = medians(contestants, options.repeat, "wall")
        for line in pools():
            print(f"  {line}")
    alone = seconds[f"1 rank, {options.threads} threads"]
    for name, taken in seconds.items():
        rate = task.plan.tokens_per_step / taken
        print(f"  {name:22s} {rate:7.0f} tokens/s  {alone / taken:.2f}x of one rank on {options.threads} threads")


if __name__ == "__main__":
    main()

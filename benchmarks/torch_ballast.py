"""Training in exactly the memory that was said: a device is filled but for that, or a process limited to it, and the steps must not fail.

python benchmarks/torch_ballast.py [cpu|cuda] [--steps 50] [--spare 1] [--vocab 4096] [--layers 4] [--seq-len 64]

The program has 2 stages and 2 replicas, in bf16. What is said is the certificate of `ratrain.targets.runtime.engine.certificate`: arenas, scratch and
constants by name. Before that is left, a small training has loaded what libraries load with their first calls.

On a GPU a ballast takes all else but `--spare` MiB and, as CUDA gives out pages of 2 MiB, as much for each tensor; PyTorch's caching, which
would keep segments larger than what is asked for, is off. On the CPU RLIMIT_DATA limits the process to what
it had before, what is said, and `CONSTANT` besides `--spare`: pieces of weights on their way, the interpreter's objects.
"""

from __future__ import annotations

import argparse
import gc
import os
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

MIB = 1 << 20
PAGE = 2 * MIB
"""What CUDA rounds an allocation up to."""
CONSTANT = 16 * MIB
"""Of the host, beside what is said."""


def program_of(vocab: int, layers: int, seq_len: int) -> tuple[Any, Any]:
    """The program, and its data."""
    from attrs import evolve
    from training_step import Task

    from ratrain import api
    from ratrain.targets.runtime.data.data import Batches

    task = Task.make(vocab, layers, seq_len).stored_in("bf16")
    plan = evolve(task.plan, pp=2, dp=2, cuts=(layers // 2,), micro_batch_size=1, micro_batches=3)
    batches = Batches(task.batches.stream, plan, "sequential", 0)
    return api.emit(api.compile(task.model, plan)), batches


def train(program: Any, batches: Any, kernels: Any, steps: int) -> float:
    """The loss of the last step."""
    from ratrain.targets.runtime.checkpoint.state import start_from_weights
    from ratrain.targets.runtime.engine.local import LocalEngine
    from ratrain.targets.runtime.weights.weights import random_weights

    engine = LocalEngine(program, kernels, batches)
    start_from_weights(engine, random_weights(program.model, 0))
    return [engine.run_step(step).loss for step in range(steps)][-1]


def leave(device: Any, said: int, tensors: int, spare: int) -> Any:
    """Leave only so much; what keeps the rest."""
    import torch

    if device.type == "cpu":
        status = Path("/proc/self/status").read_text()
        held = int(status.partition("VmData:")[2].split()[0]) << 10  # what RLIMIT_DATA counts
        limit = held + said + CONSTANT + spare
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        print(f"limited to {said / MIB:.1f} MiB said + {CONSTANT / MIB:.0f} constant + {spare / MIB:g} to spare")
        return None
    free, _ = torch.cuda.mem_get_info(device)
    taken = (free - said - spare - tensors * PAGE) // PAGE * PAGE
    print(
        f"{free / MIB:.1f} MiB free, {said / MIB:.1f} said, {spare / MIB:g} to spare and {tensors} pages: ballast of the rest"
    )
    return torch.empty(taken, dtype=torch.uint8, device=device)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train in what is left."""
    parser = argparse.ArgumentParser(description="Training in exactly the memory that was said.")
    parser.add_argument("device", nargs="?", default="cpu")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--spare", type=float, default=1, help="MiB beside what is said; fewer than none are refused")
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=64)
    chosen = parser.parse_args(arguments)
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    import torch
    from threadpoolctl import threadpool_limits

    from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
    from ratrain.targets.pytorch.device.device_kernels import TorchDevice
    from ratrain.targets.runtime.engine.certificate import certificate

    with threadpool_limits(1):
        train(*program_of(64, 2, 8), TorchDevice(chosen.device), 1)
        gc.collect()
        program, batches = program_of(chosen.vocab, chosen.layers, chosen.seq_len)
        kernels = TorchDevice(chosen.device)
        said = certificate(program, kernels)
        for name, count in {"arenas": said.arena_bytes, "scratch": said.scratch_bytes, **said.constants}.items():
            print(f"  {name:24s} {count:12,d} bytes")
        tensors = 5 * program.plan.clusters + sum(said.messages.values()) + 8
        ballast = leave(torch.device(chosen.device), said.total_bytes, tensors, int(chosen.spare * MIB))
        try:
            loss = train(program, batches, kernels, chosen.steps)
        except (DiagnosticError, MemoryError) as error:
            sys.exit(f"refused: {error}")
        del ballast
    print(f"{chosen.steps} steps on '{chosen.device}', last loss {loss:.4f}")


if __name__ == "__main__":
    main()

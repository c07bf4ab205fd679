"""Speed and peak memory of a training step on a PyTorch device against PyTorch itself: same model, weights, tokens, types.

python benchmarks/torch_device.py [cpu|cuda] [--threads 1 2] [--vocab 4096] [--layers 8] [--seq-len 512] [--repeat 5] [--no-compile]
    [--kernels torch] [--no-torch] [--calibrate | --machine here.toml]

The model is that of training_step.py: a LLaMA of hidden size 512, 8 layers, ffn 1376, 4 sequences a step. Each contestant is a process of its
own, so that its peak is its own; they take turns, a step each, and a figure is the median of `--repeat` turns. Ours stores views, gradients and
activations in bf16 beside float32 masters and moments, which is what PyTorch has under autocast; its `bf16` has everything in bf16,
moments too, and so half the state.

With `--calibrate` the device is timed first, as `ratrainc calibrate --device` does it, or a file that it wrote is read with `--machine`: the
step time that the machine predicts for our program then stands beside the one measured, and the bytes that are said before the first
step beside the peak. On a processor this is of one thread, and CPU time is shown too, which other work on the machine leaves as it is.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import define

sys.path.insert(0, str(Path(__file__).parent))
from stopwatch import machine

if TYPE_CHECKING:
    from training_step import Task

    from ratrain.targets.machine.machine import Machine
    from ratrain.targets.program.program import Program

MIB = 1 << 20
SAME_LOSS = 5e-2
"""Largest relative difference between losses of the last step."""


@define
class Options:
    """What is measured."""

    device: str
    kernels: str
    threads: int
    vocab: int
    layers: int
    seq_len: int


def our_program(options: Options) -> tuple[Program, Task]:
    """The program of our step, and its task."""
    from training_step import Task

    from ratrain import api

    task = Task.make(options.vocab, options.layers, options.seq_len).stored_in("bf16")
    return api.emit(api.compile(task.model, task.plan)), task


def ours(options: Options) -> tuple[Callable[[], float], dict[str, int]]:
    """Our step, and the bytes that it says it takes."""
    from ratrain.targets.runtime.checkpoint.state import start_from_weights
    from ratrain.targets.runtime.engine.local import LocalEngine
    from ratrain.targets.runtime.kernels import kernel_set
    from ratrain.targets.runtime.settings import HOST_DEVICE
    from ratrain.targets.runtime.weights.weights import random_weights

    program, task = our_program(options)
    kernels = kernel_set(options.kernels, options.threads, options.device)
    engine = LocalEngine(program, kernels, task.batches)
    start_from_weights(engine, random_weights(task.model, 0))
    steps = iter(range(10**6))
    said = {"arena": engine.arena_bytes, "scratch": engine.scratch_bytes}
    if options.device == HOST_DEVICE:
        said["interpreter and libraries"] = engine.constant_bytes or 0
    else:
        said["tables"] = kernels.constant_bytes
    return lambda: engine.run_step(next(steps)).loss, said


def theirs(
    options: Options, dtype: str, *, autocast: bool = False, compiled: bool = False
) -> tuple[Callable[[], float], None]:
    """PyTorch's step."""
    import torch
    from torch_step import make_step
    from training_step import Task

    from ratrain.targets.runtime.weights.weights import named_parameters, random_weights

    torch.set_num_threads(options.threads)
    task = Task.make(options.vocab, options.layers, options.seq_len)
    source = random_weights(task.model, 0)
    weights = {name: source(name) for name in named_parameters(task.model)}
    step = make_step(
        task.model,
        task.plan.optimizer,
        task.plan.seq_len,
        getattr(torch, dtype),
        weights,
        task.tokens_and_labels,
        device=options.device,
        products=torch.bfloat16 if autocast else None,
        compiled=compiled,
    )
    return step, None


CONTESTANTS: dict[str, Callable[[Options], tuple[Callable[[], float], dict[str, int] | None]]] = {
    "RATrain bf16": ours,
    "PyTorch f32": lambda options: theirs(options, "float32"),
    "PyTorch bf16": lambda options: theirs(options, "bfloat16"),
    "PyTorch autocast": lambda options: theirs(options, "float32", autocast=True),
    "compiled f32": lambda options: theirs(options, "float32", compiled=True),
    "compiled bf16": lambda options: theirs(options, "bfloat16", compiled=True),
    "compiled autocast": lambda options: theirs(options, "float32", autocast=True, compiled=True),
}


def serve(name: str, options: Options) -> None:
    """Be a contestant: one step for each line that comes in, and a line of JSON for each."""
    from threadpoolctl import threadpool_limits

    with threadpool_limits(options.threads if name != "RATrain bf16" else 1):
        before = _held(options.device)
        step, said = CONTESTANTS[name](options)
        for _ in sys.stdin:
            start, spent = time.perf_counter(), time.process_time()
            loss = step()  # it ends with a loss on the host, so nothing is left on its way
            seconds, spent = time.perf_counter() - start, time.process_time() - spent
            peak = _peak(options.device) - before
            sys.stdout.write(
                json.dumps(
                    {"seconds": seconds, "cpu": spent, "loss": loss, "peak": peak, "before": before, "said": said}
                )
                + "\n"
            )
            sys.stdout.flush()


def _held(device: str) -> int:
    """Bytes that are held before anything is made: of the host interpreter and libraries, of a device nothing."""
    import torch

    from ratrain.targets.runtime.arena.process_memory import resident_bytes

    torch.mm(torch.ones(8, 8), torch.ones(8, 8))
    return (resident_bytes() or 0) if device == "cpu" else 0


def _peak(device: str) -> int:
    """Most bytes that were held."""
    import torch

    from ratrain.targets.runtime.arena.process_memory import peak_resident_bytes

    return (peak_resident_bytes() or 0) if device == "cpu" else int(torch.cuda.max_memory_reserved(device))


class Contestant:
    """A process that makes a step when it is told to."""

    def __init__(self, name: str, arguments: Sequence[str]) -> None:
        command = [sys.executable, __file__, *arguments, "--contestant", name]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.turns: list[dict[str, Any]] = []

    def step(self) -> None:
        """Let it make a step."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self.turns.append(json.loads(self._process.stdout.readline()))

    def end(self) -> None:
        """Let it go."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def machine_of(options: Options, path: str | None) -> Machine:
    """The machine of a file, or of the device, which is timed now in a process of its own."""
    from ratrain.targets.machine.machine import load_machine

    if path is not None:
        return load_machine(path)
    with tempfile.TemporaryDirectory() as folder:
        made = str(Path(folder) / "here.toml")
        words = ["--device", options.device, "--kernels", options.kernels, "-o", made]
        subprocess.run([sys.executable, "-m", "ratrain", "calibrate", *words], check=True)
        return load_machine(made)


def show_prediction(options: Options, machine: Machine, turns: Sequence[dict[str, Any]]) -> None:
    """Print what the machine predicts beside what our step took."""
    from ratrain.ratrainc.calibration.from_device import predicted_step_seconds
    from ratrain.targets.runtime.settings import HOST_DEVICE

    is_host = options.device == HOST_DEVICE
    predicted = predicted_step_seconds(our_program(options)[0], machine, overlaps=not is_host)
    measured = {"": "seconds", " of CPU time": "cpu"} if is_host else {"": "seconds"}
    for words, key in measured.items():
        seconds = statistics.median(turn[key] for turn in turns)
        print(f"predicted {predicted:.3f} s a step, measured {seconds:.3f} s{words}: {predicted / seconds - 1:+.1%}")


def compare(names: Sequence[str], options: Options, repeat: int, machine: Machine | None) -> None:
    """Print a table of all contestants."""
    arguments = [
        options.device,
        *(
            f"--{key}={getattr(options, key.replace('-', '_'))}"
            for key in ("kernels", "threads", "vocab", "layers", "seq-len")
        ),
    ]
    contestants = {name: Contestant(name, arguments) for name in names}
    for contestant in contestants.values():  # compilation, first touch of memory
        contestant.step()
    for _ in range(repeat):
        for contestant in contestants.values():
            contestant.step()
    for contestant in contestants.values():
        contestant.end()
    medians = {
        name: statistics.median(turn["seconds"] for turn in each.turns[1:]) for name, each in contestants.items()
    }
    mine, *_ = medians.values()
    tokens = 4 * options.seq_len
    loss = contestants[names[0]].turns[-1]["loss"]
    print(f"{'':18s} {'s a step':>9s} {'tokens/s':>9s} {'of ours':>8s} {'peak MiB':>9s} {'loss':>8s}")
    for name, seconds in medians.items():
        last = contestants[name].turns[-1]
        print(
            f"{name:18s} {seconds:9.3f} {tokens / seconds:9.0f} {mine / seconds:7.2f}x {last['peak'] / MIB:9.0f} {last['loss']:8.4f}"
        )
        if abs(last["loss"] - loss) > SAME_LOSS * loss:
            sys.exit(f"the loss of {name} is {last['loss']}, ours {loss}: this is not the same training")
    last = contestants[names[0]].turns[-1]
    parts = ", ".join(f"{name} {nbytes / MIB:.0f}" for name, nbytes in last["said"].items())
    total, peak = sum(last["said"].values()), last["peak"] + last["before"]
    print(f"ours said before its first step: {total / MIB:.0f} MiB ({parts}); its peak was {peak / MIB:.0f} MiB")
    if machine is not None:
        show_prediction(options, machine, contestants[names[0]].turns[1:])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="A training step on a PyTorch device.")
    parser.add_argument("device", nargs="?", default="cpu")
    parser.add_argument("--kernels", help="of ours: torch, on a GPU torch-device, unless given")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=5, help="turns; medians are shown")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    parser.add_argument("--no-torch", action="store_true", help="ours alone")
    parser.add_argument("--calibrate", action="store_true", help="time the device, and predict our step; one thread")
    parser.add_argument("--machine", metavar="here.toml", help="predict it with this file in its place")
    parser.add_argument("--contestant", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    kernels = chosen.kernels or ("torch" if chosen.device == "cpu" else "torch-device")
    predicts = chosen.calibrate or chosen.machine is not None
    if predicts and chosen.threads != [1]:
        parser.error("a machine file is of one thread: add --threads 1")
    for threads in chosen.threads:
        options = Options(chosen.device, kernels, threads, chosen.vocab, chosen.layers, chosen.seq_len)
        if chosen.contestant:
            serve(chosen.contestant, options)
            return
        first, *others = CONTESTANTS
        names = [first]
        if not chosen.no_torch:
            names += [name for name in others if not (chosen.no_compile and name.startswith("compiled"))]
        timed = machine_of(options, chosen.machine) if predicts else None
        print(f"{machine()}\n{options.device}, {threads} thread{'s' * (threads > 1)}, vocabulary {options.vocab}")
        compare(names, options, chosen.repeat, timed)


if __name__ == "__main__":
    main()

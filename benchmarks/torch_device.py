"""Speed and peak memory of a training step on a PyTorch device against PyTorch itself: same model, weights, tokens, types.

python benchmarks/torch_device.py [cpu|cuda] [--threads 1 2] [--vocab 4096] [--layers 8] [--seq-len 512] [--repeat 5] [--no-compile]
    [--kernels torch] [--no-torch] [--calibrate | --machine here.toml] [--model tinyllama-1.1b --sequences 4] [--only NAME ...]

The model is that of training_step.py, a LLaMA of hidden size 512, 8 layers, ffn 1376, 4 sequences a step, or a preset of LLaMA's family. Each
contestant is a process of its own, so that its peak is its own; they take turns, a step each, and a figure is the median of `--repeat` turns.
On a GPU they come one after the other, so that each has the memory to itself, and ours is there a second time, as a graph. Ours stores views, gradients and
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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import define, evolve, frozen

sys.path.insert(0, str(Path(__file__).parent))
from stopwatch import machine

from ratrain.targets.runtime.weights.weight_source import WeightSource

if TYPE_CHECKING:
    from collections.abc import Iterator

    from training_step import Task

    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.targets.machine.machine import Machine
    from ratrain.targets.program.program import Program

MIB = 1 << 20
GRAPH = "RATrain graph"
WARM_UP = 5
"""Turns of each on a GPU before those that count: the fourth step of a graph is the one recorded."""
_ROWS_OF_LOGITS = 2048
"""Rows of logits that our head holds at a time on a GPU, which the usual 128 leave idle."""
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
    sequences: int = 4
    model: str = ""
    """A preset, in place of vocabulary and layers."""
    profile: bool = False
    """Print the seconds of our kernels on the device, at the end."""

    def task(self) -> Task:
        """Return the model and the batches to train."""
        from training_step import Task

        from ratrain.ratrain_ir.config.model_files import load_model

        model = load_model(self.model) if self.model else Task.make(self.vocab, self.layers, self.seq_len).model
        return Task.of(model, self.sequences, self.seq_len)


@frozen(eq=False)
class Drawn(WeightSource):
    """Random weights, all drawn beforehand by many threads.

    Of a billion, drawn one by one, they would take most of the time.
    """

    values: Mapping[str, Any]

    @classmethod
    def of(cls, model: ModelConfig) -> Drawn:
        """Draw the weights of a model."""
        from concurrent.futures import ThreadPoolExecutor

        from ratrain.targets.runtime.weights.weights import random_weights

        source = random_weights(model, 0)
        with ThreadPoolExecutor() as pool:
            return cls(
                source.parameters, dict(zip(source.parameters, pool.map(source, source.parameters), strict=True))
            )

    def pieces(self, name: str, start: int, stop: int) -> Iterator[Any]:
        """Yield the values of a parameter from `start` to `stop`, in pieces."""
        from ratrain.targets.runtime.arena.tensor_file import PIECE_ELEMENTS

        for first in range(start, stop, PIECE_ELEMENTS):
            yield self.values[name].reshape(-1)[first : min(first + PIECE_ELEMENTS, stop)].copy()


def program_for(device: str, model: ModelConfig, plan: Plan) -> Program:
    """The program of a plan; for a GPU it fills that memory, so that nothing is recomputed which fits."""
    from ratrain import api
    from ratrain.targets.runtime.settings import HOST_DEVICE

    if device == HOST_DEVICE:
        return api.emit(api.compile(model, plan))
    import torch

    _, total = torch.cuda.mem_get_info(device)
    return api.emit(api.compile(model, plan, machine="h200", capacity=total), machine="h200")


def our_program(options: Options) -> tuple[Program, Task]:
    """The program of our step, and its task."""
    from ratrain.targets.runtime.settings import HOST_DEVICE

    task = options.task().stored_in("bf16")
    plan = task.plan if options.device == HOST_DEVICE else evolve(task.plan, head_chunk=_ROWS_OF_LOGITS)
    return program_for(options.device, task.model, plan), task


def ours(options: Options, *, graph: bool = False) -> tuple[Callable[[], float], dict[str, int]]:
    """Our step, and the bytes that it says it takes; as a `graph` recorded in the fourth step."""
    from ratrain.targets.runtime.checkpoint.state import start_from_weights
    from ratrain.targets.runtime.engine.local import LocalEngine
    from ratrain.targets.runtime.kernels import kernel_set
    from ratrain.targets.runtime.settings import HOST_DEVICE
    from ratrain.targets.runtime.weights.weights import random_weights

    program, task = our_program(options)
    kernels = kernel_set(options.kernels, options.threads, options.device)
    engine = LocalEngine(program, kernels, task.batches)
    # on a host what is drawn would count as ours: there it comes piece by piece
    is_host = options.device == HOST_DEVICE
    start_from_weights(engine, random_weights(task.model, 0) if is_host else Drawn.of(task.model))
    if graph:
        engine.capture_steps()
    steps = iter(range(10**6))
    said = {"arena": engine.arena_bytes, "scratch": engine.scratch_bytes}
    if is_host:
        said["interpreter and libraries"] = engine.constant_bytes or 0
    else:
        said["declared"] = sum(engine.declared_constants().values())
    return lambda: engine.run_step(next(steps)).loss, said


def theirs(
    options: Options, dtype: str, *, autocast: bool = False, compiled: bool = False
) -> tuple[Callable[[], float], None]:
    """PyTorch's step."""
    import torch
    from torch_step import make_step, step_of

    torch.set_num_threads(options.threads)
    task = options.task()
    if task.model.experts is not None:
        from torch_experts import Mixture

        return step_of(
            Mixture(options.model),
            task.plan.optimizer,
            getattr(torch, dtype),
            task.tokens_and_labels,
            device=options.device,
            products=torch.bfloat16 if autocast else None,
            compiled=compiled,
        ), None
    step = make_step(
        task.model,
        task.plan.optimizer,
        task.plan.seq_len,
        getattr(torch, dtype),
        dict(Drawn.of(task.model).values),
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
    GRAPH: lambda options: ours(options, graph=True),
}
OURS = ("RATrain bf16", GRAPH)


def serve(name: str, options: Options) -> None:
    """Be a contestant: one step for each line that comes in, and a line of JSON for each."""
    from threadpoolctl import threadpool_limits

    with threadpool_limits(options.threads if name not in OURS else 1):
        before = _held(options.device)
        step, said = CONTESTANTS[name](options)
        for _ in sys.stdin:
            start, spent = time.perf_counter(), time.process_time()
            loss = step()  # it ends with a loss on the host, so nothing is left on its way
            seconds, spent = time.perf_counter() - start, time.process_time() - spent
            peak = _peak(options.device) - before
            turn = {"seconds": seconds, "cpu": spent, "loss": loss, "peak": peak, "before": before, "said": said}
            print(json.dumps({**turn, "allocated": _allocated(options.device)}), flush=True)
        if options.profile and name in OURS:
            _print_profile(step)


def _print_profile(step: Callable[[], float]) -> None:
    """Make one more step, and print the kernels that take most of its time on a GPU, to the error stream."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        step()
    rows = found.key_averages().table(sort_by="self_cuda_time_total", row_limit=30, max_name_column_width=50)
    kept = [[line[:52], *line[52:].split()[-4:]] for line in rows.splitlines() if "us" in line or "ms" in line]
    print("\n".join("  ".join(row) for row in kept), file=sys.stderr, flush=True)


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


def _allocated(device: str) -> int | None:
    """Most bytes that PyTorch's allocator gave out on a GPU, which keeps more in reserve."""
    import torch

    return None if device == "cpu" else int(torch.cuda.max_memory_allocated(device))


class Contestant:
    """A process that makes a step when it is told to."""

    def __init__(self, name: str, arguments: Sequence[str]) -> None:
        command = [sys.executable, __file__, *arguments, "--contestant", name]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.turns: list[dict[str, Any]] = []
        self.is_alive = True

    def step(self) -> None:
        """Let it make a step, if it has not ended by an error, which it has printed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self.is_alive = False
            return
        line = self._process.stdout.readline()
        self.is_alive = bool(line)
        if line:
            self.turns.append(json.loads(line))

    def end(self) -> None:
        """Let it go."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
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
    from ratrain.targets.runtime.settings import HOST_DEVICE

    is_host = options.device == HOST_DEVICE
    predicted = predicted_by(machine, options)
    measured = {"": "seconds", " of CPU time": "cpu"} if is_host else {"": "seconds"}
    for words, key in measured.items():
        seconds = statistics.median(turn[key] for turn in turns)
        print(f"predicted {predicted:.3f} s a step, measured {seconds:.3f} s{words}: {predicted / seconds - 1:+.1%}")


def predicted_by(machine: Machine, options: Options) -> float:
    """Return the seconds of our step by a machine."""
    from ratrain.ratrainc.calibration.from_device import predicted_step_seconds
    from ratrain.targets.runtime.settings import HOST_DEVICE

    return predicted_step_seconds(our_program(options)[0], machine, overlaps=options.device != HOST_DEVICE)


def turns_of(names: Sequence[str], options: Options, repeat: int) -> dict[str, list[dict[str, Any]]]:
    """The turns of each contestant that count; none of one that failed."""
    keys = ("kernels", "threads", "vocab", "layers", "seq-len", "sequences", "model")
    arguments = [options.device, *(f"--{key}={getattr(options, key.replace('-', '_'))}" for key in keys)]
    arguments += ["--profile"] * options.profile
    on_host = options.device == "cpu"
    warm_up = 1 if on_host else WARM_UP  # compilation, first touch of memory
    found: dict[str, list[dict[str, Any]]] = {}
    for group in [names] if on_host else [[name] for name in names]:
        contestants = {name: Contestant(name, arguments) for name in group}
        for _ in range(warm_up + repeat):
            for contestant in contestants.values():
                if contestant.is_alive:
                    contestant.step()
        for name, contestant in contestants.items():
            contestant.end()
            found[name] = contestant.turns[warm_up:] if contestant.is_alive else []
            if not on_host:
                print(f"{name} has ended", *(f"{turn['seconds']:.3f}" for turn in contestant.turns), flush=True)
    return found


def compare(names: Sequence[str], options: Options, repeat: int, machine: Machine | None) -> dict[str, dict[str, Any]]:
    """Print a table of all contestants; what is in it, by name, of those that did not fail."""
    turns = turns_of(names, options, repeat)
    if not turns[names[0]]:
        sys.exit(f"{names[0]} failed")
    medians = {name: statistics.median(turn["seconds"] for turn in each) for name, each in turns.items() if each}
    mine, *_ = medians.values()
    tokens = options.sequences * options.seq_len
    rows: dict[str, dict[str, Any]] = {}
    print(f"{'':18s} {'s a step':>9s} {'tokens/s':>9s} {'of ours':>8s} {'peak MiB':>9s} {'loss':>8s}")
    for name in turns:
        if name not in medians:
            print(f"{name:18s} failed")
            continue
        seconds, last = medians[name], turns[name][-1]
        print(
            f"{name:18s} {seconds:9.3f} {tokens / seconds:9.0f} {mine / seconds:7.2f}x {last['peak'] / MIB:9.0f} {last['loss']:8.4f}"
        )
        rows[name] = {**last, "seconds": seconds, "tokens_per_second": tokens / seconds}
    last = turns[names[0]][-1]
    parts = ", ".join(f"{name} {nbytes / MIB:.0f}" for name, nbytes in last["said"].items())
    total, peak = sum(last["said"].values()), last["peak"] + last["before"]
    print(f"ours said before its first step: {total / MIB:.0f} MiB ({parts}); its peak was {peak / MIB:.0f} MiB")
    if machine is not None:
        show_prediction(options, machine, turns[names[0]])
    return rows


def other_trainings(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a complaint for each loss that is too far from that of the first row."""
    loss = next(iter(rows.values()))["loss"]
    return [
        f"the loss of {name} is {row['loss']}, ours {loss}: this is not the same training"
        for name, row in rows.items()
        if not abs(row["loss"] - loss) <= SAME_LOSS * loss
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="A training step on a PyTorch device.")
    parser.add_argument("device", nargs="?", default="cpu")
    parser.add_argument("--kernels", help="of ours: torch, on a GPU torch-device, unless given")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--model", default="", metavar="PRESET", help="in place of --vocab and --layers")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=CONTESTANTS, help="these beside ours")
    parser.add_argument("--repeat", type=int, default=5, help="turns; medians are shown")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    parser.add_argument("--no-torch", action="store_true", help="ours alone")
    parser.add_argument("--calibrate", action="store_true", help="time the device, and predict our step; one thread")
    parser.add_argument("--machine", metavar="here.toml", help="predict it with this file in its place")
    parser.add_argument("--profile", action="store_true", help="print our kernels' seconds on a GPU")
    parser.add_argument("--contestant", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    kernels = chosen.kernels or ("torch" if chosen.device == "cpu" else "torch-device")
    predicts = chosen.calibrate or chosen.machine is not None
    if predicts and chosen.threads != [1]:
        parser.error("a machine file is of one thread: add --threads 1")
    for threads in chosen.threads:
        size = chosen.vocab, chosen.layers, chosen.seq_len, chosen.sequences, chosen.model
        options = Options(chosen.device, kernels, threads, *size, chosen.profile)
        if chosen.contestant:
            serve(chosen.contestant, options)
            return
        first, *rest = CONTESTANTS
        names = [first]
        if chosen.only:
            names += [name for name in rest if name in chosen.only]
        elif not chosen.no_torch:
            names += [name for name in rest if not (chosen.no_compile and name.startswith("compiled"))]
        if chosen.device == "cpu":  # which records nothing
            names = [name for name in names if name != GRAPH]
        timed = machine_of(options, chosen.machine) if predicts else None
        what = options.model or f"vocabulary {options.vocab}"
        print(f"{machine()}\n{options.device}, {threads} thread{'s' * (threads > 1)}, {what}")
        if others := other_trainings(compare(names, options, chosen.repeat, timed)):
            sys.exit("\n".join(others))


if __name__ == "__main__":
    main()

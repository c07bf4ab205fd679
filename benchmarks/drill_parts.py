"""Do the parts of gpu_drill.sh, of which gpu_drill.py runs each in a process of its own.

A part takes a `Drill`, prints what it finds, notes figures and faults in it, and raises `SkipError` where it makes no
sense. The top of this module imports the standard library alone; what a part needs it imports itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from torch_device import Options


ROOT = Path(__file__).parents[1]
MIB = 1 << 20
CPU = "cpu"
NO_GPU = "needs a GPU"


class SkipError(Exception):
    """A part, or the rest of it, that makes no sense here."""


@dataclass
class Drill:
    """Settings of a part, with the figures and faults that it notes."""

    device: str
    out: Path
    seconds: float
    sets: Sequence[str] = ()
    """Kernel sets whose results are compared; all that are installed if none is named."""
    words: Sequence[str] = ()
    """Kernels that are compared have one of these in their names; all if none is given."""
    figures: dict[str, Any] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    @property
    def on_host(self) -> bool:
        """True in a rehearsal on the processor."""
        return self.device == CPU

    @property
    def kernels(self) -> str:
        """Name of the kernel set of a run on this device."""
        from ratrain.targets.runtime.settings import default_kernels

        return "torch-device" if self.on_host else default_kernels(self.device)

    def kernel_set(self, name: str | None = None) -> Any:
        """Return a kernel set on the device."""
        from ratrain.targets.runtime.kernels import kernel_set

        return kernel_set(name or self.kernels, 1, self.device)

    def check(self, holds: bool, otherwise: str) -> None:
        """Note what is wrong, and go on."""
        if not holds:
            self.wrong.append(otherwise)
            print(f"WRONG: {otherwise}", flush=True)

    def command(self, *words: str) -> None:
        """Run a command with this interpreter, whose output is the part's."""
        print("$", " ".join(("python", *words)), flush=True)
        code = subprocess.run([sys.executable, *words], check=False).returncode
        self.check(code == 0, f"python {' '.join(words[:3])} ended with {code}")


def one_line(error: BaseException) -> str:
    """Return the name of an error and the first line of its message."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def machine(drill: Drill) -> None:
    """Print the device and the versions of what runs on it."""
    import platform

    import torch

    found = {
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        **{name: version_of(name) for name in ("torch", "triton", "numpy", "numba", "ml_dtypes")},
        "cuda": torch.version.cuda,
    }
    if not drill.on_host:
        free, total = torch.cuda.mem_get_info()
        properties = torch.cuda.get_device_properties(0)
        found |= {"name": properties.name, "capability": f"{properties.major}.{properties.minor}"}
        found |= {"multiprocessors": properties.multi_processor_count, "MiB": total // MIB, "free MiB": free // MIB}
    for name, value in found.items():
        print(f"{name:16s} {value}")
    drill.figures |= found


def version_of(name: str) -> str | None:
    """Return the version of a distribution; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def make_tests_importable() -> None:
    """Make the folder importable as `tests`, whatever else has that name."""
    package = types.ModuleType("tests")
    package.__path__ = [str(ROOT / "tests")]
    sys.modules["tests"] = package


def tiles(drill: Drill) -> None:
    """Time the fused kernels of attention with several tile sizes."""
    if drill.on_host:
        raise SkipError(NO_GPU)
    from attention_tiles import timed

    for name, seconds in timed():
        drill.figures[name] = seconds


EXPERT_KEYS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "norm_topk_prob": True,
}
"""Keys that make a mixture of experts of the tiny model."""


@dataclass(frozen=True)
class TinyProgram:
    """A tiny program: the line of its plan for `pp = 2`, more words of `compile`, more keys of the model."""

    line: str
    words: Sequence[str] = ()
    model_keys: Mapping[str, Any] = field(default_factory=dict)
    needs_host: bool = False
    """True if no graph can repeat it, since its host reads and writes files."""


GRAPHS = {
    "pipeline": TinyProgram("pp = 2"),
    "tensor ranks": TinyProgram("pp = 1\ntp = 2"),
    "state in a file": TinyProgram(
        "pp = 2",
        ("--machine", "examples/small-memory.toml", "--passes", "place-1f1b,offload-state{home=file},allocate-ddr"),
        needs_host=True,
    ),
    "experts": TinyProgram("pp = 2", model_keys=EXPERT_KEYS),
}
NEAR_GRAPHS = 1e-4
"""Largest relative difference between losses of the first plan and of others of the same model, f16."""


def graph(drill: Drill) -> None:
    """Run tiny programs by `ratrainc run`, step by step and as one graph: the same losses."""
    examples = ROOT / "examples"
    plan, model = ((examples / name).read_text("utf-8") for name in ("tiny.toml", "tiny.json"))
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, tiny in GRAPHS.items():
            program, changed = str(Path(folder, f"{len(found)}.rtx")), Path(folder, "plan.toml")
            changed.write_text(plan.replace("pp = 2", tiny.line, 1), "utf-8")
            config = Path(folder, "tiny.json")
            config.write_text(json.dumps({**json.loads(model), **tiny.model_keys}), "utf-8")
            words = ["--model", str(config), "--plan", str(changed), "-o", program, *tiny.words]
            drill.command("-m", "ratrain", "compile", *words)
            found[name] = _losses(drill, name, program)
            if drill.on_host or tiny.needs_host:
                continue
            replayed = _losses(drill, f"{name}, graph", program, "--graph")
            drill.check(found[name] == replayed, f"{name}: the losses of the graph are others")
    first, *_ = found.values()
    for name in (name for name, tiny in GRAPHS.items() if not tiny.model_keys):
        pairs = zip(first, found[name], strict=False)
        off = max((abs(mine / theirs - 1) for theirs, mine in pairs), default=float("inf"))
        drill.check(off <= NEAR_GRAPHS, f"{name}: losses {off:.1e} off the pipeline's")
    if drill.on_host:
        raise SkipError(f"--graph {NO_GPU}; {len(found)} programs ran without it")


def _losses(
    drill: Drill, name: str, program: str, *options: str, launcher: Sequence[str] = ("-m", "ratrain")
) -> list[float]:
    """Return the losses of a few steps of `ratrainc run`."""
    log = Path(program).with_suffix(".jsonl")
    log.unlink(missing_ok=True)
    steps = ["--steps", "2" if drill.on_host else "12", "--log", str(log), "--data", str(ROOT / "docs" / "devices.md")]
    place = ["--device", drill.device, "--kernels", drill.kernels]
    drill.command(*launcher, "run", program, *steps, *place, *options)
    lines = [json.loads(line) for line in log.read_text("utf-8").splitlines()] if log.exists() else []
    losses = [line["loss"] for line in lines if "loss" in line]
    drill.figures[name] = lines
    drill.check(bool(losses), f"{name}: no step ran")
    print(f"{name}: losses {' '.join(f'{loss:.6f}' for loss in losses)}", flush=True)
    return losses


def ranks(drill: Drill) -> None:
    """Run two replicas of a tiny program as processes with GPUs of their own, over NCCL; one where there is one GPU."""
    import torch

    count = 2 if drill.on_host else min(2, torch.cuda.device_count())
    examples = ROOT / "examples"
    with tempfile.TemporaryDirectory() as folder:
        program, plan = str(Path(folder, "tiny.rtx")), Path(folder, "plan.toml")
        text = (examples / "tiny.toml").read_text("utf-8")
        plan.write_text(text.replace("pp = 2", "pp = 1", 1).replace("dp = 2", f"dp = {count}", 1), "utf-8")
        words = ["--model", str(examples / "tiny.json"), "--plan", str(plan), "-o", program]
        drill.command("-m", "ratrain", "compile", *words)
        alone = _losses(drill, "one process", program)
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(count), "-m", "--", "ratrain"]
        together = _losses(drill, f"{count} processes", program, "--engine", "torch", launcher=launcher)
        drill.check(alone == together, "the losses of ranks in processes of their own are others")
    if not drill.on_host and count == 1:
        raise SkipError("one GPU: one rank over NCCL ran, and had no one to talk to")


def memory(drill: Drill) -> None:
    """Compare bytes said of a step before it begins with those allocated."""
    from attrs import evolve
    from torch_device import Drawn, program_for

    from ratrain.ratrain_ir.config.model_files import load_model
    from ratrain.ratrain_ir.config.plan import DTYPE_KEYS, Optimizer, Plan
    from ratrain.targets.runtime.checkpoint.state import start_from_weights
    from ratrain.targets.runtime.data.data import Batches, TokenStream
    from ratrain.targets.runtime.engine.certificate import certificate
    from ratrain.targets.runtime.engine.local import LocalEngine

    import numpy as np  # isort: skip

    make_tests_importable()
    model = load_model("qwen2.5-0.5b")
    if drill.on_host:
        model = evolve(model, layers=2, hidden_size=112, ffn_size=256, vocab_size=512)
    plan = evolve(
        Plan(1, 1, (), 2, 2, 64 if drill.on_host else 1024, optimizer=Optimizer(lr=1e-4)),
        loss_scale=1.0,
        **dict.fromkeys(DTYPE_KEYS, "bf16"),
    )
    program = program_for(drill.device, model, plan)
    kernels = drill.kernel_set()
    said = certificate(program, kernels)
    for name, count in {"arena": said.arena_bytes, "scratch": said.scratch_bytes, **said.constants}.items():
        print(f"said: {name:24s} {count:15,d} bytes")
        drill.figures[f"said {name}"] = count
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, 64 * plan.seq_len + 1).astype(np.uint32)
    batches = Batches(TokenStream("random tokens", tokens, ""), plan, "sequential", 0)

    def steps() -> None:
        engine = LocalEngine(program, kernels, batches)
        start_from_weights(engine, Drawn.of(model))
        if not drill.on_host:
            import torch

            print(f"allocated at most before the first step: {torch.cuda.max_memory_allocated():,d} bytes", flush=True)
        print("losses", *(f"{engine.run_step(step).loss:.4f}" for step in range(4)))

    found = _allocated_on_host(steps) if drill.on_host else _allocated_on_gpu(steps)
    drill.figures |= {"said": said.total_bytes, **found}
    for name, count in {"said in all": said.total_bytes, **found}.items():
        print(f"{name:30s} {count:15,d} bytes, {count / MIB:9.1f} MiB", flush=True)
    beside = found["allocated at most"] - said.total_bytes
    if beside > MIB and not drill.on_host:
        print("what was allocated beside arena and scratch, most bytes first:")
        print("\n".join(_largest_allocations(said.arena_bytes + said.scratch_bytes)))
    drill.check(beside <= MIB, f"{beside} bytes more were allocated than said, over 1 MiB that rounding may take")


def ballast(drill: Drill) -> None:
    """Run steps in just the bytes that are said, where nothing else is left."""
    words = (
        ["--steps", "2", "--vocab", "1024", "--layers", "2", "--seq-len", "16"] if drill.on_host else ["--steps", "50"]
    )
    drill.command("benchmarks/torch_ballast.py", drill.device, *words)


def _allocated_on_host(steps: Callable[[], None]) -> dict[str, int]:
    from tests.targets.pytorch.allocations import allocations

    with allocations() as found:
        steps()
    return {"allocated at most": found.peak}


def _allocated_on_gpu(steps: Callable[[], None]) -> dict[str, int]:
    import torch

    torch.cuda.reset_peak_memory_stats()
    record = torch.cuda.memory._record_memory_history  # noqa: SLF001 - it has no other name
    record(context="alloc", stacks="python", max_entries=200_000)
    free, _ = torch.cuda.mem_get_info()
    steps()
    torch.cuda.synchronize()
    left, _ = torch.cuda.mem_get_info()
    return {
        "allocated at most": torch.cuda.max_memory_allocated(),
        "reserved at most": torch.cuda.max_memory_reserved(),
        "less free on the device": free - left,
    }


def _largest_allocations(least_beside: int) -> list[str]:
    """Return a line for each place that allocated: times, bytes, and the innermost frames of this project."""
    import torch

    places: dict[tuple[int, str], int] = {}
    for events in torch.cuda.memory._snapshot()["device_traces"]:  # noqa: SLF001
        for event in events:
            if event["action"] == "alloc" and MIB // 4 <= event["size"] < least_beside // 2:
                frames = [f"{Path(each['filename']).name}:{each['line']}" for each in event["frames"]][:5]
                key = event["size"], " < ".join(frames)
                places[key] = places.get(key, 0) + 1
    return [f"{count:6d} times {size:13,d} bytes  {where}" for (size, where), count in sorted(places.items())[:-25:-1]]


GOAL = 0.10
"""Error of a predicted step time that benchmarks/README.md has for its goal."""


def calibrate(drill: Drill) -> None:
    """Make a machine file of this device; check the step times of three plans that it predicts."""
    from predicted_device import compared
    from threadpoolctl import threadpool_limits

    from ratrain.targets.machine.machine import load_machine

    made = drill.out / "here.toml"
    seconds = f"{2 if drill.on_host else drill.seconds / 10:.3g}"
    words = ["--device", drill.device, "--kernels", drill.kernels, "--seconds", seconds, "-o", str(made)]
    drill.command("-m", "ratrain", "calibrate", *words)
    if drill.wrong:
        return
    with threadpool_limits(1):
        for model, predicted, ran in compared(load_machine(str(made)), drill.kernel_set()):
            error = predicted / ran - 1
            print(f"{model:14s} predicted {predicted * 1e3:9.2f} ms, ran {ran * 1e3:9.2f} ms: {error:+.1%}", flush=True)
            drill.figures[model] = {"predicted": predicted, "ran": ran, "error": error}
            if not drill.on_host:  # in the rehearsal others use the processor
                drill.check(abs(error) <= GOAL, f"{model} is off by {error:+.1%}, beyond the goal of {GOAL:.0%}")


def speed(drill: Drill) -> None:
    """Compare tokens a second and the peak of a step with PyTorch."""
    from torch_device import GRAPH, OURS, Options

    ours, _ = OURS
    if drill.on_host:
        print("torch.compile and the model of 1.1 billion parameters are left out: they need a GPU")
        _compare_steps(drill, [ours, "PyTorch bf16"], Options(drill.device, drill.kernels, 1, 256, 2, 64))
        return
    names = [ours, GRAPH, "PyTorch autocast", "compiled autocast", "PyTorch bf16"]
    options = Options(drill.device, drill.kernels, 1, 0, 0, 2048, 4, "tinyllama-1.1b", profile=True)
    _compare_steps(drill, names, options)


def experts(drill: Drill) -> None:
    """Compare a step of a mixture of experts with `transformers`: the same shapes, its experts as grouped products."""
    from torch_device import GRAPH, Options

    preset = "granite-3.1-1b-a400m"
    if drill.on_host:
        _rehearse_mixture(drill, preset)
        raise SkipError(f"a step of {preset} {NO_GPU}")
    peers = ["PyTorch bf16", "PyTorch autocast"] if version_of("transformers") else []
    options = Options(drill.device, drill.kernels, 1, 0, 0, 2048, 4, preset, profile=True)
    _compare_steps(drill, [GRAPH, *peers], options, must=(GRAPH,))


def _rehearse_mixture(drill: Drill, preset: str) -> None:
    """Make two small steps of a preset's class in `transformers`, where it is installed: losses near random guessing."""
    if not version_of("transformers"):
        print("transformers is not installed: there is nothing to compare with")
        return
    import numpy as np
    import torch
    from torch_experts import Mixture
    from torch_step import step_of

    from ratrain.ratrain_ir.config.plan import Optimizer

    words, rng = 512, np.random.default_rng(0)
    sizes = {"num_hidden_layers": 2, "hidden_size": 256, "vocab_size": words, "intermediate_size": 128}

    def batches(_: int) -> tuple[np.ndarray, np.ndarray]:
        return rng.integers(0, words, (2, 64)), rng.integers(0, words, (2, 64))

    for dtype, products in ((torch.bfloat16, None), (torch.float32, torch.bfloat16)):
        step = step_of(Mixture(preset, **sizes), Optimizer(lr=1e-3), dtype, batches, products=products)
        losses = [step(), step()]
        print(f"transformers, {dtype}: losses {losses[0]:.3f} {losses[1]:.3f}", flush=True)
        drill.check(all(abs(loss - np.log(words)) < 0.5 for loss in losses), f"losses {losses} are not of guessing")


def _compare_steps(drill: Drill, names: Sequence[str], options: Options, must: Sequence[str] = ()) -> None:
    """Note seconds and peaks of steps, and peers that fail; of `must`, if any is named, only these have to run."""
    from torch_device import compare, other_trainings, predicted_by

    from ratrain.targets.machine.machine import load_machine

    rows = compare(names, options, 2 if drill.on_host else 6, None)
    drill.figures |= rows
    for name in must or names:
        drill.check(name in rows, f"{name} failed")
    for words in other_trainings(rows):
        drill.check(False, words)
    if not drill.on_host:
        drill.figures["predicted by h200"] = seconds = predicted_by(load_machine("h200"), options)
        print(f"the built-in machine h200 predicts {seconds:.3f} s", flush=True)


def correctness(drill: Drill) -> None:
    """Compare kernels on the device with numpy's, and trainings of tiny models."""
    from drill_correctness import correctness as compared

    compared(drill)


def finetune(drill: Drill) -> None:
    """Fine-tune a little model."""
    from drill_finetune import finetune as tuned

    tuned(drill)


PARTS: dict[str, Callable[[Drill], None]] = {
    "machine": machine,
    "correctness": correctness,
    "graph": graph,
    "ranks": ranks,
    "bytes": memory,
    "ballast": ballast,
    "tiles": tiles,
    "calibrate": calibrate,
    "speed": speed,
    "experts": experts,
    "finetune": finetune,
}
"""Function of each part, by its name; it notes figures and faults in the drill that it is given."""

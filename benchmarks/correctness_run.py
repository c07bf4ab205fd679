"""The correctness run: RATrain's schedule against Baseline-1F1B on the same tokens of real text, step by step.

`python benchmarks/correctness_run.py [--minutes 5] [--folder DIR]` trains one small model twice in this process, in turns: same P, D,
M, reduction, seed and token stream, two schedules. The measure is the paper's, the largest |loss - baseline| / baseline over all
steps; the paper reports 0.081 % over 1.028 B tokens. Here it has to be exactly 0, and so have the differences of
master weights and moments; anything else is exit code 1. With --folder both runs are kept and the next call goes on, up
to --tokens.

RATrain's schedule is given too little memory to keep everything, so that it recomputes a part, before the gradient arrives.

    mpirun -n 4 python benchmarks/correctness_run.py --engine mpi [--replicas 4] [--reduction fast]

does the same with a process a rank. With `--reduction fast` RATrain's gradients are summed by MPI in the order it likes, the baseline's still in
rank order: then losses may deviate as far as the paper's do. Two addends have one sum in any order, so that it takes more than two replicas to see it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from attrs import evolve, frozen
from threadpoolctl import threadpool_limits

from ratrain import api
from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.config.plan import Optimizer, Plan
from ratrain.ratrainc.choices.run_choices import DataChoice, Ranks
from ratrain.ratrainc.choices.strategies import strategy
from ratrain.ratrainc.running.job import Job, job_of
from ratrain.ratrainc.running.training_data import open_data
from ratrain.targets.runtime.checkpoint.checkpoint import save_checkpoint
from ratrain.targets.runtime.checkpoint.manifest import blas_facts
from ratrain.targets.runtime.checkpoint.state import training_state
from ratrain.targets.runtime.kernels import kernel_set
from ratrain.targets.runtime.settings import RunSettings, Start
from ratrain.targets.runtime.training.preparation import prepare

if TYPE_CHECKING:
    from ratrain.targets.program.program import Program
    from ratrain.targets.runtime.training.training import TrainingRun

PAPER_TOKENS = 1.028e9
PAPER_DEVIATION = 0.081  # percent
LONGEST = 30  # minutes of a call
SAVED_EVERY = 60  # seconds
NAMES = ("ratrain", "baseline-1f1b")
SAVE = "after-step-"
LOG = "losses.jsonl"

MODEL = ModelConfig(
    name="correctness",
    family="llama",
    vocab_size=256,
    hidden_size=256,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=64,
    ffn_size=688,
    norm_eps=1e-5,
)
PLAN = Plan(
    pp=2,
    dp=2,
    cuts=(2,),
    micro_batch_size=1,
    micro_batches=4,
    seq_len=256,
    zero=2,
    reduce="each-micro-batch",
    optimizer=Optimizer(lr=1e-3, warmup_steps=100),
)


@frozen
class Task:
    """What is asked for; the jobs are RATrain's and the baseline's."""

    data: str | None
    until: float
    tokens: float
    plan: Plan
    jobs: tuple[Job, Job]
    allowed: float
    """largest deviation"""

    @property
    def bits_are_equal(self) -> bool:
        """Whether nothing at all may differ."""
        return self.allowed == 0


@frozen
class Compared:
    """One step of both runs."""

    step: int
    loss: float
    baseline: float

    @property
    def deviation(self) -> float:
        """The paper's measure."""
        return abs(self.loss - self.baseline) / self.baseline


def plan_of(replicas: int, dtype: str, lr: float) -> Plan:
    """The plan on four ranks: 2 x 2, or one stage with all replicas; the same sequences a step."""
    plan = evolve(PLAN if dtype == PLAN.view_dtype else _in_f32(PLAN), optimizer=evolve(PLAN.optimizer, lr=lr))
    sequences = PLAN.micro_batches * PLAN.dp
    return (
        plan if replicas == PLAN.dp else evolve(plan, pp=1, dp=replicas, cuts=(), micro_batches=sequences // replicas)
    )


def _in_f32(plan: Plan) -> Plan:
    return evolve(plan, view_dtype="f32", grad_dtype="f32", grad_shard_dtype="f32", loss_scale=1.0)


def programs(plan: Plan) -> tuple[Program, Program]:
    """RATrain's with half of the bytes that keeping everything takes beyond recomputing everything, and the baseline's."""
    passes = strategy("ratrain").passes
    peaks = []
    for policy in ("none", "full"):
        module = api.compile(MODEL, plan, passes=passes.replace("joint-order", f"joint-order{{policy={policy}}}"))
        peaks.append(max(stage.arena_bytes for stage in module.stages))
    tight = passes.replace("joint-order", f"joint-order{{budget={sum(peaks) // 2}}}")
    return (
        api.emit(api.compile(MODEL, plan, passes=tight)),
        api.emit(api.compile(MODEL, plan, passes=strategy("baseline-1f1b").passes)),
    )


def last_saved(folder: Path) -> Path | None:
    """The newest whole save of both runs, if there is one."""
    saves = [place for place in folder.glob(f"{SAVE}*") if place.name.removeprefix(SAVE).isdigit()]
    return max(saves, key=lambda place: int(place.name.removeprefix(SAVE)), default=None)


def started(task: Task, saved: Path | None) -> tuple[list[TrainingRun], list[Compared]]:
    """Both runs, from a save or from the same random weights, and the steps compared before."""
    runs = []
    for name, job, program in zip(NAMES, task.jobs, programs(task.plan), strict=True):
        stream, _ = open_data(program, DataChoice((task.data,) if task.data else ()))
        settings = RunSettings(steps=1 << 40, start=Start(checkpoint=str(saved / name) if saved else None))
        runs.append(prepare(program, stream, settings, kernel_set("fast"), job.processes(program)))
        for warning in runs[-1].warnings:
            print(warning.render(), file=sys.stderr)
    lines = (saved / LOG).read_text("utf-8").splitlines() if saved else []
    return runs, [Compared(*json.loads(line)) for line in lines]


def save(runs: Sequence[TrainingRun], lines: Sequence[Compared], folder: Path) -> None:
    """Both checkpoints and the compared steps, in a directory that appears when it is whole; then the one before goes."""
    before = last_saved(folder)
    place = folder / f"{SAVE}{len(lines)}"
    if before == place:
        return
    beside = Path(tempfile.mkdtemp(dir=folder))
    for name, run in zip(NAMES, runs, strict=True):
        save_checkpoint(str(beside / name), MODEL, training_state(run.engine, len(lines)), run.manifest())
    text = "".join(json.dumps([line.step, line.loss, line.baseline]) + "\n" for line in lines)
    (beside / LOG).write_text(text, "utf-8")
    beside.rename(place)
    if before is not None:
        shutil.rmtree(before)


def compared(runs: Sequence[TrainingRun], first: int, stop: int) -> Iterator[tuple[Compared, list[float]]]:
    """Both runs step by step in turns, with the seconds each took."""
    iterators = [run.steps() for run in runs]
    for step in range(first, stop):
        marks = [time.perf_counter()]
        losses = []
        for iterator in iterators:
            losses.append(next(iterator).report.loss)
            marks.append(time.perf_counter())
        yield Compared(step, losses[0], losses[1]), list(np.diff(marks))


def differing_blocks(runs: Sequence[TrainingRun]) -> list[str]:
    """Blocks of which master weights, moments or numbers of updates differ in any bit, on any rank."""
    differing = set()
    for mine, theirs in zip(*([rank for ranks in run.engine.ranks for rank in ranks] for run in runs), strict=True):
        for what, unit in mine.stage.carried:
            if (
                what in ("p", "m1", "m2", "t")
                and mine.carried(what, unit).tobytes() != theirs.carried(what, unit).tobytes()
            ):
                differing.add(unit)
    return sorted({unit for units in runs[0].processes.exchange(sorted(differing)) for unit in units})


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=5, help=f"of this call, at most {LONGEST}")
    parser.add_argument("--tokens", type=float, default=PAPER_TOKENS, help="the length to reach over all calls")
    parser.add_argument("--data", help="UTF-8 text; default: the English text that ships inside Python")
    parser.add_argument("--folder", type=Path, help="keep both runs here and go on from what is here")
    parser.add_argument("--engine", choices=["local", "mpi"], default="local")
    parser.add_argument("--replicas", type=int, choices=[2, 4], default=2, help="2: of 2 stages; 4: of the whole model")
    parser.add_argument("--dtype", choices=["f16", "f32"], default="f16", help="of views and gradients")
    parser.add_argument("--lr", type=float, default=PLAN.optimizer.lr, help="learning rate after 100 steps of warm-up")
    parser.add_argument("--reduction", choices=["ordered", "fast"], default="ordered", help="of RATrain's run over MPI")
    chosen = parser.parse_args(words)
    if not 0 < chosen.minutes <= LONGEST:
        parser.error(f"--minutes is above 0 and at most {LONGEST}")
    if chosen.engine == "mpi" and chosen.folder is not None:
        parser.error("--folder keeps runs of the local engine")
    if chosen.engine == "local" and chosen.reduction == "fast":
        parser.error("--reduction fast needs --engine mpi")
    until = time.monotonic() + 60 * chosen.minutes
    with (
        threadpool_limits(limits=1),
        tempfile.TemporaryDirectory(prefix="ratrain-") as temporary,
        job_of(Ranks(chosen.engine, reduction=chosen.reduction), as_json=False) as job,
        job_of(Ranks(chosen.engine), as_json=False) as baseline_job,
    ):
        allowed = 0.0 if chosen.reduction == "ordered" else PAPER_DEVIATION / 100
        task = Task(
            chosen.data,
            until,
            chosen.tokens,
            plan_of(chosen.replicas, chosen.dtype, chosen.lr),
            (job, baseline_job),
            allowed,
        )
        folder = chosen.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        return run(task, folder)


def run(task: Task, folder: Path) -> int:
    runs, lines = started(task, last_saved(folder))
    processes = runs[0].processes
    keeps = processes.count == 1
    seconds = np.zeros(2)
    first = len(lines)
    saved = time.monotonic()
    for line, taken in compared(runs, first, -int(-task.tokens // task.plan.tokens_per_step)):
        lines.append(line)
        seconds += taken
        if line.deviation > task.allowed or processes.exchange(time.monotonic() >= task.until)[0]:
            break
        if keeps and time.monotonic() - saved > SAVED_EVERY:
            save(runs, lines, folder)
            saved = time.monotonic()
    if keeps:
        save(runs, lines, folder)
    for each in runs:
        each.remove_temporary_folder()
    blocks = differing_blocks(runs)
    worst = max((line.deviation for line in lines), default=inf)
    if task.jobs[0].speaks:
        report(task, runs, lines, blocks, len(lines) - first, seconds)
    return 1 if worst > task.allowed or (blocks and task.bits_are_equal) else 0


def report(
    task: Task,
    runs: Sequence[TrainingRun],
    lines: Sequence[Compared],
    blocks: Sequence[str],
    new: int,
    seconds: np.ndarray,
) -> None:
    """Print what was found."""
    facts, plan = blas_facts(), task.plan
    print(
        f"model: {MODEL.parameters / 1e6:.2f} M parameters, hidden {MODEL.hidden_size}, {MODEL.layers} layers, {task.plan.view_dtype} storage"
    )
    print(
        f"plan: P {plan.pp}, D {plan.dp}, M {plan.micro_batches}, sequence {plan.seq_len}, ZeRO {plan.zero}, reduce {plan.reduce}, "
        f"learning rate {plan.optimizer.lr:g}"
    )
    print(
        f"data: {runs[0].stream.name}, {len(runs[0].stream.tokens):,} tokens a pass; {facts['blas']} {facts['blas_core_type']}"
    )
    print(f"{NAMES[0]} on {runs[0].engine.description}")
    if not lines:
        print("no step was run")
        return
    worst = max(lines, key=lambda line: line.deviation)
    tokens = len(lines) * plan.tokens_per_step
    print(f"{len(lines):,} steps, {tokens:,} tokens in each run; loss {lines[0].loss:.4f} -> {lines[-1].loss:.4f}")
    print(
        f"largest |loss - baseline| / baseline: {100 * worst.deviation:g} % (step {worst.step}); {100 * task.allowed:g} % is allowed"
    )
    print(f"blocks whose master weights, moments or update counts differ in any bit: {', '.join(blocks) or 'none'}")
    print(
        f"the paper: {PAPER_DEVIATION} % over {PAPER_TOKENS / 1e9:.3f} B tokens; this is {100 * tokens / PAPER_TOKENS:.3f} % of them"
    )
    if new:
        for name, taken in zip(NAMES, seconds, strict=True):
            speed = new * plan.tokens_per_step / taken
            print(
                f"{name}: {speed:,.0f} tokens/s here; {PAPER_TOKENS / 1e9:.3f} B tokens take {PAPER_TOKENS / speed / 3600:.0f} hours"
            )


if __name__ == "__main__":
    sys.exit(main())

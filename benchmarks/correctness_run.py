"""The correctness run: RATrain's schedule against Baseline-1F1B on the same tokens of real text, step by step.

`python benchmarks/correctness_run.py [--minutes 5] [--folder DIR]` trains one small model twice in this process, in turns: same P, D,
M, reduction, seed and token stream, two schedules. The measure is the paper's, the largest |loss - baseline| / baseline over all
steps; the paper reports 0.081 % over 1.028 B tokens. Here it has to be exactly 0, and so have the differences of
master weights and moments; anything else is exit code 1. With --folder both runs are kept and the next call goes on, up
to --tokens.

RATrain's schedule is given too little memory to keep everything, so that it recomputes a part, before the gradient arrives.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen
from threadpoolctl import threadpool_limits

from ratrain_ir.frontend.model_config import ModelConfig
from ratrain_ir.frontend.plan import Optimizer, Plan
from ratrainc import api
from ratrainc.strategies import strategy
from ratrainc.training_data import DataChoice, open_data
from targets.runtime.checkpoint import save_checkpoint
from targets.runtime.kernels import kernel_set
from targets.runtime.state import training_state
from targets.runtime.training import RunSettings, TrainingRun, blas_facts, prepare

if TYPE_CHECKING:
    from targets.program import Program

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
class Compared:
    """One step of both runs."""

    step: int
    loss: float
    baseline: float

    @property
    def deviation(self) -> float:
        """The paper's measure."""
        return abs(self.loss - self.baseline) / self.baseline


def programs() -> tuple[Program, Program]:
    """RATrain's with half of the bytes that keeping everything takes beyond recomputing everything, and the baseline's."""
    passes = strategy("ratrain").passes
    peaks = []
    for policy in ("none", "full"):
        module = api.compile(MODEL, PLAN, passes=passes.replace("joint-order", f"joint-order{{policy={policy}}}"))
        peaks.append(max(stage.arena_bytes for stage in module.stages))
    tight = passes.replace("joint-order", f"joint-order{{budget={sum(peaks) // 2}}}")
    return (
        api.emit(api.compile(MODEL, PLAN, passes=tight)),
        api.emit(api.compile(MODEL, PLAN, passes=strategy("baseline-1f1b").passes)),
    )


def last_saved(folder: Path) -> Path | None:
    """The newest whole save of both runs, if there is one."""
    found = [place for place in folder.glob(f"{SAVE}*") if place.name.removeprefix(SAVE).isdigit()]
    return max(found, key=lambda place: int(place.name.removeprefix(SAVE)), default=None)


def started(data: str | None, saved: Path | None) -> tuple[list[TrainingRun], list[Compared]]:
    """Both runs, from a save or from the same random weights, and the steps compared before."""
    runs = []
    for name, program in zip(NAMES, programs(), strict=True):
        stream, _ = open_data(program, DataChoice(data))
        settings = RunSettings(steps=1 << 40, resume=str(saved / name) if saved else None)
        runs.append(prepare(program, stream, settings, kernel_set("fast")))
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
    """Blocks whose master weights, moments or numbers of updates differ in any bit."""
    one, other = (training_state(run.engine, 0).blocks for run in runs)
    found = []
    for unit in one:
        mine, theirs = one[unit], other[unit]
        same = mine.t == theirs.t
        for name in ("p", "m1", "m2"):
            same &= getattr(mine, name).tobytes() == getattr(theirs, name).tobytes()
        if not same:
            found.append(str(unit))
    return found


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=5, help=f"of this call, at most {LONGEST}")
    parser.add_argument("--tokens", type=float, default=PAPER_TOKENS, help="the length to reach over all calls")
    parser.add_argument("--data", help="UTF-8 text; default: the English text that ships inside Python")
    parser.add_argument("--folder", type=Path, help="keep both runs here and go on from what is here")
    chosen = parser.parse_args(words)
    if not 0 < chosen.minutes <= LONGEST:
        parser.error(f"--minutes is above 0 and at most {LONGEST}")
    until = time.monotonic() + 60 * chosen.minutes
    with threadpool_limits(limits=1):
        if chosen.folder is not None:
            chosen.folder.mkdir(parents=True, exist_ok=True)
            return run(chosen.folder, chosen.data, until, chosen.tokens)
        with tempfile.TemporaryDirectory(prefix="ratrain-") as folder:
            return run(Path(folder), chosen.data, until, chosen.tokens)


def run(folder: Path, data: str | None, until: float, tokens: float) -> int:
    runs, lines = started(data, last_saved(folder))
    seconds = np.zeros(2)
    first = len(lines)
    saved = time.monotonic()
    for line, taken in compared(runs, first, -int(-tokens // PLAN.tokens_per_step)):
        lines.append(line)
        seconds += taken
        if line.deviation or time.monotonic() >= until:
            break
        if time.monotonic() - saved > SAVED_EVERY:
            save(runs, lines, folder)
            saved = time.monotonic()
    save(runs, lines, folder)
    return report(runs, lines, len(lines) - first, seconds)


def report(runs: Sequence[TrainingRun], lines: Sequence[Compared], new: int, seconds: np.ndarray) -> int:
    """Print what was found; 0 where both runs are equal in every bit."""
    facts = blas_facts()
    print(
        f"model: {MODEL.parameters / 1e6:.2f} M parameters, hidden {MODEL.hidden_size}, {MODEL.layers} layers, f16 storage"
    )
    print(
        f"plan: P {PLAN.pp}, D {PLAN.dp}, M {PLAN.micro_batches}, sequence {PLAN.seq_len}, ZeRO {PLAN.zero}, reduce {PLAN.reduce}"
    )
    print(
        f"data: {runs[0].stream.name}, {len(runs[0].stream.tokens):,} tokens a pass; {facts['blas']} {facts['blas_core_type']}"
    )
    if not lines:
        print("no step was run")
        return 1
    worst = max(lines, key=lambda line: line.deviation)
    blocks = differing_blocks(runs)
    tokens = len(lines) * PLAN.tokens_per_step
    print(f"{len(lines):,} steps, {tokens:,} tokens in each run; loss {lines[0].loss:.4f} -> {lines[-1].loss:.4f}")
    print(f"largest |loss - baseline| / baseline: {100 * worst.deviation:g} % (step {worst.step}); 0 is required")
    print(f"blocks whose master weights, moments or update counts differ in any bit: {', '.join(blocks) or 'none'}")
    print(
        f"the paper: {PAPER_DEVIATION} % over {PAPER_TOKENS / 1e9:.3f} B tokens; this is {100 * tokens / PAPER_TOKENS:.3f} % of them"
    )
    if new:
        for name, taken in zip(NAMES, seconds, strict=True):
            speed = new * PLAN.tokens_per_step / taken
            print(
                f"{name}: {speed:,.0f} tokens/s here; {PAPER_TOKENS / 1e9:.3f} B tokens take {PAPER_TOKENS / speed / 3600:.0f} hours"
            )
    return 1 if worst.deviation or blocks else 0


if __name__ == "__main__":
    sys.exit(main())

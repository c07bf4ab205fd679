"""Faults of a training run by ranks that are processes, and what becomes of it: a table, and exit code 1 where an outcome is not the expected one.

    python benchmarks/faults.py [--engine mpi|torch] [--kills 4] [--seed 0] [--only KIND] [--json]

Each row trains examples/tiny.json on 2 x 2 ranks under `ratrainc launch`'s supervisor, with checkpoints, and injects one fault
into one rank (faulty_ranks.py): kill -9, a stop, an endless instruction, a lost message, a delayed one, a slow rank, a NaN in a gradient;
SIGTERM and a full disk (a small tmpfs; needs root) come from outside. Runs that end are resumed, and their losses compared, bit for bit,
with those of a run without faults.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from attrs import asdict, define, field, frozen

from ratrain import api
from ratrain.ratrain_ir.ops.base import Engine
from ratrain.ratrainc.running.supervisor import Supervisor, start_command
from ratrain.targets.program.rtx import write_program
from ratrain.targets.runtime.checkpoint.checkpoint_series import saved_steps, what_is_left
from ratrain.targets.runtime.watch.positions import RunFolder

ROOT = Path(__file__).resolve().parents[1]
RANKS, STEPS, SAVE_EVERY, HANG_TIMEOUT = 4, 8, 2, 4.0
WITHIN = 10.0
"""Seconds from the fault to the message that names it."""
NAMED = re.compile(r"stage @\d+ replica \d+ .*'[a-z_]+( [^']*)?' \(step \d+(, micro-batch \d+)?\)")


@frozen
class Row:
    """One fault and its outcome."""

    fault: str
    where: str
    expected: str
    exit_code: int
    seconds: float | None
    """from the fault to the message"""
    message: str
    resumed_at: int | None
    """steps done in the checkpoint the run went on from"""
    equal: bool
    """losses are those of a run without faults, where the fault changes none"""
    passed: bool


@define
class Outcome:
    """What a run said, and when."""

    exit_code: int = -1
    lines: list[tuple[float, str]] = field(factory=list)

    @property
    def text(self) -> str:
        return "\n".join(line for _, line in self.lines)

    def first(self, part: str) -> tuple[float, str] | None:
        return next(((when, line) for when, line in self.lines if part in line), None)


@define
class Bench:
    folder: Path
    program: Path
    stages: list[dict[str, list[Any]]]
    """each stage's streams by engine"""
    engine: str
    """mpi or torch"""
    plain: list[float] = field(factory=list)
    """losses of a run without faults"""

    def run(
        self,
        save: Path,
        fault: dict[str, Any] | None = None,
        *,
        steps: int = STEPS,
        resume: Path | None = None,
        meanwhile: Callable[[subprocess.Popen[str], Outcome], None] | None = None,
    ) -> tuple[Outcome, list[float]]:
        """Train, with a fault or without; what was said, and the losses."""
        log = self.folder / "log.jsonl"
        words = [str(self.program), "--steps", str(steps), "--save", str(save), "--save-every", str(SAVE_EVERY)]
        words += ["--engine", self.engine, "--hang-timeout", str(HANG_TIMEOUT), "--log", str(log)]
        words += ["--resume", str(resume)] if resume else []
        start = [str(ROOT / "benchmarks" / "faulty_ranks.py"), json.dumps(fault)] if fault else ["-m", "ratrain"]
        launcher, variables = start_command(self.engine, RANKS, None)
        command = [*launcher, sys.executable, *start, "run", *words]
        paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, **variables, "PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, __file__, "--supervise", str(save), json.dumps(command)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        outcome = Outcome()
        reader = threading.Thread(target=_read, args=(process, outcome))
        reader.start()
        if meanwhile is not None:
            meanwhile(process, outcome)
        outcome.exit_code = process.wait(timeout=180)
        reader.join()
        return outcome, [json.loads(line)["loss"] for line in log.read_text().splitlines()] if log.exists() else []

    def resumed(self, save: Path) -> tuple[int, bool]:
        """Go on after a fault, to the same last step: steps done before, and whether the log, which goes on too, is that without faults."""
        done = saved_steps(str(save))[0][0]
        if done == STEPS:
            return done, True
        outcome, losses = self.run(self.folder / f"{save.name}-resumed", resume=save, steps=STEPS - done)
        return done, outcome.exit_code == 0 and losses == self.plain


def _read(process: subprocess.Popen[str], outcome: Outcome) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        outcome.lines.append((time.time(), line.rstrip()))


def ending(bench: Bench, fault: dict[str, Any], where: str) -> Row:
    """A fault that ends the run: named within ten seconds, the job ends with an error, and goes on from the last checkpoint."""
    save = bench.folder / f"{fault['kind']}-{where}".replace(" ", "-").replace("@", "")
    outcome, _ = bench.run(save, fault)
    begun, said = outcome.first("FAULT"), outcome.first("error[RT093]")
    seconds = said[0] - begun[0] if said and begun else None
    message = said[1] if said else ""
    done, equal = bench.resumed(save)
    last = fault["step"] // SAVE_EVERY * SAVE_EVERY
    named = bool(NAMED.search(message)) and f"stage @{fault['stage']} replica {fault['replica']}" in message
    passed = outcome.exit_code == 1 and seconds is not None and seconds < WITHIN and named and equal and done >= last
    return Row(fault["kind"], where, "ends, named, resumable", outcome.exit_code, seconds, message, done, equal, passed)


def going_on(bench: Bench, fault: dict[str, Any], where: str, word: str) -> Row:
    """A fault that the run survives, with a word about it."""
    outcome, losses = bench.run(bench.folder / f"{fault['kind']}", fault)
    begun, said = outcome.first("FAULT"), outcome.first(word)
    changed = fault["kind"] == "nan"
    equal = losses[: fault["step"] + 1] == bench.plain[: fault["step"] + 1] if changed else losses == bench.plain
    finishes = len(losses) == STEPS and all(loss is not None for loss in losses) and losses[-1] < losses[0]
    passed = outcome.exit_code == 0 and said is not None and equal and finishes
    seconds = said[0] - begun[0] if said and begun else None
    message = said[1] if said else ""
    return Row(fault["kind"], where, "goes on, with a word", outcome.exit_code, seconds, message, None, equal, passed)


def terminated(bench: Bench) -> Row:
    """SIGTERM to the supervisor after the third step."""
    save, at = bench.folder / "term", [0.0]

    def terminate(process: subprocess.Popen[str], outcome: Outcome) -> None:
        deadline = time.time() + 60
        while outcome.first("step     2") is None and time.time() < deadline:
            time.sleep(0.01)
        at[0] = time.time()
        process.send_signal(signal.SIGTERM)

    outcome, losses = bench.run(save, meanwhile=terminate)
    said = outcome.first("saved")
    done, equal = bench.resumed(save)
    passed = outcome.exit_code == 75 and done == len(losses) < STEPS and equal
    seconds = said[0] - at[0] if said else None
    return Row(
        "SIGTERM",
        "all ranks",
        "saves and leaves: 75",
        outcome.exit_code,
        seconds,
        said[1] if said else "",
        done,
        equal,
        passed,
    )


def full_disk(bench: Bench, fault: dict[str, Any], checkpoint_bytes: int) -> Row:
    """Fill the disk after the first checkpoint, but for half of another: a run begins only on a disk with room."""
    save = bench.folder / "disk"
    save.mkdir()
    with mounted(save, checkpoint_bytes * 5 + (1 << 22)):
        outcome, _ = bench.run(save / "run", {**fault, "path": str(save), "left": checkpoint_bytes // 2})
        said = outcome.first("No space left")
        before = outcome.first("step     3")
        done, equal = bench.resumed(save / "run")
    seconds = said[0] - before[0] if said and before else None
    message = said[1] if said else ""
    named = "stage @" in message and "saving after step 3" in message
    passed = outcome.exit_code == 1 and named and done == SAVE_EVERY and equal
    return Row(
        "disk full", "second save", "ends, named, resumable", outcome.exit_code, seconds, message, done, equal, passed
    )


@contextmanager
def mounted(place: Path, size: int) -> Iterator[None]:
    """A file system of its own for a directory."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", place], check=True)


def rows(bench: Bench, kills: int, seed: int, only: str | None) -> Iterator[Row]:
    """Every fault in turn."""
    choice = random.Random(seed)

    def place(
        keyword: str = "", step: int | None = None, engine: Engine = Engine.COMPUTE
    ) -> tuple[dict[str, Any], str]:
        stage, replica = choice.randrange(2), choice.randrange(2)
        if keyword == "send":
            stage, engine = 0, Engine.SEND
        stream = bench.stages[stage][engine.value]
        index = choice.choice([i for i, instruction in enumerate(stream) if instruction.keyword.startswith(keyword)])
        at = choice.randrange(SAVE_EVERY, STEPS) if step is None else step
        words = f"@{stage} replica {replica} step {at} {stream[index].title}"
        return {"stage": stage, "replica": replica, "step": at, "engine": engine.value, "index": index}, words

    def wanted(kind: str) -> bool:
        return only is None or only == kind

    for number in range(kills if wanted("kill") else 0):
        engine = (Engine.COMPUTE, Engine.COLLECTIVE, Engine.RECV)[number % 3]
        where, words = place(engine=engine)
        yield ending(bench, {"kind": "kill", **where}, words)
    for kind in filter(wanted, ("stop", "hang")):
        where, words = place(step=5)
        yield ending(bench, {"kind": kind, **where}, words)
    if wanted("lose"):
        where, words = place("send", step=5)
        yield ending(bench, {"kind": "lose", **where}, words)
    if wanted("term"):
        yield terminated(bench)
    if wanted("disk") and os.geteuid() == 0:
        size = sum(path.stat().st_size for path in Path(saved_steps(str(bench.folder / "plain"))[0][1]).iterdir())
        where, _ = place(step=SAVE_EVERY)
        yield full_disk(bench, {"kind": "fill", **where}, size)
    if wanted("nan"):
        where, words = place("backward", step=5)
        yield going_on(bench, {"kind": "nan", **where}, words, "skipped: overflow")
    if wanted("slow"):
        where, words = place(step=4)
        yield going_on(bench, {"kind": "slow", "factor": 10.0, **where}, f"10x from {words}", "straggler")
    if wanted("delay"):
        where, words = place("send", step=5)
        yield going_on(bench, {"kind": "delay", "seconds": 3.0, **where}, f"3 s, {words}", "straggler")


def show(row: Row) -> None:
    seconds = "-" if row.seconds is None else f"{row.seconds:.1f} s"
    resumed = "-" if row.resumed_at is None else f"from {row.resumed_at}"
    verdict = "ok" if row.passed else "FAILED"
    print(
        f"| {row.fault} | {row.where} | {row.exit_code} | {seconds} | {resumed} | {row.equal} | {verdict} |", flush=True
    )
    print(f"    {row.message[:220]}", file=sys.stderr, flush=True)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--engine", choices=["mpi", "torch"], default="mpi")
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=["kill", "stop", "hang", "lose", "term", "disk", "nan", "slow", "delay"])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--supervise", nargs=2, metavar=("DIR", "COMMAND"), help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.supervise:
        save, command = options.supervise
        return Supervisor(RunFolder(str(Path(save) / "run")), partial(what_is_left, save)).run(json.loads(command), {})
    with tempfile.TemporaryDirectory() as folder:
        module = api.compile(str(ROOT / "examples/tiny.json"), str(ROOT / "examples/tiny.toml"))
        program = api.emit(module)
        path = Path(folder) / "tiny.rtx"
        write_program(program, str(path))
        streams = [{engine.value: stream for engine, stream in stage.streams.items()} for stage in program.stages]
        bench = Bench(Path(folder), path, streams, options.engine)
        outcome, bench.plain = bench.run(Path(folder) / "plain")
        assert outcome.exit_code == 0, outcome.text
        results = []
        if not options.json:
            print("| fault | where | exit | message after | resumed | losses equal | |")
            print("|---|---|---|---|---|---|---|", flush=True)
        for row in rows(bench, options.kills, options.seed, options.only):
            results.append(row)
            if not options.json:
                show(row)
    if options.json:
        print(json.dumps([asdict(row) for row in results]))
    return 0 if all(row.passed for row in results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""A model trained in less memory than its state takes: with masters and moments in a file, against the same plan without.

    python benchmarks/small_memory.py [--model qwen2.5-0.5b] [--ram 2GiB] [--steps 3] [--scratch DIR] [--json]

Each run is a process of its own, as `ratrainc run` starts it: one with everything in memory, one with state in a file under `--ram`, and a
third, also with state in a file, that is killed (-9) in the middle of a step halfway and resumed from its
checkpoint. Exit code 1 where a loss differs from the first run's in any bit, where a process held more than `--ram` (as the system
counted it), or where what was read and written is not what the program says (which counts no overflow: steps that skip updates write
less).
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from attrs import asdict, frozen

sys.path.insert(0, str(Path(__file__).parent))
from stopwatch import machine

from ratrain.passes.pipeline_text import size_in_bytes

ROOT = Path(__file__).resolve().parents[1]
OFFLOAD = "offload-state{home=file},"
RATRAINC = (sys.executable, "-c", "from ratrain.ratrainc.cli import main; raise SystemExit(main())")
PASSES = "place-1f1b,%srecompute{policy=full},bucket-grad-sync{bytes=1},schedule-update,insert-prefetch,allocate-ddr"


@frozen
class Trained:
    """What a run said at its end."""

    losses: tuple[float, ...]
    """of the steps that it did itself"""
    overflows: int
    seconds: float
    resident: int
    """bytes, at most, as the system counted"""
    moved: tuple[int, int]
    """bytes read from files, and written"""
    by_program: tuple[int, int]
    """the same of as many steps, by the program"""


@frozen
class Bench:
    """Where the runs are, and what all of them are told."""

    folder: Path
    model: str
    plan: str
    steps: int
    ram: int

    @property
    def limits(self) -> list[str]:
        """What runs with state in a file are told."""
        return ["--scratch", str(self.folder), "--ram", str(self.ram)]

    def compile(self, name: str, passes: str, *more: str) -> Path:
        """Compile the plan to a program."""
        file = self.folder / f"{name}.rtx"
        self._call("compile", "--model", self.model, "--plan", self.plan, "--passes", passes, "-o", str(file), *more)
        return file

    def train(self, program: Path, steps: int, *more: str) -> Trained:
        """Run a program for so many steps."""
        start = time.perf_counter()
        said = json.loads(self._call("run", *self._words(program, steps), "--json", *more))
        return trained(said, time.perf_counter() - start)

    def killed(self, program: Path, save: Path, step: float) -> int:
        """Start a run that saves after every step, kill it halfway, within a step of so many seconds; how many steps are saved."""
        words = [*self._words(program, self.steps), *self.limits, "--save", str(save), "--save-every", "1"]
        process = subprocess.Popen(
            [*RATRAINC, "run", *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT
        )
        while saved_steps(save) < self.steps // 2:
            if process.poll() is not None:
                raise SystemExit(f"the run that was to be killed ended by itself, with exit code {process.returncode}")
            time.sleep(0.01)
        time.sleep(step / 2)
        process.send_signal(signal.SIGKILL)
        process.wait()
        return saved_steps(save)

    def _words(self, program: Path, steps: int) -> list[str]:
        return [str(program), "--steps", str(steps)]

    def _call(self, *words: str) -> str:
        done = subprocess.run([*RATRAINC, *words], capture_output=True, text=True, check=False, cwd=ROOT)
        if done.returncode:
            raise SystemExit(f"ratrainc {' '.join(words)}\n{done.stderr}{done.stdout}")
        return done.stdout


def saved_steps(save: Path) -> int:
    """After how many steps the newest checkpoint was made; older ones make room."""
    return max(
        (int(manifest.parent.name.partition("-")[2]) for manifest in save.glob("step-*/manifest.json")), default=0
    )


def trained(said: dict[str, Any], seconds: float) -> Trained:
    """Of `ratrainc run --json`."""
    steps = said["steps"]
    moved, planned = said["files"], said["files_a_step"]
    return Trained(
        tuple(step["loss"] for step in steps),
        sum(step["skipped_blocks"] > 0 for step in steps),
        seconds,
        said["peak_resident_bytes"],
        (moved["read"], moved["written"]),
        (len(steps) * planned["read"], len(steps) * planned["written"]),
    )


def faults(whole: Trained, filed: Trained, resumed: Trained, ram: int) -> list[str]:
    """What is not as it has to be."""
    found = []
    if filed.losses != whole.losses:
        found.append(f"losses differ: {filed.losses} with state in a file, {whole.losses} without")
    if not resumed.losses or resumed.losses != whole.losses[-len(resumed.losses) :]:
        found.append(f"losses after the resume differ: {resumed.losses}, of {whole.losses}")
    found += [f"{run.resident} bytes resident, more than {ram}" for run in (filed, resumed) if run.resident > ram]
    if not filed.overflows and filed.moved != filed.by_program:
        found.append(f"read and written {filed.moved}, by the program {filed.by_program}")
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run all three and print what they did."""
    asked = _arguments().parse_args(arguments)
    ram = size_in_bytes(asked.ram)
    if ram is None or asked.steps < 2:
        raise SystemExit("--ram is a size like 2GiB; --steps are at least 2")
    if asked.scratch is not None:
        Path(asked.scratch).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=asked.scratch) as folder:
        bench = Bench(Path(folder), asked.model, asked.plan, asked.steps, ram)
        whole = bench.train(bench.compile("whole", PASSES % ""), asked.steps)
        program = bench.compile("filed", PASSES % OFFLOAD, "--machine", asked.machine)
        filed = bench.train(program, asked.steps, *bench.limits)
        save = Path(folder) / "saved"
        done = bench.killed(program, save, filed.seconds / asked.steps)
        resumed = bench.train(program, asked.steps - done, *bench.limits, "--resume", str(save))
    runs = {"in memory": whole, "in a file": filed, f"killed, resumed after step {done}": resumed}
    found = faults(whole, filed, resumed, ram)
    if asked.json:
        print(json.dumps({"runs": {name: asdict(run) for name, run in runs.items()}, "faults": found}))
    else:
        _show(runs, found)
    return 1 if found else 0


def _show(runs: dict[str, Trained], found: list[str]) -> None:
    print(f"{machine()}")
    for name, run in runs.items():
        losses = " ".join(f"{loss:.6f}" for loss in run.losses)
        print(
            f"{name:>28}: losses {losses}; {run.seconds:.1f} s with start and end; at most {run.resident / 2**30:.2f} GiB resident; "
            f"{run.moved[0] / 2**30:.2f} GiB read, {run.moved[1] / 2**30:.2f} written, by the program {run.by_program[0] / 2**30:.2f}, "
            f"{run.by_program[1] / 2**30:.2f}; {run.overflows} steps with an overflow"
        )
    print("\n".join(found) if found else "losses are equal, bit for bit")


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-0.5b")
    parser.add_argument("--plan", default=str(ROOT / "examples" / "qwen2.5-0.5b-2gib.toml"))
    parser.add_argument("--machine", default=str(ROOT / "examples" / "small-memory.toml"))
    parser.add_argument("--ram", default="2GiB")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--scratch", metavar="DIR", help="where the files are; default: where this system has temporary ones"
    )
    parser.add_argument("--json", action="store_true")
    return parser


if __name__ == "__main__":
    sys.exit(main())

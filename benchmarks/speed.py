"""Speed of the whole: CPU and wall seconds of the commands on one large plan, beside what they should take.

    python benchmarks/speed.py                                LLaMA-2-70B, 48 stages, 256 micro-batches; some minutes
    python benchmarks/speed.py --micro-batches 8              smaller
    python benchmarks/speed.py --only verify,simulate --folder DIR     files of an earlier run in DIR
    python benchmarks/speed.py --jobs 1                       in one process each

CPU seconds are of the processes themselves (user and system), compiled loops warm: each command is a process of its
own, with `--jobs` more where it takes any, and what it reads, checks and writes is part of it. Wall seconds are longer
where others use the machine. `verify` and `verify-rtx` prove the schedule and the program, and leave receipts in the
folder; what comes after them finds these, and proves nothing again. Sources are compiled to bytecode first, as pip
does where it installs them, whatever PYTHONDONTWRITEBYTECODE says. Targets are for the plan as it stands.
"""

from __future__ import annotations

import argparse
import compileall
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from processes import ROOT, command_cost

PLAN = ROOT / "examples" / "llama-2-70b-96.toml"
MODEL = "llama-2-70b"
MICRO_BATCHES = 256
TARGETS = {"compile": 30, "verify": 3, "emit": None, "verify-rtx": None, "simulate": 1, "explain": 15, "report": 5}


def commands(model: str, plan: Path, folder: Path, jobs: int) -> dict[str, list[str]]:
    """List the commands that are timed, by name; each may take `jobs` processes and needs the files of earlier ones."""
    process_pool = ["--jobs", str(jobs)]
    schedule, program = str(folder / "speed.rtir"), str(folder / "speed.rtx")
    return {
        "compile": ["compile", "--model", model, "--plan", str(plan), "-o", schedule, *process_pool],
        "verify": ["verify", schedule, *process_pool],
        "emit": ["compile", schedule, "-o", program, *process_pool],
        "verify-rtx": ["verify", program, *process_pool],
        "simulate": ["simulate", program],
        "explain": ["explain", schedule, *process_pool],
        "report": ["report", program, "-o", str(folder / "speed.html")],
    }


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL, help="a preset or a config.json")
    parser.add_argument("--plan", type=Path, default=PLAN)
    parser.add_argument("--micro-batches", type=int, default=MICRO_BATCHES)
    parser.add_argument("--only", default=",".join(TARGETS), help="names of commands, with commas between them")
    parser.add_argument("--folder", type=Path, help="keep the files here")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that a command may take")
    chosen = parser.parse_args(arguments)
    names = chosen.only.split(",")
    if unknown := [name for name in names if name not in TARGETS]:
        parser.error(f"no command {unknown[0]}: there are {', '.join(TARGETS)}")
    for package in ("src", "grammar", "ratrain_ir", "passes", "targets", "ratrainc"):
        compileall.compile_dir(ROOT / package, quiet=2)
    with tempfile.TemporaryDirectory() as scratch:
        folder = chosen.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        lines = [
            f"micro_batches = {chosen.micro_batches}" if line.startswith("micro_batches") else line
            for line in chosen.plan.read_text("utf-8").splitlines()
        ]
        plan = folder / "speed.toml"
        plan.write_text("\n".join(lines) + "\n", "utf-8")
        print(f"{chosen.jobs} {'process' if chosen.jobs == 1 else 'processes'} at most")
        print(f"{'command':10} {'CPU s':>8} {'wall s':>8} {'target':>8}")
        for name, words in commands(chosen.model, plan, folder, chosen.jobs).items():
            if name in names:
                taken, target = command_cost(words, folder), TARGETS[name]
                print(
                    f"{name:10} {taken.cpu:8.2f} {taken.wall:8.2f} {'-' if target is None else target:>8}", flush=True
                )


if __name__ == "__main__":
    main()

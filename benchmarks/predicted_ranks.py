"""Step times of runs over MPI, predicted from the profile of another run over MPI.

    python benchmarks/predicted_ranks.py [--steps 20]

Two ranks of a small LLaMA, two stages, are profiled; the machine file made of it predicts other plans, which are run too. The model is that of
`ratrainc simulate --cores N`: the engines of a rank share a core, and all ranks N cores. Two ranks on two cores is the fair case; four
share them, and then the prediction says no more than that all work is spread evenly.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click
import numpy as np
from attrs import evolve

from ratrain import api
from ratrain.ratrain_ir.frontend.model_files import load_model
from ratrain.ratrain_ir.frontend.plan_text import load_plan
from ratrain.ratrainc.calibration.from_profile import machine_from_profile
from ratrain.ratrainc.supervisor import mpi_command
from ratrain.targets.program.rtx import write_program
from ratrain.targets.simulator.figures import shared_cores_step_seconds

if TYPE_CHECKING:
    from ratrain.ratrain_ir.frontend.plan import Plan
    from ratrain.targets.program.program import Program

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
PEAK = 1e11
"""Where the fit of rates starts: only its product with the fitted efficiencies matters."""
WARM_UP = 2


def plans(plan: Plan) -> dict[str, Plan]:
    """The profiled plan first."""
    pipeline = evolve(plan, dp=1, zero=0)
    return {
        "2 stages, profiled": pipeline,
        "2 stages, the same without a profile": pipeline,
        "2 stages, 8 micro-batches": evolve(pipeline, micro_batches=8),
        "2 replicas of one stage": evolve(plan, pp=1, cuts=()),
        "2 stages x 2 replicas, four ranks": plan,
    }


def step_seconds(program: Program, steps: int, folder: Path, profile: Path | None) -> list[float]:
    """Run a program over MPI; the seconds of its steps."""
    path = folder / "program.rtx"
    write_program(program, str(path))
    launcher, variables = mpi_command(program.plan.clusters, None)
    words = ["-m", "ratrain", "run", str(path), "--steps", str(steps), "--threads", "1", "--engine", "mpi", "--json"]
    words += ["--profile", str(profile)] if profile else []
    result = subprocess.run(
        [*launcher, sys.executable, *words],
        env={**os.environ, **variables, "OPENBLAS_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    lines = json.loads(result.stdout)["steps"]
    return [line["tokens"] / line["tokens_per_second"] for line in lines][WARM_UP:]


@click.command()
@click.option("--steps", type=click.IntRange(min=WARM_UP + 4), default=20, show_default=True)
def main(steps: int) -> None:
    """Profile two ranks; predict and run others."""
    cores = len(os.sched_getaffinity(0))
    by_title = plans(load_plan(str(EXAMPLES / "tiny.toml"), load_model(str(EXAMPLES / "tiny.json"))))
    print(f"{cores} cores\n| ranks | predicted | ran: median (quartiles) | error |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        profile: Path | None = Path(name) / "profile.json"
        assert profile is not None
        calibration = str(profile)
        for title, plan in by_title.items():
            program = api.emit(api.compile(str(EXAMPLES / "tiny.json"), plan))
            seconds = step_seconds(program, steps, Path(name), profile)
            profile = None
            machine = machine_from_profile(calibration, "this-machine", PEAK).machine
            predicted = shared_cores_step_seconds(program, machine, cores)
            low, middle, high = np.percentile(seconds, [25, 50, 75])
            error = f"{100 * (predicted / middle - 1):+.1f} %"
            print(f"| {title} | {predicted:.4f} s | {middle:.4f} s ({low:.4f} to {high:.4f}) | {error} |", flush=True)


if __name__ == "__main__":
    main()

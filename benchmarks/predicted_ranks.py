"""Step times of runs over MPI, predicted from profiles of other runs over MPI.

    python benchmarks/predicted_ranks.py [--steps 20] [--rounds 3]

Two ranks of a small LLaMA that are stages, two that are replicas, and four that share cores are profiled; the machine file made of these
profiles predicts other plans, which are run too, in turns with the profiled ones, as the pace of a machine differs from minute to minute.
The model is that of `ratrainc simulate --cores N`: the engines of a rank share a core, and all ranks N cores.
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
from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.text.plan_file import load_plan
from ratrain.ratrainc.calibration.from_profile import machine_from_profiles
from ratrain.ratrainc.running.supervisor import mpi_command
from ratrain.targets.program.rtx import write_program
from ratrain.targets.simulator.figures import shared_cores_step_seconds

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.targets.program.program import Program

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
PEAK = 1e11
"""Where the fit of rates starts: only its product with the fitted efficiencies matters."""
WARM_UP = 2


def profiled(plan: Plan) -> dict[str, Plan]:
    """The plans whose runs are profiled."""
    return {
        "2 stages": evolve(plan, dp=1, zero=0),
        "2 replicas": evolve(plan, pp=1, cuts=()),
        "2 stages x 2 replicas": plan,
    }


def predicted(plan: Plan) -> dict[str, Plan]:
    """The plans that are predicted: those of the profiles again, as yardsticks, and others."""
    known = profiled(plan)
    stages, replicas = known["2 stages"], known["2 replicas"]
    return {
        **{f"{title}, as profiled": each for title, each in known.items()},
        "2 stages, 8 micro-batches": evolve(stages, micro_batches=8),
        "2 stages, 2 micro-batches": evolve(stages, micro_batches=2),
        "2 replicas, 8 micro-batches": evolve(replicas, micro_batches=8),
        "2 replicas, 2 micro-batches": evolve(replicas, micro_batches=2),
        "2 replicas, nothing shared out": evolve(replicas, zero=0),
        "2 stages x 2 replicas, 8 micro-batches": evolve(plan, micro_batches=8),
        "4 stages": evolve(stages, pp=4, cuts=(1, 2, 3)),
        "4 replicas": evolve(replicas, dp=4),
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
@click.option("--steps", type=click.IntRange(min=WARM_UP + 4), default=20, show_default=True, help="Of each run.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="Runs of each plan, in turns.")
def main(steps: int, rounds: int) -> None:
    """Profile some ranks; predict and run others."""
    cores = len(os.sched_getaffinity(0))
    plan = load_plan(str(EXAMPLES / "tiny.toml"), load_model(str(EXAMPLES / "tiny.json")))
    known = [program_of(each) for each in profiled(plan).values()]
    programs = {title: program_of(each) for title, each in predicted(plan).items()}
    taken: dict[str, list[float]] = {title: [] for title in programs}
    profiles = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for turn in range(rounds):
            for number, program in enumerate(known):
                profiles.append(str(folder / f"profile-{turn}-{number}.json"))
                step_seconds(program, steps, folder, Path(profiles[-1]))
            for title, program in programs.items():
                taken[title] += step_seconds(program, steps, folder, None)
            print(f"round {turn + 1} of {rounds} is done", file=sys.stderr)
        machine = machine_from_profiles(profiles, "this-machine", PEAK).machine
    print(f"{cores} cores\n| ranks | predicted | ran: median (quartiles) | error |\n|---|---|---|---|")
    for title, program in programs.items():
        low, middle, high = np.percentile(taken[title], [25, 50, 75])
        seconds = shared_cores_step_seconds(program, machine, cores)
        error = f"{100 * (seconds / middle - 1):+.1f} %"
        print(f"| {title} | {seconds:.4f} s | {middle:.4f} s ({low:.4f} to {high:.4f}) | {error} |")
    if cores < plan.clusters:
        print(f"where ranks share cores, a step is as if ops took {100 * machine.core_sharing:.1f} % longer")


def program_of(plan: Plan) -> Program:
    """The program of a plan."""
    return api.emit(api.compile(str(EXAMPLES / "tiny.json"), plan))


if __name__ == "__main__":
    main()

"""Step times of runs on this machine, predicted from the profile of another run.

    python benchmarks/predicted_run.py [--steps 20] [--clock wall|cpu]

A small LLaMA is profiled under one plan; the machine file made of it predicts three other plans, which are then run. Prediction and
run are of the ordered local engine: one thread executes all engines of all ranks in turn, so that a step is the sum of its ops.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click
from attrs import evolve, frozen
from threadpoolctl import threadpool_limits

from ratrain_ir.frontend.model_config import load_model
from ratrain_ir.frontend.plan import Plan, load_plan
from ratrainc import api
from ratrainc.calibration.from_profile import ProfiledMachine, machine_from_profile
from ratrainc.run_profile import write_profile
from ratrainc.strategies import strategy
from ratrainc.training_data import DataChoice, open_data
from targets.mt3000.simulation import one_core_step_seconds
from targets.runtime.kernels import kernel_set
from targets.runtime.profile import Profile
from targets.runtime.training import RunSettings, prepare

if TYPE_CHECKING:
    from targets.program import Program

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
PEAK = 1e11
"""Where the fit of rates starts: only its product with the fitted efficiencies matters."""


@frozen
class Case:
    """A plan that the profile has not seen."""

    name: str
    plan: Plan
    strategy: str


def cases(plan: Plan) -> list[Case]:
    """More micro-batches; other ranks; another schedule."""
    return [
        Case("8 micro-batches instead of 4", evolve(plan, micro_batches=8), "ratrain"),
        Case("1 stage x 4 replicas instead of 2 x 2", evolve(plan, pp=1, dp=4, cuts=()), "ratrain"),
        Case("GPipe-like: full-save in bulk, 2 x 1", evolve(plan, dp=1, zero=0, micro_batches=6), "full-save"),
    ]


def program_of(plan: Plan, strategy_name: str) -> Program:
    """The program of the small LLaMA under a plan."""
    model = load_model(str(EXAMPLES / "tiny.json"))
    return api.emit(api.compile(model, plan, passes=strategy(strategy_name).passes))


def profiled(program: Program, steps: int, clock: str, path: Path) -> ProfiledMachine:
    """A run of the ordered engine, profiled: its median step, and the machine file that its ops make."""
    stream, _ = open_data(program, DataChoice())
    run = prepare(program, stream, RunSettings(steps=steps, threads=1), kernel_set("fast", 1))
    run.engine.profile = Profile(time.perf_counter if clock == "wall" else time.process_time)
    for _ in run.steps():
        pass
    run.remove_temporary_folder()
    write_profile(program, run.engine.profile, str(path), engines_side_by_side=False)
    return machine_from_profile(str(path), "this-machine", PEAK)


@click.command()
@click.option("--steps", type=click.IntRange(min=3), default=20, show_default=True)
@click.option("--clock", type=click.Choice(["wall", "cpu"]), default="wall", show_default=True)
def main(steps: int, clock: str) -> None:
    """Profile one plan, predict and run three others."""
    plan = load_plan(str(EXAMPLES / "tiny.toml"), load_model(str(EXAMPLES / "tiny.json")))
    with tempfile.TemporaryDirectory() as folder, threadpool_limits(limits=1):
        path = Path(folder) / "profile.json"
        program = program_of(plan, "ratrain")
        own = profiled(program, steps, clock, path)
        table = one_core_step_seconds(program, own.machine)
        print(f"profiled: {own.step_seconds:.4f} s a step ({clock}), its table sums to {table:.4f}")
        for case in cases(plan):
            program = program_of(case.plan, case.strategy)
            predicted = one_core_step_seconds(program, own.machine)
            seconds = profiled(program, steps, clock, path).step_seconds
            print(
                f"{case.name}: predicted {predicted:.4f} s, ran {seconds:.4f} s: {100 * (predicted / seconds - 1):+.2f} %"
            )


if __name__ == "__main__":
    main()

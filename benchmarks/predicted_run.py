"""Step times of runs on this machine, predicted from the profile of another run.

    python benchmarks/predicted_run.py [--steps 20]

A small LLaMA is profiled under one plan; the machine file made of it predicts other plans, which are run too. Prediction and run are
of the ordered local engine: one thread executes all engines of all ranks in turn, so that a step is the sum of its ops.

All runs go on in turns, a step each, so that what else the machine does meanwhile meets all of them. It can only lengthen steps: the
lower quartile is nearer to what a step takes than the median, and how far the two are apart says how disturbed the machine was. No
prediction can be better than that.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np
from attrs import define, evolve, field, frozen
from threadpoolctl import threadpool_limits

from ratrain_ir.frontend.model_config import load_model
from ratrain_ir.frontend.plan import Plan, load_plan
from ratrainc import api
from ratrainc.calibration.from_profile import ProfiledMachine, machine_from_profile
from ratrainc.run_profile import write_profile
from ratrainc.strategies import strategy
from ratrainc.training_data import DataChoice, open_data
from targets.mt3000.simulation import one_core_step_seconds
from targets.program import Program
from targets.runtime.kernels import kernel_set
from targets.runtime.profile import Profile
from targets.runtime.training import RunSettings, TimedStep, TrainingRun, prepare

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
PEAK = 1e11
"""Where the fit of rates starts: only its product with the fitted efficiencies matters."""
WARM_UP = 2
"""Steps of each run that are not counted."""


@frozen
class Case:
    """A plan to predict and to run."""

    name: str
    plan: Plan
    strategy: str = "ratrain"


def cases(plan: Plan) -> list[Case]:
    """The profiled plan, which says how good the method can be; three that it was not calibrated on; one whose kernels did not run."""
    return [
        Case("the profiled plan, without a profile", plan),
        Case("8 micro-batches instead of 4", evolve(plan, micro_batches=8)),
        Case("1 stage x 4 replicas instead of 2 x 2", evolve(plan, pp=1, dp=4, cuts=())),
        Case("full-save in bulk, 2 stages x 1 replica", evolve(plan, dp=1, zero=0, micro_batches=6), "full-save"),
        Case("sequences one by one instead of two", evolve(plan, micro_batch_size=1)),
    ]


def program_of(case: Case) -> Program:
    """The program of the small LLaMA under a plan."""
    model = load_model(str(EXAMPLES / "tiny.json"))
    return api.emit(api.compile(model, case.plan, passes=strategy(case.strategy).passes))


@define(eq=False)
class Runner:
    """A run that goes on step by step."""

    program: Program
    run: TrainingRun
    steps: Iterator[TimedStep]
    seconds: list[float] = field(factory=list)

    @classmethod
    def of(cls, case: Case) -> Runner:
        """The run of a case, on one thread."""
        program = program_of(case)
        stream, _ = open_data(program, DataChoice())
        run = prepare(program, stream, RunSettings(steps=1 << 40, threads=1), kernel_set("fast", 1))
        return cls(program, run, run.steps())

    def step(self) -> None:
        """Run a step."""
        start = time.perf_counter()
        next(self.steps)
        self.seconds.append(time.perf_counter() - start)


def calibrated(runner: Runner) -> ProfiledMachine:
    """The machine file that the ops of a profiled run make."""
    assert runner.run.engine.profile is not None
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "profile.json")
        write_profile(runner.program, runner.run.engine.profile, path)
        return machine_from_profile(path, "this-machine", PEAK)


@click.command()
@click.option("--steps", type=click.IntRange(min=WARM_UP + 4), default=20, show_default=True)
def main(steps: int) -> None:
    """Profile one plan; predict and run others."""
    plan = load_plan(str(EXAMPLES / "tiny.toml"), load_model(str(EXAMPLES / "tiny.json")))
    chosen = cases(plan)
    with threadpool_limits(limits=1):
        profiled = Runner.of(chosen[0])
        profiled.run.engine.profile = Profile()
        runners = [Runner.of(case) for case in chosen]
        for _ in range(steps):
            for runner in (profiled, *runners):
                runner.step()
        machine = calibrated(profiled).machine
    print(f"| plan | predicted | ran: lower quartile | median | error | of the median |\n|{'---|' * 6}")
    for case, runner in zip(chosen, runners, strict=True):
        predicted = one_core_step_seconds(runner.program, machine)
        quartile, median = np.percentile(runner.seconds[WARM_UP:], [25, 50])
        errors = [f"{100 * (predicted / seconds - 1):+.2f} %" for seconds in (quartile, median)]
        print(f"| {case.name} | {predicted:.4f} s | {quartile:.4f} s | {median:.4f} s | {' | '.join(errors)} |")


if __name__ == "__main__":
    main()

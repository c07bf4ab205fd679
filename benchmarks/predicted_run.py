"""Step times of runs on this machine, predicted from the profile of another run.

    python benchmarks/predicted_run.py [--steps 40] [--clock cpu]

A small LLaMA is profiled under one plan; the machine file made of it predicts other plans, which are run too. Prediction and run are
of the ordered local engine: one thread executes all engines of all ranks in turn, so that a step is the sum of its ops.

All runs go on in turns, a step each, so that what else the machine does meanwhile meets all of them. How fast a shared machine goes differs
from turn to turn: a turn's pace is the profiled run's step in it and in the next, over its median. The error at pace is the median over all turns of the
prediction, times the turn's pace, against the step. The plain error is that of the prediction against the median step; the quartiles say how disturbed
the machine was. Last comes the median of the errors, without their signs, of the ten plans with the profiled kernels.

With --clock cpu all seconds, of ops and of steps, are CPU time of the one thread that does all: what else a busy machine does then counts only
where it takes caches and clock away.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import numpy as np
from attrs import define, evolve, field, frozen
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from ratrain import api
from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrain_ir.text.plan_file import load_plan
from ratrain.ratrainc.calibration.from_profile import ProfiledMachine, machine_from_profiles
from ratrain.ratrainc.choices.run_choices import DataChoice
from ratrain.ratrainc.choices.strategies import strategy
from ratrain.ratrainc.running.run_profile import write_profile
from ratrain.ratrainc.running.training_data import open_data
from ratrain.targets.program.program import Program
from ratrain.targets.runtime.engine.profile import Profile
from ratrain.targets.runtime.kernels import kernel_set
from ratrain.targets.runtime.settings import RunSettings
from ratrain.targets.runtime.training.preparation import prepare
from ratrain.targets.runtime.training.training import TimedStep, TrainingRun
from ratrain.targets.simulator.figures import one_core_step_seconds

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
PEAK = 1e11
"""Where the fit of rates starts: only its product with the fitted efficiencies matters."""
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.thread_time}
WARM_UP = 2
"""Steps of each run that are not counted."""


@frozen
class Case:
    """A plan to predict and to run."""

    name: str
    plan: Plan
    strategy: str = "ratrain"


UNLIKE = "sequences one by one instead of two"
"""The case whose kernels the profile does not have."""


def cases(plan: Plan) -> list[Case]:
    """The profiled plan, which says how good the method can be; ten that it was not calibrated on; one whose kernels did not run."""
    return [
        Case("the profiled plan, without a profile", plan),
        Case("2 micro-batches instead of 4", evolve(plan, micro_batches=2)),
        Case("8 micro-batches instead of 4", evolve(plan, micro_batches=8)),
        Case("1 stage x 4 replicas instead of 2 x 2", evolve(plan, pp=1, dp=4, cuts=())),
        Case("1 stage x 1 replica", evolve(plan, pp=1, dp=1, cuts=(), zero=0)),
        Case("2 stages x 1 replica", evolve(plan, dp=1, zero=0)),
        Case("4 stages x 1 replica", evolve(plan, pp=4, dp=1, cuts=(1, 2, 3), zero=0)),
        Case("2 stages x 4 replicas", evolve(plan, dp=4)),
        Case("nothing shared out among replicas", evolve(plan, zero=0)),
        Case("gradients shared out too", evolve(plan, zero=2)),
        Case("full-save in bulk, 2 stages x 1 replica", evolve(plan, dp=1, zero=0, micro_batches=6), "full-save"),
        Case(UNLIKE, evolve(plan, micro_batch_size=1)),
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
    clock: Callable[[], float]
    seconds: list[float] = field(factory=list)

    @classmethod
    def of(cls, case: Case, clock: Callable[[], float]) -> Runner:
        """The run of a case, on one thread, whose steps a clock times."""
        program = program_of(case)
        stream, _ = open_data(program, DataChoice())
        run = prepare(program, stream, RunSettings(steps=1 << 40), kernel_set("fast", 1))
        return cls(program, run, run.steps(), clock)

    def step(self) -> None:
        """Run a step."""
        start = self.clock()
        next(self.steps)
        self.seconds.append(self.clock() - start)

    def counted(self) -> NDArray[np.float64]:
        """The seconds of the steps after the first few."""
        return np.array(self.seconds[WARM_UP:])


def calibrated(runner: Runner) -> ProfiledMachine:
    """The machine file that the ops of a profiled run make."""
    assert runner.run.engine.profile is not None
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "profile.json")
        write_profile(runner.program, runner.run.engine.profile, path)
        return machine_from_profiles([path], "this-machine", PEAK)


def pace_of_turns(seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """How slow the machine was in each turn, given the seconds of the run that begins each: 1 is the median."""
    followed = np.append(seconds[1:], seconds[-1])
    return (seconds + followed) / (2 * np.median(seconds))


@click.command()
@click.option("--steps", type=click.IntRange(min=WARM_UP + 4), default=40, show_default=True)
@click.option("--clock", "clock_name", type=click.Choice(list(CLOCKS)), default="wall", show_default=True)
def main(steps: int, clock_name: str) -> None:
    """Profile one plan; predict and run others."""
    plan = load_plan(str(EXAMPLES / "tiny.toml"), load_model(str(EXAMPLES / "tiny.json")))
    chosen, clock = cases(plan), CLOCKS[clock_name]
    with threadpool_limits(limits=1):
        profiled = Runner.of(chosen[0], clock)
        profiled.run.engine.profile = Profile(clock)
        runners = [Runner.of(case, clock) for case in chosen]
        for _ in range(steps):
            for runner in (profiled, *runners):
                runner.step()
        machine = calibrated(profiled).machine
    pace = pace_of_turns(profiled.counted())
    sizes: list[tuple[float, float]] = []
    print(f"| plan | predicted | ran: median (quartiles) | error | error at pace |\n|{'---|' * 5}")
    for case, runner in zip(chosen, runners, strict=True):
        predicted = one_core_step_seconds(runner.program, machine)
        seconds = runner.counted()
        low, median, high = np.percentile(seconds, [25, 50, 75])
        at_pace = np.median(predicted * pace / seconds) - 1
        if case is not chosen[0] and case.name != UNLIKE:
            sizes.append((abs(predicted / median - 1), abs(at_pace)))
        ran = f"{median:.4f} s ({low:.4f} to {high:.4f})"
        print(f"| {case.name} | {predicted:.4f} s | {ran} | {predicted / median - 1:+.2%} | {at_pace:+.2%} |")
    plain, paced = np.median(np.array(sizes), axis=0)
    print(f"median error of {len(sizes)} plans: {plain:.2%}, at pace {paced:.2%}")


if __name__ == "__main__":
    main()

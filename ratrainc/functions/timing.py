"""Simulations of a step, and the reports, pages and pictures made from them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from attrs import frozen

from ratrain.ratrain_ir.support.diagnostics import misuse
from ratrain.ratrain_ir.support.gc import paused_gc
from ratrain.ratrain_ir.support.quantities import number_of
from ratrain.ratrainc.choices.routing_text import routing_of
from ratrain.ratrainc.choices.times_text import load_times
from ratrain.ratrainc.compiling.opening import machine_of
from ratrain.ratrainc.compiling.proving import sound_program
from ratrain.ratrainc.console.parts import Part, Shown
from ratrain.ratrainc.report.simulation import GivenTimesSimulation, Simulation, StepSimulation
from ratrain.targets.machine.machine import Machine, load_machine
from ratrain.targets.program.program import Program
from ratrain.targets.simulator.figures import (
    one_core_step_seconds,
    shared_cores_step_seconds,
    simulated,
    step_figures,
)
from ratrain.targets.simulator.given_times import GivenTimes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ratrain.ratrainc.report.program_differences import Differences  # noqa: TC004 - of a type alone
    from ratrain.ratrainc.report.time_report import TimeReport


def simulate(
    program: Program | str,
    *,
    machine: str | Machine | None = None,
    rendezvous: bool = False,
    sharing: bool = True,
    routing: str | None = None,
) -> Simulation:
    """Simulate a program, or the program in a file, on a machine; None is the machine it was compiled for.

    With `rendezvous` a send waits for its receive. Without `sharing`, every transfer has the full bandwidth of DDR and
    links, even if others overlap. `routing` says how many rows each expert gets: `balanced` (the default), `one-hot`,
    `hot-rank` or a JSON file of shares. Raises `DiagnosticError` if a model without experts is given one, or it is
    wrong.
    """
    known, chosen = program_and_machine(program, machine)
    routed = None if routing is None else routing_of(routing, known.model, known.plan)
    with paused_gc():
        figures, timeline = simulated(known, chosen, rendezvous=rendezvous, sharing=sharing, routing=routed)
    return Simulation(figures=figures, timeline=timeline, machine=chosen, routing=routed)


def simulate_given(
    program: Program | str,
    times: GivenTimes | tuple[float, float, float, float] | str,
    *,
    rendezvous: bool = False,
) -> GivenTimesSimulation:
    """Simulate a step whose ops take given times, in any unit.

    `times` are `GivenTimes`, a file of them, or the tuple T_F, T_B, T_W and T_comm. Raises `DiagnosticError` if a file
    is wrong, or the times do not cover the program.
    """
    if isinstance(times, str):
        given = load_times(times)
    else:
        given = times if isinstance(times, GivenTimes) else GivenTimes.textbook(*times)
    if isinstance(program, str):
        from ratrain.ratrainc.compiling.building import load

        program = load(program)
    with paused_gc():
        timeline = given.run(program, rendezvous=rendezvous)
    return GivenTimesSimulation(figures=step_figures(timeline), timeline=timeline, times=given)


@frozen(repr=False)
class CoresStep(Shown):
    """The simulated duration of a step on cores that engines share."""

    seconds: float
    tokens_per_second: float
    cores: int | None
    """number of cores; None: all engines of all ranks take turns on one"""
    machine: Machine

    def parts(self) -> Iterator[Part]:
        """Yield a sentence."""
        where = "on one core" if self.cores is None else f"on {number_of(self.cores, 'shared core')}"
        yield (
            f"{self.seconds:.6g} s a step {where}, {self.tokens_per_second:,.0f} tokens/s (simulated on "
            f"{self.machine.name})"
        )

    def to_json(self) -> dict[str, object]:
        """Return the figures as `--json` prints them."""
        key = "one_core_step_seconds" if self.cores is None else "shared_cores_step_seconds"
        return {key: self.seconds, "tokens_per_second": self.tokens_per_second, "machine": self.machine.name}


def simulate_on_cores(program: Program | str, cores: int | None, *, machine: str | Machine | None = None) -> CoresStep:
    """Simulate a run on this machine's cores.

    With `cores` None, all engines of all ranks take turns on one core. With a number, each rank is a process of one
    thread, and the ranks share the cores. Raises `DiagnosticError` if `cores` is below 1.
    """
    if cores is not None and cores < 1:
        misuse("a step needs a core at least")
    known, chosen = program_and_machine(program, machine)
    seconds = one_core_step_seconds(known, chosen) if cores is None else shared_cores_step_seconds(known, chosen, cores)
    return CoresStep(seconds, known.plan.tokens_per_step / seconds, cores, chosen)


def explain_time(simulation: Simulation, *, stage: int | None = None, cold: bool = False) -> TimeReport:
    """Explain the time of a simulated step: idle time of engines by cause, and the critical path.

    `stage` adds a table of every engine of that stage. The step is a steady one, or the first with `cold`.
    """
    from ratrain.ratrainc.report.time_report import TimeReport

    check_stage(stage, len(simulation.program.stages))
    return TimeReport(simulation.timeline, simulation.figures, stage, cold)


def check_stage(stage: int | None, stages: int) -> None:
    """Raise `DiagnosticError` if there is no such stage; None is allowed."""
    if stage is not None and not 0 <= stage < stages:
        misuse(f"there is no stage {stage}: the stages are 0 to {stages - 1}")


@frozen
class WrittenReport:
    """A page or a picture that was written, and its bytes."""

    kind: Literal["page", "picture", "snapshot"]
    size: int
    """bytes"""


def report(simulation: StepSimulation, path: str) -> WrittenReport:
    """Write a simulation as an HTML page; its first step as a picture if the path ends in .svg.

    If it ends in .pickle, write the memory of all stages as a snapshot that PyTorch's memory viewer opens. None needs a
    network. Raises `DiagnosticError` RT002 if the file cannot be written. Given times make only pictures.
    """
    ending = Path(path).suffix.lower()
    if ending == ".svg":
        return WrittenReport("picture", simulation.picture().save(path))
    if not isinstance(simulation, Simulation):
        misuse("given times make a picture: name a file that ends with .svg")
    if ending == ".pickle":
        from ratrain.ratrainc.report.memory_snapshot import memories_of, write_snapshot

        return WrittenReport("snapshot", write_snapshot(memories_of(simulation.timeline), path))
    from ratrain.ratrainc.report.report_page import write_report

    written = write_report(simulation.timeline, simulation.figures, simulation.machine, path)
    return WrittenReport("page", written)


@frozen
class WrittenComparison:
    """A page that compares a program with a baseline, as written, and its bytes."""

    differences: Differences
    size: int
    """bytes"""

    def to_json(self) -> dict[str, object]:
        """Return the differences and bytes as `--json` prints them."""
        return {"kind": "comparison", "bytes": self.size, **self.differences.to_json()}


def report_against(
    simulation: Simulation, baseline: Simulation, path: str, *, names: tuple[str, str] = ("first", "second")
) -> WrittenComparison:
    """Write an HTML page with a simulation and its baseline on common axes, and their differences.

    Every change is the simulation's figure minus the baseline's. `names` name the simulation and the baseline.
    Raises `DiagnosticError` RT002 if the file cannot be written.
    """
    from ratrain.ratrainc.report.comparison_page import write_comparison
    from ratrain.ratrainc.report.program_differences import Side, differences_of

    own = Side(names[0], simulation.timeline, simulation.figures, simulation.machine)
    other = Side(names[1], baseline.timeline, baseline.figures, baseline.machine)
    differences = differences_of(own, other)
    return WrittenComparison(differences, write_comparison(own, other, differences, path))


def program_and_machine(program: Program | str, machine: str | Machine | None) -> tuple[Program, Machine]:
    """Return a program and its machine: the given one, else the one it was compiled for.

    A program given as a file is loaded and proved.
    """
    given = load_machine(machine) if isinstance(machine, str) else machine
    known = program if isinstance(program, Program) else sound_program(program, machine=given)
    return known, given or machine_of(known)

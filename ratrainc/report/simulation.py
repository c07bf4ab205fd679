"""Results of a simulation: figures, timeline and machine, with their tables and pictures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from ratrain.ratrainc.console.parts import Part, Shown, html_of
from ratrain.ratrainc.report.picture import boxes, step_picture
from ratrain.ratrainc.report.summary_tables import figures_parts, given_times_parts
from ratrain.targets.machine.machine import Machine
from ratrain.targets.machine.routing import BALANCED, Routing, dropped_share
from ratrain.targets.simulator.figures import Figures, StageFigures, StepFigures
from ratrain.targets.simulator.given_times import GivenTimes
from ratrain.targets.simulator.timeline import Timeline

if TYPE_CHECKING:
    from ratrain.ratrainc.report.svg import Picture
    from ratrain.targets.program.program import Program

MOST_BOXES = 20_000
"""Most passes of a timeline that a notebook draws without being asked."""


@frozen(repr=False)
class StepSimulation(Shown):
    """A simulated step; its ops were timed by a machine or by given times."""

    figures: StepFigures
    timeline: Timeline = field(eq=False)

    @property
    def program(self) -> Program:
        """The simulated program."""
        return self.timeline.program

    @property
    def step_seconds(self) -> float:
        """Duration of a steady step, in seconds or in the unit of the given times."""
        return self.figures.step_seconds

    @property
    def makespan_seconds(self) -> float:
        """Duration of the first step, from cold, in seconds or in the unit of the given times."""
        return self.figures.makespan_seconds

    @property
    def bubble_fraction(self) -> float:
        """The share of a steady step in which a compute engine is idle, over all stages."""
        return self.figures.bubble_fraction

    @property
    def stages(self) -> tuple[StageFigures, ...]:
        """The figures of each stage."""
        return self.figures.stages

    @property
    def unit(self) -> str:
        """Text behind a time; empty if the unit is unknown."""
        return ""

    def picture(self) -> Picture:
        """Draw the passes on the compute engine of each stage in the first step, from cold."""
        return step_picture(self.timeline, self.unit)

    def to_json(self) -> dict[str, Any]:
        """Return the figures as `--json` prints them."""
        return self.figures.to_json()

    def html(self) -> str:
        """Return the tables, and the timeline if it is not too large."""
        count = sum(len(boxes(self.timeline, stage)) for stage in range(len(self.program.stages)))
        drawn = self.picture().svg if count <= MOST_BOXES else html_of([f"picture() draws its {count:,} passes"])
        return html_of(self.parts()) + drawn


@frozen(repr=False)
class Simulation(StepSimulation):
    """A program's step on a machine. All figures are simulated."""

    figures: Figures
    machine: Machine = field(eq=False)
    routing: Routing | None = None
    """rows that experts get; None: as many each"""

    @property
    def tokens_per_second(self) -> float:
        """Throughput of all clusters together."""
        return self.figures.tokens_per_second

    @property
    def mfu(self) -> float:
        """Model operations (without recovery) a second, as a fraction of the FP16 peak of all clusters."""
        return self.figures.mfu

    @property
    def unit(self) -> str:
        """Text behind a time, which is in seconds."""
        return " s"

    def parts(self) -> Iterator[Part]:
        """Yield times and bytes of the stages and of a step."""
        return figures_parts(self.program, self.figures, self.machine, self.routing)

    def to_json(self) -> dict[str, Any]:
        """Return the figures as `--json` prints them."""
        routing = None if self.program.model.experts is None else self.routing.name if self.routing else BALANCED
        of_machine = {"machine": self.machine.name, "step_error": self.machine.step_error}
        dropped = dropped_share(self.routing, self.program.model, self.program.plan)
        return super().to_json() | of_machine | {"routing": routing, "dropped_rows": dropped}


@frozen(repr=False)
class GivenTimesSimulation(StepSimulation):
    """A program's step with given times, in their unit."""

    times: GivenTimes

    def parts(self) -> Iterator[Part]:
        """Yield times and bytes of the stages and of a step."""
        return given_times_parts(self.program, self.figures)

    def to_json(self) -> dict[str, Any]:
        """Return the figures as `--json` prints them."""
        return super().to_json() | {"times": dict(self.times.seconds)}

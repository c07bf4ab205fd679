"""What a simulation came to, with all that can be asked of it: figures, timeline, machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from ratrain.ratrainc.console.parts import Part, Shown, html_of
from ratrain.ratrainc.report.picture import boxes, step_picture
from ratrain.ratrainc.report.reports import figures_parts, given_times_parts
from ratrain.targets.machine.machine import Machine
from ratrain.targets.simulator.figures import Figures, StageFigures, StepFigures
from ratrain.targets.simulator.given_times import GivenTimes
from ratrain.targets.simulator.timeline import Timeline

if TYPE_CHECKING:
    from ratrain.ratrainc.report.svg import Picture
    from ratrain.targets.program.program import Program

MOST_BOXES = 20_000
"""Of a timeline that a notebook draws without being asked."""


@frozen(repr=False)
class StepSimulation(Shown):
    """A simulated step, whatever its ops were timed by."""

    figures: StepFigures
    timeline: Timeline = field(eq=False)

    @property
    def program(self) -> Program:
        """What was simulated."""
        return self.timeline.program

    @property
    def step_seconds(self) -> float:
        """Of a steady step; in the unit of the times it was made with."""
        return self.figures.step_seconds

    @property
    def makespan_seconds(self) -> float:
        """Of the first step, from cold."""
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
        """What times are in, behind a number."""
        return ""

    def picture(self) -> Picture:
        """What the compute engine of each stage does in the first step, from cold."""
        return step_picture(self.timeline, self.unit)

    def to_json(self) -> dict[str, Any]:
        """The figures as `--json` prints them."""
        return self.figures.to_json()

    def html(self) -> str:
        """The tables, and the timeline where it is not too large."""
        count = sum(len(boxes(self.timeline, stage)) for stage in range(len(self.program.stages)))
        drawn = self.picture().svg if count <= MOST_BOXES else html_of([f"picture() draws its {count:,} passes"])
        return html_of(self.parts()) + drawn


@frozen(repr=False)
class Simulation(StepSimulation):
    """A program's step on a machine. All figures are simulated."""

    figures: Figures
    machine: Machine = field(eq=False)

    @property
    def tokens_per_second(self) -> float:
        """Of all clusters together."""
        return self.figures.tokens_per_second

    @property
    def mfu(self) -> float:
        """Model operations (without recovery) a second, as a fraction of the FP16 peak of all clusters."""
        return self.figures.mfu

    @property
    def unit(self) -> str:
        """Times are in seconds."""
        return " s"

    def parts(self) -> Iterator[Part]:
        """Times and bytes of the stages, and of a step."""
        return figures_parts(self.program, self.figures, self.machine.name)

    def to_json(self) -> dict[str, Any]:
        """The figures as `--json` prints them."""
        return super().to_json() | {"machine": self.machine.name}


@frozen(repr=False)
class GivenTimesSimulation(StepSimulation):
    """A program's step with times that were given, in their unit."""

    times: GivenTimes

    def parts(self) -> Iterator[Part]:
        """Times and bytes of the stages, and of a step."""
        return given_times_parts(self.program, self.figures)

    def to_json(self) -> dict[str, Any]:
        """The figures as `--json` prints them."""
        return super().to_json() | {"times": dict(self.times.seconds)}

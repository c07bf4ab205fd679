"""Figures of a simulated step: seconds, tokens a second, MFU, idle and exposed time of each stage."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import fsum
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import field, frozen

from ratrain.ratrain_ir.model.trained_flops import trained_flops_per_token
from ratrain.ratrain_ir.ops.base import Engine
from ratrain.targets.machine.placement import placement_of
from ratrain.targets.machine.resource_work import Bandwidths, ResourceWork
from ratrain.targets.machine.store_cost import store_paths
from ratrain.targets.machine.timing import collective_names
from ratrain.targets.simulator.op_works import OpWorks, works_of
from ratrain.targets.simulator.progress import STEPS
from ratrain.targets.simulator.timed_run import UNLIMITED, simulate_works
from ratrain.targets.simulator.timeline import beyond_rounding

if TYPE_CHECKING:
    from ratrain.targets.machine.machine import Machine
    from ratrain.targets.machine.routing import Routing
    from ratrain.targets.program.program import Program
    from ratrain.targets.simulator.bubbles import Bubbles
    from ratrain.targets.simulator.timeline import Timeline


@frozen
class StageFigures:
    """Figures of one stage in one steady step. Seconds are of the compute engine."""

    busy_seconds: float
    idle_seconds: float
    peak_bytes: int
    arena_bytes: int
    index: int = field(eq=False, repr=False)
    _exposed_tail_of: Callable[[int], float] = field(eq=False, repr=False)

    @property
    def exposed_tail_seconds(self) -> float:
        """Idle seconds of the compute engine that this stage's GradSync, UpdateShard, PrefetchW and barriers cost."""
        return self._exposed_tail_of(self.index)


@frozen
class StepFigures:
    """Figures of a step that follow from its timeline alone, whatever its ops were timed by."""

    step_seconds: float
    makespan_seconds: float
    stages: tuple[StageFigures, ...]

    @property
    def bubble_fraction(self) -> float:
        """Share of a steady step in which compute engines are idle, the mean over all stages.

        For equal stages it is the bubble rate of Qi et al. (2023): (cost - M (T_F + T_B + T_W)) / cost.
        """
        return fsum(self.stage_bubble_fraction(stage) for stage in self.stages) / len(self.stages)

    def stage_bubble_fraction(self, stage: StageFigures) -> float:
        """Return the share of a steady step in which the compute engine of a stage is idle."""
        return stage.idle_seconds / self.step_seconds if self.step_seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the figures as `--json` prints them."""
        names = ("busy_seconds", "idle_seconds", "peak_bytes", "arena_bytes", "exposed_tail_seconds")
        return {
            "step_seconds": self.step_seconds,
            "makespan_seconds": self.makespan_seconds,
            "bubble_fraction": self.bubble_fraction,
            "stages": [
                {name: getattr(stage, name) for name in names} | {"bubble_fraction": self.stage_bubble_fraction(stage)}
                for stage in self.stages
            ],
        }


@frozen
class Figures(StepFigures):
    """Figures of a step simulated on a machine."""

    tokens_per_second: float
    mfu: float
    """Model operations (without recovery) a second, as a fraction of the FP16 peak of all clusters."""
    collectives: dict[str, list[str]]
    """by kind of collective, the names of the algorithms that its cost assumes"""

    def to_json(self) -> dict[str, Any]:
        """Return the figures as `--json` prints them."""
        return super().to_json() | {
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "collectives": self.collectives,
        }


def step_figures(timeline: Timeline) -> StepFigures:
    """Return the figures of a timeline."""
    seconds = timeline.step_seconds
    exposed_tail_of = _exposed_tails(timeline)
    stages = []
    for index, stage in enumerate(timeline.program.stages):
        busy = timeline.busy_seconds(index, Engine.COMPUTE)
        stages.append(
            StageFigures(
                busy,
                beyond_rounding(seconds - busy, seconds),
                stage.peak_live_bytes,
                stage.arena_bytes,
                index,
                exposed_tail_of,
            )
        )
    return StepFigures(seconds, timeline.makespan_seconds, tuple(stages))


def simulated(
    program: Program,
    machine: Machine,
    *,
    rendezvous: bool = False,
    sharing: bool = True,
    steps: int = STEPS,
    routing: Routing | None = None,
) -> tuple[Figures, Timeline]:
    """Simulate a program on a machine and return its figures and its timeline.

    Without `sharing`, each op takes the time it takes alone, as if DDR and links could carry any load. `routing` says
    how many rows experts get; None: as many each.
    """
    columns = program.columns()
    works, lone = works_of(program, columns, machine, routing)
    bandwidths = UNLIMITED
    if sharing:
        links = placement_of(program.plan, machine).link_levels()
        bandwidths = Bandwidths(machine["ddr_bandwidth"], links, machine.host_bandwidth, store_paths(machine))
    else:
        works = OpWorks([ResourceWork(work.seconds) for work in works.distinct], works.numbers)
    timeline = simulate_works(program, columns, works, bandwidths, rendezvous=rendezvous, steps=steps)
    step = step_figures(timeline)
    seconds = step.step_seconds
    plan = program.plan
    operations = trained_flops_per_token(program.model, plan) * plan.tokens_per_step
    mfu = operations / (seconds * machine["fp16_peak"] * plan.clusters) if seconds else 0.0
    tokens = plan.tokens_per_step / seconds if seconds else 0.0
    collectives = collective_names(lone, plan, machine)
    return Figures(seconds, step.makespan_seconds, step.stages, tokens, mfu, collectives), timeline


def _exposed_tails(timeline: Timeline) -> Callable[[int], float]:
    """Return a function from a stage's index to its exposed tail seconds.

    The walk over idle time runs at the first call only, because it has to be compiled.
    """

    @cache
    def bubbles() -> Bubbles:
        from ratrain.targets.simulator.bubbles import Bubbles

        return Bubbles(timeline)

    return lambda stage: bubbles().exposed_tail_seconds(stage)


def one_core_step_seconds(program: Program, machine: Machine) -> float:
    """Return the seconds of a step in which all engines of all ranks take turns on one core.

    The ordered local engine works so. Sums all ops and the interpreter's gap after each. On a machine with a table a
    collective counts a member's share for each member; on others a member's whole time, as each cluster has its own
    link.
    """
    columns = program.columns()
    taken = works_of(program, columns, machine)[0].seconds + machine.engine_gap
    streams = np.split(taken, columns.stream_stops[:-1])
    return sum(sum(stream.tolist()) for stream in streams) * program.topology.lanes


def shared_cores_step_seconds(program: Program, machine: Machine, cores: int) -> float:
    """Return the seconds of a step of ranks that are processes of one thread each and share `cores` cores, as over MPI.

    If there are more ranks than cores, each op takes longer by the machine's `core_sharing`, and runs on the core that
    is free first.
    """
    from ratrain.targets.simulator.rank_threads import threads_step_seconds

    seconds = works_of(program, program.columns(), machine)[0].seconds
    if program.plan.clusters > cores:
        seconds = seconds * (1 + machine.core_sharing)
    return threads_step_seconds(program, (seconds + machine.engine_gap).tolist(), cores)

"""Figures of a simulated step: seconds, tokens a second, MFU, idle and exposed time of each stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from math import fsum
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import field, frozen

from ratrain.ratrain_ir.model.blocks import parse_block
from ratrain.ratrain_ir.model.slice_plan import plan_of_piece
from ratrain.ratrain_ir.model.trained_flops import trained_flops_per_token
from ratrain.ratrain_ir.ops.base import ENGINES, Engine
from ratrain.targets.machine.placement import placement_of
from ratrain.targets.machine.resource_work import Bandwidths, ResourceWork
from ratrain.targets.machine.store_cost import store_paths
from ratrain.targets.machine.timing import TimedOp, collective_names, op_work, timed_op, under_routing
from ratrain.targets.program.columns import (
    ACCESS,
    ACCESSES,
    BLOCKS,
    GROUP,
    KEYWORD,
    OPERANDS,
    PEER,
    ROUTINE,
    Int64s,
    ProgramColumns,
    TensorForm,
    classes,
    classes_of_runs,
)
from ratrain.targets.simulator.op_works import OpWorks
from ratrain.targets.simulator.progress import STEPS
from ratrain.targets.simulator.timed_run import UNLIMITED, simulate_works
from ratrain.targets.simulator.timeline import beyond_rounding

if TYPE_CHECKING:
    from ratrain.ratrain_ir.model.blocks import Block
    from ratrain.targets.machine.machine import Machine
    from ratrain.targets.machine.routing import Routing
    from ratrain.targets.program.instruction import Instruction, ProgramTensor
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
    works, lone = _works(program, columns, machine, routing)
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


def _works(
    program: Program, columns: ProgramColumns, machine: Machine, routing: Routing | None = None
) -> tuple[OpWorks, list[TimedOp]]:
    """Return the works of a program's instructions, computed once a distinct one, and the ops without a routine."""
    known: dict[object, int] = {}
    lone: list[TimedOp] = []
    works: list[ResourceWork] = []
    kinds, firsts = _alike(columns, by_layer=routing is not None and routing.differs_by_layer)
    numbers = np.empty(len(firsts), np.int64)
    for kind, op in enumerate(firsts.tolist()):
        stage, engine = divmod(int(columns.streams[op]), len(ENGINES))
        item = columns.instruction(op)
        forms = columns.tensor_forms[columns.tensors_of(stage)]
        tensors = [columns.forms[forms[operand.tensor]] for operand in item.operands]
        timed = timed_instruction(program, stage, ENGINES[engine], item, tensors)
        if routing is not None and (owners := _blocks(item)) and owners[0].layer is not None:
            plan = plan_of_piece(program.plan, item.slice)
            timed = under_routing(timed, routing, owners[0].layer, program.model, plan, tensors)
        number = known.setdefault(timed if timed.routine is None else kind, len(works))
        if number == len(works):
            works.append(op_work(timed, program.plan, machine))
            lone += [timed] if timed.routine is None else []
        numbers[kind] = number
    return OpWorks(works, numbers[kinds]), lone


def _alike(columns: ProgramColumns, *, by_layer: bool = False) -> tuple[Int64s, Int64s]:
    """Return a number for each instruction, and the first instruction of each number.

    Instructions have one number if everything that their time depends on is equal; their blocks too with `by_layer`.
    """
    rows, engines = columns.instructions, columns.streams % len(ENGINES)
    calls = rows[:, ROUTINE] >= 0
    lone = np.flatnonzero(~calls)
    stages, peers = columns.streams[lone] // len(ENGINES), rows[lone, PEER]
    form = columns.tensor_forms[columns.operand_tensors].astype(np.int64) * len(ACCESSES) + columns.operands[:, ACCESS]
    numbers = np.empty(len(columns), np.int64)
    numbers[~calls], _ = classes(
        [
            rows[lone, GROUP],
            np.where(peers < 0, -1, np.minimum(stages, peers)),
            np.where(peers < 0, -1, np.maximum(stages, peers)),
            classes_of_runs(form, columns.operand_stops[lone], rows[lone, OPERANDS]),
            classes_of_runs(columns.blocks, columns.block_stops[lone], rows[lone, BLOCKS]),
        ]
    )
    numbers[calls] = rows[calls, ROUTINE]
    same = calls.astype(np.int64), rows[:, KEYWORD], engines, numbers
    blocks = [classes_of_runs(columns.blocks, columns.block_stops, rows[:, BLOCKS])] if by_layer else []
    return classes([*same, *blocks])


def timed_instruction(
    program: Program,
    stage: int,
    engine: Engine,
    instruction: Instruction,
    tensors: Sequence[ProgramTensor | TensorForm] | None = None,
) -> TimedOp:
    """Return everything that the time of an instruction depends on.

    `tensors` are its operands' tensors; they can be given where the stage's list of tensors need not be built.
    """
    routine = None if instruction.routine is None else program.routines[instruction.routine]
    if tensors is None:
        tensors = [program.stages[stage].tensors[operand.tensor] for operand in instruction.operands]
    accesses = [operand.access for operand in instruction.operands]
    ends = None if instruction.peer is None else (stage, instruction.peer)
    fields = instruction.keyword, instruction.group, engine
    operands = zip(tensors, accesses, strict=True)
    plan = plan_of_piece(program.plan, instruction.slice)
    return timed_op(program.model, plan, *fields, routine, operands, ends, _blocks(instruction))


def _blocks(instruction: Instruction) -> list[Block]:
    return [owner for name in instruction.blocks if (owner := parse_block(name)) is not None]


def one_core_step_seconds(program: Program, machine: Machine) -> float:
    """Return the seconds of a step in which all engines of all ranks take turns on one core.

    The ordered local engine works so. Sums all ops and the interpreter's gap after each. On a machine with a table a
    collective counts a member's share for each member; on others a member's whole time, as each cluster has its own
    link.
    """
    columns = program.columns()
    taken = _works(program, columns, machine)[0].seconds + machine.engine_gap
    streams = np.split(taken, columns.stream_stops[:-1])
    return sum(sum(stream.tolist()) for stream in streams) * program.topology.lanes


def shared_cores_step_seconds(program: Program, machine: Machine, cores: int) -> float:
    """Return the seconds of a step of ranks that are processes of one thread each and share `cores` cores, as over MPI.

    If there are more ranks than cores, each op takes longer by the machine's `core_sharing`, and runs on the core that
    is free first.
    """
    from ratrain.targets.simulator.rank_threads import threads_step_seconds

    seconds = _works(program, program.columns(), machine)[0].seconds
    if program.plan.clusters > cores:
        seconds = seconds * (1 + machine.core_sharing)
    return threads_step_seconds(program, (seconds + machine.engine_gap).tolist(), cores)

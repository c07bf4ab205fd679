"""Simulated times of a program on an MT-3000-like machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from ratrain_ir.ops import Engine
from ratrain_ir.types import StateKind
from targets.mt3000.timing import TimedOp, op_seconds
from targets.program import Access, Instruction, Program, ProgramStage
from targets.simulator import DurationOf, Timeline, simulate

if TYPE_CHECKING:
    from ratrain_ir.frontend.model_config import ModelConfig
    from targets.mt3000.machine import Machine


@frozen
class StageFigures:
    """One stage in one steady step. Seconds are of the compute engine."""

    busy_seconds: float
    idle_seconds: float
    peak_bytes: int
    arena_bytes: int
    exposed_tail_seconds: float
    """idle time of the compute engine that ends with a wait for a collective or an update: GradSync, UpdateShard, PrefetchW"""


@frozen
class Figures:
    """What a simulation says; every number is simulated."""

    step_seconds: float
    makespan_seconds: float
    tokens_per_second: float
    mfu: float
    """Model operations (without recovery) a second, as a fraction of the FP16 peak of all clusters."""
    stages: tuple[StageFigures, ...]


def simulated(program: Program, machine: Machine, *, rendezvous: bool = False) -> tuple[Figures, Timeline]:
    """Figures and timeline of a program on a machine."""
    timeline = simulate(program, durations(program, machine), rendezvous=rendezvous)
    seconds = timeline.step_seconds
    plan = program.plan
    operations = model_flops_per_token(program.model, plan.seq_len) * plan.tokens_per_step
    stages = []
    for index, stage in enumerate(program.stages):
        busy = timeline.busy_seconds(index, Engine.COMPUTE)
        tail = timeline.exposed_tail_seconds(index)
        stages.append(StageFigures(busy, seconds - busy, stage.peak_live_bytes, stage.arena_bytes, tail))
    mfu = operations / (seconds * machine["fp16_peak"] * plan.clusters) if seconds else 0.0
    tokens = plan.tokens_per_step / seconds if seconds else 0.0
    return Figures(seconds, timeline.makespan_seconds, tokens, mfu, tuple(stages)), timeline


def durations(program: Program, machine: Machine) -> DurationOf:
    """Seconds of each instruction, computed once a distinct one."""
    known: dict[tuple[object, ...], float] = {}

    def seconds(stage: int, instruction: Instruction) -> float:
        timed = _timed(program, program.stages[stage], instruction)
        key = (timed.keyword, timed.group, instruction.routine, timed.payload_bytes, timed.updated_parameters)
        if key not in known:
            known[key] = op_seconds(timed, program.plan, machine)
        return known[key]

    return seconds


_WRITTEN_PAYLOAD = ("all_gather", "load_input", "recv")


def _timed(program: Program, stage: ProgramStage, instruction: Instruction) -> TimedOp:
    routine = None if instruction.routine is None else program.routines[instruction.routine]
    if routine is not None:
        return TimedOp(instruction.keyword, "", routine, 0, 0)
    accesses = (Access.WRITE,) if instruction.keyword in _WRITTEN_PAYLOAD else (Access.READ, Access.UPDATE)
    payload = parameters = 0
    for operand in instruction.operands:
        tensor = stage.tensors[operand.tensor]
        if operand.access in accesses and tensor.kind is not StateKind.SCALAR:
            payload += tensor.type.nbytes
        if operand.access is Access.UPDATE and tensor.kind is StateKind.MASTER:
            parameters += tensor.type.elements
    return TimedOp(instruction.keyword, instruction.group, None, payload, parameters)


def model_flops_per_token(model: ModelConfig, seq_len: int) -> float:
    """Operations training needs for one token, forward and backward: 6 a matrix weight, and causal attention."""
    window = min(model.sliding_window or seq_len, seq_len)
    visible = (window * (window + 1) / 2 + (seq_len - window) * window) / seq_len
    attention = 3 * 4 * visible * model.heads * model.head_dim * model.layers
    q_width, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
    layer = model.hidden_size * (2 * q_width + 2 * kv_width + 3 * model.ffn_size)
    return 6.0 * (model.layers * layer + model.vocab_size * model.hidden_size) + attention

"""Emission: an allocated module becomes a program, one stream of instructions an engine, with reduced waits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain_ir.analysis.dependence import Wait, stage_waits
from ratrain_ir.analysis.lifetime import lifetimes
from ratrain_ir.diagnostics import fail
from ratrain_ir.module import Level, Module, Stage
from ratrain_ir.ops import (
    AllGather,
    AllReduce,
    AllReduceScalar,
    Backward,
    Engine,
    Forward,
    LoadInput,
    Op,
    Recompute,
    Recv,
    ReduceScatter,
    Release,
    Send,
    Tensor,
    Update,
)
from ratrain_ir.signatures import bind
from targets.program import Access, CountWait, Instruction, Operand, Program, ProgramStage, ProgramTensor

if TYPE_CHECKING:
    from targets.mt3000.target import Mt3000Target
    from targets.routine import Routine


def emit(module: Module, target: Mt3000Target) -> Program:
    """The program of a module.

    Raises `DiagnosticError` RT026 unless the module is allocated.
    """
    if module.level is not Level.ALLOCATED or module.target is None:
        message = f"only an allocated module can be emitted; this one is at level {module.level.value}"
        fail("RT026", message, help="run the pass 'allocate-ddr' first, for example with 'ratrainc opt'")
    routines: dict[str, Routine] = {}
    stages = [_StageEmission(module, stage, target, routines).emit() for stage in module.stages]
    return Program(
        module.name,
        module.model,
        module.plan,
        module.target.name,
        module.target.capacity_bytes,
        module.pipeline,
        list(routines.values()),
        stages,
    )


class _StageEmission:
    """Emits one stage."""

    def __init__(self, module: Module, stage: Stage, target: Mt3000Target, routines: dict[str, Routine]) -> None:
        self.module = module
        self.stage = stage
        self.target = target
        self.routines = routines
        self.numbers = {key: number for number, key in enumerate(routines)}
        self.index = {tensor: index for index, tensor in enumerate(stage.tensors.values())}

    def emit(self) -> ProgramStage:
        result = ProgramStage([_program_tensor(t) for t in self.stage.tensors.values()])
        result.peak_live_bytes = lifetimes(self.stage).peak_bytes
        counts: dict[int, int] = {}
        """Position in the list to number within its engine's stream, from 1."""
        number: dict[Engine, int] = {}
        for position, op in enumerate(self.stage.ops):
            if type(op) is not Release:
                number[op.engine] = counts[position] = number.get(op.engine, 0) + 1
        for op, waits in zip(self.stage.ops, stage_waits(self.stage), strict=True):
            if type(op) is not Release:
                result.streams[op.engine].append(self.instruction(op, waits, counts))
        return result

    def instruction(self, op: Op, waits: tuple[Wait, ...], counts: dict[int, int]) -> Instruction:
        binding = bind(op, self.module.model, self.module.plan)
        accesses = dict.fromkeys(op.reads, Access.READ)
        accesses |= dict.fromkeys(op.writes, Access.WRITE) | dict.fromkeys(op.updates, Access.UPDATE)
        operands = [Operand(role, self.index[t], accesses[t]) for role, t in binding.tensors.items()]
        operands += [Operand("workspace", self.index[t], Access.SCRATCH) for t in op.scratch]
        return Instruction(
            keyword=op.keyword,
            routine=self.routine(op),
            micro_batch=getattr(op, "micro_batch", None),
            peer=op.peer if isinstance(op, Send | Recv) else None,
            variant=_variant(op),
            group=_group(op),
            blocks=_blocks(op),
            accumulates=binding.accumulates,
            operands=tuple(operands),
            waits=tuple(CountWait(w.engine, counts[w.position], w.previous_step) for w in waits),
        )

    def routine(self, op: Op) -> int | None:
        if not isinstance(op, Forward | Recompute | Backward):
            return None
        routine = self.target.routine(self.module, op)
        self.routines.setdefault(routine.key, routine)
        return self.numbers.setdefault(routine.key, len(self.numbers))


def _program_tensor(tensor: Tensor) -> ProgramTensor:
    assert tensor.offset is not None
    return ProgramTensor(tensor.name, tensor.kind, tensor.type, tensor.carried, tensor.offset)


def _variant(op: Op) -> str:
    if isinstance(op, Send | Recv):
        return op.payload.value
    if isinstance(op, LoadInput):
        return op.part.value
    return op.quantity.value if isinstance(op, AllReduceScalar) else ""


def _group(op: Op) -> str:
    if isinstance(op, AllReduce | AllReduceScalar):
        return op.group.value
    return "replicas" if isinstance(op, ReduceScatter | AllGather) else ""


def _blocks(op: Op) -> tuple[str, ...]:
    if isinstance(op, Forward | Recompute | Backward | Update):
        return (str(op.block),)
    return tuple(map(str, op.blocks)) if isinstance(op, ReduceScatter | AllReduce | AllGather) else ()

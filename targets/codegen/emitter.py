"""Emission: an allocated module becomes a program, one stream of instructions an engine, with reduced waits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ratrain.ratrain_ir.analysis.dependence import Wait, stage_waits
from ratrain.ratrain_ir.analysis.lifetime import lifetimes
from ratrain.ratrain_ir.diagnostics import Diagnostics, fail
from ratrain.ratrain_ir.module import Level, Module, Stage
from ratrain.ratrain_ir.ops import (
    BlockOp,
    Engine,
    Op,
    Release,
    Tensor,
)
from ratrain.ratrain_ir.signatures import bind
from ratrain.ratrain_ir.target import Target
from ratrain.ratrain_ir.verifier.report import Reporter
from ratrain.ratrain_ir.verifier.workspace import check_op_workspace
from ratrain.targets.program.lifting import stored_fields, stored_operands
from ratrain.targets.program.program import CountWait, Instruction, Program, ProgramStage, ProgramTensor

if TYPE_CHECKING:
    from ratrain.targets.program.routine import Routine


class EmittingTarget(Target, Protocol):
    """What emission asks of a target beside what passes ask."""

    def routine(self, module: Module, op: BlockOp) -> Routine:
        """The kernels that a block op calls."""
        ...


def emit(module: Module, target: EmittingTarget) -> Program:
    """The program of a module.

    Raises `DiagnosticError` RT026 unless the module is allocated, RT025 where workspace is missing.
    """
    if module.level is not Level.ALLOCATED or module.target is None:
        message = f"only an allocated module can be emitted; this one is at level {module.level.value}"
        fail("RT026", message, help="run the pass 'allocate-ddr' first, for example with 'ratrainc opt'")
    routines: dict[str, Routine] = {}
    report = Reporter(module, Diagnostics())
    stages = [_StageEmission(module, stage, target, routines, report).emit() for stage in module.stages]
    report.diagnostics.check()
    return Program(
        module.name,
        module.model,
        module.plan,
        module.target.name,
        module.target.capacity_bytes,
        module.pipeline,
        list(routines.values()),
        stages,
        module.target.digest,
        module.target.machine,
        module.target.stores,
    )


class _StageEmission:
    """Emits one stage."""

    def __init__(
        self, module: Module, stage: Stage, target: EmittingTarget, routines: dict[str, Routine], report: Reporter
    ) -> None:
        self.module = module
        self.stage = stage
        self.target = target
        self.routines = routines
        self.report = report
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
        check_op_workspace(self.module, self.stage, op, self.target, self.report)
        binding = bind(op, self.module.model, self.module.plan)
        fields = stored_fields(op)
        return Instruction(
            keyword=op.keyword,
            routine=self.routine(op),
            micro_batch=fields.micro_batch,
            peer=fields.peer,
            variant=fields.variant,
            group=fields.group,
            blocks=fields.blocks,
            accumulates=binding.accumulates,
            operands=stored_operands(op, binding, self.index),
            waits=tuple(CountWait(w.engine, counts[w.position], w.previous_step) for w in waits),
            blocking=fields.blocking,
            chunk=fields.chunk,
            slice=fields.slice,
        )

    def routine(self, op: Op) -> int | None:
        if not isinstance(op, BlockOp):
            return None
        routine = self.target.routine(self.module, op)
        self.routines.setdefault(routine.key, routine)
        return self.numbers.setdefault(routine.key, len(self.numbers))


def _program_tensor(tensor: Tensor) -> ProgramTensor:
    assert tensor.offset is not None
    return ProgramTensor(tensor.name, tensor.kind, tensor.type, tensor.carried, tensor.offset, tensor.home)

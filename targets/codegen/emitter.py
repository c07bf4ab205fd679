"""Emission: an allocated module becomes a program, one stream of instructions an engine, with reduced waits."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Protocol

from attrs import define, evolve, field, frozen

from ratrain.ratrain_ir.analysis.dependence import Wait, stage_waits
from ratrain.ratrain_ir.analysis.lifetime import lifetimes
from ratrain.ratrain_ir.diagnostics import Diagnostics, fail
from ratrain.ratrain_ir.module import Level, Module, Stage
from ratrain.ratrain_ir.ops import (
    FIELDS,
    BlockOp,
    Engine,
    Op,
    Release,
    Tensor,
)
from ratrain.ratrain_ir.signatures import bind
from ratrain.ratrain_ir.target import Target
from ratrain.ratrain_ir.types import StateKind
from ratrain.ratrain_ir.verifier.report import Reporter
from ratrain.ratrain_ir.verifier.workspace import check_op_workspace
from ratrain.targets.program.instruction import (
    Access,
    CountWait,
    Instruction,
    Operand,
    ProgramTensor,
    bound_operands,
)
from ratrain.targets.program.lifting import StoredFields, stored_fields, stored_operands
from ratrain.targets.program.program import Program, ProgramStage
from ratrain.targets.program.routine import Routine

if TYPE_CHECKING:
    from collections.abc import Callable


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
    common = _Emission(module, target, Reporter(module, Diagnostics()))
    stages = [_StageEmission(common, stage).emit() for stage in module.stages]
    common.report.diagnostics.check()
    return Program(
        module.name,
        module.model,
        module.plan,
        module.target.name,
        module.target.capacity_bytes,
        module.pipeline,
        list(common.routines.values()),
        stages,
        module.target.digest,
        module.target.machine,
        module.target.stores,
    )


def without_reuse(program: Program, module: Module) -> Program:
    """The program of a module as if no bytes were used twice: the same instructions, fewer waits. It can be timed, not run."""
    stages = []
    for emitted, stage in zip(program.stages, module.stages, strict=True):
        counts = _counts(stage)
        taken = {engine: iter(stream) for engine, stream in emitted.streams.items()}
        apart = ProgramStage(emitted.tensors, peak_live_bytes=emitted.peak_live_bytes)
        for op, waits in zip(stage.ops, stage_waits(stage, reuse=False), strict=True):
            if type(op) is not Release:
                apart.streams[op.engine].append(evolve(next(taken[op.engine]), waits=_count_waits(waits, counts)))
        stages.append(apart)
    return evolve(program, stages=stages)


def _counts(stage: Stage) -> dict[int, int]:
    """Position in the list to number within its engine's stream, from 1."""
    counts: dict[int, int] = {}
    number: dict[Engine, int] = {}
    for position, op in enumerate(stage.ops):
        if type(op) is not Release:
            number[op.engine] = counts[position] = number.get(op.engine, 0) + 1
    return counts


def _count_waits(waits: tuple[Wait, ...], counts: dict[int, int]) -> tuple[CountWait, ...]:
    return tuple([CountWait(wait.engine, counts[wait.position], wait.previous_step) for wait in waits])


@frozen
class _Form:
    """What the instructions of ops have in common that differ in micro-batch, peer and addresses alone."""

    fields: StoredFields
    """those of one of them"""
    has_micro_batch: bool
    has_peer: bool
    roles: tuple[str, ...]
    """of what is read, then written, then updated; empty where one tensor is two of these"""
    accesses: tuple[Access, ...]
    """of the same"""
    accumulates: bool
    routine: int | None
    workspace_bytes: int
    """that they need"""


@define(eq=False)
class _Emission:
    """What the stages of a module share. All of an instruction that `_Form` has is asked for once."""

    module: Module
    target: EmittingTarget
    report: Reporter
    routines: dict[str, Routine] = field(factory=dict)
    numbers: dict[str, int] = field(factory=dict)
    forms: dict[object, _Form] = field(factory=dict)
    tensor_forms: dict[object, int] = field(factory=dict)

    def form_of_tensor(self, tensor: Tensor) -> int:
        """Equal for tensors that an op has as the same operand."""
        slot = tensor.slot if tensor.kind is StateKind.SAVED else None
        return self.tensor_forms.setdefault((tensor.kind, tensor.type, tensor.home, slot), len(self.tensor_forms))

    def form(self, op: Op, key: object) -> _Form:
        """The form of an op, by its key."""
        known = self.forms.get(key)
        if known is None:
            known = self.forms[key] = self.made(op)
        return known

    def made(self, op: Op) -> _Form:
        binding = bind(op, self.module.model, self.module.plan)
        tensors = op.reads + op.writes + op.updates
        names = {attribute.name for attribute in FIELDS[type(op)]}
        accesses = [Access.READ] * len(op.reads) + [Access.WRITE] * len(op.writes) + [Access.UPDATE] * len(op.updates)
        is_plain = tuple(binding.tensors.values()) == tensors and len(set(tensors)) == len(tensors)
        request = self.target.workspace(self.module, op)
        return _Form(
            stored_fields(op),
            "micro_batch" in names,
            "peer" in names,
            tuple(binding.tensors) if is_plain else (),
            tuple(accesses),
            binding.accumulates,
            self.routine(op),
            0 if request is None else request.nbytes,
        )

    def routine(self, op: Op) -> int | None:
        if not isinstance(op, BlockOp):
            return None
        routine = self.target.routine(self.module, op)
        self.routines.setdefault(routine.key, routine)
        return self.numbers.setdefault(routine.key, len(self.numbers))


def _key_of(kind: type[Op]) -> Callable[[Op], object]:
    """Reads off an op of a kind what its form depends on beside its operands."""
    names = [attribute.name for attribute in FIELDS[kind] if attribute.name not in ("micro_batch", "peer")]
    return attrgetter(*names) if names else lambda _: None


_KEYS = {kind: _key_of(kind) for kind in FIELDS}


class _StageEmission:
    """Emits one stage."""

    def __init__(self, common: _Emission, stage: Stage) -> None:
        self.common = common
        self.stage = stage
        self.index = {tensor: index for index, tensor in enumerate(stage.tensors.values())}
        self.form_of = {tensor: common.form_of_tensor(tensor) for tensor in stage.tensors.values()}.__getitem__

    def emit(self) -> ProgramStage:
        result = ProgramStage([_program_tensor(t) for t in self.stage.tensors.values()])
        result.peak_live_bytes = lifetimes(self.stage).peak_bytes
        counts = _counts(self.stage)
        for op, waits in zip(self.stage.ops, stage_waits(self.stage), strict=True):
            if type(op) is not Release:
                result.streams[op.engine].append(self.instruction(op, waits, counts))
        return result

    def instruction(self, op: Op, waits: tuple[Wait, ...], counts: dict[int, int]) -> Instruction:
        common, form_of, index = self.common, self.form_of, self.index
        groups = op.reads, op.writes, op.updates
        key = (type(op), _KEYS[type(op)](op), *(tuple(map(form_of, tensors)) for tensors in groups))
        form = common.form(op, key)
        if sum(tensor.type.nbytes for tensor in op.scratch) < form.workspace_bytes:
            check_op_workspace(common.module, self.stage, op, common.target, common.report)
        tensors = op.reads + op.writes + op.updates
        if form.roles and len(set(tensors)) == len(tensors):
            operands = bound_operands(form.roles, map(index.__getitem__, tensors), form.accesses)
            operands += [Operand("workspace", index[tensor], Access.SCRATCH) for tensor in op.scratch]
            bound = tuple(operands)
        else:
            bound = stored_operands(op, bind(op, common.module.model, common.module.plan), index)
        fields = form.fields
        return Instruction(
            keyword=op.keyword,
            routine=form.routine,
            micro_batch=op.micro_batch if form.has_micro_batch else None,  # type: ignore[attr-defined]
            peer=op.peer if form.has_peer else None,  # type: ignore[attr-defined]
            variant=fields.variant,
            group=fields.group,
            blocks=fields.blocks,
            accumulates=form.accumulates,
            operands=bound,
            waits=_count_waits(waits, counts),
            blocking=fields.blocking,
            chunk=fields.chunk,
            slice=fields.slice,
        )


def _program_tensor(tensor: Tensor) -> ProgramTensor:
    assert tensor.offset is not None
    return ProgramTensor(tensor.name, tensor.kind, tensor.type, tensor.carried, tensor.offset, tensor.home)

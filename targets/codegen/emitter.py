"""Emission: turn an allocated module into a program with one stream of instructions an engine and reduced waits.

    @1: recv m0; forward m0; send m0     ->     recv:    recv m0
                                                compute: forward m0   (waits: recv 1)
                                                send:    send m0      (waits: compute 1)

A program is made as columns (`targets/program/columns.py`). Ops that differ in micro-batch, peer and addresses alone
have one form, which is computed once: the cost is linear in ops and operands, plus the reduction of waits.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Protocol

import numpy as np
from attrs import define, evolve, field

from ratrain.ratrain_ir.analysis.dependence import ops_as_numbers
from ratrain.ratrain_ir.analysis.dependence_sweep import NONE
from ratrain.ratrain_ir.analysis.lifetime import lifetimes
from ratrain.ratrain_ir.config.types import Home, StateKind, TensorType
from ratrain.ratrain_ir.module import Level, Module, Stage
from ratrain.ratrain_ir.ops.compute import BlockOp, Release
from ratrain.ratrain_ir.ops.kinds import FIELDS
from ratrain.ratrain_ir.ops.numbering import Numbers
from ratrain.ratrain_ir.ops.signatures import operand_roles
from ratrain.ratrain_ir.support.diagnostics import Diagnostics, fail
from ratrain.ratrain_ir.target import Target
from ratrain.ratrain_ir.verifier.reporter import Reporter
from ratrain.ratrain_ir.verifier.workspace import check_op_workspace
from ratrain.targets.codegen.emitted_columns import EmittedStage, Form, Streams, emitted_columns
from ratrain.targets.program.columns import WAITS, ProgramColumns, TensorForm, number_or_none
from ratrain.targets.program.lifting import stored_fields
from ratrain.targets.program.program import Program, ProgramStage
from ratrain.targets.program.routine import Routine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ratrain.ratrain_ir.ops.base import Op
    from ratrain.ratrain_ir.ops.tensor import Tensor


class EmittingTarget(Target, Protocol):
    """A target as emission sees it: a pass's target that also gives routines."""

    def routine(self, module: Module, op: BlockOp) -> Routine:
        """Return the kernels that a block op calls."""
        ...


def emit(module: Module, target: EmittingTarget) -> Program:
    """Return the program of a module.

    Raises `DiagnosticError` RT026 unless the module is allocated, RT025 where workspace is missing.
    """
    if module.level is not Level.ALLOCATED or module.target is None:
        message = f"only an allocated module can be emitted; this one is at level {module.level.value}"
        fail("RT026", message, help="run the pass 'allocate-ddr' first, for example with 'ratrainc opt'")
    common = _Emission(module, target, Reporter(module, Diagnostics()))
    emitted = [common.emitted(stage) for stage in module.stages]
    common.report.diagnostics.check()
    return Program(
        module.name,
        module.model,
        module.plan,
        module.target.name,
        module.target.capacity_bytes,
        module.pipeline,
        list(common.routines.values()),
        _stages(common.columns(emitted), [lifetimes(stage).peak_bytes for stage in module.stages]),
        module.target.digest,
        module.target.machine,
        module.target.stores,
    )


def without_reuse(program: Program, module: Module) -> Program:
    """Return the program of a module as if no bytes were used twice: the same instructions with fewer waits.

    It can be timed, not run.
    """
    columns = program.columns()
    found = []
    for stage in module.stages:
        numbers = ops_as_numbers(stage, reuse=False)
        found.append(Streams.of(numbers).waits(numbers))
    instructions = columns.instructions.copy()
    instructions[:, WAITS] = np.concatenate([counts for counts, _ in found])
    apart = evolve(columns, instructions=instructions, waits=np.concatenate([rows for _, rows in found]))
    return evolve(program, stages=_stages(apart, [stage.peak_live_bytes for stage in program.stages]))


def _stages(columns: ProgramColumns, peaks: Iterable[int]) -> list[ProgramStage]:
    return [ProgramStage.of_columns(columns, number, peak) for number, peak in enumerate(peaks)]


@define(eq=False)
class _Emission:
    """State shared by the stages of a module. Everything in a `Form` is computed once."""

    module: Module
    target: EmittingTarget
    report: Reporter
    routines: dict[str, Routine] = field(factory=dict)
    numbers: dict[str, int] = field(factory=dict)
    forms: dict[object, int] = field(factory=dict)
    made: list[Form] = field(factory=list)
    """forms by number"""
    tensor_forms: Numbers[tuple[StateKind, TensorType, bool, Home, str | None]] = field(factory=Numbers)
    """forms of tensors that an op can have as the same operand"""

    def emitted(self, stage: Stage) -> EmittedStage:
        """Return a stage as numbers; report where workspace is missing."""
        tensors = list(stage.tensors.values())
        form_of = self.tensor_forms.__getitem__
        tensor_forms = [
            form_of((t.kind, t.type, t.carried, t.home, t.slot if t.kind is StateKind.SAVED else None)) for t in tensors
        ]
        index = dict(zip(tensors, range(len(tensors)), strict=True))
        numbers = ops_as_numbers(stage)
        own = list(map(index.__getitem__, numbers.tensors))
        operands = list(map(own.__getitem__, numbers.swept.tensors))
        operand_forms = list(map(tensor_forms.__getitem__, operands))
        bounds, forms, made = numbers.swept.bounds, self.forms, self.made
        found: list[int] = []
        micro_batches: list[int] = []
        peers: list[int] = []
        first = 0
        for position, op in enumerate(stage.ops):
            kind = type(op)
            if kind is Release:
                found.append(NONE)
                micro_batches.append(NONE)
                peers.append(NONE)
                continue
            read, updated, written, end = bounds[4 * position : 4 * position + 4]
            key_of, has_micro_batch, has_peer = _KEYS[kind]
            # Ops with equal fields, equal numbers of reads and updates, and operands of equal forms have one `Form`.
            key = kind, key_of(op), read - first, updated - read, tuple(operand_forms[first:written])
            number = forms.get(key)
            if number is None:
                number = forms[key] = len(made)
                made.append(self.form(op))
            form = made[number]
            if form.workspace_bytes and sum(tensor.type.nbytes for tensor in op.scratch) < form.workspace_bytes:
                check_op_workspace(self.module, stage, op, self.target, self.report)
            found.append(number)
            micro_batches.append(number_or_none(op.micro_batch) if has_micro_batch else NONE)  # type: ignore[attr-defined]
            peers.append(number_or_none(op.peer) if has_peer else NONE)  # type: ignore[attr-defined]
            first = end
        streams = Streams.of(numbers)
        return EmittedStage(
            streams,
            streams.waits(numbers),
            np.array(bounds, np.int32).reshape(-1, 4),
            np.array(found, np.int32),
            np.array(micro_batches, np.int32),
            np.array(peers, np.int32),
            np.array(operands, np.int32),
            np.array(tensor_forms, np.int32),
            np.array([_offset(tensor) for tensor in tensors], np.int64),
            [tensor.name for tensor in tensors],
        )

    def form(self, op: Op) -> Form:
        """Return the form of an op."""
        roles, accumulates = operand_roles(op, self.module.model, self.module.plan)
        request = self.target.workspace(self.module, op)
        workspace = 0 if request is None else request.nbytes
        return Form(stored_fields(op), op.keyword, roles, accumulates, self.routine(op), workspace)

    def routine(self, op: Op) -> int | None:
        if not isinstance(op, BlockOp):
            return None
        routine = self.target.routine(self.module, op)
        self.routines.setdefault(routine.key, routine)
        return self.numbers.setdefault(routine.key, len(self.numbers))

    def columns(self, stages: Sequence[EmittedStage]) -> ProgramColumns:
        """Return the columns of stages that were emitted."""
        plan = self.module.plan
        forms = [TensorForm(*form[:-1]) for form in self.tensor_forms]
        return emitted_columns(stages, self.made, forms, plan.shape.slices if plan.slices else 0)


def _key_of(kind: type[Op]) -> tuple[Callable[[Op], object], bool, bool]:
    """Return a reader of the fields that an op's form depends on, and whether ops have a micro-batch and a peer.

    Micro-batch and peer are not among these fields.
    """
    names = [attribute.name for attribute in FIELDS[kind]]
    others = [name for name in names if name not in ("micro_batch", "peer")]
    return attrgetter(*others) if others else lambda _: None, "micro_batch" in names, "peer" in names


_KEYS = {kind: _key_of(kind) for kind in FIELDS}


def _offset(tensor: Tensor) -> int:
    assert tensor.offset is not None
    return tensor.offset

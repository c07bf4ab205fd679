"""Calls of routines: an instruction that needs a routine calls the one that is derived for its op, and fits it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define, field

from ratrain.ratrain_ir.config.tensor_ranks import rank_model
from ratrain.ratrain_ir.model.blocks import parameters, parse_block
from ratrain.ratrain_ir.ops.compute import BLOCK_OPS
from ratrain.ratrain_ir.support.diagnostics import Diagnostics
from ratrain.targets.codegen.context_routines import ALL_HEADS, Heads
from ratrain.targets.codegen.derivation import derivation_problem, form_of
from ratrain.targets.codegen.routines import representative
from ratrain.targets.program.instruction import Access
from ratrain.targets.program.program import Program
from ratrain.targets.verifier.routine_verifier import routine_problem

if TYPE_CHECKING:
    from ratrain.targets.program.instruction import Instruction
    from ratrain.targets.program.program import ProgramStage

_CALLS_ROUTINE = frozenset(kind.keyword for kind in BLOCK_OPS)


@define
class RoutineCalls:
    """Checker of calls of routines; each distinct call is checked once."""

    program: Program
    diagnostics: Diagnostics
    _known: set[tuple[object, ...]] = field(factory=set)
    called: set[int] = field(factory=set)
    """numbers of the routines that are called"""

    def check(self, index: int, stage: ProgramStage, instruction: Instruction) -> None:
        """Report RT080 unless an instruction of a stage calls a routine that fits it, where it needs one."""
        number = instruction.routine
        needs_routine = instruction.keyword in _CALLS_ROUTINE
        if needs_routine != (number is not None):
            problem: str | None = "it must call a routine" if needs_routine else "it cannot call a routine"
        elif number is None:
            return
        else:
            self.called.add(number)
            problem = self._problem(stage, instruction, number)
        if problem is not None:
            self.diagnostics.error("RT080", f"stage @{index}, '{instruction.title}': {problem}")

    def _problem(self, stage: ProgramStage, instruction: Instruction, number: int) -> str | None:
        """Explain what is wrong with a call; None if nothing is, or if an equal call was checked before."""
        routine = self.program.routines[number]
        block = parse_block(instruction.blocks[0])
        assert block is not None  # lifting reports what is none
        bound = {operand.role: stage.tensors[operand.tensor] for operand in instruction.operands}
        accesses = {operand.role: operand.access for operand in instruction.operands}
        types = {role: (tensor.kind, tensor.type) for role, tensor in bound.items()}
        model = self.program.model
        layer = representative(block, model, self.program.plan)
        group = instruction.head_group
        key = (number, instruction.keyword, group, instruction.accumulates, layer, *accesses.items(), *types.items())
        if key in self._known:
            return None
        self._known.add(key)
        workspace = bound.get("workspace")
        held = workspace.type.nbytes if workspace is not None else 0
        if held < routine.workspace_bytes:
            return f"routine {routine.key} needs {routine.workspace_bytes} bytes of workspace, the call has {held}"
        for formal in routine.formals:
            tensor = bound.get(formal.name)
            if tensor is not None and (tensor.type.dtype, tensor.type.shape) != (formal.dtype, formal.shape):
                return f"'{formal.name}' of routine {routine.key} is not {tensor.type}"
        roles = {role: access for role, access in accesses.items() if access is not Access.SCRATCH}
        heads = ALL_HEADS if group is None else Heads(group, self.program.plan.context_groups)
        problem = routine_problem(routine, roles, parameters(rank_model(model, self.program.plan), layer), heads)
        if problem is None:
            form = form_of(block, instruction, stage, model, self.program.plan)
            problem = derivation_problem(routine, form, model, self.program.plan)
            return problem and f"routine {routine.key} is not the one of this op: {problem}"
        return problem

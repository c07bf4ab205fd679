"""Check that a program's routine is the one that its op has under its model and plan.

Routines follow from the op, the model and the plan (`ratrain.targets.codegen.routines`). A program carries routines so
that it runs without being compiled, and its header carries the model and the plan so that people, exports and
checkpoints know what it trains. This check derives each routine again and compares. The places of intermediates in the
workspace are free: `ratrain.targets.verifier.routine_verifier` proves of any places that nothing is overwritten before
it was read.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from attrs import evolve

from ratrain.ratrain_ir.config.types import StateKind
from ratrain.ratrain_ir.model.micro_batch import mlp_chunk_rows, mlp_chunk_starts
from ratrain.ratrain_ir.model.slice_plan import slice_plan
from ratrain.ratrain_ir.ops.roles import is_of_other_slice
from ratrain.targets.codegen.routines import OF_BRANCHES, RoutineForm, derived_routine, representative
from ratrain.targets.program.instruction import Access

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.ratrain_ir.model.blocks import Block
    from ratrain.targets.program.instruction import Instruction
    from ratrain.targets.program.program import ProgramStage
    from ratrain.targets.program.routine import Routine, Step


def form_of(block: Block, instruction: Instruction, stage: ProgramStage, model: ModelConfig, plan: Plan) -> RoutineForm:
    """Return the form of the routine that an instruction on a block calls.

    The instruction's operands must be an op's operands (`ratrain.targets.program.lifting`).
    """
    operands = [operand for operand in instruction.operands if operand.access is not Access.SCRATCH]
    given = tuple(
        operand.role
        for operand in operands
        if instruction.keyword == "recompute"
        and operand.access is Access.READ
        and stage.tensors[operand.tensor].kind is StateKind.SAVED
        and not is_of_other_slice(operand.role)
    )
    roles = tuple(operand.role for operand in operands)
    accumulates = instruction.accumulates
    return RoutineForm(
        instruction.keyword,
        representative(block, model, plan),
        roles,
        given,
        accumulates,
        instruction.slice,
        instruction.head_group,
    )


def derivation_problem(routine: Routine, form: RoutineForm, model: ModelConfig, plan: Plan) -> str | None:
    """Return how a routine differs from the one that a model and a plan give an op of this form, or None."""
    chunks = _chunks_of(form, plan)
    # A routine has at least a step for each chunk. A file whose plan cuts rows into a million chunks is refused before
    # that many steps are derived.
    if chunks > len(routine.steps):
        plan = evolve(plan, mlp_chunk=None)
        if _has_steps_of_chunks(form, model, plan):
            cut = "a micro-batch" if form.slice is None else f"slice {form.slice}"
            return f"it has {len(routine.steps)} steps, and the plan cuts {cut} into {chunks} chunks of rows"
    derived = derived_routine(form, model, plan)
    if routine.key != derived.key:
        return f"what this op calls is {derived.key}"
    for number, (step, wanted) in enumerate(zip_longest(routine.steps, derived.steps), 1):
        if _words(step) != _words(wanted):
            return f"step {number} is {_words(step)}; the model and the plan make it {_words(wanted)}"
    if routine.expected_rows != derived.expected_rows:
        return f"it expects rows {routine.expected_rows}; the model and the plan make it {derived.expected_rows}"
    return _names_problem(routine, derived)


def _chunks_of(form: RoutineForm, plan: Plan) -> int:
    """Return the number of chunks of rows that an op computes one after the other, in its slice if it has one."""
    if form.block.kind != "mlp" or form.keyword in OF_BRANCHES:
        return 1
    return len(mlp_chunk_starts(slice_plan(plan, form.slice)))


def _has_steps_of_chunks(form: RoutineForm, model: ModelConfig, plan: Plan) -> bool:
    """Return whether a form has a step for each chunk of rows; a recovery of norms alone has none.

    The form is derived with one chunk and with two, which costs the same whatever the plan says.
    """
    rows = mlp_chunk_rows(slice_plan(plan, form.slice))
    once, twice = (derived_routine(form, model, evolve(plan, mlp_chunk=chunk)) for chunk in (rows, max(1, rows - 1)))
    return len(once.steps) < len(twice.steps)


def _names_problem(routine: Routine, derived: Routine) -> str | None:
    """Return how operands, parameters or intermediates of two routines differ, or None."""
    for what in ("formals", "parameters", "intermediates"):
        mine, theirs = (_named(getattr(one, what)) for one in (routine, derived))
        for name in [*theirs, *mine]:
            if mine.get(name) != theirs.get(name):
                actual, wanted = mine.get(name, "not there"), theirs.get(name, "none")
                return f"'{name}' among its {what} is {actual}; the model and the plan make it {wanted}"
    return None


def _named(items: Any) -> dict[str, str]:
    """Return by name a description of type, shape and, for a parameter, the place in its flat tensor."""
    described = {}
    for item in items:
        dtype = f"{item.dtype.value}" if hasattr(item, "dtype") else f"at {item.offset}, "
        described[item.name] = f"{dtype}{list(item.shape)}"
    return described


def _words(step: Step | None) -> str:
    """Return a step in words, with everything that it computes from; equal for equal steps only."""
    if step is None:
        return "nothing"
    operands = ", ".join(f"{name} = {reference}" for name, reference in sorted(step.operands.items()))
    options = _option_words(step.options)
    ranks = [
        f"; on context rank {rank} {'left out' if own is None else _option_words(own) or 'as it is'}"
        for rank, own in enumerate(step.by_rank)
    ]
    return f"'{step.kernel}' ({operands}{'; ' if options else ''}{options}{''.join(ranks)})"


def _option_words(options: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value!r}" for name, value in sorted(options.items()))

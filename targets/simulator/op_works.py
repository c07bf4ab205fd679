"""The works of a program's ops on a machine: each distinct one priced once, with a number for each op.

An instruction is taken apart into what its time depends on (`timed_op`) and priced (`op_work`); the event loop then
says when it starts, and how long sharing bandwidth makes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen

from ratrain.ratrain_ir.model.blocks import parse_block
from ratrain.ratrain_ir.model.slice_plan import plan_of_piece
from ratrain.ratrain_ir.ops.base import ENGINES, Engine
from ratrain.targets.machine.resource_work import ResourceWork
from ratrain.targets.machine.timing import TimedOp, op_work, timed_op, under_routing
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

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ratrain.ratrain_ir.model.blocks import Block
    from ratrain.targets.machine.machine import Machine
    from ratrain.targets.machine.routing import Routing
    from ratrain.targets.program.instruction import Instruction, ProgramTensor
    from ratrain.targets.program.program import Program
    from ratrain.targets.simulator.flat_program import Float64s, Records

WORK = np.dtype([("seconds", np.float64), ("ddr_bytes", np.float64), ("link_bytes", np.float64)])


@frozen(eq=False)
class OpWorks:
    """Works of all ops of a program."""

    distinct: list[ResourceWork]
    numbers: Int64s
    """by op: its work's place in `distinct`"""

    @property
    def seconds(self) -> Float64s:
        """Seconds that each op takes alone."""
        return np.array([work.seconds for work in self.distinct], np.float64)[self.numbers]

    def records(self) -> Records:
        """Return by op the record (WORK) that the event loop reads; flows are not in it."""
        rows = [tuple(getattr(work, name) for name in WORK.names or ()) for work in self.distinct]
        return np.array(rows, WORK)[self.numbers]


def works_of(
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

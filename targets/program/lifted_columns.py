"""Columns of the schedule that a program executes, made without an op for each instruction.

Instructions of one *kind* differ in nothing but their micro-batch, their waits and which tensors of equal form they
name. Only the first of each kind is made an object, lifted to an op and compared (`lifting`). That decides for all of
its kind: lifting reads no more than what they have in common.

    forward mlp.0 m0 (w %0, x %1, y %2)      kind 0, made and lifted
    forward mlp.0 m1 (w %0, x %3, y %4)      kind 0, numbers only
    send activation m0 (x %2)                kind 1, made and lifted

The rest is arithmetic on columns, one sort of a stage's operands being the most expensive part: operands in list order,
sorted by access; and a release after the last access of each life, as `insert_releases` puts it.

Stages are refused (`UnliftedError`) if anything about them is wrong or unusual: a name of two tensors, an instruction
with a tensor twice, tensors outside DDR, slices, engines that wait for each other. The caller lifts those op by op.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from attrs import evolve
from numpy.typing import NDArray

from ratrain.ratrain_ir.analysis.columns import Alike, StageColumns
from ratrain.ratrain_ir.analysis.dependence_sweep import NONE
from ratrain.ratrain_ir.config.types import Home, StateKind
from ratrain.ratrain_ir.ops.base import ENGINES
from ratrain.ratrain_ir.ops.compute import Release
from ratrain.ratrain_ir.ops.messages import OFFLOAD_OPS
from ratrain.ratrain_ir.ops.numbering import Numbers
from ratrain.ratrain_ir.support.diagnostics import Diagnostics
from ratrain.targets.program.columns import (
    ACCESS,
    ACCESSES,
    BLOCKS,
    FLAGS,
    GROUP,
    KEYWORD,
    OPERANDS,
    PEER,
    ROLE,
    ROUTINE,
    TENSOR,
    VARIANT,
    Int64s,
    ProgramColumns,
    classes,
    classes_of_runs,
)
from ratrain.targets.program.instruction import Access, Instruction
from ratrain.targets.program.lifting import StageLift
from ratrain.targets.program.program import Program, ProgramStage

_RANKS = np.array([(Access.READ, Access.UPDATE, Access.WRITE, Access.SCRATCH).index(access) for access in ACCESSES])
"""Place of each access in the order in which `StageColumns` has operands."""
_WRITE, _SCRATCH = 2, 3


class UnliftedError(Exception):
    """Error of a stage that has to be lifted op by op."""


class LiftedColumns(NamedTuple):
    """A stage of a schedule in columns, with the instructions that were lifted."""

    columns: StageColumns
    examples: ProgramStage
    """the tensors of the first instructions of each kind, renumbered; streams are empty"""
    instructions: Sequence[Instruction]
    """first instruction of each kind, with operands of `examples`"""


class _Accesses(NamedTuple):
    """Operands of a stage's instructions in list order, and within an instruction in the program's order."""

    owners: Int64s
    """place of each operand's instruction in list order"""
    roles: Int64s
    tensors: Int64s
    ranks: Int64s
    """access of each operand, as `_RANKS` numbers it"""


def lifted_columns(program: Program, columns: ProgramColumns, number: int) -> LiftedColumns:
    """Return the schedule of one stage of `columns`, which are the program's, with addresses.

    Raises `UnliftedError` if the stage has to be lifted op by op, for messages or because it is unusual.
    """
    order = columns.list_order(number)
    if columns.slices or len(order) < columns.lengths[number].sum() or not columns.keeps_waits(number):
        raise UnliftedError
    own = columns.tensors_of(number)
    names, forms = columns.names[own], columns.tensor_forms[own].astype(np.int64)
    all_in_ddr = all(columns.forms[form].home is Home.DDR for form in np.unique(forms).tolist())
    if not all_in_ddr or len(set(names)) < len(names):
        raise UnliftedError
    accesses = _accesses(columns, order)
    kinds, firsts = _kinds(columns, order, accesses, names, forms, program.plan.micro_batches)
    examples, instructions = _made(columns, number, order[firsts])
    lift = StageLift(program, number, examples, Diagnostics())
    engines = (columns.streams[order[firsts]] % len(ENGINES)).tolist()
    try:
        ops = [lift.op(item, ENGINES[engine]) for item, engine in zip(instructions, engines, strict=True)]
    except ValueError:  # a SignatureError among them
        raise UnliftedError from None
    if any(isinstance(op, OFFLOAD_OPS) for op in ops):  # stages that keep bytes for each other
        raise UnliftedError
    carried = np.array([form.carried for form in columns.forms], np.bool_)[forms]
    offsets = columns.offsets[own]
    stops = offsets + columns.form_bytes[forms]
    listed = _with_releases(accesses, kinds, columns.micro_batches[order], carried, len(ops))
    return LiftedColumns(
        StageColumns(
            number,
            *listed,
            [*ops, Release()],
            [Alike() for _ in range(len(ops) + 1)],
            carried,
            offsets,
            stops,
            {Home.DDR: int(stops.max(initial=0))},
        ),
        examples,
        instructions,
    )


def _accesses(columns: ProgramColumns, order: Int64s) -> _Accesses:
    """Return the operands of instructions in an order. Raises `UnliftedError` where one has a tensor twice."""
    counts = columns.instructions[order, OPERANDS].astype(np.int64)
    stops = np.cumsum(counts)
    taken = np.arange(int(counts.sum())) + np.repeat(columns.operand_stops[order] - stops, counts)
    operands = columns.operands[taken].astype(np.int64)
    owners = np.repeat(np.arange(len(order)), counts)
    # Access and role of a tensor that an op has twice depend on more than the tensor's form.
    pairs = np.sort(owners * (int(operands[:, TENSOR].max(initial=0)) + 1) + operands[:, TENSOR])
    if (pairs[1:] == pairs[:-1]).any():
        raise UnliftedError
    return _Accesses(owners, operands[:, ROLE], operands[:, TENSOR], _RANKS[operands[:, ACCESS]])


def _kinds(
    columns: ProgramColumns, order: Int64s, accesses: _Accesses, names: Sequence[str], forms: Int64s, micro_batches: int
) -> tuple[Int64s, Int64s]:
    """Number instructions by kind; return the number of each instruction and the first place of each number.

    Numbers ascend with first places, as the numbers of ops do.
    """
    rows = columns.instructions[order]
    slots: Numbers[str] = Numbers({"": 0})
    is_saved = np.array([form.kind is StateKind.SAVED for form in columns.forms], np.bool_)[forms]
    slot_of = np.zeros(len(names), np.int64)
    saved = np.flatnonzero(is_saved)
    slot_of[saved] = [slots[names[place].rpartition(".")[2]] for place in saved.tolist()]
    tensors = accesses.tensors
    bound, _ = classes([accesses.roles, accesses.ranks, forms[tensors], slot_of[tensors]])
    counts = rows[:, OPERANDS].astype(np.int64)
    pieces = columns.micro_batches[order]
    numbers, firsts = classes(
        [
            # -1 for none, 0 for any that the plan has; one that it does not have makes a kind of its own
            np.where(pieces < micro_batches, np.minimum(pieces, 0), pieces),
            *(rows[:, column] for column in (KEYWORD, ROUTINE, PEER, VARIANT, GROUP, FLAGS)),
            columns.streams[order] % len(ENGINES),
            classes_of_runs(bound, np.cumsum(counts), counts),
            classes_of_runs(columns.blocks, columns.block_stops[order], rows[:, BLOCKS].astype(np.int64)),
        ]
    )
    by_place = np.argsort(firsts)
    return np.argsort(by_place)[numbers], firsts[by_place]


def _made(columns: ProgramColumns, number: int, chosen: Int64s) -> tuple[ProgramStage, list[Instruction]]:
    """Make some instructions of a stage, and a stage that has only their tensors, renumbered."""
    made = [columns.instruction(each) for each in chosen.tolist()]
    places: Numbers[int] = Numbers()
    bound = [tuple(operand._replace(tensor=places[operand.tensor]) for operand in item.operands) for item in made]
    instructions = [evolve(item, operands=each) for item, each in zip(made, bound, strict=True)]
    return ProgramStage(columns.tensors(number, list(places))), instructions


class _Listed(NamedTuple):
    """Ops and releases of a stage in list order, as `StageColumns` has them."""

    kinds: Int64s
    micro_batches: Int64s
    bounds: Int64s
    operands: Int64s
    ended_bounds: Int64s
    ended: Int64s


def _with_releases(
    accesses: _Accesses, kinds: Int64s, micro_batches: Int64s, carried: NDArray[np.bool_], of_release: int
) -> _Listed:
    """Insert the releases of `insert_releases` into ops in list order, as ops of the kind `of_release`."""
    owners, tensors, ranks = accesses.owners, accesses.tensors, accesses.ranks
    ops = len(kinds)
    by_rank = np.argsort(owners * 4 + ranks, kind="stable")
    bounds = np.cumsum(np.bincount(owners * 4 + ranks, minlength=4 * ops)).reshape(ops, 4)
    # Lives end before an access that writes their tensor anew, and behind the last access of one that is not carried.
    # Workspace has no life: it is not released.
    living = np.flatnonzero(ranks != _SCRATCH)
    by_life = living[np.lexsort((owners[living], tensors[living]))]
    is_last = np.append(tensors[by_life[1:]] != tensors[by_life[:-1]], True)[: len(by_life)]
    is_rewritten = np.append(ranks[by_life[1:]] == _WRITE, False)[: len(by_life)]
    ends = by_life[np.where(is_last, ~carried[tensors[by_life]], is_rewritten)]
    ends = ends[np.lexsort((tensors[ends], owners[ends]))]
    released = np.bincount(owners[ends], minlength=ops)  # tensors released behind each op
    after = np.flatnonzero(released)
    # `np.insert` puts a value before the op at its place, so behind the one before it.
    return _Listed(
        np.insert(kinds, after + 1, of_release),
        np.insert(micro_batches, after + 1, NONE),
        np.insert(bounds, after + 1, bounds[after, 3][:, None], axis=0).ravel(),
        tensors[by_rank],
        np.cumsum(np.insert(np.zeros(ops, np.int64), after + 1, released[after])),
        tensors[ends],
    )

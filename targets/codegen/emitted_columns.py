"""Columns of a program from ops as numbers: instructions in the order of their engines, and their items."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ratrain.ratrain_ir.analysis.dependence_sweep import NONE
from ratrain.ratrain_ir.ops.base import ENGINES
from ratrain.ratrain_ir.ops.numbering import Numbers
from ratrain.targets.program.columns import (
    ACCESSES,
    ACCUMULATES,
    BLOCKING,
    BLOCKS,
    CHUNK,
    FLAGS,
    GROUP,
    INSTRUCTION_COLUMNS,
    KEYWORD,
    OPERANDS,
    PEER,
    PIECE,
    ROLE,
    ROUTINE,
    VARIANT,
    WAITS,
    Int32s,
    Int64s,
    ProgramColumns,
    TensorForm,
)
from ratrain.targets.program.instruction import Access
from ratrain.targets.program.lifting import StoredFields

if TYPE_CHECKING:
    from ratrain.ratrain_ir.analysis.dependence import StageNumbers

_READ, _WRITE, _UPDATE, _SCRATCH = map(
    ACCESSES.index, (Access.READ, Access.WRITE, Access.UPDATE, Access.SCRATCH)
)  # an instruction has its operands in this order
WORKSPACE = "workspace"
"""Role of the scratch of an op."""


@frozen
class Form:
    """Common part of instructions whose ops differ in micro-batch, peer and addresses alone."""

    fields: StoredFields
    """fields of one of these ops"""
    keyword: str
    roles: tuple[str, ...]
    """of operands that are read, then written, then updated"""
    accumulates: bool
    routine: int | None
    workspace_bytes: int
    """scratch that they need"""


@frozen(eq=False)
class Streams:
    """Places of a stage's ops in the streams of its engines."""

    engines: Int64s
    """by op; `NONE` for a release"""
    order: Int64s
    """ops in the order of instructions: engine by engine, each in list order"""
    ranks: Int64s
    """by op: its place in this order; `NONE` for a release"""
    lengths: Int64s
    """instructions of each engine"""

    @classmethod
    def of(cls, numbers: StageNumbers) -> Streams:
        """Return the places of a stage's ops as numbers."""
        engines = np.array(numbers.swept.engines, np.int64)
        work = np.flatnonzero(engines != NONE)
        order = work[np.argsort(engines[work], kind="stable")]
        ranks = np.full(len(engines), NONE, np.int64)
        ranks[order] = np.arange(len(order))
        return cls(engines, order, ranks, np.bincount(engines[work], minlength=len(ENGINES)))

    @property
    def list_order(self) -> Int32s:
        """Engines of instructions in list order."""
        return np.asarray(self.engines[self.engines != NONE], np.int32)

    def waits(self, numbers: StageNumbers) -> tuple[Int64s, Int32s]:
        """Return the number of waits of each instruction, and all waits as rows (engine, count, previous step)."""
        counts, places = (np.array(each, np.int64) for each in numbers.reduced_waits())
        ops = len(self.engines)
        # Places are numbered over two steps: below `ops` the awaited op is of the step before, else of this step.
        awaited = places % ops if ops else places
        engines = self.engines[awaited]
        begins = np.cumsum(self.lengths) - self.lengths
        rows = np.column_stack((engines, self.ranks[awaited] - begins[engines] + 1, places < ops)).astype(np.int32)
        owners = np.repeat(np.arange(ops), counts)
        return counts[self.order], rows[np.argsort(self.ranks[owners], kind="stable")]


@frozen(eq=False)
class EmittedStage:
    """A stage as arrays, all that emission keeps of it: its ops as Python numbers take several times as many bytes.

    By op in list order its form, micro-batch and peer; `NONE` stands for releases, and where an op has no micro-batch
    or peer.
    """

    streams: Streams
    waits: tuple[Int64s, Int32s]
    """waits of each instruction, and all of them as rows (`Streams.waits`)"""
    bounds: Int32s
    """by op: exclusive ends in `operands` of reads, updates, writes and scratch"""
    forms: Int32s
    micro_batches: Int32s
    peers: Int32s
    operands: Int32s
    """numbers of tensors in the stage, in the order of `StageNumbers`"""
    tensor_forms: Int32s
    """by tensor, in the order of the stage's tensors"""
    offsets: Int64s
    names: list[str]


@frozen(eq=False, slots=False)
class _Forms:
    """Forms as columns; strings are numbered in any order."""

    forms: Sequence[Form]
    slices: int
    """slices of a micro-batch; 0 where none is cut"""
    strings: Numbers[str]

    @cached_property
    def rows(self) -> Int32s:
        """One instruction for each form, with all that its instructions share; its slice, or `NONE`, is its piece."""
        strings = self.strings
        rows = np.zeros((len(self.forms), INSTRUCTION_COLUMNS), np.int32)
        for row, form in zip(rows, self.forms, strict=True):
            fields = form.fields
            chunk = 0 if fields.chunk is None else fields.chunk + 1
            row[KEYWORD] = strings[form.keyword]
            row[ROUTINE] = NONE if form.routine is None else form.routine
            row[PIECE] = NONE if fields.slice is None else fields.slice
            row[VARIANT], row[GROUP] = strings[fields.variant], strings[fields.group]
            row[FLAGS] = form.accumulates * ACCUMULATES | fields.blocking * BLOCKING | chunk * CHUNK
            row[BLOCKS] = len(fields.blocks)
        return rows

    @cached_property
    def roles(self) -> tuple[Int64s, Int64s]:
        """Roles of all forms, and the beginning of each form's."""
        return _ragged([[self.strings[role] for role in form.roles] for form in self.forms])

    @cached_property
    def blocks(self) -> tuple[Int64s, Int64s]:
        """Blocks of all forms, and the beginning of each form's."""
        return _ragged([[self.strings[block] for block in form.fields.blocks] for form in self.forms])

    def of_stage(self, stage: EmittedStage) -> _StageColumns:
        """Return the columns of a stage."""
        order = stage.streams.order
        forms = stage.forms[order]
        rows = self.rows[forms]
        pieces, own_slices = stage.micro_batches[order], rows[:, PIECE]
        cut = (own_slices != NONE) & (pieces != NONE)
        rows[:, PIECE] = np.where(cut, pieces * max(1, self.slices) + own_slices, pieces)
        rows[:, PEER] = stage.peers[order]
        operands, rows[:, OPERANDS] = self._operands(stage)
        rows[:, WAITS], waits = stage.waits
        names, begins = self.blocks
        blocks = names[_runs(begins[forms], rows[:, BLOCKS])].astype(np.int32)
        return _StageColumns(stage.streams.lengths, rows, operands, waits, blocks, stage.streams.list_order)

    def _operands(self, stage: EmittedStage) -> tuple[Int32s, Int64s]:
        """Return operands of all instructions as rows, and the number of each instruction's."""
        streams, bounds = stage.streams, stage.bounds
        counts = np.diff(bounds[:, 3], prepend=0)
        owners = np.repeat(np.arange(len(counts)), counts)
        places = np.arange(len(owners))
        read, updated, written = bounds[owners, :3].T
        access = np.select([places < read, places < updated, places < written], [_READ, _UPDATE, _WRITE], _SCRATCH)
        # One sort by instruction, then access. It is stable, so operands of one access keep their order.
        order = np.argsort(streams.ranks[owners] * len(ACCESSES) + access, kind="stable")
        owners, access, places = owners[order], access[order], places[order]
        counts = counts[streams.order]
        within = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
        roles, begins = self.roles
        bound = access != _SCRATCH
        role = np.full(len(owners), self.strings[WORKSPACE])
        role[bound] = roles[begins[stage.forms[owners[bound]]] + within[bound]]
        rows = np.column_stack((role, stage.operands[places], access)).astype(np.int32)
        return rows, counts


@frozen(eq=False)
class _StageColumns:
    lengths: Int64s
    instructions: Int32s
    operands: Int32s
    waits: Int32s
    blocks: Int32s
    order: Int32s


def emitted_columns(
    stages: Sequence[EmittedStage], forms: Sequence[Form], tensor_forms: Sequence[TensorForm], slices: int
) -> ProgramColumns:
    """Return the columns of stages whose micro-batches are cut into `slices` slices, or not cut (0).

    They equal those that `program_columns` makes of the stages' objects.
    """
    strings: Numbers[str] = Numbers()
    table = _Forms(forms, slices, strings)
    found = [table.of_stage(stage) for stage in stages]
    instructions, operands, waits = (
        np.concatenate([np.empty((0, width), np.int32), *parts])
        for width, parts in (
            (INSTRUCTION_COLUMNS, [stage.instructions for stage in found]),
            (3, [stage.operands for stage in found]),
            (3, [stage.waits for stage in found]),
        )
    )
    blocks = np.concatenate([np.empty(0, np.int32), *(stage.blocks for stage in found)])
    lengths = np.array([stage.lengths for stage in found], np.int64).reshape(-1, len(ENGINES))
    used = _in_order_of_use(len(strings), instructions, operands, blocks, lengths.ravel())
    numbers = np.full(len(strings), NONE, np.int32)
    numbers[used] = np.arange(len(used))
    for column in _NAMED:
        instructions[:, column] = numbers[instructions[:, column]]
    operands[:, ROLE] = numbers[operands[:, ROLE]]
    names = list(strings)
    kinds: Numbers[TensorForm] = Numbers()
    numbers_of_forms = np.array([kinds[form] for form in tensor_forms], np.int32)
    return ProgramColumns(
        slices,
        [names[number] for number in used.tolist()],
        lengths,
        instructions,
        operands,
        waits,
        numbers[blocks],
        list(kinds),
        np.array([len(stage.names) for stage in stages], np.int64),
        numbers_of_forms[np.concatenate([np.empty(0, np.int32), *(stage.tensor_forms for stage in stages)])],
        np.concatenate([np.empty(0, np.int64), *(stage.offsets for stage in stages)]),
        "\n".join(chain.from_iterable(stage.names for stage in stages)),
        np.concatenate([np.empty(0, np.int32), *(stage.order for stage in found)]),
    )


_NAMED = (KEYWORD, VARIANT, GROUP)


def _in_order_of_use(count: int, instructions: Int32s, operands: Int32s, blocks: Int32s, lengths: Int64s) -> Int64s:
    """Return the numbers of strings in the order in which streams of these lengths use them.

    The order is that of `program_columns`: in each stream first keyword, variant and group of its instructions, then
    roles, then blocks.
    """
    streams = np.repeat(np.arange(len(lengths)), lengths)
    never = np.iinfo(np.int64).max
    met = np.full(count, never)
    span = len(_NAMED) * len(instructions) + len(operands) + len(blocks) + 1
    for phase, (strings, each) in enumerate(
        (
            (instructions[:, _NAMED].ravel(), np.repeat(streams, len(_NAMED))),
            (operands[:, ROLE], np.repeat(streams, instructions[:, OPERANDS])),
            (blocks, np.repeat(streams, instructions[:, BLOCKS])),
        )
    ):
        # The key of a use: stream, then phase, then place. `span` is more than any place.
        np.minimum.at(met, strings, (3 * each + phase) * span + np.arange(len(strings)))
    order = np.argsort(met)
    return np.asarray(order[met[order] != never])


def _ragged(runs: Sequence[Sequence[int]]) -> tuple[Int64s, Int64s]:
    """Return the values of all runs, and the beginning of each run."""
    counts = np.array([len(run) for run in runs], np.int64)
    return np.array(list(chain.from_iterable(runs)), np.int64), np.cumsum(counts) - counts


def _runs(begins: NDArray[np.integer], counts: NDArray[np.integer]) -> Int64s:
    """Return the places of runs that begin at `begins` and have `counts` values, run by run."""
    stops = np.cumsum(counts, dtype=np.int64)
    return np.arange(int(counts.sum())) + np.repeat(begins - (stops - counts), counts)

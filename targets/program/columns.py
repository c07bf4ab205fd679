"""A program's instructions and tensors as columns of integers: the form of a `.rtx`, and back into objects.

Columns of all stages and engines stand one after another: stage by stage, engines in the order of `ENGINES`. Items of
instructions (operands, waits, blocks) are in columns of their own, in the order of instructions; an instruction has
only their counts, and cumulative sums give the places:

    instructions:   0 (2 operands)   1 (1 operand)   2 (3 operands)
    operands:       a b              c               d e f
    operand_stops:  2                3               6               exclusive ends

Questions about all instructions are answered on columns by numpy, in time linear in the items (or sorted, n log n);
objects are made only of what somebody looks at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ratrain.ratrain_ir.config.types import Home, StateKind, TensorType, aligned
from ratrain.ratrain_ir.ops.base import ENGINE_NUMBERS, ENGINES, Engine
from ratrain.ratrain_ir.ops.kinds import FIELDS
from ratrain.ratrain_ir.ops.numbering import Numbers
from ratrain.targets.program.instruction import Access, CountWait, Instruction, ProgramTensor, bound_operands
from ratrain.targets.program.ready_sweep import ready_places

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]

KEYWORD, ROUTINE, PIECE, PEER, VARIANT, GROUP, FLAGS, OPERANDS, WAITS, BLOCKS = range(10)
"""Columns of an instruction. Keyword, variant and group are numbers of strings; -1 stands for none; the last three are
counts. The piece is the micro-batch, or for instructions that work on slices micro-batch * slices + slice."""
INSTRUCTION_COLUMNS = 10
ROLE, TENSOR, ACCESS = range(3)
"""Columns of an operand: the number of its role's string, its tensor's number in the stage, its access."""
ENGINE, COUNT, PREVIOUS = range(3)
"""Columns of a wait."""
ACCUMULATES, BLOCKING, CHUNK = 1, 2, 4
"""Flags of an instruction: two bits, and above them the number of its chunk plus 1, or 0."""
ACCESSES = tuple(Access)
OF_SLICES = frozenset(cls.keyword for cls, attributes in FIELDS.items() if any(a.name == "slice" for a in attributes))
"""Instructions that work on one slice where micro-batches are cut."""
_MOST_KEYS = 1 << 62


_BEGINS_LIFE = np.array([access in (Access.WRITE, Access.SCRATCH) for access in ACCESSES])


class TensorForm(NamedTuple):
    """Everything about a tensor but its name and address: shared by many tensors."""

    kind: StateKind
    type: TensorType
    carried: bool
    home: Home


_TOLD_OF_FORMS: tuple[Callable[[TensorForm], bool], ...] = (
    lambda form: form.carried,
    lambda form: form.home is Home.DDR,
)


@frozen(eq=False, slots=False)
class ProgramColumns:
    """Instructions and tensors of all stages."""

    slices: int
    """slices of a micro-batch; 0 where none is cut"""
    strings: list[str]
    lengths: Int64s
    """numbers of instructions, [stages, engines]"""
    instructions: Int32s
    """[instructions, INSTRUCTION_COLUMNS]"""
    operands: Int32s
    """[operands, 3]"""
    waits: Int32s
    """[waits, 3]"""
    blocks: Int32s
    """numbers of strings, [blocks]"""
    forms: list[TensorForm]
    tensor_counts: Int64s
    """tensors of each stage"""
    tensor_forms: Int32s
    """by tensor: its place in `forms`"""
    offsets: Int64s
    """by tensor: its offset in its memory, in bytes"""
    name_lines: str
    """names of tensors, a line each"""
    order: Int32s | None = None
    """by stage, the engines of its instructions in list order, in which the schedule has them; None where a file does
    not give it"""

    def __len__(self) -> int:
        return len(self.instructions)

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.lengths)

    @cached_property
    def stream_stops(self) -> Int64s:
        """Exclusive end of each stream's instructions, [stages * engines]."""
        return np.cumsum(self.lengths.ravel())

    @cached_property
    def streams(self) -> Int64s:
        """Stream of each instruction, as stage * engines + engine."""
        return np.repeat(np.arange(self.lengths.size), self.lengths.ravel())

    @cached_property
    def operand_stops(self) -> Int64s:
        """Exclusive end of each instruction's operands."""
        return np.cumsum(self.instructions[:, OPERANDS], dtype=np.int64)

    @cached_property
    def wait_stops(self) -> Int64s:
        """Exclusive end of each instruction's waits."""
        return np.cumsum(self.instructions[:, WAITS], dtype=np.int64)

    @cached_property
    def block_stops(self) -> Int64s:
        """Exclusive end of each instruction's blocks."""
        return np.cumsum(self.instructions[:, BLOCKS], dtype=np.int64)

    @cached_property
    def tensor_stops(self) -> Int64s:
        """Exclusive end of each stage's tensors."""
        return np.cumsum(self.tensor_counts)

    @cached_property
    def operand_owners(self) -> Int64s:
        """Instruction of each operand."""
        return np.repeat(np.arange(len(self)), self.instructions[:, OPERANDS])

    @cached_property
    def operand_tensors(self) -> Int64s:
        """Tensor of each operand, numbered through all stages."""
        firsts = (self.tensor_stops - self.tensor_counts)[self.streams // len(ENGINES)]
        return firsts[self.operand_owners] + self.operands[:, TENSOR]

    @cached_property
    def form_bytes(self) -> Int64s:
        """Bytes of a tensor of each form, alignment included."""
        return np.array([aligned(form.type.nbytes) for form in self.forms], np.int64)

    @cached_property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return self.name_lines.split("\n") if len(self.tensor_forms) else []

    def by_string(self, values: dict[str, int], column: Int32s) -> Int64s:
        """Map a column of strings to the numbers that `values` gives them; -1 for strings that it does not have."""
        return np.array([values.get(string, -1) for string in self.strings], np.int64)[column]

    def where(self, column: Int32s, *strings: str) -> NDArray[np.bool_]:
        """Return a mask of a column of strings: True where it has one of `strings`."""
        return np.asarray(self.by_string(dict.fromkeys(strings, 1), column) == 1, np.bool_)

    @property
    def micro_batches(self) -> Int64s:
        """Micro-batch of each instruction; -1 where it has none."""
        pieces = self.instructions[:, PIECE].astype(np.int64)
        return np.where(self._is_cut & (pieces >= 0), pieces // max(1, self.slices), pieces)

    @property
    def slice_numbers(self) -> Int64s:
        """Slice that each instruction works on; -1 where it works on none."""
        pieces = self.instructions[:, PIECE].astype(np.int64)
        return np.where(self._is_cut & (pieces >= 0), pieces % max(1, self.slices), -1)

    @cached_property
    def _is_cut(self) -> NDArray[np.bool_]:
        """Mask of the instructions that work on a slice of a micro-batch."""
        return self.where(self.instructions[:, KEYWORD], *OF_SLICES) & (self.slices > 0)

    def tensors_of(self, stage: int) -> slice:
        """Return the range of a stage's tensors."""
        stop = int(self.tensor_stops[stage])
        return slice(stop - int(self.tensor_counts[stage]), stop)

    def bytes_in(self, stage: int, home: Home) -> int:
        """Return the bytes that a stage takes of a memory."""
        own = self.tensors_of(stage)
        forms = self.tensor_forms[own]
        there = np.array([form.home is home for form in self.forms], np.bool_)[forms]
        ends = self.offsets[own] + self.form_bytes[forms]
        return int(ends[there].max(initial=0))

    def engines_in_order(self, stage: int) -> list[Engine]:
        """Return the list order that a stage was given, as engines."""
        assert self.order is not None
        return list(map(ENGINES.__getitem__, self.order[slice(*self.range_of(stage))].tolist()))

    def range_of(self, stage: int) -> tuple[int, int]:
        """Return the number of a stage's first instruction, and the one behind its last."""
        stop = int(self.stream_stops[(stage + 1) * len(ENGINES) - 1])
        return stop - int(self.lengths[stage].sum()), stop

    def list_order(self, stage: int) -> Int64s:
        """Return the instructions of a stage in list order, by number.

        It is the order that was given, where that keeps the waits, else `execution_order`.
        """
        places = self._given_places(stage)
        if places is None:
            return self.execution_order(stage)
        return self.range_of(stage)[0] + np.argsort(places)

    def keeps_waits(self, stage: int) -> bool:
        """Return whether the given list order puts each instruction after its waits within a step; True without one."""
        return self.order is None or self._given_places(stage) is not None

    def _given_places(self, stage: int) -> Int64s | None:
        """Return by instruction of a stage its place in the given list order; None without one, or if it breaks a wait.

        A wait is broken if the instruction stands before one it waits for in its step.
        """
        if self.order is None:
            return None
        lengths = self.lengths[stage]
        first, stop = self.range_of(stage)
        # The order names engines. A stable sort by engine lists the places of the first engine's instructions, then of
        # the second's: the columns' own order.
        places = np.argsort(self.order[first:stop], kind="stable")
        if first < stop:
            taken, _ = _runs(self.wait_stops, self.instructions[first:stop, WAITS], first, stop)
            waits = self.waits[taken]
            owners = np.repeat(np.arange(stop - first), self.instructions[first:stop, WAITS])
            # A wait for `count` instructions of an engine is a wait for its instruction number count - 1. Waits on the
            # step before always hold.
            awaited = (np.cumsum(lengths) - lengths)[waits[:, ENGINE]] + waits[:, COUNT] - 1
            if ((places[awaited] >= places[owners]) & (waits[:, PREVIOUS] == 0)).any():
                return None
        return places

    @property
    def written_order(self) -> Int32s:
        """Engines of all stages' instructions in list order, as a file stores them, shape [instructions].

        Instructions that wait for ever stand last in their stage; nobody asks for their order.
        """
        engines = self.streams % len(ENGINES)
        found = [np.empty(0, np.int32)]
        for stage in range(self.stages):
            own = np.arange(*self.range_of(stage))
            ordered = self.list_order(stage)
            found.append(engines[np.concatenate((ordered, np.setdiff1d(own, ordered)))].astype(np.int32))
        return np.concatenate(found)

    def peak_live_bytes(self, stage: int) -> int:
        """Return the most bytes of a stage's arena that are live at once in list order."""
        return int(self.live_bytes(stage, self.list_order(stage)).max(initial=0))

    def live_bytes(self, stage: int, order: Int64s) -> Int64s:
        """Return the live bytes of a stage's arena at each instruction of an order, and two entries behind its end.

        A tensor lives from the instruction that writes it to the last one that accesses it, a carried one also across
        the step's end.
        """
        if not len(order):
            return np.empty(0, np.int64)
        first, stop = self.range_of(stage)
        places = np.full(stop - first, len(order), np.int64)
        places[order - first] = np.arange(len(order))
        taken, _ = _runs(self.operand_stops, self.instructions[first:stop, OPERANDS], first, stop)
        operands = self.operands[taken]
        forms = self.tensor_forms[self.tensors_of(stage)]
        carried, in_ddr = (np.array([told(form) for form in self.forms], np.bool_)[forms] for told in _TOLD_OF_FORMS)
        sizes = np.where(in_ddr, self.form_bytes[forms], 0)
        tensors = operands[:, TENSOR].astype(np.int64)
        at = np.repeat(places, self.instructions[first:stop, OPERANDS])
        # Accesses sorted by tensor, then by place. A life starts at each new tensor and at each access that overwrites
        # it, and ends before the next.
        by_life = np.lexsort((at, tensors))
        tensors, at, begins = tensors[by_life], at[by_life], _BEGINS_LIFE[operands[by_life, ACCESS]]
        changes_tensor = np.ones(len(tensors), np.bool_)
        changes_tensor[1:] = tensors[1:] != tensors[:-1]
        starts = np.flatnonzero(changes_tensor | begins)
        stops = np.append(starts[1:], len(tensors)) - 1
        # A tensor whose first access reads it comes from the step before. A carried tensor's last life goes on to the
        # end.
        begun = np.where(begins[starts], at[starts], 0)
        is_last = np.append(changes_tensor[1:], True)[stops] if len(tensors) else np.empty(0, np.bool_)
        ended = np.where(is_last & carried[tensors[starts]], len(order), at[stops] + 1)
        curve = np.zeros(len(order) + 2, np.int64)
        np.add.at(curve, begun, sizes[tensors[starts]])
        np.subtract.at(curve, ended, sizes[tensors[starts]])
        # Carried tensors that no instruction accesses are live all the time.
        untouched = carried.copy()
        untouched[tensors] = False
        live: Int64s = np.cumsum(curve) + sizes[untouched].sum()
        return live

    def execution_order(self, stage: int) -> Int64s:
        """Return the instructions of a stage in the order of `ProgramStage.execution_order`, by number."""
        lengths = self.lengths[stage]
        first, stop = self.range_of(stage)
        if first == stop:
            return np.empty(0, np.int64)
        taken, _ = _runs(self.wait_stops, self.instructions[first:stop, WAITS], first, stop)
        waits = self.waits[taken]
        present = waits[:, PREVIOUS] == 0
        owners = np.repeat(np.arange(stop - first), self.instructions[first:stop, WAITS])[present]
        ends = np.cumsum(np.bincount(owners, minlength=stop - first))
        engines, counts = (waits[present, column].astype(np.int64) for column in (ENGINE, COUNT))
        return first + ready_places(np.cumsum(lengths) - lengths, lengths, ends, engines, counts)

    # Back into objects

    def tensors(self, stage: int, chosen: Sequence[int] | None = None) -> list[ProgramTensor]:
        """Return the tensors of a stage as objects: all of them, or the `chosen` ones by number."""
        own = self.tensors_of(stage)
        taken = slice(None) if chosen is None else np.asarray(chosen, np.int64)
        numbers, offsets = self.tensor_forms[own][taken], self.offsets[own][taken]
        names = self.names[own] if chosen is None else [self.names[own.start + number] for number in chosen]
        forms = map(self.forms.__getitem__, numbers.tolist())
        return [
            ProgramTensor(name, form.kind, form.type, form.carried, offset, form.home)
            for name, form, offset in zip(names, forms, offsets.tolist(), strict=True)
        ]

    def stream(self, stage: int, engine: Engine) -> list[Instruction]:
        """Return the instructions of an engine as objects."""
        number = stage * len(ENGINES) + ENGINE_NUMBERS[engine]
        stop = int(self.stream_stops[number])
        return self.made(stop - int(self.lengths.flat[number]), stop)

    def instruction(self, number: int) -> Instruction:
        """Return an instruction as an object, by number."""
        return self.made(number, number + 1)[0]

    def made(self, first: int, stop: int) -> list[Instruction]:
        """Return the instructions from `first` up to `stop` as objects."""
        if first == stop:
            return []
        rows = self.instructions[first:stop]
        strings, is_cut, slices = self.strings, self._is_cut[first:stop].tolist(), self.slices
        operands, operand_runs = _runs(self.operand_stops, rows[:, OPERANDS], first, stop)
        waits, wait_runs = _runs(self.wait_stops, rows[:, WAITS], first, stop)
        blocks, block_runs = _runs(self.block_stops, rows[:, BLOCKS], first, stop)
        roles, numbers, accesses = self.operands[operands].T.tolist()
        bound = bound_operands(map(strings.__getitem__, roles), numbers, map(ACCESSES.__getitem__, accesses))
        engines, counts, previous = self.waits[waits].T.tolist()
        waited = list(map(CountWait, map(ENGINES.__getitem__, engines), counts, map(bool, previous)))
        named = [strings[number] for number in self.blocks[blocks].tolist()]
        return [
            Instruction(
                keyword=strings[keyword],
                routine=None if routine < 0 else routine,
                micro_batch=None if piece < 0 else piece // slices if cut else piece,
                peer=None if peer < 0 else peer,
                variant=strings[variant],
                group=strings[group],
                blocks=tuple(named[own_blocks]),
                accumulates=bool(flags & ACCUMULATES),
                operands=tuple(bound[own_operands]),
                waits=tuple(waited[own_waits]),
                blocking=bool(flags & BLOCKING),
                chunk=flags // CHUNK - 1 if flags >= CHUNK else None,
                slice=piece % slices if cut and piece >= 0 else None,
            )
            for (keyword, routine, piece, peer, variant, group, flags), cut, own_operands, own_waits, own_blocks in zip(
                rows[:, :OPERANDS].tolist(), is_cut, operand_runs, wait_runs, block_runs, strict=True
            )
        ]


def _runs(stops: Int64s, counts: Int32s, first: int, stop: int) -> tuple[slice, Iterable[slice]]:
    """Return the range of the items of some instructions among all items, and by instruction its range among these.

    The instructions are those from `first` up to `stop`.
    """
    begin = int(stops[first]) - int(counts[0])
    ends = stops[first:stop] - begin
    return slice(begin, int(stops[stop - 1])), map(slice, (ends - counts).tolist(), ends.tolist())


def classes(columns: Sequence[NDArray[np.integer[Any]]]) -> tuple[Int64s, Int64s]:
    """Number rows of columns so that equal rows have one number.

    Returns the number of each row, and the first row of each number.
    """
    keys, size = np.zeros(len(columns[0]), np.int64), 1
    # Columns become digits of one integer key. Before it would overflow, the keys so far are replaced by their ranks.
    for column in columns:
        low = int(column.min(initial=0))
        span = int(column.max(initial=0)) - low + 1
        if size * span >= _MOST_KEYS:
            values, keys = np.unique(keys, return_inverse=True)
            size = len(values)
        keys, size = keys * span + (column - low), size * span
    _, firsts, numbers = np.unique(keys, return_index=True, return_inverse=True)
    return numbers, firsts


def classes_of_runs(values: NDArray[np.integer[Any]], stops: Int64s, counts: NDArray[np.integer[Any]]) -> Int64s:
    """Number runs of values so that equal runs have one number.

    A run has `counts` values before its exclusive end in `stops`.
    """
    numbers = np.zeros(len(stops), np.int64)
    # Value by value: runs that go on get new numbers from their number so far and the next value. Adding the largest
    # number keeps them apart from runs that have ended.
    for place in range(int(counts.max(initial=0))):
        longer = np.flatnonzero(counts > place)
        found, _ = classes([numbers[longer], values[stops[longer] - counts[longer] + place]])
        numbers[longer] = found + numbers.max() + 1
    return numbers


class StageObjects(NamedTuple):
    """A stage as objects."""

    tensors: Sequence[ProgramTensor]
    streams: Sequence[Sequence[Instruction]]
    """by engine"""
    order: Sequence[Engine] | None
    """the engines of its instructions in list order; None where it has none"""


def program_columns(stages: Sequence[StageObjects], slices: int) -> ProgramColumns:
    """Return the columns of stages whose micro-batches are cut into `slices` slices, or not cut (0).

    Strings and forms are numbered in the order in which they are met.
    """
    strings: Numbers[str] = Numbers()
    forms: Numbers[tuple[StateKind, TensorType, bool, Home]] = Numbers()
    accesses = {access: number for number, access in enumerate(ACCESSES)}
    rows, operands, waits, blocks = ([np.empty((0, width), np.int32)] for width in (INSTRUCTION_COLUMNS, 3, 3, 1))
    tensor_forms: list[int] = []
    for stage in stages:
        for stream in stage.streams:
            rows.append(_rows([_row(item, strings, slices) for item in stream], INSTRUCTION_COLUMNS))
            bound = [(strings[o.role], o.tensor, accesses[o.access]) for item in stream for o in item.operands]
            operands.append(_rows(bound, 3))
            waited = [(ENGINE_NUMBERS[w.engine], w.count, w.previous_step) for item in stream for w in item.waits]
            waits.append(_rows(waited, 3))
            blocks.append(_rows([(strings[name],) for item in stream for name in item.blocks], 1))
        tensor_forms += [forms[t.kind, t.type, t.carried, t.home] for t in stage.tensors]
    return ProgramColumns(
        slices,
        list(strings),
        np.array([[len(stream) for stream in stage.streams] for stage in stages], np.int64).reshape(-1, len(ENGINES)),
        np.concatenate(rows),
        np.concatenate(operands),
        np.concatenate(waits),
        np.concatenate(blocks)[:, 0],
        [TensorForm(*form) for form in forms],
        np.array([len(stage.tensors) for stage in stages], np.int64),
        np.array(tensor_forms, np.int32),
        np.array([tensor.offset for stage in stages for tensor in stage.tensors], np.int64),
        "\n".join([tensor.name for stage in stages for tensor in stage.tensors]),
        _order_of(stages),
    )


def _order_of(stages: Sequence[StageObjects]) -> Int32s | None:
    """Return the list orders of stages; None unless each has as many instructions of each engine as its stage."""
    orders: list[int] = []
    for stage in stages:
        own = [] if stage.order is None else [ENGINE_NUMBERS[engine] for engine in stage.order]
        if np.bincount(own, minlength=len(ENGINES)).tolist() != [len(stream) for stream in stage.streams]:
            return None
        orders += own
    return np.array(orders, np.int32)


def _rows(rows: Sequence[tuple[int, ...]], width: int) -> Int32s:
    return np.array(rows, np.int32).reshape(-1, width)


def _row(item: Instruction, strings: Numbers[str], slices: int) -> tuple[int, ...]:
    piece = number_or_none(item.micro_batch)
    if item.slice is not None and item.micro_batch is not None:
        piece = item.micro_batch * max(1, slices) + item.slice
    return (
        strings[item.keyword],
        number_or_none(item.routine),
        piece,
        number_or_none(item.peer),
        strings[item.variant],
        strings[item.group],
        item.accumulates * ACCUMULATES | item.blocking * BLOCKING | (number_or_none(item.chunk) + 1) * CHUNK,
        len(item.operands),
        len(item.waits),
        len(item.blocks),
    )


def number_or_none(value: int | None) -> int:
    """Return a number as columns have it: -1 for None."""
    return -1 if value is None else value

"""Reader of the stages of a `.rtir` as columns of numbers, without an object for each op and each tensor.

A compiled loop (`text_sweep`) goes over the bytes. It reduces each line to its *shape*, in which marks replace names,
micro-batch and offset. Lines of one shape mean the same for other operands, so only the first line of each shape is
parsed, with the parser of `ratrain.ratrain_ir.text.parser`. Ops of one shape whose operands have the same forms are of
one *kind*; one op object is made for each kind, as an example that rules can be checked on.

    bytes of a stage -> text_sweep -> shapes, tensors, ops (numbers)
                                      first line of each shape -> parser -> types, fields
                                      first op of each kind    -> Op, with Tensors

The time is linear in the bytes. A text that is wrong, or in another layout than the printer's, raises
`UnusualTextError`; the caller then reads it with the parser, which accepts or refuses it.
"""

from __future__ import annotations

import itertools
import string
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray

from ratrain.ratrain_ir.analysis.columns import Alike, StageColumns
from ratrain.ratrain_ir.config.types import ALIGNMENT_BYTES, Home
from ratrain.ratrain_ir.module import Module, SourceText, Stage
from ratrain.ratrain_ir.ops.compute import Release
from ratrain.ratrain_ir.ops.tensor import Tensor
from ratrain.ratrain_ir.text.parser import Call, Statements
from ratrain.ratrain_ir.text.quick_syntax import UnusualTextError, quick_statement
from ratrain.ratrain_ir.text.syntax import DeclarationRecord
from ratrain.ratrain_ir.text.text_sweep import (
    COUNTS,
    ENDED,
    IN_NAME,
    KINDS,
    LINE_NUMBERS,
    MORE_ROOM,
    NONE,
    OPERANDS,
    OPS,
    READ,
    SHAPES,
    TABLE_COLUMNS,
    TENSORS,
    UNUSUAL,
    Declared,
    Groups,
    Kinds,
    ParsedOps,
    Shapes,
    StageArrays,
    TensorForms,
    compiled_sweep,
)

if TYPE_CHECKING:
    from ratrain.ratrain_ir.ops.base import Op

Int64s = NDArray[np.int64]
_STAGE, _END = b"\n  stage @", b"\n  }\n"
_LARGEST = 1 << 50
"""Largest offset that a tensor may have."""


@frozen(eq=False)
class NumberedText:
    """A text whose head has been read; its stages are read on request."""

    module: Module
    """the module with empty stages"""
    _text: NDArray[np.uint8]
    _statements: Statements
    _bodies: Sequence[tuple[int, int]]

    @property
    def nbytes(self) -> int:
        """Length of the text in bytes."""
        return len(self._text)

    def stage(self, index: int) -> StageColumns:
        """Read one stage. Raises `UnusualTextError` if the parser has to read the text."""
        return _StageText(index, self._text, *self._bodies[index], self._statements).read()


def numbered_text(data: bytes, file: str) -> NumberedText:
    """Read the head of a text, and find where its stages begin and end.

    Raises `UnusualTextError`, `DiagnosticError` or Lark's `UnexpectedInput` if the parser has to read the text.
    """
    # Stages are found by the exact bytes that the printer writes around them. The head is everything else; the parser
    # reads
    # it with empty stages in their place.
    first = data.find(_STAGE)
    if first < 0:
        raise UnusualTextError
    at, pieces, bodies = first + 1, [data[: first + 1]], []
    while data.startswith(_STAGE[1:], at):
        begin = data.find(b"\n", at)
        stop = data.find(_END, begin)
        if stop < 0:
            raise UnusualTextError
        pieces += [data[at : begin + 1], _END[1:]]
        bodies.append((begin + 1, stop + 1))
        at = stop + len(_END)
    pieces.append(data[at:])
    try:
        frame = b"".join(pieces).decode()
    except UnicodeDecodeError:
        raise UnusualTextError from None
    statements = Statements(SourceText(file, tuple(frame.split("\n"))))
    if len(statements.module.stages) != len(bodies):
        raise UnusualTextError
    return NumberedText(statements.module, np.frombuffer(data, np.uint8), statements, bodies)


@define(eq=False)
class _StageText:
    """One stage of a text, while it is read."""

    index: int
    text: NDArray[np.uint8]
    begin: int
    stop: int
    statements: Statements
    stage: Stage = field(factory=lambda: Stage(0))
    declared: dict[int, Tensor] = field(factory=dict)
    """Tensor of the first line of each shape of a declaration."""
    calls: dict[int, Call] = field(factory=dict)
    """Class and fields of each shape of an op."""
    tensors: dict[int, Tensor] = field(factory=dict)
    """Operands of example ops, by number."""

    def read(self) -> StageColumns:
        """Read the stage. Raises `UnusualTextError`."""
        lines = int(np.count_nonzero(self.text[self.begin : self.stop] == ord("\n")))
        # The sizes of some arrays are not known in advance: start again with twice the room until everything fits.
        room = 4 * lines + 1024
        while True:
            arrays = _arrays(lines, room)
            outcome = compiled_sweep()(self.text, self.begin, self.stop, _CLASSES, arrays)
            if outcome != MORE_ROOM:
                break
            room *= 2
        if outcome != READ:
            raise UnusualTextError
        return self.numbers(arrays)

    def numbers(self, made: StageArrays) -> StageColumns:
        """Turn the arrays that the loop filled into columns; parse the first line of each shape."""
        counts, rows = made.counts, made.ops
        for shape in range(counts[SHAPES]):
            self.learn(shape, made.shapes.lines[shape], made.shapes.sections[shape].tolist())
        ops, tensors = counts[OPS], counts[TENSORS]
        shapes = made.tensors.shapes[:tensors]
        carried, nbytes = np.zeros(counts[SHAPES], np.bool_), np.zeros(counts[SHAPES], np.int64)
        for shape, tensor in self.declared.items():
            carried[shape], nbytes[shape] = tensor.carried, tensor.type.nbytes
        offsets = made.tensors.offsets[:tensors]
        if tensors and offsets.max() > _LARGEST:
            raise UnusualTextError
        micro_batches = rows.micro_batches[:ops]
        if ops and micro_batches.max() >= self.statements.module.plan.micro_batches:
            raise UnusualTextError
        examples = [self.example(kind, made) for kind in range(counts[KINDS])]
        # Tensors occupy whole multiples of the alignment, so their exclusive ends are rounded up.
        whole = -(-nbytes[shapes] // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        stops = np.where(offsets == NONE, NONE, offsets + whole)
        return StageColumns(
            self.index,
            *(rows.kinds[:ops], micro_batches, rows.bounds[: 4 * ops], rows.operands[: counts[OPERANDS]]),
            *(rows.ended_bounds[:ops], rows.ended[: counts[ENDED]]),
            examples,
            [Alike() for _ in examples],
            carried[shapes],
            offsets,
            stops,
            {Home.DDR: int(stops.max(initial=0))},
        )

    def line(self, begin: int, stop: int) -> str:
        """Return a part of the text; the loop has seen only ASCII there."""
        return bytes(self.text[begin:stop]).decode("ascii")

    def learn(self, shape: int, place: Int64s, sections: list[int]) -> None:
        """Parse the first line of a shape, and compare it with what the loop found in it.

        `sections` counts written, updated, read and scratch tensors, a micro-batch and an offset. Raises
        `UnusualTextError` if the parser finds others.
        """
        record = quick_statement(self.line(*place.tolist()), shape + 1)
        if isinstance(record, DeclarationRecord):
            tensor = self.statements.tensor(Stage(0), record)
            if tensor is None or tensor.home is not Home.DDR or sections != [0, 0, 0, 1, 0, record.offset is not None]:
                raise UnusualTextError
            self.declared[shape] = tensor
            return
        called = self.statements.call(record)
        names = [len(each) for each in (record.writes, record.updates, record.reads, record.scratch)]
        if called is None or sections != [*names, called[1] is not None, 0]:
            raise UnusualTextError
        self.calls[shape] = called[0]

    def example(self, kind: int, made: StageArrays) -> Op:
        """Make the first op of a kind."""
        op, rows = int(made.kinds.ops[kind]), made.ops
        make, fields = self.calls[int(made.kinds.numbers[made.kinds.starts[kind]])]
        # Each op has four exclusive ends in `bounds`; its operands begin where those of the op before it end.
        bounds = [int(rows.bounds[4 * op - 1]) if op else 0, *rows.bounds[4 * op : 4 * op + 4].tolist()]
        reads, updates, writes, scratch = (
            tuple(self.tensor(number, made.tensors) for number in rows.operands[start:stop].tolist())
            for start, stop in itertools.pairwise(bounds)
        )
        operands: dict[str, Any] = {"reads": reads, "writes": writes, "updates": updates, "scratch": scratch}
        micro_batch = int(rows.micro_batches[op])
        if micro_batch != NONE:
            operands["micro_batch"] = micro_batch
        op_made = make(**operands, **fields)
        # The loop recognises a release by its word; it must agree with the parser.
        if (type(op_made) is Release) != (made.kinds.is_release[kind] == 1):
            raise UnusualTextError
        return op_made

    def tensor(self, number: int, declared: Declared) -> Tensor:
        """Return the tensor of a number, made like the one that its declaration's shape stands for."""
        tensor = self.tensors.get(number)
        if tensor is None:
            like = self.declared[int(declared.shapes[number])]
            name = self.line(int(declared.starts[number]), int(declared.stops[number]))
            offset = int(declared.offsets[number])
            tensor = Tensor(name, like.kind, like.type, like.carried, None if offset == NONE else offset)
            self.tensors[number] = tensor
        return tensor


def _classes() -> NDArray[np.uint8]:
    """Return the class of each byte: `UNUSUAL`, `IN_NAME`, or `READ` for any other usual one."""
    classes = np.full(256, UNUSUAL, np.uint8)
    usual = [byte for byte in range(ord(" "), ord("~") + 1) if byte not in b"/{}"]
    classes[usual] = READ
    classes[list(b"_-.*" + string.ascii_letters.encode() + string.digits.encode())] = IN_NAME
    return classes


_CLASSES = _classes()
"""Class of each byte value."""


def _arrays(lines: int, room: int) -> StageArrays:
    """Make the arrays that the loop fills: for `lines` lines, `room` operands and 16 * `room` bytes of shapes."""

    def numbers(*sizes: int) -> Int64s:
        return np.empty(sizes, np.int64)

    def of_lines(count: int) -> list[Int64s]:
        return [numbers(lines) for _ in range(count)]

    return StageArrays(
        np.zeros(COUNTS, np.int64),
        Shapes(np.empty(16 * room, np.uint8), numbers(lines), numbers(lines), numbers(lines, 2), numbers(lines, 6)),
        Declared(*of_lines(6)),
        Groups(*of_lines(4)),
        TensorForms(*of_lines(4)),
        ParsedOps(numbers(lines), numbers(lines), numbers(4 * lines), numbers(room), numbers(lines), numbers(room)),
        Kinds(numbers(room), *of_lines(4)),
        numbers(3 * room),
        # More rows than twice the lines, and at most one entry a line in each column: the table never fills up.
        np.full((1 << (2 * lines).bit_length(), TABLE_COLUMNS), NONE, np.int64),
        numbers(LINE_NUMBERS),
    )

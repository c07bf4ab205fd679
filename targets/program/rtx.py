"""`.rtx`: the versioned container of a program. No pickle: a header of JSON, columns of int32, and a digest of it all.

    RATRAINX | version u32 | header length u64 | header JSON | columns (int32, little endian) | sha256 of all before

Columns of all stages and engines stand one after another; the header gives the counts. A damaged or foreign file is refused with a
diagnostic that says what is wrong.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

from ratrain.ratrain_ir.diagnostics import DiagnosticError, fail
from ratrain.ratrain_ir.files import read_bytes, replacing
from ratrain.ratrain_ir.frontend.model_fields import model_from_fields
from ratrain.ratrain_ir.frontend.plan_text import plan_from_fields
from ratrain.ratrain_ir.ops import ENGINES, FIELDS, OP_CLASSES
from ratrain.ratrain_ir.types import STORES, Dtype, Home, StateKind, TensorType, tensor_type
from ratrain.targets.program.json_values import shown, text, whole, word
from ratrain.targets.program.on_chip import on_chip_form
from ratrain.targets.program.program import (
    Access,
    CountWait,
    Instruction,
    Operand,
    Program,
    ProgramStage,
    ProgramTensor,
)
from ratrain.targets.program.routine import SCHEDULES_KEY, OnChipSchedule, routine_from_json

MAGIC = b"RATRAINX"
VERSION = 4
_PREFIX = struct.Struct("<8sIQ")
_DIGEST_BYTES = 32
_INSTRUCTION_COLUMNS = 10
_OF_SLICES = frozenset(cls.keyword for cls, attributes in FIELDS.items() if any(a.name == "slice" for a in attributes))
"""Instructions that work on one slice where micro-batches are cut."""
_ACCUMULATES, _BLOCKING, _CHUNK = 1, 2, 4
"""Marks of an instruction: two bits, and above them the number of its chunk plus 1, or 0."""
"""Bits of one column: programs without blocking collectives are written as they were before there were any."""
_MAX_HEADER_BYTES = 1 << 30
_MAX_TENSOR_BYTES = 1 << 50
_TENSOR_NAME = re.compile(r"[A-Za-z_][\w\-]*(\.[\w\-]+)*")
"""As the schedule language has it, so that a program's tensors can be written there."""
_ACCESSES = tuple(Access)
_KINDS = {kind.value: kind for kind in StateKind}
_HOMES = {home.value: home for home in Home}
_FIRST_FORM = "tiles"
"""The form of on-chip schedules in files that name none."""

Int32s = NDArray[np.int32]


def write_program(program: Program, path: str) -> None:
    """Write a program, atomically.

    Raises `DiagnosticError` RT002 when the file cannot be written.
    """
    with replacing(path) as stream:
        stream.write(program_bytes(program))


def program_bytes(program: Program) -> bytes:
    """The container as bytes; equal programs give equal bytes. On-chip schedules of a program are of one form."""
    writer = _Writer(program.plan.shape.slices)
    stages = [writer.stage(stage) for stage in program.stages]
    columns = {name: np.asarray(rows, dtype="<i4").reshape(-1) for name, rows in writer.columns.items()}
    numbers: dict[OnChipSchedule, int] = {}
    routines = [routine.to_json(numbers) for routine in program.routines]
    header = {
        "name": program.name,
        "model": program.model.to_fields(),
        "plan": program.plan.to_fields(),
        "target": program.target,
        "capacity_bytes": program.capacity_bytes,
        "stores": {home.value: nbytes for home, nbytes in program.stores},
        "machine_digest": program.machine_digest,
        "machine": program.machine_text.split("\n") if program.machine_text else [],
        "pipeline": program.pipeline,
        **_schedules_to_json(list(numbers)),
        "routines": routines,
        "strings": list(writer.strings),
        "stages": stages,
        "columns": {name: int(column.size) for name, column in columns.items()},
    }
    head = json.dumps(header, separators=(",", ":")).encode()
    body = _PREFIX.pack(MAGIC, VERSION, len(head)) + head + b"".join(c.tobytes() for c in columns.values())
    return body + hashlib.sha256(body).digest()


def _schedules_to_json(schedules: list[OnChipSchedule]) -> dict[str, Any]:
    """What the header says of on-chip schedules; their form by its name where it is not the first."""
    forms = {schedule.form for schedule in schedules} or {_FIRST_FORM}
    (form,) = forms
    named = {} if form == _FIRST_FORM else {"on_chip": form}
    return named | {SCHEDULES_KEY: [schedule.to_json() for schedule in schedules]}


@define(eq=False)
class _Writer:
    """Collects columns; strings are numbered in order of first use."""

    slices: int
    """of a micro-batch"""
    strings: dict[str, int] = field(factory=dict)
    columns: dict[str, list[int]] = field(
        factory=lambda: {"instructions": [], "operands": [], "waits": [], "blocks": []}
    )

    def string(self, text: str) -> int:
        return self.strings.setdefault(text, len(self.strings))

    def stage(self, stage: ProgramStage) -> dict[str, Any]:
        for engine in ENGINES:
            for instruction in stage.streams[engine]:
                self.instruction(instruction)
        return {
            "peak_live_bytes": stage.peak_live_bytes,
            "streams": [len(stage.streams[engine]) for engine in ENGINES],
            "tensors": [
                [t.name, t.kind.value, t.type.dtype.value, list(t.type.shape), t.carried, t.home.value, t.offset]
                for t in stage.tensors
            ],
        }

    def piece(self, item: Instruction) -> int:
        """The number of a micro-batch, or of a slice of one, or -1."""
        if item.slice is None or item.micro_batch is None:
            return _or_none(item.micro_batch)
        return item.micro_batch * self.slices + item.slice

    def instruction(self, item: Instruction) -> None:
        columns = self.columns
        columns["instructions"] += [
            self.string(item.keyword),
            _or_none(item.routine),
            self.piece(item),
            _or_none(item.peer),
            self.string(item.variant),
            self.string(item.group),
            item.accumulates * _ACCUMULATES | item.blocking * _BLOCKING | (_or_none(item.chunk) + 1) * _CHUNK,
            len(item.operands),
            len(item.waits),
            len(item.blocks),
        ]
        for operand in item.operands:
            columns["operands"] += [self.string(operand.role), operand.tensor, operand.access.value]
        for wait in item.waits:
            columns["waits"] += [ENGINES.index(wait.engine), wait.count, int(wait.previous_step)]
        columns["blocks"] += [self.string(name) for name in item.blocks]


def _or_none(value: int | None) -> int:
    return -1 if value is None else value


def read_program(path: str) -> Program:
    """Read a program.

    Raises `DiagnosticError` RT080, or RT002 when the file cannot be read.
    """
    return parse_program(read_bytes(path, "program"), path)


def parse_program(data: bytes, file: str) -> Program:
    """The program in a container's bytes.

    Raises `DiagnosticError` RT080, or RT003 for another version.
    """
    body = _checked_body(data, file)
    try:
        return _Reader(body).program()
    except DiagnosticError:
        raise
    except (KeyError, ValueError, TypeError, IndexError, OverflowError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
        fail("RT080", f"'{file}' is whole, but its contents make no program ({reason})", help=_AGAIN)


_AGAIN = "compile it again: 'ratrainc compile ... -o FILE.rtx'"


def _checked_body(data: bytes, file: str) -> bytes:
    """The bytes between prefix and digest, after the checks that need no parsing."""
    if not data.startswith(MAGIC):
        fail("RT080", f"'{file}' is not a RATrain program: it does not start with {MAGIC.decode()}", help=_AGAIN)
    if len(data) < _PREFIX.size + _DIGEST_BYTES:
        fail("RT080", f"'{file}' is cut off after {len(data)} bytes", help=_AGAIN)
    _, version, _ = _PREFIX.unpack_from(data)
    if version != VERSION:
        fail("RT003", f"'{file}' has .rtx version {version}; this runtime reads version {VERSION}", help=_AGAIN)
    if hashlib.sha256(data[:-_DIGEST_BYTES]).digest() != data[-_DIGEST_BYTES:]:
        fail("RT080", f"'{file}' is damaged: its digest does not match (cut off or changed)", help=_AGAIN)
    return data[:-_DIGEST_BYTES]


class _Reader:
    """Rebuilds the objects; every number is checked before it is used as an index."""

    def __init__(self, body: bytes) -> None:
        _, _, length = _PREFIX.unpack_from(body)
        if not 0 < length <= min(len(body) - _PREFIX.size, _MAX_HEADER_BYTES):
            raise ValueError("the header is longer than the file")
        self.header = json.loads(body[_PREFIX.size : _PREFIX.size + length])
        self.columns = self.read_columns(body[_PREFIX.size + length :])
        self.strings = [item if item == "" else word(item) for item in self.header["strings"]]
        self.at = dict.fromkeys(self.columns, 0)

    def read_columns(self, data: bytes) -> dict[str, Int32s]:
        sizes = {name: whole(self.header["columns"][name]) for name in ("instructions", "operands", "waits", "blocks")}
        if sum(sizes.values()) * 4 != len(data):
            raise ValueError("the columns do not have the sizes the header gives")
        columns: dict[str, Int32s] = {}
        start = 0
        for name, size in sizes.items():
            columns[name] = np.frombuffer(data, "<i4", size, start).astype(np.int32)
            start += 4 * size
        return columns

    def take(self, name: str, count: int, width: int) -> Int32s:
        """The next rows of a column, [count, width]."""
        start = self.at[name]
        stop = start + count * width
        if count < 0 or stop > self.columns[name].size:
            raise ValueError(f"the column '{name}' is too short")
        self.at[name] = stop
        return self.columns[name][start:stop].reshape(count, width)

    def program(self) -> Program:
        header = self.header
        model = model_from_fields(_tuples(header["model"]))
        plan = plan_from_fields(_tuples(header["plan"]), model=model)
        form = word(header.get("on_chip", _FIRST_FORM))
        items = header.get(SCHEDULES_KEY, [])  # files from before there were any have none
        schedules = [on_chip_form(form).from_json(item) for item in items]
        routines = [routine_from_json(item, schedules) for item in header["routines"]]
        if len(header["stages"]) != plan.pp:
            raise ValueError(f"the plan has {plan.pp} stages, the file {len(header['stages'])}")
        self.routines = len(routines)
        self.stages = plan.pp
        self.chunks = plan.pp * plan.chunks
        self.slices, self.has_slices = plan.shape.slices, bool(plan.slices)
        self.micro_batches = plan.micro_batches
        stages = [self.stage(item) for item in header["stages"]]
        if any(self.at[name] != column.size for name, column in self.columns.items()):
            raise ValueError("the columns are longer than the instructions use")
        capacity = header["capacity_bytes"]
        stores = tuple((Home(name), nbytes) for name, nbytes in header["stores"].items())
        for nbytes in (capacity, *dict(stores).values()):
            if type(nbytes) is not int or nbytes <= 0:
                raise ValueError(f"expected a capacity in bytes, got {nbytes!r}")
        if any(home not in STORES for home, _ in stores):
            raise ValueError("the capacity of DDR is no other memory's")
        names = word(header["name"]), word(header["target"])
        digest, lines = text(header.get("machine_digest", "")), header.get("machine", [])  # older files have neither
        machine = "\n".join([shown(line) for line in lines])
        pipeline = text(header["pipeline"])
        return Program(names[0], model, plan, names[1], capacity, pipeline, routines, stages, digest, machine, stores)

    def stage(self, item: dict[str, Any]) -> ProgramStage:
        stage = ProgramStage([_tensor(entry) for entry in item["tensors"]])
        stage.peak_live_bytes = whole(item["peak_live_bytes"])
        counts = [whole(count) for count in item["streams"]]
        if len(counts) != len(ENGINES):
            raise ValueError("a stage has one stream an engine")
        for engine, count in zip(ENGINES, counts, strict=True):
            stage.streams[engine] = self.stream(count, counts, len(stage.tensors))
        return stage

    def stream(self, count: int, counts: list[int], tensors: int) -> list[Instruction]:
        """The next instructions; what they refer to is read for all of them at once."""
        rows = self.take("instructions", count, _INSTRUCTION_COLUMNS)
        operands, waits, blocks = (_Runs(rows[:, column].tolist()) for column in (7, 8, 9))
        all_operands = self.operands(operands.total, tensors)
        all_waits = self.waits(waits.total, counts)
        names = _indices(self.take("blocks", blocks.total, 1)[:, 0], len(self.strings))
        all_blocks = [self.strings[name] for name in names]
        return [
            self.instruction(row, tuple(all_operands[o]), tuple(all_waits[w]), tuple(all_blocks[b]))
            for row, o, w, b in zip(rows[:, :7].tolist(), operands.slices, waits.slices, blocks.slices, strict=True)
        ]

    def instruction(
        self, row: list[int], operands: tuple[Operand, ...], waits: tuple[CountWait, ...], blocks: tuple[str, ...]
    ) -> Instruction:
        keyword, routine, number, peer, variant, group, flags = row
        name = self.strings[_index(keyword, len(self.strings))]
        if name not in OP_CLASSES:
            raise ValueError(f"'{name}' is not an instruction")
        sliced = self.has_slices and name in _OF_SLICES
        piece = _optional(number, self.micro_batches * (self.slices if sliced else 1))
        return Instruction(
            keyword=name,
            routine=_optional(routine, self.routines),
            micro_batch=piece // self.slices if sliced and piece is not None else piece,
            peer=_optional(peer, self.stages),
            variant=self.strings[_index(variant, len(self.strings))],
            group=self.strings[_index(group, len(self.strings))],
            blocks=blocks,
            accumulates=bool(_index(flags, 1 << 31) & _ACCUMULATES),
            operands=operands,
            waits=waits,
            blocking=bool(flags & _BLOCKING),
            chunk=_optional(flags // _CHUNK - 1, self.chunks),
            slice=piece % self.slices if sliced and piece is not None else None,
        )

    def operands(self, count: int, tensors: int) -> list[Operand]:
        """The next operands."""
        roles, numbers, accesses = self.take("operands", count, 3).T
        names = map(self.strings.__getitem__, _indices(roles, len(self.strings)))
        kinds = map(_ACCESSES.__getitem__, _indices(accesses, len(_ACCESSES)))
        return list(map(Operand, names, _indices(numbers, tensors), kinds))

    def waits(self, count: int, counts: list[int]) -> list[CountWait]:
        """The next waits."""
        engines, numbers, previous = self.take("waits", count, 3).T
        engine_numbers = _indices(engines, len(ENGINES))
        most = np.array(counts, np.int64)[engines]
        if ((numbers <= 0) | (numbers > most)).any():
            raise ValueError("a wait names an instruction that does not exist")
        steps = map(bool, _indices(previous, 2))
        return list(map(CountWait, map(ENGINES.__getitem__, engine_numbers), numbers.tolist(), steps))


class _Runs:
    """Where the items of one instruction after another stand among those of all."""

    def __init__(self, lengths: list[int]) -> None:
        if min(lengths, default=0) < 0:
            raise ValueError("an instruction cannot have fewer than no items")
        ends = list(accumulate(lengths))
        self.total = ends[-1] if ends else 0
        self.slices = map(slice, [0, *ends[:-1]], ends)


def _tensor(entry: list[Any]) -> ProgramTensor:
    name, kind, dtype, shape, carried, home, offset = entry
    if set(map(type, shape)) != {int}:  # of equal keys the cache takes 1 and 1.0 for the same
        raise ValueError(f"%{name} cannot have the shape {shape}")
    type_ = _type(dtype, tuple(shape))
    if type(carried) is not bool or not _TENSOR_NAME.fullmatch(text(name)):
        raise ValueError(f"'{name}' is not the name of a tensor, or it does not say whether it is carried")
    return ProgramTensor(name, _KINDS[kind], type_, carried, whole(offset), _HOMES[home])


@lru_cache(maxsize=1024)
def _type(dtype: str, shape: tuple[int, ...]) -> TensorType:
    type_ = tensor_type(Dtype(dtype), tuple(whole(extent) for extent in shape))
    if type_.nbytes > _MAX_TENSOR_BYTES:
        raise ValueError(f"no tensor can be {type_}")
    return type_


def _indices(values: Int32s, size: int) -> list[int]:
    """Numbers of things of which there are so many.

    Raises ValueError where one is out of range.
    """
    if values.size and (values.min() < 0 or values.max() >= size):
        raise ValueError(f"an index among {size} is out of range")
    numbers: list[int] = values.tolist()
    return numbers


def _index(value: int, size: int) -> int:
    if not 0 <= value < size:
        raise ValueError(f"index {value} is out of range")
    return value


def _optional(value: int, size: int) -> int | None:
    return None if value == -1 else _index(value, size)


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
    """JSON knows lists only; fields that were tuples become tuples again."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}

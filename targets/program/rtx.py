"""Read and write `.rtx`, the versioned container of a program: a JSON header, int32 columns, names, and a digest.

    RATRAINX | version u32 | header length u64 | header JSON
             | columns (int32, little endian) | names (UTF-8) | sha256 of all before

Nothing is pickled, so that reading a foreign file runs no code of it. Columns of all stages and engines stand one after
another; the header gives the counts. Names are names of tensors, a line each. A damaged or foreign file is refused with
a diagnostic, and so is a file with parts that no program writes: an unknown key, a key twice, or a string, form of
tensor or on-chip schedule that nothing refers to. Facts that follow from the rest, such as peaks and arenas, are not in
the file.

Three older versions are read too. Version 4 lists the tensors in its header. Versions 4 and 5 claim peaks, which are
counted anew, and have no list order. Versions 4 to 6 have older names of some instructions, a state kind and an
operand.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ratrain.ratrain_ir.config.model_fields import model_from_fields
from ratrain.ratrain_ir.config.plan_text import plan_from_fields
from ratrain.ratrain_ir.config.types import STORES, Dtype, Home, StateKind, TensorType, tensor_type
from ratrain.ratrain_ir.ops.base import ENGINES
from ratrain.ratrain_ir.ops.kinds import OP_CLASSES, RENAMED
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError, fail
from ratrain.ratrain_ir.support.files import checked, read_bytes, replacing
from ratrain.targets.program.columns import (
    ACCESS,
    ACCESSES,
    BLOCKS,
    CHUNK,
    COUNT,
    ENGINE,
    FLAGS,
    GROUP,
    INSTRUCTION_COLUMNS,
    KEYWORD,
    OF_SLICES,
    OPERANDS,
    PEER,
    PIECE,
    PREVIOUS,
    ROLE,
    ROUTINE,
    TENSOR,
    VARIANT,
    WAITS,
    Int32s,
    Int64s,
    ProgramColumns,
    TensorForm,
)
from ratrain.targets.program.json_values import (
    LIMIT,
    listed,
    once_each,
    refuse_unknown,
    shown,
    text,
    whole,
    word,
)
from ratrain.targets.program.on_chip import on_chip_form
from ratrain.targets.program.program import Program, ProgramStage
from ratrain.targets.program.routine import SCHEDULES_KEY, OnChipSchedule, routine_from_json
from ratrain.targets.program.tensor_names import are_names, longest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ratrain.ratrain_ir.config.plan import Plan

MAGIC = b"RATRAINX"
VERSION = 7
_WITH_LISTED_TENSORS = 4
"""Version whose header lists the tensors."""
_WITH_CLAIMED_PEAKS = 5
"""Last version whose header claims peaks, and which has no list order."""
_WITH_OLD_NAMES = 6
"""Last version with older names."""
_RENAMED = RENAMED | {"beside": "branch_part"}
"""Instructions, a state kind and an operand in versions before 7, with their names since."""
_READ = (_WITH_LISTED_TENSORS, _WITH_CLAIMED_PEAKS, _WITH_OLD_NAMES, VERSION)
_PREFIX = struct.Struct("<8sIQ")
_DIGEST_BYTES = 32
_WIDTHS = {"instructions": INSTRUCTION_COLUMNS, "operands": 3, "waits": 3, "blocks": 1, "tensors": 3, "order": 1}
"""Columns in their order, with the numbers in a row. A tensor has its form, and the low and the high half of its
offset. The order has an engine a row."""
_MAX_HEADER_BYTES = 1 << 30
_MAX_TENSOR_BYTES = 1 << 50
_LONGEST_NAME = 1 << 16
_KINDS = {kind.value: kind for kind in StateKind}
_HOMES = {home.value: home for home in Home}
_FIRST_FORM = "tiles"
"""Form of on-chip schedules in files that name none."""
_KEYS = {
    *("name", "model", "plan", "target", "capacity_bytes", "stores", "machine_digest", "machine", "pipeline"),
    *("on_chip", SCHEDULES_KEY, "routines", "strings", "forms", "stages", "columns", "names"),
}
_STAGE_KEYS = {"streams", "tensors"}


def write_program(program: Program, path: str) -> None:
    """Write a program, atomically, once it reads back.

    Raises `DiagnosticError` RT002 when the file cannot be written, and RT011 where it would not be read as this
    program.
    """
    data = program_bytes(program)

    def read(data: bytes) -> None:
        # a digest at a time, since another copy of the bytes would be the largest thing here
        if _digest(_parts(parse_program(data, path))) != data[-_DIGEST_BYTES:]:
            fail("RT080", "the program that is read is another one")

    checked(data, "program", read)
    with replacing(path, "program") as stream:
        stream.write(data)


def program_bytes(program: Program) -> bytes:
    """Return the container as bytes; equal programs give equal bytes."""
    parts = list(_parts(program))
    return b"".join([*parts, _digest(parts)])


def _digest(parts: Iterable[bytes]) -> bytes:
    """Return the digest of a container, which ends with it."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.digest()


def _parts(program: Program) -> Iterator[bytes]:
    """Yield the bytes of a container before its digest.

    All on-chip schedules of a program are of one form.
    """
    columns = program.columns()
    offsets = columns.offsets.astype("<i8").view("<i4").reshape(-1, 2)
    arrays = {
        "instructions": columns.instructions,
        "operands": columns.operands,
        "waits": columns.waits,
        "blocks": columns.blocks,
        "tensors": np.column_stack((columns.tensor_forms, offsets)),
        "order": columns.written_order,
    }
    names = columns.name_lines.encode()
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
        "strings": columns.strings,
        "forms": [
            [form.kind.value, form.type.dtype.value, list(form.type.shape), form.carried, form.home.value]
            for form in columns.forms
        ],
        "stages": [
            {"streams": lengths, "tensors": tensors}
            for lengths, tensors in zip(columns.lengths.tolist(), columns.tensor_counts.tolist(), strict=True)
        ],
        "columns": {name: int(array.size) for name, array in arrays.items()},
        "names": len(names),
    }
    head = json.dumps(header, separators=(",", ":")).encode()
    yield _PREFIX.pack(MAGIC, VERSION, len(head))
    yield head
    for array in arrays.values():
        yield array.astype("<i4").tobytes()
    yield names


def _schedules_to_json(schedules: list[OnChipSchedule]) -> dict[str, Any]:
    """Return the header's entries of on-chip schedules; the form is named unless it is the first one."""
    forms = {schedule.form for schedule in schedules} or {_FIRST_FORM}
    (form,) = forms
    named = {} if form == _FIRST_FORM else {"on_chip": form}
    return named | {SCHEDULES_KEY: [schedule.to_json() for schedule in schedules]}


def read_program(path: str) -> Program:
    """Read a program.

    Raises `DiagnosticError` RT080, or RT002 when the file cannot be read.
    """
    return parse_program(read_bytes(path, "program"), path)


def parse_program(data: bytes, file: str) -> Program:
    """Return the program in a container's bytes; `file` names it in messages.

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


def _checked_body(data: bytes, file: str) -> memoryview:
    """Return the bytes before the digest, after the checks that need no parsing.

    Raises `DiagnosticError` RT080 if the file is no program, is cut off or damaged; RT003 for another version.
    """
    if not data.startswith(MAGIC):
        fail("RT080", f"'{file}' is not a RATrain program: it does not start with {MAGIC.decode()}", help=_AGAIN)
    if len(data) < _PREFIX.size + _DIGEST_BYTES:
        fail("RT080", f"'{file}' is cut off after {len(data)} bytes", help=_AGAIN)
    _, version, _ = _PREFIX.unpack_from(data)
    if version not in _READ:
        known = f"{', '.join(map(str, _READ[:-1]))} and {VERSION}"
        fail("RT003", f"'{file}' has .rtx version {version}; this runtime reads versions {known}", help=_AGAIN)
    if hashlib.sha256(memoryview(data)[:-_DIGEST_BYTES]).digest() != data[-_DIGEST_BYTES:]:
        fail("RT080", f"'{file}' is damaged: its digest does not match (cut off or changed)", help=_AGAIN)
    return memoryview(data)[:-_DIGEST_BYTES]


class _Reader:
    """Reader of a container's body; every number is checked before it is used as an index."""

    def __init__(self, body: memoryview) -> None:
        _, version, length = _PREFIX.unpack_from(body)
        if not 0 < length <= min(len(body) - _PREFIX.size, _MAX_HEADER_BYTES):
            raise ValueError("the header is longer than the file")
        self.header = json.loads(bytes(body[_PREFIX.size : _PREFIX.size + length]), object_pairs_hook=once_each)
        self.lists_tensors = version == _WITH_LISTED_TENSORS
        self.claims_peaks = version <= _WITH_CLAIMED_PEAKS
        self.has_old_names = version <= _WITH_OLD_NAMES
        gone = {"forms", "names"} if self.lists_tensors else set()
        refuse_unknown(self.header, _KEYS - gone, "the header")
        self.rest = body[_PREFIX.size + length :]

    def arrays(self) -> tuple[dict[str, Int32s], str]:
        """Return the columns by name, [rows, width], and the names of tensors as lines."""
        header = self.header
        left_out = {"tensors"} if self.lists_tensors else set()
        left_out |= {"order"} if self.claims_peaks else set()
        widths = {name: width for name, width in _WIDTHS.items() if name not in left_out}
        refuse_unknown(header["columns"], widths, "what the header says of columns")
        sizes = {name: whole(header["columns"][name]) for name in widths}
        names = 0 if self.lists_tensors else whole(header["names"])
        if sum(sizes.values()) * 4 + names != len(self.rest):
            raise ValueError("the columns do not have the sizes the header gives")
        arrays: dict[str, Int32s] = {}
        start = 0
        for name, size in sizes.items():
            if size % widths[name]:
                raise ValueError(f"the column '{name}' ends within a row")
            array = np.frombuffer(self.rest, "<i4", size, start).astype(np.int32)
            arrays[name] = array.reshape(-1, widths[name])
            start += 4 * size
        return arrays, str(self.rest[start:], "utf-8")

    def program(self) -> Program:
        header = self.header
        model = model_from_fields(_tuples(header["model"]))
        plan = plan_from_fields(_tuples(header["plan"]), model=model)
        form = word(header.get("on_chip", _FIRST_FORM))
        items = header.get(SCHEDULES_KEY, [])  # files from before there were any have none
        if not items and "on_chip" in header:
            raise ValueError(f"it names the form '{form}' of on-chip schedules, and has none")
        schedules = [on_chip_form(form).from_json(item) for item in listed(items)]
        routines = [routine_from_json(self.routine_today(item), schedules) for item in header["routines"]]
        if len(header["stages"]) != plan.pp:
            raise ValueError(f"the plan has {plan.pp} stages, the file {len(header['stages'])}")
        for item in header["stages"]:
            refuse_unknown(item, _STAGE_KEYS | ({"peak_live_bytes"} if self.claims_peaks else set()), "a stage")
        _check_all_used("on-chip schedules", len(schedules), _numbers_of_schedules(header["routines"]))
        columns = self.columns(plan)
        _check_instructions(columns, plan, len(routines))
        _check_all_used("strings", len(columns.strings), _numbers_of_strings(columns))
        _check_all_used("forms of tensors", len(columns.forms), columns.tensor_forms)
        for what, items in (("string", columns.strings), ("form of tensors", columns.forms)):
            if len(set(items)) < len(items):
                raise ValueError(f"a {what} is there twice")
        stages = [ProgramStage.of_columns(columns, number) for number in range(plan.pp)]
        capacity = header["capacity_bytes"]
        stores = tuple((Home(name), nbytes) for name, nbytes in header["stores"].items())
        for nbytes in (capacity, *dict(stores).values()):
            if type(nbytes) is not int or nbytes <= 0:
                raise ValueError(f"expected a capacity in bytes, got {nbytes!r}")
        if any(home not in STORES for home, _ in stores):
            raise ValueError("the capacity of DDR is no other memory's")
        names = word(header["name"]), word(header["target"])
        digest, lines = text(header.get("machine_digest", "")), header.get("machine", [])  # older files have neither
        machine = "\n".join([shown(line) for line in listed(lines)])
        pipeline = text(header["pipeline"])
        return Program(names[0], model, plan, names[1], capacity, pipeline, routines, stages, digest, machine, stores)

    def today(self, name: str) -> str:
        """Return today's name of an instruction, a state kind or an operand of this version."""
        return _RENAMED.get(name, name) if self.has_old_names else name

    def routine_today(self, item: dict[str, Any]) -> dict[str, Any]:
        """Return a routine's data with today's names of its operands."""
        if not self.has_old_names:
            return item
        formals = [formal | {"name": self.today(formal["name"])} for formal in item["formals"]]
        steps = [
            step | {"operands": {argument: self.rows_today(name) for argument, name in step["operands"].items()}}
            for step in item["steps"]
        ]
        return item | {"formals": formals, "steps": steps}

    def rows_today(self, operand: str) -> str:
        """Return today's name of a step's operand; rows `[first:stop]` may follow it."""
        name, bracket, rows = operand.partition("[")
        return self.today(name) + bracket + rows

    def columns(self, plan: Plan) -> ProgramColumns:
        """Return the columns; references of instructions are not checked yet."""
        arrays, lines = self.arrays()
        stages = self.header["stages"]
        lengths = [[whole(count) for count in item["streams"]] for item in stages]
        if any(len(row) != len(ENGINES) for row in lengths):
            raise ValueError("a stage has one stream an engine")
        if self.lists_tensors:
            entries = [entry for item in stages for entry in item["tensors"]]
            forms, numbers, offsets, lines = _listed([(name, self.today(kind), *rest) for name, kind, *rest in entries])
            counts = [len(item["tensors"]) for item in stages]
        else:
            forms = [_form(self.today(kind), *rest) for kind, *rest in self.header["forms"]]
            numbers = arrays["tensors"][:, 0]
            offsets = np.ascontiguousarray(arrays["tensors"][:, 1:]).view(np.int64)[:, 0]
            counts = [whole(item["tensors"]) for item in stages]
        if sum(counts) != len(numbers) or sum(map(sum, lengths)) != len(arrays["instructions"]):
            raise ValueError("the columns do not have the rows the header gives")
        _check_range(numbers, len(forms))
        _check_range(offsets, LIMIT)
        _check_names(lines, len(numbers))
        order = None if self.claims_peaks else arrays["order"][:, 0]
        if order is not None:
            _check_order(order, lengths)
        return ProgramColumns(
            plan.shape.slices if plan.slices else 0,
            [self.today(word(item)) if item != "" else item for item in self.header["strings"]],
            np.array(lengths, np.int64),
            arrays["instructions"],
            arrays["operands"],
            arrays["waits"],
            arrays["blocks"][:, 0],
            forms,
            np.array(counts, np.int64),
            numbers,
            offsets,
            lines,
            order,
        )


def _listed(entries: list[tuple[Any, ...]]) -> tuple[list[TensorForm], Int32s, Int64s, str]:
    """Return forms, form numbers, offsets and names of the tensors of version 4, each with its form in full."""
    forms: dict[TensorForm, int] = {}
    numbers, offsets, names = [], [], []
    for name, kind, dtype, shape, carried, home, offset in entries:
        form = _form(kind, dtype, shape, carried, home)
        numbers.append(forms.setdefault(form, len(forms)))
        offsets.append(whole(offset))
        names.append(text(name))
    return list(forms), np.array(numbers, np.int32), np.array(offsets, np.int64), "\n".join(names)


def _check_order(order: Int32s, lengths: Sequence[Sequence[int]]) -> None:
    """Raise ValueError unless the list order of each stage has as many instructions of each engine as the stage.

    `order` has the engine of every instruction, stage after stage; `lengths` has a row for each stage, its numbers of
    instructions by engine.
    """
    _check_range(order, len(ENGINES))
    stages = np.repeat(np.arange(len(lengths)), [sum(row) for row in lengths])
    if len(order) != len(stages):
        raise ValueError("the list order does not have as many rows as there are instructions")
    found = np.bincount(stages * len(ENGINES) + order, minlength=len(lengths) * len(ENGINES))
    if found.tolist() != [count for row in lengths for count in row]:
        raise ValueError("the list order of a stage has not as many of each engine as the stage")


def _numbers_of_schedules(routines: Any) -> list[int]:
    """Return the numbers of on-chip schedules that steps of routines refer to."""
    return [number for item in routines for step in item["steps"] for number in step.get(SCHEDULES_KEY, {}).values()]


def _numbers_of_strings(columns: ProgramColumns) -> Int32s:
    """Return the numbers of strings that instructions, operands and blocks refer to."""
    named = columns.instructions[:, [KEYWORD, VARIANT, GROUP]]
    return np.concatenate((named.ravel(), columns.operands[:, ROLE], columns.blocks))


def _check_all_used(what: str, count: int, numbers: Int32s | list[int]) -> None:
    """Raise ValueError where a table of the file has a row that nothing refers to."""
    if len(np.unique(numbers)) != count:
        raise ValueError(f"it has {what} that nothing refers to")


def _check_instructions(columns: ProgramColumns, plan: Plan, routines: int) -> None:
    """Raise ValueError where an instruction refers to something that is not in the file."""
    rows, strings = columns.instructions, len(columns.strings)
    for column in (KEYWORD, VARIANT, GROUP):
        _check_range(rows[:, column], strings)
    odd = [columns.strings[number] for number in np.unique(rows[:, KEYWORD])]
    if odd := [name for name in odd if name not in OP_CLASSES]:
        raise ValueError(f"'{odd[0]}' is not an instruction")
    _check_range(rows[:, FLAGS], CHUNK * (plan.pp * plan.chunks + 1))
    pieces = np.where(columns.where(rows[:, KEYWORD], *OF_SLICES), max(1, columns.slices), 1) * plan.micro_batches
    _check_range(rows[:, ROUTINE], routines, -1)
    _check_range(rows[:, PIECE], pieces, -1)
    _check_range(rows[:, PEER], plan.pp, -1)
    for column, items in ((OPERANDS, columns.operands), (WAITS, columns.waits), (BLOCKS, columns.blocks)):
        if (rows[:, column] < 0).any() or rows[:, column].sum(dtype=np.int64) != len(items):
            raise ValueError("the instructions do not have as many items as the columns")
    _check_range(columns.blocks, strings)
    _check_range(columns.operands[:, ROLE], strings)
    _check_range(columns.operands[:, ACCESS], len(ACCESSES))
    stages = columns.streams // len(ENGINES)
    _check_range(columns.operands[:, TENSOR], columns.tensor_counts[np.repeat(stages, rows[:, OPERANDS])])
    _check_range(columns.waits[:, ENGINE], len(ENGINES))
    _check_range(columns.waits[:, PREVIOUS], 2)
    awaited = columns.lengths[np.repeat(stages, rows[:, WAITS]), columns.waits[:, ENGINE]]
    _check_range(columns.waits[:, COUNT], awaited + 1, 1)


def _check_range(values: Int32s | Int64s, stop: int | Int64s, first: int = 0) -> None:
    """Raise ValueError unless all numbers are at least `first` and below `stop`, which may be one number for each."""
    if ((values < first) | (values >= stop)).any():
        raise ValueError("a number is out of range")


def _check_names(lines: str, count: int) -> None:
    """Raise ValueError unless there are `count` names of tensors, a line each."""
    if not count and not lines:
        return
    if lines.count("\n") + 1 != count or not are_names(lines):
        raise ValueError("the names of tensors do not match their number, or some are empty")
    if longest(lines) > _LONGEST_NAME:
        raise ValueError("a name of a tensor is a page long")


def _form(kind: str, dtype: str, shape: list[int], carried: bool, home: str) -> TensorForm:
    if set(map(type, shape)) != {int}:  # `_type` is cached, and a cache takes 1, 1.0 and True for the same key
        raise ValueError(f"no tensor can have the shape {shape}")
    if type(carried) is not bool:
        raise ValueError("a tensor does not say whether it is carried")
    return TensorForm(_KINDS[kind], _type(dtype, tuple(shape)), carried, _HOMES[home])


@lru_cache(maxsize=1024)
def _type(dtype: str, shape: tuple[int, ...]) -> TensorType:
    type_ = tensor_type(Dtype(dtype), tuple(whole(extent) for extent in shape))
    if type_.nbytes > _MAX_TENSOR_BYTES:
        raise ValueError(f"no tensor can be {type_}")
    return type_


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields with tuples in place of lists: JSON has no tuples."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}

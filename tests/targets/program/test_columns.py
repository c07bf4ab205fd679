"""Columns of a program: the same instructions, whichever way; what is changed after reading counts; damaged ones are refused."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from threading import Barrier, Thread
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratrain.ratrain_ir.config.types import Home
from ratrain.ratrain_ir.ops.base import ENGINES, Engine
from ratrain.ratrain_ir.ops.kinds import RENAMED
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.support.loops import at_any_size
from ratrain.ratrain_ir.testing.families import in_family
from ratrain.ratrainc.compiling.opening import machine_of
from ratrain.targets.machine.timing import op_work
from ratrain.targets.program.columns import classes, classes_of_runs
from ratrain.targets.program.rtx import VERSION, parse_program, program_bytes
from ratrain.targets.simulator.figures import simulated
from ratrain.targets.simulator.op_works import timed_instruction
from tests.end_to_end.tiny_runs import make_program
from tests.end_to_end.toys import TOY
from tests.mutation.subjects import SUBJECTS

if TYPE_CHECKING:
    from ratrain.targets.program.program import Program

NAMES = sorted(SUBJECTS)
PREFIX = struct.Struct("<8sIQ")


def parts(data: bytes) -> tuple[dict[str, Any], bytes, bytes]:
    """Header, columns and names of a container."""
    _, _, length = PREFIX.unpack_from(data)
    header = json.loads(data[PREFIX.size : PREFIX.size + length])
    rest = data[PREFIX.size + length : -32]
    size = 4 * sum(header["columns"].values())
    return header, rest[:size], rest[size:]


def container(version: int, header: dict[str, Any], rest: bytes) -> bytes:
    """A container of a version, with the digest that belongs to it."""
    text = json.dumps(header).encode()
    body = PREFIX.pack(b"RATRAINX", version, len(text)) + text + rest
    return body + hashlib.sha256(body).digest()


def version_6(data: bytes) -> bytes:
    """Return the same program as version 6 had it: with older names of instructions, a state kind and an operand."""
    header, columns, names = parts(data)
    old = {new: before for before, new in RENAMED.items()} | {"branch_part": "beside"}
    header["strings"] = [old.get(item, item) for item in header["strings"]]
    header["forms"] = [[old.get(kind, kind), *rest] for kind, *rest in header["forms"]]
    for routine in header["routines"]:
        for formal in routine["formals"]:
            formal["name"] = old.get(formal["name"], formal["name"])
        for step in routine["steps"]:
            step["operands"] = {key: re.sub("^branch_part", "beside", name) for key, name in step["operands"].items()}
    return container(6, header, columns + names)


def test_a_parallel_branch_in_the_words_of_version_6() -> None:
    model = in_family(TOY, "gpt_neox", kv_heads=2)
    program = make_program(model, pp=1, tp=2, dp=1)
    data = program_bytes(program)
    old = version_6(data)
    assert old.count(b'"beside') > 2
    assert b"branch_part" not in old
    assert program_bytes(parse_program(old, "x.rtx")) == data


def version_5(data: bytes) -> bytes:
    """Return the same program as version 5 had it: with claims of peaks, which nobody believes, and no list order."""
    header, columns, names = parts(version_6(data))
    size = 4 * header["columns"].pop("order")
    for stage in header["stages"]:
        stage["peak_live_bytes"] = 1
    return container(5, header, columns[: len(columns) - size] + names)


def version_4(data: bytes) -> bytes:
    """Return the same program as version 4 had it: tensors in the header, each with its form."""
    header, columns, names = parts(version_5(data))
    size = 4 * header["columns"].pop("tensors")
    rows = np.frombuffer(columns[len(columns) - size :], "<i4").reshape(-1, 3).tolist()
    tensors = iter(zip(names.decode().split("\n"), rows, strict=True))
    forms = header.pop("forms")
    del header["names"]
    for stage in header["stages"]:
        taken = [next(tensors) for _ in range(stage["tensors"])]
        stage["tensors"] = [[name, *forms[form], low + (high << 32)] for name, (form, low, high) in taken]
    return container(4, header, columns[: len(columns) - size])


def objects(program: Program, *, has_order: bool) -> list[Any]:
    """All that the objects of a program say, or all but what follows from the list order."""
    return [
        (
            stage.tensors,
            {
                engine: [attrs.astuple(item, recurse=False) for item in stage.streams[engine]]
                for engine in stage.streams
            },
            (stage.peak_live_bytes, stage.list_order()) if has_order else None,
        )
        for stage in program.stages
    ]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_read_is_what_was_written(name: str) -> None:
    program = SUBJECTS[name].program()
    data = program_bytes(program)
    files = ((data, True), (version_6(data), True), (version_5(data), False), (version_4(data), False))
    for written, has_order in files:
        read = parse_program(written, "x.rtx")
        assert (program_bytes(read) == data) >= has_order
        whole = parse_program(program_bytes(read), "x.rtx")
        assert program_bytes(whole) == program_bytes(read)
        assert [stage.peak_live_bytes for stage in whole.stages] == [stage.peak_live_bytes for stage in read.stages]
        for emitted, stage in zip(program.stages, read.stages, strict=True):
            assert stage.unread
            assert [stage.bytes_in(home) for home in Home] == [emitted.bytes_in(home) for home in Home]
            assert stage.lengths == emitted.lengths
        columns, op = read.columns(), 0
        for number, emitted in enumerate(program.stages):
            firsts = dict(zip(ENGINES, np.cumsum([0, *emitted.lengths[:-1]]).tolist(), strict=True))
            order = [op + firsts[engine] + position for engine, position in emitted.execution_order()]
            assert columns.execution_order(number).tolist() == order
            with at_any_size():
                assert columns.execution_order(number).tolist() == order
            for engine in ENGINES:
                for item in emitted.streams[engine]:
                    assert columns.micro_batches[op] == (-1 if item.micro_batch is None else item.micro_batch)
                    assert columns.slice_numbers[op] == (-1 if item.slice is None else item.slice)
                    op += 1
        assert objects(read, has_order=has_order) == objects(program, has_order=has_order)
        assert program_bytes(read) == program_bytes(whole)


@pytest.mark.parametrize("name", NAMES)
def test_every_op_has_the_work_of_its_instruction(name: str) -> None:
    program = SUBJECTS[name].program()
    machine = machine_of(program)
    figures, timeline = simulated(program, machine)
    wanted = [
        op_work(timed_instruction(program, index, engine, item), program.plan, machine)
        for index, stage in enumerate(program.stages)
        for engine in ENGINES
        for item in stage.streams[engine]
    ]
    for column in timeline.works.dtype.names or ():
        assert timeline.works[column].tolist() == [getattr(work, column) for work in wanted]
    read = parse_program(program_bytes(program), "x.rtx")
    again, _ = simulated(read, machine)
    assert again.to_json() == figures.to_json()
    assert all(stage.unread for stage in read.stages), "no instruction was made"


def test_changes_after_reading_count() -> None:
    read = parse_program(program_bytes(make_program()), "x.rtx")
    before = program_bytes(read)
    gone = read.stages[1].streams[Engine.SEND].pop()
    assert read.stages[0].unread
    assert read.columns().lengths[1, ENGINES.index(Engine.SEND)] == len(read.stages[1].streams[Engine.SEND])
    assert program_bytes(read) != before
    read.stages[1].streams[Engine.SEND].append(gone)
    assert program_bytes(read) == before
    swapped = attrs.evolve(read, stages=read.stages[::-1])
    assert swapped.columns().lengths.tolist() == read.columns().lengths.tolist()[::-1]


def test_threads_that_ask_for_a_stage_get_the_same_objects() -> None:
    read = parse_program(program_bytes(make_program()), "x.rtx")
    barrier, found = Barrier(8), list[Any]()

    def ask() -> None:
        barrier.wait()
        found.append(read.stages[0].streams)

    threads = [Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(streams) for streams in found}) == 1


@pytest.mark.parametrize("names", ["", "\n", "a b", "1x", "a.", "a..b", "a\n", "\na", "a\r", "é.\u2028", "x" * 70_000])
def test_names_that_are_none_are_refused(names: str) -> None:
    header, columns, held = parts(program_bytes(make_program()))
    first = held.decode().split("\n")
    text = "\n".join([names, *first[1:]]).encode()
    with pytest.raises(DiagnosticError, match="RT080"):
        parse_program(container(VERSION, header | {"names": len(text)}, columns + text), "odd.rtx")


@pytest.mark.parametrize(
    ("key", "value"), [("streams", [1]), ("tensors", 1 << 40), ("tensors", -1), ("tensors", [])], ids=str
)
def test_counts_that_do_not_fit_are_refused(key: str, value: object) -> None:
    header, columns, names = parts(program_bytes(make_program()))
    header["stages"][0][key] = value
    with pytest.raises(DiagnosticError, match="RT080"):
        parse_program(container(VERSION, header, columns + names), "odd.rtx")


@given(st.lists(st.tuples(*[st.integers(-(1 << 31), (1 << 31) - 1)] * 3)))
def test_classes_are_those_of_equal_rows(rows: list[tuple[int, int, int]]) -> None:
    table = np.array(rows, np.int32).reshape(-1, 3)
    numbers, firsts = classes(list(table.T))
    assert [rows[first] for first in firsts[numbers]] == rows
    assert len(firsts) == len(set(rows))
    assert all(rows.index(rows[first]) == first for first in firsts)


@given(st.lists(st.lists(st.integers(0, 2), max_size=4)))
def test_classes_of_runs_are_those_of_equal_lists(runs: list[list[int]]) -> None:
    counts = np.array([len(run) for run in runs], np.int64)
    values = np.array([value for run in runs for value in run], np.int64)
    numbers = classes_of_runs(values, np.cumsum(counts), counts).tolist()
    for one, number in zip(runs, numbers, strict=True):
        assert [other == number for other in numbers] == [other == one for other in runs]

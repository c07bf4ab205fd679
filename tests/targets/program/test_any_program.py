"""Whatever bytes a program file has: the reader never falls over, and what it lets pass trains without harm."""

from __future__ import annotations

import copy
import hashlib
import json
import struct
import tracemalloc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain.ratrain_ir.ops.base import ENGINES, Engine
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.targets.program.rtx import VERSION, parse_program, program_bytes
from ratrain.targets.verifier.program_verifier import check_program
from tests.end_to_end.tiny_runs import MODEL, make_program, swap_neighbours, train

if TYPE_CHECKING:
    from ratrain.targets.program.program import Program


SMALL = evolve(MODEL, layers=1)
PREFIX = struct.Struct("<8sIQ")
MOST_BYTES = 64 << 20
"""What reading and checking a program of a few kilobytes may take, whatever numbers stand in it."""


def with_digest(body: bytes) -> bytes:
    """A container with the digest that belongs to it."""
    return body + hashlib.sha256(body).digest()


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The header of a container, and its columns with the names behind them."""
    _, _, length = PREFIX.unpack_from(data)
    header = data[PREFIX.size : PREFIX.size + length]
    return json.loads(header), data[PREFIX.size + length : -32]


def joined(header: Any, columns: bytes) -> bytes:
    """A container with this header and these columns."""
    text = json.dumps(header).encode()
    return with_digest(PREFIX.pack(b"RATRAINX", VERSION, len(text)) + text + columns)


def survives(data: bytes) -> Program | None:
    """The program, where the bytes hold a sound one; anything but a diagnostic, and any large allocation, is a failure."""
    tracemalloc.start()
    try:
        program = parse_program(data, "any.rtx")
        check_program(program)
    except DiagnosticError:  # which has a code, or it could not be made
        return None
    else:
        return program
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < MOST_BYTES


@pytest.fixture(scope="module")
def small() -> bytes:
    """A very small program: one stage, one layer, two replicas."""
    return program_bytes(make_program(SMALL, pp=1, micro_batches=2, micro_batch_size=1, seq_len=4))


positions = st.integers(0, 1 << 30)


@given(edits=st.lists(st.tuples(positions, st.integers(1, 255)), min_size=1, max_size=4), cut=st.none() | positions)
@settings(max_examples=50)
def test_changed_bytes_are_noticed(small: bytes, edits: list[tuple[int, int]], cut: int | None) -> None:
    data = bytearray(small)
    for position, change in edits:
        data[position % len(data)] ^= change
    if cut is not None:
        del data[cut % len(data) :]
    if bytes(data) != small:
        with pytest.raises(DiagnosticError, match=r"RT080|RT003"):
            parse_program(bytes(data), "changed.rtx")


@given(edits=st.lists(st.tuples(positions, st.integers(0, 255)), min_size=1, max_size=4))
@settings(max_examples=50)
def test_changed_bytes_with_the_right_digest_do_no_harm(small: bytes, edits: list[tuple[int, int]]) -> None:
    body = bytearray(small[:-32])
    for position, value in edits:
        body[position % len(body)] = value
    survives(with_digest(bytes(body)))


NASTY: list[Any] = [
    *(None, True, False, -1, 0, 1, 2, 3, 63, 64, 65, 1 << 31, 1 << 49, 1 << 50, 1 << 63, 10**30),
    *(0.5, 1e308, float("nan"), float("inf"), "", "x", "f32", "gemm", "é\0", "x" * 10000),
    *([], [[]], [1 << 40, 1 << 40], {}, {"": {}}),
]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values inside a JSON value."""
    found = [path]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found += places(item, (*path, key))
    return found


def put(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """The JSON value with one place changed."""
    if not path:
        return new
    value[path[0]] = put(value[path[0]], path[1:], new)
    return value


@given(edits=st.lists(st.tuples(positions, st.sampled_from(range(len(NASTY)))), min_size=1, max_size=2))
@settings(max_examples=30)
def test_any_value_anywhere_in_the_header_does_no_harm(small: bytes, edits: list[tuple[int, int]]) -> None:
    header, columns = split(small)
    for position, choice in edits:
        spots = places(header)
        header = put(header, spots[position % len(spots)], copy.deepcopy(NASTY[choice]))
    survives(joined(header, columns))


NUMBERS = st.sampled_from([(0, -1), (0, 0), (0, 1), (0, 2), (0, (1 << 31) - 1), (0, -(1 << 31))]) | st.tuples(
    st.just(1), st.integers(-3, 3)
)
"""A new number: (0, value), or (1, change)."""


@given(edits=st.lists(st.tuples(positions, NUMBERS), min_size=1, max_size=2))
@settings(max_examples=30)
def test_any_number_anywhere_in_the_columns_does_no_harm(
    small: bytes, edits: list[tuple[int, tuple[int, int]]]
) -> None:
    """What is still accepted also runs: one step, on every kind of fault the checks let pass."""
    header, columns = split(small)
    size = 4 * sum(header["columns"].values())
    numbers = np.frombuffer(columns[:size], "<i4").astype(np.int64)
    for position, (relative, value) in edits:
        numbers[position % len(numbers)] = numbers[position % len(numbers)] * relative + value
    numbers = numbers.clip(-(1 << 31), (1 << 31) - 1).astype("<i4")
    program = survives(joined(header, numbers.tobytes() + columns[size:]))
    if program is not None:
        train(program, 1, kernels="reference")


@pytest.fixture(scope="module")
def expected(small: bytes) -> list[Any]:
    """What the small program reports of its first step."""
    return [step.report for step in train(parse_program(small, "small.rtx"), 1, kernels="reference").done]


@given(engine=st.sampled_from(ENGINES), position=positions, seed=st.integers(0, 9))
@settings(max_examples=20)
def test_streams_in_any_order_are_refused_or_train_the_same(
    small: bytes, expected: list[Any], engine: Engine, position: int, seed: int
) -> None:
    program = parse_program(small, "small.rtx")
    held = program.stages[0].streams[engine]
    if len(held) > 1:
        swap_neighbours(held, position % (len(held) - 1))
    accepted = survives(program_bytes(program))
    if accepted is not None:
        run = train(accepted, 1, kernels="reference", interleave_seed=seed)
        assert [step.report for step in run.done] == expected

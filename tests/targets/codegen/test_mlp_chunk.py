"""Mlp blocks computed in chunks of rows: less scratch, nearly the same numbers, and steps that name rows are checked as such."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from attrs import evolve

from ratrain.ratrain_ir.model.blocks import block, parameters
from ratrain.targets.program.instruction import Access
from ratrain.targets.program.routine import Routine, Step, routine_from_json
from ratrain.targets.verifier.routine_verifier import routine_problem
from tests.end_to_end.tiny_runs import MODEL, losses, make_program, train

if TYPE_CHECKING:
    from ratrain.targets.program.routine import OnChipSchedule

ROWS = 20


def program_keys(**keys: Any) -> dict[str, Any]:
    """f32 everywhere, so that what differs is the order of sums, not the rounding of half floats."""
    return {"view_dtype": "f32", "grad_dtype": "f32", "grad_shard_dtype": "f32", **keys}


@pytest.mark.parametrize("name", ["ratrain", "full-save", "zb-h1"])
def test_chunks_change_only_the_order_of_sums(name: str) -> None:
    whole = losses(train(make_program(name=name, **program_keys()), 4))
    chunked = losses(train(make_program(name=name, **program_keys(mlp_chunk=7)), 4))
    np.testing.assert_allclose(chunked, whole, rtol=1e-6)
    assert losses(train(make_program(name=name, **program_keys(mlp_chunk=ROWS + 5)), 4)) == whole


def test_scratch_shrinks_with_the_chunk() -> None:
    def scratch(chunk: int | None) -> int:
        return routine("mlp.backward", chunk).workspace_bytes

    assert scratch(5) < scratch(10) < scratch(None) == scratch(ROWS)


def routine(key: str, chunk: int | None) -> Routine:
    """A routine of mlp blocks in a program whose mlp blocks work in chunks."""
    return next(item for item in make_program(mlp_chunk=chunk).routines if item.key == key)


def problem_of(found: Routine) -> str | None:
    """What the verifier says of a backward routine that writes a first gradient."""
    accesses = {
        formal.name: Access.WRITE if formal.name in ("dx", "g", "workspace") else Access.READ
        for formal in found.formals
    }
    return routine_problem(found, accesses, parameters(MODEL, block("mlp", 0)))


def test_routines_of_chunks_are_sound_and_survive_their_container() -> None:
    found = routine("mlp.backward", 7)
    assert problem_of(found) is None
    assert any("[14:20]" in reference for step in found.steps for reference in step.operands.values())
    schedules: dict[OnChipSchedule, int] = {}
    written = json.loads(json.dumps(found.to_json(schedules)))
    assert routine_from_json(written, tuple(schedules)) == found


def changed(found: Routine, position: int, name: str, reference: str) -> Routine:
    """The routine with another reference in one step."""
    steps = list(found.steps)
    step = steps[position]
    steps[position] = Step(step.kernel, step.operands | {name: reference}, step.options)
    return evolve(found, steps=tuple(steps))


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("dxn[7:21]", "has 20 rows"),
        ("dxn[14:14]", "has 20 rows"),
        ("dxn[14:19]", "does not give"),
        ("dxn[0:6]", "reads 'dxn' before anything is written to it"),
        ("dxn[x:9]", "does not name"),
    ],
)
def test_rows_are_checked(reference: str, words: str) -> None:
    found = routine("mlp.backward", 7)
    for position in [i for i, step in enumerate(found.steps) if step.operands.get("out") == "dxn[14:20]"]:
        found = changed(found, position, "out", reference)
    problem = problem_of(found)
    assert problem is not None
    assert words in problem


def test_a_chunk_left_out_is_found() -> None:
    found = routine("mlp.backward", 7)
    kept = tuple(step for step in found.steps if step.operands.get("out") != "dxn[7:14]")
    problem = problem_of(evolve(found, steps=kept))
    assert problem is not None
    assert "'dxn' before anything is written" in problem

"""Columns that are made of a program's columns are those of the ops that its instructions are lifted to."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ratrain.ratrain_ir.analysis.columns import StageColumns, stage_columns
from ratrain.ratrain_ir.support.diagnostics import Diagnostics
from ratrain.targets.program.lifted_columns import UnliftedError, lifted_columns
from ratrain.targets.program.lifting import lift
from ratrain.targets.program.rtx import parse_program, program_bytes
from tests.mutation.subjects import SUBJECTS


def numbers(column: object) -> list[int]:
    found: list[int] = np.asarray(column, np.int64).tolist()
    return found


def ended(columns: StageColumns) -> list[set[int]]:
    """Tensors that each op releases, in no order."""
    bounds = [0, *numbers(columns.ended_bounds)]
    found = numbers(columns.ended)
    return [set(found[start:stop]) for start, stop in itertools.pairwise(bounds)]


@pytest.mark.parametrize("name", SUBJECTS)
def test_columns_are_those_of_the_ops(name: str) -> None:
    program = parse_program(program_bytes(SUBJECTS[name].program()), "subject.rtx")
    columns, found = program.columns(), Diagnostics()
    try:
        made = [lifted_columns(program, columns, number).columns for number in range(columns.stages)]
    except UnliftedError:
        slices, homes = program.plan.slices, {form.home for form in columns.forms}
        keywords = {item.keyword for stage in program.stages for each in stage.streams.values() for item in each}
        assert slices or len(homes) > 1 or "peer_offload" in keywords
        return
    module = lift(program, found)
    assert not found.errors
    for stage, mine in zip(module.stages, made, strict=True):
        wanted = stage_columns(module, stage)
        for column in ("micro_batches", "bounds", "operands", "ended_bounds", "carried"):
            assert numbers(getattr(mine, column)) == numbers(getattr(wanted, column)), column
        assert ended(mine) == ended(wanted)
        # Kinds may be finer: what a routine computes, for example, is no part of an op.
        pairs = set(zip(numbers(mine.kinds), numbers(wanted.kinds), strict=True))
        assert len(pairs) == len(mine.examples)
        for one, other in pairs:
            assert type(mine.examples[one]) is type(wanted.examples[other])
        offsets = [tensor.offset for tensor in program.stages[stage.index].tensors]
        assert numbers(mine.starts) == offsets
        assert numbers(mine.stops) == [tensor.end for tensor in program.stages[stage.index].tensors]

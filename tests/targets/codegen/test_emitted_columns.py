"""Programs are emitted as columns: those that their instructions and tensors make when they are objects."""

from __future__ import annotations

import pytest

from ratrain import api
from ratrain.ratrain_ir.ops.base import ENGINES
from ratrain.targets.codegen.emitter import without_reuse
from ratrain.targets.program.rtx import program_bytes
from tests.mutation.subjects import SUBJECTS, copy_program


@pytest.mark.parametrize("name", list(SUBJECTS))
@pytest.mark.sampled(3)
def test_columns_are_those_of_the_objects(name: str) -> None:
    subject = SUBJECTS[name]
    module = subject.module()
    program = api.emit(module, machine=subject.machine)
    for emitted in (program, without_reuse(program, module)):
        as_emitted = program_bytes(emitted)
        assert program_bytes(copy_program(emitted)) == as_emitted


@pytest.mark.parametrize("name", list(SUBJECTS))
@pytest.mark.sampled(3)
def test_without_reuse_only_waits_differ(name: str) -> None:
    subject = SUBJECTS[name]
    module = subject.module()
    program = api.emit(module, machine=subject.machine)
    apart = without_reuse(program, module)
    fewer = 0
    for stage, other in zip(program.stages, apart.stages, strict=True):
        assert stage.tensors == other.tensors
        for engine in ENGINES:
            for one, two in zip(stage.streams[engine], other.streams[engine], strict=True):
                assert (one.title, one.operands, one.routine) == (two.title, two.operands, two.routine)
                fewer += one.waits != two.waits
    assert fewer

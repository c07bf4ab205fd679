"""What sweeps over numbers decide about mutants and generated modules is what visits of all ops decide.

Whole texts are proved both ways too, by one process and by two.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings

from ratrain import api
from ratrain.passes.manager import PassManager
from ratrain.ratrain_ir.config.types import Home
from ratrain.ratrain_ir.copying import copy_module
from ratrain.ratrain_ir.module import Level
from ratrain.ratrain_ir.ops.memory import MEMORY_OPS
from ratrain.ratrain_ir.ops.messages import OFFLOAD_OPS
from ratrain.ratrain_ir.process_pool import processes
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError, Diagnostics
from ratrain.ratrain_ir.support.loops import Allowance, at_any_size
from ratrain.ratrain_ir.testing.fake_target import FakeTarget
from ratrain.ratrain_ir.testing.strategies import cases, for_plan, pipelines
from ratrain.ratrain_ir.text.parser import parse_module
from ratrain.ratrain_ir.text.printer import print_module
from ratrain.ratrain_ir.verifier import symbolic_traces, verify
from ratrain.ratrain_ir.verifier.dataflow import SymbolicRun
from ratrain.ratrain_ir.verifier.reporter import Reporter
from ratrain.ratrain_ir.verifier.structure import check_structure
from ratrain.ratrainc.compiling import proving
from tests.mutation.subjects import SUBJECTS
from tests.mutation.table import OPERATORS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ratrain.ratrain_ir.module import Module
    from ratrain.targets.machine.machine import Machine
    from tests.mutation.subjects import Subject

EACH = 2
"""Mutants of an operator and a subject."""
PASSES = (("recompute", {"policy": ("full", "attention")}), ("insert-release", {}), ("allocate-ddr", {}))


def findings(module: Module) -> list[str]:
    found = Diagnostics()
    verify(module, found)
    return [item.render() for item in found.items]


def changed(subject: Subject, each: int) -> Iterator[tuple[str, Module]]:
    """The module, and mutants of it."""
    yield "unchanged", copy_module(subject.module())
    for operator in OPERATORS["module"].values():
        for number in range(each):
            module = copy_module(subject.module())
            change = operator.change(module, Random(f"{operator.name}/{subject.name}/{number}"))
            if change is not None:
                yield change, module


def dataflow_agrees(module: Module) -> tuple[int, int]:
    """Compare the sweep of each stage with the visits; how many stages the sweep found sound, and how many these."""
    found = Diagnostics()
    report = Reporter(module, found)
    check_structure(module, report, module.stages)
    swept = visited = 0
    for stage in module.stages if not found.errors else ():
        visits = Diagnostics()
        SymbolicRun(module, stage, Reporter(module, visits)).run()
        accepted = symbolic_traces.is_sound(module, stage, report.columns(stage))
        assert not (accepted and visits.items), visits.items[0].render()
        swept, visited = swept + accepted, visited + (not visits.items)
    return swept, visited


def is_swept(module: Module) -> bool:
    """Whether it is of the kind whose symbolic run is swept."""
    others = (*MEMORY_OPS, *OFFLOAD_OPS)
    return (
        module.level is not Level.DATAFLOW
        and not module.plan.slices
        and not any(isinstance(op, others) for stage in module.stages for op in stage.ops)
    )


def texts_agree(module: Module, machine: Machine, count: int) -> tuple[bool, bool]:
    """Compare the proof of a text as numbers, by so many processes, with that of the module in it; whether each found it sound."""
    text = print_module(module)
    with pytest.MonkeyPatch.context() as patch, processes(count, least_work=0):
        patch.setattr(proving, "ALLOWANCE", Allowance(0))
        proved = proving.proved_by_numbers(text.encode(), "<text>", machine)
    try:
        known = parse_module(text)
        api.check(known, machine=machine)
    except DiagnosticError:
        return proved is not None, False
    assert proved is None or proved[1] == sum(len(stage.ops) for stage in known.stages)
    return proved is not None, True


@pytest.mark.parametrize("name", SUBJECTS)
@pytest.mark.sampled(6)
def test_texts_of_mutants(name: str) -> None:
    subject = SUBJECTS[name]
    for number, (change, module) in enumerate(changed(subject, EACH)):
        proved, sound = texts_agree(module, subject.machine, 2 - number % 2)
        assert sound or not proved, change
        in_ddr = all(tensor.home is Home.DDR for stage in module.stages for tensor in stage.tensors.values())
        if is_swept(module) and module.level is Level.ALLOCATED and in_ddr:
            assert proved == sound, change


@pytest.mark.parametrize("name", SUBJECTS)
@pytest.mark.sampled(3)
def test_mutants(name: str) -> None:
    for change, module in changed(SUBJECTS[name], EACH):
        if not is_swept(module):
            continue
        swept, visited = dataflow_agrees(module)
        assert swept == visited, change
        expected = findings(module)
        with at_any_size():
            assert findings(module) == expected, change


@pytest.mark.parametrize("name", SUBJECTS)
@pytest.mark.sampled(6)
def test_stages_of_mutants_side_by_side(name: str) -> None:
    """Two processes, each of which looks at some stages, find what one finds, in its words."""
    for change, module in changed(SUBJECTS[name], 1):
        expected = findings(module)
        with processes(2, least_work=0):
            assert findings(module) == expected, change


@settings(max_examples=25)
@given(cases(max_slices=1), pipelines(PASSES))
def test_generated_modules(case, pipeline) -> None:
    module = PassManager(FakeTarget()).run(case.module(), for_plan(f"place-1f1b,{pipeline}".rstrip(","), case.plan))
    if is_swept(module):
        swept, visited = dataflow_agrees(module)
        assert swept == visited

"""What sweeps over numbers decide about mutants and generated modules is what visits of all ops decide."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings

from ratrain.passes.manager import PassManager
from ratrain.ratrain_ir.copying import copy_module
from ratrain.ratrain_ir.diagnostics import Diagnostics
from ratrain.ratrain_ir.loops import at_any_size
from ratrain.ratrain_ir.module import Level
from ratrain.ratrain_ir.ops import GUEST_OPS, MEMORY_OPS
from ratrain.ratrain_ir.testing.fake_target import FakeTarget
from ratrain.ratrain_ir.testing.strategies import cases, for_plan, pipelines
from ratrain.ratrain_ir.verifier import symbolic_traces, verify
from ratrain.ratrain_ir.verifier.dataflow import SymbolicRun
from ratrain.ratrain_ir.verifier.report import Reporter
from ratrain.ratrain_ir.verifier.structure import check_structure
from tests.mutation.subjects import SUBJECTS
from tests.mutation.table import OPERATORS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ratrain.ratrain_ir.module import Module
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
    check_structure(module, report)
    swept = visited = 0
    for stage in module.stages if not found.errors else ():
        visits = Diagnostics()
        SymbolicRun(module, stage, Reporter(module, visits)).run()
        accepted = symbolic_traces.is_sound(module, stage, symbolic_traces.numbered(stage, report))
        assert not (accepted and visits.items), visits.items[0].render()
        swept, visited = swept + accepted, visited + (not visits.items)
    return swept, visited


def is_swept(module: Module) -> bool:
    """Whether it is of the kind whose symbolic run is swept."""
    others = (*MEMORY_OPS, *GUEST_OPS)
    return (
        module.level is not Level.DATAFLOW
        and not module.plan.slices
        and not any(isinstance(op, others) for stage in module.stages for op in stage.ops)
    )


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


@settings(max_examples=25)
@given(cases(max_slices=1), pipelines(PASSES))
def test_generated_modules(case, pipeline) -> None:
    module = PassManager(FakeTarget()).run(case.module(), for_plan(f"place-1f1b,{pipeline}".rstrip(","), case.plan))
    if is_swept(module):
        swept, visited = dataflow_agrees(module)
        assert swept == visited

"""Notebook views of classes in lower layers, which cannot import the code that draws them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.support.notebook import DRAWN_BY

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module
    from ratrain.ratrainc.console.parts import Part
    from ratrain.ratrainc.validation.outcome import Validation
    from ratrain.targets.program.program import Program


def _module(module: Module) -> str:
    from ratrain.ratrainc.compiling.opening import machine_for
    from ratrain.ratrainc.console.parts import html_of
    from ratrain.ratrainc.report.summary_tables import module_parts

    return html_of(module_parts(module, machine_for(module, None)))


def _program(program: Program) -> str:
    from ratrain.ratrainc.console.parts import html_of

    return html_of(program_parts(program))


def program_parts(program: Program) -> Iterator[Part]:
    """Yield a table of the instructions of each stage and engine, and the capacity of a stage."""
    from ratrain.ratrainc.compiling.opening import machine_of
    from ratrain.ratrainc.console.console import capacity_text, size_text
    from ratrain.ratrainc.console.parts import TextTable

    rows = [
        [f"@{index}", *(str(len(stream)) for stream in stage.streams.values()), size_text(stage.arena_bytes)]
        for index, stage in enumerate(program.stages)
    ]
    engines = [engine.value for engine in program.stages[0].streams]
    title = (
        f"{program.name}: {program.topology.words}, {len(program.routines)} routines, for {machine_of(program).name}"
    )
    yield TextTable(title, ("stage, instructions", *engines, "arena"), rows)
    yield f"capacity of a stage: {capacity_text(program.capacity_bytes)}"


def _validation(validation: Validation) -> str:
    from ratrain.ratrainc.console.parts import html_of
    from ratrain.ratrainc.validation.validation_tables import validation_parts

    return html_of(validation_parts(validation))


def let_objects_show_themselves() -> None:
    """Register the functions that draw modules, programs and validations; `ratrain.api` calls this."""
    DRAWN_BY.update({"Module": _module, "Program": _program, "Validation": _validation})

"""The bytes of a step: who holds them, where they lie, and whether buffers find a place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.ratrainc.compiling.opening import load_schedule, machine_for
from ratrain.ratrainc.compiling.soundness import check as check_module
from ratrain.ratrainc.console.progress import OnProgress, unheard
from ratrain.ratrainc.memory.buffer_placing import Placing, place_buffers
from ratrain.ratrainc.report import address_map as drawing
from ratrain.ratrainc.report.byte_report import ByteReport, byte_report
from ratrain.ratrainc.report.timing import check_stage

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module
    from ratrain.ratrainc.report.svg import Picture
    from ratrain.targets.machine.machine import Machine


def explain(
    module: Module | str,
    *,
    machine: str | Machine | None = None,
    stage: int | None = None,
    levers: bool = True,
    seconds: float | None = None,
    progress: OnProgress | None = None,
) -> ByteReport:
    """Why each byte of a stage is where it is; by default of the stage with the highest peak.

    `module` is one, or a .rtir file. Levers are compiled, placed and simulated for about so many seconds; by default for as many
    as all of them take where that is a minute or less, else 8. Micro-batches are fewer where all of them whole would take longer than that,
    or than 8 by default. Raises `DiagnosticError` where the file is not sound.
    """
    if isinstance(module, str):
        module = load_schedule(module)
        check_module(module, machine=machine)
    check_stage(stage, len(module.stages))
    chosen = machine_for(module, machine)
    return byte_report(module, chosen, stage=stage, levers=levers, seconds=seconds, progress=progress or unheard)


def address_map(module: Module, stage: int | None = None) -> Picture:
    """What lies where in DDR in the course of a step, as a picture: of one stage, by default of that with the largest arena.

    Raises `DiagnosticError` RT071 where the module is not allocated yet.
    """
    check_stage(stage, len(module.stages))
    return drawing.address_map(module, stage)


def alloc(problem: str, capacity: int, *, seconds: float | None = None, progress: OnProgress | None = None) -> Placing:
    """Addresses for the buffers of a CSV file (id, lower, upper, size) in so many bytes of one memory.

    Without `seconds` the search is a fixed amount of work, about half a minute where the capacity is hard to reach. Raises
    `RefusedPlacingError`, a `DiagnosticError`, RT052 or RT053 where no placement was found, with what was.
    """
    return place_buffers(problem, capacity, seconds, progress or unheard)

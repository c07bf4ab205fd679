"""Functions about the bytes of a step: who holds them, where they lie, and how to place buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ratrain.ratrainc.compiling.opening import load_schedule, machine_for
from ratrain.ratrainc.compiling.soundness import check as check_module
from ratrain.ratrainc.console.progress import OnProgress, unheard
from ratrain.ratrainc.functions.timing import check_stage
from ratrain.ratrainc.memory.buffer_placing import Placing, place_buffers
from ratrain.ratrainc.report import address_map as drawing
from ratrain.ratrainc.report.byte_report import ByteReport, byte_report

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
    at_peak: Callable[[ByteReport], object] | None = None,
) -> ByteReport:
    """Explain why each byte of a stage is held at its peak; None takes the stage with the highest peak.

    `module` is a module or the path of a `.rtir` file. With `levers`, changes that free bytes are compiled, placed and
    simulated for about `seconds` seconds. By default there is time for all of them if that takes about a minute or
    less, estimates among them, and 8 seconds otherwise. If whole steps are expected to take longer than `seconds` (than
    8 by default), steps of fewer micro-batches are simulated where that saves much, and the results are called
    estimates. `at_peak` is called with
    the report without changes, before the first is tried. Raises `DiagnosticError` if the file is not sound.
    """
    if isinstance(module, str):
        module = load_schedule(module)
        check_module(module, machine=machine)
    check_stage(stage, len(module.stages))
    chosen = machine_for(module, machine)
    heard = progress or unheard
    return byte_report(module, chosen, stage=stage, levers=levers, seconds=seconds, progress=heard, at_peak=at_peak)


def address_map(module: Module, stage: int | None = None) -> Picture:
    """Draw the addresses of all tensors in DDR over a step; None takes the stage with the largest arena.

    Raises `DiagnosticError` RT071 if the module is not allocated yet.
    """
    check_stage(stage, len(module.stages))
    return drawing.address_map(module, stage)


def alloc(problem: str, capacity: int, *, seconds: float | None = None, progress: OnProgress | None = None) -> Placing:
    """Place the buffers of a CSV file (id, lower, upper, size) in one memory of `capacity` bytes.

    Without `seconds` the search does a fixed amount of work, about half a minute if the capacity is hard to reach.
    Raises `RefusedPlacingError`, a `DiagnosticError`: RT053 if no placement can fit, RT052 if none was found. It
    carries the best placement found.
    """
    return place_buffers(problem, capacity, seconds, progress or unheard)

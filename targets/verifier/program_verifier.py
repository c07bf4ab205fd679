"""Verifier of programs: a program must run to its end and compute one training step.

A sound container (`.rtx`) is assumed. The rules, in order; a fault stops the later ones:

0. The pipeline that the header names can have made the program (`ratrain.passes.pipeline_claim`): RT080.
1. Instructions are ops, with the operands that the model and the plan give them (`ratrain.targets.program.lifting`):
   RT080.
2. Routines name what exists, within bounds, and call kernels with operands that fit
   (`ratrain.targets.verifier.routine_verifier`). They are the ones that the header's model and plan give their ops
   (`ratrain.targets.codegen.derivation`): RT080.
3. The schedule that the program executes is sound: the lifted module passes `ratrain.ratrain_ir.verifier`, with the
   codes of that verifier, addresses included. Ops that call no routine have the workspace that the program's machine
   requires (`ratrain.targets.verifier.program_rules`): RT025, or RT065 if that machine is not known here.
4. The waits of the program let it end, with buffered and with rendezvous sends: RT042.
5. The waits suffice: no two instructions race, whatever the timing (`ratrain.targets.verifier.races`): RT081.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ratrain.passes.pipeline_claim import claim_problem
from ratrain.ratrain_ir.model.blocks import has_backward
from ratrain.ratrain_ir.model.checked_training import check_training
from ratrain.ratrain_ir.module import Level
from ratrain.ratrain_ir.ops.base import ENGINES, Engine
from ratrain.ratrain_ir.support.diagnostics import Diagnostics
from ratrain.ratrain_ir.support.gc import paused_gc
from ratrain.ratrain_ir.verifier import verify
from ratrain.ratrain_ir.verifier.memory import check_memory
from ratrain.ratrain_ir.verifier.reporter import Reporter
from ratrain.targets.program.columns import KEYWORD, ProgramColumns
from ratrain.targets.program.lifting import lift
from ratrain.targets.simulator.progress import check_progress
from ratrain.targets.verifier.program_proof import is_proved
from ratrain.targets.verifier.program_rules import check_workspace_of_others
from ratrain.targets.verifier.races import check_races
from ratrain.targets.verifier.routine_calls import RoutineCalls

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module
    from ratrain.targets.machine.machine import Machine
    from ratrain.targets.program.program import Program

_PASSES = {"forward": ("forward",), "backward": ("backward", "backward_input")}
"""Keywords of the instructions that each pass of a micro-batch has for each block."""
_SHOWN = 200
"""Most characters of a pipeline that a message shows."""


def check_program(program: Program, machine: Machine | None = None) -> None:
    """Raise `DiagnosticError` unless a program is sound; it holds all faults of the first rule that fails.

    The workspace of ops is checked for `machine`, or else for the machine that the program was compiled for: RT065 if
    that is unknown here.
    """
    diagnostics = Diagnostics()
    with paused_gc():
        columns = program.columns()
        _check_pipeline(program, diagnostics)
        _check_sizes(program, columns, diagnostics)
        diagnostics.check()
        if not is_proved(program, columns, machine):
            check_lifted(program, columns, machine, diagnostics)
        check_progress(columns, program.topology)
        check_races(program, diagnostics)
        diagnostics.check()


def check_lifted(program: Program, columns: ProgramColumns, machine: Machine | None, diagnostics: Diagnostics) -> None:
    """Raise `DiagnosticError` unless a program keeps the rules 1 to 3; its instructions are lifted op by op."""
    module = lift(program, diagnostics)
    diagnostics.check()
    for index in range(columns.stages):
        # The schedule rules read the list order; it must be one that the program's waits allow.
        if not columns.keeps_waits(index):
            diagnostics.error("RT080", f"the list order of stage @{index} stands against its waits")
    _check_routines(program, diagnostics)
    diagnostics.check()
    verify(module, diagnostics)
    diagnostics.check()
    # Lifted modules have no addresses yet, so `verify` checks them as placed ones; addresses follow.
    check_workspace_of_others(module, Reporter(module, diagnostics), machine)
    diagnostics.check()
    _check_addresses(program, module, diagnostics)
    diagnostics.check()


def _check_pipeline(program: Program, diagnostics: Diagnostics) -> None:
    """Report RT080 unless the passes that the header names can have made the program."""
    problem = claim_problem(program.pipeline, program.plan)
    if problem is not None:
        text = f"the header says that the pipeline '{program.pipeline[:_SHOWN]}' made it: {problem.message}"
        way_out = "compile it again; where a plugin has the pass, name its module with --plugin"
        diagnostics.error("RT080", text, help=problem.help or way_out)


def _check_sizes(program: Program, columns: ProgramColumns, diagnostics: Diagnostics) -> None:
    """Report RT030 unless the streams have as many passes as the plan.

    This rejects huge declared sizes before the rules below do work in proportion to them (denial of service). Raises
    RT064 where what trains does not fit the model.
    """
    check_training(program.model, program.plan)
    computes = columns.streams % len(ENGINES) == ENGINES.index(Engine.COMPUTE)
    stages = columns.streams // len(ENGINES)
    counts = {
        keyword: np.bincount(
            stages[computes & columns.where(columns.instructions[:, KEYWORD], *keywords)], minlength=columns.stages
        ).tolist()
        for keyword, keywords in _PASSES.items()
    }
    for index in range(len(program.stages)):
        owned = program.topology.stage_blocks[index]
        for keyword in _PASSES:
            count = counts[keyword][index]
            backward = keyword == "backward"
            blocks = [each for each in owned if not backward or has_backward(program.model, program.plan, each)]
            wanted = len(blocks) * program.plan.micro_batches * program.plan.shape.slices
            if count != wanted:
                text = f"stage @{index} has {count} {keyword} instructions; its {len(blocks)} blocks need {wanted}"
                diagnostics.error("RT030", text)


def _check_routines(program: Program, diagnostics: Diagnostics) -> None:
    """Report RT080 unless every call is of a routine that fits it, and every routine is called."""
    calls = RoutineCalls(program, diagnostics)
    for index, stage in enumerate(program.stages):
        for stream in stage.streams.values():
            for instruction in stream:
                calls.check(index, stage, instruction)
    for number, routine in enumerate(program.routines):
        if number not in calls.called:
            diagnostics.error("RT080", f"no instruction calls routine {routine.key}")


def _check_addresses(program: Program, module: Module, diagnostics: Diagnostics) -> None:
    """Report RT050 - RT052 about the lifted module, with the addresses of the program."""
    for source, stage in zip(program.stages, module.stages, strict=True):
        for tensor, placed in zip(stage.tensors.values(), source.tensors, strict=True):
            tensor.offset = placed.offset
    module.level = Level.ALLOCATED
    check_memory(module, Reporter(module, diagnostics), module.stages)

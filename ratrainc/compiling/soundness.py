"""Verification of modules, for the machine they were sized for or for another one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve

from ratrain.ratrain_ir.support.diagnostics import Diagnostics
from ratrain.ratrain_ir.support.gc import paused_gc
from ratrain.ratrain_ir.verifier import verify as verify_module
from ratrain.ratrain_ir.verifier.reporter import Reporter
from ratrain.ratrainc.compiling.opening import machine_for
from ratrain.targets.target import target_of

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module, TargetInfo
    from ratrain.ratrain_ir.target import Target
    from ratrain.targets.machine.machine import Machine


def check(module: Module, *, machine: str | Machine | None = None) -> None:
    """Raise `DiagnosticError` unless a module is sound, so that it can be emitted and run.

    A module that names a target is checked for that machine, or for the given one.
    """
    check_pipeline(module)
    diagnostics = Diagnostics()
    with paused_gc():
        there, target = on_machine(module, machine)
        verify_module(there, diagnostics, target)
    diagnostics.check()


def check_pipeline(module: Module) -> None:
    """Raise `DiagnosticError` unless the pipeline that a module names, if it names one, can have made it."""
    from ratrain.passes.pipeline_claim import claim_problem

    problem = claim_problem(module.pipeline, module.plan)
    if problem is not None:
        diagnostics = Diagnostics()
        text = f"the pipeline that the schedule names cannot have made it: {problem.message}"
        way_out = problem.help or "correct the line 'pipeline', or delete it"
        Reporter(module, diagnostics).at_header(problem.code, text, "pipeline", help=way_out)
        diagnostics.check()


def on_machine(module: Module, machine: str | Machine | None) -> tuple[Module, Target | None]:
    """Return the module to verify, with info on the machine it was sized for or on the given one, and the target.

    The target is None if the module names none. Raises `DiagnosticError` RT065 if the machine is not known here.
    """
    if module.target is None:
        return module, None
    chosen = machine_for(module, machine)
    return evolve(module, target=info_on(module, module.target, chosen)), target_of(chosen)


def info_on(module: Module, own: TargetInfo, machine: Machine) -> TargetInfo:
    """Return the target info of a module on a machine: its own info if it was made for that machine."""
    info = target_of(machine).info(module)
    if own.digest == info.digest:
        return own
    if not own.digest and own.name == info.name:  # a text that does not say more of its machine than the name
        return evolve(info, capacity_bytes=min(own.capacity_bytes, info.capacity_bytes))
    return info

"""Rules of a program on the machine that it was compiled for: workspace of ops that call no routine.

Routines prove the workspace of the ops that call them (`ratrain.targets.verifier.routine_verifier`). Collectives, and
updates that stream state, call none; only the machine knows how much they need.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.ops.compute import BlockOp, Release
from ratrain.ratrain_ir.verifier.workspace import check_stage_workspace
from ratrain.targets.machine.record import compiled_for
from ratrain.targets.target import MachineTarget, target_of

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module, Stage, TargetInfo
    from ratrain.ratrain_ir.verifier.reporter import Reporter
    from ratrain.targets.machine.machine import Machine


def check_workspace_of_others(module: Module, report: Reporter, machine: Machine | None = None) -> None:
    """Report RT025 unless every op that calls no routine has the workspace that its machine requires.

    `machine` replaces the program's machine if that is unknown here. Without it, raises `DiagnosticError` RT065 for an
    unknown machine, because nothing could be checked.
    """
    target = target_for(module, machine)
    for stage in module.stages:
        check_workspace_of_stage(module, stage, target, report)


def check_workspace_of_stage(module: Module, stage: Stage, target: MachineTarget, report: Reporter) -> None:
    """Report RT025 for every op of a stage that calls no routine and lacks the workspace that a target requires."""
    check_stage_workspace(module, stage, target, report, lambda op: not isinstance(op, BlockOp | Release))


def target_for(module: Module, machine: Machine | None) -> MachineTarget:
    """Return the target of `machine`, or else of the machine that a module names.

    Raises `DiagnosticError` RT065 if that is not known here.
    """
    assert module.target is not None
    return known_target(module.target) if machine is None else target_of(machine)


@lru_cache(maxsize=8)
def known_target(info: TargetInfo) -> MachineTarget:
    """Return the target of a program.

    Raises `DiagnosticError` RT065 if its machine is not known here.
    """
    return target_of(compiled_for(info))

"""Layer 5: what a target's routines ask of a module that was sized for it. Only a target knows, so it is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.ratrain_ir.analysis.columns import FoundError
from ratrain.ratrain_ir.ops.compute import Release
from ratrain.ratrain_ir.verifier.report import refuser

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ratrain.ratrain_ir.module import Module, Stage
    from ratrain.ratrain_ir.ops.base import Op
    from ratrain.ratrain_ir.target import Target
    from ratrain.ratrain_ir.verifier.report import Reporter


def check_workspace(module: Module, target: Target, report: Reporter, stages: Sequence[Stage]) -> None:
    """RT025: every op of some stages of a module that names a target has the workspace its routine needs there."""
    if module.target is None:
        return  # `legalise` is still to come
    for stage in stages:
        check_stage_workspace(module, stage, target, report, lambda op: type(op) is not Release)


def check_stage_workspace(
    module: Module, stage: Stage, target: Target, report: Reporter, wanted: Callable[[Op], bool]
) -> None:
    """RT025 of the ops of a stage that are `wanted`: of one op of each kind, then of all of the kinds that lack some."""
    columns, asked = report.columns(stage), refuser(module)
    lacking: set[int] = set()
    for kind, op in enumerate(columns.examples):
        try:
            if wanted(op):
                check_op_workspace(module, stage, op, target, asked)
        except FoundError:
            lacking.add(kind)
    for op in columns.ops_of(lacking):
        check_op_workspace(module, stage, op, target, report)


def check_op_workspace(module: Module, stage: Stage, op: Op, target: Target, report: Reporter) -> bool:
    """RT025: a schedule that was sized for another machine, or edited, may lack what a routine needs."""
    request = target.workspace(module, op)
    held = sum(tensor.type.nbytes for tensor in op.scratch)
    if request is None or held >= request.nbytes:
        return True
    text = f"'{op!r}' has {held} bytes of workspace; on {target.name} it needs {request.nbytes}"
    way_out = f"give it 'using' a workspace of {request.nbytes} bytes, or compile the model and the plan again for this machine"
    report.at_op("RT025", text, stage, op, help=way_out)
    return False

"""Layer 5: workspace that a target's routines need in a module that was sized for it; the target is asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.ratrain_ir.analysis.columns import FoundError
from ratrain.ratrain_ir.ops.compute import Release
from ratrain.ratrain_ir.verifier.reporter import refuser

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ratrain.ratrain_ir.module import Module, Stage
    from ratrain.ratrain_ir.ops.base import Op
    from ratrain.ratrain_ir.target import Target
    from ratrain.ratrain_ir.verifier.reporter import Reporter


def check_workspace(module: Module, target: Target, report: Reporter, stages: Sequence[Stage]) -> None:
    """Report RT025 unless every op of some stages has the workspace that its routine needs.

    A module that names no target has none to check.
    """
    if module.target is None:
        return  # the pass `legalise` has not run yet
    for stage in stages:
        check_stage_workspace(module, stage, target, report, lambda op: type(op) is not Release)


def check_stage_workspace(
    module: Module, stage: Stage, target: Target, report: Reporter, wanted: Callable[[Op], bool]
) -> None:
    """Report RT025 for `wanted` ops of a stage that lack workspace.

    One op of each kind is checked, then all ops of the kinds that lack some.
    """
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
    """Report RT025 if an op has less workspace than its routine needs; return True if it has enough.

    A schedule may lack some if it was edited, or sized for another machine.
    """
    request = target.workspace(module, op)
    held = sum(tensor.type.nbytes for tensor in op.scratch)
    if request is None or held >= request.nbytes:
        return True
    text = f"'{op!r}' has {held} bytes of workspace; on {target.name} it needs {request.nbytes}"
    way_out = (
        f"give it 'using' a workspace of {request.nbytes} bytes, or compile the model and the plan again "
        "for this machine"
    )
    report.at_op("RT025", text, stage, op, help=way_out)
    return False

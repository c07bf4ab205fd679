"""`insert-release`: marks where each tensor's life ends, right after its last accessor.

Step tensors end there; a carried tensor that is defined anew later in the step (a parameter view, gathered or written by the
update) ends after its last reader.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from attrs import frozen

from ratrain.passes.pass_base import Pass, PassContext
from ratrain.ratrain_ir.ops.compute import Release

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module, Stage
    from ratrain.ratrain_ir.ops.base import Op
    from ratrain.ratrain_ir.ops.tensor import Tensor


@frozen
class InsertReleasePass(Pass):
    """Add a release after the last use of every tensor that does not outlive the step."""

    name: ClassVar[str] = "insert-release"

    def run(self, module: Module, context: PassContext) -> None:
        """Rewrite every stage."""
        context.statistics["releases"] = sum(insert_releases(stage) for stage in module.stages)


def insert_releases(stage: Stage) -> int:
    """Add the releases of a stage that has none, in place; their number. A tensor that is defined again has several lives."""
    ending: dict[int, list[Tensor]] = {}
    last_access: dict[Tensor, int] = {}
    for position, op in enumerate(stage.ops):
        for tensor in op.writes:
            if tensor in last_access:  # a life ends before this one begins
                ending.setdefault(last_access[tensor], []).append(tensor)
            last_access[tensor] = position
        for tensor in op.reads + op.updates:
            last_access[tensor] = position
    for tensor, position in last_access.items():
        if not tensor.carried:
            ending.setdefault(position, []).append(tensor)
    ops: list[Op] = []
    for position, op in enumerate(stage.ops):
        ops.append(op)
        if position in ending:
            ops.append(Release(reads=tuple(ending[position])))
    stage.ops = ops
    return len(ending)

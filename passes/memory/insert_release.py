"""`insert-release`: marks the end of each tensor's life, right after its last accessor.

    %y = forward mlp.1 m0 (%x)   %z = forward attention.2 m0 (%y)   ...                        becomes
    %y = forward mlp.1 m0 (%x)   release %x   %z = forward attention.2 m0 (%y)   release %y   ...

Step tensors end there. A carried tensor that is redefined later in the step (a parameter view that is gathered, or
written by the update) ends after its last reader before that.
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
        """Add the releases to every stage."""
        context.statistics["releases"] = sum(insert_releases(stage) for stage in module.stages)


def insert_releases(stage: Stage) -> int:
    """Add the releases of a stage that has none, in place; return how many release ops were added.

    One op releases all tensors that end at the same place. A tensor that is defined again has several lives.
    """
    ending: dict[int, list[Tensor]] = {}
    last_access: dict[Tensor, int] = {}
    for position, op in enumerate(stage.ops):
        for tensor in op.writes:
            if tensor in last_access:  # redefined: its former life ends at the last access so far
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

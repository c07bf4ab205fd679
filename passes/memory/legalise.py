"""`legalise`: gives every op the workspace and the engine that the target's routines need.

    forward attention.1 m0 (...)   update attention.1 (...)                                    becomes
    forward attention.1 m0 (...) scratch %ws.KEY   update attention.1 (...) on the target's update engine

One workspace tensor serves all ops of a routine on a stage: they run one after another on their engine, and the tensor
is live only while one of them runs. The sizes are final: code generation works within them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from attrs import frozen

from ratrain.passes.pass_base import Fact, Pass, PassContext
from ratrain.passes.trial.trial import workspace_of
from ratrain.ratrain_ir.ops.compute import Update
from ratrain.ratrain_ir.ops.state_homes import engine_of_update

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module
    from ratrain.ratrain_ir.ops.base import Op
    from ratrain.ratrain_ir.ops.tensor import Tensor, Tensors


@frozen
class LegalisePass(Pass):
    """Attach the target's workspace to ops and put updates on the engine the machine has for them."""

    name: ClassVar[str] = "legalise"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.PLACED, Fact.RELEASED})
    forbids: ClassVar[frozenset[Fact]] = frozenset({Fact.LEGALISED, Fact.ALLOCATED})

    def run(self, module: Module, context: PassContext) -> None:
        """Set the workspace of every op, the engine of every update, and the module's target."""
        target = context.target
        largest = 0
        workspaces: list[tuple[Op, Tensors]] = []
        for stage in module.stages:
            made: dict[str, Tensor] = {}
            forms = context.forms()
            requests = ((op, context.workspace(module, stage, op, forms)) for op in stage.ops)
            workspaces += [(op, workspace_of(stage, request, made)) for op, request in requests]
            for tensor in made.values():
                stage.add(tensor)
            largest = max(largest, *(t.type.nbytes for t in made.values()), 0)
        for op, workspace in workspaces:  # no op is changed before the target has answered for all
            op.scratch = workspace
            if type(op) is Update:
                op.placement = engine_of_update(op, target.update_engine)
        module.target = target.info(module)
        context.statistics["largest workspace bytes"] = largest

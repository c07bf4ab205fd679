"""A target with made-up but plausible numbers: enough for passes, no machine behind it."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING

from attrs import frozen

from ratrain.ratrain_ir.config.types import Home
from ratrain.ratrain_ir.module import TargetInfo
from ratrain.ratrain_ir.ops.base import Engine
from ratrain.ratrain_ir.ops.collectives import AllGather, AllReduce, ReduceScatter
from ratrain.ratrain_ir.ops.compute import BlockOp, Update
from ratrain.ratrain_ir.ops.messages import Recv, Send
from ratrain.ratrain_ir.target import Capacity, WorkspaceRequest

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module, Stage
    from ratrain.ratrain_ir.ops.base import Op

_WORKSPACE_ROWS = 3
"""Rows of an op's largest operand that its workspace holds, where it has one: any number that is not a round one."""


@frozen
class FakeTarget:
    """Implements `ratrain.ratrain_ir.target.Target`. Block ops and collectives need workspace, some of it shared between engines' ops.

    Workspace depends on the routine (kind of op and of block) and on the types of its operands only, as a target's must.
    """

    capacity_bytes: int = 1 << 40
    update_engine: Engine = Engine.COMPUTE
    name: str = "fake"
    seconds_per_byte: float = 1e-9
    machine: str = ""
    """any text: what modules carry of this target"""
    stores: tuple[tuple[Home, int], ...] = ()
    """other memories, and the bytes of each"""

    def capacity(self, module: Module) -> Capacity:
        """As many bytes for every module; nothing takes any of them."""
        del module
        return Capacity(self.capacity_bytes)

    def info(self, module: Module) -> TargetInfo:
        """Name and capacity; the text, and a digest of it, where there is one."""
        del module
        digest = sha256(self.machine.encode()).hexdigest() if self.machine else ""
        return TargetInfo(self.name, self.capacity_bytes, digest, self.machine, self.stores)

    def workspace(self, module: Module, op: Op) -> WorkspaceRequest | None:
        """Scratch of a few rows of the largest operand; none for messages, inputs and scalars."""
        del module
        if isinstance(op, BlockOp):
            blocks: tuple[object, ...] = (op.block.kind,)
        elif isinstance(op, ReduceScatter | AllReduce | AllGather):
            blocks = op.blocks
        else:
            return None
        largest = max(tensor.type.nbytes for tensor in op.reads + op.writes + op.updates)
        parts = (op.keyword, *blocks, str(largest))
        return WorkspaceRequest("-".join(str(part).replace(".", "-") for part in parts), largest // 2 + _WORKSPACE_ROWS)

    def op_seconds(self, module: Module, stage: Stage, op: Op) -> float:
        """Seconds proportional to the bytes an op touches beside its workspace; block ops count ten times, updates and messages once."""
        del module, stage
        factor = 10.0 if isinstance(op, BlockOp) else 1.0
        touched = sum(tensor.type.nbytes for tensor in dict.fromkeys(op.reads + op.writes + op.updates))
        latency = 1e-6 if isinstance(op, Send | Recv | Update | AllGather) else 0.0
        return latency + factor * touched * self.seconds_per_byte

    def step_seconds(self, module: Module) -> float:
        """Seconds of the stage whose compute engine has most to do."""
        return max(
            sum(self.op_seconds(module, stage, op) for op in stage.ops if op.engine is Engine.COMPUTE)
            for stage in module.stages
        )

"""A target with made-up but plausible numbers: sufficient for passes, without a machine."""

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
"""Bytes that a workspace has in addition to half of the largest operand, so that its size is not a round number."""


@frozen
class FakeTarget:
    """Implementation of `ratrain.ratrain_ir.target.Target` for tests.

    Block ops and collectives on whole tensors need workspace, some of which ops of several engines share. As the
    interface demands, workspace depends only on the routine (kind of op and of block) and on the types of its operands.
    """

    capacity_bytes: int = 1 << 40
    update_engine: Engine = Engine.COMPUTE
    name: str = "fake"
    seconds_per_byte: float = 1e-9
    machine: str = ""
    """any text; modules carry it in place of a machine file"""
    stores: tuple[tuple[Home, int], ...] = ()
    """other memories and their bytes"""

    def capacity(self, module: Module) -> Capacity:
        """Return the capacity: `capacity_bytes` for every module, all of it available."""
        del module
        return Capacity(self.capacity_bytes)

    def info(self, module: Module) -> TargetInfo:
        """Return name, capacity, other memories, and `machine` with its digest (empty if there is none)."""
        del module
        digest = sha256(self.machine.encode()).hexdigest() if self.machine else ""
        return TargetInfo(self.name, self.capacity_bytes, digest, self.machine, self.stores)

    def workspace(self, module: Module, op: Op) -> WorkspaceRequest | None:
        """Return workspace of about half the largest operand; None for messages, inputs, updates and scalars."""
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
        """Return seconds proportional to the bytes of an op's operands, without its workspace.

        Block ops take ten times as long for a byte. Messages, updates and gathers take a microsecond more.
        """
        del module, stage
        factor = 10.0 if isinstance(op, BlockOp) else 1.0
        touched = sum(tensor.type.nbytes for tensor in dict.fromkeys(op.reads + op.writes + op.updates))
        latency = 1e-6 if isinstance(op, Send | Recv | Update | AllGather) else 0.0
        return latency + factor * touched * self.seconds_per_byte

    def step_seconds(self, module: Module) -> float:
        """Return the largest total of compute seconds of any stage."""
        return max(
            sum(self.op_seconds(module, stage, op) for op in stage.ops if op.engine is Engine.COMPUTE)
            for stage in module.stages
        )
